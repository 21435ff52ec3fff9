"""Holdings of a redis tier: what a server, a cluster or a pair with Sentinel has under the prefix of the tier."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from kvstore.backends.redis.config import RedisConfig
from kvstore.backends.redis.exchange import Answer
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
from kvstore.cli.holdings.base import HeldBlock, HeldNamespace, Litter, check_record, record_room
from kvstore.cli.holdings.redis_values import SCAN_COUNT, Name, Value, Values
from kvstore.cli.holdings.remote import RemoteHoldings
from kvstore.codec.record import HEADER_BYTES, MAGIC, decode_header
from kvstore.errors import BackendError, RecordError
from kvstore.types import Outcome

__all__ = ["RedisHoldings"]

_NAMESPACES_MAX: Final = 1 << 16
"""Namespaces; there are as many as models with their settings."""

_GRACE_S: Final = 300.0
"""Age from which an incomplete block is litter. A writer at work has no first part there either, for as long as a store
takes: seconds."""

_RECORD_BYTES_MAX: Final = 1 << 32
"""Longest record that a part is believed to be of, as memory is taken for it; blocks have megabytes."""


_UNKNOWN: Final = "0" * 32
"""Second half of the digest of a namespace where no header says it: names have the first half only."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a block lies: its name, and how many parts it has; 0 if it is one value."""

    name: bytes
    parts: int

    @property
    def names(self) -> list[bytes]:
        """The names of its values, the one first that makes it a block."""
        return [part_key(self.name, number) for number in range(self.parts)] or [self.name]


@dataclass(slots=True)
class _Sighting:
    """What is known of a namespace while blocks are looked at."""

    hex: str
    used_at: float = 0.0
    is_ours: bool = False
    is_sure: bool = False

    def note(self, value: Value, used_at: float) -> None:
        """Note a block: the header of a record has all digits of its namespace, of which its name has half."""
        self.used_at = max(self.used_at, used_at)
        if self.is_sure:
            return
        head = _record_head(value)
        self.is_ours = self.is_ours or head.startswith(MAGIC)
        try:
            digest = decode_header(head).namespace_digest.hex()
        except RecordError:
            return
        if digest.startswith(value.name.digits):
            self.hex, self.is_sure = digest, True


