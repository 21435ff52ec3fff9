"""A man in the middle who knows nothing of the protocol changes the bytes of many connections at random."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Final

import pytest

from kvstore.backends.base import RecordGeometry, RecordRead
from kvstore.backends.peer import PeerBackend, PeerConfig
from kvstore.backends.peer.client import PeerError
from kvstore.codec.record import HEADER_BYTES
from kvstore.namespace import Namespace
from kvstore.primary import PrimaryTier
from kvstore.primary.lending import Lender
from kvstore.types import Outcome
from tests.peer.ports import free_port
from tests.sizes import sized

SLOT_BYTES: Final = 4096
NAMESPACE: Final = Namespace({"suite": "peer"})
KEYS: Final = [b"key-%d" % number for number in range(4)]
ATTEMPTS: Final = sized(200, full=5000, quick=100)
"""Attempts to load; each makes two connections or more."""
AT_ONCE: Final = 16
COMMON: Final = {"secret": "a secret of sixteen", "connect_timeout": 0.5, "timeout": 0.5}

Change = Callable[[bytes], bytes]


class Middle:
    """Passes on connections, and changes each in one way."""

    def __init__(self, rng: random.Random, target_port: int) -> None:
        self.rng = rng
        self.connections: Counter[str] = Counter()  # Connections by kind of change.
        self.port = free_port()
        self._target_port = target_port
        self._seen: deque[list[bytes]] = deque([[b"", b""]], 16)
        """What clients and servers have sent on earlier connections."""

    async def open(self) -> asyncio.Server:
        """Start to listen."""
        return await asyncio.start_server(self._pass_on, "127.0.0.1", self.port)

    async def _pass_on(self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter) -> None:
        kind = self.rng.choice(
            ["none", "cut", "flip", "drop", "insert", "repeat", "swap", "version", "replay", "reflect"]
        )
        self.connections[kind] += 1
        both: list[bytes] = [b"", b""]
        self._seen.append(both)
        server_in, server_out = await asyncio.open_connection("127.0.0.1", self._target_port)
        try:
            side = self.rng.randrange(2)
            if kind == "reflect":
                await self._pump((client_in, server_in)[side], (client_out, server_out)[side], both, side, bytes)
                return
            changes: list[Change] = [bytes, bytes]
            changes[side] = self._change(kind, side)
            await asyncio.wait(
                [
                    asyncio.ensure_future(self._pump(client_in, server_out, both, 0, changes[0])),
                    asyncio.ensure_future(self._pump(server_in, client_out, both, 1, changes[1])),
                ]
            )
        finally:
            client_out.close()
            server_out.close()

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, both: list[bytes], side: int, change: Change
    ) -> None:
        with suppress(OSError, EOFError):
            while data := await source.read(65536):
                both[side] += data
                target.write(change(data))
                await target.drain()
        target.close()

    def _change(self, kind: str, side: int) -> Change:
        """Return a change of one place in a stream, which is near its beginning or somewhere in the blocks."""
        rng = self.rng
        at, size = rng.randrange(rng.choice((200, 2000, 20_000))), rng.choice((1, 16, 40, 4400))
        earlier = rng.choice(self._seen)[rng.randrange(2)]
        kinds: dict[str, Change] = {
            "flip": lambda part: bytes([part[0] ^ 1 << rng.randrange(8)]) + part[1:],
            "drop": lambda part: part[size:],
            "insert": lambda part: rng.choice((earlier[at : at + size], rng.randbytes(size))) + part,
            "repeat": lambda part: part[:size] + part,
            "swap": lambda part: part[size : 2 * size] + part[:size] + part[2 * size :],
            "version": lambda part: bytes([rng.randrange(5)]) + part[1:],
            "none": lambda part: part,
        }
        if kind == "version":
            at = 8
        passed = 0

        def change(data: bytes) -> bytes:
            nonlocal passed
            start, passed = at - passed, passed + len(data)
            if kind == "replay":
                return earlier[passed - len(data) : passed]
            if kind == "cut" and passed > at:
                raise EOFError
            return data[:start] + kinds[kind](data[start:]) if 0 <= start < len(data) else data

        return change


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("listen", ["0.0.0.0", "127.0.0.1"])
async def test_bytes_of_a_man_in_the_middle_are_never_loaded(rng: random.Random, listen: str) -> None:
    """Each block is right or failed, never absent or damaged, and an engine with a known address sends none to a relay.

    An engine that listens on all addresses cannot distinguish a relay from translated addresses.
    """
    primary = PrimaryTier(memoryview(bytearray(8 * SLOT_BYTES)), SLOT_BYTES)
    right = {key: rng.randbytes(SLOT_BYTES) for key in KEYS}
    for key, slot in zip(KEYS, primary.allocate(KEYS) or (), strict=True):
        primary.row(slot)[:] = right[key]
    primary.commit(KEYS)
    port, outcomes = free_port(), Counter[str]()
    server = PeerBackend(PeerConfig(listen=f"{listen}:{port}", serve_connections=1024, **COMMON))
    server.set_lender(Lender(primary))
    await server.open(NAMESPACE, RecordGeometry(HEADER_BYTES, SLOT_BYTES))
    middle = Middle(rng, port)

    async def attempt() -> None:
        client = PeerBackend(PeerConfig(peers=(f"127.0.0.1:{middle.port}",), **COMMON))
        await client.open(NAMESPACE, RecordGeometry(HEADER_BYTES, SLOT_BYTES))
        async with AsyncExitStack() as stack:
            stack.push_async_callback(client.close)
            with suppress(PeerError):
                assert (await client.exists([b"absent", *KEYS]))[0] is not True
            reads = [RecordRead(key, [memoryview(bytearray(HEADER_BYTES + SLOT_BYTES))]) for key in KEYS]
            for read, outcome in zip(reads, await client.get_into(reads), strict=True):
                outcomes[outcome.name] += 1
                if outcome is Outcome.OK:
                    assert read.buffers[0][HEADER_BYTES:] == right[read.key]

    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.close)
        await stack.enter_async_context(await middle.open())
        for _ in range(0, ATTEMPTS, AT_ONCE):
            await asyncio.gather(*(attempt() for _ in range(AT_ONCE)))
        sent = server.stats().counters["served_blocks_sent"]
    assert outcomes.keys() <= {"OK", "IO_ERROR", "TIMEOUT"}, outcomes
    assert middle.connections.total() >= ATTEMPTS and len(middle.connections) == 10, middle.connections
    assert (outcomes["OK"] > 0) is (sent > 0) is (listen == "0.0.0.0")
    print(outcomes, middle.connections.total(), middle.connections)
