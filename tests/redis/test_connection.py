"""One connection on a loopback socket: its turns of the loop, its deadlines, and its end."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvstore.backends import duplex
from kvstore.backends.redis import RedisConfig
from kvstore.backends.redis.connection import Connection, Pending, Request, Want
from kvstore.backends.redis.failures import AnswerLateError, ConnectionLostError, ProtocolBrokenError, RedisError
from kvstore.backends.redis.resp import Filled, Target, encode_command
from kvstore.backends.stream import Stream
from kvstore.testing.waiting import eventually_async

VALUE_BYTES = 1 << 20


@dataclass
class Ends:
    """A connection and the server's side of it."""

    connection: Connection
    server: socket.socket
    closed: list[RedisError | None] = field(default_factory=list)  # The error of each close.


@asynccontextmanager
async def connected(**options: Any) -> AsyncIterator[Ends]:
    """Yield a connection whose server side the test controls."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    client.setblocking(False)
    server.settimeout(20)
    closed: list[RedisError | None] = []

    def on_closed(connection: Connection, requests: Sequence[Request], error: RedisError | None) -> None:
        closed.append(error)

    connection = Connection(Stream(client), RedisConfig(**options), lambda: None, on_closed)
    try:
        yield Ends(connection, server, closed)
    finally:
        connection.close()
        server.close()


def get_of(size: int) -> Request:
    """Return a GET of one value, in a batch of its own."""
    request = Request([encode_command(b"GET", b"k")], Target([memoryview(bytearray(size))]), size)
    Pending([request])
    return request


def replace_stream(connection: Connection, make: Callable[[Stream], Any]) -> Stream:
    """Give a connection the stream that ``make`` returns for its own one; return its own one."""
    stream, connection._stream = connection._stream, make(connection._stream)
    return stream


class Endless:
    """A stream on which bytes of a value are always available."""

    is_encrypted = False
    received = 0

    def receive(self, buffers: Sequence[memoryview]) -> int:
        """Fill all buffers except the last byte of the value, so that it never ends."""
        count = min(buffers[0].nbytes, 65536)
        self.received += count
        return count


async def test_a_flood_leaves_the_loop_to_others() -> None:
    """One wake-up receives at most about two megabytes, and one part of the rest of a value that was pending before."""
    async with connected() as ends:
        connection = ends.connection
        connection.submit([get_of(64 << 20)])
        ends.server.sendall(b"$%d\r\n" % (64 << 20))
        while not connection._reader._value_missing:
            await asyncio.sleep(0)
        endless = Endless()
        stream = replace_stream(connection, lambda stream: endless)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(duplex, "_RECEIVES_MAX", 1 << 20)
            # Buffers are never filled, as with a socket that holds more than fits: the byte limit has to end it.
            endless.is_encrypted = True
            connection._on_readable()
        replace_stream(connection, lambda endless: stream)
        received_max = duplex._RECEIVED_MAX
        assert received_max <= endless.received <= received_max + 65536


class Scripted:
    """A stream with scripted receives; it sends and closes like the real one."""

    def __init__(self, stream: Stream, *receives: Callable[[Sequence[memoryview]], int], tls: bool = False) -> None:
        self.send, self.close, self.is_encrypted = stream.send, stream.close, tls
        self._receives = iter(receives)

    def receive(self, buffers: Sequence[memoryview]) -> int:
        """Make the next scripted receive."""
        return next(self._receives)(buffers)


async def test_a_reset_that_came_with_bytes_is_found() -> None:
    """A loop may report a reset once, together with data: the connection receives again, long before its deadline."""

    def reset(buffers: Sequence[memoryview]) -> int:
        raise ConnectionResetError(errno.ECONNRESET, "reset")

    async with connected(timeout=300) as ends:
        replace_stream(ends.connection, lambda stream: Scripted(stream, stream.receive, reset))
        ends.connection.submit([get_of(8)])
        ends.server.sendall(b"$8")
        await eventually_async(lambda: ends.closed, 20)
        assert isinstance(ends.closed[0], ConnectionLostError)


async def test_tls_that_has_to_write_first_is_read_on() -> None:
    """OpenSSL may hold received bytes and have to write before delivering them: no other event wakes the connection."""
    taken = bytearray(16)

    def take(buffers: Sequence[memoryview]) -> int:
        del taken[stream.receive([memoryview(taken)]) :]
        raise ssl.SSLWantWriteError

    def give(buffers: Sequence[memoryview]) -> int:
        buffers[0][: len(taken)] = taken
        return len(taken)

    async with connected(timeout=300) as ends:
        stream = replace_stream(ends.connection, lambda stream: Scripted(stream, take, give, stream.receive, tls=True))
        request = Request([encode_command(b"EXISTS", b"k")], int)
        pending = Pending([request])
        ends.connection.submit([request])
        ends.server.sendall(b":1\r\n")
        async with asyncio.timeout(20):
            await pending.done
        assert request.answer == 1


@pytest.mark.parametrize("is_busy", [False, True])
async def test_an_unfinished_exchange_is_reset(is_busy: bool) -> None:
    """A close with an outstanding answer resets the connection, so that the server stops sending; otherwise it ends."""
    async with connected() as ends:
        if is_busy:
            ends.connection.submit([get_of(VALUE_BYTES)])
        ends.connection.close()
        if is_busy:
            with pytest.raises(ConnectionResetError):
                ends.server.recv(1)
        else:
            assert ends.server.recv(1) == b""


async def test_second_close_has_no_effect() -> None:
    """The owner of a connection is notified of its end once, with the first reason."""
    async with connected() as ends:
        first = ConnectionLostError("first")
        ends.connection.close(first)
        ends.connection.close()
        assert ends.closed == [first]


async def test_an_answer_has_the_time_that_its_value_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline of an answer is ``timeout`` plus the time of the value's bytes at ``bytes_per_second_min``."""
    async with connected(timeout=1, bytes_per_second_min=VALUE_BYTES) as ends:
        connection = ends.connection
        request = get_of(2 * VALUE_BYTES)
        connection.submit([request])
        began = connection._answered_at
        for passed_s, is_late in ((2.9, False), (3.0, True)):
            monkeypatch.setattr(connection, "_loop", _At(began + passed_s, asyncio.get_running_loop()))
            connection._on_timer()
            assert connection.closed == is_late
        assert isinstance(ends.closed[0], AnswerLateError)