class RedisHoldings(RemoteHoldings):
    """Holdings of a redis tier. Whether an engine uses a namespace is not known there, so none is held by anybody.

    Args:
        config: The tier's configuration.

    Raises:
        ConfigError: The configuration can't be used.
        BackendError: The server can't be reached, or refuses.
    """

    backend = "redis"
    header_bytes = HEADER_BYTES

    def __init__(self, config: RedisConfig) -> None:
        super().__init__()
        self._prefix = config.prefix
        self._values = Values(config)
        self._found: dict[str, bytes] = {}
        try:
            self._run(self._values.open())
        except BaseException:
            self.close()
            raise

    def namespaces(self) -> list[HeldNamespace]:
        """See :meth:`Holdings.namespaces`. One was used when its block that was used last was."""
        return sorted(self._run(self._namespaces()), key=lambda namespace: -namespace.used_at)

    def set_aside(self, namespace: HeldNamespace, blocks: Sequence[HeldBlock]) -> int:
        """See :meth:`Holdings.set_aside`. A server has no quarantine: damaged records are deleted."""
        return self._run(self._remove_damaged(namespace, blocks))

    def remove(self, namespace: HeldNamespace, blocks: Sequence[HeldBlock] | None) -> int:
        """See :meth:`Holdings.remove`. To an engine that uses the namespace after all, these are misses."""
        return self._run(self._remove_all(namespace) if blocks is None else self._remove(blocks))

    def litter(self) -> list[Litter]:
        """See :meth:`Holdings.litter`: parts of blocks that have not been whole for some minutes."""
        return self._run(self._litter())

    def sweep(self, litter: Sequence[Litter]) -> int:
        """See :meth:`Holdings.sweep`. A part that was written anew since it was found stays."""
        return self._run(self._sweep(litter))

    async def _disconnect(self) -> None:
        await self._values.close()

    async def _pages(self, namespace: HeldNamespace) -> AsyncGenerator[Sequence[HeldBlock], None]:
        async with aclosing(self._values.pages(namespace.hex)) as pages:
            async for names in pages:
                values = await self._values.describe([name for name in names if name.is_block])
                # What a later release has written in parts can't be judged here, and is not ours to remove.
                yield [_held(value) for value in values if value.name.part is None or not _is_later(value)]

    async def _read_batch(
        self, namespace: HeldNamespace, blocks: Sequence[HeldBlock]
    ) -> Sequence[memoryview | BackendError | None]:
        readings = [_Reading(block) for block in blocks]
        answers = iter(await self._values.read([wanted for reading in readings for wanted in reading.wanted]))
        found = [reading.result([next(answers) for _ in reading.wanted]) for reading in readings]
        if namespace.hex.endswith(_UNKNOWN):
            # What belongs there is known since: such a record came after the namespaces were listed, for the next look.
            return [None if _is_of(record, namespace.hex[:32]) else record for record in found]
        return found

    async def _namespaces(self) -> list[HeldNamespace]:
        found: dict[str, _Sighting] = {}
        async with aclosing(self._values.pages()) as pages:
            async for names in pages:
                for value in await self._values.describe([name for name in names if name.is_block]):
                    digits = value.name.digits
                    if digits not in found and len(found) >= _NAMESPACES_MAX:
                        raise RedisError(
                            f"more than {_NAMESPACES_MAX} namespaces seem to lie under {self._prefix!r}. Does another "
                            "program use this prefix? Give each its own."
                        )
                    sighting = found.setdefault(digits, _Sighting(digits + _UNKNOWN))
                    sighting.note(value, _used_at(value))
        # Where not one value is a record, only the names look like ours.
        return [HeldNamespace(seen.hex, used_at=seen.used_at) for seen in found.values() if seen.is_ours]

    async def _remove_damaged(self, namespace: HeldNamespace, blocks: Sequence[HeldBlock]) -> int:
        """Remove what is damaged still. What is put there in the moment between is lost with it, and is a miss."""
        damaged = []
        for block, record in zip(blocks, await self._read_batch(namespace, blocks), strict=True):
            if isinstance(record, BackendError):
                raise record
            try:
                if record is not None:
                    check_record(record, namespace.hex, block.key, alignment=self.header_bytes)
            except RecordError:
                damaged.append(block)
        return await self._remove(damaged)

    async def _remove(self, blocks: Sequence[HeldBlock]) -> int:
        count = 0
        for start in range(0, len(blocks), SCAN_COUNT):
            names = [block.place.names for block in blocks[start : start + SCAN_COUNT]]
            # Without its first part a block is no more.
            count += await self._values.unlink([first for first, *_ in names])
            await self._values.unlink([name for _, *others in names for name in others])
        return count

    async def _remove_all(self, namespace: HeldNamespace) -> int:
        count = 0
        async with aclosing(self._values.pages(namespace.hex)) as pages:
            async for names in pages:
                count += await self._values.unlink([name.full for name in names if name.is_block])
                await self._values.unlink([name.full for name in names if not name.is_block])
        return count

    async def _litter(self) -> list[Litter]:
        found: dict[str, Litter] = {}
        self._found.clear()
        async with aclosing(self._values.pages()) as pages:
            async for names in pages:
                values = await self._values.describe([name for name in names if name.part is not None])
                # A young one may be of a writer that is at work; of one whose age nobody knows, that is not known.
                old = [value for value in values if value.age_s is not None and _age_s(value) >= _GRACE_S]
                for value, why in [*await self._stray(old), *await self._torn(old)]:
                    name = value.name.full.decode()
                    found.setdefault(name, Litter(name, why, value.size_bytes))
                    self._found[name] = value.head[:PART_HEADER_BYTES]
        return list(found.values())

    async def _stray(self, values: Sequence[Value]) -> list[tuple[Value, str]]:
        """Return the parts behind a first one that is not there, or that is of another write."""
        others = [value for value in values if value.name.part]
        firsts = await self._values.part_heads([part_key(value.name.block, 0) for value in others])
        found = []
        for value, head in zip(others, firsts, strict=True):
            own, first = read_part_header(value.head), read_part_header(head)
            if own is not None and not head:
                found.append((value, "the first part of its block is missing"))
            elif first is not None and own != first._replace(number=value.name.part or 0):
                found.append((value, "is no part of the block that its first part is of"))
        return found

    async def _torn(self, values: Sequence[Value]) -> list[tuple[Value, str]]:
        """Return what is left of blocks of which another part than the first is missing: a server evicts singly."""
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

    async def _sweep(self, litter: Sequence[Litter]) -> int:
        count = 0
        for start in range(0, len(litter), SCAN_COUNT):
            names = [piece.name.encode() for piece in litter[start : start + SCAN_COUNT]]
            heads = await self._values.part_heads(names)
            same = [name for name, head in zip(names, heads, strict=True) if self._found.get(name.decode()) == head]
            count += await self._values.unlink(same)
        return count


