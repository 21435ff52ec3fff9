"""One connection: requests are sent in order, and each response belongs to its request. Failures close it for good."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from kvstore.backends.duplex import Duplex
from kvstore.backends.redis.config import RedisConfig
from kvstore.backends.redis.failures import (
    AnswerLateError,
    ConnectionLostError,
    ProtocolBrokenError,
    RedisError,
    ValueTooLongError,
    refusal,
)
from kvstore.backends.redis.resp import (
    ErrorReply,
    Filled,
    ProtocolError,
    Reply,
    ReplyReader,
    ReplyTooLongError,
    Target,
    encode_command,
)
from kvstore.backends.stream import Stream

Answer: TypeAlias = "Reply | RedisError"
Want: TypeAlias = "Target | type[int] | type[str] | None"

_ASKING: Final = encode_command(b"ASKING")


class Request:
    """A command in flight. It ends once per :class:`Pending`, with a reply or an error as its answer."""

    answer: Answer = None
    asking: bool = False  # Whether it follows an ASK redirect, so an ASKING command must precede it.
    pending: Pending | None = None  # The :class:`Pending` that waits for it; None after its end.
    connection: Connection | None = None
    sends: int = 0  # Number of times it was sent, last on ``connection``.
    sent_at: int = 0  # Value of the connection's sent bytes at which the request is completely sent.

    def __init__(self, frames: list[bytes | memoryview], want: Want, size_bytes: int = 0) -> None:
        self.frames = frames  # The encoded command; values are not copied, and not touched after the request has ended.
        self.want = want  # Target of the value in the reply, or type of the reply; None for any reply.
        self.size_bytes = size_bytes  # Length of the value sent or received; 0 without a value.

    def finish(self, answer: Answer) -> None:
        """End the request; further calls are ignored."""
        pending, self.pending, self.connection = self.pending, None, None
        if pending is not None:
            self.answer = answer
            pending.missing -= 1
            if not pending.missing and not pending.done.done():
                pending.done.set_result(None)


class Pending:
    """Requests that one caller awaits: ``missing`` of them have not ended; ``done`` completes with the last one."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.missing = len(requests)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for request in requests:
            request.pending = self


