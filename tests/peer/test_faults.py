"""Peers that lie, stall, trickle, break off and die: no wrong bytes, no hang, and the others go on."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.backends.base import RecordGeometry
from kvstore.backends.peer import PeerBackend, PeerConfig, protocol
from kvstore.backends.peer.protocol import Greeting, Op, Part
from kvstore.codec.record import HEADER_BYTES
from kvstore.namespace import Namespace
from kvstore.testing.tier_rig import TierRig
from kvstore.types import Found, LookupResult, Outcome, RequestContext, Source
from tests.peer.fake_peer import Answer, FakePeer, honest, on_load, part, receive
from tests.peer.serving import FIELDS, SLOT_BYTES, SLOTS, Serving, key_of

NAMESPACE = Namespace(FIELDS)
QUICK = {"lookup_timeout": "1s", "load_timeout": 2, "timeout": "500ms", "connect_timeout": "500ms"}


def rig_of(*addresses: str, slot_bytes: int = 4096, **more: Any) -> TierRig:
    """Return a rig over a tier that asks peers, with short deadlines."""
    config = {"backend": "peer", "peers": list(addresses), "negative_ttl": "1ms", **QUICK, **more}
    return TierRig(config, namespace=NAMESPACE, slot_bytes=slot_bytes, slots=64)


def flipped(place: int) -> Callable[[FakePeer, socket.socket, list[bytes]], None]:
    """Send records with one flipped bit, counted from the start of the record."""

    def act(peer: FakePeer, sock: socket.socket, keys: list[bytes]) -> None:
        for key in keys:
            record = bytearray(peer.record(key))
            record[place] ^= 0x10
            sock.sendall(part(bytes(record)))

    return act


def wrong_block(peer: FakePeer, sock: socket.socket, keys: list[bytes]) -> None:
    """Send the intact record of another key."""
    for key in keys:
        sock.sendall(part(peer.record(key, of=b"another")))


def wrong_namespace(peer: FakePeer, sock: socket.socket, keys: list[bytes]) -> None:
    """Send the intact record of another namespace."""
    for key in keys:
        sock.sendall(part(peer.record(key, namespace=Namespace({"suite": "other"}))))


def duplicated(peer: FakePeer, sock: socket.socket, keys: list[bytes]) -> None:
    """Send the first 100 bytes of each record twice, and what its length says in all."""
    for key in keys:
        record = peer.record(key)
        sock.sendall(part((record[:100] + record)[: len(record)]))


def shorter(peer: FakePeer, sock: socket.socket, keys: list[bytes]) -> None:
    """Send half of each record as if it were all."""
    for key in keys:
        record = peer.record(key)
        sock.sendall(part(record[: len(record) // 2]))


LIES = {
    "payload": on_load(flipped(3000)),
    "header": on_load(flipped(40)),
    "wrong block": on_load(wrong_block),
    "wrong namespace": on_load(wrong_namespace),
    "duplicated": on_load(duplicated),
    "shorter": on_load(shorter),
}


def early_close(peer: FakePeer, sock: socket.socket, op: Op, keys: list[bytes]) -> None:
    """Close instead of an answer."""
    sock.shutdown(socket.SHUT_RDWR)


def cut_off(peer: FakePeer, sock: socket.socket, keys: list[bytes]) -> None:
    """Close in the middle of the first record."""
    sock.sendall(part(peer.record(keys[0]))[:1000])
    sock.shutdown(socket.SHUT_RDWR)


def huge_length(peer: FakePeer, sock: socket.socket, keys: list[bytes]) -> None:
    """Announce four gigabytes, and begin to send them."""
    sock.sendall(protocol.pack_part(Part.RECORD, 2**32 - 1) + bytes(100_000))


def nonsense(peer: FakePeer, sock: socket.socket, keys: list[bytes]) -> None:
    """Send what is no part of an answer."""
    sock.sendall(b"\xff" * 4096)


def endless(peer: FakePeer, sock: socket.socket, keys: list[bytes]) -> None:
    """Send the answer, and then more than was asked for."""
    sock.sendall(b"".join([part(peer.record(key)) for key in keys]) + bytes(100))


def stall(peer: FakePeer, sock: socket.socket, op: Op, keys: list[bytes]) -> None:
    """Answer nothing."""
    peer.released.wait(60)


def stall_in_the_middle(peer: FakePeer, sock: socket.socket, keys: list[bytes]) -> None:
    """Send half of the first record, and then nothing."""
    sock.sendall(part(peer.record(keys[0]))[:1000])
    peer.released.wait(60)


def trickle(peer: FakePeer, sock: socket.socket, keys: list[bytes]) -> None:
    """Send a byte now and then: far too slow for any deadline."""
    for byte in part(peer.record(keys[0])):
        sock.sendall(bytes([byte]))
        if peer.released.wait(0.05):
            return


BREAKS = {
    "early close": early_close,
    "cut off": on_load(cut_off),
    "huge length": on_load(huge_length),
    "nonsense": on_load(nonsense),
    "stall": stall,
    "stall in the middle": on_load(stall_in_the_middle),
    "trickle": on_load(trickle),
}


@pytest.mark.parametrize("answer", LIES.values(), ids=LIES.keys())
def test_what_does_not_verify_is_not_loaded(fake: FakePeer, answer: Answer) -> None:
    """A record that is not the one asked for, or not intact, is CORRUPT, and its peer is left alone from then on."""
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


@pytest.mark.parametrize("answer", BREAKS.values(), ids=BREAKS.keys())
def test_what_breaks_off_or_hangs_costs_its_blocks(fake: FakePeer, answer: Answer) -> None:
    """A load from a peer that breaks off or hangs fails within its deadline, and the slots are not written after it."""
    with rig_of(fake.address) as rig:
        keys = [b"key-%d" % number for number in range(6)]
        assert [rig.lookup(key) for key in keys] == [LookupResult.HIT] * 6
        fake.answer = answer
        loaded = rig.load(keys)
        assert not any(outcome.ok for outcome in loaded.outcomes)
        # A broken connection is no reason for distrust; a record longer than a block is.
        assert (Outcome.CORRUPT in loaded.outcomes) == (answer is BREAKS["huge length"])
        for slot in range(6):
            rig.fill(slot)
        fake.released.set()
        assert rig.tier.drain(rig.timeout_s)
        assert rig.untouched(range(64))


@pytest.mark.parametrize("byte", [b"\3", b"\x07", b"\xff"])
def test_an_unknown_answer_to_a_lookup_is_a_failure(fake: FakePeer, byte: bytes) -> None:
    """A byte that no version knows is neither a hit nor an absence: the peer counts as failing."""
    fake.answer = lambda peer, sock, op, keys: sock.sendall(byte * len(keys))
    with rig_of(fake.address) as rig:
        assert rig.lookup(b"key") is LookupResult.MISS
        assert "other bytes than 0, 1, 2" in rig.tier.stats().last_error


def test_a_peer_whose_loads_stall_is_left_alone(fake: FakePeer) -> None:
    """Where lookups are answered and loads are not, two loads are lost, not one per request; then it is used again."""
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
    """What follows an answer is never taken for the next one."""
    fake.answer = on_load(endless)
    with rig_of(fake.address) as rig:
        for start in range(0, 30, 3):
            keys = [b"key-%d" % number for number in range(start, start + 3)]
            loaded = rig.load(keys)  # The rig compares every byte of what is said to be loaded.
            assert loaded.success or not any(outcome is Outcome.CORRUPT for outcome in loaded.outcomes)


async def test_what_nobody_asked_for_closes_an_idle_connection(fake: FakePeer) -> None:
    """Bytes behind the answer to a lookup are not the answer to the next one: the connection is not used again."""

    def more(peer: FakePeer, sock: socket.socket, op: Op, keys: list[bytes]) -> None:
        sock.sendall(b"\1" * len(keys) + b"\0" * 100)

    fake.answer = more
    backend = PeerBackend(PeerConfig(peers=(fake.address,), lookup_timeout=20, connect_timeout=20))
    await backend.open(NAMESPACE, RecordGeometry(HEADER_BYTES, 4096))
    try:
        for number in range(3):
            assert await backend.exists([b"key-%d" % number]) == [True]
            (peer,) = backend._listed
            async with asyncio.timeout(20):
                while (pipe := peer._idle_pipe()) is not None:
                    peer._idle.append((pipe, peer._loop.time()))
                    await asyncio.sleep(0.001)
    finally:
        await backend.close()


async def test_named_peers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer that was named longest ago is forgotten, with its connections; named again, it is asked again."""
    monkeypatch.setattr("kvstore.backends.peer.backend._NAMED_MAX", 2)
    backend = PeerBackend(PeerConfig(request_peers=("127.0.0.0/8",), lookup_timeout=20, connect_timeout=20))
    await backend.open(NAMESPACE, RecordGeometry(HEADER_BYTES, 4096))
    with FakePeer() as one, FakePeer() as two, FakePeer() as three:
        try:
            assert await backend.exists_at([b"key"], [Source(one.address)]) == ([Found.THERE], [])
            (first,) = backend._named.values()
            for peer in (two, three):
                assert await backend.exists_at([b"key"], [Source(peer.address)]) == ([Found.THERE], [])
            assert backend.stats().gauges["peers"] == 2
            async with asyncio.timeout(20):
                while not all(pipe.closed for pipe in first._pipes):
                    await asyncio.sleep(0.001)
            assert not first.admits()
            assert await backend.exists_at([b"key"], [Source(one.address)]) == ([Found.THERE], [])
        finally:
            await backend.close()


