"""The values under a tier's prefix: found by SCAN on every master, described and read without counting as used."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import msgspec

from kvstore.backends.redis.config import RedisConfig
from kvstore.backends.redis.connection import Answer
from kvstore.backends.redis.exchange import Command, Exchange
from kvstore.backends.redis.failures import RedisError, ServerRefusedError
from kvstore.backends.redis.node import Node
from kvstore.backends.redis.parts import PART_HEADER_BYTES, part_key
from kvstore.backends.redis.resp import Reply, Target, encode_command
from kvstore.backends.redis.topology import Topology, connected
from kvstore.codec.record import HEADER_BYTES
from kvstore.config import Seconds
from kvstore.types import KEY_BYTES_MAX, BlockKey

__all__ = ["Name", "Value", "Values"]

SCAN_COUNT: Final = 256
"""Keys examined per SCAN: blocks the server for some hundred microseconds. With names of the greatest length the answer
still fits a connection's limit."""

_SEEN_MAX: Final = 1 << 20
"""Names remembered (about 150 MB), as SCAN may return one twice; beyond that, duplicates are possible."""

_TIMEOUT_S: Final = 10.0
"""Least timeout of a request: no engine waits for it, and the server may be busy."""

_TRIES: Final = 3
"""Attempts per SCAN: a connection may break, and the cursor survives that."""

_NAME: Final = re.compile(rb"([0-9a-f]{32}):((?:[0-9a-f]{2}){1,%d})(?::(0|[1-9]\d{0,4}))?" % KEY_BYTES_MAX)

_IDLE_UNIT_S: Final = 1.0
"""Servers count idle time in whole seconds."""

