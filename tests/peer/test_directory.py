"""The directory: engines find each other's blocks through a real server, and its failures affect only itself."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from kvstore.backends.base import RecordGeometry
from kvstore.backends.peer import PeerBackend, PeerConfig, directory
from kvstore.backends.peer.directory import _READ_AT_ONCE
from kvstore.backends.peer.limits import LIMITS
from kvstore.backends.peer.protocol import Op
from kvstore.backends.peer.summary import ENGINES_MAX, SUMMARY_BYTES_MAX, Sample, pack
from kvstore.config import decode_config
from kvstore.errors import ConfigError
from kvstore.namespace import Namespace
from kvstore.primary import Region
from kvstore.testing.tier_rig import TierRig
from kvstore.testing.waiting import eventually, eventually_async
from kvstore.tiers import AsyncTier
from kvstore.types import LookupResult, RequestContext, Source
from tests.peer.directory_servers import Entry, RedisAdmin, prefix_of
from tests.peer.fake_peer import FakePeer, honest
from tests.peer.holder import NAMESPACE, SLOT_BYTES, Holder
from tests.peer.ports import free_port
from tests.peer.served import Records
from tests.peer.serving import FIELDS, Serving, key_of
from tests.peer.serving import SLOT_BYTES as SERVED_BYTES
from tests.peer.wire import Wire
from tests.redis.servers import PASSWORD, Server, plain, running, secured

SECRET = "a secret of sixteen"
KEYS = [b"block-%d" % number for number in range(30)]
SPARE = b"block-spare"
"""A block that every engine has and that is first looked up later: no earlier answer applies to it."""
LEAST_ACL = "~kvpeers:* resetchannels -@all +time +set +getrange +unlink +pexpire +zadd +zrem +zrangebyscore"
LEAST_ACL += " +zremrangebyscore"
PAGE = Path(__file__).parents[2] / "docs" / "peer.md"


@pytest.fixture(params=["redis", "valkey"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server for one test."""
    with running(plain(request.param, tmp_path / "server")) as (one,):
        yield one


@pytest.fixture
def redis_only(tmp_path: Path) -> Iterator[Server]:
    """A Redis for one test."""
    with running(plain("redis", tmp_path / "server")) as (one,):
        yield one


def options(server: Server, **more: Any) -> dict[str, Any]:
    """Return options of an engine that uses a directory."""
    directory = {"url": server.url, "networks": ["127.0.0.1"], "interval": "200ms", "connect_timeout": "500ms", **more}
    return {"directory": directory, "secret": SECRET}


@contextlib.contextmanager
def holder(server: Server, keys: list[bytes], **more: Any) -> Iterator[Holder]:
    """Run an engine that serves some blocks."""
    with Region.create(slots=64, slot_bytes=SLOT_BYTES) as region:
        one = Holder(region, **options(server, **more))
        for key in (*keys, SPARE):
            one.store(key, payload(key))
        try:
            yield one
        finally:
            one.close()


@contextlib.contextmanager
def listed(server: Server, keys: list[bytes]) -> Iterator[None]:
    """Run an engine that has some blocks, with a lease that no pause of the machine ends."""
    with FakePeer(NAMESPACE, SLOT_BYTES) as fake:
        fake.secret = SECRET.encode()
        fake.answer = lambda peer, sock, op, asked: sock.sendall(bytes(key in keys for key in asked))
        admin(server).write([Entry(fake.address.encode(), summary_of(keys), seconds=200)])
        yield


def payload(key: bytes) -> bytes:
    """Return the bytes of a block, as the rig expects them."""
    return random.Random(key).randbytes(SLOT_BYTES)


def asking(server: Server, slot_bytes: int = SLOT_BYTES, namespace: Namespace = NAMESPACE, **more: Any) -> TierRig:
    """Return an engine that loads from the engines of the directory."""
    ttl = {"negative_ttl": "1ms", "positive_ttl": "2s", "lookup_timeout": 10, "load_timeout": 10}
    pauses = {"breaker_cooldown": "20ms", "breaker_cooldown_max": "50ms"}
    config = {"backend": "peer", **options(server), **ttl, **pauses, **more}
    return TierRig(config, namespace=namespace, slot_bytes=slot_bytes, slots=32)