def test_single_bytes_make_whole_blocks(fake: FakePeer) -> None:
    """An answer that comes in pieces of one byte is put together right."""

    def in_bytes(peer: FakePeer, sock: socket.socket, op: Op, keys: list[bytes]) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
    "another secret": lambda sock: sock.sendall(protocol.pack_greeting(Greeting(bytes(32), bytes(32)))),
    "another version": lambda sock: sock.sendall(b"\x89kvpeer\n\3\0" + bytes(70)),
    "silence": lambda sock: receive(sock, 10_000),
}


@pytest.mark.parametrize("greets", GREETINGS.values(), ids=GREETINGS.keys())
def test_a_peer_that_greets_badly_is_never_asked(fake: FakePeer, greets: Callable[[socket.socket], None]) -> None:
    """Whoever listens there: a lookup is a MISS within its deadline, and the statistics say why."""
    fake.greets = greets
    with rig_of(fake.address) as rig:
        assert rig.lookup(b"key") is LookupResult.MISS
        assert fake.address in rig.tier.stats().last_error


def test_another_secret_is_told(fake: FakePeer) -> None:
    """A peer with another secret is named as such, and the secret is not."""
    fake.secret = b"one secret of fake peers"
    with rig_of(fake.address, secret="quite another secret") as rig:
        assert rig.lookup(b"key") is LookupResult.MISS
        assert "has another 'secret'" in rig.tier.stats().last_error
        assert "quite another" not in rig.tier.stats().last_error
    assert fake.questions == []


