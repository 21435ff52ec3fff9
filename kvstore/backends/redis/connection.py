"""One connection: requests go out in order, and each answer is bound to its request. What breaks is closed for good."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from kvstore.backends.redis.failures import (
    AnswerLateError,
    ConnectionLostError,
    ProtocolBrokenError,
    RedisError,
    ValueTooLongError,
)
from kvstore.backends.redis.resp import ErrorReply, Filled, ProtocolError, Reply, ReplyReader, ReplyTooLongError, Target
from kvstore.backends.stream import Stream, drop_sent

__all__ = ["Connection", "Request", "Want", "ask"]

Want: TypeAlias = "Target | type[int] | type[str] | None"

_RECEIVES_MAX: Final = 64
_RECEIVED_MAX: Final = 2 << 20
"""System calls and bytes for one wake-up, so that one busy connection does not keep the loop from the others."""


class Request:
    """Commands that travel together, and their answers. Ends exactly once: with all replies, or with an error.

    Args:
        frames: What to send. Not copied, and not touched any more once the request has ended.
        wants: One per command: where its value goes, or the type of its answer, or None if anything will do.
        size_bytes: Length of the values in it, either way.
        on_end: Called with the request when it ends, on the loop thread, except after :meth:`abandon`.
    """

    __slots__ = ("_on_end", "connection", "error", "frames", "replies", "sent_at", "size_bytes", "tries", "wants")

    def __init__(
        self,
        frames: list[bytes | memoryview],
        wants: Sequence[Want],
        size_bytes: int,
        on_end: Callable[[Request], None],
    ) -> None:
        self.frames = frames
        self.wants = wants
        self.size_bytes = size_bytes
        self.replies: list[Reply] = []
        self.error: RedisError | None = None
        self.connection: Connection | None = None
        self.tries = 0
        self.sent_at = 0
        self._on_end: Callable[[Request], None] | None = on_end

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._on_end is None

    def finish(self, error: RedisError | None = None) -> None:
        """End it; a second end is ignored."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            self.error = error
            self._let_go()
            on_end(self)

    def abandon(self) -> None:
        """End it without a word: its caller is gone. Close its connection first, if it has one."""
        self._on_end = None
        self._let_go()

    def _let_go(self) -> None:
        self.frames = []
        self.wants = ()
        self.connection = None