def stat(tier: AsyncTier, name: str) -> float:
    """Return the current value of a counter or gauge."""
    assert tier.drain(10)
    tier.get_finished()
    stats = tier.stats()
    return {**stats.backend_counters, **stats.backend_gauges}[name]


def until_read(rig: TierRig, summaries: int) -> None:
    """Wait until an engine has read so many summaries, and has an index of them."""
    rig.until(lambda: stat(rig.tier, "directory_summaries_read") >= summaries, "all summaries")
    rounds = stat(rig.tier, "directory_rounds")
    rig.until(lambda: stat(rig.tier, "directory_rounds") >= rounds + 2, "an index of them")


def finds(rig: TierRig, keys: list[bytes]) -> Callable[[], bool]:
    """Return a function that checks whether an engine finds blocks, looked up together as in one step."""

    def found() -> bool:
        answers = [rig.tier.lookup(key) for key in keys]
        rig.step()
        return answers == [LookupResult.HIT] * len(keys)

    return found


_admins: list[RedisAdmin] = []


def admin(server: Server) -> Any:
    """Return a client with all rights on a server."""
    _admins.append(RedisAdmin(server))
    return _admins[-1]


@pytest.fixture(autouse=True)
def no_client_stays_open() -> Iterator[None]:
    """Close the clients of a test."""
    yield
    while _admins:
        _admins.pop().close()


def summary_of(keys: list[bytes]) -> bytes:
    """Return the summary of some blocks."""
    sample = Sample()
    sample.add(keys)
    return pack([sample.section()])


def test_engines_find_each_other(server: Server) -> None:
    """An engine finds and loads another one's blocks without a peer list; engines without them are not contacted."""
    others = [b"other-%d" % number for number in range(30)]
    with holder(server, KEYS) as one, holder(server, others) as two, asking(server) as rig:
        eventually(finds(rig, KEYS), what="the blocks of the first engine")
        assert rig.load(KEYS).success
        assert stat(one.tier, "served_keys_looked_up") >= len(KEYS)
        eventually(lambda: stat(rig.tier, "directory_engines") == 2, what="both engines in the directory")
        eventually(lambda: stat(one.tier, "directory_engines") == 1, what="the other engine in the directory")
        eventually(finds(rig, KEYS), what="the same blocks, with both known")
        assert stat(two.tier, "served_keys_looked_up") == 0
        eventually(finds(rig, others), what="the blocks of the second engine")
        new = [b"new-%d" % number for number in range(5)]
        for key in new:
            two.store(key, payload(key))
        eventually(finds(rig, new), what="blocks that are new")
    assert admin(server).keys() == []


def test_at_most_two_are_asked(redis_only: Server) -> None:
    """If many engines hold a block, a lookup contacts two of them."""
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(holder(redis_only, KEYS)) for _ in range(6)]
        rig = stack.enter_context(asking(redis_only, positive_ttl=60))
        rig.until(lambda: stat(rig.tier, "directory_engines") == 6, "all engines")
        rounds = stat(rig.tier, "directory_rounds")
        rig.until(lambda: stat(rig.tier, "directory_rounds") >= rounds + 3, "all summaries")
        assert [rig.lookup(key) for key in KEYS] == [LookupResult.HIT] * len(KEYS)
        asked = [stat(one.tier, "served_keys_looked_up") for one in engines]
        assert sum(asked) == 2 * len(KEYS), asked


def test_other_namespaces_are_not_seen(redis_only: Server) -> None:
    """An engine of another namespace is not listed."""
    with holder(redis_only, KEYS), asking(redis_only, namespace=Namespace({"suite": "other"})) as rig:
        rig.until(lambda: stat(rig.tier, "directory_rounds") >= 3, "some rounds")
        assert stat(rig.tier, "directory_engines") == 0
        assert not finds(rig, KEYS)()


