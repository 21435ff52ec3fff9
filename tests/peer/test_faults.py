"""Peers that send false data, stall, trickle, disconnect and die: no wrong bytes, no hang, others keep working."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvstore.backends.base import RecordGeometry, RecordRead
from kvstore.backends.peer import PeerBackend, PeerConfig, protocol
from kvstore.backends.peer.client import Peer
from kvstore.backends.peer.config import endpoint_of
from kvstore.backends.peer.limits import LIMITS, Limits
from kvstore.backends.peer.protocol import Note, Op, Welcome
from kvstore.backends.stream import Endpoint
from kvstore.codec.record import HEADER_BYTES
from kvstore.errors import BackendError
from kvstore.namespace import Namespace
from kvstore.testing.tier_rig import TierRig
from kvstore.testing.waiting import eventually_async
from kvstore.types import Found, LookupResult, Outcome, RequestContext, Source
from tests.peer.fake_peer import Answer, FakePeer, honest, honest_when_released, on_load, part
from tests.peer.faults import BREAKS, LIES, endless, stall_in_the_middle
from tests.peer.ports import free_port
from tests.peer.serving import FIELDS, SLOT_BYTES, SLOTS, Serving, key_of
from tests.peer.wire import Wire, receive

NAMESPACE = Namespace(FIELDS)
PATIENT: dict[str, Any] = {"lookup_timeout": 20, "connect_timeout": 20}
QUICK = {"lookup_timeout": "1s", "load_timeout": 2, "timeout": "500ms", "connect_timeout": "500ms"}


def rig_of(*addresses: str, slot_bytes: int = 4096, **more: Any) -> TierRig:
    """Return a rig over a tier with peers and short deadlines."""
    config = {"backend": "peer", "peers": list(addresses), "negative_ttl": "1ms", **QUICK, **more}
    return TierRig(config, namespace=NAMESPACE, slot_bytes=slot_bytes, slots=64)


async def opened(*peers: FakePeer, limits: Limits = LIMITS, **more: Any) -> PeerBackend:
    """Open a backend with peers."""
    backend = PeerBackend(PeerConfig(peers=tuple(peer.address for peer in peers), **more), limits)
    await backend.open(NAMESPACE, RecordGeometry(HEADER_BYTES, 4096))
    return backend


def peers_of(backend: PeerBackend) -> dict[Endpoint, Peer]:
    """Return the peers of a backend's configuration."""
    return backend._listed


def all_found(rig: TierRig, keys: list[bytes]) -> None:
    """Wait until all keys are hits: on a busy machine, a first lookup may exceed its short limit."""
    rig.until(lambda: all(rig.lookup(key) is LookupResult.HIT for key in keys), "the blocks of the peer")


@pytest.mark.parametrize("answer", LIES.values(), ids=LIES.keys())
def test_damaged_or_foreign_records_are_not_loaded(fake: FakePeer, answer: Answer) -> None:
    """A record that is damaged or not the requested one is CORRUPT, and its peer is not contacted for a while."""
    fake.answer = answer
    with rig_of(fake.address) as rig:
        keys = [b"key-%d" % number for number in range(6)]
        assert rig.lookup(keys[0]) is LookupResult.HIT
        loaded = rig.load(keys)
        assert list(loaded.outcomes) == [Outcome.CORRUPT] * 6
        fake.answer = honest
        asked = len(fake.questions)
        assert rig.lookup(b"another key") is LookupResult.MISS
        assert len(fake.questions) == asked
        assert rig.untouched(range(6, 64))


def test_a_verified_block_restores_trust(fake: FakePeer) -> None:
    """A peer that sent a damaged record no longer counts as paused once a block of it has been verified."""

    def damaged(peer: FakePeer, sock: Wire, keys: list[bytes]) -> None:
        for key in keys:
            record = bytearray(peer.record(key))
            record[-1] ^= 1
            sock.sendall(part(bytes(record)))

    with rig_of(fake.address, backend="tests.peer.limited:Forgiving") as rig:
        for number, answer in enumerate((on_load(damaged), honest)):
            fake.answer, key = answer, b"key-%d" % number
            rig.until(lambda key=key: rig.tier.lookup(key) is LookupResult.HIT, "the block")
            assert rig.load([key]).success == (answer is honest)
            rig.until(lambda number=number: rig.tier.stats().backend_gauges["peers_down"] == 1 - number, "its state")


