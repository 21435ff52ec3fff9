"""Many requests under each fault of a peer or directory: right bytes or a miss, in time, and no slot lost.

``KVSTORE_TEST_SIZE=full pytest -n 0 -s tests/peer/test_fault_requests.py`` makes a thousand of each and prints the
longest wait.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvstore.backends.peer import protocol
from kvstore.backends.peer.protocol import Note, Op, Welcome
from kvstore.backends.peer.summary import Sample, pack
from kvstore.namespace import Namespace
from kvstore.primary import PrimaryTier, Region
from kvstore.testing.seeds import SEED_VARIABLE, fresh_seed
from kvstore.testing.waiting import eventually
from kvstore.tiering import TieringConfig, TieringManager
from kvstore.tiers import open_tier
from kvstore.types import BlockKey, Found, LookupResult, RequestContext, Source
from tests.peer.directory_servers import Entry, RedisAdmin
from tests.peer.fake_peer import FakePeer, honest, part
from tests.peer.faults import BREAKS, LIES
from tests.peer.ports import free_port
from tests.peer.serving import FIELDS, SLOT_BYTES, SLOTS, Serving, key_of
from tests.peer.wire import Wire
from tests.redis.servers import plain, running
from tests.sizes import sized

pytestmark = [pytest.mark.timeout(3600), pytest.mark.torture]

REQUESTS = sized(10, full=1000)

DEADLINE_S = 2.1
"""Maximum wait of a request with default timeouts, plus a tenth of a second."""

SLACK_S = 10.0
"""Allowance for a busy machine before a request counts as hung."""

SECRET = "a secret of sixteen"
PRIMARY_SLOTS = 24
PAUSES = {"breaker_cooldown": "20ms", "breaker_cooldown_max": "200ms"}
"""Far shorter than the defaults, so that the faulty peer is contacted often."""


NAMED = {"request_peers": ["127.0.0.0/8:1024-65535"]}


class Engine:
    """An engine's manager over a peer tier with default timeouts; a small primary tier makes it reuse slots."""

    def __init__(self, *peers: str, **more: Any) -> None:
        self.region = Region.create(slots=PRIMARY_SLOTS, slot_bytes=SLOT_BYTES)
        self.primary = PrimaryTier(self.region.view(), SLOT_BYTES)
        ttl = {"positive_ttl": "50ms", "negative_ttl": "1ms"}
        ttl |= more
        self.tier = open_tier(
            {"backend": "tests.peer.limited:Forgiving", "peers": list(peers), **NAMED, **ttl, **PAUSES},
            primary=self.region.view(),
            slot_bytes=SLOT_BYTES,
            namespace=Namespace(FIELDS),
        )
        self.manager = TieringManager(self.primary, [self.tier], TieringConfig(promotion_share=1.0))

    def serve(self, ctx: RequestContext, keys: list[BlockKey]) -> tuple[list[BlockKey], float]:
        """Handle a request as vLLM does; return the loaded blocks, and the seconds until they were known."""
        begun = time.monotonic()
        self.manager.on_new_request(ctx, keys)
        while True:
            answers = {key: self.manager.lookup(key, ctx) for key in keys}
            if set(answers.values()) <= {LookupResult.HIT, LookupResult.MISS}:
                break
            self.manager.on_step_end()
            assert time.monotonic() - begun < DEADLINE_S + SLACK_S, f"the request hangs: {answers}"
            time.sleep(0.0005)
        seconds = time.monotonic() - begun
        hits = [key for key, answer in answers.items() if answer is LookupResult.HIT]
        slots = self.manager.prepare_load(hits, ctx)
        assert slots is not None
        for key, slot in zip(hits, slots, strict=True):
            self.prove(key, slot)
        self.manager.complete_load(hits, ctx)
        # Slots of failed loads are filled with other blocks at once.
        plan = self.manager.prepare_store([key for key in keys if key not in hits], ctx)
        for key, slot in zip(plan.keys, plan.slots, strict=True) if plan else ():
            with self.primary.row(slot) as row:
                row[:] = payload(key)
        if plan:
            self.manager.complete_store(plan.keys, ctx)
        self.manager.on_request_finished(ctx)
        self.manager.on_step_end()
        return hits, seconds

    def prove(self, key: BlockKey, slot: int) -> None:
        """Compare every byte of a block."""
        with self.primary.row(slot) as row:
            assert bytes(row) == payload(key), f"wrong bytes for {key!r}"

    def prove_all(self) -> None:
        """Compare all blocks in memory, and check that no slot is pinned, lost or being written."""

        def idle() -> bool:
            self.manager.on_step_end()
            return not self.manager.has_pending_work

        eventually(idle, 20, what="the end of all loads")
        stats = self.primary.stats()
        assert (stats.pinned, stats.abandoned, stats.writing) == (0, 0, 0)
        keys = self.primary.keys()
        for key in keys:
            slot = self.primary.slot_of(key)
            assert slot is not None
            self.prove(key, slot)

    def close(self) -> None:
        """End it."""
        assert self.manager.close()
        self.primary.close()
        self.region.close()