def test_a_killed_engine_leaves(server: Server, tmp_path: Path) -> None:
    """An engine that cannot withdraw is removed when its lease ends; until then it costs the same as a dead peer."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with (
        Serving(tmp_path / "a", **options(server)) as one,
        Serving(tmp_path / "b", **options(server)),
        asking(server, slot_bytes=SERVED_BYTES, namespace=Namespace(FIELDS)) as rig,
    ):
        keys = [key_of(number) for number in range(8)]
        rig.until(lambda: stat(rig.tier, "directory_engines") == 2, "both engines")
        eventually(finds(rig, keys), what="the blocks")
        one.kill()
        rig.until(lambda: stat(rig.tier, "directory_engines") == 1, "the end of its lease")
        eventually(finds(rig, keys), what="the blocks of the other one")
        assert rig.load(keys).success
        one.start()
        rig.until(lambda: stat(rig.tier, "directory_engines") == 2, "its new lease")


def test_a_directory_that_is_down_at_start(server: Server) -> None:
    """Engines start without the directory, and find each other once it is up."""
    server.kill()
    with holder(server, KEYS), asking(server) as rig:
        rig.until(lambda: stat(rig.tier, "directory_failures") >= 2, "rounds that fail")
        begun = time.monotonic()
        assert rig.lookup(SPARE) is LookupResult.MISS
        assert time.monotonic() - begun < 5
        server.start()
        eventually(finds(rig, KEYS), what="the blocks")


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_directory_that_fails(server: Server, fault: str) -> None:
    """No call waits for it; known entries end with their leases, listed peers still work, and all recovers later."""
    with (
        holder(server, KEYS) as one,
        FakePeer(NAMESPACE, SLOT_BYTES) as fake,
        asking(server, peers=[fake.address]) as rig,
    ):
        fake.secret = SECRET.encode()
        fake.answer = lambda peer, sock, op, keys: sock.sendall(bytes(len(keys)))
        eventually(finds(rig, KEYS), what="the blocks")
        (server.kill if fault == "killed" else server.pause)()
        try:
            rig.until(lambda: stat(rig.tier, "directory_engines") == 0, "the end of the leases")
            asked = len(fake.questions)
            begun = time.monotonic()
            assert rig.lookup(SPARE) is LookupResult.MISS
            assert time.monotonic() - begun < 5
            assert len(fake.questions) > asked
        finally:
            (server.start if fault == "killed" else server.resume)()
        eventually(finds(rig, KEYS), what="the blocks, when the server is back")
        assert one.tier.stats().last_error == ""


def test_a_tier_closes_beside_a_stopped_directory(redis_only: Server) -> None:
    """Withdrawing takes no longer than a timeout."""
    with holder(redis_only, KEYS) as one:
        eventually(admin(redis_only).keys, what="its entry")
        redis_only.pause()
        begun = time.monotonic()
        one.tier.close()
        assert time.monotonic() - begun < 5
        redis_only.resume()


def test_garbage_in_the_directory(server: Server) -> None:
    """Invalid entries, and false or invalid summaries, cost only the read; valid ones are used."""
    client = admin(server)
    lies = summary_of(KEYS)
    dead = f"127.0.0.1:{free_port()}".encode()
    with (
        socket.create_server(("127.0.0.2", 0)) as outside,
        FakePeer(NAMESPACE, SLOT_BYTES) as stranger,
        holder(server, KEYS),
    ):
        outside.settimeout(0.5)
        stranger.secret = b"the secret of a stranger"
        addresses = [
            f"127.0.0.2:{outside.getsockname()[1]}".encode(),
            *[b"localhost:21000", b"metadata.internal:80", b"127.0.0.1:22", b"127.0.0.1:0", b"127.0.0.1:99999"],
            *[b"127.0.0.1", b"", b":", b"\xff\xfe:1", b"x" * 5000, b"[::1]:5000", b"0.0.0.0:5000", b"127.1:5000"],
            *[b"127.0.0.1:5000\r\nSET a b", b"2130706433:5000", b"::ffff:127.0.0.2:5000", b"127.0.0.1:5e3"],
            *[dead, stranger.address.encode()],
        ]
        client.write(Entry(address, lies, b"%016x" % number) for number, address in enumerate(addresses))
        # Valid addresses with invalid summaries.
        junk = [
            b"",
            b"\0",
            bytes(100),
            b"\x89kvsumm\n" + bytes(100),
            lies[:-1],
            b"x" * (SUMMARY_BYTES_MAX + 10**6),
            None,
        ]
        client.write(Entry(f"127.0.0.1:{free_port()}".encode(), data) for data in junk)
        with asking(server) as rig:
            # Each false summary costs one lookup at most: failing peers are skipped.
            eventually(finds(rig, KEYS), what="the blocks of the one engine that has them")
            assert rig.load(KEYS).success
            assert stat(rig.tier, "directory_entries_refused") > 10
            assert stat(rig.tier, "directory_failures") == 0
        with pytest.raises(TimeoutError):
            outside.accept()
        assert stranger.questions == []


def test_garbage_that_only_redis_takes(redis_only: Server) -> None:
    """A summary of another type, an overlong lease, and an entry without a version cost only the read."""
    client = admin(redis_only)
    of_another_type = f"127.0.0.1:{free_port()}".encode()
    client.write([Entry(of_another_type), Entry(b"127.0.0.1:5001", None, b"no version at all")])
    client.write([Entry(f"127.0.0.1:{free_port()}".encode(), seconds=10**6)])
    client.client.lpush(prefix_of() + of_another_type, b"x")
    with holder(redis_only, KEYS), asking(redis_only) as rig:
        eventually(finds(rig, KEYS), what="the blocks")
        assert stat(rig.tier, "directory_engines") == 2
        assert stat(rig.tier, "directory_entries_refused") >= 2
        assert stat(rig.tier, "directory_failures") == 0


def test_a_summary_that_was_missing_comes_back(redis_only: Server) -> None:
    """An engine whose summary had expired when it was read is read again, although the version is the same."""
    client = admin(redis_only)
    with FakePeer(NAMESPACE, SLOT_BYTES) as fake, asking(redis_only) as rig:
        fake.secret = SECRET.encode()
        fake.answer = lambda peer, sock, op, keys: sock.sendall(bytes(len(keys)))
        client.write([Entry(fake.address.encode())])
        rig.until(lambda: stat(rig.tier, "directory_summaries_read") >= 1, "a reading of the summary that is missing")
        assert rig.lookup(SPARE) is LookupResult.MISS
        assert not fake.questions
        client.write([Entry(fake.address.encode(), summary_of([SPARE]))])
        eventually(lambda: rig.lookup(SPARE) is LookupResult.MISS and fake.questions, what="a question to the engine")


def test_a_restarted_engine_is_known_by_its_later_entry(redis_only: Server) -> None:
    """A new summary is read although the entry of the engine's former process has not expired."""
    client = admin(redis_only)
    with FakePeer(NAMESPACE, SLOT_BYTES) as fake, asking(redis_only) as rig:
        fake.secret = SECRET.encode()
        address = fake.address.encode()
        client.write([Entry(address, summary_of(KEYS), b"f" * 16, seconds=100)])
        until_read(rig, 1)
        client.write([Entry(address, summary_of([SPARE]), b"0" * 16, seconds=200)])
        eventually(finds(rig, [SPARE]), what="a block of the new summary")


