"""Channels: pipes whose frames each end with a MAC."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from kvstore.backends.peer.pipe import Pipe
from kvstore.backends.peer.protocol import Agreement, FrameMac, PeerProtocolError


class Channel(Pipe):
    """A pipe that sends and receives frames after a greeting.

    No part of a frame may be used before :meth:`end_frame` has checked it, except to receive the rest.
    """

    _sent: FrameMac
    _received: FrameMac

    def agree(self, agreement: Agreement, *, is_server: bool) -> None:
        """Begin frames, after the greeting."""
        macs = agreement.questions(), agreement.answers()
        self._received, self._sent = macs if is_server else macs[::-1]

    async def send_frames(self, *frames: Sequence[bytes | memoryview]) -> None:
        """Send frames, each a list of pieces.

        Raises:
            OSError: The stream broke.
        """
        pieces: list[bytes | memoryview] = []
        for frame in frames:
            for piece in frame:
                self._sent.update(piece)
            pieces += [*frame, self._sent.end()]
        await self.send(pieces)

    async def begin_frame(self, count: int) -> bytes:
        """Receive and return the first bytes of a frame, which are not checked yet.

        Raises:
            OSError: The stream ended or broke.
        """
        data = await self.receive_bytes(count)
        self._received.update(data)
        return data

    async def end_frame(self, buffers: Sequence[memoryview] = ()) -> None:
        """Receive the rest of a frame into buffers, and check the frame.

        Raises:
            OSError: The stream ended or broke.
            PeerProtocolError: The frame is not the next one of the other side.
        """
        tag = bytearray(self._received.tag_bytes)
        with memoryview(tag) as view:
            await self.receive([*buffers, view])
        for buffer in buffers:
            self._received.update(buffer)
        if not hmac.compare_digest(tag, self._received.end()):
            raise PeerProtocolError("a frame was forged, changed, repeated or left out on its way")

    async def receive_frame(self, count: int) -> bytes:
        """Receive, check and return a frame of ``count`` bytes."""
        data = await self.begin_frame(count)
        await self.end_frame()
        return data