class Connection(Duplex):
    """Sends requests and receives their replies over one stream.

    The owner closes it with :meth:`close`; after any error it closes itself. A closed connection touches no buffers,
    and passes its unanswered requests to ``on_closed``.

    Args:
        on_room: Called after replies have arrived.
        on_closed: Called once, with the unanswered requests and their common failure; None if they may be sent again on
            another connection.
    """

    def __init__(
        self,
        stream: Stream,
        config: RedisConfig,
        on_room: Callable[[], None],
        on_closed: Callable[[Connection, Sequence[Request], RedisError | None], None],
    ) -> None:
        super().__init__(stream)
        self._config = config
        self._on_room = on_room
        self._on_closed = on_closed
        self._reader = ReplyReader()
        self._requests: deque[Request] = deque()
        # Bytes submitted for sending since the start.
        self._taken = 0
        self._flushing: asyncio.Handle | None = None
        self._answered_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.inflight_bytes = 0  # Bytes of values in flight.
        self.answered = 0  # Number of answered requests; the owner resets it to 0 after the login.

    @property
    def outstanding(self) -> int:
        """Number of unanswered requests."""
        return len(self._requests)

    def submit(self, requests: Sequence[Request]) -> None:
        """Append requests, either all with values or all without.

        They are sent in the next iteration of the loop, together with all others submitted until then.
        """
        if requests[0].asking:
            requests = [Request([_ASKING], str), *requests]
        if not self._requests:
            self._answered_at = self._loop.time()
            self._watch()
        has_values = requests[-1].size_bytes > 0
        if not has_values:
            # Sent and answered together, so they share the time limit of one reply.
            joined = b"".join([frame for request in requests for frame in request.frames])
            self.unsent.append(joined)
            self._taken += len(joined)
        for request in requests:
            if has_values:
                self.unsent.extend(request.frames)
                self._taken += sum(map(len, request.frames))
            request.connection = self
            request.sends += 1
            request.sent_at = self._taken
            self.inflight_bytes += request.size_bytes
        self._requests.extend(requests)
        self._reader.expect([request.want for request in requests])
        if self._flushing is None and not self._writing:
            self._flushing = self._loop.call_soon(self._flush)

    def close(self, error: RedisError | None = None) -> None:
        """Close immediately; no buffer is touched afterwards."""
        if self.closed:
            return
        for handle in (self._timer, self._flushing):
            if handle is not None:
                handle.cancel()
        requests = list(self._requests)
        self._end(abort=bool(requests))
        self._requests.clear()
        self.inflight_bytes = 0
        self._on_closed(self, requests, error)

    def _flush(self) -> None:
        self._flushing = None
        super()._flush()

    def _buffers(self) -> Sequence[memoryview]:
        return self._reader.buffers()

    def _received(self, count: int) -> bool:
        if count:
            self._take(count)
        else:
            self.close(ConnectionLostError("the server closed the connection. Try again."))
        return not self.closed

    def _take(self, count: int) -> None:
        """Deliver complete replies; close on a protocol error."""
        failure: ProtocolError | None = None
        try:
            replies: Sequence[Reply] = self._reader.advance(count)
        except ProtocolError as error:
            failure, replies = error, error.replies
        for reply in replies:
            if not self._hand_out(reply):
                return
        if isinstance(failure, ReplyTooLongError):
            reason = f"{failure}. Another program writes under this prefix, or another version."
            self._end_with(self._requests.popleft(), ValueTooLongError(reason))
        elif failure is not None:
            self.close(ProtocolBrokenError(f"{failure}. Is this a Redis or Valkey server?"))
        elif replies:
            self._on_room()

    def _hand_out(self, reply: Reply) -> bool:
        """End the oldest request with its reply; return whether the connection stays open."""
        request = self._requests[0]
        if type(reply) is not request.want and not _fits(reply, request.want):
            self.close(ProtocolBrokenError("an answer of the wrong type came. Is this a Redis or Valkey server?"))
            return False
        self._requests.popleft()
        self.inflight_bytes -= request.size_bytes
        self.answered += 1
        answer = refusal(reply) if isinstance(reply, ErrorReply) else reply
        if request.size_bytes and request.sent_at > self.sent_bytes:
            # Answered before it was completely sent: an error is valid, any other reply is not. The rest must not be
            # sent, because the buffers may now belong to another block, so the connection is unusable.
            lie = ProtocolBrokenError("an answer came before its command was sent. Is this a Redis or Valkey server?")
            self._end_with(request, answer if isinstance(answer, RedisError) else lie)
            return False
        if not self._requests or self._requests[0].sent_at != request.sent_at:
            self._answered_at = self._loop.time()
        request.finish(answer)
        return True

    def _end_with(self, request: Request, error: RedisError) -> None:
        """Close because of one request; the others are sent again."""
        self.close()
        request.finish(error)

    def _broken(self, error: OSError | ValueError) -> None:
        reason = getattr(error, "strerror", None) or type(error).__name__
        failure: RedisError = ConnectionLostError(f"the connection broke: {reason}. Try again.")
        if isinstance(error, ValueError):
            failure = RedisError("a buffer was released while its call ran")
        # The frames of a traceback would keep the buffers alive.
        failure.__cause__ = error.with_traceback(None)
        self.close(failure)

    _unsendable = _broken

    def _watch(self) -> None:
        """Start the timer for the next reply. Each connection has one timer, which is rescheduled when it fires."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._config.timeout, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if not self._requests:
            return
        allowed_s = self._config.timeout + self._requests[0].size_bytes / self._config.bytes_per_second_min
        left_s = self._answered_at + allowed_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._on_timer)
            return
        self.close(AnswerLateError(f"no answer within {allowed_s:.3g} s. The server hangs, or the network is slow."))


def give_up(requests: Sequence[Request]) -> None:
    """End requests without an answer, and close the connections on which any of them is outstanding."""
    connections = {request.connection for request in requests if request.connection is not None}
    for request in requests:
        # Cleared first, because closing would send the request again on another connection.
        request.pending = request.connection = None
    for connection in connections:
        connection.close()


async def ask(submit: Callable[[Sequence[Request]], None], *command: bytes) -> Reply:
    """Return the reply to one short command that concerns no block. RedisError without a reply, or for an error."""
    (reply,) = await ask_all(submit, [Request([encode_command(*command)], None)])
    return reply


async def ask_all(submit: Callable[[Sequence[Request]], None], requests: Sequence[Request]) -> list[Reply]:
    """Return the replies to requests that are sent together, or raise the first error."""
    replies: list[Reply] = []
    for answer in await answers_to(submit, requests):
        if isinstance(answer, RedisError):
            raise answer
        replies.append(answer)
    return replies


async def answers_to(submit: Callable[[Sequence[Request]], None], requests: Sequence[Request]) -> list[Answer]:
    """Return the answers to requests that are sent together; failures are returned as answers, too."""
    pending = Pending(requests)
    try:
        submit(requests)
        await pending.done
    finally:
        if pending.missing:
            give_up(requests)
    return [request.answer for request in requests]


def _fits(reply: Reply, want: Want) -> bool:
    """Return whether a reply has a type that the request allows."""
    if reply is None or want is None or isinstance(reply, ErrorReply):
        return True
    return isinstance(reply, Filled) if isinstance(want, Target) else type(reply) is want