def test_an_engine_that_failed_is_tried_again(redis_only: Server) -> None:
    """After its pause, the blocks of an engine of the directory are found again."""

    def breaks_off(peer: FakePeer, sock: Wire, op: Op, keys: list[bytes]) -> None:
        raise EOFError

    with FakePeer(NAMESPACE, SLOT_BYTES) as fake, asking(redis_only) as rig:
        fake.secret, fake.answer = SECRET.encode(), breaks_off
        admin(redis_only).write([Entry(fake.address.encode(), summary_of(KEYS), seconds=200)])
        until_read(rig, 1)
        eventually(lambda: not finds(rig, KEYS)() and stat(rig.tier, "peers_down") == 1, what="a pause of the engine")
        fake.answer = honest
        eventually(finds(rig, KEYS), what="its blocks")


@pytest.mark.parametrize("is_there", [True, False])
def test_summaries_are_read_at_a_bounded_rate(redis_only: Server, *, is_there: bool) -> None:
    """Once the allowance of bytes is used up, no summary is read, whether or not there are any."""
    data = summary_of(KEYS) if is_there else None
    admin(redis_only).write([Entry(f"127.0.0.1:{free_port()}".encode(), data) for _ in range(20)])
    with asking(redis_only, backend="tests.peer.limited:NoFurtherSummaries") as rig:
        rig.until(lambda: stat(rig.tier, "directory_rounds") >= 4, "some rounds")
        assert stat(rig.tier, "directory_engines") == 20
        assert stat(rig.tier, "directory_summaries_read") == 8, "one batch"


