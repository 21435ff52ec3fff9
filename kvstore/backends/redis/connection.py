"""One connection: requests go out in order, each answer is bound to its request. After a failure it stays closed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

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

__all__ = ["Answer", "Connection", "Pending", "Request", "Want", "ask"]

Answer: TypeAlias = "Reply | RedisError"
Want: TypeAlias = "Target | type[int] | type[str] | None"

_ASKING: Final = encode_command(b"ASKING")


class Request:
    """A command on its way. Ends once in each :class:`Pending`: with its answer, or with an error for one.

    Attributes:
        frames: The command as bytes, values as they are: not copied, and not touched any more once it has ended.
        want: Where the value in the answer goes, or the type of the answer, or None if anything will do.
        size_bytes: Length of the value, either way; 0 without one.
        asking: Whether it follows an ASK, and so goes behind an ASKING of its own.
        pending: Counts it as missing until it has ended; None then.
        sends: How often it was sent, last on ``connection``.
        sent_at: Bytes that the connection has sent when it is sent.
    """

    answer: Answer = None
    asking: bool = False
    pending: Pending | None = None
    connection: Connection | None = None
    sends: int = 0
    sent_at: int = 0

    def __init__(self, frames: list[bytes | memoryview], want: Want, size_bytes: int = 0) -> None:
        self.frames = frames
        self.want = want
        self.size_bytes = size_bytes

    def finish(self, answer: Answer) -> None:
        """End it; a second end is ignored."""
        pending, self.pending, self.connection = self.pending, None, None
        if pending is not None:
            self.answer = answer
            pending.missing -= 1
            if not pending.missing and not pending.done.done():
                pending.done.set_result(None)

    def abandon(self) -> None:
        """End it without an answer: its caller is gone. Close its connection, too, if it has one."""
        self.pending = self.connection = None


class Pending:
    """Requests that one caller waits for: ``missing`` have not ended, and ``done`` ends with the last of them."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.missing = len(requests)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for request in requests:
            request.pending = self


class Connection(Duplex):
    """Moves the requests given to it over one stream.

    It ends by :meth:`close`, called from outside or by itself when anything is wrong: then it touches no buffer any
    more, and hands back the requests that are not answered.

    Args:
        stream: Connected.
        config: Of the backend.
        on_room: Called when an answer has come.
        on_closed: Called once, with the requests that are not answered and the failure that they share; None if none of
            them is to blame, and they may be sent again elsewhere.

    Attributes:
        inflight_bytes: Bytes of values under way.
        answered: Requests that were answered; its owner sets it to 0 when it has logged in.
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
        # Bytes that were ever taken for sending.
        self._taken = 0
        self._flushing: asyncio.Handle | None = None
        self._answered_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.inflight_bytes = 0
        self.answered = 0

    @property
    def outstanding(self) -> int:
        """Requests that are not answered yet."""
        return len(self._requests)

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests, either all with values or all without, behind those that are under way.

        They are sent in the next turn of the loop, with all others submitted until then.
        """
        if requests[0].asking:
            requests = [Request([_ASKING], str), *requests]
        if not self._requests:
            self._answered_at = self._loop.time()
            self._watch()
        has_values = requests[-1].size_bytes > 0
        if not has_values:
            # Sent, and so answered, together: they have the time of one answer.
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

    def cancel(self, requests: Sequence[Request]) -> None:
        """Give up requests, and with them the connection."""
        for request in requests:
            request.abandon()
        self.close()

    def close(self, error: RedisError | None = None) -> None:
        """Close at once; from now on no buffer is touched."""
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
        """Hand out the replies that are complete, and close if there is anything wrong with them."""
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
        """End the request that a reply is for; return whether the connection lives on."""
        request = self._requests[0]
        if type(reply) is not request.want and not _fits(reply, request.want):
            self.close(ProtocolBrokenError("an answer of the wrong type came. Is this a Redis or Valkey server?"))
            return False
        self._requests.popleft()
        self.inflight_bytes -= request.size_bytes
        self.answered += 1
        answer = refusal(reply) if isinstance(reply, ErrorReply) else reply
        if request.size_bytes and request.sent_at > self.sent_bytes:
            # Answered before all of it was sent: a refusal stands, anything else proves nothing. The rest must not be
            # sent any more, as the buffers are another block's from now on; so nothing else can be, either.
            lie = ProtocolBrokenError("an answer came before its command was sent. Is this a Redis or Valkey server?")
            self._end_with(request, answer if isinstance(answer, RedisError) else lie)
            return False
        if not self._requests or self._requests[0].sent_at != request.sent_at:
            self._answered_at = self._loop.time()
        request.finish(answer)
        return True

    def _end_with(self, request: Request, error: RedisError) -> None:
        """Close because of one request; the others did nothing wrong."""
        self.close()
        request.finish(error)

    def _broken(self, error: OSError | ValueError) -> None:
        reason = getattr(error, "strerror", None) or type(error).__name__
        failure: RedisError = ConnectionLostError(f"the connection broke: {reason}. Try again.")
        if isinstance(error, ValueError):
            failure = RedisError("a buffer was released while its call ran")
        # Without its traceback, whose frames would keep the buffers alive.
        failure.__cause__ = error.with_traceback(None)
        self.close(failure)

    _unsendable = _broken

    def _watch(self) -> None:
        """Watch the time of the next answer; one timer per connection, moved on when it fires."""
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


class _Asked(Protocol):
    """A connection or a node."""

    def submit(self, requests: Sequence[Request]) -> None: ...

    def cancel(self, requests: Sequence[Request]) -> None: ...


async def ask(asked: _Asked, *command: bytes) -> Reply:
    """Return the answer to one short command that is about no block. RedisError if none or an error came."""
    request = Request([encode_command(*command)], None)
    pending = Pending([request])
    try:
        asked.submit([request])
        await pending.done
    finally:
        if pending.missing:
            asked.cancel([request])
    if isinstance(request.answer, RedisError):
        raise request.answer
    return request.answer


def _fits(reply: Reply, want: Want) -> bool:
    """Whether a reply is of the kind that its command has."""
    if reply is None or want is None or isinstance(reply, ErrorReply):
        return True
    return isinstance(reply, Filled) if isinstance(want, Target) else type(reply) is want
