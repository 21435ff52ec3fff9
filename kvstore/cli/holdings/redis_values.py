"""The values of a redis tier on its servers, beside those of others: found by SCAN on every master, and asked about."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NoReturn

import msgspec

from kvstore.backends.redis.config import RedisConfig
from kvstore.backends.redis.exchange import Answer, Command, Exchange
from kvstore.backends.redis.failures import RedisError, ServerRefusedError, read_error
from kvstore.backends.redis.node import Node, NodeCounters
from kvstore.backends.redis.parts import PART_HEADER_BYTES, part_key
from kvstore.backends.redis.resp import ErrorReply, Reply, Target, encode_command
from kvstore.backends.redis.topology import Topology, connected
from kvstore.codec.record import HEADER_BYTES
from kvstore.config import Seconds
from kvstore.types import KEY_BYTES_MAX, BlockKey

__all__ = ["Name", "Value", "Values"]

SCAN_COUNT: Final = 256
"""Keys that a server looks at for one SCAN: some hundred microseconds, in which it serves nobody else. With names of
the greatest length the answer stays within what a connection takes."""

_SEEN_MAX: Final = 1 << 20
"""Names remembered (some 150 MB), as SCAN may give one twice; beyond that such a value is given twice."""

_TIMEOUT_S: Final = 10.0
"""Time for an answer at least: nobody waits for a token here, and a busy server deserves patience."""

_TRIES: Final = 3
"""Times that a server is asked to list on: a connection may break, and the place in the list is not lost by it."""

_NAME: Final = re.compile(rb"([0-9a-f]{32}):((?:[0-9a-f]{2}){1,%d})(?::(0|[1-9]\d{0,4}))?" % KEY_BYTES_MAX)

_IDLE_UNIT_S: Final = 1.0
"""Servers count idle time in whole seconds."""

_GONE: Final = -2
"""Answer to PTTL where there is no such key."""


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a value, as the backend makes them.

    Attributes:
        block: The name of its block: all of it, but for the number of the part.
        digits: Beginning of the namespace, 32 digits.
        key: Key of the block.
        part: Number of the part; None where the record is one value.
    """

    block: bytes
    digits: str
    key: BlockKey
    part: int | None

    @property
    def full(self) -> bytes:
        """All of it, as the server knows it."""
        return self.block if self.part is None else part_key(self.block, self.part)

    @property
    def is_block(self) -> bool:
        """Whether the block is there if this value is."""
        return not self.part


@dataclass(frozen=True, slots=True)
class Value:
    """What a server says of a value.

    Attributes:
        name: Its name.
        size_bytes: Its length.
        head: Its first bytes: the header of a part, if it is one, and that of the record, if it begins there.
        age_s: Seconds since it was written or used, as far as the server knows; None if it does not know at all.
    """

    name: Name
    size_bytes: int
    head: bytes
    age_s: float | None


