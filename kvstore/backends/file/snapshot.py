"""Snapshots of the index: so that a restart knows its blocks at once, and what was used last.

A hint, never the truth: a scan of the files confirms or corrects what a snapshot says.

Format, little-endian: magic ``KVSNAP01`` (8), namespace digest (32), time of writing (f64), number of groups (u32); per
group of keys of one length: key length (u32), count (u64), the keys one after the other, charges (u64 each), last uses
(f64 each), places in the order of eviction (u64 each); xxh3-128 of all of this (16).
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import xxhash

from kvstore.backends.file.layout import is_key, snapshot_name
from kvstore.backends.file.statefile import publish_file, read_file
from kvstore.diskio import OsDisk
from kvstore.types import KEY_BYTES_MAX, BlockKey

__all__ = ["SnapshotBlock", "decode_snapshot", "encode_snapshot", "read_snapshot", "write_snapshot"]

SnapshotBlock: TypeAlias = tuple[BlockKey, int, float]
"""Key, charge in bytes, last use in seconds since the epoch."""

_MAGIC: Final = b"KVSNAP01"
_HEADER: Final = struct.Struct("<8s32sdI")
_GROUP: Final = struct.Struct("<IQ")
_CHECKSUM_BYTES: Final = 16
_SNAPSHOT_BYTES_MAX: Final = 2 * 1024**3
"""Larger ones are not read: some 25 million blocks, where scanning the files costs as much as anything else."""


def encode_snapshot(digest: bytes, blocks: Sequence[SnapshotBlock], written_at: float) -> bytes:
    """Return the bytes of a snapshot of these blocks, coldest first."""
    groups: dict[int, list[int]] = {}
    for place, (key, _, _) in enumerate(blocks):
        groups.setdefault(len(key), []).append(place)
    parts = [_HEADER.pack(_MAGIC, digest, written_at, len(groups))]
    for length, places in sorted(groups.items()):
        parts.append(_GROUP.pack(length, len(places)))
        parts.extend(blocks[place][0] for place in places)
        parts.append(np.array([blocks[place][1] for place in places], "<u8").tobytes())
        parts.append(np.array([blocks[place][2] for place in places], "<f8").tobytes())
        parts.append(np.array(places, "<u8").tobytes())
    body = b"".join(parts)
    return body + xxhash.xxh3_128_digest(body)


def decode_snapshot(digest: bytes, content: bytes | bytearray) -> list[SnapshotBlock]:
    """Return the blocks of a snapshot, coldest first.

    Raises:
        ValueError: It is damaged, of another format, or of another namespace.
    """
    view = memoryview(content)
    if len(view) < _HEADER.size + _CHECKSUM_BYTES:
        raise ValueError("too short")
    body, checksum = view[:-_CHECKSUM_BYTES], bytes(view[-_CHECKSUM_BYTES:])
    if xxhash.xxh3_128_digest(body) != checksum:
        raise ValueError("wrong checksum")
    magic, found_digest, _, group_count = _HEADER.unpack_from(body)
    if magic != _MAGIC or found_digest != digest:
        raise ValueError("of another format or namespace")
    blocks: list[SnapshotBlock] = []
    places: list[int] = []
    at = _HEADER.size
    for _ in range(group_count):
        at = _decode_group(body, at, blocks, places)
    if len(set(places)) != len(places):
        raise ValueError("two blocks in one place")
    order = sorted(range(len(blocks)), key=places.__getitem__)
    return [blocks[index] for index in order]


def read_snapshot(disk: OsDisk, state_fd: int, namespace_hex: str) -> list[SnapshotBlock]:
    """Return the blocks that the last snapshot of a namespace names; none if there is no (good) one."""
    try:
        content = read_file(disk, snapshot_name(namespace_hex), state_fd, _SNAPSHOT_BYTES_MAX)
        return decode_snapshot(bytes.fromhex(namespace_hex), content) if content is not None else []
    except (OSError, ValueError):
        # Nothing is lost but time: the scan finds what is there.
        return []


def write_snapshot(disk: OsDisk, state_fd: int, namespace_hex: str, blocks: Sequence[SnapshotBlock], tmp: str) -> None:
    """Replace the snapshot of a namespace.

    Raises:
        OSError: It could not be written; the last one is still there.
    """
    content = encode_snapshot(bytes.fromhex(namespace_hex), blocks, time.time())
    publish_file(disk, snapshot_name(namespace_hex), state_fd, content, tmp=tmp, replace=True)


def _decode_group(body: memoryview, at: int, blocks: list[SnapshotBlock], places: list[int]) -> int:
    """Append a group's blocks and their places; return where the next one begins."""
    if at + _GROUP.size > len(body):
        raise ValueError("a group is cut off")
    length, count = _GROUP.unpack_from(body, at)
    at += _GROUP.size
    if not is_key(bytes(min(length, KEY_BYTES_MAX + 1))) or count * (length + 24) > len(body) - at:
        raise ValueError("a group has impossible lengths")
    keys = bytes(body[at : at + count * length])
    at += count * length
    columns = []
    for dtype in ("<u8", "<f8", "<u8"):
        columns.append(np.frombuffer(body, dtype, count, at).tolist())
        at += count * 8
    starts = itertools.count(0, length)
    blocks.extend(
        (keys[start : start + length], size, used_at)
        for start, size, used_at in zip(starts, columns[0], columns[1], strict=False)
    )
    places.extend(columns[2])
    return at