def test_a_slow_server_spreads_the_summaries_over_rounds(redis_only: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round reads no further batch after its interval, so no round exceeds the time limit of its session."""
    read, began = directory._Server.read, list[float]()

    async def slow(self: Any, addresses: Any) -> Any:
        began.append(time.monotonic())
        await asyncio.sleep(0.3)  # The interval is 0.2 s.
        return await read(self, addresses)

    monkeypatch.setattr(directory._Server, "read", slow)
    admin(redis_only).write([Entry(f"127.0.0.1:{free_port()}".encode(), summary_of(KEYS)) for _ in range(20)])
    with asking(redis_only) as rig:
        until_read(rig, 20)
    assert len(began) >= 3
    pauses = [after - before for before, after in itertools.pairwise(began)]
    assert min(pauses) > 0.4, "the pause between two rounds is 0.16 s or longer"


def test_a_directory_of_another_type(redis_only: Server) -> None:
    """If the list of engines has another type, the directory is unusable; it works again once that key is removed."""
    client = admin(redis_only).client
    client.set(prefix_of() + b"engines", b"x")
    with holder(redis_only, KEYS), asking(redis_only) as rig:
        rig.until(lambda: stat(rig.tier, "directory_failures") >= 2, "rounds that fail")
        assert rig.lookup(SPARE) is LookupResult.MISS
        client.delete(prefix_of() + b"engines")
        eventually(finds(rig, KEYS), what="the blocks")


def test_an_endless_list_is_not_read(redis_only: Server, caplog: pytest.LogCaptureFixture) -> None:
    """A list longer than all entries can be is abandoned, and none of it is kept."""
    admin(redis_only).write(Entry(b"%05d" % number + b"x" * 10_000) for number in range(600))
    # The length must be the reason, not the timeout.
    with asking(redis_only, **options(redis_only, connect_timeout=20)) as rig:
        eventually(lambda: "a reply is longer" in caplog.text, what="a round that fails for that")
        assert rig.lookup(SPARE) is LookupResult.MISS


def test_a_thousand_engines(server: Server) -> None:
    """A real engine is found among a thousand fakes; concurrent reads are bounded, and two peers at most are used."""
    entries = []
    for number in range(1000):
        keys = [b"fake-%d-%d" % (number, block) for block in range(100)]
        entries.append(Entry(b"127.0.0.1:%d" % (10_000 + number), summary_of(keys), b"%016x" % number, 200))
    admin(server).write(entries)
    with holder(server, KEYS) as one, asking(server) as rig:
        rig.until(lambda: stat(rig.tier, "directory_engines") == 1001, "all of them")
        most = LIMITS.read_bytes_max + _READ_AT_ONCE * SUMMARY_BYTES_MAX
        assert stat(rig.tier, "directory_bytes_read") <= most
        rig.until(lambda: stat(rig.tier, "directory_summaries_read") >= 1001, "all summaries")
        eventually(finds(rig, KEYS), what="the blocks")
        assert rig.load(KEYS).success
        # An engine whose blocks no engine holds contacts none.
        opened = stat(rig.tier, "connections_opened") + stat(rig.tier, "connections_failed")
        assert rig.lookup(b"a block that no engine has") is LookupResult.MISS
        assert stat(rig.tier, "connections_opened") + stat(rig.tier, "connections_failed") == opened <= 20
        assert stat(one.tier, "directory_engines") == 1000


def test_more_engines_than_are_listed(redis_only: Server) -> None:
    """However many entries there are, the number of known engines is bounded."""
    entries = (Entry(b"127.0.0.1:%d" % (1024 + number), None, b"%016x" % number, 200) for number in range(3000))
    admin(redis_only).write(entries)
    with asking(redis_only) as rig:
        rig.until(lambda: stat(rig.tier, "directory_engines") > 0, "engines")
        assert stat(rig.tier, "directory_engines") == ENGINES_MAX


def test_a_crowd_of_false_entries_hides_no_known_engine(redis_only: Server) -> None:
    """An engine stays known while 2,500 others, listed before it, are written again and again."""
    client = admin(redis_only)
    crowd = [Entry(b"127.0.0.1:%d" % (1024 + number), None, b"%016x" % number, 30) for number in range(2500)]
    with FakePeer(NAMESPACE, SLOT_BYTES) as fake, asking(redis_only) as rig:
        fake.secret = SECRET.encode()
        fake.answer = lambda peer, sock, op, keys: sock.sendall(bytes(len(keys)))
        client.write([Entry(fake.address.encode(), summary_of(KEYS), seconds=200)])
        rig.until(lambda: stat(rig.tier, "directory_summaries_read") >= 1, "the engine")
        for _ in range(3):
            client.write(crowd)
            rounds = stat(rig.tier, "directory_rounds")
            rig.until(lambda rounds=rounds: stat(rig.tier, "directory_rounds") >= rounds + 5, "rounds")
            asked = len(fake.questions)
            assert [rig.lookup(key) for key in KEYS] == [LookupResult.MISS] * len(KEYS)
            assert len(fake.questions) > asked
        assert stat(rig.tier, "directory_engines") == ENGINES_MAX


@pytest.mark.parametrize(("first", "kind"), [("the engine", "tests.peer.limited:FewFound"), ("the crowd", "peer")])
def test_a_crowd_of_dead_engines_costs_no_hit(redis_only: Server, first: str, kind: str) -> None:
    """Once an engine is found, all its blocks are found, although dead ones claim them, more than are remembered."""
    false = [b"false-%d" % number for number in range(30)]
    port, claim = free_port(), summary_of([SPARE, *KEYS, *false])
    hosts = [f"127.{1 + number // 250}.0.{1 + number % 250}" for number in range(300)]
    crowd = [Entry(f"{host}:{port}".encode(), claim, seconds=200) for host in hosts]
    networks = {"directory": options(redis_only, networks=["127.0.0.0/8"])["directory"]}
    pauses = {"breaker_cooldown": 60, "breaker_cooldown_max": 60}
    with listed(redis_only, [SPARE, *KEYS]), asking(redis_only, backend=kind, **networks, **pauses) as rig:
        if first == "the engine":
            eventually(lambda: rig.lookup(SPARE) is LookupResult.HIT, 60, what="the block")
        admin(redis_only).write(crowd)
        until_read(rig, 301)
        eventually(lambda: rig.lookup(SPARE) is LookupResult.HIT, 60, what="the block")
        assert [rig.lookup(key) for key in KEYS[:15]] == [LookupResult.HIT] * 15
        assert [rig.lookup(key) for key in false] == [LookupResult.MISS] * len(false)
        assert [rig.lookup(key) for key in KEYS[15:]] == [LookupResult.HIT] * 15


def test_false_entries_delay_no_request(redis_only: Server) -> None:
    """After some failed queries of engines that have never answered, no lookup waits, and few silent ones are tried."""
    networks = {"directory": options(redis_only, networks=["127.0.0.0/8"])["directory"]}
    late = {"lookup_timeout": 600, "connect_timeout": 300, "breaker_cooldown": 60, "breaker_cooldown_max": 60}
    with socket.create_server(("0.0.0.0", 0), backlog=200) as silent, asking(redis_only, **networks, **late) as rig:
        port, free, claim = silent.getsockname()[1], free_port(), summary_of([SPARE, *KEYS[8:]])
        entries = [Entry(f"127.1.0.{host}:{free}".encode(), summary_of(KEYS[:8]), seconds=200) for host in range(1, 11)]
        entries += [Entry(f"127.2.0.{host}:{port}".encode(), claim, seconds=200) for host in range(1, 101)]
        admin(redis_only).write(entries)
        until_read(rig, 110)
        assert [rig.lookup(key) for key in KEYS] == [LookupResult.MISS] * len(KEYS)
        silent.setblocking(False)
        tried = []
        with contextlib.ExitStack() as stack, contextlib.suppress(BlockingIOError):
            while True:
                tried.append(stack.enter_context(silent.accept()[0]))
        assert 8 <= len(tried) <= 32


async def test_a_block_of_an_engine_that_was_not_queried_is_not_absent(redis_only: Server) -> None:
    """A block that only an engine seems to have that is tried in the background is neither there nor absent."""
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dead = [Entry(f"127.0.0.{host}:{port}".encode(), summary_of(KEYS), seconds=200) for host in range(1, 11)]
        other = Entry(f"127.0.0.1:{silent.getsockname()[1]}".encode(), summary_of([SPARE]), seconds=200)
        admin(redis_only).write([*dead, other])
        late = {"lookup_timeout": 600, "connect_timeout": 300, "breaker_cooldown": 60, "breaker_cooldown_max": 60}
        config = options(redis_only, networks=["127.0.0.0/8"]) | late
        backend = PeerBackend(decode_config(PeerConfig, config, where="peer tier"))
        await backend.open(NAMESPACE, RecordGeometry(256, SLOT_BYTES))
        try:
            async with asyncio.timeout(20):
                while backend.stats().counters["directory_summaries_read"] < 11:
                    await asyncio.sleep(0.01)
                rounds = backend.stats().counters["directory_rounds"]
                while backend.stats().counters["directory_rounds"] < rounds + 2:
                    await asyncio.sleep(0.01)
                for key in KEYS[:6]:
                    await backend.exists([key])
                assert await backend.exists([SPARE]) == [None]
        finally:
            await backend.close()


def test_dead_named_peers_do_not_hide_engines_of_the_directory(redis_only: Server) -> None:
    """An engine of the directory is queried by the first lookup, however many dead peers were named before."""
    named = {"request_peers": ["127.0.0.0/8:1024-65535"]}
    with listed(redis_only, KEYS), asking(redis_only, **named) as rig:
        for number in range(8):
            ctx = RequestContext(f"r{number}", source=Source(f"127.0.0.{2 + number}:{free_port()}"))
            assert rig.lookup(b"absent", ctx) is LookupResult.MISS
        until_read(rig, 1)
        assert rig.lookup(KEYS[0]) is LookupResult.HIT


def test_with_tls_and_the_least_rights(tmp_path: Path) -> None:
    """The rights in the operators' documentation suffice, and no key outside the prefix is written."""
    assert LEAST_ACL in PAGE.read_text()
    with running(secured(tmp_path, LEAST_ACL)) as (server,):
        more = {"username": "kv", "password": PASSWORD, "tls_ca": str(server.tls_ca), "connect_timeout": 10}
        config = options(server, **more)
        with holder(server, KEYS, **more), asking(server, **config) as rig:
            eventually(finds(rig, KEYS), what="the blocks")
            assert stat(rig.tier, "directory_failures") == 0


@pytest.mark.parametrize(
    ("directory", "says"),
    [
        ({}, "needs"),
        ({"url": "redis://a:1"}, "networks"),
        ({"url": "redis://a:1", "networks": []}, "networks"),
        ({"url": "redis://user:word@a:1", "networks": ["a"]}, "has a user or password"),
        ({"url": "redis://a:1", "networks": ["a"], "interval": 0}, "50 ms to 1 minute"),
        ({"url": "redis://a:1", "networks": ["a"], "prefix": "a b"}, "prefix"),
        ({"url": "redis://a:1", "networks": ["10.0.0.0/8"]}, "would not connect to 127.0.0.1:5710"),
        ({"url": "redis://a:1", "networks": ["10.0.0.0/8"], "host": "11.0.0.1"}, "would not connect to 11.0.0.1:5710"),
    ],
)
def test_unusable_directories_are_refused_with_a_remedy(directory: dict[str, Any], says: str) -> None:
    """An unusable directory prevents the start with an error that gives a remedy and shows no password."""
    with pytest.raises(ConfigError, match=says) as error:
        decode_config(
            PeerConfig, {"listen": "127.0.0.1:5710", "secret": SECRET, "directory": directory}, where="peer tier"
        )
    assert "word" not in str(error.value).replace("password", "")


@pytest.mark.parametrize("fault", ["http", "redirect", "endless", "silence", "noise"])
def test_a_server_that_is_no_redis(fault: str) -> None:
    """Whichever server listens there, a round fails in time and lookups continue."""
    answers = {
        "http": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        "redirect": b"HTTP/1.1 307 Go\r\nLocation: http://127.0.0.2:1/\r\nContent-Length: 0\r\n\r\n",
        "endless": b"HTTP/1.1 200 OK\r\n\r\n" + bytes(5 << 20),
        "silence": b"",
        "noise": b"\0\xff" * 5000,
    }
    with Wrong(answers[fault], closes=fault != "silence") as wrong:
        url = f"redis://127.0.0.1:{wrong.port}"
        directory = {"url": url, "networks": ["127.0.0.1"], "interval": "200ms", "connect_timeout": "500ms"}
        config = {"backend": "peer", "directory": directory, "secret": SECRET, "negative_ttl": "1ms"}
        with TierRig(config, namespace=NAMESPACE, slot_bytes=SLOT_BYTES, slots=4) as rig:
            rig.until(lambda: stat(rig.tier, "directory_failures") >= 2, "rounds that fail")
            assert rig.lookup(SPARE) is LookupResult.MISS


class Wrong:
    """Sends the same bytes to every client."""

    def __init__(self, answer: bytes, *, closes: bool) -> None:
        self._answer, self._closes = answer, closes
        self._kept: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listener.close()
        for sock in self._kept:
            sock.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._kept.append(sock)
                with contextlib.suppress(OSError):
                    sock.settimeout(5)
                    sock.recv(65536)
                    sock.sendall(self._answer)
                    if self._closes:
                        sock.shutdown(socket.SHUT_WR)


async def test_a_close_that_is_cancelled_ends_the_server() -> None:
    """While the directory does not answer, an engine whose close is cancelled stops listening and publishing."""
    with Wrong(b"", closes=False) as silent:
        address = f"127.0.0.1:{free_port()}"
        directory = {"url": f"redis://127.0.0.1:{silent.port}", "networks": ["127.0.0.1"], "connect_timeout": "60s"}
        config = {"listen": address, "secret": SECRET, "directory": directory}
        backend = PeerBackend(decode_config(PeerConfig, config, where="peer tier"))
        backend.set_lender(Records())  # type: ignore[arg-type]
        await backend.open(NAMESPACE, RecordGeometry(256, SLOT_BYTES))
        _, writer = await asyncio.open_connection(*address.split(":"))
        writer.close()
        close = asyncio.create_task(backend.close())
        await asyncio.wait({close}, timeout=0.2)
        assert not close.done()
        close.cancel()
        await asyncio.wait({close})
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address.split(":"))
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_backend_that_cannot_be_listed_is_listed_again(redis_only: Server) -> None:
    """Any exception of a backend costs one sample of its keys."""
    config = decode_config(PeerConfig, {"listen": f"127.0.0.1:{free_port()}", **options(redis_only)}, where="peer tier")
    scans = 0

    async def scan_keys() -> AsyncIterator[list[bytes]]:
        nonlocal scans
        scans += 1
        if scans < 3:
            raise OSError("one or the other")
        yield KEYS

    records = Records()
    listed = SimpleNamespace(config=config, scan_keys=scan_keys)
    records.backends = (listed,)  # type: ignore[assignment]
    backend = PeerBackend(config)
    backend.set_lender(records)  # type: ignore[arg-type]
    await backend.open(NAMESPACE, RecordGeometry(256, SLOT_BYTES))
    try:
        await eventually_async(lambda: scans >= 3, 60)
    finally:
        await backend.close()


async def test_an_unknown_kind_of_server() -> None:
    """The scheme of the URL selects the kind of server; an unknown one is named in the error."""
    config = decode_config(
        PeerConfig, {"secret": SECRET, "directory": {"url": "zookeeper://a:1", "networks": ["a"]}}, where="peer tier"
    )
    backend = PeerBackend(config)
    with pytest.raises(ConfigError, match=r"'zookeeper:…'\. Expected redis://"):
        await backend.open(NAMESPACE, RecordGeometry(256, 4096))
    await backend.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