class _Reading:
    """A block that is read into memory.

    Attributes:
        wanted: Which values, and where they go.
    """

    def __init__(self, block: HeldBlock) -> None:
        place: _Place = block.place
        # What is longer is no record that is one value, and no part: it is not read to find out what else it is not.
        self._is_absurd = not place.parts and block.size_bytes > PART_HEADER_BYTES + PART_BYTES
        self._record = record_room(0 if self._is_absurd else block.size_bytes)
        self._parts = PartsRead([self._record]) if place.parts else None
        targets = self._parts.targets if self._parts is not None else [Target([self._record])]
        self.wanted = [] if self._is_absurd else list(zip(place.names, targets, strict=True))

    def result(self, answers: Sequence[Answer]) -> memoryview | BackendError | None:
        """Return the record; None if it is not there any more, the failure if nobody can tell."""
        replies: list[Reply] = []
        for answer in answers:
            # Longer than it was found: another write of it, or of a part of it, so that this one has gone.
            if isinstance(answer, ValueTooLongError):
                answer = None
            if isinstance(answer, RedisError):
                return answer
            replies.append(answer)
        if self._is_absurd:
            return self._record
        if self._parts is not None:
            return self._record if self._parts.decide(replies).outcome is Outcome.OK else None
        first = replies[0]
        return self._record[: first.size_bytes] if isinstance(first, Filled) else None


def _held(value: Value) -> HeldBlock:
    header = _first_header(value)
    place = _Place(value.name.full if header is None else value.name.block, 0 if header is None else header.parts)
    size_bytes = value.size_bytes if header is None else header.record_bytes
    return HeldBlock(value.name.key, size_bytes, _used_at(value), place)


def _first_header(value: Value) -> PartHeader | None:
    """Return what a first part says; None if the value is none, or damaged."""
    header = read_part_header(value.head) if value.name.part == 0 else None
    return header if header is not None and not header.number and header.record_bytes <= _RECORD_BYTES_MAX else None


def _is_later(value: Value) -> bool:
    return is_of_another_version(value.head)


def _record_head(value: Value) -> bytes:
    """Return the beginning of the record."""
    return value.head[PART_HEADER_BYTES:] if value.name.part == 0 else value.head


def _is_of(record: memoryview | BackendError | None, digits: str) -> bool:
    """Return whether it is a record of a namespace whose digest begins with some digits."""
    if not isinstance(record, memoryview):
        return False
    try:
        return decode_header(record[:HEADER_BYTES]).namespace_digest.hex().startswith(digits)
    except RecordError:
        return False


def _used_at(value: Value) -> float:
    """Return when a block was used; when it was written where nobody knows; now where it can't even say that."""
    now = time.time()
    try:
        # Another machine's clock may be fast.
        written_at = min(now, decode_header(_record_head(value)).created_ns / 1e9)
    except RecordError:
        written_at = 0.0
    if value.age_s is None:
        return written_at or now
    return max(written_at, now - value.age_s)


def _age_s(value: Value) -> float:
    return time.time() - _used_at(value)
