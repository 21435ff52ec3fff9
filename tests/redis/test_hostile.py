"""A hostile or broken server: bounded memory, one clear error, the connection dropped, and never wrong bytes."""

from __future__ import annotations

import asyncio
import random
import socket
import time

import psutil
import pytest

from kvstore.errors import BackendError, BackendUnavailableError
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome
from tests.redis.clients import maker, opened
from tests.redis.fake_server import Weather, answering, fake_server, reset, stormy

SIZE = 65536

LIES = {
    "huge value": b"$1073741824\r\n" + b"x" * 1000,
    "huge length": b"$999999999999999999999\r\n",
    "longer than the block": b"$65793\r\n" + b"x" * 65793 + b"\r\n",
    "endless line": b"+" + b"x" * 100_000,
    "integer for a value": b":7\r\n",
    "text for a value": b"+OK\r\n",
    "array for a value": b"*2\r\n$1\r\na\r\n$1\r\nb\r\n",
    "bomb of arrays": b"*4000\r\n" * 50,
    "garbage": b"\x00\xff\x13" * 50 + b"\r\n",
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "two answers": b"$-1\r\n$-1\r\n",
    "wrong end of value": b"$4\r\nabcdXY",
}


@pytest.mark.parametrize("lie", LIES)
async def test_lies_to_get(lie: str) -> None:
    """For any bytes in place of a value, the block fails or is a miss, the guards hold, and the connection closes."""
    async with fake_server(answering(LIES[lie])) as server:
        backend = await opened(server, SIZE, connections=1)
        target = maker(SIZE).target(b"k" * 32)
        (outcome,) = await backend.get_into([target.read])
        assert target.guards_intact
        assert outcome in (Outcome.CORRUPT, Outcome.IO_ERROR, Outcome.MISS), outcome
        if lie != "two answers":
            assert outcome is not Outcome.MISS
        await eventually_async(lambda: server.open_connections == 0, what="the connection dropped")


@pytest.mark.parametrize("lie", ["integer for a value", "array for a value", "garbage", "endless line", "http"])
async def test_lies_to_put(lie: str) -> None:
    """A put with an invalid answer has failed."""
    async with fake_server(answering(LIES[lie])) as server:
        backend = await opened(server, SIZE)
        (outcome,) = await backend.put([maker(SIZE).write(b"k" * 32, b"payload")])
        assert outcome is Outcome.IO_ERROR
        assert backend.last_error


@pytest.mark.parametrize("lie", ["text for a value", "garbage", "bomb of arrays", "huge value"])
async def test_lies_to_exists(lie: str) -> None:
    """A lookup with an invalid answer raises one clear error and is not a miss."""
    async with fake_server(answering(LIES[lie])) as server:
        backend = await opened(server, SIZE)
        with pytest.raises(BackendUnavailableError, match=r"^\[redis\] "):
            await backend.exists([b"k" * 32] * 5)


@pytest.mark.parametrize("hello", [b"*1000000\r\n", b"$100\r\n", b"garbage\r\n", b"+" + b"x" * 70_000, b""])
async def test_lies_to_hello(hello: bytes) -> None:
    """A server with an invalid HELLO answer is refused at open, within the connect timeout."""
    async with fake_server(answering(b""), hello=hello) as server:
        started = time.monotonic()
        with pytest.raises(BackendError):
            await opened(server, SIZE, connect_timeout=0.5, timeout=300)
        # The rest is allowance for a busy machine.
        assert time.monotonic() - started < 30


