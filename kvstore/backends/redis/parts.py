"""Parts: long records stored as several values.

If records may be longer than ``PART_BYTES``, each record is stored in parts. A part is a value under
``<key>:<number>``: a header of 32 bytes, then a piece of the record. The first part is written last, and its presence
is the presence of the block. Parts have a digest of the payload: those of engines that store equal bytes at the same
time belong together, others do not. Only a sweep looks at the write, to leave parts that were written again.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvstore.backends.redis.resp import Filled, Reply, Target
from kvstore.backends.vectored import cut
from kvstore.codec.record import checksum_in
from kvstore.types import Outcome

DESCRIPTION: Final = b"namespace"
"""In place of a block's key: the fields of the namespace, which are in one value."""

_DESCRIPTION_S: Final = 90 * 86400.0
"""Least time to live of the fields of a namespace, which each start of an engine renews."""

PART_BYTES: Final = 4 << 20
"""Longest piece of a record in one value. A single-threaded server blocks other clients while it copies a value, and
longer values exceed the processor's caches. Part of the format: all engines must use the same length."""

_HEADER: Final = struct.Struct("<4sHHQ8s8s")
_MAGIC: Final = b"kvp1"

PART_HEADER_BYTES: Final = _HEADER.size
"""Bytes before the piece of a record in each part."""


def description_ttl_s(ttl_s: float) -> float:
    """Return the time to live of the fields of a namespace, of a tier whose blocks have the time ``ttl_s``."""
    return max(ttl_s, _DESCRIPTION_S)


def part_count(record_bytes: int, part_bytes: int = PART_BYTES) -> int:
    """Return how many parts a record has; at least one."""
    return max(1, -(-record_bytes // part_bytes))


def part_key(key: bytes, number: int) -> bytes:
    return b"%b:%d" % (key, number)


class PartHeader(NamedTuple):
    """Header of a part; ``payload`` has the first bytes of the payload's checksum, ``write`` is random."""

    number: int
    parts: int
    record_bytes: int
    payload: bytes
    write: bytes

    def belongs_to(self, first: PartHeader, number: int) -> bool:
        """Return whether it is part ``number`` of a record equal to that of ``first``."""
        return self[:4] == (number, *first[1:4])


def read_part_header(data: bytes | bytearray, part_bytes: int = PART_BYTES) -> PartHeader | None:
    """Read the part header at the start of ``data``; None if it is invalid."""
    if len(data) < _HEADER.size:
        return None
    magic, *fields = _HEADER.unpack_from(data)
    found = PartHeader(*fields)
    is_sound = magic == _MAGIC and found.number < found.parts == part_count(found.record_bytes, part_bytes)
    return found if is_sound else None


def is_of_another_version(data: bytes) -> bool:
    """Return whether ``data`` begins with a part header of another version of the format."""
    return data.startswith(_MAGIC[:3]) and not data.startswith(_MAGIC)


def in_parts(buffers: Sequence[memoryview], part_bytes: int = PART_BYTES) -> list[list[bytes | memoryview]]:
    """Split a record into parts; return the buffers of each part's value."""
    size = sum(buffer.nbytes for buffer in buffers)
    count, write = part_count(size, part_bytes), secrets.token_bytes(8)
    payload = checksum_in(buffers[0])[:8] or write
    return [
        [
            _HEADER.pack(_MAGIC, number, count, size, payload, write),
            *cut(buffers, (number + 1) * part_bytes, number * part_bytes),
        ]
        for number in range(count)
    ]


class PartsFound(NamedTuple):
    """Result of reading a record in parts: ``filled_bytes`` if OK, and whether to ``remove`` its remains."""

    outcome: Outcome
    filled_bytes: int = 0
    remove: bool = False


class PartsRead:
    """``targets`` for all parts of one record, and the check that the parts belong together."""

    def __init__(self, buffers: Sequence[memoryview], part_bytes: int = PART_BYTES) -> None:
        self._capacity = sum(buffer.nbytes for buffer in buffers)
        self._part_bytes = part_bytes
        count = part_count(self._capacity, part_bytes)
        self._headers = [bytearray(_HEADER.size) for _ in range(count)]
        self.targets = [
            Target([memoryview(header), *cut(buffers, (number + 1) * part_bytes, number * part_bytes)])
            for number, header in enumerate(self._headers)
        ]

    def decide(self, replies: Sequence[Reply]) -> PartsFound:
        """Return the result of the replies (None or ``Filled``, one per target)."""
        first = replies[0]
        if not isinstance(first, Filled):
            return PartsFound(Outcome.MISS)
        header = read_part_header(self._headers[0], self._part_bytes) if first >= _HEADER.size else None
        if header is None or header.number or header.record_bytes > self._capacity:
            return PartsFound(Outcome.CORRUPT)
        size = header.record_bytes
        for index in range(header.parts):
            reply = replies[index]
            piece = min(self._part_bytes, size - index * self._part_bytes)
            if not isinstance(reply, Filled) or reply != _HEADER.size + piece:
                return PartsFound(Outcome.MISS, remove=True)
            part = read_part_header(self._headers[index], self._part_bytes)
            if part is None or not part.belongs_to(header, index):
                return PartsFound(Outcome.MISS, remove=True)
        return PartsFound(Outcome.OK, size)
