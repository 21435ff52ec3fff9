"""Streams without TLS: calls that keep the GIL transfer all bytes correctly, and none blocks."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from kvstore.backends.stream import (
    BUFFERS_MAX,
    HELD_BYTES_MAX,
    Endpoint,
    HeldCalls,
    Stream,
    accepted_stream,
    listening_socket,
    open_stream,
)
from kvstore.backends.vectored import drop_front

SENDING_S = 0.3


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield two connected non-blocking sockets."""
    if request.param == "unix":
        ours, theirs = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        yield ours, theirs


def pieces_of(data: bytes, rng: random.Random, longest: int) -> list[bytes | memoryview]:
    """Cut bytes into all kinds of frames: bytes, writable views, and read-only views."""
    kinds: list[Callable[[bytes], bytes | memoryview]] = [bytes, memoryview, lambda piece: memoryview(bytearray(piece))]
    found, at = [], 0
    while at < len(data):
        end = at + rng.randint(1, longest)
        found.append(rng.choice(kinds)(data[at:end]))
        at = end
    return found


def arrived(sock: socket.socket) -> bool:
    """Wait until there is something to receive; the kernel may deliver with a delay."""
    return bool(select.select([sock], [], [], 60)[0])


def test_frames_arrive_complete_and_in_order(pair: tuple[socket.socket, socket.socket], rng: random.Random) -> None:
    """However frames are cut, and however much the socket takes at once, their bytes arrive in order, each once."""
    ours, theirs = pair
    stream, other = Stream(ours), Stream(theirs)
    for longest in (3, 1000, 300_000):
        data = rng.randbytes(rng.randint(1, 200 * longest))
        queue, received = deque(pieces_of(data, rng, longest)), bytearray()
        assert longest > 3 or len(data) < 10 or len(queue) > 1
        while len(received) < len(data):
            try:
                while queue:
                    drop_front(queue, stream.send(list(queue)))
            except BlockingIOError:
                pass
            # Short and long buffers take different paths through the stream.
            rows = [bytearray(rng.randint(1, rng.choice([50, 100_000]))) for _ in range(rng.randint(1, 3))]
            try:
                count = other.receive([memoryview(row) for row in rows])
            except BlockingIOError:
                continue
            whole = b"".join(rows)
            assert not any(whole[count:]), "bytes behind those that came were written"
            received += whole[:count]
        assert received == data


