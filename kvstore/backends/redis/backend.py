"""The Redis backend: records as values of Redis or Valkey."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import ClassVar, Final
from weakref import WeakValueDictionary

from kvstore.backends.base import Backend, BackendStats, RecordGeometry, RecordRead, RecordWrite
from kvstore.backends.redis.config import RedisConfig
from kvstore.backends.redis.connection import Answer
from kvstore.backends.redis.exchange import Command, Exchange
from kvstore.backends.redis.failures import RedisError, SkippedError
from kvstore.backends.redis.limits import LIMITS, Limits
from kvstore.backends.redis.parts import (
    DESCRIPTION,
    PART_BYTES,
    PartsRead,
    description_ttl_s,
    in_parts,
    part_count,
    part_key,
)
from kvstore.backends.redis.resp import Filled, Reply, Target, encode_arguments, encode_command
from kvstore.backends.redis.topology import Topology, checked_tls
from kvstore.backends.stream import check_tls
from kvstore.bounded import BoundedDict
from kvstore.config import TierConfig
from kvstore.errors import BackendClosedError
from kvstore.namespace import Namespace
from kvstore.runtime.limits import CallsUnderWay
from kvstore.types import BlockInfo, BlockKey, Locality, Medium, Outcome

logger = logging.getLogger("kvstore.backends.redis")

_COUNTERS: Final = (
    "connections_opened", "connections_failed", "connections_lost", "answers_late", "requests_moved", "retries",
    "redirects", "topology_refreshes", "ttl_renewals", "parts_removed",
)  # fmt: skip

_REMEMBERED_MAX: Final = 262144
"""Blocks with a remembered renewal (about 30 MB); the next use of a forgotten block renews its time to live early."""

_RENEW_SHARE: Final = 0.25
"""Fraction of the time to live after which a use renews it. A block lives for at least three quarters of the time to
live after its last use, at the cost of few commands."""

_WAITING_MAX: Final = 8192
"""Maximum pending renewals; further blocks are renewed at their next use."""

_RENEWED_TOGETHER: Final = 256
"""Blocks of one batch of renewals; each block has a command for each of its parts."""

_NAMESPACE_DIGITS: Final = 32
"""Digits of the namespace in a key: 128 bits distinguish namespaces, and the record's header has the full digest."""


