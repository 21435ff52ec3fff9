"""Messages on a socket between the scheduler's process and the process of an I/O half, and the bell that signals them.

Reading a socket releases the GIL, and reacquiring it may take milliseconds. The scheduler's thread therefore compares a
counter in shared memory, the bell, and reads the socket only after a change.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from kvstore.runtime.messages import FromIO, ToIO

_LENGTH: Final = struct.Struct("<I")
_FRAME_BYTES_MAX: Final = 256 << 20
"""Longest valid frame; actual frames are about a thousandth of it."""

_FRAME_KEYS_MAX: Final = 8192
"""Keys at which a frame is full: the scheduler's thread decodes a frame in one call, which takes a millisecond."""

_M = TypeVar("_M")

_encoder = msgspec.msgpack.Encoder()

_COUNT: Final = struct.Struct("<Q")


class _Control(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of control messages between the two ends of the socket."""


class Start(_Control, frozen=True):
    """First message to a child: create the I/O side by ``target(payload, primary, post, room)``.

    ``target`` is ``"module:function"``. The primary tier has ``size_bytes`` bytes; in the region's file it begins
    ``skip`` bytes after the page at ``offset``.
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
    """Request to close the I/O side and exit."""


class Ping(_Control, frozen=True):
    """Request for a :class:`Pong`."""


class Pong(_Control, frozen=True):
    """The loop of the I/O side runs; the state of its medium does not matter."""


class Opened(_Control, frozen=True):
    """Result of opening the I/O side: empty fields, or the name of the error class and its text."""

    error: str
    text: str


class Closed(_Control, frozen=True):
    """The I/O side is closed; the child exits."""


ParentMessage: TypeAlias = ToIO | Start | Stop | Ping
ChildMessage: TypeAlias = FromIO | Opened | Closed | Pong


def pack(messages: Sequence[ParentMessage] | Sequence[ChildMessage]) -> bytes:
    """Encode messages as one frame."""
    body = _encoder.encode(messages)
    return _LENGTH.pack(len(body)) + body


def take_frame(messages: list[_M]) -> list[_M]:
    """Remove the messages of one frame, at least one, from the front of a list that is not empty; return them."""
    keys = count = 0
    while count < len(messages) and keys < _FRAME_KEYS_MAX:
        keys += len(getattr(messages[count], "keys", ()))
        count += 1
    taken = messages[:count]
    del messages[:count]
    return taken


class Unpacker:
    """Splits a byte stream into frames and decodes them as messages of one type."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(list[kind])
        self._buffer = bytearray()
        self.frames = 0  # Number of complete frames so far.

    def __repr__(self) -> str:
        """Show the number of complete frames, and the bytes of the next."""
        return f"Unpacker({self.frames} frames and {len(self._buffer)} bytes)"

    def feed(self, data: bytes) -> list[Any]:
        """Return the messages completed by these bytes.

        Raises:
            ValueError: The stream is invalid (``msgspec.DecodeError`` is one).
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
    """A counter in a page of shared memory: one side increments it, the other reads it.

    ``fd`` is the descriptor of another process's bell; None creates a new page.
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
        """Signal one more sent frame."""
        _COUNT.pack_into(self._page, 0, self.count + 1)

    @property
    def count(self) -> int:
        return int(_COUNT.unpack_from(self._page, 0)[0])

    def close(self) -> None:
        """Unmap the page and close its descriptor. Idempotent."""
        self._page.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
