"""Scripted servers: false answers, silence, and network faults in front of a real server."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Reply = bytes
Script = Callable[[list[bytes], asyncio.StreamWriter], Awaitable[None]]

HELLO = b"*6\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$5\r\n7.0.0\r\n$4\r\nmode\r\n$10\r\nstandalone\r\n"


@dataclass
class FakeServer:
    """Observations of a fake server."""

    port: int = 0
    tls_ca: None = None
    hello: bytes = HELLO
    commands: list[list[bytes]] = field(default_factory=list)
    connections: int = 0
    open_connections: int = 0
    busy_connections: int = 0
    """Number of connections that sent a command to the script."""
    on_hello: Callable[[asyncio.StreamWriter], None] = lambda writer: None
    """Called when HELLO has been answered."""

    @property
    def url(self) -> str:
        """Return the address it listens on."""
        return f"redis://127.0.0.1:{self.port}"


@asynccontextmanager
async def fake_server(
    script: Script, hello: bytes = HELLO, info: bytes | None = b"-NOPERM no\r\n"
) -> AsyncIterator[FakeServer]:
    """Run a server that answers HELLO, and INFO if there is an answer; the script handles all other commands."""
    state = FakeServer(hello=hello)
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        state.connections += 1
        state.open_connections += 1
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        is_busy = False
        # The task is cancelled at the end of the test, which asyncio's streams would report as an error.
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                command = await read_command(reader)
                if command[0] == b"HELLO":
                    writer.write(state.hello)
                    state.on_hello(writer)
                elif command[0] == b"INFO" and info is not None:
                    writer.write(info)
                else:
                    state.commands.append(command)
                    state.busy_connections += not is_busy
                    is_busy = True
                    await script(command, writer)
        state.open_connections -= 1
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    state.port = server.sockets[0].getsockname()[1]
    try:
        yield state
    finally:
        await end_server(server, tasks, writers)


async def end_server(
    server: asyncio.Server, tasks: set[asyncio.Task[None]], writers: list[asyncio.StreamWriter]
) -> None:
    """Stop a server and close all its connections, including those just accepted."""
    server.close()
    # A connection has its task four turns of the loop after accept(); no more are accepted.
    for _ in range(10):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    # A task cancelled before it began has not closed its writer.
    for writer in writers:
        writer.transport.abort()
    await asyncio.sleep(0)


async def read_command(reader: asyncio.StreamReader) -> list[bytes]:
    """Read a command."""
    count = int((await reader.readuntil(b"\r\n"))[1:])
    parts = []
    for _ in range(count):
        length = int((await reader.readuntil(b"\r\n"))[1:])
        parts.append((await reader.readexactly(length + 2))[:-2])
    return parts


def answering(data: bytes) -> Script:
    """Return a script that gives the same answer to every command."""

    async def script(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return script


def reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with a RST."""
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@dataclass
class Weather:
    """Faults that a proxy injects: probabilities per piece of data."""

    rng: random.Random
    cut: float = 0.0
    reset: float = 0.0
    flip: float = 0.0
    stall: float = 0.0
    delay_s: float = 0.0
    injected: int = 0


@asynccontextmanager
async def stormy(port: int, weather: Weather) -> AsyncIterator[str]:
    """Run a proxy in front of a real server; yield its URL."""
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, other: asyncio.StreamWriter) -> None:
        rng = weather.rng
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while data := await reader.read(16384):
                if weather.delay_s:
                    await asyncio.sleep(rng.random() * weather.delay_s)
                fate = rng.random()
                if fate < weather.cut:
                    weather.injected += 1
                    writer.write(data[: rng.randrange(len(data))])
                    break
                fate -= weather.cut
                if fate < weather.reset:
                    weather.injected += 1
                    reset(writer)
                    break
                fate -= weather.reset
                if fate < weather.flip:
                    weather.injected += 1
                    damaged = bytearray(data)
                    damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                    data = bytes(damaged)
                elif fate - weather.flip < weather.stall:
                    weather.injected += 1
                    await asyncio.Event().wait()
                writer.write(data)
                await writer.drain()
        writer.close()
        other.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        writers.append(writer)
        try:
            upstream, downstream = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        writers.append(downstream)
        for one in (
            asyncio.create_task(pump(reader, downstream, writer)),
            asyncio.create_task(pump(upstream, writer, downstream)),
        ):
            tasks.add(one)

    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        await end_server(server, tasks, writers)
