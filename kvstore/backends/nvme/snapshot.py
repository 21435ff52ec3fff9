"""Snapshots of a table: so that a restart knows its blocks at once, and which of them were used last.

A snapshot is the whole truth only where the superblock says that the slab was closed with it; otherwise it is a hint
that the scan of the slots corrects.

Format, little-endian: magic (8), version (u32), key width (u32), slab id (16), epoch (u64), number of rows (u64),
number of namespaces (u32), zero (u32); the namespace digests (32 each, the first is the writer's own); the slots (u32
each), least recently used first; their rows (``table.row_type``); xxh3-128 of all of this (16).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.backends.nvme.layout import SNAPSHOT_NAME
from kvstore.backends.nvme.table import Rows, row_type
from kvstore.diskio import OsDisk, read_into, write_all
from kvstore.types import KEY_BYTES_MAX

__all__ = ["Snapshot", "read_snapshot", "write_snapshot"]

_MAGIC: Final = b"\x89kvsnap\n"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sII16sQQII")
_CHECKSUM_BYTES: Final = 16
_TMP_NAME: Final = SNAPSHOT_NAME + ".tmp"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Rows of a table.

    Attributes:
        slab_id: Of which slab.
        epoch: Epoch of the slab when it was written.
        namespaces: Digests by number.
        slots: Occupied slots, least recently used first.
        rows: Their rows.
    """

    slab_id: bytes
    epoch: int
    namespaces: Sequence[bytes]
    slots: npt.NDArray[np.uint32]
    rows: Rows


def write_snapshot(disk: OsDisk, dir_fd: int, snapshot: Snapshot) -> None:
    """Replace the snapshot of a slab.

    Raises:
        OSError: It could not be written; the last one is still there.
    """
    header = _HEADER.pack(
        _MAGIC,
        _VERSION,
        snapshot.rows.dtype["key"].itemsize,
        snapshot.slab_id,
        snapshot.epoch,
        len(snapshot.rows),
        len(snapshot.namespaces),
        0,
    )
    names = memoryview(b"".join(snapshot.namespaces))
    parts = [memoryview(header), names, _bytes_of(snapshot.slots.astype("<u4")), _bytes_of(snapshot.rows)]
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    buffers = [part for part in (*parts, memoryview(digest.digest())) if len(part)]
    fd = disk.open_file(_TMP_NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, dir_fd)
    try:
        write_all(disk, fd, buffers)
    finally:
        disk.close(fd)
    disk.rename(_TMP_NAME, SNAPSHOT_NAME, dir_fd, dir_fd)


def read_snapshot(disk: OsDisk, dir_fd: int, slab_id: bytes, slots: int) -> Snapshot | None:
    """Return the last snapshot of a slab, without what lies beyond its last slot; None if there is no good one."""
    try:
        fd = disk.open_file(SNAPSHOT_NAME, os.O_RDONLY, dir_fd)
        try:
            content = np.empty(disk.fstat(fd).st_size, np.uint8)
            if read_into(disk, fd, [content.data], len(content)) != len(content):
                return None
        finally:
            disk.close(fd)
        return _decode(content, slab_id, slots)
    except (OSError, ValueError, MemoryError):
        # Nothing is lost but time: the scan finds what is there.
        return None


def _decode(content: npt.NDArray[np.uint8], slab_id: bytes, slots: int) -> Snapshot | None:
    view = content.data
    if len(view) < _HEADER.size + _CHECKSUM_BYTES:
        return None
    magic, version, width, found_id, epoch, count, namespace_count, _ = _HEADER.unpack_from(view)
    if magic != _MAGIC or version != _VERSION or found_id != slab_id or not 0 < width <= KEY_BYTES_MAX:
        return None
    rows_type = row_type(width)
    starts = [_HEADER.size, _HEADER.size + 32 * namespace_count]
    starts += [starts[1] + 4 * count]
    end = starts[2] + rows_type.itemsize * count
    if end + _CHECKSUM_BYTES != len(view) or xxhash.xxh3_128_digest(view[:end]) != bytes(view[end:]):
        return None
    digests = bytes(view[starts[0] : starts[1]])
    found_slots = np.frombuffer(view, "<u4", count, starts[1])
    rows = np.frombuffer(view, rows_type, count, starts[2])
    good = found_slots < slots
    if not good.all():
        found_slots, rows = found_slots[good], rows[good]
    seen = np.zeros(slots, bool)
    seen[found_slots] = True
    if np.count_nonzero(seen) != len(rows) or not (rows["namespace"] < namespace_count).all():
        return None
    namespaces = [digests[i : i + 32] for i in range(0, len(digests), 32)]
    return Snapshot(slab_id, epoch, namespaces, found_slots, rows)


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data if len(array) else memoryview(b"")
