"""Holdings of a redis tier: the values under its prefix on a server, a cluster, or the master that Sentinels name."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from kvstore.backends.base import Backend
from kvstore.backends.holdings import Holdings, Litter, ReadResult
from kvstore.backends.redis.config import RedisConfig
from kvstore.backends.redis.connection import Answer
from kvstore.backends.redis.failures import RedisError, ValueTooLongError
from kvstore.backends.redis.parts import (
    PART_BYTES,
    PART_HEADER_BYTES,
    PartHeader,
    PartsRead,
    is_of_another_version,
    part_key,
    read_part_header,
)
from kvstore.backends.redis.resp import Filled, Reply, Target
from kvstore.backends.redis.values import SCAN_COUNT, Name, Value, Values
from kvstore.codec.record import HEADER_BYTES, MAGIC, RecordFault, decode_header
from kvstore.config import TierConfig
from kvstore.errors import ConfigError, RecordError
from kvstore.types import BlockInfo, NamespaceInfo, Outcome, RemovalCause

__all__ = ["RedisHoldings"]

_NAMESPACES_MAX: Final = 1 << 16
"""Most namespaces; a fleet has as many as models with their settings."""

_GRACE_S: Final = 300.0
"""Age from which an incomplete block is litter. A store in progress has no first part either, but takes seconds."""

_UNKNOWN: Final = "0" * 32
"""Second half of a namespace's digest while no record header gives it: names have the first half only."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Location of a block: its name, and the number of its parts, 0 if it is one value."""

    name: bytes
    parts: int

    @property
    def names(self) -> list[bytes]:
        """Names of its values, first the one whose presence is the block's."""
        return [part_key(self.name, number) for number in range(self.parts)] or [self.name]


@dataclass(slots=True)
class _Sighting:
    """What the blocks seen so far show of a namespace."""

    hex: str
    used_at: float = 0.0
    is_ours: bool = False
    is_sure: bool = False

    def note(self, value: Value) -> None:
        """Add a block: its record header has the whole digest, of which its name has half."""
        self.used_at = max(self.used_at, _used_at(value))
        if self.is_sure:
            return
        head = _record_head(value)
        self.is_ours = self.is_ours or head.startswith(MAGIC)
        digits = _namespace_of(head)
        if digits.startswith(value.name.digits):
            self.hex, self.is_sure = digits, True