@pytest.mark.parametrize("damages", [True, False])
async def test_the_verdict_is_about_the_peer_that_sent_the_block(fake: FakePeer, damages: bool) -> None:
    """A lookup during the load finds the block at another peer, which neither loses nor gains trust by the load."""
    begun, goes_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def late(peer: FakePeer, sock: Wire, keys: list[bytes]) -> None:
        loop.call_soon_threadsafe(begun.set)
        assert goes_on.wait(60)
        honest(peer, sock, Op.LOAD, keys)

    config: dict[str, Any] = {"timeout": "60s", "lookup_timeout": "60s"}
    limits = Limits(distrust_s=3600.0 if damages else 0.0)
    with FakePeer(NAMESPACE) as other:
        backend = await opened(fake, other, limits=limits, **config)
        sender = peers_of(backend)[endpoint_of(fake.address)]
        fake.answer, other.answer = on_load(late), lambda peer, sock, op, keys: sock.sendall(bytes(len(keys)))
        if not damages:
            sender.note_damaged()
        try:
            assert await backend.exists([b"key"]) == [True]
            read = RecordRead(b"key", [memoryview(bytearray(HEADER_BYTES + 4096))])
            load = asyncio.create_task(backend.get_into([read]))
            await begun.wait()
            other.answer = honest
            assert await backend.exists([b"key"]) == [True]
            goes_on.set()
            assert await load == [Outcome.OK]
            backend.note_read([] if damages else [b"key"], [b"key"] if damages else [])
            assert sender.down is damages
            assert backend.stats().gauges["peers_down"] == damages
        finally:
            goes_on.set()
            await backend.close()


async def test_the_verdict_is_about_the_last_sender(fake: FakePeer) -> None:
    """A peer whose block was never verified is not blamed for the same block of another peer."""

    def nothing(peer: FakePeer, sock: Wire, op: Op, keys: list[bytes]) -> None:
        sock.sendall(bytes(len(keys)))

    with FakePeer(NAMESPACE) as other:
        backend = await opened(fake, other, limits=Limits(distrust_s=3600.0), timeout="60s", lookup_timeout="60s")
        try:
            for sender, silent in ((fake, other), (other, fake)):
                sender.answer, silent.answer = honest, nothing
                assert await backend.exists([b"key"]) == [True]
                read = RecordRead(b"key", [memoryview(bytearray(HEADER_BYTES + 4096))])
                assert list(await backend.get_into([read])) == [Outcome.OK]
            backend.note_read([], [b"key"])
            downs = [peers_of(backend)[endpoint_of(peer.address)].down for peer in (fake, other)]
            assert downs == [False, True]
        finally:
            await backend.close()


async def test_a_record_longer_than_a_block_ends_the_connection(fake: FakePeer) -> None:
    """A length that nothing has authenticated yet proves no damage; the rest of the answer is not received."""

    def longer(peer: FakePeer, sock: Wire, keys: list[bytes]) -> None:
        for key in keys:
            sock.sendall(part(peer.record(key) + b"x"))

    fake.answer = on_load(longer)
    backend = await opened(fake)
    read = RecordRead(b"key", [memoryview(bytearray(HEADER_BYTES + 4096))])
    assert await backend.exists([read.key]) == [True]
    assert await backend.get_into([read]) == [Outcome.IO_ERROR]
    await backend.close()


async def test_a_block_that_fails_costs_itself_alone(fake: FakePeer) -> None:
    """If a peer breaks off before one block, the blocks before it are loaded in the same call, which doesn't raise."""

    def breaks_off(peer: FakePeer, sock: Wire, keys: list[bytes]) -> None:
        for key in keys:
            if key == b"bad":
                raise EOFError
            sock.sendall(part(peer.record(key)))

    fake.answer = on_load(breaks_off)
    backend = await opened(fake)
    reads = [RecordRead(key, [memoryview(bytearray(HEADER_BYTES + 4096))]) for key in (b"good", b"better", b"bad")]
    assert await backend.exists([read.key for read in reads]) == [True] * 3
    assert await backend.get_into(reads) == [Outcome.OK, Outcome.OK, Outcome.IO_ERROR]
    assert [read.buffers[0][HEADER_BYTES:] for read in reads[:2]] == [fake.payload(read.key) for read in reads[:2]]
    # Before its second attempt, the block is asked for once.
    assert [count for op, count in fake.questions if op is Op.LOOKUP] == [3, 1]
    await backend.close()


