"""Connections to the service: one request at a time each, reused after a clean response."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.backends.duplex import Duplex
from kvstore.backends.s3.failures import Cause, S3Error
from kvstore.backends.s3.http import Answer
from kvstore.backends.stream import TLS, Endpoint, Stream, current_tls, open_stream

_IDLE_S_MAX: Final = 15.0
"""Idle time after which a connection is not reused. Services close them after 5 to 60 s, which would fail a request."""


class Wire:
    """The connections to one endpoint, with TLS if given settings. The connect timeout includes the handshake."""

    def __init__(
        self, endpoint: Endpoint, tls: TLS | None, connect_timeout_s: float, *, idle_s_max: float = _IDLE_S_MAX
    ) -> None:
        self._endpoint = endpoint
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._idle_s_max = idle_s_max
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._closed = False
        self.connections_opened = 0
        self.connections_dirty = 0

    def __repr__(self) -> str:
        """Show the number of connections."""
        return f"Wire({self._endpoint}, {len(self._idle)} idle, {len(self._busy)} busy)"

    def close(self) -> None:
        """Close all connections immediately; running requests fail."""
        self._closed = True
        for connection in (*self._idle, *self._busy):
            connection.close(S3Error(Cause.CLOSED, "The client was closed."))
        self._idle.clear()

    async def request(self, frames: Sequence[bytes | memoryview], answer: Answer, *, timeout_s: float) -> None:
        """Send a request (head and body) and fill its response; no buffer is touched after this call returns.

        Raises:
            S3Error: No connection, no response in time, or a broken response.
        """
        deadline = time.monotonic() + timeout_s
        connection: _Connection | None = None
        try:
            connection = self._take_idle() or await self._connect(timeout_s)
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

    def _take_idle(self) -> _Connection | None:
        """Return the most recently used idle connection; close those that are too old or not clean."""
        now = time.monotonic()
        while self._idle:
            connection = self._idle.pop()
            if now - connection.idle_since < self._idle_s_max and connection.is_clean():
                return connection
            connection.close()
        return None

    def _note_surplus(self) -> None:
        self.connections_dirty += 1

    async def _connect(self, timeout_s: float) -> _Connection:
        if self._closed:
            raise S3Error(Cause.CLOSED, "The client was closed.")
        where = str(self._endpoint)
        timeout_s = min(timeout_s, self._connect_timeout_s)
        try:
            async with current_tls(self._tls, self._endpoint) as context, asyncio.timeout(timeout_s):
                stream = await open_stream(self._endpoint, context)
        except TimeoutError:
            raise S3Error(Cause.TIMEOUT, f"No connection to {where} within {timeout_s:.3g} s.") from None
        except ssl.SSLError as error:
            raise S3Error(Cause.TLS, f"No TLS connection to {where}: {error.reason or 'refused'}.") from error
        except socket.gaierror as error:
            raise S3Error(Cause.DNS, f"The name of {where} can't be resolved.") from error
        except ConnectionResetError as error:
            raise S3Error(Cause.RESET, f"{where} closed the new connection immediately.") from error
        except OSError as error:
            raise S3Error(Cause.REFUSED, f"No connection to {where}: {error.strerror or 'refused'}.") from error
        if self._closed:
            # Closed while connecting: send nothing.
            stream.close(abort=True)
            raise S3Error(Cause.CLOSED, "The client was closed.")
        self.connections_opened += 1
        return _Connection(stream, self._note_surplus)


class _Connection(Duplex):
    """One connection, reused only after complete responses without surplus bytes.

    ``on_surplus`` is called once if surplus bytes arrive.
    """

    def __init__(self, stream: Stream, on_surplus: Callable[[], None]) -> None:
        super().__init__(stream)
        # Response of the current exchange; still set after a failed one.
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._send_failed = False
        self._on_surplus = on_surplus
        self.idle_since = 0.0
        self.reusable = True

    async def exchange(self, frames: Sequence[bytes | memoryview], answer: Answer, timeout_s: float) -> None:
        """Send a request and receive its response; ``reusable`` is then True if another may follow."""
        # False until the response is complete: a connection must not be reused after a cancelled exchange.
        self.reusable = False
        self._answer = answer
        # Without empty frames, which would never count as sent.
        self.unsent.extend([frame for frame in frames if len(frame)])
        self._done = self._loop.create_future()
        # asyncio.timeout() would cost as much as signing the request.
        alarm = self._loop.call_later(max(0.0, timeout_s), self._on_deadline, timeout_s)
        try:
            self._flush()
            await self._done
        finally:
            alarm.cancel()
            self._done = None
            is_sent = not self.unsent and not self._send_failed
            self.unsent.clear()
        if not answer.whole:
            raise S3Error(Cause.PROTOCOL, "The service did not answer.")
        if not is_sent and answer.status < 300:
            # An error response is valid, but a partially sent object cannot have been stored.
            raise S3Error(Cause.PROTOCOL, "The service answered before it had received the whole request.")
        if answer.surplus:
            self._on_surplus()
        # After a partially sent request, later responses on this connection could not be trusted.
        self.reusable = is_sent and answer.stays_open and not answer.surplus and not self.closed
        self._answer = None

    def is_clean(self) -> bool:
        """Return whether the connection is open without surplus bytes, after which no response could be trusted.

        With TLS, surplus bytes may be in OpenSSL's buffer, where the event loop does not see them.
        """
        if self.closed:
            return False
        try:
            count = self._stream.receive([memoryview(bytearray(1))])
        except BlockingIOError:
            return True
        except OSError:
            count = 0
        if count:
            self._on_surplus()
        return False

    def close(self, error: S3Error | None = None) -> None:
        """Close immediately; no buffer is touched afterwards."""
        if self.closed:
            return
        self.reusable = False
        self._finish(error)
        # Reset the connection during an incomplete response, so that the service stops sending.
        self._end(abort=self._answer is not None)

    def _on_deadline(self, timeout_s: float) -> None:
        self.close(S3Error(Cause.TIMEOUT, f"No answer within {timeout_s:.3g} s."))

    def _finish(self, error: S3Error | None = None) -> None:
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)

    def _on_readable(self) -> None:
        if self._done is not None and not self._done.done():
            super()._on_readable()
        elif not self.is_clean():
            # The service closed the connection, or sent surplus bytes.
            self.close()

    def _buffers(self) -> Sequence[memoryview]:
        return self._answer.buffers() if self._answer is not None else ()

    def _received(self, count: int) -> bool:
        if self._answer is None:
            return False
        try:
            self._answer.advance(count)
        except S3Error as error:
            # The frames of a traceback would keep the buffers alive.
            self.close(error.with_traceback(None))
            return False
        if self._answer.whole:
            self._finish()
        return not self._answer.whole

    def _broken(self, error: OSError | ValueError) -> None:
        is_begun = self._answer is not None and self._answer.started
        cause, when = (Cause.CUT, "within") if is_begun else (Cause.RESET, "before")
        failure = S3Error(cause, f"The connection broke {when} the answer.")
        failure.__cause__ = error.with_traceback(None)
        self.close(failure)

    def _unsendable(self, error: OSError | ValueError) -> None:
        # The service may have sent an error response before it closed the connection.
        self.unsent.clear()
        self._send_failed = True
        self._look_again()
