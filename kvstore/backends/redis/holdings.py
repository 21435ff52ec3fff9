"""Holdings of a redis tier: the values under its prefix, listed by SCAN on every master and read without renewal."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final, NamedTuple, NoReturn

import msgspec

from kvstore.backends.base import Backend
from kvstore.backends.holdings import DESCRIPTION_BYTES_MAX, Holdings, ReadResult, StaleItem, fields_in, is_digest
from kvstore.backends.redis.config import RedisConfig
from kvstore.backends.redis.connection import Answer
from kvstore.backends.redis.exchange import Command, Exchange
from kvstore.backends.redis.failures import RedisError, ServerRefusedError, ValueTooLongError
from kvstore.backends.redis.node import Node
from kvstore.backends.redis.parts import (
    DESCRIPTION,
    PART_BYTES,
    PART_HEADER_BYTES,
    PartHeader,
    PartsRead,
    description_ttl_s,
    is_of_another_version,
    part_key,
    read_part_header,
)
from kvstore.backends.redis.resp import Filled, Reply, Target, encode_command
from kvstore.backends.redis.topology import Topology
from kvstore.codec.record import HEADER_BYTES, MAGIC, RecordFault, decode_header
from kvstore.config import Seconds, TierConfig
from kvstore.errors import ConfigError, RecordError
from kvstore.namespace import Namespace
from kvstore.types import KEY_BYTES_MAX, BlockInfo, BlockKey, NamespaceInfo, Outcome, RemovalCause

_NAMESPACES_MAX: Final = 1 << 16
"""Maximum number of namespaces; a fleet has one per combination of model and settings."""

_GRACE_S: Final = 300.0
"""Age from which an incomplete block is stale. A store in progress has no first part either, but takes seconds."""

_UNKNOWN: Final = "0" * 32
"""Placeholder for the second half of a namespace's digest: names have only the first half, record headers have both."""

_SCAN_COUNT: Final = 256
"""Keys examined per SCAN, which blocks the server for a few hundred microseconds. With names of maximum length, the
reply still fits a connection's limit."""

_SEEN_MAX: Final = 1 << 20
"""Names remembered (about 150 MB), as SCAN may return one twice; beyond that, duplicates are possible."""

_TIMEOUT_S: Final = 10.0
"""Minimum timeout of a request: no engine waits for it, and the server may be busy."""

_TRIES: Final = 3
"""Attempts per SCAN: a connection may break, and the cursor survives that."""

_NAME: Final = re.compile(rb"([0-9a-f]{32}):((?:[0-9a-f]{2}){1,%d})(?::(0|[1-9]\d{0,4}))?" % KEY_BYTES_MAX)

_IDLE_UNIT_S: Final = 1.0
"""Servers count idle time in whole seconds."""

_GONE: Final = -2
"""Reply to PTTL for a missing key."""


class _Name(NamedTuple):
    """Name of a value: ``block`` excludes the part's number; ``digits`` are the first 32 of the namespace.

    ``part`` is None for a record in one value.
    """

    block: bytes
    digits: str
    key: BlockKey
    part: int | None

    @property
    def full(self) -> bytes:
        return self.block if self.part is None else part_key(self.block, self.part)

    @property
    def is_block(self) -> bool:
        """Whether this value's presence is the block's presence."""
        return not self.part


class _Value(NamedTuple):
    """Metadata of a value, from its server.

    ``head`` contains the part header of a part, and the record header if the record begins in this value. ``age_s`` is
    the time since the last write or use; None if the server does not report it.
    """

    name: _Name
    size_bytes: int
    head: bytes
    age_s: float | None