def test_limits_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call takes a bounded number of buffers and bytes, from the first on, and returns the bytes taken."""
    calls = HeldCalls()
    many = [b"%04d" % number for number in range(BUFFERS_MAX + 8)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert calls.send(ours.fileno(), many) == 4 * BUFFERS_MAX
        assert theirs.recv(65536) == b"".join(many[:BUFFERS_MAX])
        monkeypatch.setattr("kvstore.backends.stream.HELD_BYTES_MAX", 10)
        assert calls.send(ours.fileno(), [b"123456", memoryview(b""), memoryview(b"7890ab"), b"more"]) == 10
        assert theirs.recv(65536) == b"1234567890"
        theirs.send(b"0123456789ab")
        rows = [bytearray(6), bytearray(0), bytearray(6)]
        assert calls.receive(ours.fileno(), [memoryview(row) for row in rows]) == 10
        assert b"".join(rows) == b"0123456789\0\0"


def test_nothing_blocks(pair: tuple[socket.socket, socket.socket]) -> None:
    """A full or an empty socket is reported at once, even if its descriptor would block."""
    ours, theirs = pair
    ours.setblocking(True)
    stream = Stream(ours)
    with pytest.raises(BlockingIOError):
        stream.receive([memoryview(bytearray(100))])
    value = memoryview(bytes(HELD_BYTES_MAX))
    with pytest.raises(BlockingIOError):
        while True:
            stream.send([value])
    theirs.close()


def test_the_end_and_a_break(pair: tuple[socket.socket, socket.socket]) -> None:
    """The end of the stream is 0; a later send is an error and not a signal, as is any call after the close."""
    ours, theirs = pair
    stream = Stream(ours)
    theirs.send(b"last")
    theirs.close()
    row = bytearray(100)
    assert arrived(ours) and stream.receive([memoryview(row)]) == 4
    assert arrived(ours) and stream.receive([memoryview(row)]) == 0
    kept = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            # The first one may still succeed, and be answered by a reset.
            while True:
                with contextlib.suppress(BlockingIOError):
                    stream.send([b"to nobody"])
    finally:
        signal.signal(signal.SIGPIPE, kept)
    stream.close(abort=True)
    for call in (lambda: stream.send([b"x"]), lambda: stream.receive([memoryview(row)])):
        with pytest.raises(OSError):
            call()


def test_buffers_are_let_go_of(pair: tuple[socket.socket, socket.socket]) -> None:
    """After a call its buffers are not referenced: a view can be released, and its memory resized."""
    ours, theirs = pair
    stream = Stream(ours)
    theirs.send(b"some bytes")
    row = bytearray(100)
    view = memoryview(row)
    stream.send([view[:50], view[50:]])
    assert arrived(ours) and stream.receive([view]) == 10
    view.release()
    row.append(1)


def test_the_gil_is_kept() -> None:
    """A thread that waits for the GIL does not get it during sends or short receives."""
    # Once in a thousand times another thread of this process has requested it just before, and both run. A call that
    # releases the GIL loses it each time.
    assert not all(_others_run() for _ in range(5))


def _others_run() -> bool:
    """Send and receive for a while; return whether a thread waiting for the GIL got it meanwhile."""
    ours, theirs = socket.socketpair()
    # Makes a send last longer than a thread takes to wake up, so that a release of the GIL would lose it.
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    stream, other = Stream(ours), Stream(theirs)
    value, row = memoryview(bytearray(2 << 20)), memoryview(bytearray(65536))
    gate, ran = threading.Lock(), threading.Event()
    seen = []

    def wait() -> None:
        gate.acquire()
        seen.append(1)
        ran.set()

    gate.acquire()
    thread = threading.Thread(target=wait)
    interval = sys.getswitchinterval()
    # Longer than the test, so that only a release of the GIL loses it. It is set before the thread starts, which has
    # then reached the gate when start() returns.
    sys.setswitchinterval(1000)
    try:
        thread.start()
        gate.release()
        end = time.monotonic() + SENDING_S
        while time.monotonic() < end:
            missing = stream.send([value])
            while missing:
                missing -= other.receive([row])
        count = len(seen)
        sys.setswitchinterval(interval)
        # The thread was able to run: it does so as soon as we wait for it.
        assert ran.wait(120)
    finally:
        sys.setswitchinterval(interval)
        if gate.locked():
            gate.release()
        thread.join()
        ours.close()
        theirs.close()
    return count > 0


async def test_idle_connections_are_probed() -> None:
    """Both ends find out within a minute that a firewall forgot their idle connection, not by the next batch."""
    with listening_socket(Endpoint("127.0.0.1", 0)) as listener:
        ours = await open_stream(Endpoint("127.0.0.1", listener.getsockname()[1]), None)
        theirs = await accepted_stream(listener.accept()[0], None)
        for stream in (ours, theirs):
            with socket.socket(fileno=os.dup(stream.fileno())) as same:
                assert same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
                assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
            stream.close(abort=True)


def test_tls_stream_is_identifiable() -> None:
    """A caller that polls the descriptor must know that OpenSSL may hold more bytes than the descriptor shows."""
    ours, other = socket.socketpair()
    with ours, other:
        assert not Stream(ours).is_encrypted
        context = ssl.create_default_context()
        with context.wrap_socket(ours, do_handshake_on_connect=False, server_hostname="host") as encrypted:
            assert Stream(encrypted).is_encrypted