class RedisHoldings(Holdings):
    """Holdings of a redis tier. Servers do not show which namespaces are in use."""

    def __init__(self, backend: type[Backend], config: TierConfig) -> None:
        super().__init__(backend, config)
        if not isinstance(config, RedisConfig):
            raise ConfigError(f"A redis tier is configured by a RedisConfig. Got {type(config).__name__}.")
        self._prefix = config.prefix
        self._values = Values(config)
        self._litter_heads: dict[str, bytes] = {}

    async def open(self) -> None:
        """See :meth:`Holdings.open`."""
        await self._values.open()

    async def close(self) -> None:
        """See :meth:`Holdings.close`."""
        await self._values.close()

    async def namespaces(self) -> list[NamespaceInfo]:
        """See :meth:`Holdings.namespaces`. Last use is that of the block used last."""
        found: dict[str, _Sighting] = {}
        async with aclosing(self._values.pages()) as pages:
            async for names in pages:
                for value in await self._values.describe([name for name in names if name.is_block]):
                    digits = value.name.digits
                    if digits not in found and len(found) >= _NAMESPACES_MAX:
                        raise RedisError(
                            f"more than {_NAMESPACES_MAX} namespaces seem to exist under {self._prefix!r}. If another "
                            "program uses this prefix, give each its own."
                        )
                    found.setdefault(digits, _Sighting(digits + _UNKNOWN)).note(value)
        # Without a single record header, only the names look like ours.
        return [NamespaceInfo(seen.hex, used_at=seen.used_at) for seen in found.values() if seen.is_ours]

    async def scan(self, namespace: NamespaceInfo) -> AsyncGenerator[Sequence[BlockInfo], None]:
        """See :meth:`Holdings.scan`. Parts written by a later release are skipped: they cannot be judged here."""
        async with aclosing(self._values.pages(namespace.hex)) as pages:
            async for names in pages:
                values = await self._values.describe([name for name in names if name.is_block])
                yield [
                    _block_of(value)
                    for value in values
                    if value.name.part is None or not is_of_another_version(value.head)
                ]

    async def read(self, namespace: NamespaceInfo, blocks: Sequence[BlockInfo]) -> Sequence[ReadResult]:
        """See :meth:`Holdings.read`."""
        absurd = [not block.place.parts and block.size_bytes > PART_HEADER_BYTES + PART_BYTES for block in blocks]
        readable = [block for block, is_absurd in zip(blocks, absurd, strict=True) if not is_absurd]
        readings = [_Reading(block, room) for block, room in zip(readable, self._rooms(readable), strict=True)]
        answers = iter(await self._values.read([wanted for reading in readings for wanted in reading.wanted]))
        found = iter([reading.result([next(answers) for _ in reading.wanted]) for reading in readings])
        too_long = RecordError("The value is longer than any record in one value.", RecordFault.LENGTH)
        results = [too_long if is_absurd else next(found) for is_absurd in absurd]
        if namespace.hex.endswith(_UNKNOWN):
            # A valid record here was stored after the namespaces were listed; the next listing has its whole digest.
            digits = namespace.hex[: len(_UNKNOWN)]
            return [
                None if isinstance(each, memoryview) and _namespace_of(each[:HEADER_BYTES]).startswith(digits) else each
                for each in results
            ]
        return results

    async def remove(self, namespace: NamespaceInfo, blocks: Sequence[BlockInfo], cause: RemovalCause) -> int:
        """See :meth:`Holdings.remove`. A server has no quarantine: damaged records are deleted."""
        count = 0
        for start in range(0, len(blocks), SCAN_COUNT):
            names = [block.place.names for block in blocks[start : start + SCAN_COUNT]]
            # The first part first: without it there is no block.
            count += await self._values.unlink([first for first, *_ in names])
            await self._values.unlink([name for _, *others in names for name in others])
        return count

    async def remove_namespace(self, namespace: NamespaceInfo) -> int:
        """See :meth:`Holdings.remove_namespace`. Parts of incomplete blocks go as well."""
        count = 0
        async with aclosing(self._values.pages(namespace.hex)) as pages:
            async for names in pages:
                count += await self._values.unlink([name.full for name in names if name.is_block])
                await self._values.unlink([name.full for name in names if not name.is_block])
        return count

    async def litter(self) -> list[Litter]:
        """See :meth:`Holdings.litter`: parts of blocks that have been incomplete for some minutes."""
        found: dict[str, Litter] = {}
        self._litter_heads.clear()
        async with aclosing(self._values.pages()) as pages:
            async for names in pages:
                values = await self._values.describe([name for name in names if name.part is not None])
                # A young part, or one of unknown age, may belong to a store in progress.
                old = [each for each in values if each.age_s is not None and time.time() - _used_at(each) >= _GRACE_S]
                for value, why in [*await self._stray(old), *await self._torn(old)]:
                    name = value.name.full.decode()
                    found.setdefault(name, Litter(name, why, value.size_bytes))
                    self._litter_heads[name] = value.head[:PART_HEADER_BYTES]
        return list(found.values())

    async def sweep(self, litter: Sequence[Litter]) -> int:
        """See :meth:`Holdings.sweep`. A part that was written again since it was found stays."""
        count = 0
        for start in range(0, len(litter), SCAN_COUNT):
            names = [piece.name.encode() for piece in litter[start : start + SCAN_COUNT]]
            heads = await self._values.part_heads(names)
            same = [
                name for name, head in zip(names, heads, strict=True) if self._litter_heads.get(name.decode()) == head
            ]
            count += await self._values.unlink(same)
        return count

    async def _stray(self, values: Sequence[Value]) -> list[tuple[Value, str]]:
        """Return later parts whose first part is missing or of another write."""
        others = [value for value in values if value.name.part]
        firsts = await self._values.part_heads([part_key(value.name.block, 0) for value in others])
        found = []
        for value, head in zip(others, firsts, strict=True):
            own, first = read_part_header(value.head), read_part_header(head)
            if own is not None and not head:
                found.append((value, "the first part of its block is missing"))
            elif first is not None and own != first._replace(number=value.name.part or 0):
                found.append((value, "the first part of its block is of another write"))
        return found

    async def _torn(self, values: Sequence[Value]) -> list[tuple[Value, str]]:
        """Return all parts of blocks that lack a later part: a server evicts parts one by one."""
        firsts = [(value, header.parts) for value in values if (header := _first_header(value)) is not None]
        wanted = [part_key(value.name.block, number) for value, count in firsts for number in range(1, count)]
        there = iter(await self._values.exist(wanted))
        left: list[Value] = []
        for value, count in firsts:
            present = [number for number in range(1, count) if next(there)]
            if len(present) < count - 1:
                name = value.name
                others = [Name(name.block, name.digits, name.key, number) for number in present]
                left += [value, *await self._values.describe(others)]
        return [(value, "a part of its block is missing") for value in left]