class Values:
    """Sends commands to the servers, only for keys of the backend's form. A failure raises RedisError."""

    def __init__(self, config: RedisConfig) -> None:
        # One connection per server, because CLIENT NO-TOUCH applies per connection.
        patience = Seconds(max(float(config.timeout), _TIMEOUT_S))
        self._config = msgspec.structs.replace(config, connections=1, timeout=patience, read_from="master")
        self._counters: Counter[str] = Counter()
        self._topology = Topology(self._config, self._counters)
        self._exchange = Exchange(self._topology, self._counters)
        self._prepared = 0  # Number of connections opened before the last CLIENT NO-TOUCH.
        self._is_idle_kept = False  # Whether reads keep the idle time of values.

    async def open(self) -> None:
        """Connect; ConfigError if the configuration can't be used."""
        await self._topology.open()

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        await self._topology.close()

    async def pages(self, namespace: str = "") -> AsyncGenerator[list[_Name], None]:
        """Yield the names of the tier's values, or of one namespace's, page by page."""
        prefix = self._config.prefix.encode()
        async with aclosing(self.keys(prefix + (f"{namespace[:32]}:".encode() if namespace else b"") + b"*")) as pages:
            async for keys in pages:
                names = [_read(key, prefix) for key in keys]
                yield [name for name in names if name is not None]

    async def keys(self, pattern: bytes) -> AsyncGenerator[list[bytes], None]:
        """Yield the keys that match, page by page. A valid prefix contains no special characters of patterns."""
        seen: set[bytes] = set()
        for node in [node for node in self._topology.nodes if not node.is_replica]:
            cursor = b"0"
            while True:
                cursor, keys = await self._scan(node, cursor, pattern)
                new = [key for key in dict.fromkeys(keys) if key not in seen]
                if len(seen) < _SEEN_MAX:
                    seen.update(new)
                yield new
                if cursor == b"0":
                    break

    async def describe(self, names: Sequence[_Name]) -> list[_Value]:
        """Return the metadata of values; missing values are omitted."""
        await self._disable_touch()
        # Idle time before STRLEN and GETRANGE: before Redis 7.2, they reset it.
        asked = [
            question
            for name in names
            for question in (
                (b"PTTL", name.full),
                (b"OBJECT", b"IDLETIME", name.full),
                (b"STRLEN", name.full),
                (b"GETRANGE", name.full, b"0", b"%d" % (_head_bytes(name) - 1)),
            )
        ]
        answers = iter(await self._ask(asked, optional=b"OBJECT"))
        found = []
        for name, ttl_ms, idle, size, head in zip(names, answers, answers, answers, answers, strict=True):
            if isinstance(ttl_ms, int) and ttl_ms != _GONE and isinstance(size, int) and isinstance(head, bytes):
                found.append(_Value(name, size, head, self._age_s(name, ttl_ms, idle)))
        return found

    async def described_at(self, key: bytes) -> float:
        """Return the time at which a description was stored, from its time to live; 0.0 if it has none."""
        (ttl_ms,) = await self._ask([(b"PTTL", key)])
        if not isinstance(ttl_ms, int) or ttl_ms < 0:
            return 0.0
        return time.time() - description_ttl_s(float(self._config.ttl)) + ttl_ms / 1e3

    async def part_heads(self, names: Sequence[bytes]) -> list[bytes]:
        """Return the undecoded headers of parts; empty for missing parts."""
        answers = await self._ask([(b"GETRANGE", name, b"0", b"%d" % (PART_HEADER_BYTES - 1)) for name in names])
        return [answer if isinstance(answer, bytes) else b"" for answer in answers]

    async def exist(self, names: Sequence[bytes]) -> list[bool]:
        """Return which values exist."""
        return [answer == 1 for answer in await self._ask([(b"EXISTS", name) for name in names])]

    async def unlink(self, names: Sequence[bytes]) -> int:
        """Remove values; return how many existed."""
        answers = await self._ask([(b"UNLINK", name) for name in names])
        return sum(answer for answer in answers if isinstance(answer, int))

    async def read(self, wanted: Sequence[tuple[bytes, Target]]) -> list[Answer]:
        """Read values into their targets; the answer for a failure or a value longer than its target is an error."""
        await self._disable_touch()
        commands = [
            Command(name, [encode_command(b"GET", name)], target, target.capacity_bytes) for name, target in wanted
        ]
        answers = await self._exchange.run(commands)
        for answer in answers:
            if isinstance(answer, ServerRefusedError) and answer.code == "NOPERM":
                self._refuse("GET", answer)
        return answers

    async def _ask(self, questions: Sequence[tuple[bytes, ...]], optional: bytes = b"") -> list[Answer]:
        """Run commands on names and return the answers. Every command except ``optional`` must succeed."""
        commands = [
            Command(words[2] if words[0] == b"OBJECT" else words[1], [encode_command(*words)], None)
            for words in questions
        ]
        answers = await self._exchange.run(commands)
        for words, answer in zip(questions, answers, strict=True):
            # A value of another type belongs to another program.
            is_foreign = isinstance(answer, ServerRefusedError) and answer.code == "WRONGTYPE"
            if isinstance(answer, RedisError) and words[0] != optional and not is_foreign:
                self._refuse(words[0].decode(), answer)
        return answers

    async def _scan(self, node: Node, cursor: bytes, pattern: bytes) -> tuple[bytes, list[bytes]]:
        options = (b"MATCH", pattern, b"COUNT", b"%d" % _SCAN_COUNT, b"TYPE", b"string")
        for left in reversed(range(_TRIES)):
            try:
                answer = await node.ask(b"SCAN", cursor, *options)
                break
            except ServerRefusedError as refused:
                self._refuse("SCAN", refused)
            except RedisError as error:
                if not left:
                    # A partial listing would look complete.
                    reason = error.bare.removeprefix(f"{node.endpoint}: ")
                    raise RedisError(f"{node.endpoint}: its keys cannot be listed: {reason}") from error
        match answer:
            case [bytes(next_cursor), [*keys]]:
                return next_cursor, [key for key in keys if isinstance(key, bytes)]
        raise RedisError(f"{node.endpoint}: invalid answer to SCAN. Is this a Redis or Valkey server?")

    async def _disable_touch(self) -> None:
        """Prevent reads from changing the eviction order of servers."""
        if self._prepared != self._counters["connections_opened"]:
            self._prepared = self._counters["connections_opened"]
            refused = 0
            for node in self._topology.nodes:
                try:
                    await node.ask(b"CLIENT", b"NO-TOUCH", b"ON")
                except RedisError:
                    # Unknown before Redis 7.2.
                    refused += not node.is_replica
            self._is_idle_kept = not refused

    def _age_s(self, name: _Name, ttl_ms: int, idle: Answer) -> float | None:
        """Return the time since a value's last use, from its time to live (which uses renew) or its idle time."""
        # Servers that evict by frequency have no idle time.
        idle_s = float(idle) if isinstance(idle, int) else None
        if not self._config.ttl or ttl_ms < 0:
            if isinstance(idle, ServerRefusedError) and idle.code == "NOPERM":
                self._refuse("OBJECT IDLETIME", idle)
            return idle_s
        age_s = max(0.0, float(self._config.ttl) - ttl_ms / 1e3)
        # The ttl of engines with a shorter one than ours makes a block look too old; its idle time is a second bound.
        # Without NO-TOUCH, describing a block reset its idle time, but not that of its later parts.
        if idle_s is None or not (self._is_idle_kept or name.part):
            return age_s
        return min(age_s, idle_s + _IDLE_UNIT_S)

    def _refuse(self, command: str, error: RedisError) -> NoReturn:
        """Raise the failure; for missing rights, name the command."""
        if not isinstance(error, ServerRefusedError) or error.code != "NOPERM":
            raise error
        raise RedisError(
            f"this user may not run {command} on keys under {self._config.prefix!r} (NOPERM). The admin tools need "
            "more rights than an engine: grant those listed in docs/admin.md."
        ) from error


