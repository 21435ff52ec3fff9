"""A link of a given speed: a TCP proxy in a process of its own, between a tier and its server.

Both directions have the full speed, each shared by all connections. Bytes go from socket to pipe to socket by
splice(2), never through Python, so that a gigabyte a second costs little beside what is measured. No latency is added.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

__all__ = ["throttled"]

_PIPE_BYTES = 1 << 20
"""Most that a pipe holds without privileges, and so the longest piece that is moved at once."""
_BURST_S = 0.002
"""Time whose bytes may pass at once; shorter than that, a sleep is not exact."""


@contextlib.contextmanager
def throttled(port: int, bytes_per_s: float) -> Iterator[int]:
    """Run a proxy before a port of this machine; yield its own port.

    Args:
        port: Where the server listens, on 127.0.0.1.
        bytes_per_s: Speed of each direction.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    # Forked, so that the listening socket goes along; nothing of this process's threads is used in it.
    process = multiprocessing.get_context("fork").Process(
        target=_serve, args=(listener, port, bytes_per_s), daemon=True
    )
    process.start()
    own_port = listener.getsockname()[1]
    listener.close()
    try:
        yield own_port
    finally:
        process.terminate()
        process.join()


class _Bucket:
    """Bytes that may pass, growing with time; threads take from it and sleep off what they took too much."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = time.monotonic()
        self.piece_bytes = max(4096, min(_PIPE_BYTES, int(bytes_per_s * _BURST_S)))

    def take(self, size_bytes: int) -> None:
        """Wait until so many bytes would have passed."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - _BURST_S) + size_bytes / self._rate
            pause_s = self._free_at - now
        if pause_s > 0:
            time.sleep(pause_s)


def _serve(listener: socket.socket, port: int, bytes_per_s: float) -> None:
    # Ctrl-C ends the benchmark, which ends this when it has closed what goes through it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    there, back = _Bucket(bytes_per_s), _Bucket(bytes_per_s)
    while True:
        client, _ = listener.accept()
        server = socket.create_connection(("127.0.0.1", port))
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, target, bucket in ((client, server, there), (server, client, back)):
            threading.Thread(target=_move, args=(source, target, bucket), daemon=True).start()


def _move(source: socket.socket, target: socket.socket, bucket: _Bucket) -> None:
    """Move what comes, until either side ends."""
    out, into = os.pipe()
    with contextlib.suppress(OSError):
        fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        while moved := os.splice(source.fileno(), into, bucket.piece_bytes):
            bucket.take(moved)
            while moved:
                moved -= os.splice(out, target.fileno(), moved)
    os.close(out)
    os.close(into)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