async def test_endless_value_costs_no_memory() -> None:
    """An endless value is cut off at its declared length; one without a length costs only a deadline."""

    async def endless(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        writer.write(b"$60000\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    before = psutil.Process().memory_info().rss
    async with fake_server(endless) as server:
        backend = await opened(server, SIZE)
        for _ in range(20):
            target = maker(SIZE).target(b"k" * 32)
            (outcome,) = await backend.get_into([target.read])
            assert outcome is Outcome.IO_ERROR and target.guards_intact
        await backend.close()
    assert psutil.Process().memory_info().rss - before < 32 << 20


async def test_trickle_costs_a_deadline() -> None:
    """A trickle of bytes does not keep a call alive."""

    async def trickle(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        writer.write(b"$60000\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with fake_server(trickle) as server:
        # A byte every 10 ms: without the deadline it would take ten minutes.
        backend = await opened(server, SIZE, timeout=0.2)
        started = time.monotonic()
        (outcome,) = await backend.get_into([maker(SIZE).target(b"k" * 32).read])
        assert outcome is Outcome.TIMEOUT
        assert time.monotonic() - started < 30


async def test_questions_that_were_asked_together_have_one_deadline() -> None:
    """A server that answers a thousand queries one by one, each in time, costs the time of one answer."""

    async def trickle(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        writer.write(b":0\r\n")
        await writer.drain()
        await asyncio.sleep(0.02)

    async with fake_server(trickle) as server:
        backend = await opened(server, SIZE, timeout=0.5)
        answers = await backend.exists([bytes([number % 256]) * 32 for number in range(1000)])
        assert answers.count(None) > 500 and "no answer within" in backend.last_error


async def test_early_close_is_tried_once_more() -> None:
    """A connection closed before the answer is replaced; a server that always does this gets few attempts."""

    async def hang_up(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        if len(server.commands) % 2:
            reset(writer)
        else:
            writer.close()

    async with fake_server(hang_up) as server:
        backend = await opened(server, SIZE, connections=1)
        (outcome,) = await backend.get_into([maker(SIZE).target(b"k" * 32).read])
        assert outcome is Outcome.IO_ERROR
        assert 2 <= len(server.commands) <= 6


async def test_retries_are_a_tenth_of_the_load() -> None:
    """Under total failure a server receives at most a tenth more commands than the callers sent, after an allowance."""

    async def hang_up(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with fake_server(hang_up) as server:
        backend = await opened(server, SIZE, connections=1, breaker_failures=1000)
        calls = 300
        for _ in range(calls):
            await backend.get_into([maker(SIZE).target(b"k" * 32).read])
        assert len(server.commands) <= 1.1 * calls + 25


ERRORS = {
    b"-OOM command not allowed when used memory > 'maxmemory'\r\n": Outcome.NO_SPACE,
    b"-NOAUTH Authentication required.\r\n": Outcome.REFUSED,
    b"-NOPERM No permissions to access a key\r\n": Outcome.REFUSED,
    b"-MISCONF Redis is configured to save RDB snapshots\r\n": Outcome.IO_ERROR,
    b"-READONLY You can't write against a read only replica.\r\n": Outcome.IO_ERROR,
    b"-LOADING Redis is loading the dataset in memory\r\n": Outcome.IO_ERROR,
    b"-MASTERDOWN Link with MASTER is down\r\n": Outcome.IO_ERROR,
    b"-CLUSTERDOWN The cluster is down\r\n": Outcome.IO_ERROR,
    b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n": Outcome.IO_ERROR,
    b"-MOVED 1 127.0.0.1:1\r\n": Outcome.IO_ERROR,
    b"-ASK 1 127.0.0.1:1\r\n": Outcome.IO_ERROR,
    b"-ERR unknown\r\n": Outcome.IO_ERROR,
    b"-\r\n": Outcome.IO_ERROR,
}


@pytest.mark.parametrize("error", ERRORS)
async def test_errors_become_outcomes(error: bytes) -> None:
    """Each server error maps to an outcome for puts and gets, is raised for lookups, and takes bounded attempts."""
    async with fake_server(answering(error)) as server:
        backend = await opened(server, SIZE)
        (put,) = await backend.put([maker(SIZE).write(b"k" * 32, b"x")])
        assert put is ERRORS[error]
        (got,) = await backend.get_into([maker(SIZE).target(b"k" * 32).read])
        assert got is ERRORS[error]
        with pytest.raises(BackendError):
            await backend.exists([b"k" * 32])
        assert len(server.commands) <= 3 * 6


async def test_a_busy_slot_is_asked_again() -> None:
    """TRYAGAIN is the answer while a slot moves to another node; a retry a moment later succeeds."""

    async def busy_once(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        writer.write(b":1\r\n" if len(server.commands) > 1 else b"-TRYAGAIN Multiple keys request\r\n")
        await writer.drain()

    async with fake_server(busy_once) as server:
        backend = await opened(server, SIZE)
        assert await backend.exists([b"k" * 32]) == [True]
        assert len(server.commands) == 2


async def test_errors_never_quote_the_server() -> None:
    """Servers echo arguments in errors; our errors contain none of that, and no password."""
    echo = b"-ERR unknown command 'HELLO', with args beginning with: '3' 'AUTH' 'default' 'canary-secret'\r\n"
    async with fake_server(answering(echo), hello=echo) as server:
        with pytest.raises(BackendError) as caught:
            await opened(server, SIZE, password="canary-secret")
    error: BaseException | None = caught.value
    while error is not None:
        assert "canary" not in str(error) and "canary" not in repr(error)
        error = error.__cause__


async def test_redirect_of_a_single_server_is_refused() -> None:
    """A server that is not a cluster cannot redirect us."""
    async with fake_server(answering(b"$-1\r\n")) as other:
        async with fake_server(answering(b"-MOVED 1 127.0.0.1:%d\r\n" % other.port)) as server:
            backend = await opened(server, SIZE)
            (outcome,) = await backend.get_into([maker(SIZE).target(b"k" * 32).read])
            assert outcome is Outcome.IO_ERROR
            await backend.close()
        assert other.connections == 0


@pytest.mark.parametrize("turns", range(8))
async def test_servers_of_tests_close_their_last_connection(turns: int) -> None:
    """A connection made while a server or proxy of these tests ends is closed, whatever its state."""
    loop = asyncio.get_running_loop()
    with socket.socket() as direct, socket.socket() as by_proxy:
        for sock in (direct, by_proxy):
            sock.setblocking(False)
        async with fake_server(answering(b"$-1\r\n")) as server, stormy(server.port, Weather(random.Random(7))) as url:
            await loop.sock_connect(direct, ("127.0.0.1", server.port))
            await loop.sock_connect(by_proxy, ("127.0.0.1", int(url.rpartition(":")[2])))
            for _ in range(turns):
                await asyncio.sleep(0)
        for sock in (direct, by_proxy):
            try:
                received = await asyncio.wait_for(loop.sock_recv(sock, 1), 60)
            except ConnectionError:
                received = b""
            assert received == b""