def _read(key: bytes, prefix: bytes) -> _Name | None:
    """Parse a name; None if it does not have the backend's form."""
    match = _NAME.fullmatch(key, len(prefix)) if key.startswith(prefix) else None
    if match is None:
        return None
    digits, hexadecimal, part = match.groups()
    block = key[: match.end(2)]
    return _Name(block, digits.decode(), bytes.fromhex(hexadecimal.decode()), None if part is None else int(part))


def _head_bytes(name: _Name) -> int:
    """Return the length of a value's part header and, if the record begins here, of the record header."""
    return (0 if name.part is None else PART_HEADER_BYTES) + (HEADER_BYTES if name.is_block else 0)


class _Place(NamedTuple):
    """Location of a block: its name, and the number of its parts, 0 if it is one value."""

    name: bytes
    parts: int

    @property
    def names(self) -> list[bytes]:
        """Names of its values; the presence of the first is the presence of the block."""
        return [part_key(self.name, number) for number in range(self.parts)] or [self.name]


class RedisHoldings(Holdings):
    """Holdings of a redis tier. Servers do not show which namespaces are in use."""

    def __init__(self, backend: type[Backend], config: TierConfig) -> None:
        super().__init__(backend, config)
        if not isinstance(config, RedisConfig):
            raise ConfigError(f"A redis tier is configured by a RedisConfig. Got {type(config).__name__}.")
        self._prefix = config.prefix
        self._values = Values(config)
        self._stale_heads: dict[str, bytes] = {}

    async def open(self) -> None:
        await self._values.open()

    async def close(self) -> None:
        await self._values.close()

    async def namespaces(self) -> list[NamespaceInfo]:
        """A namespace was last used when its most recently used block was."""
        found: dict[str, NamespaceInfo] = {}
        async with aclosing(self._values.pages()) as pages:
            async for names in pages:
                for value in await self._values.describe([name for name in names if name.is_block]):
                    digits, head = value.name.digits, _record_head(value)
                    if not head.startswith(MAGIC):
                        # The name matches by chance.
                        continue
                    if digits not in found and len(found) >= _NAMESPACES_MAX:
                        raise RedisError(
                            f"more than {_NAMESPACES_MAX} namespaces seem to exist under {self._prefix!r}. If another "
                            "program uses this prefix, give each its own."
                        )
                    known = found.get(digits, NamespaceInfo(digits + _UNKNOWN, used_at=0.0))
                    digest = known.hex
                    # The record header has the full digest, the name only half of it.
                    if digest.endswith(_UNKNOWN) and _namespace_of(head).startswith(digits):
                        digest = _namespace_of(head)
                    found[digits] = NamespaceInfo(digest, used_at=max(known.used_at, _used_at(value)))
        return await self._described(list(found.values()))

    async def described(self) -> list[NamespaceInfo]:
        """Lists the names on the servers once, and reads no blocks."""
        found = []
        prefix, suffix = self._prefix.encode(), b":" + DESCRIPTION
        async with aclosing(self._values.keys(prefix + b"*" + suffix)) as pages:
            async for keys in pages:
                digits = [key[len(prefix) : -len(suffix)].decode(errors="replace") for key in keys]
                whole = [each + _UNKNOWN for each in digits]
                stored = [NamespaceInfo(each) for each in whole if is_digest(each)]
                for each in await self._described(stored):
                    if each.fields is not None:
                        used_at = await self._values.described_at(self._description_key(each))
                        found.append(NamespaceInfo(Namespace(each.fields).hex, each.fields, used_at=used_at))
        return found

    async def present(self, namespace: NamespaceInfo, keys: Collection[BlockKey]) -> set[BlockKey]:
        """Takes two EXISTS per key: for a block in one value, and for the first of several."""
        wanted = list(keys)
        start = f"{self._prefix}{namespace.hex[: len(_UNKNOWN)]}:"
        names = [f"{start}{key.hex()}".encode() for key in wanted]
        there = iter(await self._values.exist([each for name in names for each in (name, part_key(name, 0))]))
        return {key for key, whole, first in zip(wanted, there, there, strict=True) if whole or first}

    async def scan(self, namespace: NamespaceInfo) -> AsyncGenerator[Sequence[BlockInfo], None]:
        """Parts written by a later release are skipped, because their format is unknown."""
        async with aclosing(self._values.pages(namespace.hex)) as pages:
            async for names in pages:
                values = await self._values.describe([name for name in names if name.is_block])
                yield [
                    _block_of(value)
                    for value in values
                    if value.name.part is None or not is_of_another_version(value.head)
                ]

    async def read(self, namespace: NamespaceInfo, blocks: Sequence[BlockInfo]) -> Sequence[ReadResult]:
        overlong = [not block.place.parts and block.size_bytes > PART_HEADER_BYTES + PART_BYTES for block in blocks]
        readable = [block for block, is_overlong in zip(blocks, overlong, strict=True) if not is_overlong]
        readings = [_Reading(block, room) for block, room in zip(readable, self._rooms(readable), strict=True)]
        answers = iter(await self._values.read([wanted for reading in readings for wanted in reading.wanted]))
        found = iter([reading.result([next(answers) for _ in reading.wanted]) for reading in readings])
        too_long = RecordError("The value is longer than any record in one value.", RecordFault.LENGTH)
        results = [too_long if is_overlong else next(found) for is_overlong in overlong]
        if namespace.hex.endswith(_UNKNOWN):
            # A valid record here was stored after the listing of namespaces; the next listing has the full digest.
            digits = namespace.hex[: len(_UNKNOWN)]
            return [
                None if isinstance(each, memoryview) and _namespace_of(each[:HEADER_BYTES]).startswith(digits) else each
                for each in results
            ]
        return results

    async def remove(self, namespace: NamespaceInfo, blocks: Sequence[BlockInfo], cause: RemovalCause) -> int:
        """A server has no quarantine: damaged records are deleted."""
        count = 0
        for start in range(0, len(blocks), _SCAN_COUNT):
            names = [block.place.names for block in blocks[start : start + _SCAN_COUNT]]
            # The first parts last: without its first part, a block is not listed, and its other parts would stay after
            # a failure.
            await self._values.unlink([name for _, *others in names for name in others])
            count += await self._values.unlink([first for first, *_ in names])
        return count

    async def remove_namespace(self, namespace: NamespaceInfo) -> int:
        """Includes the parts of incomplete blocks."""
        count = 0
        # The first parts last, as in remove().
        for are_blocks in (False, True):
            async with aclosing(self._values.pages(namespace.hex)) as pages:
                async for names in pages:
                    found = await self._values.unlink([name.full for name in names if name.is_block is are_blocks])
                    count += found * are_blocks
        await self._values.unlink([self._description_key(namespace)])
        return count

    async def stale_items(self) -> list[StaleItem]:
        """Parts of blocks that have been incomplete for some minutes."""
        found: dict[str, StaleItem] = {}
        self._stale_heads.clear()
        async with aclosing(self._values.pages()) as pages:
            async for names in pages:
                values = await self._values.describe([name for name in names if name.part is not None])
                # A young part, or one of unknown age, may belong to a store in progress.
                old = [each for each in values if each.age_s is not None and time.time() - _used_at(each) >= _GRACE_S]
                for value, why in [*await self._stray(old), *await self._torn(old)]:
                    name = value.name.full.decode()
                    found.setdefault(name, StaleItem(name, why, value.size_bytes))
                    self._stale_heads[name] = value.head[:PART_HEADER_BYTES]
        return list(found.values())

    async def sweep(self, stale: Sequence[StaleItem]) -> int:
        """Skips parts that were rewritten since their listing."""
        count = 0
        for start in range(0, len(stale), _SCAN_COUNT):
            names = [piece.name.encode() for piece in stale[start : start + _SCAN_COUNT]]
            heads = await self._values.part_heads(names)
            same = [
                name for name, head in zip(names, heads, strict=True) if self._stale_heads.get(name.decode()) == head
            ]
            count += await self._values.unlink(same)
        return count

    async def _described(self, namespaces: Sequence[NamespaceInfo]) -> list[NamespaceInfo]:
        """Return namespaces with their stored fields."""
        found, room = [], memoryview(bytearray(DESCRIPTION_BYTES_MAX))
        for namespace in namespaces:
            (answer,) = await self._values.read([(self._description_key(namespace), Target([room]))])
            text = bytes(room[:answer]) if isinstance(answer, Filled) else b""
            found.append(replace(namespace, fields=fields_in(text, namespace.hex.removesuffix(_UNKNOWN))))
        return found

    def _description_key(self, namespace: NamespaceInfo) -> bytes:
        return f"{self._prefix}{namespace.hex[: len(_UNKNOWN)]}:".encode() + DESCRIPTION

    async def _stray(self, values: Sequence[_Value]) -> list[tuple[_Value, str]]:
        """Return later parts whose first part is missing or of another write."""
        others = [value for value in values if value.name.part]
        firsts = await self._values.part_heads([part_key(value.name.block, 0) for value in others])
        found = []
        for value, head in zip(others, firsts, strict=True):
            own, first = read_part_header(value.head), read_part_header(head)
            if own is not None and not head:
                found.append((value, "the first part of its block is missing"))
            elif first is not None and (own is None or not own.belongs_to(first, value.name.part or 0)):
                found.append((value, "the first part of its block is of another record"))
        return found

    async def _torn(self, values: Sequence[_Value]) -> list[tuple[_Value, str]]:
        """Return all parts of blocks that lack a later part, because servers evict single parts."""
        firsts = [(value, header.parts) for value in values if (header := _first_header(value)) is not None]
        wanted = [part_key(value.name.block, number) for value, count in firsts for number in range(1, count)]
        there = iter(await self._values.exist(wanted))
        left: list[_Value] = []
        for value, count in firsts:
            present = [number for number in range(1, count) if next(there)]
            if len(present) < count - 1:
                name = value.name
                others = [_Name(name.block, name.digits, name.key, number) for number in present]
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
        """Return the record, None if it is gone, or the failure."""
        replies: list[Reply] = []
        for answer in answers:
            # A value longer than the listed one is from another write.
            if isinstance(answer, ValueTooLongError):
                answer = None
            if isinstance(answer, RedisError):
                return answer
            replies.append(answer)
        if self._parts is not None:
            return self._room if self._parts.decide(replies).outcome is Outcome.OK else None
        first = replies[0]
        return self._room[:first] if isinstance(first, Filled) else None


