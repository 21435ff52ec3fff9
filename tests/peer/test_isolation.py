"""A failing or hostile peer harms only the requests that name it."""

from __future__ import annotations

import hashlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.backends.peer.client import PeerLog
from kvstore.backends.peer.protocol import Op
from kvstore.backends.peer.summary import Sample, pack
from kvstore.namespace import Namespace
from kvstore.testing.tier_rig import TierRig
from kvstore.types import LookupResult, Outcome, RequestContext, Source
from tests.peer.directory_servers import Entry, RedisAdmin
from tests.peer.fake_peer import FakePeer, honest
from tests.peer.ports import free_port
from tests.peer.relay import EVIL, Impostor
from tests.peer.serving import FIELDS, SLOT_BYTES, Serving
from tests.peer.wire import Wire
from tests.redis.servers import plain, running

SECRET = "a secret of sixteen"
PATIENT = {"timeout": 10, "lookup_timeout": 60, "load_timeout": 20, "connect_timeout": 10, "negative_ttl": "1ms"}


def rig_of(slot_bytes: int = 4096, namespace: Namespace | None = None, **more: object) -> TierRig:
    """Return an engine that asks peers."""
    config = {"backend": "peer", "request_peers": ["127.0.0.0/8:1024-65535"], **PATIENT, **more}
    return TierRig(config, namespace=namespace or Namespace({"suite": "peer"}), slot_bytes=slot_bytes, slots=64)


def waiting(peer: FakePeer, sock: Wire, op: Op, keys: list[bytes]) -> None:
    """Hold no block, and know of every hand-over that its blocks will come."""
    sock.sendall((b"\2" if op is Op.HAND_OVERS else b"\0") * len(keys))


def handed_over(name: str, address: str) -> RequestContext:
    """Return a request whose blocks another engine computes; the time allowed for its arrival there is over."""
    source = Source(address, hashlib.sha256(name.encode()).digest())
    return RequestContext(name, source=source, since=time.monotonic() - 10, patience_s=600.0)


def stays_open(rig: TierRig, key: bytes, ctx: RequestContext, fake: FakePeer) -> None:
    """Check that a request waits for its block over several questions to its source."""
    asked = len(fake.questions)

    def waits() -> bool:
        assert rig.tier.lookup(key, ctx) is LookupResult.RETRY
        return len(fake.questions) >= asked + 8

    rig.until(waits, "several questions to the source")


def test_a_dead_listed_peer_does_not_end_a_hand_over(fake: FakePeer) -> None:
    """A request waits for its healthy source although a peer of the list is down."""
    fake.answer = waiting
    with rig_of(peers=[f"127.0.0.1:{free_port()}"]) as rig:
        stays_open(rig, b"key", handed_over("b", fake.address), fake)
        fake.answer = honest_of_hand_overs
        rig.until(lambda: rig.tier.lookup(b"key", handed_over("b", fake.address)) is LookupResult.HIT, "the block")


def honest_of_hand_overs(peer: FakePeer, sock: Wire, op: Op, keys: list[bytes]) -> None:
    """Hold every block."""
    if op is Op.HAND_OVERS:
        sock.sendall(bytes(len(keys)))
    else:
        honest(peer, sock, op, keys)


def test_a_dead_source_does_not_end_the_hand_over_of_another_request(fake: FakePeer) -> None:
    """A request waits for its healthy source beside a request whose source is down; the latter computes its block."""
    fake.answer = waiting
    with rig_of() as rig:
        dead, alive = handed_over("a", f"127.0.0.1:{free_port()}"), handed_over("b", fake.address)
        for number in range(10):
            rig.tier.lookup(b"key-of-a-%d" % number, dead)
            assert rig.tier.lookup(b"key-of-b", alive) is LookupResult.RETRY
            rig.step()
        stays_open(rig, b"key-of-b", alive, fake)
        rig.until(lambda: rig.tier.lookup(b"key-of-a-0", dead) is LookupResult.MISS, "the miss")


def test_a_silent_source_delays_only_the_request_that_names_it(fake: FakePeer) -> None:
    """Beside a request that waits for a silent host, others have their answers, even about the same block."""
    fake.answer = waiting
    with socket.create_server(("127.0.0.1", 0)) as silent, rig_of(peers=[fake.address]) as rig:
        one = RequestContext("a", source=Source(f"127.0.0.1:{silent.getsockname()[1]}"))
        other = RequestContext("b")
        left = {b"key-of-b", b"key-of-both"}
        for key in (b"key-of-a", b"key-of-both"):
            assert rig.tier.lookup(key, one) is LookupResult.RETRY

        def answered() -> bool:
            left.difference_update(key for key in set(left) if rig.tier.lookup(key, other) is LookupResult.MISS)
            return not left

        rig.until(answered, "the answers")
        assert rig.tier.lookup(b"key-of-a", one) is LookupResult.RETRY