class _Reading:
    """One block being read; ``wanted`` has the names of its values and their targets."""

    def __init__(self, block: BlockInfo, room: memoryview) -> None:
        self._room = room
        self._parts = PartsRead([room]) if block.place.parts else None
        targets = self._parts.targets if self._parts is not None else [Target([room])]
        self.wanted = list(zip(block.place.names, targets, strict=True))

    def result(self, answers: Sequence[Answer]) -> memoryview | RedisError | None:
        """Return the record; None if it is gone, the failure if it could not be read."""
        replies: list[Reply] = []
        for answer in answers:
            # A longer value than was found is another write.
            if isinstance(answer, ValueTooLongError):
                answer = None
            if isinstance(answer, RedisError):
                return answer
            replies.append(answer)
        if self._parts is not None:
            return self._room if self._parts.decide(replies).outcome is Outcome.OK else None
        first = replies[0]
        return self._room[:first] if isinstance(first, Filled) else None


def _block_of(value: Value) -> BlockInfo:
    header = _first_header(value)
    place = _Place(value.name.full, 0) if header is None else _Place(value.name.block, header.parts)
    size_bytes = value.size_bytes if header is None else header.record_bytes
    return BlockInfo(value.name.key, size_bytes, _used_at(value), place)


def _first_header(value: Value) -> PartHeader | None:
    """Return the header of a first part; None for any other value, or a damaged one."""
    header = read_part_header(value.head) if value.name.part == 0 else None
    is_sound = header is not None and not header.number and header.record_bytes <= RedisHoldings.record_bytes_max
    return header if is_sound else None


def _record_head(value: Value) -> bytes:
    """Return the first bytes of the record."""
    return value.head[PART_HEADER_BYTES:] if value.name.part == 0 else value.head


def _namespace_of(head: bytes | memoryview) -> str:
    """Return the digest of the namespace in a record's header; empty if the header is damaged."""
    try:
        return decode_header(head).namespace_digest.hex()
    except RecordError:
        return ""


def _used_at(value: Value) -> float:
    """Return the last use, or the time of writing if that is unknown; now if neither is known."""
    now = time.time()
    try:
        # The clock of another machine may be fast.
        written_at = min(now, decode_header(_record_head(value)).created_ns / 1e9)
    except RecordError:
        written_at = 0.0
    if value.age_s is None:
        return written_at or now
    return max(written_at, now - value.age_s)
