"""Connections to a service: their reuse, and the effects of a close."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from kvstore.backends import duplex
from kvstore.backends.s3 import wire as wire_module
from kvstore.backends.s3.failures import Cause, S3Error
from kvstore.backends.s3.http import Answer
from kvstore.backends.s3.wire import Wire
from kvstore.backends.stream import TLS, Endpoint, Stream, client_tls
from kvstore.testing.waiting import eventually_async
from tests.redis.servers import make_certificates

BODY = bytes(range(256)) * 16
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
FOUND = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
ABSENT = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


@contextlib.asynccontextmanager
async def served(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    *,
    theirs: ssl.SSLContext | None = None,
    ours: TLS | None = None,
    **limits: float,
) -> AsyncIterator[Wire]:
    """Yield a client of a server; close all connections at the end, whatever the result."""
    tasks: list[asyncio.Task[None]] = []

    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(closing, "127.0.0.1", 0, ssl=theirs)
    wire = Wire(Endpoint("127.0.0.1", server.sockets[0].getsockname()[1]), ours, 20, **limits)
    try:
        yield wire
    finally:
        wire.close()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=20)
            for task in late:
                task.cancel()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize(("idle_s_max", "connections"), [(60.0, 1), (0.0, 2)])
async def test_a_connection_that_idled_too_long_is_not_used_again(idle_s_max: float, connections: int) -> None:
    """A service is about to close such a connection, and the next request would fail."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(FOUND)

    async with served(serve, idle_s_max=idle_s_max) as wire:
        for _ in range(2):
            answer = Answer([memoryview(bytearray(len(BODY)))])
            await wire.request([REQUEST], answer, timeout_s=20)
            assert answer.whole
        assert wire.connections_opened == connections


@pytest.mark.parametrize("encrypted", [False, True])
async def test_surplus_answer_is_never_used(tmp_path: Path, encrypted: bool) -> None:
    """A surplus answer, received together with the previous one, is not used as the next one, with or without TLS."""
    theirs = ours = None
    if encrypted:
        make_certificates(tmp_path)
        theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        theirs.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
        ours = client_tls(ca=tmp_path / "ca.crt")
    asked = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Ends when the client disconnects, in any way.
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while await reader.readuntil(b"\r\n\r\n"):
                asked.append(1)
                # In one piece, so that it is a single TLS record.
                writer.write(FOUND + ABSENT if len(asked) == 1 else FOUND)

    async with served(serve, theirs=theirs, ours=ours) as wire:
        for number in (1, 2, 3):
            target = memoryview(bytearray(len(BODY)))
            answer = Answer([target])
            await wire.request([REQUEST], answer, timeout_s=20)
            assert (answer.status, answer.filled_bytes, len(asked)) == (200, len(BODY), number)
            assert target == BODY
        assert (wire.connections_opened, wire.connections_dirty) == (2, 1)


async def test_bytes_behind_an_answer_cost_the_connection() -> None:
    """A connection is not reused if the bytes of its last answer already include the start of another one."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(ABSENT + b"HTTP/1.1 200 OK\r\n")

    async with served(serve) as wire:
        for number in (1, 2):
            answer = Answer()
            await wire.request([REQUEST], answer, timeout_s=20)
            assert (answer.status, answer.surplus) == (404, True)
            assert (wire.connections_opened, wire.connections_dirty) == (number, number)
            assert " 0 idle" in repr(wire)


@pytest.mark.parametrize("status", [404, 200])
async def test_an_answer_before_the_body_was_sent_ends_the_connection(status: int) -> None:
    """An early refusal is accepted, an early success is not; the rest of the body is never sent from its slot."""
    read_on, counts = asyncio.Event(), list[int]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ABSENT if status == 404 else b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await read_on.wait()
        count = 0
        with contextlib.suppress(OSError):
            while piece := await reader.read(1 << 20):
                count += len(piece)
                assert not any(piece), "bytes of the next block"
        counts.append(count)

    async with served(serve) as wire:
        # More than the buffers of both sockets hold.
        slot = memoryview(bytearray(64 << 20))
        answer = Answer()
        if status == 404:
            await wire.request([REQUEST, slot], answer, timeout_s=20)
        else:
            with pytest.raises(S3Error, match="before"):
                await wire.request([REQUEST, slot], answer, timeout_s=20)
        assert answer.status == status
        assert " 0 idle" in repr(wire)
        slot[:] = b"\x01" * len(slot)
        read_on.set()
        await eventually_async(lambda: counts, 20)
        assert counts[0] < len(slot)


@pytest.mark.parametrize("bodiless", [False, True])
@pytest.mark.parametrize(("header", "kept"), [(b"", 1), (b"connection: close\r\n", 0)])
async def test_a_connection_that_the_service_is_about_to_close_is_not_kept(
    header: bytes, kept: int, bodiless: bool
) -> None:
    """An announced close may arrive while the next request is sent, and would fail it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n" + header + b"\r\n")
        with contextlib.suppress(OSError):
            await reader.read(1)

    async with served(serve) as wire:
        await wire.request([REQUEST], Answer(bodiless=bodiless), timeout_s=20)
        assert f" {kept} idle" in repr(wire)


