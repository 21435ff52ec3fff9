"""Free ports for peers, below the ephemeral range."""

from __future__ import annotations

import itertools
import os
import socket

_MIN, _MAX = 21_000, 32_000
_counter = itertools.count(os.getpid() * 61)


def free_port() -> int:
    """Return a port without a listener; each is reused as late as possible."""
    while True:
        port = _MIN + next(_counter) % (_MAX - _MIN)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
