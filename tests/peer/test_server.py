"""The server with clients that send false data, stall, flood and leave: no row stays lent, and others are served."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from kvstore.backends.base import RecordGeometry
from kvstore.backends.peer import PeerBackend, PeerConfig, protocol
from kvstore.backends.peer.limits import LIMITS, Limits
from kvstore.backends.peer.protocol import Address, Agreement, FrameMac, Hello, Note, Op, Part, Welcome
from kvstore.codec.record import HEADER_BYTES, RecordCodec
from kvstore.errors import BackendUnavailableError
from kvstore.namespace import Namespace
from kvstore.primary import PrimaryTier
from kvstore.primary.lending import Lender
from kvstore.testing.waiting import eventually_async
from tests.peer.ports import free_port
from tests.peer.wire import hello_of

NAMESPACE = Namespace({"suite": "peer"})
SLOT_BYTES = 1 << 20
SECRET = "a secret of sixteen"


class Served:
    """A primary tier of eight blocks with a backend that serves it."""

    def __init__(self, limits: Limits = LIMITS, **more: Any) -> None:
        self.port = free_port()
        self.memory = bytearray(8 * SLOT_BYTES)
        self.primary = PrimaryTier(memoryview(self.memory), SLOT_BYTES)
        self.keys = [b"key-%d" % number for number in range(8)]
        for slot in self.primary.allocate(self.keys) or ():
            with self.primary.row(slot) as row:
                row[:] = bytes([65 + slot]) * SLOT_BYTES
        self.primary.commit(self.keys)
        self.lender = Lender(self.primary)
        quick = {"connect_timeout": "300ms", "timeout": "300ms", "secret": SECRET}
        self.backend = PeerBackend(PeerConfig(listen=f"127.0.0.1:{self.port}", **{**quick, **more}), limits)
        self.backend.set_lender(self.lender)

    @property
    def lent(self) -> int:
        """Return the number of lent rows."""
        return sum(self.primary.loans._lent.values())

    async def open(self) -> None:
        """Start serving."""
        await self.backend.open(NAMESPACE, RecordGeometry(HEADER_BYTES, SLOT_BYTES))


@asynccontextmanager
async def serving(**more: Any) -> AsyncIterator[Served]:
    """Serve; check at the end that no row is lent."""
    served = Served(**more)
    await served.open()
    try:
        yield served
    finally:
        await served.backend.close()
        assert served.lent == 0
        served.primary.close()


class Client:
    """A raw connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.sent, self.received = FrameMac(b""), FrameMac(b"")

    async def greet(
        self, secret: str = SECRET, namespace: Namespace = NAMESPACE, dialled: Address | None = None
    ) -> Welcome:
        """Greet as a client of this version does."""
        dialled = dialled or protocol.address_of(*self.writer.get_extra_info("peername")[:2])
        hello = protocol.pack_hello(Hello(os.urandom(32), namespace.digest, dialled))
        self.writer.write(hello)
        data = await self.reader.readexactly(protocol.WELCOME_BYTES)
        agreement = Agreement(secret.encode(), hello, data, b"")
        self.writer.write(agreement.client_proof)
        self.sent, self.received = agreement.questions(), agreement.answers()
        return protocol.read_welcome(data)

    def ask(self, op: Op, keys: list[bytes]) -> None:
        """Send a question."""
        self.write(protocol.pack_question(op, keys))

    def write(self, frame: bytes) -> None:
        """Send a frame."""
        self.sent.update(frame)
        self.writer.write(frame + self.sent.end())

    async def receive(self, count: int, *, to_the_end: bool = True) -> bytes:
        """Receive some bytes of a frame; check it after the last ones."""
        data = await self.reader.readexactly(count)
        self.received.update(data)
        if to_the_end:
            assert await self.reader.readexactly(self.received.tag_bytes) == self.received.end()
        return data

    async def receive_part(self) -> bytes | int:
        """Receive a part of the answer to a load: a record, or the number of absent blocks."""
        part, number = protocol.read_part(await self.receive(protocol.PART_BYTES, to_the_end=False))
        data = await self.receive(number if part is Part.RECORD else 0)
        return data if part is Part.RECORD else number

    async def load(self, key: bytes, namespace: Namespace = NAMESPACE) -> bytes | None:
        """Load one block and verify it; None if it is absent."""
        self.ask(Op.LOAD, [key])
        answer = await self.receive_part()
        if isinstance(answer, int):
            return None
        view = memoryview(bytearray(answer))
        codec = RecordCodec(namespace, header_bytes=HEADER_BYTES)
        codec.verify(key, view[:HEADER_BYTES], view[HEADER_BYTES:], len(answer))
        return answer[HEADER_BYTES:]

    async def lookup(self, keys: list[bytes]) -> bytes:
        """Ask the server which blocks it holds."""
        self.ask(Op.LOOKUP, keys)
        return await self.receive(len(keys))

    async def is_closed(self) -> bool:
        """Wait for the end of the connection; False if data arrives instead."""
        with suppress(ConnectionError):
            async with asyncio.timeout(20):
                return await self.reader.read(1) == b""
        return True