async def test_a_block_that_a_silent_peer_may_have_is_not_absent(fake: FakePeer) -> None:
    """If one peer lacks a block and another does not answer, the state of the block is unknown."""
    fake.answer = lambda peer, sock, op, keys: sock.sendall(bytes(len(keys)))
    backend = PeerBackend(PeerConfig(peers=(fake.address, f"127.0.0.1:{free_port()}")))
    await backend.open(NAMESPACE, RecordGeometry(HEADER_BYTES, 4096))
    assert await backend.exists([b"key"]) == [None]
    await backend.close()


@pytest.mark.parametrize("answer", BREAKS.values(), ids=BREAKS.keys())
def test_disconnected_or_hung_load_fails_by_its_deadline(fake: FakePeer, answer: Answer) -> None:
    """A load from a peer that disconnects or hangs fails by its deadline, and its slots are not written afterwards."""
    with rig_of(fake.address) as rig:
        keys = [b"key-%d" % number for number in range(6)]
        assert [rig.lookup(key) for key in keys] == [LookupResult.HIT] * 6
        fake.answer = answer
        loaded = rig.load(keys)
        # A broken connection does not disqualify a peer.
        assert not any(outcome.ok or outcome is Outcome.CORRUPT for outcome in loaded.outcomes)
        for slot in range(6):
            rig.fill(slot)
        fake.released.set()
        assert rig.tier.drain(rig.timeout_s)
        assert rig.untouched(range(64))


@pytest.mark.parametrize("byte", [b"\3", b"\x07", b"\xff"])
def test_an_unknown_answer_to_a_lookup_is_a_failure(fake: FakePeer, byte: bytes) -> None:
    """An undefined byte is neither a hit nor a miss: the peer counts as failing."""
    fake.answer = lambda peer, sock, op, keys: sock.sendall(byte * len(keys))
    with rig_of(fake.address) as rig:
        assert rig.lookup(b"key") is LookupResult.MISS
        assert "other bytes than 0, 1, 2" in rig.tier.stats().last_error


def test_peer_with_stalled_loads_is_avoided(fake: FakePeer) -> None:
    """If lookups are answered and loads are not, two loads are lost, not one per request; later the peer is reused."""
    fake.answer = on_load(stall_in_the_middle)

    def loads() -> int:
        return sum(op is Op.LOAD for op, _ in fake.questions)

    with rig_of(fake.address, breaker_cooldown=60, breaker_cooldown_max=60) as rig:
        for number in range(8):
            ctx = RequestContext(f"request-{number}")
            if rig.lookup(b"key-%d" % number, ctx) is LookupResult.HIT:
                assert not rig.load([b"key-%d" % number], ctx).success
        assert loads() == 2
    with rig_of(fake.address, breaker_cooldown="20ms", breaker_cooldown_max="20ms") as rig:
        for number in range(2):
            assert not rig.load([b"key-%d" % number]).success
        fake.answer = honest
        fake.released.set()
        rig.until(lambda: rig.lookup(b"another") is LookupResult.HIT, "the peer to be asked again")
        assert rig.load([b"another"]).success


def test_more_than_was_asked_for_closes_the_connection(fake: FakePeer) -> None:
    """Surplus bytes after an answer are never used as the next answer."""
    fake.answer = on_load(endless)
    with rig_of(fake.address) as rig:
        for start in range(0, 30, 3):
            keys = [b"key-%d" % number for number in range(start, start + 3)]
            loaded = rig.load(keys)  # The rig compares every byte that is reported as loaded.
            assert loaded.success or not any(outcome is Outcome.CORRUPT for outcome in loaded.outcomes)


@asynccontextmanager
async def connected(fake: FakePeer, limits: Limits = LIMITS) -> AsyncIterator[PeerBackend]:
    """Open a patient backend with one peer, and close it."""
    backend = await opened(fake, limits=limits, **PATIENT)
    try:
        yield backend
    finally:
        await backend.close()


