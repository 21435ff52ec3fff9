"""Channels: connections read and written by awaiting, whose frames each end with a MAC."""

from __future__ import annotations

import asyncio
import hmac
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from kvstore.backends.peer.protocol import Agreement, FrameMac, PeerProtocolError
from kvstore.backends.stream import Stream
from kvstore.backends.vectored import drop_front


class Channel:
    """Moves bytes and, after a greeting, frames over one stream; one task at a time receives, and one sends.

    Buffers are only touched by the calling task while its call runs, so a cancelled call never touches them later. A
    channel abandoned in the middle of a frame is unusable, and the caller closes it. No part of a frame may be used
    before :meth:`end_frame` has checked it, except to receive the rest. Every call raises ``OSError`` if the stream
    broke or ended early.
    """

    _sent: FrameMac
    _received: FrameMac

    def __init__(self, stream: Stream) -> None:
        self._loop = asyncio.get_running_loop()
        self.stream = stream
        self._descriptor = stream.fileno()
        self._readable: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._watched = False
        self._idle = False
        self.closed = False  # Also true if data or the end of the stream arrived while it was idle.

    async def receive(self, buffers: Sequence[memoryview]) -> None:
        """Fill buffers, in order."""
        left = [buffer for buffer in buffers if buffer.nbytes]
        while left:
            self._check()
            try:
                count = self.stream.receive(left)
            except BlockingIOError:
                await self._until_readable()
                continue
            if not count:
                raise ConnectionResetError("the other side closed the connection")
            drop_front(left, count)

    async def receive_bytes(self, count: int) -> bytes:
        """Receive and return ``count`` bytes; for short frames."""
        data = bytearray(count)
        with memoryview(data) as view:
            await self.receive([view])
        return bytes(data)

    async def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._idle = False
        queue = deque(piece for piece in pieces if len(piece))
        while queue:
            self._check()
            try:
                drop_front(queue, self.stream.send(list(queue)))
            except BlockingIOError:
                await self._until_writable()

    def watch(self) -> None:
        """Until the next send, close the channel when anything arrives, such as the end of the stream."""
        self._idle = True
        self._watch()

    def close(self, *, abort: bool = True) -> None:
        """Close immediately; waiting calls raise a ``ConnectionError``. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self._watched:
            self._loop.remove_reader(self._descriptor)
        if self._writable is not None:
            self._loop.remove_writer(self._descriptor)
        for waiter in (self._readable, self._writable):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        self.stream.close(abort=abort)

    def agree(self, agreement: Agreement, *, is_server: bool) -> None:
        """Begin frames, after the greeting."""
        macs = agreement.questions(), agreement.answers()
        self._received, self._sent = macs if is_server else macs[::-1]

    async def send_frames(self, *frames: Sequence[bytes | memoryview]) -> None:
        """Send frames, each a list of pieces."""
        pieces: list[bytes | memoryview] = []
        for frame in frames:
            for piece in frame:
                self._sent.update(piece)
            pieces += [*frame, self._sent.end()]
        await self.send(pieces)

    async def begin_frame(self, count: int) -> bytes:
        """Receive and return the first bytes of a frame, which are not checked yet."""
        data = await self.receive_bytes(count)
        self._received.update(data)
        return data

    async def end_frame(self, buffers: Sequence[memoryview] = ()) -> None:
        """Receive the rest of a frame into buffers, and check the frame.

        Raises:
            PeerProtocolError: The frame is not the next one of the other side.
        """
        tag = bytearray(self._received.tag_bytes)
        with memoryview(tag) as view:
            await self.receive([*buffers, view])
        for buffer in buffers:
            self._received.update(buffer)
        if not hmac.compare_digest(tag, self._received.end()):
            raise PeerProtocolError("a frame was forged, altered, repeated or lost in transit")

    def _check(self) -> None:
        if self.closed:
            raise ConnectionAbortedError("the connection is closed")

    async def _until_readable(self) -> None:
        self._readable = self._loop.create_future()
        self._watch()
        try:
            await self._readable
        finally:
            self._readable = None

    def _watch(self) -> None:
        # The reader stays registered between waits, because a block is received in many pieces.
        if not self.closed and not self._watched:
            self._watched = True
            self._loop.add_reader(self._descriptor, self._on_readable)

    def _on_readable(self) -> None:
        if self._readable is not None:
            if not self._readable.done():
                self._readable.set_result(None)
            return
        if not self._idle:
            # The next receive reads these bytes.
            self._watched = False
            self._loop.remove_reader(self._descriptor)
            return
        # The bytes behind this event may have been received already. Otherwise this is the end or unsolicited data.
        with suppress(OSError), memoryview(bytearray(1)) as unasked:
            try:
                self.stream.receive([unasked])
            except BlockingIOError:
                return
        self.close()

    async def _until_writable(self) -> None:
        self._writable = writable = self._loop.create_future()

        def wake() -> None:
            if not writable.done():
                writable.set_result(None)

        self._loop.add_writer(self._descriptor, wake)
        try:
            await writable
        finally:
            self._writable = None
            if not self.closed:
                self._loop.remove_writer(self._descriptor)
