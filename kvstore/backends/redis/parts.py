"""Parts: a long record as several values, and how a reader knows that they belong together.

Where records may be longer than ``PART_BYTES``, each lies on the server in parts, every one a value of its own under
``<key>:<number>``: 32 bytes that tell which part of which write it is, then its piece of the record. The first part is
written last, so that its presence is the block's. Parts of two writes never mix: a token, random per write, has to be
the same in all.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvstore.backends.redis.resp import Filled, Reply, Target
from kvstore.backends.vectored import cut
from kvstore.types import Outcome

__all__ = [
    "PART_BYTES",
    "PART_HEADER_BYTES",
    "PartHeader",
    "PartsFound",
    "PartsRead",
    "in_parts",
    "is_of_another_version",
    "part_count",
    "part_key",
    "read_part_header",
]

PART_BYTES: Final = 4 << 20
"""Longest piece of a record in one value. A server of one thread serves nobody else while it copies a value, and what
is longer leaves the caches of the processor. Part of the format: all engines have to cut alike."""

_HEADER: Final = struct.Struct("<4sHHQ16s")
_MAGIC: Final = b"kvp1"

PART_HEADER_BYTES: Final = _HEADER.size
"""Bytes before the piece of a record in each part."""


def part_count(record_bytes: int, part_bytes: int = PART_BYTES) -> int:
    """Return how many parts a record has; at least one."""
    return max(1, -(-record_bytes // part_bytes))


def part_key(key: bytes, number: int) -> bytes:
    """Return the name of a part."""
    return b"%b:%d" % (key, number)


class PartHeader(NamedTuple):
    """Precedes a piece of a record; ``token`` identifies the write."""

    number: int
    parts: int
    record_bytes: int
    token: bytes


def read_part_header(data: bytes | bytearray, part_bytes: int = PART_BYTES) -> PartHeader | None:
    """Read the header of a part, which ``data`` begins with; None if it is none."""
    if len(data) < _HEADER.size:
        return None
    magic, *fields = _HEADER.unpack_from(data)
    found = PartHeader(*fields)
    is_sound = magic == _MAGIC and found.number < found.parts == part_count(found.record_bytes, part_bytes)
    return found if is_sound else None


def is_of_another_version(data: bytes) -> bool:
    """Return whether a part's header, which ``data`` begins with, is of a format that came after this one."""
    return data.startswith(_MAGIC[:3]) and not data.startswith(_MAGIC)


def in_parts(buffers: Sequence[memoryview], part_bytes: int = PART_BYTES) -> list[list[bytes | memoryview]]:
    """Cut a record for the server; return the buffers of each part's value."""
    size = sum(buffer.nbytes for buffer in buffers)
    count, token = part_count(size, part_bytes), secrets.token_bytes(16)
    return [
        [
            _HEADER.pack(_MAGIC, number, count, size, token),
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
    """``targets`` for the parts of one record, all fetched at once, and the decision whether they make one."""

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
        """Return what the answers (None or ``Filled``, one per target) make."""
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
            if read_part_header(self._headers[index], self._part_bytes) != header._replace(number=index):
                return PartsFound(Outcome.MISS, remove=True)
        return PartsFound(Outcome.OK, size)