async def test_unsolicited_bytes_close_an_idle_connection(fake: FakePeer) -> None:
    """Bytes after the answer to a lookup are not the answer to the next one: the connection is not reused."""

    def more(peer: FakePeer, sock: Wire, op: Op, keys: list[bytes]) -> None:
        sock.sendall(b"\1" * len(keys) + b"\0" * 100)

    fake.answer = more
    async with connected(fake) as backend:
        for number in range(3):
            assert await backend.exists([b"key-%d" % number]) == [True]
            await eventually_async(lambda: not fake.connections, 20)


async def test_concurrent_lookups_of_a_peer_are_bounded(fake: FakePeer) -> None:
    """Eight are sent, over a connection each; the others wait for an answer."""
    fake.answer = honest_when_released
    async with connected(fake) as backend:
        lookups = [asyncio.create_task(backend.exists([b"key-%d" % number])) for number in range(12)]
        await eventually_async(lambda: len(fake.questions) >= 8, 20)
        await asyncio.sleep(0.1)
        assert len(fake.questions) == 8
        fake.released.set()
        assert await asyncio.gather(*lookups) == [[True]] * 12


async def test_a_connection_closed_while_idle_is_forgotten(fake: FakePeer) -> None:
    """The next call takes another one, and nothing is left of the closed one."""
    fake.answer = honest_when_released
    async with connected(fake) as backend:
        lookups = [asyncio.create_task(backend.exists([key])) for key in (b"a", b"b")]
        await eventually_async(lambda: len(fake.questions) == 2, 20)
        fake.released.set()
        assert await asyncio.gather(*lookups) == [[True]] * 2
        (peer,) = peers_of(backend).values()
        assert "2 of 2 connections idle" in repr(peer)
        peer._idle[-1][0].close()
        assert await backend.exists([b"c"]) == [True]
        assert "1 of 1 connections idle" in repr(peer)


@pytest.mark.parametrize(("idle_s", "opened_count"), [(3600.0, 1), (-1.0, 3)], ids=["not long", "long"])
async def test_a_connection_is_used_again_unless_it_was_idle_for_long(
    fake: FakePeer, idle_s: float, opened_count: int
) -> None:
    """Calls one after the other share a connection; one that was idle for too long is closed and replaced."""
    async with connected(fake, Limits(idle_s=idle_s)) as backend:
        for _ in range(3):
            assert await backend.exists([b"key"]) == [True]
        assert backend.stats().counters["connections_opened"] == opened_count
        await eventually_async(lambda: fake.connections == 1, 20)


async def test_close_waits_for_the_end_of_trials(fake: FakePeer) -> None:
    """Afterwards no task is left, and no connection."""
    fake.answer = honest_when_released
    backend = await opened(fake, **PATIENT)
    (peer,) = peers_of(backend).values()
    peer.start_trial()
    await eventually_async(lambda: fake.questions, 20)
    await backend.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not peer.trying
    fake.released.set()
    await eventually_async(lambda: not fake.connections, 20)


async def test_a_peer_is_closed_while_a_call_is_being_cancelled(fake: FakePeer) -> None:
    """The close fails neither itself nor the call, which ends as cancelled."""
    fake.answer = honest_when_released
    async with connected(fake) as backend:
        call = asyncio.create_task(backend.exists([b"key"]))
        await eventually_async(lambda: fake.questions, 20)
        (peer,) = peers_of(backend).values()
        call.cancel()
        await peer.close()
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_named_peers_are_bounded() -> None:
    """The peer named longest ago is forgotten, with its connections; if named again, it is contacted again."""
    backend = await opened(limits=Limits(named_max=2), request_peers=("127.0.0.0/8:1024-65535",), **PATIENT)
    with FakePeer() as one, FakePeer() as two, FakePeer() as three:
        try:
            assert await backend.exists_at([b"key"], [Source(one.address)]) == ([Found.THERE], [Found.ABSENT])
            for peer in (two, three):
                assert await backend.exists_at([b"key"], [Source(peer.address)]) == ([Found.THERE], [Found.ABSENT])
            assert backend.stats().gauges["peers"] == 2
            await eventually_async(lambda: not one.connections, 20)
            assert await backend.exists_at([b"key"], [Source(one.address)]) == ([Found.THERE], [Found.ABSENT])
        finally:
            await backend.close()