def payload(key: BlockKey) -> bytes:
    """Return the bytes of a block."""
    return random.Random(key).randbytes(SLOT_BYTES)


def announcing(then: Callable[..., None]) -> Callable[..., None]:
    """Answer every other lookup with "all blocks are coming", and do something else in between."""
    lookups = itertools.count()

    def answer(peer: FakePeer, sock: Wire, op: Op, keys: list[bytes]) -> None:
        if op is Op.LOOKUP and next(lookups) % 2 == 0:
            sock.sendall(bytes([Found.COMING]) * len(keys))
        elif op is Op.HAND_OVERS:
            sock.sendall(bytes(len(keys)))
        else:
            then(peer, sock, op, keys)

    return answer


def one_bit(peer: FakePeer, sock: Wire, op: Op, keys: list[bytes]) -> None:
    """Flip one random bit of the answer."""
    if op is Op.LOOKUP:
        honest(peer, sock, op, keys)
        return
    frames = [bytearray(part(peer.record(key))) for key in keys]
    data = random.choice(frames)
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    for frame in frames:
        sock.sendall(frame)


def version(number: int) -> Callable[[socket.socket], None]:
    """Greet with another protocol version."""
    greeting = bytearray(protocol.pack_welcome(Welcome(bytes(32), Note(0))))
    greeting[8] = number

    def greets(sock: socket.socket) -> None:
        sock.sendall(greeting)

    return greets


def silent(sock: socket.socket) -> None:
    """Accept and never send anything, as a vanished host does."""
    sock.recv(80)
    sock.recv(1)


FAKES: dict[str, dict[str, Any]] = {
    **{name: {"answer": answer} for name, answer in {**LIES, **BREAKS}.items()},
    "one bit": {"answer": one_bit},
    "half-open": {"greets": silent},
    "older version": {"greets": version(2)},
    "newer version": {"greets": version(4)},
    "wrong secret": {"secret": b"another secret of fakes"},
    "coming, then closed": {"answer": announcing(BREAKS["early close"]), "coming": True},
    "coming, then silent": {"answer": announcing(BREAKS["stall"]), "coming": True},
}


@pytest.mark.parametrize("fault", FAKES)
def test_requests_beside_a_peer_that_misbehaves(fault: str, tmp_path: Path) -> None:
    """Faults of the protocol or of the bytes."""
    fields = dict(FAKES[fault])
    coming = fields.pop("coming", False)
    with FakePeer(Namespace(FIELDS), SLOT_BYTES) as fake, Serving(tmp_path) as healthy:
        for name, value in fields.items():
            setattr(fake, name, value)
        source = Source(fake.address, b"r") if coming else None
        # A request that waits for announced blocks is resumed after the pause of failed blocks.
        more = {"negative_ttl": "5s"} if coming else {}
        engine = Engine(healthy.address, fake.address, **more)
        run(fault, engine, lambda number, rng: None, source=source)


