"""Messages on a socket between the scheduler's process and the process of an I/O half, and the bell that signals them.

A read of a socket releases the GIL, and the thread may wait milliseconds to get it back. So the scheduler's thread
compares a counter in shared memory, the bell, and reads the socket only when it has changed.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from kvstore.runtime.messages import FromIO, ToIO

__all__ = [
    "Bell",
    "ChildMessage",
    "Closed",
    "Opened",
    "ParentMessage",
    "Ping",
    "Pong",
    "Start",
    "Stop",
    "Unpacker",
    "pack",
    "take_frame",
]

_LENGTH: Final = struct.Struct("<I")
_FRAME_BYTES_MAX: Final = 256 << 20
"""Longest frame that is believed; those we make are a thousandth of it."""

_FRAME_KEYS_MAX: Final = 8192
"""Keys from which on a frame is full: a frame is decoded in one call on the scheduler's thread, in a millisecond."""

_M = TypeVar("_M")

_encoder = msgspec.msgpack.Encoder()

_COUNT: Final = struct.Struct("<Q")


class _Control(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of messages between the two ends of the socket only."""


class Start(_Control, frozen=True):
    """First message to a child: the I/O side to run.

    Attributes:
        target: ``"module:function"`` that makes the I/O side from ``(payload, primary, post, room)``.
        payload: Its first argument.
        offset: Where in the region's file the mapping begins.
        skip: Bytes from there to the primary tier.
        size_bytes: Length of the primary tier.
        sys_path: Where the parent finds its modules.
    """

    target: str
    payload: dict[str, Any]
    offset: int
    skip: int
    size_bytes: int
    sys_path: list[str]

    def __repr__(self) -> str:
        """Show the target without its argument: a tier's options may hold a password."""
        return f"Start({self.target!r})"


class Stop(_Control, frozen=True):
    """Close the I/O side and end."""


class Ping(_Control, frozen=True):
    """Say that your loop runs, by a Pong."""


class Pong(_Control, frozen=True):
    """The loop of the I/O side runs, whatever its medium does."""


class Opened(_Control, frozen=True):
    """The I/O side is open, or why not: name of the error class and its text."""

    error: str
    text: str


class Closed(_Control, frozen=True):
    """The I/O side is closed; the child ends now."""


ParentMessage: TypeAlias = ToIO | Start | Stop | Ping
ChildMessage: TypeAlias = FromIO | Opened | Closed | Pong


def pack(messages: Sequence[ParentMessage] | Sequence[ChildMessage]) -> bytes:
    """Make one frame of messages."""
    body = _encoder.encode(messages)
    return _LENGTH.pack(len(body)) + body


def take_frame(messages: list[_M]) -> list[_M]:
    """Take as many messages from the front of a list, at least one, as a frame should have."""
    keys = count = 0
    while count < len(messages) and keys < _FRAME_KEYS_MAX:
        keys += len(getattr(messages[count], "keys", ()))
        count += 1
    taken = messages[:count]
    del messages[:count]
    return taken


class Unpacker:
    """Cuts a stream of bytes into frames and decodes them as messages of one type.

    Attributes:
        frames: Whole frames that have been fed.
    """

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(list[kind])
        self._buffer = bytearray()
        self.frames = 0

    def feed(self, data: bytes) -> list[Any]:
        """Return the messages that are complete with these bytes.

        Raises:
            ValueError: The stream makes no sense (``msgspec.DecodeError`` is one).
        """
        self._buffer += data
        messages: list[Any] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > _FRAME_BYTES_MAX:
                raise ValueError(f"a frame of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages += self._decoder.decode(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
            self.frames += 1
        return messages


class Bell:
    """A count in a page of shared memory: one side increments it, the other reads it.

    With the descriptor of another process it is on that page, otherwise on a new one.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("kvstore-bell", os.MFD_CLOEXEC) if fd is None else fd
        try:
            if fd is None:
                os.ftruncate(self.fd, mmap.PAGESIZE)
            self._page = mmap.mmap(self.fd, mmap.PAGESIZE)
        except BaseException:
            os.close(self.fd)
            raise

    def ring(self) -> None:
        """Announce one more frame, which has been sent."""
        _COUNT.pack_into(self._page, 0, _COUNT.unpack_from(self._page, 0)[0] + 1)

    @property
    def count(self) -> int:
        """Number of rings so far."""
        count: int = _COUNT.unpack_from(self._page, 0)[0]
        return count

    def close(self) -> None:
        """Unmap the page and close its descriptor. Idempotent."""
        self._page.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
