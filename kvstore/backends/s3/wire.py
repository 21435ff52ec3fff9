"""Connections to the service: one request at a time on each, kept for the next one when its answer was clean."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.backends.s3.failures import Cause, S3Error
from kvstore.backends.s3.http import Answer
from kvstore.backends.stream import Endpoint, Stream, open_stream
from kvstore.backends.vectored import drop_front

__all__ = ["Wire"]

_RECEIVES_MAX: Final = 16
"""System calls for one wake-up, so that one busy connection does not keep the loop from the others."""

_RECHECK_S: Final = 0.05
"""How late a reset may be seen that came together with bytes; rarely needed, and far below every deadline."""

_IDLE_S_MAX: Final = 15.0
"""Services close connections that idle for 5 to 60 s; one that may be about to be closed is not worth a failure."""


class Wire:
    """The connections to one endpoint.

    Args:
        endpoint: Where the service listens.
        context: TLS settings, or None.
        connect_timeout_s: For a connection, the handshake included.
    """

    def __init__(self, endpoint: Endpoint, context: ssl.SSLContext | None, connect_timeout_s: float) -> None:
        self._endpoint = endpoint
        self._context = context
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._closed = False
        self.connections_opened = 0
        self.connections_dirty = 0

    def close(self) -> None:
        """Close all connections at once; requests under way fail."""
        self._closed = True
        for connection in (*self._idle, *self._busy):
            connection.close(S3Error(Cause.CLOSED, "The client was closed."))
        self._idle.clear()

    async def request(self, frames: Sequence[bytes | memoryview], answer: Answer, *, timeout_s: float) -> None:
        """Send a request and take in its answer; when this ends, in whatever way, no buffer is touched any more.

        Args:
            frames: The request's head and body.
            answer: To be filled.
            timeout_s: For all of it.

        Raises:
            S3Error: No connection, no answer in time, or a broken one.
        """
        deadline = time.monotonic() + timeout_s
        connection: _Connection | None = None
        try:
            connection = self._reused() or await self._connected(timeout_s)
            self._busy.add(connection)
            await connection.exchange(frames, answer, deadline - time.monotonic())
        finally:
            answer.release()
            if connection is not None:
                self._busy.discard(connection)
                if connection.reusable and not self._closed:
                    connection.idle_since = time.monotonic()
                    self._idle.append(connection)
                else:
                    connection.close()

    def _reused(self) -> _Connection | None:
        """Return a connection that idles, the one used last; drop those that can't be trusted any more."""
        now = time.monotonic()
        while self._idle:
            connection = self._idle.pop()
            if now - connection.idle_since < _IDLE_S_MAX and connection.is_clean():
                return connection
            connection.close()
        return None

    def _note_surplus(self) -> None:
        self.connections_dirty += 1

    async def _connected(self, timeout_s: float) -> _Connection:
        if self._closed:
            raise S3Error(Cause.CLOSED, "The client was closed.")
        where = str(self._endpoint)
        timeout_s = min(timeout_s, self._connect_timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                stream = await open_stream(self._endpoint, self._context)
        except TimeoutError:
            raise S3Error(Cause.TIMEOUT, f"No connection to {where} within {timeout_s:.3g} s.") from None
        except ssl.SSLError as error:
            raise S3Error(Cause.TLS, f"No TLS connection to {where}: {error.reason or 'refused'}.") from error
        except socket.gaierror as error:
            raise S3Error(Cause.DNS, f"The name of {where} can't be resolved.") from error
        except ConnectionResetError as error:
            raise S3Error(Cause.RESET, f"{where} closed the connection while it was made.") from error
        except OSError as error:
            raise S3Error(Cause.REFUSED, f"No connection to {where}: {error.strerror or 'refused'}.") from error
        if self._closed:
            # Closed meanwhile: nothing is sent any more.
            stream.close(abort=True)
            raise S3Error(Cause.CLOSED, "The client was closed.")
        self.connections_opened += 1
        return _Connection(stream, self._note_surplus)


class _Connection:
    """One connection, which lives as long as every answer on it ends where it should.

    Args:
        stream: Connected.
        on_surplus: Called once if bytes come that belong to no answer.
    """

    def __init__(self, stream: Stream, on_surplus: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stream = stream
        self._descriptor = stream.fileno()
        self._to_send: deque[bytes | memoryview] = deque()
        # Of the exchange under way; it stays when that fails.
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._writing = False
        self._send_failed = False
        self._again: asyncio.Handle | None = None
        self._recheck: asyncio.TimerHandle | None = None
        self.idle_since = 0.0
        self.reusable = True
        self._on_surplus = on_surplus
        self._closed = False
        self._loop.add_reader(self._descriptor, self._on_readable)

    async def exchange(self, frames: Sequence[bytes | memoryview], answer: Answer, timeout_s: float) -> None:
        """Send a request and take in its answer; afterwards ``reusable`` says whether there may be another."""
        # Until the answer is whole: a cancelled exchange leaves a connection that is of no use.
        self.reusable = False
        self._answer = answer
        # An empty piece would never count as sent.
        self._to_send.extend([frame for frame in frames if len(frame)])
        self._done = self._loop.create_future()
        # Not asyncio.timeout(): that costs as much as signing the request.
        alarm = self._loop.call_later(max(0.0, timeout_s), self._on_deadline, timeout_s)
        try:
            self._flush()
            await self._done
        finally:
            alarm.cancel()
            self._done = None
            is_sent = not self._to_send and not self._send_failed
            self._to_send.clear()
        if not answer.whole:
            raise S3Error(Cause.PROTOCOL, "The service did not answer.")
        if not is_sent and answer.status < 300:
            # A refusal stands, but an object that was not sent whole was not stored.
            raise S3Error(Cause.PROTOCOL, "The service answered before it had the whole request.")
        if answer.surplus:
            self._on_surplus()
        # After a request that was not sent whole, nothing that follows on this connection could be trusted.
        self.reusable = is_sent and answer.stays_open and not answer.surplus and not self._writing and not self._closed
        self._answer = None

    def is_clean(self) -> bool:
        """Tell whether nothing came that nobody asked for; after such bytes no answer could be trusted."""
        if self._closed:
            return False
        try:
            # With TLS, too: what came in one record with the last answer lies in OpenSSL, where no watching shows it.
            self._stream.receive([memoryview(bytearray(1))])
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._on_surplus()
        return False

    def close(self, error: S3Error | None = None) -> None:
        """Close at once; from now on no buffer is touched."""
        if self._closed:
            return
        self._closed = True
        self.reusable = False
        # First, as nothing but this ends a request.
        self._end(error)
        for handle in (self._again, self._recheck):
            if handle is not None:
                handle.cancel()
        self._loop.remove_reader(self._descriptor)
        if self._writing:
            self._loop.remove_writer(self._descriptor)
        # Reset where an answer is not whole, so that the service stops sending it.
        self._stream.close(abort=self._answer is not None)
        self._to_send.clear()

    def _end(self, error: S3Error | None = None) -> None:
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)

    def _flush(self) -> None:
        """Send what can be sent now; wait for room for the rest."""
        queue = self._to_send
        try:
            while queue:
                drop_front(queue, self._stream.send(list(queue)))
        except BlockingIOError:
            pass
        # ValueError: a buffer was released while its call ran. Nothing may be raised into the loop.
        except (OSError, ValueError):
            # The service may have answered before it hung up, and that answer says why.
            queue.clear()
            self._send_failed = True
            self._look_again()
        if bool(queue) != self._writing:
            self._writing = bool(queue)
            if self._writing:
                self._loop.add_writer(self._descriptor, self._flush)
            else:
                self._loop.remove_writer(self._descriptor)

    def _on_readable(self) -> None:
        self._again = None
        answer = self._answer
        if answer is None or self._done is None or self._done.done():
            # Nobody asked: the service closes the connection, or sends what belongs to no request.
            self._on_idle_readable()
            return
        try:
            for _ in range(_RECEIVES_MAX):
                buffers = answer.buffers()
                count = self._stream.receive(buffers)
                answer.advance(count)
                if answer.whole:
                    self._end()
                    return
                # A receive that did not fill its buffers has emptied the socket; TLS may hold more than it shows.
                if not self._stream.is_encrypted and count < sum(buffer.nbytes for buffer in buffers):
                    self._look_again()
                    return
        except (BlockingIOError, ssl.SSLWantWriteError):
            # A renegotiation that has to write first is refused by TLS 1.3, and by OpenSSL's defaults in 1.2.
            return
        except S3Error as error:
            # Without its traceback, whose frames would keep the buffers alive.
            self.close(error.with_traceback(None))
            return
        except (OSError, ValueError) as error:
            cause, when = (Cause.CUT, "within") if answer.started else (Cause.RESET, "before")
            failure = S3Error(cause, f"The connection broke {when} the answer.")
            failure.__cause__ = error.with_traceback(None)
            self.close(failure)
            return
        self._again = self._loop.call_soon(self._on_readable)

    def _on_deadline(self, timeout_s: float) -> None:
        self.close(S3Error(Cause.TIMEOUT, f"No answer within {timeout_s:.3g} s."))

    def _look_again(self) -> None:
        """Look once more in a moment: uvloop tells of a reset once, and that may have been with these bytes.

        Receiving until there is nothing left would tell, too, at the price of the GIL for each piece of a body. The
        look is not taken back when the answer is whole: it does no harm, and one timer serves many answers.
        """
        if self._recheck is None:
            self._recheck = self._loop.call_later(_RECHECK_S, self._on_recheck)

    def _on_recheck(self) -> None:
        self._recheck = None
        if self._again is None:
            self._on_readable()

    def _on_idle_readable(self) -> None:
        try:
            count = self._stream.receive([memoryview(bytearray(1))])
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if count:
            self._on_surplus()
        self.close()
