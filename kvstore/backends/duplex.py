"""Both directions of a stream by callbacks: sends queued buffers, and receives into given buffers."""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

from kvstore.backends.stream import Stream
from kvstore.backends.vectored import drop_front

_RECEIVES_MAX: Final = 64
_RECEIVED_MAX: Final = 2 << 20
"""System calls and bytes for one wake-up, so that one busy connection does not keep the loop from the others."""

_PIECES_MAX: Final = 64
"""Pieces handed to one send."""

_RECHECK_S: Final = 0.05
"""Longest delay until a reset that arrived together with bytes is noticed; rare, and far below every deadline."""


class Duplex(ABC):
    """Moves bytes over one connected stream, on one event loop. A subclass provides the receive buffers."""

    def __init__(self, stream: Stream) -> None:
        self._loop = asyncio.get_running_loop()
        self._stream = stream
        self._descriptor = stream.fileno()
        self._writing = False
        self._read_wants_write = False
        self._again: asyncio.Handle | None = None
        self._recheck: asyncio.TimerHandle | None = None
        self.closed = False  # Whether it has ended; no buffer is touched after that.
        self.sent_bytes = 0  # Bytes sent since the start.
        # Buffers to send, none of them empty; call ``_flush`` after adding to it.
        self.unsent: deque[bytes | memoryview] = deque()
        self._loop.add_reader(self._descriptor, self._on_readable)

    @abstractmethod
    def _buffers(self) -> Sequence[memoryview]:
        """Return the buffers for the next bytes, in order; never empty."""

    @abstractmethod
    def _received(self, count: int) -> bool:
        """Process ``count`` received bytes, 0 at the end of the stream; return whether to receive more."""

    @abstractmethod
    def _broken(self, error: OSError | ValueError) -> None:
        """Handle a failed receive. ValueError: a buffer was released while its call ran."""

    @abstractmethod
    def _unsendable(self, error: OSError | ValueError) -> None:
        """Handle a failed send."""

    def _end(self, *, abort: bool) -> None:
        """Close the stream immediately; ``abort`` resets the connection, so that the other side stops sending."""
        self.closed = True
        for handle in (self._again, self._recheck):
            if handle is not None:
                handle.cancel()
        self._loop.remove_reader(self._descriptor)
        if self._writing:
            self._loop.remove_writer(self._descriptor)
        self._stream.close(abort=abort)
        self.unsent.clear()

    def _flush(self) -> None:
        """Send as many bytes as possible now; wait for room for the rest."""
        queue = self.unsent
        try:
            while queue:
                sent = self._stream.send(list(islice(queue, _PIECES_MAX)))
                self.sent_bytes += sent
                drop_front(queue, sent)
        except BlockingIOError:
            pass
        except (OSError, ValueError) as error:
            # Nothing may be raised into the loop.
            self._unsendable(error)
        if not self.closed and bool(queue) != self._writing:
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
            buffers = self._buffers()
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
                self._broken(error)
                return
            received += count
            if not self._received(count):
                return
            # A receive that did not fill its buffers has emptied the socket; TLS may hold more than the socket shows.
            if not self._stream.is_encrypted and count < sum([buffer.nbytes for buffer in buffers]):
                self._look_again()
                return
        if self._stream.is_encrypted:
            self._again = self._loop.call_soon(self._on_readable)

    def _look_again(self) -> None:
        """Receive again shortly: uvloop reports a reset only once, possibly together with these bytes.

        Receiving until the socket is empty would also detect the reset, but would take the GIL for each piece of a
        value. The timer is not cancelled: it does no harm, and one timer serves many answers.
        """
        if self._recheck is None:
            self._recheck = self._loop.call_later(_RECHECK_S, self._on_recheck)

    def _on_recheck(self) -> None:
        self._recheck = None
        self._on_readable()