def _block_of(value: _Value) -> BlockInfo:
    header = _first_header(value)
    place = _Place(value.name.full, 0) if header is None else _Place(value.name.block, header.parts)
    size_bytes = value.size_bytes if header is None else header.record_bytes
    return BlockInfo(value.name.key, size_bytes, _used_at(value), place)


def _first_header(value: _Value) -> PartHeader | None:
    """Return the header of a first part; None for other or damaged values."""
    header = read_part_header(value.head) if value.name.part == 0 else None
    is_sound = header is not None and not header.number and header.record_bytes <= RedisHoldings.record_bytes_max
    return header if is_sound else None


def _record_head(value: _Value) -> bytes:
    """Return the first bytes of the record."""
    return value.head[PART_HEADER_BYTES:] if value.name.part == 0 else value.head


def _namespace_of(head: bytes | memoryview) -> str:
    """Return the digest of the namespace in a record's header; empty if the header is damaged."""
    try:
        return decode_header(head).namespace_digest.hex()
    except RecordError:
        return ""


def _used_at(value: _Value) -> float:
    """Return the time of the last use, or of the write if that is unknown; the current time if both are unknown."""
    now = time.time()
    try:
        # The clock of another machine may be fast.
        written_at = min(now, decode_header(_record_head(value)).created_ns / 1e9)
    except RecordError:
        written_at = 0.0
    if value.age_s is None:
        return written_at or now
    return max(written_at, now - value.age_s)
