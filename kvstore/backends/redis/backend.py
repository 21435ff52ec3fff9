"""The Redis backend: records as values of Redis or Valkey."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import ClassVar, Final

from kvstore.backends.base import Backend, BackendStats, RecordGeometry, RecordRead, RecordWrite
from kvstore.backends.redis import control
from kvstore.backends.redis.config import RedisConfig
from kvstore.backends.redis.exchange import Answer, Command, Exchange, SkippedError
from kvstore.backends.redis.failures import RedisError, outcome_of_failure
from kvstore.backends.redis.node import NodeCounters
from kvstore.backends.redis.parts import PART_BYTES
from kvstore.backends.redis.records import RecordCommands
from kvstore.backends.redis.resp import Filled
from kvstore.backends.redis.topology import Topology, connected
from kvstore.bounded import BoundedDict
from kvstore.config import TierConfig
from kvstore.errors import BackendClosedError, BackendError
from kvstore.namespace import Namespace
from kvstore.runtime.limits import CallsUnderWay
from kvstore.types import BlockInfo, BlockKey, Locality, Medium, Outcome

__all__ = ["RedisBackend"]

logger = logging.getLogger("kvstore.backends.redis")

_REMEMBERED_MAX: Final = 262144
"""Blocks remembered (some 30 MB); of what is forgotten, one use more renews the time to live."""

_RENEW_SHARE: Final = 0.25
"""Part of its time to live that has to pass before a block is renewed: a block lives three quarters at least after its
last use, for a few commands in all that time."""

_WAITING_MAX: Final = 8192
"""Renewals that wait to be sent; what comes on top is renewed at its next use."""


class RedisBackend(Backend):
    """Records on a Redis or Valkey server, a cluster, or a pair watched by Sentinel; one value per block.

    Others write to the same server, so that it is asked what it holds: one round trip per node and batch of lookups.
    A node of a cluster that is down is left out: its blocks are misses, and stores to it are shed, until it is back.
    """

    name: ClassVar[str] = "redis"
    config_type: ClassVar[type[TierConfig]] = RedisConfig
    medium = Medium.STORAGE
    locality = Locality.REMOTE
    part_bytes: ClassVar[int] = PART_BYTES
    """Longest part of a block. Part of the format: only tests have another."""

    def __init__(self, config: RedisConfig) -> None:
        super().__init__(config)
        self.config: RedisConfig = config
        self._counters = NodeCounters()
        self._topology: Topology | None = None
        self._exchange: Exchange | None = None
        self._commands: RecordCommands | None = None
        self._freshness = _Freshness(config.ttl)
        self._renewing: asyncio.Task[None] | None = None
        self._counts: dict[str, int] = {"ttl_renewals": 0, "parts_removed": 0}
        self._under_way = CallsUnderWay()

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        """Connect, log in, and look once at what kind of server it is.

        Raises:
            ConfigError: The configuration can't be used.
            BackendError: The server can't be reached, or refuses.
        """
        topology = await connected(self.config, self._counters)
        self._topology = topology
        self._exchange = Exchange(topology)
        self._commands = RecordCommands(self.config, namespace, geometry, self.part_bytes)
        await self._look_at_memory(topology)

    async def close(self) -> None:
        """See :meth:`Backend.close`."""
        topology, self._topology = self._topology, None
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait([self._renewing])
        if topology is not None:
            await topology.close()
        # Calls under way have failed with that; they are about to return.
        await self._under_way.ended()

    async def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool | None]:
        """See :meth:`Backend.exists`. One node of a cluster that has trouble costs only what lies there."""
        commands = self._ready()
        answers = await self._run([commands.exists(key) for key in keys])
        failures = [answer for answer in answers if isinstance(answer, RedisError)]
        if failures:
            self.last_error = str(failures[0])
            if len(failures) == len(answers) and not self._has_well_nodes:
                raise failures[0]
        return [None if isinstance(answer, RedisError) else bool(answer) for answer in answers]

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        """See :meth:`Backend.put`."""
        commands = self._ready()
        if commands.in_parts:
            outcomes = await self._together([self._put_parts(commands, write) for write in writes])
        else:
            answers = await self._run([commands.put(write) for write in writes])
            outcomes = [self._put_outcome(answer) for answer in answers]
        fresh = [write.key for write, outcome in zip(writes, outcomes, strict=True) if outcome is Outcome.OK]
        self._freshness.note_put(fresh, time.monotonic())
        return outcomes

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        """See :meth:`Backend.get_into`."""
        commands = self._ready()
        if commands.in_parts:
            outcomes = await self._get_parts(commands, reads)
        else:
            answers = await self._run([commands.get(read) for read in reads])
            outcomes = [self._get_outcome(read, answer) for read, answer in zip(reads, answers, strict=True)]
        return outcomes

    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """See :meth:`Backend.delete`."""
        commands = self._ready()
        answers = await self._run([command for key in keys for command in commands.delete(key)])
        return [self._flag(answer) for answer in answers[:: commands.parts_max]]

    async def scan(self) -> AsyncIterator[BlockInfo]:
        """Yield nothing: the server holds the blocks of many, and is asked when one is looked for."""
        self._ready()
        return
        yield

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """See :meth:`Backend.touch`: a block's time to live begins anew, unless that was done not long ago."""
        if self._topology is None or not keys:
            return
        if self._freshness.note_use(keys, time.monotonic()) and self._renewing is None:
            self._renewing = asyncio.get_running_loop().create_task(self._renew())

    def note_verified(self, keys: Sequence[BlockKey]) -> None:
        """See :meth:`Backend.note_verified`: what can't be read here shall not live on because somebody tries."""
        self.touch(keys)

    def stats(self) -> BackendStats:
        """See :meth:`Backend.stats`."""
        topology, exchange, counters = self._topology, self._exchange, self._counters
        nodes = topology.nodes if topology is not None else ()
        return BackendStats(
            counters={
                "connections_opened": counters.connections_opened,
                "connections_failed": counters.connections_failed,
                "connections_lost": counters.connections_lost,
                "answers_late": counters.answers_late,
                "requests_moved": counters.requests_moved,
                "retries": exchange.retries if exchange else 0,
                "redirects": exchange.redirects if exchange else 0,
                "topology_refreshes": topology.refreshes if topology else 0,
                **self._counts,
            },
            gauges={
                "nodes": float(len(nodes)),
                "nodes_down": float(sum(node.down for node in nodes)),
                "connections": float(sum(node.connection_count for node in nodes)),
                "requests_waiting": float(sum(node.waiting_count for node in nodes)),
            },
        )

    @property
    def _has_well_nodes(self) -> bool:
        """Whether a part of the medium is in order, where it has parts."""
        topology = self._topology
        return topology is not None and topology.has_many_nodes and any(node.is_well for node in topology.nodes)

    async def _look_at_memory(self, topology: Topology) -> None:
        """Warn of a server that will refuse stores, or never let go of them."""
        node = next((node for node in topology.nodes if not node.is_replica and not node.down), None)
        if node is None:
            return
        it = node.info
        logger.info("Blocks go to %s %s (%s), nodes: %d", it.server, it.version, it.mode, len(topology.nodes))
        try:
            answer = await node.ask(b"INFO", b"memory")
        except RedisError as error:
            logger.debug("The server's memory settings could not be asked: %s", error)
            return
        info = control.read_memory(answer) if isinstance(answer, bytes) else None
        if info is None:
            return
        if not info.limit_bytes:
            logger.warning("The server has no maxmemory: it grows until the system stops it. Set one.")
        elif info.policy == "noeviction":
            logger.warning("maxmemory-policy is noeviction: a full server refuses stores. Set allkeys-lru.")
        elif info.policy.startswith("volatile-") and not self.config.ttl:
            logger.warning("maxmemory-policy is %s, which never evicts blocks without 'ttl'. Set one.", info.policy)

    async def _get_parts(self, commands: RecordCommands, reads: Sequence[RecordRead]) -> list[Outcome]:
        """Read records in parts. What does not fit together is read once more, from masters, before it is removed.

        A replica may lag, and another engine may just have stored the block anew.
        """
        outcomes, torn = await self._try_parts(commands, reads)
        if not torn:
            return outcomes
        again, still = await self._try_parts(commands, [reads[place] for place in torn], from_masters=True)
        for place, outcome in zip(torn, again, strict=True):
            outcomes[place] = outcome
        if still:
            self._counts["parts_removed"] += len(still)
            keys = [reads[torn[place]].key for place in still]
            await self._run([command for key in keys for command in commands.delete(key)])
        return outcomes

    async def _try_parts(
        self, commands: RecordCommands, reads: Sequence[RecordRead], *, from_masters: bool = False
    ) -> tuple[list[Outcome], list[int]]:
        """Read records in parts; return what became of each, and the places of those that are good for nothing."""
        targets = [commands.get_parts(read, from_master=from_masters) for read in reads]
        answers = iter(await self._run([command for _, group in targets for command in group]))
        outcomes, torn = [], []
        for place, (read, (parts, group)) in enumerate(zip(reads, targets, strict=True)):
            replies = [next(answers) for _ in group]
            failure = next((reply for reply in replies if isinstance(reply, RedisError)), None)
            if failure is not None:
                outcomes.append(self._failed(failure, instead=Outcome.MISS))
                continue
            found = parts.decide([reply for reply in replies if not isinstance(reply, RedisError)])
            outcomes.append(found.outcome)
            read.filled_bytes = found.filled_bytes
            if found.remove:
                torn.append(place)
        return outcomes, torn

    async def _put_parts(self, commands: RecordCommands, write: RecordWrite) -> Outcome:
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
                    # What was written of it is only in the way of others.
                    await self._run(commands.delete(write.key)[1:])
                    return self._put_outcome(answer)
            (answer,) = await self._run([first])
            return self._put_outcome(answer)

    async def _renew(self) -> None:
        try:
            while (commands := self._commands) is not None and (keys := self._freshness.take()):
                self._counts["ttl_renewals"] += len(keys)
                await self._run([command for key in keys for command in commands.renew(key)])
        except BackendError as error:
            logger.debug("Blocks could not be renewed: %s", error)
        finally:
            self._renewing = None

    async def _run(self, commands: Sequence[Command]) -> list[Answer]:
        if self._topology is None or self._exchange is None:
            raise BackendClosedError("not open: use it after open() and before close()", backend=self.name)
        if not commands:
            return []
        with self._under_way:
            return await self._exchange.run(commands)

    async def _together(self, work: Sequence[Coroutine[None, None, Outcome]]) -> list[Outcome]:
        """Run coroutines at once; none runs any more when this ends."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one) for one in work]
        except* BackendError as errors:
            # All for one reason: the backend was closed meanwhile.
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _ready(self) -> RecordCommands:
        if self._topology is None or self._commands is None:
            raise BackendClosedError("not open: use it after open() and before close()", backend=self.name)
        return self._commands

    def _flag(self, answer: Answer) -> bool:
        """Return a yes or no; a node that is known to be down has nothing to give."""
        if isinstance(answer, SkippedError):
            return False
        if isinstance(answer, RedisError):
            self.last_error = str(answer)
            raise answer
        return bool(answer)

    def _put_outcome(self, answer: Answer) -> Outcome:
        if isinstance(answer, RedisError):
            return self._failed(answer, instead=Outcome.SHED)
        return Outcome.OK if answer == "OK" else Outcome.EXISTS

    def _get_outcome(self, read: RecordRead, answer: Answer) -> Outcome:
        if isinstance(answer, RedisError):
            return self._failed(answer, instead=Outcome.MISS)
        if not isinstance(answer, Filled):
            return Outcome.MISS
        read.filled_bytes = answer.size_bytes
        return Outcome.OK

    def _failed(self, error: RedisError, *, instead: Outcome) -> Outcome:
        """Return the outcome of a failure; ``instead`` where one node of several is down and was not even asked."""
        if isinstance(error, SkippedError):
            return instead
        self.last_error = str(error)
        return outcome_of_failure(error)


class _Freshness:
    """Decides when the time to live (``ttl_s``, 0 for none) of a used block is renewed: not on every use."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._renewed: BoundedDict[bytes, float] = BoundedDict(_REMEMBERED_MAX)
        self._waiting: dict[bytes, None] = {}

    def note_put(self, keys: Sequence[bytes], now: float) -> None:
        """Note that blocks were put: fresh until a share of their time has passed."""
        if self.ttl_s:
            for key in keys:
                self._renewed[key] = now

    def note_use(self, keys: Sequence[bytes], now: float) -> bool:
        """Note a use of blocks; return whether renewals wait to be sent."""
        if not self.ttl_s:
            return False
        for key in keys:
            # A block of somebody else's, or of an earlier run: nothing is known of its age, so it is renewed.
            renewed = self._renewed.get(key)
            if renewed is None or now - renewed >= _RENEW_SHARE * self.ttl_s:
                if len(self._waiting) >= _WAITING_MAX:
                    break
                self._waiting[key] = None
                self._renewed[key] = now
        return bool(self._waiting)

    def take(self) -> list[bytes]:
        """Return the blocks to renew now."""
        waiting, self._waiting = list(self._waiting), {}
        return waiting
