"""A service with every fault we know: no wrong bytes, no hanging job, and each cause under its name."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import pytest

from kvstore.testing.tier_rig import TierRig
from kvstore.types import BlockKey, Outcome
from tests.s3.clients import EACH_CLIENT, NAMESPACE, options_for
from tests.s3.fault_server import Fault, FaultServer
from tests.sizes import sized

SLOTS: Final = 64
BLOCKS_PER_JOB: Final = 16
REQUESTS: Final = sized(SLOTS, full=1024)
RETRIES: Final = 10
"""Retries that a client may make beyond a tenth of its requests."""
DEADLINE_S: Final = 30.0
SLOW_S: Final = 1.0
"""Time for one attempt if a fault makes requests wait for it."""
SLACK_S: Final = 20.0
"""A job ends at its deadline; the rest is allowance for a busy machine, while a hanging job would never end."""

NEVER_WRITTEN: Final = (
    *(Fault.REFUSED, Fault.RESET_BEFORE, Fault.RESET_AFTER, Fault.BLACK_HOLE, Fault.INTERNAL, Fault.SLOW_DOWN),
    *(Fault.FORBIDDEN, Fault.REDIRECT, Fault.GARBAGE),
)
"""Faults under which no store can succeed."""

SLOW: Final = (Fault.TRICKLE, Fault.BLACK_HOLE)

CAUSES: Final = {
    Fault.REFUSED: {"failed_refused", "failed_reset"},
    Fault.RESET_BEFORE: {"failed_reset"},
    # The reset may also come while the body of a PUT is being sent.
    Fault.RESET_AFTER: {"failed_cut", "failed_reset"},
    Fault.CUT: {"failed_cut"},
    Fault.TRICKLE: {"failed_timeout"},
    Fault.BLACK_HOLE: {"failed_timeout"},
    Fault.DECLARES_MORE: {"failed_length", "fault_length"},
    Fault.DECLARES_LESS: {"fault_length", "connections_dirty"},
    Fault.SHORT_OBJECT: {"fault_length"},
    Fault.LONG_OBJECT: {"failed_length", "fault_length"},
    Fault.FLIPPED: {"fault_payload", "fault_header"},
    Fault.DUPLICATED: {"connections_dirty"},
    Fault.INTERNAL: {"failed_server_error"},
    Fault.SLOW_DOWN: {"failed_slow_down"},
    Fault.FORBIDDEN: {"failed_forbidden"},
    Fault.NOT_FOUND: {"load.miss"},
    Fault.PRECONDITION: {"failed_rejected"},
    Fault.NOT_MODIFIED: {"failed_redirect"},
    Fault.BAD_RANGE: {"failed_range", "fault_length"},
    Fault.OTHER_RANGE: {"failed_protocol"},
    Fault.XML_ERROR: {"failed_xml_error"},
    Fault.REDIRECT: {"failed_redirect"},
    Fault.GARBAGE: {"failed_protocol"},
}
"""Counters of each fault."""

AIOBOTO3_CAUSES: Final = {
    # aiohttp refuses an answer together with the surplus bytes, unless these arrive later.
    Fault.DECLARES_LESS: {"failed_protocol", "fault_length"},
    Fault.DUPLICATED: {"failed_protocol", "requests_get"},
    # Its calls take so long that jobs may end before attempts do.
    Fault.TRICKLE: {"failed_timeout", "given_up"},
    Fault.BLACK_HOLE: {"failed_timeout", "given_up"},
}
"""Differences for aioboto3."""

READ_AGAIN: Final = (Fault.DECLARES_LESS, Fault.SHORT_OBJECT, Fault.FLIPPED)
"""Faults that damage a record: the record is read once more before it is deleted."""


def options(faults: FaultServer, client: str, **more: Any) -> dict[str, Any]:
    """Return the configuration of a tier with short deadlines and without a breaker."""
    base = {"backend": "s3", "client": client, "timeout": 20, "connect_timeout": 20, "concurrency": SLOTS}
    times = {"load_timeout": DEADLINE_S, "store_timeout": DEADLINE_S, "breaker_failures": 10**6}
    return options_for(faults) | base | times | more


@pytest.fixture
def keys(rng: random.Random) -> list[BlockKey]:
    """Return keys for all slots."""
    return [rng.randbytes(32) for _ in range(SLOTS)]


def load_all(rig: TierRig, keys: list[BlockKey]) -> Counter[str]:
    """Load all blocks by several jobs, verify the loaded ones, and count the outcomes."""
    jobs = []
    for start in range(0, SLOTS, BLOCKS_PER_JOB):
        slots = range(start, start + BLOCKS_PER_JOB)
        part = keys[start : start + BLOCKS_PER_JOB]
        jobs.append((rig.submit_load(part, slots), part, slots))
    outcomes: Counter[str] = Counter()
    for job_id, part, slots in jobs:
        result = rig.finish(job_id)
        rig.prove(result, part, slots)
        assert result.seconds < DEADLINE_S + SLACK_S
        outcomes.update(outcome.name for outcome in result.outcomes)
    return outcomes


def counters(rig: TierRig, *more: str) -> Counter[str]:
    """Return the counted failures of a tier, by cause."""
    rig.until(lambda: rig.tier.stats().backend_counters, "statistics")
    stats = rig.tier.stats()
    own = ("failed_", "connections_dirty", "requests_get", "given_up", *more)
    found = Counter({name: count for name, count in stats.backend_counters.items() if name.startswith(own)})
    found.update({f"fault_{name}": count for name, count in stats.faults.items()})
    found.update({name: count for name, count in stats.outcomes.items() if name == "load.miss"})
    return found


@pytest.fixture(params=EACH_CLIENT)
def client(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the name of each client."""
    yield request.param