@pytest.mark.parametrize("answer", [*LIES.values(), *BREAKS.values()], ids=[*LIES.keys(), *BREAKS.keys()])
def test_a_bad_peer_costs_only_itself(fake: FakePeer, serving: Serving, answer: Answer) -> None:
    """Beside a peer that lies or hangs, another one's blocks are found and loaded, all of them in the end."""
    fake.slot_bytes = SLOT_BYTES
    fake.answer = answer
    with rig_of(fake.address, serving.address, slot_bytes=SLOT_BYTES) as rig:
        keys = [key_of(number) for number in range(8)]

        def all_load() -> bool:
            # A request whose block failed computes it; the next one asks anew.
            hits = [key for key in keys if rig.lookup(key) is LookupResult.HIT]
            return len(hits) == 8 and rig.load(hits).success

        rig.until(all_load, "the blocks of the good peer")


def test_a_killed_peer_is_a_miss_and_is_used_again(serving: Serving) -> None:
    """Killed between lookup and load, a peer costs its blocks; started again, it is found without a restart of ours."""
    with rig_of(serving.address, slot_bytes=SLOT_BYTES, breaker_cooldown="50ms", breaker_cooldown_max="100ms") as rig:
        keys = [key_of(number) for number in range(8)]
        assert [rig.lookup(key) for key in keys] == [LookupResult.HIT] * 8
        serving.kill()
        assert not any(outcome.ok for outcome in rig.load(keys).outcomes)
        assert rig.lookup(key_of(9)) is LookupResult.MISS
        serving.start()
        rig.until(lambda: rig.lookup(key_of(10)) is LookupResult.HIT, "the peer to be found again")
        assert rig.load([key_of(10)]).success


