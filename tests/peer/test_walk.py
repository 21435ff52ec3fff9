"""Requests while peers are killed, stopped, restarted and send false data: no wrong bytes, no hang, full recovery."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

from kvstore.namespace import Namespace
from kvstore.testing.seeds import SEED_VARIABLE, fresh_seed
from kvstore.testing.tier_rig import TierRig
from kvstore.types import LookupResult, Outcome, RequestContext
from tests.peer.fake_peer import FakePeer, honest
from tests.peer.faults import BREAKS, LIES
from tests.peer.serving import FIELDS, SLOT_BYTES, SLOTS, Serving, key_of
from tests.sizes import sized

REQUESTS = sized(40, full=400)

LOOKUP_S, LOAD_S = 0.5, 1.0
SLACK_S = 10.0
"""Allowance for a busy machine before a request counts as hung."""


def test_a_walk(tmp_path: Path) -> None:
    """Every request ends by its deadlines, with the right bytes or none; in the end every block is found."""
    seed = fresh_seed()
    try:
        _walk(tmp_path, random.Random(seed))
    except BaseException as error:
        error.add_note(f"Repeat it with {SEED_VARIABLE}={seed}.")
        raise


def _walk(directory: Path, rng: random.Random) -> None:
    mischief = [honest, *LIES.values(), *BREAKS.values()]
    (directory / "one").mkdir()
    (directory / "two").mkdir()
    with (
        FakePeer(Namespace(FIELDS), SLOT_BYTES) as fake,
        Serving(directory / "one") as one,
        Serving(directory / "two") as two,
    ):
        config = {"backend": "peer", "peers": [fake.address, one.address, two.address], "negative_ttl": "1ms"}
        config |= {"lookup_timeout": LOOKUP_S, "load_timeout": LOAD_S, "timeout": "200ms", "connect_timeout": "200ms"}
        config |= {"breaker_cooldown": "20ms", "breaker_cooldown_max": "100ms", "positive_ttl": "50ms"}
        seen: Counter[str] = Counter()
        with TierRig(config, namespace=Namespace(FIELDS), slot_bytes=SLOT_BYTES, slots=8) as rig:
            states = {one: "well", two: "well"}
            for number in range(REQUESTS):
                if rng.random() < 0.3:
                    _change(rng.choice([one, two]), states, rng)
                if rng.random() < 0.3:
                    fake.answer = rng.choice(mischief)
                seen.update(_request(rig, number, rng))
            for peer, state in states.items():
                _heal(peer, state)
            fake.answer = honest
            fake.released.set()
            _until_all_is_well(rig)
    assert seen["ok"] and seen["not ok"], f"a walk in which nothing happened: {seen}"


def _request(rig: TierRig, number: int, rng: random.Random) -> list[str]:
    """Handle a request as an engine does; return the results of its blocks."""
    ctx = RequestContext(f"request-{number}")
    keys = [key_of(block) for block in rng.sample(range(SLOTS), rng.randrange(1, 8))]
    begun = time.monotonic()
    hits = [key for key in keys if rig.lookup(key, ctx) is LookupResult.HIT]
    # The rig compares every byte that is reported as loaded.
    outcomes = rig.load(hits, ctx).outcomes if hits else ()
    assert time.monotonic() - begun < len(keys) * LOOKUP_S + LOAD_S + SLACK_S, "a request hung"
    for slot in range(len(hits)):
        rig.fill(slot)
    rig.tier.on_request_finished(ctx)
    return ["ok" if outcome is Outcome.OK else "not ok" for outcome in outcomes]


def _change(peer: Serving, states: dict[Serving, str], rng: random.Random) -> None:
    if states[peer] != "well":
        _heal(peer, states[peer])
        states[peer] = "well"
    elif rng.random() < 0.5:
        peer.kill()
        states[peer] = "killed"
    else:
        peer.stop()
        states[peer] = "stopped"


def _heal(peer: Serving, state: str) -> None:
    if state == "killed":
        peer.start()
    elif state == "stopped":
        peer.go_on()


def _until_all_is_well(rig: TierRig) -> None:
    keys = [key_of(block) for block in range(8)]

    def all_load() -> bool:
        return all(rig.lookup(key) is LookupResult.HIT for key in keys) and rig.load(keys).success

    rig.timeout_s = 60.0
    rig.until(all_load, "all blocks to be found again")