@pytest.mark.parametrize("fault", CAUSES)
def test_many_requests(faults: FaultServer, client: str, fault: Fault, keys: list[BlockKey]) -> None:
    """Many requests with each fault: no wrong byte, no hanging job, the fault's own counter, few retries."""
    config = options(faults, client, **({"timeout": SLOW_S, "load_timeout": 3 * SLOW_S} if fault in SLOW else {}))
    with TierRig(config, namespace=NAMESPACE, slot_bytes=4096, slots=SLOTS, timeout_s=60) as rig:
        rig.until(lambda: rig.store(keys).success, "blocks to be stored")
        outcomes: Counter[str] = Counter()
        attempts = 0
        for _ in range(REQUESTS // SLOTS):
            # Blocks found damaged have been deleted.
            faults.plan(fault, methods=("GET",))
            before = faults.counts().get("GET", 0)
            outcomes += load_all(rig, keys)
            attempts += faults.counts().get("GET", 0) - before
            faults.plan(None)
            rig.store(keys)
        faults.plan(fault)
        if fault in NEVER_WRITTEN:
            result = rig.finish(rig.submit_store([key[::-1] for key in keys]))
            assert not any(outcome is Outcome.OK for outcome in result.outcomes)
        faults.plan(None)
        own = (AIOBOTO3_CAUSES if client == "aioboto3" else {}).get(fault) or CAUSES[fault]
        rig.until(lambda: sum(counters(rig)[name] for name in own) >= REQUESTS * 0.9, f"{own}; {counters(rig)}")
        others = Counter(
            {name: count for name, count in counters(rig).items() if name not in {*own, "requests_get", "given_up"}}
        )
        assert others.total() <= REQUESTS * 0.1, others
        assert attempts <= REQUESTS * (2.1 if fault in READ_AGAIN else 1.1) + RETRIES
        assert faults.counts().get("trapped", 0) == 0, "a redirect was followed"
        if fault is Fault.DUPLICATED:
            assert outcomes["OK"] == REQUESTS or client == "aioboto3", outcomes
        else:
            assert not outcomes["OK"], outcomes
        # Blocks not considered damaged are still there; with short deadlines, a busy machine may miss one.
        left: list[Counter[str]] = []
        rig.until(lambda: left.append(load_all(rig, keys)) or set(left[-1]) <= {"OK", "MISS"}, f"blocks: {left}")
        print(f"{fault} {client}: {dict(outcomes)}, {attempts} attempts, {dict(counters(rig))}")


@pytest.mark.parametrize("fault", SLOW)
def test_jobs_end_at_their_deadline(faults: FaultServer, client: str, fault: Fault, keys: list[BlockKey]) -> None:
    """Jobs end by their deadline even if attempts may take longer, and no slot is written late."""
    config = options(faults, client, timeout=60, load_timeout=0.5)
    with TierRig(config, namespace=NAMESPACE, slot_bytes=4096, slots=SLOTS, timeout_s=60) as rig:
        rig.until(lambda: rig.store(keys).success, "blocks to be stored")
        faults.plan(fault)
        assert load_all(rig, keys) == {"TIMEOUT": SLOTS}
        late_s = max(result.seconds for result in rig.results.values()) - 0.5
        for slot in range(SLOTS):
            rig.fill(slot)
        faults.plan(None)
        # Abandoned by the job's deadline or by the request's own, which is the same.
        rig.until(lambda: counters(rig, "given_up").total() >= SLOTS, "counts of what was given up")
        assert rig.untouched(range(SLOTS))
        print(f"{fault} {client}: the last of {SLOTS} requests was given up {late_s * 1000:.0f} ms after its deadline")


@pytest.mark.parametrize("fault", [Fault.INTERNAL, Fault.BLACK_HOLE, Fault.REFUSED])
def test_breaker(faults: FaultServer, client: str, fault: Fault, keys: list[BlockKey]) -> None:
    """A failing service is soon no longer used, costs nothing meanwhile, and is used again soon after its recovery."""
    times = {"timeout": 0.3, "load_timeout": 0.6, "lookup_timeout": 0.5}
    config = options(faults, client, breaker_failures=5, **times)
    with TierRig(config, namespace=NAMESPACE, slot_bytes=4096, slots=SLOTS, timeout_s=60) as rig:
        rig.until(lambda: rig.store(keys[:8]).success, "blocks to be stored")
        faults.plan(fault)
        began = time.monotonic()

        def fails_on() -> bool:
            for job_id in [rig.submit_load([keys[slot]], [slot]) for slot in range(8)]:
                rig.finish(job_id)
            return rig.tier.stats().load_breaker != "closed"

        rig.until(fails_on, "the breaker to open")
        opened_s = time.monotonic() - began
        before, began = faults.attempts, time.monotonic()
        for number in range(1000):
            assert rig.finish(rig.submit_load([keys[number % 8]])).success is False
        # Only probes, of three attempts at most, after a second, two more, four more and so on.
        probes = 2 + math.log2(1 + time.monotonic() - began)
        assert faults.attempts - before <= 3 * probes
        faults.plan(None)
        began = time.monotonic()
        rig.until(lambda: rig.tier.stats().load_breaker == "closed", "the breaker to close")
        closed_s = time.monotonic() - began
        rig.until(lambda: rig.load(keys[:8]).success, "blocks to be loaded again")
        print(f"{fault} {client}: opened after {opened_s:.2f} s, closed {closed_s:.2f} s after recovery")