class RedisBackend(Backend):
    """Records on a Redis or Valkey server, a cluster, or a pair managed by Sentinel; one value per block or part.

    Engines share the server, so each batch of lookups queries it: one round trip per node. While a cluster node is
    down, its blocks are misses and stores to it are shed.
    """

    name: ClassVar[str] = "redis"
    config_type: ClassVar[type[TierConfig]] = RedisConfig
    holdings_type: ClassVar[str] = "kvstore.backends.redis.holdings:RedisHoldings"
    medium = Medium.STORAGE
    locality = Locality.REMOTE
    evicts_silently = True
    part_bytes: ClassVar[int] = PART_BYTES
    """Longest part of a block. Fixed by the format; only tests use other values."""

    def __init__(self, config: RedisConfig, limits: Limits = LIMITS) -> None:
        super().__init__(config)
        self.config: RedisConfig = config
        self._counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self._topology = Topology(config, self._counters, limits)
        self._exchange = Exchange(self._topology, self._counters)
        # None before open() and after close().
        self._commands: _RecordCommands | None = None
        self._renewed: BoundedDict[BlockKey, float] = BoundedDict(_REMEMBERED_MAX)
        self._description: Command | None = None  # Stores the fields of the namespace; None once sent.
        self._to_renew: list[BlockKey] = []
        self._renewing: asyncio.Task[None] | None = None
        self._under_way = CallsUnderWay()

    def check(self) -> None:
        check_tls(checked_tls(self.config))

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        """Connect, log in, and check the server's memory settings once.

        Raises:
            ConfigError: The configuration can't be used.
            BackendError: The server is unreachable, or refuses.
        """
        await self._topology.open()
        self._commands = _RecordCommands(self.config, namespace, geometry, self.part_bytes)
        self._description = self._commands.describe(namespace)
        await self._check_memory_settings()

    async def close(self) -> None:
        self._commands = None
        renewing, self._renewing = self._renewing, None
        if renewing is not None:
            renewing.cancel()
        await self._topology.close()
        if renewing is not None:
            await asyncio.wait([renewing])
        # Running calls have failed and return soon.
        await self._under_way.ended()

    async def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool | None]:
        """A failing node of a cluster affects only the blocks on it."""
        commands = self._ready()
        answers = await self._run([commands.exists(key) for key in keys])
        failures = [answer for answer in answers if isinstance(answer, RedisError)]
        if failures:
            self.last_error = str(failures[0])
            if len(failures) == len(answers) and not self._topology.has_working_nodes:
                raise failures[0]
        return [None if isinstance(answer, RedisError) else bool(answer) for answer in answers]

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        commands = self._ready()
        if commands.in_parts:
            outcomes = await _together([self._put_parts(commands, write) for write in writes])
        else:
            answers = await self._run([commands.put(write) for write in writes])
            outcomes = [self._put_outcome(answer) for answer in answers]
        if self._description is not None and Outcome.OK in outcomes:
            command, self._description = self._description, None
            # Only the admin tools read it, so its loss is no failure of the batch.
            await self._run([command])
        if self.config.ttl:
            now = time.monotonic()
            for write, outcome in zip(writes, outcomes, strict=True):
                if outcome is Outcome.OK:
                    self._renewed[write.key] = now
        return outcomes

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        commands = self._ready()
        if commands.in_parts:
            return await _together([self._get_parts(commands, read) for read in reads])
        answers = await self._run([commands.get(read) for read in reads])
        return [self._get_outcome(read, answer) for read, answer in zip(reads, answers, strict=True)]

    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        commands = self._ready()
        answers = await self._remove(commands, keys)
        for answer in answers:
            # Blocks on a node that is down cannot be read, so its failure is not raised.
            if isinstance(answer, RedisError) and not isinstance(answer, SkippedError):
                self.last_error = str(answer)
                raise answer
        return [answer == 1 for answer in answers]

    async def scan(self) -> AsyncIterator[BlockInfo]:
        """Yield nothing: the server holds the blocks of many engines, and lookups query it."""
        self._ready()
        return
        yield

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Renew the time to live of blocks, unless it was renewed recently."""
        if self._commands is None or not self.config.ttl:
            return
        now = time.monotonic()
        for key in keys:
            # Blocks of other engines or earlier runs have an unknown age and are renewed.
            age_s = now - self._renewed.get(key, float("-inf"))
            if age_s >= _RENEW_SHARE * self.config.ttl and len(self._to_renew) < _WAITING_MAX:
                self._to_renew.append(key)
                self._renewed[key] = now
        if self._to_renew and self._renewing is None:
            self._renewing = asyncio.get_running_loop().create_task(self._renew())

    def note_read(self, intact: Sequence[BlockKey], damaged: Sequence[BlockKey]) -> None:
        """Renew the time to live only now, because failed reads must not keep an unreadable block alive."""
        self.touch(intact)

    def stats(self) -> BackendStats:
        nodes = self._topology.nodes
        gauges = {
            "nodes": len(nodes),
            "nodes_down": sum(node.down for node in nodes),
            "connections": sum(node.connection_count for node in nodes),
            "requests_waiting": sum(node.waiting_count for node in nodes),
        }
        counters = {**self._counters, "credentials_refused": self._topology.refusals}
        ready = not nodes or not all(node.down for node in nodes)
        return BackendStats(counters=counters, ready=ready, gauges={name: float(n) for name, n in gauges.items()})

    async def _check_memory_settings(self) -> None:
        """Warn if the server will refuse stores when full, or never evict blocks."""
        nodes = self._topology.nodes
        node = next((node for node in nodes if not node.is_replica and not node.down), None)
        if node is None:
            return
        named = [node.info.get(name, "") for name in (b"server", b"version", b"mode")]
        logger.info("Blocks go to %s %s (%s), nodes: %d", *named, len(nodes))
        try:
            answer = await node.ask(b"INFO", b"memory")
        except RedisError as error:
            logger.debug("The server's memory settings could not be asked for: %s", error)
            return
        lines = answer.splitlines() if isinstance(answer, bytes) else []
        found = dict(line.partition(b":")[::2] for line in lines)
        policy = found.get(b"maxmemory_policy")
        if found.get(b"maxmemory") == b"0":
            logger.warning("The server has no maxmemory: it grows until the system stops it. Set one.")
        elif policy == b"noeviction":
            logger.warning("maxmemory-policy is noeviction: a full server refuses stores. Set allkeys-lru.")
        elif policy is not None and policy.startswith(b"volatile-") and not self.config.ttl:
            logger.warning("maxmemory-policy is volatile-…, which never evicts blocks without 'ttl'. Set one.")

    async def _get_parts(self, commands: _RecordCommands, read: RecordRead) -> Outcome:
        """Read a record in parts. If they do not fit together, read them again from the masters, then remove them.

        A replica may lag, and another engine may just have stored the block again.
        """
        for from_master in (False, True):
            parts, wanted = commands.get_parts(read, from_master=from_master)
            replies: list[Reply] = []
            for answer in await self._run(wanted):
                if isinstance(answer, RedisError):
                    return self._failed(answer, instead=Outcome.MISS)
                replies.append(answer)
            found = parts.decide(replies)
            if not found.remove:
                read.filled_bytes = found.filled_bytes
                return found.outcome
        self._counters["parts_removed"] += 1
        await self._remove(commands, [read.key])
        return Outcome.MISS

    async def _remove(self, commands: _RecordCommands, keys: Sequence[BlockKey]) -> list[Answer]:
        """Remove blocks; return for each the first failure, or the answer for the first part.

        The first part is removed last, and only if the others are gone: without it, no lookup or listing would find the
        block, and the others would stay.
        """
        removals = [commands.delete(key) for key in keys]
        others = iter(await self._run([command for _, *parts in removals for command in parts]))
        answers = [[next(others) for _ in parts] for _, *parts in removals]
        failures = [next((one for one in some if isinstance(one, RedisError)), None) for some in answers]
        left = [first for (first, *_), failure in zip(removals, failures, strict=True) if failure is None]
        firsts = iter(await self._run(left))
        return [next(firsts) if failure is None else failure for failure in failures]

    async def _put_parts(self, commands: _RecordCommands, write: RecordWrite) -> Outcome:
        """Write the parts of a record, the first one last; one writer of a key at a time."""
        async with commands.writer_lock(write.key):
            (there,) = await self._run([commands.exists(write.key)])
            if isinstance(there, RedisError):
                return self._put_outcome(there)
            if there:
                return Outcome.EXISTS
            first, *others = commands.put_parts(write)
            for answer in await self._run(others):
                if isinstance(answer, RedisError):
                    # The parts written so far are useless.
                    await self._run(commands.delete(write.key)[1:])
                    return self._put_outcome(answer)
            (answer,) = await self._run([first])
            return self._put_outcome(answer)

    async def _renew(self) -> None:
        try:
            while (commands := self._commands) is not None and self._to_renew:
                keys, self._to_renew = self._to_renew[:_RENEWED_TOGETHER], self._to_renew[_RENEWED_TOGETHER:]
                self._counters["ttl_renewals"] += len(keys)
                answers = iter(await self._run([command for key in keys for command in commands.renew(key)]))
                for key in keys:
                    if any([isinstance(next(answers), RedisError) for _ in range(commands.parts_max)]):
                        self._renewed.pop(key, None)  # The next use tries again.
        finally:
            self._renewing = None

    async def _run(self, commands: Sequence[Command]) -> list[Answer]:
        with self._under_way:
            return await self._exchange.run(commands)

    def _ready(self) -> _RecordCommands:
        if self._commands is None:
            raise BackendClosedError("not open: use it after open() and before close()", backend=self.name)
        return self._commands

    def _put_outcome(self, answer: Answer) -> Outcome:
        if isinstance(answer, RedisError):
            return self._failed(answer, instead=Outcome.SHED)
        return Outcome.OK if answer == "OK" else Outcome.EXISTS

    def _get_outcome(self, read: RecordRead, answer: Answer) -> Outcome:
        if isinstance(answer, RedisError):
            return self._failed(answer, instead=Outcome.MISS)
        if not isinstance(answer, Filled):
            return Outcome.MISS
        read.filled_bytes = answer
        return Outcome.OK

    def _failed(self, error: RedisError, *, instead: Outcome) -> Outcome:
        """Return the outcome of a failure; ``instead`` if the node was skipped because it is down."""
        if isinstance(error, SkippedError):
            return instead
        self.last_error = str(error)
        return error.outcome


async def _together(work: Sequence[Coroutine[None, None, Outcome]]) -> list[Outcome]:
    """Run coroutines concurrently; all have ended when this returns."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
    return [task.result() for task in tasks]