def test_a_named_peer_is_asked_only_about_blocks_of_its_request() -> None:
    """The keys of other requests are never sent to a peer that one request names, also not by their loads."""
    seen: set[bytes] = set()

    def spying(peer: FakePeer, sock: Wire, op: Op, keys: list[bytes]) -> None:
        seen.update(keys)
        honest(peer, sock, op, keys)

    with FakePeer() as spy, FakePeer() as listed, rig_of(peers=[listed.address]) as rig:
        spy.answer = spying
        listed.answer = waiting
        one, other = RequestContext("a", source=Source(spy.address)), RequestContext("b")
        rig.tier.lookup(b"key-of-a", one)
        rig.tier.lookup(b"key-of-b", other)
        rig.until(lambda: rig.tier.lookup(b"key-of-a", one) is LookupResult.HIT, "the block")
        rig.until(lambda: rig.tier.lookup(b"key-of-b", other) is LookupResult.MISS, "the miss")
        assert list(rig.load([b"key-of-b"], ctx=other).outcomes) == [Outcome.MISS]
        assert seen == {b"key-of-a"}


def test_a_block_of_a_named_peer_is_loaded_again_after_a_lost_connection(fake: FakePeer) -> None:
    """A load that breaks off is repeated from the same named peer, although it is in no list."""
    broken: list[bool] = []

    def once(peer: FakePeer, sock: Wire, op: Op, keys: list[bytes]) -> None:
        if op is Op.LOAD and not broken:
            broken.append(True)
            raise EOFError
        honest(peer, sock, op, keys)

    fake.answer = once
    with rig_of() as rig:
        ctx = RequestContext("a", source=Source(fake.address))
        rig.until(lambda: rig.tier.lookup(b"key", ctx) is LookupResult.HIT, "the block")
        assert rig.load([b"key"], ctx=ctx).success
        assert broken


def test_repeated_load_requests_only_a_named_peers_own_blocks() -> None:
    """After loads from a named and a listed peer broke off, the named one still receives only its own keys."""
    seen: set[bytes] = set()
    broken: set[FakePeer] = set()

    def failing_once(peer: FakePeer, sock: Wire, op: Op, keys: list[bytes]) -> None:
        if op is Op.LOAD and peer not in broken:
            broken.add(peer)
            raise EOFError
        if peer is spy:
            seen.update(keys)
        having(b"own" if peer is spy else b"listed")(peer, sock, op, keys)

    with FakePeer() as spy, FakePeer() as listed, rig_of(peers=[listed.address]) as rig:
        spy.answer = listed.answer = failing_once
        ctx, keys = RequestContext("a", source=Source(spy.address)), [b"own", b"listed"]
        rig.until(lambda: rig.tier.lookup(b"own", ctx) is LookupResult.HIT, "the block of the named peer")
        assert rig.lookup(b"listed") is LookupResult.HIT
        assert rig.load(keys, ctx=ctx).success
        assert (seen, broken) == ({b"own"}, {spy, listed})


@pytest.mark.parametrize("moment", ["before the load", "during the lookup"])
def test_naming_many_peers_ends_no_hit(moment: str) -> None:
    """A block of a named peer is found and loaded, however many others are named before its load or in its lookup."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(peer: FakePeer, sock: Wire, op: Op, keys: list[bytes]) -> None:
        if keys == [b"slow"] and op is Op.LOOKUP:
            begun.set()
            go_on.wait(30)
        honest(peer, sock, op, keys)

    with FakePeer() as fake, rig_of(backend="tests.peer.limited:FewNamed") as rig:
        fake.answer = slow
        ctx, key = (
            RequestContext("a", source=Source(fake.address)),
            b"slow" if moment == "during the lookup" else b"key",
        )
        rig.until(lambda: rig.tier.lookup(b"known", ctx) is LookupResult.HIT, "an answer of the peer")
        rig.tier.lookup(key, ctx)
        rig.until(lambda: begun.is_set() or rig.tier.lookup(key, ctx) is LookupResult.HIT, "the lookup")
        for number in range(4):
            named = RequestContext(f"b{number}", source=Source(f"127.0.0.1:{free_port()}"))
            rig.until(lambda named=named: rig.tier.lookup(b"more", named) is LookupResult.MISS, "a miss")
            assert rig.tier.lookup(key, ctx) is (LookupResult.RETRY if key == b"slow" else LookupResult.HIT)
        go_on.set()
        assert rig.lookup(key, ctx) is LookupResult.HIT
        assert rig.load([key], ctx=ctx).success


def test_naming_many_peers_ends_no_load() -> None:
    """A peer with a load under way is kept, however many others are named meanwhile."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(peer: FakePeer, sock: Wire, op: Op, keys: list[bytes]) -> None:
        if op is Op.LOAD:
            begun.set()
            go_on.wait(30)
        honest(peer, sock, op, keys)

    with FakePeer() as fake, FakePeer() as other, rig_of(backend="tests.peer.limited:FewNamed") as rig:
        fake.answer = slow
        ctx = RequestContext("a", source=Source(fake.address))
        rig.until(lambda: rig.tier.lookup(b"key", ctx) is LookupResult.HIT, "the block")
        job = rig.submit_load([b"key"], ctx=ctx)
        rig.until(begun.is_set, "the begin of the load")
        for number in range(4):
            address = other.address if number == 3 else f"127.0.0.1:{free_port()}"
            named = RequestContext(f"b{number}", source=Source(address))
            wanted = LookupResult.HIT if number == 3 else LookupResult.MISS
            rig.until(lambda named=named, wanted=wanted: rig.tier.lookup(b"more", named) is wanted, "an answer")
        go_on.set()
        assert rig.finish(job).success