def test_single_bytes_make_whole_blocks(fake: FakePeer) -> None:
    """An answer that arrives in single bytes is assembled correctly."""

    def in_bytes(peer: FakePeer, sock: Wire, op: Op, keys: list[bytes]) -> None:
        sock.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answer = b"\1" * len(keys) if op is Op.LOOKUP else b"".join([part(peer.record(key)) for key in keys])
        for byte in answer:
            sock.sendall(bytes([byte]))

    fake.slot_bytes = 512
    fake.answer = in_bytes
    with rig_of(fake.address, slot_bytes=512, lookup_timeout=20, load_timeout=20, timeout=20) as rig:
        keys = [b"key-%d" % number for number in range(4)]
        assert rig.lookup(keys[0]) is LookupResult.HIT
        assert rig.load(keys).success


GREETINGS = {
    "nothing": lambda sock: sock.recv(1),
    "garbage": lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(200)),
    "another secret": lambda sock: sock.sendall(protocol.pack_welcome(Welcome(bytes(32), Note(0)))),
    "another version": lambda sock: sock.sendall(b"\x89kvpeer\n\2\0" + bytes(70)),
    "silence": lambda sock: receive(sock, 10_000),
}


@pytest.mark.parametrize("greets", GREETINGS.values(), ids=GREETINGS.keys())
def test_a_peer_that_greets_badly_is_never_asked(fake: FakePeer, greets: Callable[[socket.socket], None]) -> None:
    """With any server at the address, a lookup is a MISS by its deadline, and the statistics give the reason."""
    fake.greets = greets
    with rig_of(fake.address) as rig:
        assert rig.lookup(b"key") is LookupResult.MISS
        assert fake.address in rig.tier.stats().last_error