class Connection:
    """Moves the requests given to it over one stream.

    It ends by :meth:`close`, called from outside or by itself when anything is wrong: then it touches no buffer any
    more, and hands back the requests that are not answered.

    Args:
        stream: Connected.
        timeout_s: For one answer.
        bytes_per_second_min: Adds to it, by the length of the request's values.
        on_room: Called when an answer has come, so that there may be room for more.
        on_closed: Called once with what is not answered, and why; the first of them is the one that was to be answered
            next.

    Attributes:
        closed: Whether it has ended.
        inflight_bytes: Bytes of values under way.
        answered: Requests that were answered; its owner sets it to 0 when it has logged in.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        timeout_s: float,
        bytes_per_second_min: int,
        on_room: Callable[[Connection], None],
        on_closed: Callable[[Connection, list[Request], RedisError], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._stream = stream
        self._descriptor = stream.fileno()
        self._timeout_s = timeout_s
        self._bytes_per_second_min = bytes_per_second_min
        self._on_room = on_room
        self._on_closed = on_closed
        self._reader = ReplyReader()
        self._requests: deque[Request] = deque()
        self._to_send: deque[bytes | memoryview] = deque()
        # Bytes that were ever taken for sending, and that were sent.
        self._taken = 0
        self._sent = 0
        self._writing = False
        self._read_wants_write = False
        self._answered_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._again: asyncio.Handle | None = None
        self.closed = False
        self.inflight_bytes = 0
        self.answered = 0
        self._loop.add_reader(self._descriptor, self._on_readable)

    @property
    def outstanding(self) -> int:
        """Requests that are not answered yet."""
        return len(self._requests)

    def submit(self, request: Request) -> None:
        """Send a request behind those that are under way."""
        request.connection = self
        request.tries += 1
        request.replies = []
        if not self._requests:
            self._answered_at = self._loop.time()
            self._watch()
        self._requests.append(request)
        self.inflight_bytes += request.size_bytes
        self._reader.expect([want if isinstance(want, Target) else None for want in request.wants])
        # An empty piece would never count as sent.
        frames = [frame for frame in request.frames if len(frame)]
        self._to_send.extend(frames)
        self._taken += sum(map(len, frames))
        request.sent_at = self._taken
        if not self._writing:
            self._flush()

    def close(self, error: RedisError | None = None) -> None:
        """Close at once; from now on no buffer is touched."""
        if self.closed:
            return
        self.closed = True
        for handle in (self._timer, self._again):
            if handle is not None:
                handle.cancel()
        self._loop.remove_reader(self._descriptor)
        if self._writing:
            self._loop.remove_writer(self._descriptor)
        requests = list(self._requests)
        self._stream.close(abort=bool(requests))
        self._reader.release()
        self._requests.clear()
        self._to_send.clear()
        self.inflight_bytes = 0
        self._on_closed(self, requests, error or ConnectionLostError("the connection was closed. Try again."))

    def _flush(self) -> None:
        """Send what can be sent now; wait for room for the rest."""
        queue = self._to_send
        try:
            while queue:
                sent = self._stream.send(list(queue) if len(queue) < 64 else [queue[i] for i in range(64)])
                self._sent += sent
                drop_sent(queue, sent)
        except BlockingIOError:
            pass
        # ValueError: a buffer was released while its call ran. Nothing may be raised into the loop.
        except (OSError, ValueError) as error:
            self._break(error)
            return
        if bool(queue) != self._writing:
            self._set_writing(bool(queue))

    def _set_writing(self, writing: bool) -> None:
        self._writing = writing
        if writing:
            self._loop.add_writer(self._descriptor, self._on_writable)
        else:
            self._loop.remove_writer(self._descriptor)

    def _on_writable(self) -> None:
        self._flush()
        if self._read_wants_write and not self.closed:
            self._read_wants_write = False
            self._on_readable()

    def _on_readable(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None
        received = 0
        for _ in range(_RECEIVES_MAX):
            if received >= _RECEIVED_MAX:
                break
            buffers = self._reader.buffers()
            try:
                count = self._stream.receive(buffers)
            except BlockingIOError:
                return
            except ssl.SSLWantWriteError:
                self._read_wants_write = True
                if not self._writing:
                    self._set_writing(True)
                return
            except (OSError, ValueError) as error:
                self._break(error)
                return
            if not count:
                self.close(ConnectionLostError("the server closed the connection. Try again."))
                return
            received += count
            if not self._take(count):
                return
            # A receive that did not fill its buffers has emptied the socket; TLS may hold more than the socket shows.
            if not self._stream.is_encrypted and count < sum(buffer.nbytes for buffer in buffers):
                return
        if self._stream.is_encrypted:
            self._again = self._loop.call_soon(self._on_readable)

    def _take(self, count: int) -> bool:
        """Hand on the replies that are complete; return whether the connection lives on."""
        try:
            replies = self._reader.advance(count)
        except ReplyTooLongError as error:
            failure = ValueTooLongError(f"{error}. Another program writes under this prefix, or another version.")
            if self._requests:
                self._end_with(self._requests.popleft(), failure)
            return False
        except ProtocolError as error:
            self.close(ProtocolBrokenError(f"{error}. Is this a Redis or Valkey server?"))
            return False
        for reply in replies:
            request = self._requests[0]
            want = request.wants[len(request.replies)]
            if type(reply) is not want and not _fits(reply, want):
                self.close(ProtocolBrokenError("an answer of the wrong type came. Is this a Redis or Valkey server?"))
                return False
            request.replies.append(reply)
            if len(request.replies) == len(request.wants):
                self._requests.popleft()
                self.inflight_bytes -= request.size_bytes
                self._answered_at = self._loop.time()
                self.answered += 1
                if request.sent_at > self._sent:
                    self._end_early(request, reply)
                    return False
                request.finish()
                if self.closed:
                    return False
        if replies:
            self._on_room(self)
        return not self.closed

    def _end_early(self, request: Request, reply: Reply) -> None:
        """End a request that was answered before all of it was sent: a refusal stands, anything else proves nothing.

        The rest of it may not be sent any more, as the buffers are another block's from now on; so nothing else can.
        """
        lie = ProtocolBrokenError("an answer came before its command was sent. Is this a Redis or Valkey server?")
        self._end_with(request, None if isinstance(reply, ErrorReply) else lie)

    def _end_with(self, request: Request, error: RedisError | None) -> None:
        """Close because of one request; the others did nothing wrong and may be sent again elsewhere."""
        self.close(ConnectionLostError("the connection was closed because of another value. Try again."))
        request.finish(error)

    def _break(self, error: OSError | ValueError) -> None:
        reason = getattr(error, "strerror", None) or type(error).__name__
        failure = ConnectionLostError(f"the connection broke: {reason}. Try again.")
        # Without its traceback, whose frames would keep the buffers alive.
        failure.__cause__ = error.with_traceback(None)
        self.close(failure)

    def _watch(self) -> None:
        """Watch the time of the next answer; one timer per connection, moved on when it fires."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if not self._requests:
            return
        allowed_s = self._timeout_s + self._requests[0].size_bytes / self._bytes_per_second_min
        left_s = self._answered_at + allowed_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._on_timer)
            return
        self.close(AnswerLateError(f"no answer within {allowed_s:.3g} s. The server hangs, or the network is slow."))


async def ask(command: bytes, submit: Callable[[Request], None], cancel: Callable[[Request], None]) -> Reply:
    """Return the answer to one short command that is about no block.

    Args:
        command: As it is sent.
        submit: Sends it, on a connection or a node.
        cancel: Gives it up.

    Raises:
        RedisError: No answer came, or it is longer than what has no target may be.
    """
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(request: Request) -> None:
        if not done.done():
            done.set_result(None)

    request = Request([command], [None], 0, end)
    try:
        submit(request)
        await done
    finally:
        if not request.ended:
            cancel(request)
    if request.error is not None:
        raise request.error
    return request.replies[0]


def _fits(reply: Reply, want: Want) -> bool:
    """Tell whether a reply is of the kind that its command has."""
    if reply is None or want is None or isinstance(reply, ErrorReply):
        return True
    return isinstance(reply, Filled) if isinstance(want, Target) else type(reply) is want