async def test_values_that_travel_together_are_bounded_one_by_one() -> None:
    """Several values in one submission: each answer is early or not by the end of its own command."""
    async with connected() as ends:
        connection = ends.connection
        sets = [Request([b"x" * 100, memoryview(bytes(VALUE_BYTES))], str, VALUE_BYTES) for _ in range(2)]
        pending = Pending(sets)
        connection.submit(sets)
        assert [request.sent_at for request in sets] == [VALUE_BYTES + 100, 2 * (VALUE_BYTES + 100)]
        await asyncio.to_thread(_receive, ends.server, 2 * (VALUE_BYTES + 100))
        ends.server.sendall(b"+OK\r\n+OK\r\n")
        await pending.done
        assert [request.answer for request in sets] == ["OK", "OK"]
        assert not connection.closed and not connection.inflight_bytes


@pytest.mark.parametrize(
    ("want", "reply"),
    [(int, b"+OK\r\n"), (str, b":1\r\n"), (Target([memoryview(bytearray(9))]), b":1\r\n")],
    ids=["EXISTS", "SET", "GET"],
)
async def test_an_answer_of_another_kind_ends_the_connection(want: Want, reply: bytes) -> None:
    """The answer may belong to another command, as may all later ones: none of them is accepted."""
    async with connected() as ends:
        requests = [Request([encode_command(b"ANY", b"k")], each) for each in (want, int)]
        pending = Pending(requests)
        ends.connection.submit(requests)
        ends.server.sendall(reply + b":1\r\n")
        await eventually_async(lambda: ends.closed, 20)
        assert isinstance(ends.closed[0], ProtocolBrokenError)
        assert (pending.missing, [request.answer for request in requests]) == (2, [None, None])


async def test_answers_fill_their_targets() -> None:
    """Two values in one answer go into the targets of their requests, in order."""
    async with connected() as ends:
        targets = [bytearray(5000) for _ in range(2)]
        gets = [Request([encode_command(b"GET", b"k")], Target([memoryview(one)]), 5000) for one in targets]
        pending = Pending(gets)
        ends.connection.submit(gets)
        ends.server.sendall(b"".join([b"$5000\r\n%b\r\n" % (byte * 5000) for byte in (b"a", b"b")]))
        await pending.done
        assert [request.answer for request in gets] == [Filled(5000)] * 2
        assert targets == [b"a" * 5000, b"b" * 5000]


class _At:
    """A loop at a fixed time."""

    def __init__(self, now: float, loop: asyncio.AbstractEventLoop) -> None:
        self._now = now
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def time(self) -> float:
        return self._now


def _receive(server: socket.socket, size: int) -> None:
    while size:
        size -= len(server.recv(min(size, 1 << 20)))