@asynccontextmanager
async def client_of(served: Served) -> AsyncIterator[Client]:
    """Connect to the server."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1 << 16)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def test_blocks_are_served() -> None:
    """A client with the secret can look up and load blocks."""
    async with serving() as served, client_of(served) as client:
        await client.greet()
        assert await client.lookup([served.keys[0], b"unknown", served.keys[7]]) == b"\1\0\1"
        assert await client.load(served.keys[3]) == b"D" * SLOT_BYTES
        assert await client.load(b"unknown") is None
        stats = served.backend.stats()
        assert stats.counters["served_blocks_sent"] == 1
        assert stats.counters["served_blocks_absent"] == 1
        assert stats.counters["served_keys_looked_up"] == 3


async def test_a_wrong_secret_gets_nothing() -> None:
    """A client with another secret, or none, gets no answer and counts as refused."""
    async with serving() as served:
        for secret in ("another secret of", ""):
            async with client_of(served) as client:
                await client.greet(secret)
                client.ask(Op.LOAD, served.keys[:1])
                assert await client.is_closed()
        assert served.backend.stats().counters["served_connections_refused"] == 2
        assert served.backend.stats().counters["served_blocks_sent"] == 0


async def test_a_proof_can_not_be_sent_back() -> None:
    """Neither the server's own proof nor an earlier client's proof is accepted."""
    async with serving() as served:
        hello = hello_of(NAMESPACE.digest, served.port)
        heard = b""
        for is_echo in (True, False):
            async with client_of(served) as client:
                client.writer.write(hello)
                data = await client.reader.readexactly(protocol.WELCOME_BYTES)
                client.writer.write(protocol.read_welcome(data).proof if is_echo else heard)
                heard = Agreement(SECRET.encode(), hello, data, b"").client_proof
                client.ask(Op.LOOKUP, served.keys)
                assert await client.is_closed()


async def test_another_namespace_gets_nothing() -> None:
    """For a client of another namespace, every block is absent."""
    async with serving() as served, client_of(served) as client:
        await client.greet(namespace=Namespace({"suite": "other"}))
        assert await client.lookup(served.keys) == bytes(8)
        assert await client.load(served.keys[0]) is None


async def test_hand_over_is_hidden_from_other_namespaces() -> None:
    """For a client of another namespace, no hand-over is waiting, because its blocks would never come."""
    async with serving() as served, client_of(served) as ours, client_of(served) as other:
        served.primary.hand_overs.begin("request", b"name")
        await ours.greet()
        ours.ask(Op.HAND_OVERS, [b"name"])
        assert await ours.receive(1) == b"\2"
        await other.greet(namespace=Namespace({"suite": "other"}))
        other.ask(Op.HAND_OVERS, [b"name"])
        assert await other.receive(1) == b"\0"


async def test_a_client_that_dialled_another_address_is_refused() -> None:
    """The welcome says so, and no question is answered."""
    elsewhere = protocol.address_of("127.0.0.9", 5710)
    async with serving() as served, client_of(served) as client:
        welcome = await client.greet(dialled=elsewhere)
        assert welcome.notes == Note.MISDIRECTED
        client.ask(Op.LOOKUP, served.keys)
        assert await client.is_closed()


@pytest.mark.parametrize("version", [1, 2, 4])
async def test_client_of_another_version_receives_the_servers_version(version: int) -> None:
    """A client of an earlier or later version receives our version before the connection ends."""
    async with serving() as served, client_of(served) as client:
        hello = bytearray(hello_of(NAMESPACE.digest, served.port))
        hello[8] = version
        client.writer.write(bytes(hello[:80]))
        assert (await client.reader.readexactly(80))[8:10] == b"\3\0"
        assert await client.is_closed()


@pytest.mark.parametrize(
    "data",
    [
        protocol.pack_question(Op.LOAD, [b"k"])[:3],
        b"\7" + bytes(7),
        protocol.QUESTION.pack(Op.LOAD, 0, 4096, 4096 * 65),
        protocol.QUESTION.pack(Op.LOAD, 0, 65535, 2**32 - 1),
        protocol.QUESTION.pack(Op.LOAD, 0, 2, 4) + b"\0\0\0\0",
        protocol.pack_question(Op.LOOKUP, [b"k"]) * 2,
    ],
    ids=["half a question", "unknown", "no body", "huge", "broken keys", "two at once"],
)
async def test_random_bytes_do_not_disturb_other_clients(data: bytes) -> None:
    """For any bytes in place of a request, the server answers or closes the connection, and serves other clients."""
    async with serving(serve_connections=4) as served:
        async with client_of(served) as client:
            await client.greet()
            client.write(data)
            client.writer.write_eof()
            with suppress(ConnectionError):
                async with asyncio.timeout(20):
                    await client.reader.read()
        async with client_of(served) as client:
            await client.greet()
            assert await client.load(served.keys[0]) == b"A" * SLOT_BYTES


async def test_questions_may_come_before_the_answers() -> None:
    """Pipelined requests are answered in order."""
    async with serving(timeout=20) as served, client_of(served) as client:
        await client.greet()
        for number in range(8):
            client.ask(Op.LOAD, [served.keys[number]] * 8)
        for number in range(8):
            for _ in range(8):
                record = await client.receive_part()
                assert isinstance(record, bytes) and record[HEADER_BYTES:] == bytes([65 + number]) * SLOT_BYTES


async def test_a_silent_client_is_not_kept() -> None:
    """A client that connects and sends nothing is disconnected, and takes no place from others."""
    async with serving(serve_connections=2) as served, client_of(served) as silent, client_of(served) as other:
        assert await silent.is_closed()
        assert await other.is_closed()
        async with client_of(served) as client:
            await client.greet()
            assert await client.lookup(served.keys) == b"\1" * 8


async def test_a_question_without_its_keys_ends_in_time() -> None:
    """A client that announces keys and sends none has a shorter timeout than an idle one."""
    async with serving() as served, client_of(served) as client:
        await client.greet()
        assert await client.lookup(served.keys) == b"\1" * 8
        client.writer.write(protocol.pack_question(Op.LOAD, served.keys)[: protocol.QUESTION_BYTES + 3])
        assert await client.is_closed()


async def test_unauthenticated_connections_are_bounded() -> None:
    """Of more unauthenticated connections than allowed the oldest is closed, and one that greets is served."""
    async with (
        serving(limits=Limits(greetings_max=2), connect_timeout=20) as served,
        client_of(served) as silent,
        client_of(served) as member,
    ):
        await member.greet()
        assert await member.lookup(served.keys) == b"\1" * 8
        async with client_of(served), client_of(served) as last:
            assert await silent.is_closed()
            assert served.backend.stats().counters["served_connections_refused"] == 1
            await last.greet()
            assert await last.lookup(served.keys) == b"\1" * 8
            assert await member.lookup(served.keys) == b"\1" * 8


async def test_connections_are_bounded() -> None:
    """A connection above the limit is closed at once, and counted, also after one that ended before its greeting."""
    async with serving(serve_connections=1, connect_timeout=60) as served:
        async with client_of(served) as stranger:
            stranger.writer.write_eof()
            assert await stranger.is_closed()
        await _until(lambda: served.backend.stats().gauges["served_connections"] == 0)
        async with client_of(served) as first:
            await first.greet()
            assert await first.lookup(served.keys) == b"\1" * 8
            async with client_of(served) as second:
                assert await second.is_closed()
            assert served.backend.stats().counters["served_connections_refused"] == 1
            assert await first.lookup(served.keys) == b"\1" * 8


@pytest.mark.parametrize("pause_s", [0.0, 3600.0])
async def test_a_server_that_can_not_accept_pauses(monkeypatch: pytest.MonkeyPatch, pause_s: float) -> None:
    """Without a free descriptor it tries once per pause, and serves the client that waited as soon as it can."""
    accept, tries = socket.socket.accept, 0

    def failing_thrice(listener: socket.socket) -> Any:
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing_thrice)
    async with serving(limits=Limits(accept_pause_s=pause_s)) as served, client_of(served) as client:
        if pause_s:
            await _until(lambda: tries)
            for _ in range(50):
                await asyncio.sleep(0)
            assert tries == 1
        else:
            await client.greet()
            assert await client.lookup(served.keys) == b"\1" * 8 and tries == 4


async def test_a_client_that_does_not_read_holds_one_row_for_a_while() -> None:
    """A client that requests every block and reads nothing holds one row, and none after the timeout."""
    async with serving() as served, client_of(served) as client:
        await client.greet()
        client.ask(Op.LOAD, served.keys * 8)
        await _until(lambda: served.lent == 1)
        while served.lent:
            assert served.lent == 1
            await asyncio.sleep(0.01)
        assert served.backend.stats().gauges["served_loads"] == 0
        async with client_of(served) as other:
            await other.greet()
            assert await other.load(served.keys[1]) == b"B" * SLOT_BYTES


async def test_rows_lent_are_a_share_of_the_tier() -> None:
    """With more non-reading clients than lendable rows, the others wait, and lent rows stay within the share."""
    async with serving(timeout=2) as served:
        async with client_of(served) as one, client_of(served) as two, client_of(served) as three:
            for client in (one, two, three):
                await client.greet()
                client.ask(Op.LOAD, served.keys * 8)
            await _until(lambda: served.lent == 2)
            for _ in range(20):
                await asyncio.sleep(0)
                assert served.lent <= 2
        await _until(lambda: served.lent == 0)


async def test_a_block_that_is_evicted_while_it_is_sent() -> None:
    """The row of a block evicted while being sent stays unchanged to the end, and its slot is free afterwards."""
    async with serving(timeout=20) as served, client_of(served) as client:
        await client.greet()
        client.ask(Op.LOAD, [served.keys[0]] * 64)
        await _until(lambda: served.lent == 1)
        assert served.primary.remove(served.keys[0])
        assert served.primary.stats().abandoned == 1
        new = [b"new"]
        assert served.primary.allocate(new) is not None
        left = 64
        while isinstance(answer := await client.receive_part(), bytes):
            left -= 1
            record = memoryview(bytearray(answer))
            codec = RecordCodec(NAMESPACE, header_bytes=HEADER_BYTES)
            codec.verify(served.keys[0], record[:HEADER_BYTES], record[HEADER_BYTES:], len(answer))
        assert answer == left
        await _until(lambda: served.lent == 0)
        for slot in served.primary.loans.take_ended():
            served.primary.reclaim(slot)
        assert served.primary.stats().abandoned == 0


async def test_a_closed_lender_has_nothing() -> None:
    """While the namespace of the rows changes, none of them is served."""
    async with serving() as served, client_of(served) as client:
        await client.greet()
        served.lender.is_open = False
        assert await client.lookup(served.keys) == bytes(8)
        assert await client.load(served.keys[0]) is None


async def test_a_port_that_is_taken() -> None:
    """A port in use by another process is named in the error."""
    async with serving() as served:
        other = Served()
        other.backend = PeerBackend(PeerConfig(listen=f"127.0.0.1:{served.port}"))
        other.backend.set_lender(other.lender)
        with pytest.raises(BackendUnavailableError, match=f"can't listen on 127.0.0.1:{served.port}"):
            await other.open()
        await other.backend.close()


async def _until(predicate: Any) -> None:
    await eventually_async(lambda: predicate(), 20)