_GONE: Final = -2
"""Answer to PTTL where there is no such key."""


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a value.

    Attributes:
        block: The name without the part number.
        digits: First 32 digits of the namespace.
        key: Key of the block.
        part: Part number; None for a record in one value.
    """

    block: bytes
    digits: str
    key: BlockKey
    part: int | None

    @property
    def full(self) -> bytes:
        """The whole name."""
        return self.block if self.part is None else part_key(self.block, self.part)

    @property
    def is_block(self) -> bool:
        """Whether this value's presence is the block's presence."""
        return not self.part


@dataclass(frozen=True, slots=True)
class Value:
    """A value as its server describes it.

    Attributes:
        name: Its name.
        size_bytes: Its length.
        head: Its first bytes: the part header, if it is a part, and the record header, if the record begins here.
        age_s: Seconds since it was written or used; None if the server does not know.
    """

    name: Name
    size_bytes: int
    head: bytes
    age_s: float | None


class Values:
    """Sends commands to the servers, only about names that the backend gives.

    Args:
        config: The tier's configuration.
    """

    def __init__(self, config: RedisConfig) -> None:
        # One connection per server, as CLIENT NO-TOUCH applies to a connection.
        patience = Seconds(max(float(config.timeout), _TIMEOUT_S))
        self._config = msgspec.structs.replace(config, connections=1, timeout=patience, read_from="master")
        self._counters: Counter[str] = Counter()
        self._topology: Topology | None = None
        self._exchange: Exchange | None = None
        self._touch_disabled_on = 0
        self._is_idle_kept = False

    async def open(self) -> None:
        """Connect.

        Raises:
            ConfigError: The configuration can't be used.
            RedisError: The server can't be reached, or refuses.
        """
        self._topology = await connected(self._config, self._counters)
        self._exchange = Exchange(self._topology, self._counters)

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        topology, self._topology = self._topology, None
        if topology is not None:
            await topology.close()

    async def pages(self, namespace: str = "") -> AsyncGenerator[list[Name], None]:
        """Yield the names of the tier's values, or of one namespace's, page by page.

        Raises:
            RedisError: A server can't be asked, or refuses.
        """
        prefix = self._config.prefix.encode()
        # A prefix has no characters with a meaning in patterns.
        pattern = prefix + (f"{namespace[:32]}:".encode() if namespace else b"") + b"*"
        seen: set[bytes] = set()
        for node in [node for node in self._nodes() if not node.is_replica]:
            cursor = b"0"
            while True:
                cursor, keys = await self._scan(node, cursor, pattern)
                new = [key for key in dict.fromkeys(keys) if key not in seen]
                if len(seen) < _SEEN_MAX:
                    seen.update(new)
                names = [_read(key, prefix) for key in new]
                yield [name for name in names if name is not None]
                if cursor == b"0":
                    break

    async def describe(self, names: Sequence[Name]) -> list[Value]:
        """Describe some values; those that are gone are left out.

        Raises:
            RedisError: A server can't be asked, or refuses.
        """
        await self._disable_touch()
        # Idle time first: before Redis 7.2 the commands after it reset it.
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
                found.append(Value(name, size, head, self._age_s(name, ttl_ms, idle)))
        return found

    async def part_heads(self, names: Sequence[bytes]) -> list[bytes]:
        """Return the headers of some parts, as they are; empty where there is nothing."""
        answers = await self._ask([(b"GETRANGE", name, b"0", b"%d" % (PART_HEADER_BYTES - 1)) for name in names])
        return [answer if isinstance(answer, bytes) else b"" for answer in answers]

    async def exist(self, names: Sequence[bytes]) -> list[bool]:
        """Return which of some values there are."""
        return [answer == 1 for answer in await self._ask([(b"EXISTS", name) for name in names])]

    async def unlink(self, names: Sequence[bytes]) -> int:
        """Remove values; return how many of them there were."""
        answers = await self._ask([(b"UNLINK", name) for name in names])
        return sum(answer for answer in answers if isinstance(answer, int))

    async def read(self, wanted: Sequence[tuple[bytes, Target]]) -> list[Answer]:
        """Read values into their targets; a value longer than its target, or a failure, is an error in its place."""
        await self._disable_touch()
        commands = [
            Command(name, [encode_command(b"GET", name)], target, target.capacity_bytes) for name, target in wanted
        ]
        answers = await self._run(commands)
        for answer in answers:
            if isinstance(answer, ServerRefusedError) and answer.code == "NOPERM":
                self._refuse("GET", answer)
        return answers

    async def _ask(self, questions: Sequence[tuple[bytes, ...]], optional: bytes = b"") -> list[Answer]:
        """Run commands on names and return the answers. Every command but ``optional`` has to succeed."""
        commands = [
            Command(words[2] if words[0] == b"OBJECT" else words[1], [encode_command(*words)], None)
            for words in questions
        ]
        answers = await self._run(commands)
        for words, answer in zip(questions, answers, strict=True):
            # A value of another type under one of our names is not ours.
            is_foreign = isinstance(answer, ServerRefusedError) and answer.code == "WRONGTYPE"
            if isinstance(answer, RedisError) and words[0] != optional and not is_foreign:
                self._refuse(words[0].decode(), answer)
        return answers

    async def _run(self, commands: Sequence[Command]) -> list[Answer]:
        if self._exchange is None:
            raise RedisError("not connected")
        return await self._exchange.run(commands) if commands else []

    async def _scan(self, node: Node, cursor: bytes, pattern: bytes) -> tuple[bytes, list[bytes]]:
        options = (b"MATCH", pattern, b"COUNT", b"%d" % SCAN_COUNT, b"TYPE", b"string")
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
        found = _scanned(answer)
        if found is None:
            raise RedisError(f"{node.endpoint}: invalid answer to SCAN. Is this a Redis or Valkey server?")
        return found

    async def _disable_touch(self) -> None:
        """Keep reads from changing what servers evict."""
        if self._touch_disabled_on != self._counters["connections_opened"]:
            self._touch_disabled_on = self._counters["connections_opened"]
            refused = 0
            for node in self._nodes():
                try:
                    await node.ask(b"CLIENT", b"NO-TOUCH", b"ON")
                except RedisError:
                    # Unknown before Redis 7.2.
                    refused += not node.is_replica
            self._is_idle_kept = not refused

    def _nodes(self) -> Sequence[Node]:
        return self._topology.nodes if self._topology is not None else ()

    def _age_s(self, name: Name, ttl_ms: int, idle: Answer) -> float | None:
        """Return how long a value was unused: by its time to live, which use renews, or by its idle time."""
        # Servers that evict by frequency have no idle time.
        idle_s = float(idle) if isinstance(idle, int) else None
        if not self._config.ttl or ttl_ms < 0:
            if isinstance(idle, ServerRefusedError) and idle.code == "NOPERM":
                self._refuse("OBJECT IDLETIME", idle)
            return idle_s
        age_s = max(0.0, float(self._config.ttl) - ttl_ms / 1e3)
        # A block of engines with a shorter ttl than ours looks too old by its ttl; its idle time is a second bound.
        # Without NO-TOUCH, describing a block reset its idle time, but not that of its later parts.
        if idle_s is None or not (self._is_idle_kept or name.part):
            return age_s
        return min(age_s, idle_s + _IDLE_UNIT_S)

    def _refuse(self, command: str, error: RedisError) -> NoReturn:
        """Raise a failure; if rights are missing, name them."""
        if not isinstance(error, ServerRefusedError) or error.code != "NOPERM":
            raise error
        raise RedisError(
            f"this user may not run {command} on keys under {self._config.prefix!r} (NOPERM). The admin tools need "
            "more rights than an engine: grant those listed in docs/admin.md."
        ) from error


def _read(key: bytes, prefix: bytes) -> Name | None:
    """Parse a name; None if it is not one of the backend's."""
    match = _NAME.fullmatch(key, len(prefix)) if key.startswith(prefix) else None
    if match is None:
        return None
    digits, hexadecimal, part = match.groups()
    block = key[: match.end(2)]
    return Name(block, digits.decode(), bytes.fromhex(hexadecimal.decode()), None if part is None else int(part))


def _head_bytes(name: Name) -> int:
    """Return the length of a value's part header and, if the record begins here, of the record header."""
    return (0 if name.part is None else PART_HEADER_BYTES) + (HEADER_BYTES if name.is_block else 0)


def _scanned(answer: Reply) -> tuple[bytes, list[bytes]] | None:
    if not isinstance(answer, list) or len(answer) != 2:
        return None
    cursor, keys = answer
    if not isinstance(cursor, bytes) or not isinstance(keys, list):
        return None
    return cursor, [key for key in keys if isinstance(key, bytes)]
