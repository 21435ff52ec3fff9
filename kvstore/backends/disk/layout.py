"""The on-disk format: names, slots, journal frames. Converts between bytes and values; no I/O.

``docs/disk.md`` describes it. All numbers are little-endian.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.codec.record import HEADER_BYTES
from kvstore.types import KEY_BYTES_MAX, BlockKey

FORMAT: Final = 2
"""Version of the whole format; version 1 had one file per block."""

PAGE: Final = 4096
"""Alignment unit in a segment; every filesystem accepts it for direct I/O."""

OWNER_SHIFT: Final = 40
SLOT_MASK: Final = (1 << OWNER_SHIFT) - 1
"""A place is a slot in the lower bits, and the number of the owner above them: 0 for this engine."""

STATE_DIR: Final = ".kvstore"
LOCK_NAME: Final = "lock"
INDEX_NAME: Final = "index"
INDEX_TMP_NAME: Final = "index.tmp"
INDEX_NUMBER: Final = 0
"""Journal number of a snapshot, which lists all slots and ends with the number of the next journal."""
USES_NAME: Final = "uses"
_SEGMENT_NAME: Final = re.compile(r"(\d{6})\.seg", re.ASCII)
_JOURNAL_NAME: Final = re.compile(r"journal\.(\d{8})", re.ASCII)
is_namespace: Final = re.compile(r"[0-9a-f]{64}", re.ASCII).fullmatch
is_owner: Final = re.compile(r"[0-9a-f]{16}", re.ASCII).fullmatch

_SLOT_MAGIC: Final = b"\x89kvslot2"
_JOURNAL_MAGIC: Final = b"\x89kvjrnl\n"
_FRAME_MAGIC: Final = 0x6D72664B

_DESCRIPTOR: Final = struct.Struct("<8sQQQH6x32s64s")
"""Magic, owner, slot, record length, key length, namespace digest, key; xxh3-64 of the page up to here follows."""
_IDENTITY: Final = struct.Struct("<H6x32s64s")
"""The last fields of a descriptor: the block that it names."""
_CHECKSUM: Final = struct.Struct("<Q")
_DESCRIPTOR_END: Final = HEADER_BYTES + _DESCRIPTOR.size
_IDENTITY_AT: Final = _DESCRIPTOR_END - _IDENTITY.size

_JOURNAL_HEADER: Final = struct.Struct("<8sIIQQII32s")
"""Magic, format, journal number, owner, slot length, slots per segment, paths, namespace."""
JOURNAL_HEADER_BYTES: Final = _JOURNAL_HEADER.size + _CHECKSUM.size
_FRAME: Final = struct.Struct("<IIQQ")
"""Magic, number of records, sequence number, xxh3-64 of all this and the records, seeded with owner and journal."""
FRAME_BYTES: Final = _FRAME.size

RECORD: Final = np.dtype(
    {
        "names": ["kind", "key_length", "age", "slot", "size", "digest", "key"],
        "formats": ["u1", "u1", "u1", "<u4", "<u4", "<u8", f"V{KEY_BYTES_MAX}"],
        "offsets": [0, 1, 2, 4, 8, 16, 24],
        "itemsize": 24 + KEY_BYTES_MAX,
    }
)
"""One record of a journal; ``age`` is set only in snapshots, and is the age in the index plus one."""
_RECORD_PACK: Final = struct.Struct(f"<BBxxII4xQ{KEY_BYTES_MAX}s")

_FRAME_RECORDS_MAX: Final = 1 << 20
_PATHS_MAX: Final = 255
"""Columns hold the path number plus one in one byte; 0 means that the segment does not exist."""
_MASK: Final = (1 << 64) - 1


class Kind:
    """Kinds of journal records; in records about a segment, ``slot`` is the segment's first slot."""

    ADD: Final = 1
    REMOVE: Final = 2
    BAD: Final = 3
    """The slot is out of use: a record there was damaged."""
    SEGMENT: Final = 4
    """A segment was made; ``size`` is the number of its path."""
    DROP: Final = 5
    """A segment was given up."""
    NEXT: Final = 6
    """This journal ends here; ``slot`` is the number of the next one."""
    UNSURE: Final = 7
    """Earlier records were lost: slots without a later record have to be scanned."""
    SURE: Final = 8
    """That scan has ended."""


Row: TypeAlias = tuple[int, int, int, int, BlockKey]
"""A record to write: kind, slot, size, digest, key."""

digest_of: Final[Callable[[BlockKey], int]] = xxhash.xxh3_64_intdigest
"""The 64-bit digest of a key; a collision causes a miss, never a wrong block."""


class Geometry(NamedTuple):
    """Sizes of an owner's segments."""

    slot_bytes: int  # Length of a slot: a header page and the payload in whole pages.
    segment_slots: int
    paths: int  # Number of roots; segment ``n`` lies on root ``n % paths``.

    @property
    def segment_bytes(self) -> int:
        """Length of a segment."""
        return self.slot_bytes * self.segment_slots

    def offset_of(self, slot: int) -> int:
        """Return the offset of a slot in its segment."""
        return slot % self.segment_slots * self.slot_bytes


class Descriptor(NamedTuple):
    """The record in a slot, as described by its header page."""

    owner: int
    slot: int
    record_bytes: int
    namespace_digest: bytes
    key: BlockKey


class Frames(NamedTuple):
    """The whole frames in a part of a journal: records, length, and sequence number of the next frame."""

    records: npt.NDArray[Any]
    size_bytes: int
    sequence: int

    @property
    def next_journal(self) -> int:
        """Number of the next journal; 0 if this one has not ended."""
        last = self.records[-1] if len(self.records) else None
        return int(last["slot"]) if last is not None and last["kind"] == Kind.NEXT else 0


