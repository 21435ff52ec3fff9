"""One server: its connections, the requests that wait for one, and whether it is worth asking at all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.backends.redis.config import RedisConfig
from kvstore.backends.redis.connection import Connection, Request, ask
from kvstore.backends.redis.failures import AnswerLateError, NodeDownError, RedisError
from kvstore.backends.redis.login import ServerInfo, explained, logged_in
from kvstore.backends.redis.resp import Reply, encode_command
from kvstore.backends.stream import Endpoint, Stream
from kvstore.runtime.breaker import Breaker

__all__ = ["Node", "NodeCounters"]

logger = logging.getLogger("kvstore.backends.redis")

_PAUSE_S_MIN: Final = 0.05
_PAUSE_S_MAX: Final = 3.0
"""Pause between tries to connect: a restarted server is noticed soon, and a dead one costs next to nothing."""

_QUEUE_MAX: Final = 65536
"""Requests that wait; the tier's limit of bytes under way is reached long before."""

_REFUSALS_MAX: Final = 3
_REFUSED_S: Final = 0.25
_REFUSED_S_MAX: Final = 2.0
"""Errors in a row after which a node of several is left alone, and for how long before one command tries it again: a
server reads a gigabyte of its data in a few seconds, and rights are given back in as long."""

_MOVES_MAX: Final = 8
"""How often a request is sent again because somebody else's cancellation closed its connection."""


@dataclass(slots=True)
class NodeCounters:
    """Counts over all nodes of a backend."""

    connections_opened: int = 0
    connections_failed: int = 0
    connections_lost: int = 0
    answers_late: int = 0
    requests_moved: int = 0


