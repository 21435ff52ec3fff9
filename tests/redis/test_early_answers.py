"""A server that answers before it has the value: no byte of a buffer is sent after the call has returned."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvstore.backends.base import RecordWrite
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome
from tests.redis.clients import connections_of, opened, topology_of
from tests.redis.fake_server import HELLO, FakeServer, end_server

SIZE = 3 << 20


@dataclass
class Hasty(FakeServer):
    """Observations of a server that answers early."""

    path: str = ""
    received: bytearray = field(default_factory=bytearray)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    dropped: int = 0

    @property
    def url(self) -> str:
        return f"unix://{self.path}"


@asynccontextmanager
async def hasty_server(path: Path, answer: bytes) -> AsyncIterator[Hasty]:
    """Run a server that answers a SET as soon as it has the value's length, and reads on much later."""
    state = Hasty(path=str(path))
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        writers.append(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                parts: list[bytes] = []
                for _ in range(int((await reader.readuntil(b"\r\n"))[1:])):
                    length = int((await reader.readuntil(b"\r\n"))[1:])
                    if length > SIZE:
                        writer.write(answer)
                        await state.go_on.wait()
                        await receive(reader)
                    parts.append((await reader.readexactly(length + 2))[:-2])
                writer.write(HELLO if parts[0] == b"HELLO" else b"-NOPERM no\r\n")
        # Not earlier: the test examines the client's handling of its own end.
        writer.transport.abort()

    async def receive(reader: asyncio.StreamReader) -> None:
        try:
            while data := await reader.read(1 << 20):
                state.received += data
        finally:
            state.dropped += 1
        raise asyncio.IncompleteReadError(b"", None)

    # Small buffers on both sides, so that most of a value stays with the client.
    server = await asyncio.start_unix_server(serve, str(path), limit=65536)
    try:
        yield state
    finally:
        await end_server(server, tasks, writers)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (b"+OK\r\n", Outcome.IO_ERROR),
        (b"+OK\r\n+OK\r\n", Outcome.IO_ERROR),
        (b"$-1\r\n", Outcome.IO_ERROR),
        (b"-ERR value too large\r\n", Outcome.IO_ERROR),
        (b"-OOM command not allowed\r\n", Outcome.NO_SPACE),
    ],
)
async def test_nothing_is_sent_after_the_answer(tmp_path: Path, answer: bytes, outcome: Outcome) -> None:
    """A store that is answered early has failed, and later content of its slot is never sent."""
    failures = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failures.append(context))
    async with hasty_server(tmp_path / "s", answer) as server:
        backend = await opened(server, SIZE, connections=1)
        slot, header = bytearray(b"A" * SIZE), memoryview(bytes(256))
        payload = memoryview(slot)
        assert list(await backend.put([RecordWrite(b"k" * 32, [header, payload])])) == [outcome]
        slot[:] = b"B" * SIZE
        # As the tier does, so that any remaining view is detected.
        payload.release()
        server.go_on.set()
        await eventually_async(lambda: server.dropped, what="the connection dropped")
        assert server.received.count(b"B") == 0, "a part of the next block was sent"
        assert server.received.count(b"A") < SIZE, "the server had read all of it"
        await backend.close()
    assert not failures, "a callback of the loop raised"


async def test_a_buffer_that_is_released_too_early_ends_the_connection(tmp_path: Path) -> None:
    """A caller that releases a buffer during its call fails itself; the loop sees no exception."""
    failures = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failures.append(context))
    async with hasty_server(tmp_path / "s", b"") as server:
        backend = await opened(server, SIZE, connections=1)
        header, payloads = memoryview(bytes(256)), [memoryview(bytearray(SIZE)) for _ in range(2)]
        put = asyncio.ensure_future(
            backend.put([RecordWrite(bytes([i]) * 32, [header, payload]) for i, payload in enumerate(payloads)])
        )
        (node,) = topology_of(backend).nodes
        await eventually_async(lambda: connections_of(node)[0]._writing, what="the first value stuck in the socket")
        payloads[1].release()
        server.go_on.set()
        await asyncio.wait([put])
        put.exception()
        await backend.close()
    assert not failures, "a callback of the loop raised"
