"""One server: its connections, the requests waiting for one, and its health."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import ssl
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.backends.redis.config import RedisConfig
from kvstore.backends.redis.connection import Connection, Request, ask
from kvstore.backends.redis.failures import (
    AnswerLateError,
    ConnectionLostError,
    NodeDownError,
    RedisError,
    ServerRefusedError,
)
from kvstore.backends.redis.limits import LIMITS, Limits
from kvstore.backends.redis.resp import Reply
from kvstore.backends.stream import TLS, Endpoint, current_tls, open_stream
from kvstore.runtime.breaker import Breaker

logger = logging.getLogger("kvstore.backends.redis")

_TOGETHER_MAX: Final = 1024
"""Maximum requests without values in one round trip."""

_TOGETHER_BYTES: Final = 1 << 20
"""Maximum bytes of values in one send: a system call and a loop iteration cost as much as copying 100 KiB."""

_REFUSALS_MAX: Final = 3
_REFUSED_S: Final = 0.25
_REFUSED_S_MAX: Final = 2.0
"""Consecutive errors after which a node of several is skipped, and the pause before one command tries it again. A
server loads a gigabyte of data in a few seconds, and an operator restores rights within seconds."""

_PASSWORD_REFUSED: Final = frozenset({"WRONGPASS", "NOAUTH"})
"""Errors of a login with a wrong password. ERR of servers before Redis 6 may also mean too many clients."""

_SENDS_MAX: Final = 8
"""Maximum sends of a request whose connections are closed by the cancellation of other requests."""


class Node:
    """Spreads requests over a few connections to one server.

    A request goes to the connection with the fewest bytes in flight that has room; otherwise it waits in order. While a
    node is unreachable, requests fail immediately, and the node reconnects in the background at growing intervals with
    jitter. ``on_trouble`` is called when a connection broke or failed, as another node may have taken over.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        config: RedisConfig,
        tls: TLS | None,
        counters: Counter[str],
        *,
        database: int,
        is_replica: bool,
        on_trouble: Callable[[], None],
        limits: Limits = LIMITS,
    ) -> None:
        self.endpoint = endpoint
        self.is_replica = is_replica
        self.info: dict[bytes, str] = {}
        self._config = config
        self._tls = tls
        self._counters = counters
        self._database = database
        self._on_trouble = on_trouble
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._connections: list[Connection] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._reconnecting: asyncio.Task[None] | None = None
        self._queue: deque[Request] = deque()
        self._failures = 0  # Consecutive failures to connect.
        self._lost_unanswered = 0  # Consecutive connections lost without an answer.
        self._last_error: RedisError = NodeDownError("not connected yet")
        # A trial reports its answer, but nothing if it is cancelled or its connection breaks.
        trial_s = config.connect_timeout + config.timeout
        self._refusals = Breaker(_REFUSALS_MAX, _REFUSED_S, _REFUSED_S_MAX, trial_s)
        self._closed = False
        self._warned = False

    def __repr__(self) -> str:
        """Show the endpoint, its connections and the attempts to open more."""
        state = f"{len(self._connections)} connections, {len(self._opening)} opening"
        return f"Node({self.endpoint}, {state}, {'pausing' if self._reconnecting is not None else 'not pausing'})"

    @property
    def down(self) -> bool:
        """Whether requests currently fail immediately."""
        return self._closed or (self._is_pausing and not self._connections)

    @property
    def _is_pausing(self) -> bool:
        """Whether the node pauses between connection attempts, until a connection has answered requests."""
        return self._failures > 0 or (self._lost_unanswered > 1 and self._reconnecting is not None)

    @property
    def is_well(self) -> bool:
        """Whether the node is reachable and has not returned too many consecutive errors."""
        return not self.down and self._refusals.closed

    def admits(self) -> bool:
        """Return whether to send a request; a node that keeps returning errors gets one trial request per pause."""
        if self.down:
            return False
        return self._refusals.closed or self._refusals.admit_trial(self._loop.time())

    def note_answer(self) -> None:
        """Record a successful answer."""
        if self._refusals.failures:
            self._refusals.record_success()

    def note_refusal(self) -> None:
        """Record an error that concerns the node instead of one key."""
        self._refusals.record_failure(self._loop.time())

    @property
    def connection_count(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    @property
    def waiting_count(self) -> int:
        """Number of requests waiting for room."""
        return len(self._queue)

    async def connect(self) -> None:
        """Open a connection unless one is open. RedisError on failure."""
        if not self._connections:
            await self._open_one()

    async def ask(self, *command: bytes) -> Reply:
        """Return the reply to one short command that concerns no block. RedisError without a reply, or for an error."""
        # Each step has its own timeout; this one bounds their sum.
        allowed_s = 2 * (self._config.connect_timeout + self._config.timeout)
        try:
            async with asyncio.timeout(allowed_s):
                return await ask(self.submit, *command)
        except TimeoutError:
            raise AnswerLateError(f"{self.endpoint}: no answer within {allowed_s:.3g} s") from None

    def submit(self, requests: Sequence[Request]) -> None:
        """Accept requests. Each ends later, or immediately with a failure."""
        reason = ""
        if self.down:
            reason = self._last_error.bare.removeprefix(f"{self.endpoint}: ")
        elif len(self._queue) + len(requests) > self._limits.queue_max:
            reason = "too many requests wait. Lower inflight_bytes."
        if reason:
            for request in requests:
                request.finish(NodeDownError(f"{self.endpoint}: {reason}"))
            return
        self._queue.extend(requests)
        self._pump()

    async def close(self) -> None:
        """Close all connections; waiting requests fail. Idempotent."""
        self._closed = True
        tasks = [*self._opening, *([self._reconnecting] if self._reconnecting else [])]
        for task in tasks:
            task.cancel()
        self._last_error = NodeDownError("the backend is closed")
        for connection in list(self._connections):
            connection.close(self._last_error)
        self._fail_queue()
        # Last, because the caller may be cancelled here.
        if tasks:
            await asyncio.wait(tasks)

    def _pump(self) -> None:
        """Submit waiting requests to connections with room, and open further connections while all are busy."""
        queue = self._queue
        while queue:
            request = queue[0]
            if request.pending is None:
                queue.popleft()
                continue
            connection = self._roomiest(request.size_bytes)
            if connection is None:
                break
            connection.submit(self._together(queue, connection))
        if queue and self.down:
            self._fail_queue()
        self._grow()

    def _together(self, queue: deque[Request], connection: Connection) -> list[Request]:
        """Take the first request from the queue, and the following ones that can share its send."""
        first = queue.popleft()
        together, has_value = [first], first.size_bytes > 0
        count_max = self._limits.pipeline_depth - connection.outstanding if has_value else _TOGETHER_MAX
        bytes_left = min(_TOGETHER_BYTES, self._limits.in_flight_bytes - connection.inflight_bytes)
        bytes_left -= first.size_bytes
        while queue and len(together) < count_max and not first.asking:
            one = queue[0]
            bytes_left -= one.size_bytes
            if bytes_left < 0 or (one.size_bytes > 0) != has_value or one.asking or one.pending is None:
                break
            together.append(queue.popleft())
        return together

    def _roomiest(self, size_bytes: int) -> Connection | None:
        """Return the connection with the fewest bytes in flight and room for ``size_bytes`` more; None without room."""
        best: Connection | None = None
        bytes_max = self._limits.in_flight_bytes - size_bytes
        for connection in self._connections:
            # An idle connection also accepts a request above the limit, alone.
            if not connection.outstanding:
                return connection
            if connection.outstanding < self._limits.pipeline_depth and connection.inflight_bytes <= bytes_max:
                best, bytes_max = connection, connection.inflight_bytes - 1
        return best

    def _grow(self) -> None:
        """Open connections while all are busy, unless the node pauses between attempts."""
        room = self._config.connections - len(self._connections) - len(self._opening)
        if room <= 0 or self._closed or self._is_pausing:
            return
        is_busy = bool(self._connections) and all(connection.outstanding for connection in self._connections)
        for _ in range(min(len(self._queue) + is_busy, room)):
            task = self._loop.create_task(self._open_in_background())
            self._opening.add(task)
            # A task cancelled before its start does not reach its own cleanup.
            task.add_done_callback(self._opening.discard)

    async def _open_in_background(self) -> None:
        try:
            await self._open_one()
        except RedisError:
            # Recorded by _open_one, and reported by the failed requests.
            return
        finally:
            # Before _pump, which counts connections being opened.
            self._opening.discard(asyncio.current_task())
        self._pump()

    async def _open_one(self) -> None:
        try:
            connection = await self._connected()
        except RedisError as failure:
            self._counters["connections_failed"] += 1
            self._note_failure(failure)
            raise
        self._counters["connections_opened"] += 1
        connection.answered = 0
        self._failures = 0
        self._warned = False
        self._connections.append(connection)

    async def _connected(self) -> Connection:
        """Connect and log in."""
        try:
            limit = asyncio.timeout(self._config.connect_timeout)
            async with current_tls(self._tls, self.endpoint) as context, limit:
                stream = await open_stream(self.endpoint, context)
                connection = Connection(stream, self._config, self._on_room, self._on_closed)
                try:
                    await self._log_in(connection)
                    if connection.closed:
                        # The server closed it after the last answer of the login.
                        raise ConnectionLostError("the server closed the connection at once after the login")
                except BaseException:
                    connection.close()
                    raise
        # Any exception, such as ValueError for a host that sockets reject: after others, the node would stay down.
        except Exception as error:
            raise _explained(error, self.endpoint, self._config) from error
        return connection

    async def _log_in(self, connection: Connection) -> None:
        """Authenticate, by AUTH on servers without HELLO (before Redis 6), and choose the database."""
        hello = await self._authenticate(connection)
        if self._database:
            await ask(connection.submit, b"SELECT", b"%d" % self._database)
        if self.is_replica:
            try:
                await ask(connection.submit, b"READONLY")
            except ServerRefusedError as refused:
                # Replicas outside of a cluster serve reads without READONLY.
                if refused.code != "ERR":
                    raise
        words = hello if isinstance(hello, list) else []
        self.info = {
            name: value.decode("utf-8", "replace")
            for name, value in zip(words[::2], words[1::2], strict=False)
            if isinstance(name, bytes) and isinstance(value, bytes)
        }

    async def _authenticate(self, connection: Connection) -> Reply:
        """Send the current password; after its refusal, the one that its file has by then. Return HELLO's answer."""
        secret = self._config.password
        if secret is None:
            return await self._hello(connection, b"")
        await secret.renew()
        used = secret.reveal()
        try:
            return await self._hello(connection, used.encode())
        except ServerRefusedError as refused:
            complaint = f"Redis server {self.endpoint} refuses the password ({refused.code})"
            if refused.code not in _PASSWORD_REFUSED or not await secret.refused(used, complaint):
                raise
        return await self._hello(connection, secret.reveal().encode())

    async def _hello(self, connection: Connection, password: bytes) -> Reply:
        username = self._config.username.encode()
        auth = [b"AUTH", username or b"default", password] if password else []
        try:
            # SETNAME is for the server's client list.
            return await ask(connection.submit, b"HELLO", b"2", *auth, b"SETNAME", b"kvstore")
        except ServerRefusedError as refused:
            if not refused.is_unknown_command and refused.code not in ("NOPERM", "NOPROTO"):
                raise
        if password:
            await ask(connection.submit, b"AUTH", *([username] if username else []), password)
        return None

    def _on_room(self) -> None:
        if self._queue:
            self._pump()

    def _note_failure(self, error: RedisError) -> None:
        """Start to reconnect, and fail the waiting requests if no connection is left."""
        self._failures += 1
        self._last_error = error
        if self._reconnecting is None and not self._closed:
            self._reconnecting = self._loop.create_task(self._reconnect())
        if not self._connections:
            self._fail_queue()
        self._on_trouble()

    async def _reconnect(self) -> None:
        try:
            while self._failures:
                longest_s, doublings = self._limits.pause_s_max, self._failures - 1 + self._lost_unanswered
                pause_s = min(longest_s, self._limits.pause_s_min * 2 ** min(doublings, 20))
                # Jitter, so that engines that lost a server simultaneously do not reconnect simultaneously.
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                try:
                    await self._open_one()  # It counts failures, with which the pause grows.
                except RedisError as failure:
                    # The first failure was reported by the failed call, so this is at least the second one.
                    if not self._warned:
                        self._warned = True
                        logger.warning(
                            "A Redis node can't be used, and is tried again at growing intervals: %s", failure
                        )
        finally:
            self._reconnecting = None
        self._pump()

    def _on_closed(self, connection: Connection, requests: Sequence[Request], error: RedisError | None) -> None:
        was_used = connection in self._connections
        if was_used:
            self._connections.remove(connection)
        if connection.answered:
            self._lost_unanswered = 0
        if isinstance(error, AnswerLateError):
            self._counters["answers_late"] += 1
        if was_used and requests and error is not None:
            self._note_lost(connection, error)
        for request in reversed(requests):
            # The exchange retries after a broken connection; after a cancellation, the requests are queued again here.
            if error is not None:
                request.finish(error)
            elif request.sends >= _SENDS_MAX:
                request.finish(ConnectionLostError("its connections were closed because of other requests. Try again."))
            elif request.pending is not None:
                self._counters["requests_moved"] += 1
                request.connection = None
                self._queue.appendleft(request)
        if was_used:
            self._pump()

    def _note_lost(self, connection: Connection, error: RedisError) -> None:
        self._counters["connections_lost"] += 1
        self._lost_unanswered += not connection.answered
        is_late = isinstance(error, AnswerLateError)
        if is_late:
            # Also close idle connections, so that a hanging server costs only one deadline.
            for idle in [one for one in self._connections if not one.outstanding]:
                idle.close()
        # One loss without an answer may be a restart; after two, the server accepts and then closes connections.
        if is_late or self._lost_unanswered > 1:
            self._note_failure(error if is_late else _explained(error, self.endpoint, self._config))
        self._on_trouble()

    def _fail_queue(self) -> None:
        queue, self._queue = self._queue, deque()
        for request in queue:
            request.finish(self._last_error)


def _explained(error: Exception, endpoint: Endpoint, config: RedisConfig) -> RedisError:
    """Return the reason why a node can't be used, without the server's text, which may echo a password."""
    match error:
        case ServerRefusedError():
            return ServerRefusedError(f"{endpoint}: {error.bare}", error.code)
        case RedisError():
            return NodeDownError(f"{endpoint}: {error.bare}")
        case TimeoutError():
            return NodeDownError(f"{endpoint}: no connection within {float(config.connect_timeout)} s. Is it up?")
        case ssl.SSLCertVerificationError():
            return NodeDownError(f"{endpoint}: its certificate is not trusted: {error.verify_message}. Set 'tls_ca'.")
        case ssl.SSLError():
            return NodeDownError(f"{endpoint}: TLS failed ({error.reason}). Does it speak TLS on this port?")
    number = getattr(error, "errno", None) or 0
    # The text of asyncio's errors repeats the address instead of the reason. Unknown host names have negative numbers,
    # and only strerror describes them.
    reason = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or type(error).__name__
    return NodeDownError(f"{endpoint}: {reason}. Is the server up, and the address right?")
