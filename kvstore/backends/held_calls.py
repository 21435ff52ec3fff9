"""Sends and receives of a socket that keep the GIL.

Python's own calls release it. While a Python thread is busy, taking it back takes up to 5 ms, longer than most of these
calls. ctypes can keep it. The calls cannot block, because each has ``MSG_DONTWAIT``. Linux only, because of the layout
of ``struct msghdr``; https://man7.org/linux/man-pages/man2/sendmsg.2.html.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any, Final

from kvstore.codec.rows import address_of

BUFFERS_MAX: Final = 64
"""Buffers of one call; far below the kernel's limit of 1,024."""

HELD_BYTES_MAX: Final = 4 << 20
"""Most bytes of one call: the kernel copies them in half a millisecond, and a socket rarely accepts more."""


class _Piece(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class _Message(ctypes.Structure):
    """``struct msghdr``."""

    _fields_ = [
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("pieces", ctypes.c_void_p),
        ("piece_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    ]


def _call(library: ctypes.PyDLL, name: str) -> Any:
    function = library[name]
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    function.restype = ctypes.c_ssize_t
    return function


def are_available() -> bool:
    """Return whether the calls can be made here."""
    return sys.platform == "linux"


# PyDLL keeps the GIL during each call, which is the purpose of this module.
_libc: Final = ctypes.PyDLL(None, use_errno=True)
_send: Final = _call(_libc, "sendmsg")
_receive: Final = _call(_libc, "recvmsg")

# By item, not by attribute: an attribute is shared, and other libraries may change its types.
_bytes_address: Final = ctypes.pythonapi["PyBytes_AsString"]
_bytes_address.argtypes = [ctypes.py_object]
_bytes_address.restype = ctypes.c_void_p

# No signal when the other side is gone, because the embedding program may not ignore SIGPIPE.
_SEND_FLAGS: Final = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)


class HeldCalls:
    """The calls of one socket; used by one thread at a time.

    No buffer is kept: addresses are valid only until a call returns.
    """

    def __init__(self) -> None:
        self._pieces = (_Piece * BUFFERS_MAX)()
        self._message = _Message(pieces=ctypes.addressof(self._pieces))
        self._at = ctypes.addressof(self._message)

    def send(self, descriptor: int, buffers: Sequence[bytes | memoryview]) -> int:
        """Send from buffers, in order; return the number of bytes sent.

        Raises:
            BlockingIOError: Nothing can be sent now.
            OSError: The connection broke.
        """
        self._point_at(buffers)
        return self._checked(_send(descriptor, self._at, _SEND_FLAGS))

    def receive(self, descriptor: int, buffers: Sequence[memoryview]) -> int:
        """Receive into buffers, in order; return the number of bytes received, 0 at the end of the stream.

        Raises:
            BlockingIOError: No bytes are available yet.
            OSError: The connection broke.
        """
        self._point_at(buffers)
        return self._checked(_receive(descriptor, self._at, socket.MSG_DONTWAIT))

    def _point_at(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Describe the first buffers, up to the limit of bytes per call."""
        room, count = HELD_BYTES_MAX, 0
        for piece, buffer in zip(self._pieces, buffers, strict=False):
            if isinstance(buffer, bytes):
                piece.base, length = _bytes_address(buffer), len(buffer)
            else:
                length = buffer.nbytes
                piece.base = address_of(buffer) if length else None
            piece.length = min(length, room)
            room -= piece.length
            count += 1
            if not room:
                break
        self._message.piece_count = count

    def _checked(self, moved: int) -> int:
        if moved < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return moved