def test_a_stopped_peer_costs_its_deadline(serving: Serving) -> None:
    """Stopped in its tracks, a peer is a miss; it is used again when it goes on."""
    with rig_of(serving.address, slot_bytes=SLOT_BYTES, breaker_cooldown="50ms", breaker_cooldown_max="100ms") as rig:
        keys = [key_of(number) for number in range(8)]
        assert [rig.lookup(key) for key in keys] == [LookupResult.HIT] * 8
        serving.stop()
        assert not any(outcome.ok for outcome in rig.load(keys).outcomes)
        assert rig.lookup(key_of(20)) is LookupResult.MISS
        for slot in range(8):
            rig.fill(slot)
        serving.go_on()
        rig.until(lambda: rig.lookup(key_of(21)) is LookupResult.HIT, "the peer to be found again")
        assert rig.untouched(range(8))
        assert rig.load([key_of(21)]).success


def test_a_replaced_secret_shuts_out(serving: Serving) -> None:
    """A peer that is started again with a secret gives nothing to those without it, and all to those that have it."""
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
    """An engine of another namespace finds nothing; that is no failure of the peer, and it is logged once."""
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
    """A peer that only a request names is asked for it; one that it may not name is not."""
    with rig_of(slot_bytes=SLOT_BYTES, request_peers=["127.0.0.0/8"], negative_ttl=60) as rig:
        assert rig.lookup(key_of(0)) is LookupResult.MISS
        named = RequestContext("request-1", source=Source(serving.address), since=rig.tier._clock())
        assert rig.lookup(key_of(0), named) is LookupResult.HIT
        assert rig.load([key_of(0)], named).success
    with rig_of("127.0.0.1:1", slot_bytes=SLOT_BYTES, request_peers=["10.0.0.0/8"]) as rig:
        named = RequestContext("request-2", source=Source(serving.address), since=rig.tier._clock())
        assert rig.lookup(key_of(0), named) is LookupResult.MISS


@pytest.mark.parametrize("host", ["thread", "process"])
def test_many_blocks_come_whole(serving: Serving, host: str) -> None:
    """All blocks of a peer, in jobs that run at once, come byte by byte, also in an I/O process."""
    with rig_of(serving.address, slot_bytes=SLOT_BYTES, io=host, **{**QUICK, "load_timeout": 20}) as rig:
        keys = [key_of(number) for number in range(SLOTS)]
        jobs = {rig.submit_load(keys[i : i + 8], range(i, i + 8)): i for i in range(0, SLOTS, 8)}
        for job, start in jobs.items():
            result = rig.finish(job)
            rig.prove(result, keys[start : start + 8], range(start, start + 8))
            assert result.success