def test_warnings_about_peers_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """However many peers fail, ten lines a minute are logged, and then one with the number of the others."""
    now = 0.0
    log = PeerLog(clock=lambda: now)
    for number in range(30):
        log.warning("Peer %d", number)
        now += 1.9
    now += 60
    log.warning("Peer 30")
    lines = [one.message for one in caplog.records if one.levelno >= logging.WARNING]
    assert lines == [
        *(f"Peer {number}" for number in range(10)),
        "20 more warnings about peers were omitted",
        "Peer 30",
    ]


def having(prefix: bytes) -> Callable[[FakePeer, Wire, Op, list[bytes]], None]:
    """Hold the blocks whose keys begin with a prefix."""

    def answer(peer: FakePeer, sock: Wire, op: Op, keys: list[bytes]) -> None:
        if op is Op.LOOKUP:
            sock.sendall(bytes(key.startswith(prefix) for key in keys))
        else:
            honest(peer, sock, op, keys)

    return answer


def test_failed_loads_from_one_peer_do_not_stop_the_tier() -> None:
    """However many loads from a dead peer fail, the blocks of a healthy one are found and loaded all the time."""
    with FakePeer() as healthy, FakePeer() as dying:
        healthy.answer, dying.answer = having(b"healthy"), having(b"dying")
        with rig_of(peers=[dying.address, healthy.address], positive_ttl=600) as rig:
            lost = [b"dying-%d" % number for number in range(12)]
            rig.until(lambda: all(rig.tier.lookup(key) is LookupResult.HIT for key in lost), "the blocks")
            dying.__exit__()
            for number, key in enumerate(lost):
                assert not rig.load([key]).success
                assert rig.lookup(b"healthy-%d" % number) is LookupResult.HIT
            there = [b"healthy-%d" % number for number in range(12)]
            assert rig.load(there).success
            assert rig.tier.stats().load_breaker == "closed"


def test_a_forged_block_is_not_loaded_for_another_request(tmp_path: Path) -> None:
    """A stranger that one request names, and that relays the greeting of a real engine, forges no block for others."""
    with (
        Serving(tmp_path, secret=SECRET) as real,
        Impostor(real.port) as stranger,
        rig_of(SLOT_BYTES, Namespace(FIELDS), secret=SECRET) as rig,
    ):
        one, other = RequestContext("a", source=Source(stranger.address)), RequestContext("b")
        rig.tier.lookup(b"key-of-a", one)
        assert rig.lookup(b"key-of-b", other) is LookupResult.MISS
        assert not rig.load([b"key-of-b"], ctx=other).success
        assert EVIL[:8] not in rig.content(0) and stranger.stolen == []


def test_an_entry_in_the_directory_forges_no_block(tmp_path: Path) -> None:
    """Entries of an intruder in the directory's server that relays the greeting of a real engine are rejected."""
    key = b"a system prompt"
    sample = Sample()
    sample.add([key])
    with (
        running(plain("redis", tmp_path / "server")) as (server,),
        Serving(tmp_path, secret=SECRET) as real,
        Impostor(real.port) as stranger,
    ):
        admin = RedisAdmin(server, Namespace(FIELDS))
        admin.write([Entry(stranger.address.encode(), pack([sample.section()]))])
        directory = {"url": server.url, "networks": ["127.0.0.1"], "interval": "200ms"}
        with rig_of(SLOT_BYTES, Namespace(FIELDS), secret=SECRET, directory=directory) as rig:

            def refused() -> bool:
                assert rig.lookup(key) is LookupResult.MISS
                return rig.tier.stats().backend_counters.get("connections_failed", 0) > 0

            rig.until(refused, "a connection to the stranger")
            assert not rig.load([key]).success
            assert EVIL[:8] not in rig.content(0)
        admin.close()
