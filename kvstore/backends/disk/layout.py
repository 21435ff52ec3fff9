"""The on-disk format of a table: head, generations of groups of rows, rows. No I/O.

A table describes the slots of one segment. Rows are written in place. A row counts only if its checksum holds, so a
torn row is a free slot. ``docs/format.md`` describes the format. All numbers are little-endian.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.codec.record import HEADER_BYTES
from kvstore.types import KEY_BYTES_MAX, BlockKey

FORMAT: Final = 3
"""Version of the whole format; version 2 had a journal for each engine."""

STATE_DIR: Final = ".kvstore"
"""Directory of a root with the files that concern all namespaces."""

LAYOUT_NAME: Final = "disk.json"
"""File of a root that states the format."""

PAGE: Final = 4096
"""Alignment unit in a segment; every filesystem accepts it for direct I/O."""

GROUP_ROWS: Final = 64
"""Rows that share a generation: readers of a table with a few changes read a few groups."""

SLOTS_MAX: Final = 1 << 24
"""Most slots of a segment. A larger number in a head is damage, and would exhaust memory."""

_SEGMENT_BYTES_MAX: Final = 1 << 40
_TABLE_NAME: Final = re.compile(r"(\d{6})\.tab", re.ASCII)
is_segment: Final = re.compile(r"\d{6}\.seg", re.ASCII).fullmatch
is_namespace: Final = re.compile(r"[0-9a-f]{64}", re.ASCII).fullmatch
_MAGIC: Final = b"\x89kvtabl\n"
_HEAD: Final = struct.Struct("<8sIIQQ32s")
"""Magic, format, number of slots, identity of the segment, slot length, namespace; xxh3-64 of all this follows."""
_CHECKSUM: Final = struct.Struct("<Q")
_MARK: Final = struct.Struct("<I")
_MARK_AT: Final = HEADER_BYTES - 8  # Where the header of a record has its checksum.


digest_of: Final[Callable[[BlockKey], int]] = xxhash.xxh3_64_intdigest
"""The 64-bit digest of a key; a collision causes a miss, never a wrong block."""


class State:
    """States of a slot."""

    FREE: Final = 0
    USED: Final = 1
    RETIRED: Final = 2
    """A record there was damaged; the slot is never written again."""


ROW: Final = np.dtype(
    {
        "names": ["generation", "state", "key_length", "size", "mark", "digest", "key", "checksum"],
        "formats": ["<u4", "u1", "u1", "<u4", "<u4", "<u8", f"V{KEY_BYTES_MAX}", "<u8"],
        "offsets": [0, 4, 5, 8, 12, 16, 24, 24 + KEY_BYTES_MAX],
        "itemsize": 32 + KEY_BYTES_MAX,
    }
)
"""A row: the generation grows with each change, ``size`` is the length of the record, ``mark`` identifies the record in
the slot (:func:`mark_of`). The digest of the key is stored because hashing millions of keys takes seconds."""
ROW_BYTES: Final = ROW.itemsize
_PACK: Final = struct.Struct(f"<IBBxxIIQ{KEY_BYTES_MAX}s8x")

_WORDS: Final = ROW_BYTES // 8 - 1  # Words of a row before its checksum.
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_FACTORS: Final[npt.NDArray[np.uint64]] = np.array(
    [xxhash.xxh3_64_intdigest(bytes([place])) | 1 for place in range(_WORDS)], np.uint64
)
"""Odd, so that every change of one word changes the sum."""

Rows: TypeAlias = "npt.NDArray[Any]"
"""An array of ``ROW``."""

RowValues: TypeAlias = tuple[int, int, int, int, BlockKey]
"""Generation, state, size, mark and key of a row."""


class Head(NamedTuple):
    """The head of a table."""

    segment: int  # Random, so that a table that was replaced is recognized.
    slots: int
    slot_bytes: int  # Length of a slot: a page for the record's header, and the payload in whole pages.
    namespace_digest: bytes

    @property
    def segment_bytes(self) -> int:
        """Length of the segment's file."""
        return self.slots * self.slot_bytes

    @property
    def groups(self) -> int:
        """Number of generations."""
        return -(-self.slots // GROUP_ROWS)

    @property
    def rows_at(self) -> int:
        """Offset of the first row: after the head and the generations, each in whole pages."""
        return PAGE + -(-self.groups * 4 // PAGE) * PAGE

    @property
    def table_bytes(self) -> int:
        """Length of the table's file."""
        return self.row_at(self.slots)

    def row_at(self, slot: int) -> int:
        """Return the offset of a slot's row in the table."""
        return self.rows_at + slot * ROW_BYTES


USES: Final = ".use"
"""Ending of a segment's file of uses: one byte per slot, set by readers and cleared by the engine that holds it."""

NOTES: Final = ".notes"
"""Ending of a segment's notes; see :mod:`kvstore.backends.disk.notes`."""


def stem_of(number: int) -> str:
    """Return the name of a segment's files, without their endings."""
    return f"{number:06d}"


def table_number(name: str) -> int | None:
    """Return the number of the segment whose table has this name; None for any other name."""
    return int(match[1]) if (match := _TABLE_NAME.fullmatch(name)) else None


def slot_lengths(payload_bytes_max: int) -> tuple[int, ...]:
    """Return the lengths of slots, longest first: for whole, three quarters, half and a quarter of the payload."""
    pages = -(-payload_bytes_max // PAGE)
    return tuple(sorted({PAGE + -(-pages * quarters // 4) * PAGE for quarters in (1, 2, 3, 4)}, reverse=True))


def mark_of(page: memoryview) -> int:
    """Return the mark of the record with this header page: four bytes of its header's checksum.

    The checksum covers key, namespace, writer, time and payload. A slot with another mark has lost its record, or holds
    another one.
    """
    mark: int = _MARK.unpack_from(page, _MARK_AT)[0]
    return mark


def encode_head(head: Head) -> bytes:
    """Return the first page of a table."""
    body = _HEAD.pack(_MAGIC, FORMAT, head.slots, head.segment, head.slot_bytes, head.namespace_digest)
    return (body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))).ljust(PAGE, b"\0")


def decode_head(content: bytes | memoryview, namespace_digest: bytes) -> Head | None:
    """Return the head of a table; None if it is damaged, or of another format or namespace."""
    if len(content) < _HEAD.size + _CHECKSUM.size:
        return None
    magic, version, slots, segment, slot_bytes, digest = _HEAD.unpack_from(content)
    (checksum,) = _CHECKSUM.unpack_from(content, _HEAD.size)
    if checksum != xxhash.xxh3_64_intdigest(content[: _HEAD.size]) or (magic, version) != (_MAGIC, FORMAT):
        return None
    is_possible = 0 < slots <= SLOTS_MAX and slot_bytes > PAGE and not slot_bytes % PAGE
    if digest != namespace_digest or not is_possible or slots * slot_bytes > _SEGMENT_BYTES_MAX:
        return None
    return Head(segment, slots, slot_bytes, digest)


def encode_rows(
    values: Iterable[RowValues], slots: Sequence[int] | npt.NDArray[Any], segment: int | Sequence[int]
) -> Rows:
    """Return the rows of slots, with their checksums. ``segment``: identity of the segment, or one for each row."""
    pack = _PACK.pack
    content = b"".join(
        [pack(number, state, len(key), size, mark, digest_of(key), key) for number, state, size, mark, key in values]
    )
    rows = np.frombuffer(bytearray(content), ROW)
    rows["checksum"] = _checksums(rows, slots, segment)
    return rows


def decode_rows(content: bytes | memoryview, slots: npt.NDArray[Any], head: Head) -> tuple[Rows, npt.NDArray[np.bool_]]:
    """Return the rows of slots, and which of them are intact. All others are free; their fields mean nothing."""
    rows = np.frombuffer(content, ROW, len(slots))
    used, lengths = rows["state"] == State.USED, rows["key_length"]
    # Values out of range are refused even if the checksum is right.
    intact = (lengths <= KEY_BYTES_MAX) & (rows["state"] <= State.RETIRED)
    intact &= ~used | ((lengths > 0) & (rows["size"] > 0) & (rows["size"] <= head.slot_bytes - PAGE + HEADER_BYTES))
    return rows, intact & (rows["checksum"] == _checksums(rows, slots, head.segment))


def _checksums(
    rows: Rows, slots: Sequence[int] | npt.NDArray[Any], segment: int | Sequence[int]
) -> npt.NDArray[np.uint64]:
    """Return the checksums of rows, all at once: a call of xxh3 for each of five million rows takes seconds.

    They cover the place of each row, so a row that was written to another place does not count.
    """
    words = rows.view("<u8").reshape(len(rows), _WORDS + 1)[:, :_WORDS]
    sums: npt.NDArray[np.uint64] = words @ _FACTORS
    sums += np.asarray(slots, np.uint64) * _GOLDEN + np.asarray(segment, np.uint64)
    for shift in (32, 29):
        sums ^= sums >> np.uint64(shift)
        sums *= _GOLDEN
    return sums ^ (sums >> np.uint64(32))