async def test_an_error_without_a_text_is_named(fake: FakePeer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason why a peer can't be reached is never empty."""

    async def refuse(*_: Any) -> Any:
        raise ConnectionResetError

    monkeypatch.setattr("kvstore.backends.peer.client.open_stream", refuse)
    backend = await opened(fake)
    with pytest.raises(BackendError, match=f"{fake.address}: .*ConnectionResetError"):
        await backend.exists([b"key"])
    await backend.close()


def test_different_secret_is_reported_but_not_shown(fake: FakePeer) -> None:
    """The error reports that a peer has another secret, and does not show the secret."""
    fake.secret = b"one secret of fake peers"
    with rig_of(fake.address, secret="quite another secret") as rig:
        assert rig.lookup(b"key") is LookupResult.MISS
        assert "has another 'secret'" in rig.tier.stats().last_error
        assert "quite another" not in rig.tier.stats().last_error
    assert fake.questions == []


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A process that serves blocks, for tests that neither stop nor kill it."""
    with Serving(tmp_path_factory.mktemp("healthy")) as process:
        yield process


@pytest.mark.parametrize("answer", [*LIES.values(), *BREAKS.values()], ids=[*LIES.keys(), *BREAKS.keys()])
def test_a_bad_peer_costs_only_itself(fake: FakePeer, healthy: Serving, answer: Answer) -> None:
    """Beside a peer that sends false data or hangs, another peer's blocks are all found and loaded in the end."""
    fake.slot_bytes = SLOT_BYTES
    fake.answer = answer
    with rig_of(fake.address, healthy.address, slot_bytes=SLOT_BYTES) as rig:
        keys = [key_of(number) for number in range(8)]

        def all_load() -> bool:
            # A request computes a failed block itself; the next request looks it up again.
            hits = [key for key in keys if rig.lookup(key) is LookupResult.HIT]
            return len(hits) == 8 and rig.load(hits).success

        rig.until(all_load, "the blocks of the good peer")


@pytest.mark.parametrize(("fail", "mend"), [("kill", "start"), ("stop", "go_on")])
def test_a_stopped_peer_costs_its_deadline(serving: Serving, fail: str, mend: str) -> None:
    """A peer killed or stopped between lookup and load costs its blocks; it is used again once it is back."""
    with rig_of(serving.address, slot_bytes=SLOT_BYTES, breaker_cooldown="50ms", breaker_cooldown_max="100ms") as rig:
        keys = [key_of(number) for number in range(8)]
        all_found(rig, keys)
        getattr(serving, fail)()
        assert not any(outcome.ok for outcome in rig.load(keys).outcomes)
        assert rig.lookup(key_of(20)) is LookupResult.MISS
        for slot in range(8):
            rig.fill(slot)
        getattr(serving, mend)()
        all_found(rig, [key_of(21)])
        assert rig.untouched(range(8))
        rig.until(lambda: rig.load([key_of(21)]).success, "a load from the peer that is back")


def test_a_replaced_secret_shuts_out(serving: Serving) -> None:
    """A peer restarted with a secret serves no client without it, and every client with it."""
    with rig_of(serving.address, slot_bytes=SLOT_BYTES) as without:
        assert without.lookup(key_of(0)) is LookupResult.HIT
        serving.kill()
        serving.start(secret="a secret of sixteen")
        with rig_of(serving.address, slot_bytes=SLOT_BYTES, secret="a secret of sixteen") as rig:
            keys = [key_of(number) for number in range(SLOTS)]
            assert [rig.lookup(key) for key in keys] == [LookupResult.HIT] * SLOTS
            assert rig.load(keys).success
        assert without.lookup(key_of(1)) is LookupResult.MISS


def test_another_namespace_has_nothing(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    """An engine of another namespace finds no block; the peer does not count as failing, and this is logged once."""
    config = {"backend": "peer", "peers": [serving.address], "negative_ttl": "1ms", **QUICK}

    def foreign(rig: TierRig) -> float:
        assert rig.tier.drain(10)
        rig.tier.get_finished()
        return rig.tier.stats().backend_gauges["peers_of_other_namespaces"]

    with TierRig(config, namespace=Namespace({"suite": "other"}), slot_bytes=SLOT_BYTES, slots=4) as rig:
        for number in range(3):
            assert rig.lookup(key_of(number)) is LookupResult.MISS
            assert list(rig.load([key_of(number)]).outcomes) == [Outcome.MISS]
        assert not rig.tier.stats().last_error
        assert foreign(rig) == 1
    (told,) = [record.getMessage() for record in caplog.records if "another namespace" in record.getMessage()]
    assert serving.address in told and "block size" in told
    with rig_of(serving.address, slot_bytes=SLOT_BYTES) as ours:
        assert ours.lookup(key_of(0)) is LookupResult.HIT
        assert foreign(ours) == 0


def test_a_request_names_a_peer(serving: Serving) -> None:
    """A peer that a request names is contacted for it; a peer that the request may not name is not."""
    with rig_of(slot_bytes=SLOT_BYTES, request_peers=["127.0.0.0/8:1024-65535"], negative_ttl=60) as rig:
        assert rig.lookup(key_of(0)) is LookupResult.MISS
        named = RequestContext("request-1", source=Source(serving.address), since=time.monotonic())
        assert rig.lookup(key_of(0), named) is LookupResult.HIT
        assert rig.load([key_of(0)], named).success
    with rig_of("127.0.0.1:1", slot_bytes=SLOT_BYTES, request_peers=["127.0.0.2:1024-65535"]) as rig:
        named = RequestContext("request-2", source=Source(serving.address), since=time.monotonic())
        assert rig.lookup(key_of(0), named) is LookupResult.MISS


@pytest.mark.parametrize("host", ["thread", "process"])
def test_many_blocks_come_whole(serving: Serving, host: str) -> None:
    """All blocks of a peer, loaded by concurrent jobs, arrive intact, also in an I/O process."""
    with rig_of(serving.address, slot_bytes=SLOT_BYTES, io=host, **{**QUICK, "load_timeout": 20}) as rig:
        keys = [key_of(number) for number in range(SLOTS)]
        jobs = {rig.submit_load(keys[i : i + 8], range(i, i + 8)): i for i in range(0, SLOTS, 8)}
        for job, start in jobs.items():
            result = rig.finish(job)
            rig.prove(result, keys[start : start + 8], range(start, start + 8))
            assert result.success