class Node:
    """Spreads requests over a few connections to one server.

    A request goes to the idlest connection that has room; what finds none waits in order. While a node can't be
    reached requests fail at once, and it is tried again in the background, at intervals that grow, with jitter.

    Args:
        endpoint: Where it listens.
        config: Of the backend.
        context: TLS settings, if any.
        database: Number that ``SELECT`` is given.
        is_replica: Whether to read from it although it is one.
        counters: Shared by all nodes.
        on_trouble: Called when a connection broke or could not be had, as another node may have taken over.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        config: RedisConfig,
        context: ssl.SSLContext | None,
        *,
        database: int = 0,
        is_replica: bool = False,
        counters: NodeCounters | None = None,
        on_trouble: Callable[[], None] = lambda: None,
    ) -> None:
        self.endpoint = endpoint
        self.is_replica = is_replica
        self.info = ServerInfo()
        self._config = config
        self._context = context
        self._database = database
        self._counters = counters or NodeCounters()
        self._on_trouble = on_trouble
        self._loop = asyncio.get_running_loop()
        self._connections_max = config.connections
        self._connections: list[Connection] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._queue: deque[Request] = deque()
        self._failures = 0
        self._barren = 0
        self._coming_back: asyncio.Task[None] | None = None
        self._last_error: RedisError = NodeDownError("not connected yet")
        # A trial ends with its answer, and without a report where it is cancelled or its connection breaks.
        trial_s = config.connect_timeout + config.timeout
        self._refusals = Breaker(_REFUSALS_MAX, _REFUSED_S, _REFUSED_S_MAX, trial_s)
        self._pumping = False
        self._closed = False
        self._warned = False

    @property
    def down(self) -> bool:
        """Whether requests fail at once now."""
        return self._closed or (self._failures > 0 and not self._connections)

    @property
    def is_well(self) -> bool:
        """Whether it can be reached and has answered, lately, with something else than errors."""
        return not self.down and self._refusals.closed

    def admits(self) -> bool:
        """Whether it is worth asking; lets one caller through now and then where it answers with errors."""
        if self.down:
            return False
        return self._refusals.closed or self._refusals.admit_trial(self._loop.time())

    def note_answer(self) -> None:
        """Note an answer that is no error."""
        if self._refusals.failures:
            self._refusals.record_success()

    def note_refusal(self) -> None:
        """Note an error that speaks of the node and not of what was asked for."""
        self._refusals.record_failure(self._loop.time())

    @property
    def connection_count(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    @property
    def waiting_count(self) -> int:
        """Requests that wait for room."""
        return len(self._queue)

    async def connect(self) -> None:
        """Open a connection, to see that it can be done.

        Raises:
            RedisError: It can't; the text says why.
        """
        if not self._connections:
            await self._open_one()

    async def ask(self, *command: bytes) -> Reply:
        """Return the answer to one short command that is about no block.

        Raises:
            RedisError: None came, or it is longer than what has no target may be.
        """
        # Whatever it waits for has a bound of its own; this is for what nobody thought of.
        allowed_s = 2 * (self._config.connect_timeout + self._config.timeout)
        try:
            async with asyncio.timeout(allowed_s):
                return await ask(
                    encode_command(*command),
                    lambda request: self.submit([request]),
                    lambda request: self.cancel([request]),
                )
        except TimeoutError:
            raise AnswerLateError(f"{self.endpoint}: no answer within {allowed_s:.3g} s") from None

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests; each ends in its own time, perhaps at once."""
        if self.down or len(self._queue) + len(requests) > _QUEUE_MAX:
            reason = "too many requests wait. Lower inflight_bytes."
            if self.down:
                reason = str(self._last_error).removeprefix("[redis] ").removeprefix(f"{self.endpoint}: ")
            for request in requests:
                request.finish(NodeDownError(f"{self.endpoint}: {reason}"))
            return
        self._queue.extend(requests)
        self._pump()

    def cancel(self, requests: Sequence[Request]) -> None:
        """Give up requests at once: connections on which an answer is outstanding are closed, never used again."""
        connections = {request.connection for request in requests if not request.ended}
        for request in requests:
            # Ended first, so that closing the connection does not send it again; then its buffers are free.
            request.abandon()
        for connection in connections - {None}:
            if connection is not None:
                connection.close()

    async def close(self) -> None:
        """Close all connections; requests that wait fail. Idempotent."""
        self._closed = True
        tasks = [*self._opening, *([self._coming_back] if self._coming_back else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._last_error = NodeDownError("the backend is closed")
        for connection in list(self._connections):
            connection.close(self._last_error)
        self._fail_queue()

    def _pump(self) -> None:
        """Hand waiting requests to connections that have room, and open connections while there is too little."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._queue:
                request = self._queue[0]
                if request.ended:
                    self._queue.popleft()
                    continue
                connection = self._roomiest(request)
                if connection is None:
                    break
                self._queue.popleft()
                connection.submit(request)
        finally:
            self._pumping = False
        if self.down:
            self._fail_queue()
        self._grow()

    def _roomiest(self, request: Request) -> Connection | None:
        """Return the connection with the least to do, if it can take the request."""
        if not self._connections:
            return None
        for connection in self._connections:
            if not connection.outstanding:
                return connection
        best = min(self._connections, key=lambda connection: (connection.inflight_bytes, connection.outstanding))
        has_room = best.inflight_bytes + request.size_bytes <= self._config.connection_inflight
        return best if has_room and best.outstanding < self._config.pipeline_depth else None

    def _grow(self) -> None:
        """Open connections while all are busy, unless the node is being tried again anyway."""
        room = self._connections_max - len(self._connections) - len(self._opening)
        if room <= 0 or self._closed or self._coming_back is not None:
            return
        busy = sum(1 for connection in self._connections if connection.outstanding)
        wanted = len(self._queue) + (1 if busy and busy == len(self._connections) else 0)
        for _ in range(min(wanted, room)):
            task = self._loop.create_task(self._open_in_background())
            self._opening.add(task)
            # One that was cancelled before it began does not say so itself.
            task.add_done_callback(self._opening.discard)

    async def _open_in_background(self) -> None:
        try:
            await self._open_one()
        except RedisError:
            # Its reason was noted, and given to the requests that failed for it.
            return
        finally:
            # Before the next look at what is missing, which would still count it.
            self._opening.discard(asyncio.current_task())
        self._pump()

    async def _open_one(self) -> None:
        try:
            connection, info = await logged_in(
                self.endpoint,
                self._config,
                self._context,
                self._connection_over,
                database=self._database,
                is_replica=self.is_replica,
            )
        except RedisError as failure:
            self._note_not_opened(failure)
            raise
        self.info = info or self.info
        self._counters.connections_opened += 1
        connection.answered = 0
        self._failures = 0
        self._warned = False
        self._connections.append(connection)

    def _connection_over(self, stream: Stream) -> Connection:
        return Connection(
            stream,
            timeout_s=self._config.timeout,
            bytes_per_second_min=self._config.bytes_per_second_min,
            on_room=lambda connection: self._pump() if self._queue else None,
            on_closed=self._on_closed,
        )

    def _note_not_opened(self, failure: RedisError) -> None:
        self._counters.connections_failed += 1
        if not self._warned and not self._closed:
            self._warned = True
            logger.warning("A Redis node can't be used, and is tried again at growing intervals: %s", failure)
        self._note_failure(failure)

    def _note_failure(self, error: RedisError) -> None:
        """Fail what waits if there is no connection left, and begin to try again."""
        self._failures += 1
        self._last_error = error
        if self._coming_back is None and not self._closed:
            self._coming_back = self._loop.create_task(self._come_back())
        if not self._connections:
            self._fail_queue()
        self._on_trouble()

    async def _come_back(self) -> None:
        try:
            while self._failures:
                pause_s = min(_PAUSE_S_MAX, _PAUSE_S_MIN * 2 ** min(self._failures - 1 + self._barren, 20))
                # Jitter, so that engines which lost a server together do not come back together.
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                # Its reason was noted, and the pause grows with it.
                with contextlib.suppress(RedisError):
                    await self._open_one()
        finally:
            self._coming_back = None
        self._pump()

    def _on_closed(self, connection: Connection, requests: list[Request], error: RedisError) -> None:
        was_used = connection in self._connections
        if was_used:
            self._connections.remove(connection)
        if isinstance(error, AnswerLateError):
            self._counters.answers_late += 1
            if was_used:
                self._suspect(error)
        innocent = all(not request.ended for request in requests)
        if connection.answered:
            self._barren = 0
        if requests and innocent and was_used:
            self._counters.connections_lost += 1
            self._barren += not connection.answered
            # Once, that may be a server that was started again; then it lets us in and does nothing for us.
            if self._barren > 1:
                self._note_failure(explained(error, self.endpoint, self._config))
            self._on_trouble()
        again = []
        for request in requests:
            # A connection that broke by itself is the retry layer's business; one that a cancellation closed is not.
            if innocent or request.tries >= _MOVES_MAX:
                request.finish(error)
            elif not request.ended:
                self._counters.requests_moved += 1
                request.connection = None
                again.append(request)
        self._queue.extendleft(reversed(again))
        if was_used:
            self._pump()

    def _suspect(self, error: AnswerLateError) -> None:
        """After a late answer: trust no idle connection either, so that a server which hangs costs one deadline."""
        for connection in [one for one in self._connections if not one.outstanding]:
            connection.close()
        self._note_failure(error)

    def _fail_queue(self) -> None:
        queue, self._queue = self._queue, deque()
        for request in queue:
            request.finish(self._last_error)
