"""A manager with a gate: simulated tiers and engine of given speeds, and a clock controlled by the test."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.tiering.gate import GateCounts
from kvstore.types import LookupResult, MissCause, RequestContext
from tests.sizes import sized
from tests.tiering.engine import Engine, key_of
from tests.tiering.fake_tier import FakeTier, payload

STEP_S = 0.002
BLOCK = 16
TOKEN_S = 0.001
"""Time to compute a token: 16 ms a block."""


class Speed:
    """Ends the jobs of a fake tier as a medium of this speed would, one after another."""

    def __init__(self, tier: FakeTier, fixed_s: float, block_s: float) -> None:
        self.tier = tier
        self.fixed_s = fixed_s  # Fixed time of a load.
        self.block_s = block_s  # Time per block.
        self.stalled_until = 0.0  # No load ends before this time.
        self._free_at = 0.0
        self._seen: set[int] = set()
        self._ends: list[tuple[float, int]] = []

    def run(self, now: float) -> None:
        """Run the jobs that have ended by now."""
        for is_load, job in self.tier.open:
            if job.job_id not in self._seen:
                self._seen.add(job.job_id)
                self._free_at = max(self._free_at, now) + self.block_s * len(job.keys)
                heapq.heappush(self._ends, (self._free_at + self.fixed_s if is_load else now, job.job_id))
        while self._ends and self._ends[0][0] <= now and now >= self.stalled_until:
            _, job_id = heapq.heappop(self._ends)
            places = [place for place, (_, job) in enumerate(self.tier.open) if job.job_id == job_id]
            if places:  # Otherwise a reset has run it.
                self.tier.run(1, index=places[0])


class Gated(Engine):
    """An engine with steps of ``STEP_S`` and a known computing speed."""

    def __init__(self, *speeds: tuple[float, float], slots: int = 512, **options: Any) -> None:
        super().__init__(slots, [f"tier{i}" for i in range(len(speeds))], **options)
        self.speeds = [Speed(tier, *speed) for tier, speed in zip(self.tiers, speeds, strict=True)]
        self._last = 0

    def blocks(self, *held: int) -> list[bytes]:
        """Return new keys; each argument is the number of keys that the respective tier holds."""
        keys = [key_of(self._last + number) for number in range(sum(held))]
        self._last += len(keys)
        rest = iter(keys)
        for tier, count in zip(self.tiers, held, strict=True):
            for _ in range(count):
                key = next(rest)
                tier.blocks[key] = payload(key)
        return keys

    def tick(self) -> None:
        """Run a step."""
        self.manager.on_step_end()
        self.clock.now += STEP_S
        for speed in self.speeds:
            speed.run(self.clock.now)

    def learn(self, requests: int = 12) -> None:
        """Measure the tiers' speeds by loading from them, and then the computing speed."""
        for number in range(requests):
            for place in range(len(self.tiers)):
                held = [0] * len(self.tiers)
                held[place] = 1 + 7 * number % 40
                self.serve(self.blocks(*held))
        self.rest()
        self.learn_computing()

    def learn_computing(self) -> None:
        """Measure the computing speed."""
        for tokens in (256, 512, 1024):
            self.manager.note_step([(tokens, 0)], TOKEN_S * tokens)

    def rest(self) -> None:
        """Let all I/O end."""
        while self.manager.has_pending_work:
            self.tick()

    def begin(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> RequestContext:
        """Start a request with known blocks."""
        ctx = ctx or self.request()
        self.manager.set_keys(ctx, keys, ends=range(BLOCK, BLOCK * len(keys) + 1, BLOCK))
        return ctx

    def prefix(self, keys: Sequence[bytes], ctx: RequestContext) -> int | None:
        """Return the number of leading blocks that can be loaded now; None to look up again later, as in vLLM."""
        hits, deferred = 0, False
        for key in keys:
            answer = self.manager.lookup(key, ctx)
            if answer is LookupResult.MISS:
                break
            deferred |= answer is not LookupResult.HIT
            hits += answer is not LookupResult.RETRY
        return None if deferred else hits

    def serve(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> tuple[float, int]:
        """Serve a request; return the time until its prefix is ready, and the number of loaded blocks."""
        ctx, began = self.begin(keys, ctx), self.clock.now
        while (hits := self.prefix(keys, ctx)) is None:
            self.tick()
        if hits:
            slots = self.manager.prepare_load(keys[:hits], ctx)
            assert slots is not None
            assert [bytes(self.primary.row(slot)) for slot in slots] == [payload(key) for key in keys[:hits]]
            self.manager.complete_load(keys[:hits], ctx)
        waited_s, computed = self.clock.now - began, len(keys) - hits
        if computed:
            self.manager.prepare_store([], ctx)
            self.compute(BLOCK * computed, BLOCK * hits)
        self.manager.on_request_finished(ctx)
        return waited_s + TOKEN_S * BLOCK * computed, hits

    def compute(self, tokens: int, context: int) -> None:
        """Let the time of a computation pass, with a step about every 50 ms."""
        seconds = TOKEN_S * tokens
        self.manager.note_step([(tokens, context)], seconds)
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.manager.on_step_end()
            self.clock.now = min(end, self.clock.now + 0.05)
            for speed in self.speeds:
                speed.run(self.clock.now)

    @property
    def counts(self) -> GateCounts:
        return self.manager.stats().gate


def test_a_fast_tier_is_loaded_and_a_slow_one_is_not() -> None:
    """Requests take no longer than the better of loading and computing, plus the slack of a first measurement."""
    for fixed_s, block_s, loads in ((0.001, 0.001, True), (0.02, 0.004, True), (0.5, 0.05, False), (0.0, 0.1, False)):
        engine = Gated((fixed_s, block_s))
        engine.learn()
        for count in (20, 40, 60):
            seconds, hits = engine.serve(engine.blocks(count))
            best = min(fixed_s + block_s * count, TOKEN_S * BLOCK * count)
            assert seconds <= 1.05 * best + 3 * STEP_S, (fixed_s, block_s, count)
            assert hits == (count if loads else 0)
        counts = engine.counts
        assert (counts.loaded, counts.recomputed) == ((120, 0) if loads else (0, 120))
        assert counts.saved_s > 0 if loads else counts.saved_s == counts.lost_s == 0


def test_a_load_saves_the_time_to_compute_all_its_blocks() -> None:
    """The time saved is that of computing every loaded token, less the wait for them."""
    engine = Gated((0.001, 0.001))
    engine.learn()
    before = engine.counts.saved_s
    seconds, hits = engine.serve(engine.blocks(40))
    assert hits == 40
    assert engine.counts.saved_s - before == pytest.approx(TOKEN_S * BLOCK * 40 - seconds, rel=0.05)


def test_blocks_that_are_not_loaded_count_as_misses_of_the_gate() -> None:
    """A request counts the tier's blocks if computing them is faster, or if their load is abandoned."""
    engine = Gated((0.0, 0.08))
    engine.learn()
    before = engine.manager.stats().missed["tier0"].get(MissCause.GATE, 0)
    assert engine.serve(engine.blocks(40))[1] == 0
    assert engine.manager.stats().missed["tier0"][MissCause.GATE] - before == 40
    stalled = Gated((0.002, 0.002))
    stalled.learn()
    stalled.speeds[0].stalled_until = stalled.clock.now + 60
    assert stalled.serve(stalled.blocks(20))[1] == 0
    assert stalled.manager.stats().missed["tier0"] == {MissCause.LATE: 20}


@pytest.mark.parametrize("begins", ["scheduled", "stores", "ends"])
def test_computing_is_worse_the_more_requests_wait(begins: str) -> None:
    """A load of five times the computing time is worth it if many requests wait, but not for one alone."""
    engine = Gated((0.0, 0.08))
    engine.learn()
    others = [engine.request() for _ in range(9)]
    keys = engine.blocks(10)
    ctx = engine.begin(keys)
    assert engine.prefix(keys, ctx) is None, "it is loaded"
    engine.manager.on_request_finished(ctx)
    engine.rest()
    for other in others:
        if begins == "scheduled":
            engine.manager.on_step_end([other.request_id])
        elif begins == "stores":
            engine.manager.prepare_store([], other)
        else:
            engine.manager.on_request_finished(other)
    alone = engine.blocks(10)
    assert engine.prefix(alone, engine.begin(alone)) == 0, "it is computed"
    assert len(engine.parts.requests.waiting) == 1


def test_a_request_that_computes_already_counts_itself() -> None:
    """A scheduled request that looks up blocks again still loads those that are faster than computing."""
    engine = Gated((0.0, 0.001))
    engine.learn()
    keys = engine.blocks(10)
    ctx = engine.begin(keys)
    engine.manager.on_step_end([ctx.request_id])
    assert not engine.parts.requests.waiting
    assert engine.prefix(keys, ctx) is None, "it is loaded"
    assert engine.counts.recomputed == 0


def test_ended_request_does_not_count_as_waiting() -> None:
    """An ended request does not count as waiting, even if a tier has not reported its load."""
    engine = Gated((1000.0, 0.0))
    keys = engine.blocks(10)
    ctx = engine.begin(keys)
    assert engine.prefix(keys, ctx) is None
    engine.tick()
    engine.manager.on_request_finished(ctx)
    assert len(engine.parts.requests) == 1 and not engine.parts.requests.waiting


def test_an_unmeasured_slow_tier_costs_little() -> None:
    """A tier that is slow from the start delays only the requests that measure it, and only by the slack."""
    engine = Gated((2.0, 0.2))
    engine.learn_computing()
    lost = [engine.serve(engine.blocks(20))[0] - 20 * BLOCK * TOKEN_S for _ in range(60)]
    assert max(lost) < 0.3
    assert sum(one > STEP_S for one in lost) <= 3
    assert engine.counts.lost_s > 0


def test_a_stall_costs_a_request_little() -> None:
    """During a stall of 5 s no request loses 0.3 s; arrived blocks are used; then loads resume."""
    engine = Gated((0.002, 0.002))
    engine.learn()
    waiting = [(keys, engine.begin(keys)) for keys in (engine.blocks(60) for _ in range(4))]
    for keys, ctx in waiting:
        assert engine.prefix(keys, ctx) is None
    for _ in range(20):
        engine.tick()
    engine.speeds[0].stalled_until = engine.clock.now + 5.0
    began, lost = engine.clock.now, []
    open_requests = list(waiting)
    while open_requests:
        engine.tick()
        for keys, ctx in list(open_requests):
            hits = engine.prefix(keys, ctx)
            if hits is not None:
                lost.append(engine.clock.now - began)
                open_requests.remove((keys, ctx))
                engine.manager.on_request_finished(ctx)
    assert max(lost) < 0.3
    for _ in range(5):
        seconds, hits = engine.serve(engine.blocks(10))
        assert (round(seconds - 10 * BLOCK * TOKEN_S, 3), hits) == (0, 0)
    assert engine.counts.abandoned > 0
    engine.clock.now = engine.speeds[0].stalled_until
    engine.rest()
    assert engine.serve(engine.blocks(60))[1] == 60
    assert engine.manager.stats().primary.abandoned == 0


def test_stalled_load_keeps_its_complete_part() -> None:
    """A long load is split. If it stalls half-way, the request gets the first half and computes the rest."""
    engine = Gated((0.002, 0.01))
    engine.learn()
    keys = engine.blocks(100)
    ctx, began = engine.begin(keys), engine.clock.now
    while (hits := engine.prefix(keys, ctx)) is None:
        if engine.clock.now - began > 0.5:
            engine.speeds[0].stalled_until = began + 5.5
        engine.tick()
    assert 30 <= hits <= 60
    assert engine.clock.now - began < 0.5 + 0.3
    slots = engine.manager.prepare_load(keys[:hits], ctx)
    assert slots is not None
    assert [bytes(engine.primary.row(slot)) for slot in slots] == [payload(key) for key in keys[:hits]]
    engine.manager.complete_load(keys[:hits], ctx)
    engine.manager.on_request_finished(ctx)
    engine.clock.now = began + 5.5
    engine.rest()
    stats = engine.manager.stats()
    assert (stats.promoting, stats.primary.abandoned, stats.primary.pinned, stats.requests) == (0, 0, 0, 0)


def test_an_improved_tier_is_used_again() -> None:
    """Few requests wait briefly for a slow tier; it is used again once it is fast."""
    engine = Gated((2.0, 0.2))
    engine.learn(4)
    lost = []
    for _ in range(40):
        seconds, hits = engine.serve(engine.blocks(20))
        lost.append(round(seconds - 20 * BLOCK * TOKEN_S, 3))
        assert hits == 0
    assert sorted(lost)[:-1] == [0] * 39 and lost[-1] <= 0.21
    assert 0 < engine.counts.explored <= 40 * 20 / 16
    engine.rest()
    engine.speeds[0].fixed_s = engine.speeds[0].block_s = 0.001
    served = [engine.serve(engine.blocks(20))[1] for _ in range(8)]
    assert served[3:] == [20] * 5
    engine.rest()
    assert engine.manager.stats().primary.abandoned == 0


def test_a_measurement_that_the_tier_refuses_is_not_the_last() -> None:
    """A slow tier that raised when it was to be measured is measured again, and used once it is fast."""
    engine = Gated((2.0, 0.2))
    engine.learn(4)

    engine.tier.raising.add("submit_load")
    engine.tier.on_submit = lambda tier, *_: tier.open.pop()
    while not (refused := engine.counts.explored):
        assert engine.serve(engine.blocks(20))[1] == 0
    engine.tier.raising.clear()
    engine.tier.on_submit = lambda *_: None
    engine.speeds[0].fixed_s = engine.speeds[0].block_s = 0.001
    served = [engine.serve(engine.blocks(20))[1] for _ in range(40)]
    assert engine.counts.explored > refused and served[-1] == 20


def test_a_tier_that_never_works_again_costs_two_requests() -> None:
    """A dead tier that never reports its loads delays only the requests that wait for it at that time."""
    engine = Gated((0.001, 0.001), (0.001, 0.001))
    engine.learn()
    for speed in engine.speeds:
        speed.stalled_until = 1e9
    slow = 0
    for _ in range(60):
        seconds, _ = engine.serve(engine.blocks(5, 5))
        lost = seconds - 10 * BLOCK * TOKEN_S
        assert lost < 0.3
        slow += lost > STEP_S
    assert slow <= 2


def test_requests_with_a_common_prefix_share_its_load_and_its_end() -> None:
    """One load serves all; if it is late, all of them compute, and none starts it again."""
    engine = Gated((0.002, 0.002))
    engine.learn()
    keys = engine.blocks(20)
    jobs = len(engine.tier.calls)
    engine.speeds[0].stalled_until = engine.clock.now + 5
    contexts = [engine.begin(keys) for _ in range(5)]
    began = engine.clock.now
    while any([engine.prefix(keys, ctx) is None for ctx in contexts]):
        engine.tick()
    assert engine.clock.now - began < 0.3
    assert [name for name, _ in engine.tier.calls[jobs:]].count("submit_load") == 1
    for ctx in contexts:
        engine.manager.on_request_finished(ctx)


def test_an_aborted_request_counts_nothing() -> None:
    """A request that ends during its load counts as neither saved nor lost; its blocks stay for others."""
    engine = Gated((0.002, 0.002))
    engine.learn()
    before = engine.counts
    keys = engine.blocks(20)
    ctx = engine.begin(keys)
    assert engine.prefix(keys, ctx) is None
    engine.tick()
    engine.manager.on_request_finished(ctx)
    engine.rest()
    after = engine.counts
    assert (after.saved_s, after.lost_s) == (before.saved_s, before.lost_s)
    assert engine.prefix(keys, engine.begin(keys)) == 20


def test_without_knowledge_or_turned_off_everything_is_loaded() -> None:
    """Before the engine has reported steps, and with ``gate`` false, requests wait even for a very slow tier."""
    for learn, gate in ((False, True), (True, False)):
        engine = Gated((1.0, 0.1), gate=gate)
        if learn:
            engine.learn(4)
        for _ in range(4):
            seconds, hits = engine.serve(engine.blocks(10))
            assert hits == 10 and seconds > 1.9
        assert engine.counts.recomputed == engine.counts.loaded == 0


def hand_over(engine: Gated, arrivals: Sequence[float]) -> tuple[float, int]:
    """Wait for a prefill whose blocks arrive at these times; return the seconds of the wait, and the blocks found."""
    keys = engine.blocks(len(arrivals))
    engine.tier.unknown.update(keys)
    began = engine.clock.now
    ctx = engine.begin(keys, RequestContext(f"decode-{began}", since=began, patience_s=60.0))
    while (hits := engine.prefix(keys, ctx)) is None:
        engine.tick()
        arrived = [key for key, at in zip(keys, arrivals, strict=True) if engine.clock.now - began >= at]
        engine.tier.unknown.difference_update(arrived)
    return engine.clock.now - began, hits


def test_a_hand_over_costs_at_most_twice_the_time_of_computing() -> None:
    """A request waits while blocks arrive faster than it computes them, and for a silent engine as long as that."""
    whole_s = 40 * BLOCK * TOKEN_S
    engine = Gated((0.001, 0.0001))
    engine.learn(4)
    never = [math.inf] * 40
    waited, hits = hand_over(engine, never)
    assert hits == 0 and waited == pytest.approx(whole_s, rel=0.2)
    waited, hits = hand_over(engine, [0.8 * BLOCK * TOKEN_S * (i + 1) for i in range(40)])
    assert hits == 40 and waited == pytest.approx(0.8 * whole_s, rel=0.1)
    late = [0.9 * whole_s + 0.01 * i for i in range(40)]
    waited, hits = hand_over(engine, late)
    assert hits == 40, "the other engine was busy before it began"
    for slow in (1.5, 3.0, 10.0, 60.0):
        waited, hits = hand_over(engine, [slow * BLOCK * TOKEN_S * (i + 1) for i in range(40)])
        rest_s = (40 - hits) * BLOCK * TOKEN_S
        assert waited + rest_s < 2.1 * whole_s
    waited, hits = hand_over(engine, [0.1 * whole_s] * 20 + never[:20])
    assert hits == 20 and waited < 1.7 * whole_s, "the other engine stopped"


def test_source_has_half_of_the_computing_time_to_start() -> None:
    """A busy engine receives its half of a long prompt late; a short one is computed after the usual second."""
    engine = Gated((0.001, 0.0001))
    engine.learn_computing()
    for blocks, unheard_s in ((500, 4.0), (10, 1.0)):
        keys = engine.blocks(blocks)
        engine.tier.unknown.update(keys)
        ctx = engine.begin(keys, RequestContext(f"decode-{blocks}", since=engine.clock.now, patience_s=60.0))
        assert engine.prefix(keys, ctx) is None
        assert ctx.unheard_s == pytest.approx(unheard_s, rel=0.2)


def test_hand_over_waits_its_patience_at_unknown_computing_speed() -> None:
    """The first request of an engine has nothing to compare with."""
    engine = Gated((0.001, 0.0001))
    waited, hits = hand_over(engine, [math.inf])
    assert hits == 0 and waited == pytest.approx(60.0, rel=0.1)


def test_hand_over_stopped_within_a_load_costs_twice_the_computing_time() -> None:
    """A load without an end is abandoned when the wait ends."""
    engine = Gated((1000.0, 0.0))
    engine.learn_computing()
    keys = engine.blocks(100)
    seconds, hits = engine.serve(keys, RequestContext("decode", since=engine.clock.now, patience_s=60.0))
    assert hits == 0 and seconds < 2.1 * 100 * BLOCK * TOKEN_S


def test_the_end_of_a_hand_over_is_no_stall() -> None:
    """If a load of a hand-over never ends, loads that the gate decided on from the same tier go on."""
    engine = Gated((0.3, 0.001))
    engine.learn()
    keys = engine.blocks(20)
    ctx = engine.begin(keys, RequestContext("decode", since=engine.clock.now, patience_s=60.0))
    assert engine.prefix(keys, ctx) is None
    engine.manager.on_step_end()
    engine.tier.open.clear()
    engine.clock.now += 0.3
    assert engine.prefix(keys, ctx) is None
    assert engine.serve(engine.blocks(100))[1] == 100
    assert engine.prefix(keys, ctx) == 0, "it has ended meanwhile"


def test_a_tier_that_does_not_answer_lookups_costs_little() -> None:
    """A request waits at most the slack for an answer; later ones don't wait, except a few that measure."""
    engine = Gated((0.001, 0.001))
    engine.learn()
    lost = []
    for number in range(64):
        keys = engine.blocks(20)
        if number < 60:
            engine.tier.unknown.update(keys)
        lost.append(engine.serve(keys)[0] - 20 * BLOCK * TOKEN_S)
    assert max(lost[:60]) < 0.65
    assert sum(one > STEP_S for one in lost[4:60]) <= 4
    assert engine.counts.lost_s < 5


def test_one_in_32_requests_waits_for_a_tier_that_was_slow_to_answer() -> None:
    """Otherwise a tier whose lookups have become faster would not be noticed."""
    engine = Gated((0.001, 0.001))
    engine.learn()
    waited = []
    for _ in range(20 + 2 * 32):
        keys = engine.blocks(20)
        engine.tier.unknown.update(keys)
        ctx = engine.begin(keys)
        waited.append(engine.prefix(keys, ctx) is None)
        while engine.prefix(keys, ctx) is None:
            engine.tick()
        engine.manager.on_request_finished(ctx)
    assert waited[0] and sum(waited[20:]) == 2


def test_each_group_of_layers_is_weighed_from_its_first_block() -> None:
    """A group whose first block ends where the group before it ends is not loaded from a tier that is too slow."""
    engine = Gated((0.5, 0.05))
    engine.learn()
    here, far = engine.blocks(4), engine.blocks(1)
    engine.store(here)
    engine.rest()
    ctx = engine.request()
    engine.manager.set_keys(ctx, [*here, *far], ends=[*range(BLOCK, BLOCK * 5, BLOCK), BLOCK * 4])
    assert engine.look([*here, *far], ctx) == ["hit"] * 4 + ["miss"]


def test_other_groups_of_layers_load_as_far_as_the_weighed_one() -> None:
    """Unweighed keys (a sliding window) are loaded up to the end of the weighed prefix, and not after it."""
    engine = Gated((0.002, 0.001), (1.0, 0.1))
    engine.learn(5)
    whole, window = engine.blocks(30, 10), engine.blocks(40, 0)
    ctx = engine.request()
    ends = [*range(BLOCK, BLOCK * 41, BLOCK)] * 2
    engine.manager.set_keys(ctx, [*whole, *window], ends=ends, weighed=frozenset(whole))
    assert engine.look(whole, ctx) == ["hit_pending"] * 30 + ["miss"] * 10
    assert engine.look(list(reversed(window)), ctx) == ["miss"] * 10 + ["hit_pending"] * 30


@pytest.mark.parametrize("seed", range(sized(20, full=20, quick=5)))
def test_random_times(seed: int) -> None:
    """Changing speeds, stalls, resets and clocks that jump back cause no exception, leak or long wait."""
    rng = random.Random(seed)
    engine = Gated((0.002, 0.002), (0.01, 0.01), slots=128, promotion_share=rng.choice((0.5, 1.0)))
    engine.learn(3)
    for _ in range(60):
        speed = rng.choice(engine.speeds)
        event = rng.random()
        if event < 0.1:
            speed.stalled_until = engine.clock.now + rng.uniform(0, 5)
        elif event < 0.3:
            speed.fixed_s, speed.block_s = 10 ** rng.uniform(-4, 0), 10 ** rng.uniform(-4, -1)
        elif event < 0.35:
            engine.clock.now -= rng.uniform(0, 0.2)
        elif event < 0.4:
            assert engine.manager.reset() is not None
        keys = engine.blocks(rng.randrange(1, 30), rng.randrange(1, 30))
        seconds, _ = engine.serve(keys)
        recompute_s = len(keys) * BLOCK * TOKEN_S
        assert seconds < 3 * recompute_s + 1.0, f"seed {seed}"
    for speed in engine.speeds:
        speed.stalled_until = 0.0
    engine.clock.now += 100
    engine.rest()
    stats = engine.manager.stats()
    assert (stats.promoting, stats.primary.abandoned, stats.primary.pinned) == (0, 0, 0)
    assert (stats.requests, stats.jobs) == (0, 0)


def test_a_load_on_which_the_gate_did_not_decide_is_one_job() -> None:
    """Only a load that the gate may cut short is split."""
    engine = Gated((0.002, 0.01))
    engine.learn()
    jobs = []
    for ctx in (engine.request(), RequestContext("decode", patience_s=60.0)):
        before = len(engine.tier.calls)
        engine.serve(engine.blocks(100), ctx)
        jobs.append([name for name, _ in engine.tier.calls[before:]].count("submit_load"))
    assert jobs[0] > 10 and jobs[1] == 1


def test_a_burst_on_an_unmeasured_tier_is_loaded() -> None:
    """Its loads take longer than an unmeasured tier may take, but their first pieces show that the rest is worth it."""
    engine = Gated((0.001, 0.005))
    engine.learn_computing()
    waiting = [(keys, engine.begin(keys)) for keys in (engine.blocks(40) for _ in range(10))]
    hits, began = [], engine.clock.now
    while waiting:
        for keys, ctx in list(waiting):
            found = engine.prefix(keys, ctx)
            if found is not None:
                hits.append(found)
                waiting.remove((keys, ctx))
                engine.manager.on_request_finished(ctx)
        engine.tick()
    assert hits == [40] * 10 and engine.clock.now - began < 2.2
    assert engine.counts.abandoned == 0


def test_slow_unmeasured_tier_delivers_its_first_pieces() -> None:
    """A load that is not worth it is abandoned once its first pieces show that; these pieces are used."""
    engine = Gated((0.001, 0.03))
    engine.learn_computing()
    seconds, hits = engine.serve(engine.blocks(60))
    assert 4 <= hits <= 10 and seconds < 60 * BLOCK * TOKEN_S + 0.2


def test_a_request_waits_for_room_as_long_as_loading_is_worth_it() -> None:
    """A request waits longer for room than for a stalled load, because the loads in the way have deadlines."""
    engine = Gated((0.001, 0.005), slots=128, promotion_share=0.5)
    engine.learn()
    first, second = engine.blocks(64), engine.blocks(64)
    contexts = engine.begin(first), engine.begin(second)
    while (hits := engine.prefix(first, contexts[0])) is None:
        assert engine.prefix(second, contexts[1]) is None
        engine.tick()
    slots = engine.manager.prepare_load(first[:hits], contexts[0])
    assert slots is not None and hits == 64
    engine.manager.complete_load(first, contexts[0])
    engine.manager.on_request_finished(contexts[0])
    while (hits := engine.prefix(second, contexts[1])) is None:
        engine.tick()
    assert hits == 64


def test_a_lost_probe_is_not_the_last() -> None:
    """After ``load_s_max`` another probe may measure the tier."""
    engine = Gated((2.0, 0.2), load_s_max=10.0)
    engine.learn(4)
    engine.speeds[0].stalled_until = 1e9
    while not engine.counts.explored:
        assert engine.serve(engine.blocks(20))[1] == 0
    explored = engine.counts.explored
    engine.serve(engine.blocks(20))
    assert engine.counts.explored == explored, "one is under way"
    engine.clock.now += 10
    for _ in range(2):
        engine.serve(engine.blocks(20))
    assert engine.counts.explored > explored
    engine.speeds[0].stalled_until = 0.0
    engine.clock.now += 100
    engine.rest()
    assert engine.manager.stats().primary.abandoned == 0 == engine.manager.stats().tiers[0].loading