class Values:
    """Asks servers. Not one of its commands is about a name that the backend does not make.

    Args:
        config: The tier's configuration.
    """

    def __init__(self, config: RedisConfig) -> None:
        # One connection: enough for one who looks, and on it the server was told that looking is no use of a block.
        patience = Seconds(max(float(config.timeout), _TIMEOUT_S))
        self._config = msgspec.structs.replace(config, connections=1, timeout=patience, read_from="master")
        self._counters = NodeCounters()
        self._topology: Topology | None = None
        self._exchange: Exchange | None = None
        self._told = 0
        self._is_idle_kept = False

    async def open(self) -> None:
        """Connect.

        Raises:
            ConfigError: The configuration can't be used.
            RedisError: The server can't be reached, or refuses.
        """
        self._topology = await connected(self._config, self._counters)
        self._exchange = Exchange(self._topology)

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        topology, self._topology = self._topology, None
        if topology is not None:
            await topology.close()

    async def pages(self, namespace: str = "") -> AsyncGenerator[list[Name], None]:
        """Yield the names of all values of the tier, or of those of a namespace, some at once.

        Raises:
            RedisError: A server can't be asked, or refuses.
        """
        prefix = self._config.prefix.encode()
        # No character that a prefix may have means anything in a pattern.
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
        """Return what the servers say of some values; what has gone is left out.

        Raises:
            RedisError: A server can't be asked, or refuses.
        """
        await self._tell()
        # How long it was idle first: before Redis 7.2 asking for its length ends that.
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
        """Read values, each no further than its target goes where it is longer; a failure is an answer, too."""
        await self._tell()
        commands = [
            Command(name, [encode_command(b"GET", name)], target, target.capacity_bytes) for name, target in wanted
        ]
        answers = await self._run(commands)
        for answer in answers:
            if isinstance(answer, ServerRefusedError) and answer.code == "NOPERM":
                self._refuse("GET", answer)
        return answers

    async def _ask(self, questions: Sequence[tuple[bytes, ...]], optional: bytes = b"") -> list[Answer]:
        """Return the answers to commands, whose last or second word is a name. All but ``optional`` have to succeed."""
        commands = [
            Command(words[2] if words[0] == b"OBJECT" else words[1], [encode_command(*words)], None)
            for words in questions
        ]
        answers = await self._run(commands)
        for words, answer in zip(questions, answers, strict=True):
            # A value of another type has our name and is none of ours.
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
            except RedisError as error:
                if not left:
                    # Nobody else can say what lies there: a part of the answer would look like all of it.
                    reason = str(error).partition("] ")[2].removeprefix(f"{node.endpoint}: ")
                    raise RedisError(f"{node.endpoint}: what lies there can't be listed: {reason}") from error
        if isinstance(answer, ErrorReply):
            self._refuse("SCAN", read_error(answer).error)
        found = _scanned(answer)
        if found is None:
            raise RedisError(f"{node.endpoint}: its answer to SCAN can't be read. Is this a Redis or Valkey server?")
        return found

    async def _tell(self) -> None:
        """Tell servers that what is read here is not used, or it would change what they evict."""
        if self._told != self._counters.connections_opened:
            self._told = self._counters.connections_opened
            refused = 0
            for node in self._nodes():
                answer: Reply = None
                # Before Redis 7.2 there is no such command, and where it is refused nothing else can be done.
                with suppress(RedisError):
                    answer = await node.ask(b"CLIENT", b"NO-TOUCH", b"ON")
                refused += not node.is_replica and (answer is None or isinstance(answer, ErrorReply))
            self._is_idle_kept = not refused

    def _nodes(self) -> Sequence[Node]:
        return self._topology.nodes if self._topology is not None else ()

    def _age_s(self, name: Name, ttl_ms: int, idle: Answer) -> float | None:
        """Return how long a value was not used: use renews its time to live; where it has none, the server may know."""
        # A server that evicts by frequency knows no such time.
        idle_s = float(idle) if isinstance(idle, int) else None
        if not self._config.ttl or ttl_ms < 0:
            if isinstance(idle, ServerRefusedError) and idle.code == "NOPERM":
                self._refuse("OBJECT IDLETIME", idle)
            return idle_s
        age_s = max(0.0, float(self._config.ttl) - ttl_ms / 1e3)
        # Engines with a shorter time to live have set less than ours, so that what they just used looks old by that.
        # Where looking at a value ends its idle time, earlier commands did so for blocks, but hardly for other parts.
        if idle_s is None or not (self._is_idle_kept or name.part):
            return age_s
        return min(age_s, idle_s + _IDLE_UNIT_S)

    def _refuse(self, command: str, error: RedisError) -> NoReturn:
        """Raise a failure; of a lack of rights, what an operator has to know."""
        if not isinstance(error, ServerRefusedError) or error.code != "NOPERM":
            raise error
        raise RedisError(
            f"the server does not let this user run {command} on keys under {self._config.prefix!r} (NOPERM). Looking "
            "after a tier takes more rights than using it: give a user that has those of docs/admin.md."
        ) from error


def _read(key: bytes, prefix: bytes) -> Name | None:
    """Read a name; None if the backend makes none like it."""
    match = _NAME.fullmatch(key, len(prefix)) if key.startswith(prefix) else None
    if match is None:
        return None
    digits, hexadecimal, part = match.groups()
    block = key[: match.end(2)]
    return Name(block, digits.decode(), bytes.fromhex(hexadecimal.decode()), None if part is None else int(part))


def _head_bytes(name: Name) -> int:
    """Return how much of a value is its own header and, where the record begins in it, that of the record."""
    return (0 if name.part is None else PART_HEADER_BYTES) + (HEADER_BYTES if name.is_block else 0)


def _scanned(answer: Reply) -> tuple[bytes, list[bytes]] | None:
    if not isinstance(answer, list) or len(answer) != 2:
        return None
    cursor, keys = answer
    if not isinstance(cursor, bytes) or not isinstance(keys, list):
        return None
    return cursor, [key for key in keys if isinstance(key, bytes)]