class _RecordCommands:
    """Makes the commands for the blocks of one namespace.

    A block's key on the server is ``<prefix><32 digits of the namespace>:<key in hex>``, followed by ``:<number>`` if
    records are in parts. All records are in parts if one may be longer than ``part_bytes``.
    """

    def __init__(self, config: RedisConfig, namespace: Namespace, geometry: RecordGeometry, part_bytes: int) -> None:
        self._start = f"{config.prefix}{namespace.hex[:_NAMESPACE_DIGITS]}:".encode()
        self._part_bytes = part_bytes
        self.parts_max = part_count(geometry.record_bytes_max, part_bytes)
        self.in_parts = self.parts_max > 1
        self._ttl = b"%d" % max(1, round(config.ttl))
        expiry = (b"EX", self._ttl) if config.ttl else ()
        # Number and encoding of the arguments behind the value of a SET.
        self._overwrite_end = len(expiry), encode_arguments(*expiry)
        self._create_end = len(expiry) + 1, encode_arguments(b"NX", *expiry)
        self._reads_replica = config.read_from == "replica"
        self._locks: WeakValueDictionary[BlockKey, asyncio.Lock] = WeakValueDictionary()

    def key_of(self, key: BlockKey) -> bytes:
        name = self._start + key.hex().encode()
        return part_key(name, 0) if self.in_parts else name

    def describe(self, namespace: Namespace) -> Command | None:
        """Return the command that stores the fields of the namespace; None if they are unknown."""
        name, value = self._start + DESCRIPTION, namespace.description()
        frame = encode_command(b"SET", name, value, b"EX", b"%d" % int(description_ttl_s(float(self._ttl))))
        return Command(name, [frame], str, len(value)) if value else None

    def exists(self, key: BlockKey) -> Command:
        name = self.key_of(key)
        frame = b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(name), name)
        return Command(name, [frame], int, reads=self._reads_replica)

    def put(self, write: RecordWrite) -> Command:
        """Return the command that stores a record unless the key exists."""
        return self._set(self.key_of(write.key), write.buffers, new=True)

    def put_parts(self, write: RecordWrite) -> list[Command]:
        """Return the commands that store a record's parts; send the first one after the others have succeeded."""
        values = in_parts(write.buffers, self._part_bytes)
        named = zip(self._names(write.key), values, strict=False)
        return [self._set(name, value, new=not i) for i, (name, value) in enumerate(named)]

    def get(self, read: RecordRead) -> Command:
        return self._get(self.key_of(read.key), Target(read.buffers), reads=self._reads_replica)

    def get_parts(self, read: RecordRead, *, from_master: bool) -> tuple[PartsRead, list[Command]]:
        """Return the commands that read the parts of a record, and the reader of their answers."""
        parts = PartsRead(read.buffers, self._part_bytes)
        reads = self._reads_replica and not from_master
        names = self._names(read.key)
        return parts, [self._get(name, target, reads=reads) for name, target in zip(names, parts.targets, strict=False)]

    def delete(self, key: BlockKey) -> list[Command]:
        """Return the ``parts_max`` commands that remove a block; the reply to the first shows whether it existed."""
        return [Command(name, [encode_command(b"UNLINK", name)], int) for name in self._names(key)]

    def renew(self, key: BlockKey) -> list[Command]:
        return [Command(name, [encode_command(b"EXPIRE", name, self._ttl)], int) for name in self._names(key)]

    def writer_lock(self, key: BlockKey) -> asyncio.Lock:
        """Return the lock for writers of a block in parts; it exists while held or awaited."""
        return self._locks.setdefault(key, asyncio.Lock())

    def _names(self, key: BlockKey) -> list[bytes]:
        if not self.in_parts:
            return [self.key_of(key)]
        name = self._start + key.hex().encode()
        return [part_key(name, number) for number in range(self.parts_max)]

    def _get(self, name: bytes, target: Target, *, reads: bool) -> Command:
        frame = b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name)
        return Command(name, [frame], target, target.capacity_bytes, reads=reads)

    def _set(self, name: bytes, value: Sequence[bytes | memoryview], *, new: bool) -> Command:
        size = sum(map(len, value))
        extra, end = self._create_end if new else self._overwrite_end
        start = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + extra, len(name), name, size)
        # An empty piece would never count as sent.
        return Command(name, [start, *filter(len, value), b"\r\n" + end], str, size)