@pytest.mark.parametrize("fault", ["killed", "stopped", "restarted"])
def test_requests_beside_a_peer_that_fails(fault: str, tmp_path: Path) -> None:
    """Faults of the process."""
    with ExitStack() as stack:
        for name in ("healthy", "faulty"):
            (tmp_path / name).mkdir()
        healthy = stack.enter_context(Serving(tmp_path / "healthy"))
        faulty = stack.enter_context(Serving(tmp_path / "faulty"))
        stack.callback(faulty.go_on)  # Killing also works on a stopped process; resuming it ends the wait for its exit.
        state = {"down": False}

        def act(number: int, rng: random.Random) -> None:
            if number % max(5, REQUESTS // 10) != 4:
                return
            if fault == "stopped":
                (faulty.go_on if state["down"] else faulty.stop)()
            elif fault == "restarted":
                faulty.kill()
                faulty.start()
            elif not state["down"]:
                faulty.kill()
            else:
                faulty.start()
            state["down"] = not state["down"]

        run(fault, Engine(healthy.address, faulty.address), act)
        if fault == "killed" and state["down"]:
            faulty.start()


@pytest.mark.smoke
def test_requests_while_peers_fail_in_all_ways(tmp_path: Path) -> None:
    """A peer whose answers change at random, beside two that are killed, stopped and started again."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with (
        FakePeer(Namespace(FIELDS), SLOT_BYTES) as fake,
        Serving(tmp_path / "one") as one,
        Serving(tmp_path / "two") as two,
        ExitStack() as stack,
    ):
        ill: dict[Serving, Callable[[], None]] = {}  # How to mend each peer that fails.
        stack.callback(lambda: [mend() for mend in ill.values()])

        def act(number: int, rng: random.Random) -> None:
            if rng.random() < 0.3:
                peer = rng.choice([one, two])
                if mend := ill.pop(peer, None):
                    mend()
                else:
                    fail, ill[peer] = rng.choice([(peer.kill, peer.start), (peer.stop, peer.go_on)])
                    fail()
            if rng.random() < 0.3:
                fake.answer = rng.choice([honest, *LIES.values(), *BREAKS.values()])

        def mend_all() -> None:
            while ill:
                ill.popitem()[1]()
            fake.answer = honest
            fake.released.set()

        run("mixed", Engine(fake.address, one.address, two.address), act, mend=mend_all, requests=4 * REQUESTS)


@pytest.mark.parametrize("fault", ["killed", "stopped", "wrong"])
def test_requests_beside_a_directory_that_fails(fault: str, tmp_path: Path) -> None:
    """Faults of the directory server, or false and invalid entries."""
    with (
        running(plain("redis", tmp_path / "server")) as (server,),
        FakePeer(Namespace(FIELDS), SLOT_BYTES) as liar,
        contextlib.closing(RedisAdmin(server, Namespace(FIELDS))) as admin,
    ):
        liar.secret, liar.answer = SECRET.encode(), one_bit
        directory = {"url": server.url, "networks": ["127.0.0.1"], "interval": "200ms", "connect_timeout": "500ms"}
        options = {"secret": SECRET, "directory": directory}
        sample = Sample()
        sample.add([key_of(block) for block in range(2 * SLOTS)])
        lies = pack([sample.section()])
        state = {"down": False}

        def toggle() -> None:
            if fault == "killed":
                (server.start if state["down"] else server.kill)()
            else:
                (server.resume if state["down"] else server.pause)()
            state["down"] = not state["down"]

        def act(number: int, rng: random.Random) -> None:
            if number % max(5, REQUESTS // 10) != 4:
                return
            if fault != "wrong":
                toggle()
                return
            dead = b"127.0.0.1:%d" % free_port()
            admin.write(
                [
                    Entry(liar.address.encode(), lies, b"%016x" % number),
                    Entry(dead, lies, b"%016x" % number, 3),
                    Entry(rng.randbytes(20), lies),
                    Entry(b"127.0.0.1:%d" % rng.randrange(1024, 65536), rng.randbytes(500), b"%016x" % number, 3),
                ]
            )

        with Serving(tmp_path, **options) as healthy:
            engine = Engine(**options)

            def is_found() -> bool:
                return bool(engine.serve(RequestContext(f"first-{random.random()}"), [key_of(0)])[0])

            eventually(is_found, what="the peer, by the directory")
            run(f"directory, {fault}", engine, act, mend=lambda: toggle() if state["down"] else None)
            assert healthy.address


def run(
    fault: str,
    engine: Engine,
    act: Callable[[int, random.Random], None],
    *,
    source: Source | None = None,
    mend: Callable[[], None] = lambda: None,
    requests: int = REQUESTS,
) -> None:
    """Make the requests, verify all bytes, and print a line; ``mend`` ends the fault, if needed."""
    seed = fresh_seed()
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    slowest, over = 0.0, 0
    try:
        for number in range(requests):
            act(number, rng)
            fields = {"source": source, "since": time.monotonic(), "patience_s": 60.0} if source else {}
            keys = [key_of(block) for block in rng.sample(range(2 * SLOTS), rng.randrange(1, 8))]
            hits, seconds = engine.serve(RequestContext(f"request-{number}", **fields), keys)
            seen.update(loaded=len(hits), computed=len(keys) - len(hits))
            slowest, over = max(slowest, seconds), over + (seconds > DEADLINE_S)
        engine.prove_all()
        mend()

        def all_found() -> bool:
            blocks = rng.sample(range(SLOTS), 6)
            hits, _ = engine.serve(RequestContext(f"last-{rng.random()}"), [key_of(block) for block in blocks])
            return len(hits) == len(blocks)

        eventually(all_found, 60, what="the blocks of the other peer")
        engine.prove_all()
    except BaseException as error:
        error.add_note(f"Repeat it with {SEED_VARIABLE}={seed}.")
        raise
    finally:
        engine.close()
    counts = f"{seen['loaded']} blocks loaded, {seen['computed']} computed"
    print(f"\n{fault}: {requests} requests, {counts}, slowest {slowest:.2f} s, {over} over {DEADLINE_S} s, seed {seed}")
    assert seen["loaded"], "no block was loaded"