def segment_name(number: int) -> str:
    return f"{number:06d}.seg"


def segment_number(name: str) -> int | None:
    """Return the number of the segment with this name; None for any other name."""
    return int(match[1]) if (match := _SEGMENT_NAME.fullmatch(name)) else None


def journal_name(number: int) -> str:
    return f"journal.{number:08d}"


def journal_number(name: str) -> int | None:
    """Return the number of the journal with this name; None for any other name."""
    return int(match[1]) if (match := _JOURNAL_NAME.fullmatch(name)) else None


def encode_descriptor(page: memoryview, owner: int, slot: int, record_bytes: int, digest: bytes, key: BlockKey) -> None:
    """Write a descriptor into a header page that already contains the record's header."""
    _DESCRIPTOR.pack_into(page, HEADER_BYTES, _SLOT_MAGIC, owner, slot, record_bytes, len(key), digest, key)
    _CHECKSUM.pack_into(page, _DESCRIPTOR_END, xxhash.xxh3_64_intdigest(page[:_DESCRIPTOR_END]))


def names_block(page: memoryview, digest: bytes, key: BlockKey) -> bool:
    """Return whether a header page names this block. The checksum is not verified."""
    return _IDENTITY.unpack_from(page, _IDENTITY_AT) == (len(key), digest, key.ljust(KEY_BYTES_MAX, b"\0"))


def decode_descriptor(page: memoryview) -> Descriptor | None:
    """Return the descriptor in a header page; None if there is none, or it or the record's header is damaged."""
    magic, owner, slot, size, key_length, digest, key = _DESCRIPTOR.unpack_from(page, HEADER_BYTES)
    if magic != _SLOT_MAGIC or not 0 < key_length <= KEY_BYTES_MAX:
        return None
    (checksum,) = _CHECKSUM.unpack_from(page, _DESCRIPTOR_END)
    if checksum != xxhash.xxh3_64_intdigest(page[:_DESCRIPTOR_END]):
        return None
    return Descriptor(owner, slot, size, digest, key[:key_length])


def encode_journal_header(number: int, owner: int, geometry: Geometry, digest: bytes) -> bytes:
    body = _JOURNAL_HEADER.pack(
        _JOURNAL_MAGIC, FORMAT, number, owner, geometry.slot_bytes, geometry.segment_slots, geometry.paths,
        digest,
    )  # fmt: skip
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def decode_journal_header(content: bytes, number: int, owner: int, digest: bytes) -> Geometry | None:
    """Return the geometry; None if the header is damaged, or of another format, journal, owner or namespace."""
    if len(content) < JOURNAL_HEADER_BYTES:
        return None
    magic, version, found, by, slot_bytes, slots, paths, namespace = _JOURNAL_HEADER.unpack_from(content)
    (checksum,) = _CHECKSUM.unpack_from(content, _JOURNAL_HEADER.size)
    if checksum != xxhash.xxh3_64_intdigest(content[: _JOURNAL_HEADER.size]) or magic != _JOURNAL_MAGIC:
        return None
    if (version, found, by, namespace) != (FORMAT, number, owner, digest) or slot_bytes <= PAGE or slot_bytes % PAGE:
        return None
    if not slots or not paths or slots * slot_bytes > 1 << 40:
        return None
    return Geometry(slot_bytes, slots, paths)


def records_of(rows: Sequence[Row]) -> bytes:
    """Return records as the bytes in a frame."""
    pack = _RECORD_PACK.pack
    return b"".join([pack(kind, len(key), slot, size, digest, key) for kind, slot, size, digest, key in rows])


def encode_frame(records: bytes, sequence: int, owner: int, number: int) -> bytes:
    """Return a frame of records."""
    count = len(records) // RECORD.itemsize
    return _FRAME.pack(_FRAME_MAGIC, count, sequence, _frame_sum(count, sequence, records, owner, number)) + records


def read_frames(content: memoryview, owner: int, number: int, sequence: int) -> Frames:
    """Return the records of all whole frames at the start of ``content``.

    The first frame that is torn, damaged, out of order or of another journal ends the read; the rest is ignored.
    """
    found: list[memoryview] = []
    at = 0
    while at + FRAME_BYTES <= len(content):
        magic, count, numbered, checksum = _FRAME.unpack_from(content, at)
        end = at + FRAME_BYTES + count * RECORD.itemsize
        if magic != _FRAME_MAGIC or numbered != sequence or count > _FRAME_RECORDS_MAX or end > len(content):
            break
        records = content[at + FRAME_BYTES : end]
        if checksum != _frame_sum(count, numbered, records, owner, number):
            break
        # Records out of range are refused even if the checksum is right.
        rows = np.frombuffer(records, RECORD)
        paths = rows["size"][rows["kind"] == Kind.SEGMENT]
        if (rows["key_length"] > KEY_BYTES_MAX).any() or (paths >= _PATHS_MAX).any():
            break
        found.append(records)
        at, sequence = end, sequence + 1
    return Frames(np.frombuffer(b"".join(found), RECORD), at, sequence)


def _frame_sum(count: int, sequence: int, records: bytes | memoryview, owner: int, number: int) -> int:
    state = xxhash.xxh3_64(seed=(owner + number) & _MASK)
    state.update(_FRAME.pack(_FRAME_MAGIC, count, sequence, 0))
    state.update(records)
    return int(state.intdigest())