async def test_a_close_while_connecting_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is connecting when the client closes sends nothing, and leaves no connection."""
    heard: list[bytes] = []
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            heard.append(await reader.read(1))
            writer.write(ABSENT)
            await reader.read(1)
        except ConnectionResetError:
            pass
        ended.set()

    connected, closed = asyncio.Event(), asyncio.Event()
    open_stream = wire_module.open_stream

    async def slow(endpoint: Endpoint, context: ssl.SSLContext | None) -> Stream:
        stream = await open_stream(endpoint, context)
        connected.set()
        await closed.wait()
        return stream

    monkeypatch.setattr(wire_module, "open_stream", slow)
    async with served(serve) as wire:
        request = asyncio.create_task(wire.request([REQUEST], Answer(bodiless=True), timeout_s=20))
        await connected.wait()
        wire.close()
        closed.set()
        with pytest.raises(S3Error) as caught:
            await request
        assert caught.value.cause is Cause.CLOSED
        async with asyncio.timeout(20):
            await ended.wait()
        assert heard in ([], [b""])
        assert "0 idle, 0 busy" in repr(wire)


async def test_nothing_comes_after_the_deadline() -> None:
    """An answer cut off by the deadline costs the connection, and its remaining bytes are not written."""
    half = FOUND[: len(FOUND) - len(BODY) // 2]
    go_on, ended = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(half)
        await go_on.wait()
        writer.write(FOUND[len(half) :])
        with contextlib.suppress(OSError):
            await reader.read()
        ended.set()

    async with served(serve) as wire:
        memory = bytearray(len(BODY))
        with memoryview(memory) as target, pytest.raises(S3Error) as caught:
            await wire.request([REQUEST], Answer([target]), timeout_s=1)
        assert caught.value.cause is Cause.TIMEOUT
        assert "0 idle, 0 busy" in repr(wire)
        # Raises if any view of the memory is left.
        memory += b"."
        go_on.set()
        async with asyncio.timeout(20):
            await ended.wait()
        assert not any(memory[len(BODY) // 2 : len(BODY)])


@pytest.mark.parametrize("is_whole", [False, True])
async def test_a_close_resets_only_an_unfinished_answer(is_whole: bool) -> None:
    """A service stops sending the rest of an answer; after a whole answer the connection ends in order."""
    ends: list[bytes | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(FOUND if is_whole else FOUND[:-1])
        try:
            ends.append(await reader.read())
        except ConnectionResetError:
            ends.append(None)

    async with served(serve) as wire:
        memory = bytearray(len(BODY))
        request = asyncio.create_task(wire.request([REQUEST], Answer([memoryview(memory)]), timeout_s=20))
        await eventually_async(lambda: memory[:-1] == BODY[:-1], 20, what="the answer")
        if is_whole:
            await request
        wire.close()
        await asyncio.wait({request})
        await eventually_async(lambda: ends, 20, what="the end of the connection")
        assert ends == [b"" if is_whole else None]
        assert isinstance(request.exception(), S3Error) is not is_whole


async def test_looking_again_disturbs_no_later_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recheck after a fragmented answer overlaps later answers on the connection, and affects none of them."""
    monkeypatch.setattr(duplex, "_RECHECK_S", 0.001)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while await reader.readuntil(b"\r\n\r\n"):
                for start in range(0, len(FOUND), 1500):
                    writer.write(FOUND[start : start + 1500])
                    await asyncio.sleep(0.0005)

    async with served(serve) as wire:
        for _ in range(200):
            target = memoryview(bytearray(len(BODY)))
            answer = Answer([target])
            await wire.request([REQUEST], answer, timeout_s=20)
            assert answer.filled_bytes == len(BODY)
            assert target == BODY
        assert (wire.connections_opened, wire.connections_dirty) == (1, 0)
