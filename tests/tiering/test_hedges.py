"""Hedged reads: a slow load starts in a second tier too, the first complete answer wins, no slot has two users."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvstore.primary.tier import SlotState
from kvstore.tiering.gate import Gate
from kvstore.tiering.hedges import HedgeCounts, Hedges
from kvstore.types import BlockKey, LookupResult, RemovalCause, RequestContext, TransferJob
from tests.sizes import sized
from tests.tiering.engine import Engine, key_of, keys_of
from tests.tiering.fake_tier import ROW_BYTES, FakeTier, payload

USUAL_S = 0.01
SLOTS = 128
"""Room for hedges of four blocks."""

A = keys_of(1, 2)


class Hedging(Engine):
    """An engine over two tiers that hold every block; loads take ``USUAL_S`` unless a test delays them."""

    def __init__(self, slots: int = SLOTS, tiers: Sequence[str] = ("near", "far"), **options: object) -> None:
        super().__init__(slots, tiers, **options)
        self.near, self.far = self.tiers[0], self.tiers[-1]
        self.late_writes: list[int] = []  # Slots written while they did not belong to the load.
        for tier in self.tiers:
            for number in range(200):
                tier.blocks[key_of(number)] = payload(key_of(number))
            self._watch(tier)

    def _watch(self, tier: FakeTier) -> None:
        move = tier._move

        def watched(is_load: bool, key: BlockKey, slot: int, failing: Sequence[BlockKey]) -> bool:
            if is_load and self.primary.state_of(slot) not in (SlotState.WRITING, SlotState.ABANDONED):
                self.late_writes.append(slot)
            return move(is_load, key, slot, failing)

        tier._move = watched  # type: ignore[method-assign, assignment]

    def learned(self, loads: int = 100) -> Hedging:
        """Load blocks that no test uses, in the usual time."""
        for number in range(loads):
            key = b"lesson-%d" % number
            for tier in self.tiers:
                tier.blocks[key] = payload(key)
            ctx = self.begin([key])
            self.wait(USUAL_S)
            self.near.run()
            assert self.look([key], ctx) == ["hit"]
            self.manager.on_request_finished(ctx)
        assert self.counts == HedgeCounts()
        return self

    def begin(self, keys: Sequence[BlockKey], **params: object) -> RequestContext:
        """Start loading blocks."""
        ctx = self.request(keys, **params)
        assert set(self.look(keys, ctx)) == {"hit_pending"}
        self.manager.on_step_end()
        return ctx

    def wait(self, seconds: float) -> None:
        """Let time pass, and end a step."""
        self.clock.now += seconds
        self.manager.on_step_end()

    def hedged(self, keys: Sequence[BlockKey] = A, **params: object) -> tuple[RequestContext, TransferJob, TransferJob]:
        """Start loading blocks, and delay the load until it is hedged; return both loads."""
        ctx = self.begin(keys, **params)
        self.wait(1.0)
        (_, first), (_, hedge) = self.near.open[-1], self.far.open[-1]
        assert list(first.keys) == list(hedge.keys) == list(keys)
        assert not set(first.slots) & set(hedge.slots)
        return ctx, first, hedge

    def read(self, keys: Sequence[BlockKey], ctx: RequestContext) -> list[int]:
        """End a step and read the ready blocks; return their slots."""
        self.wait(0.0)
        assert set(self.look(keys, ctx)) == {"hit"}
        slots = self.manager.prepare_load(keys, ctx)
        assert slots is not None
        assert [bytes(self.primary.row(slot)) for slot in slots] == [payload(key) for key in keys]
        self.manager.complete_load(keys, ctx)
        return slots

    def states(self, slots: Sequence[int]) -> set[SlotState]:
        """Return the states of slots."""
        return {self.primary.state_of(slot) for slot in slots}

    def check_rest(self) -> None:
        """Let all jobs end; no state is left, and no late write happened."""
        self.settle()
        stats = self.manager.stats()
        assert (stats.jobs, stats.promoting, stats.requests) == (0, 0, 0)
        assert (stats.primary.abandoned, stats.primary.writing, stats.primary.pinned) == (0, 0, 0)
        assert all(flow.loading == 0 for flow in stats.tiers)
        assert self.late_writes == []
        keys = self.primary.keys()
        slots = [slot for slot in map(self.primary.slot_of, keys) if slot is not None]
        assert [bytes(self.primary.row(slot)) for slot in slots] == [payload(key) for key in keys]

    @property
    def counts(self) -> HedgeCounts:
        return self.manager.stats().hedges

    @property
    def hedges(self) -> Hedges:
        return self.parts.hedges

    @property
    def gate(self) -> Gate:
        return self.parts.gate


def test_the_second_tier_wins() -> None:
    """The request gets the second tier's blocks; the first tier's slots stay out of use until it has reported."""
    engine = Hedging().learned()
    ctx, first, hedge = engine.hedged()
    assert engine.states(first.slots) == {SlotState.WRITING}
    assert engine.states(hedge.slots) == {SlotState.ABANDONED}
    assert engine.look(A, ctx) == ["hit_pending"] * 2
    engine.far.run()
    assert engine.read(A, ctx) == list(hedge.slots)
    assert engine.manager.source_of(A[0], ctx) is engine.far
    assert engine.states(first.slots) == {SlotState.ABANDONED}
    for number in range(20):
        engine.wait(10.0)
        assert engine.states(first.slots) == {SlotState.ABANDONED}, number
    engine.near.run(failing=A)  # Its bytes are wrong, too.
    engine.wait(0.0)
    assert engine.states(first.slots) == {SlotState.FREE}
    assert engine.read(A, ctx) == list(hedge.slots)
    assert (engine.counts.hedged, engine.counts.won) == (2, 2)
    engine.manager.on_request_finished(ctx)
    engine.check_rest()


def test_a_hedge_that_fails_leaves_it_to_the_first() -> None:
    """An incomplete answer never wins, and does not count as a failure of the first tier."""
    engine = Hedging().learned()
    ctx, first, hedge = engine.hedged()
    engine.far.run(failing=A[:1])
    assert engine.look(A, ctx) == ["hit_pending"] * 2
    assert engine.states(hedge.slots) == {SlotState.FREE}
    assert engine.states(first.slots) == {SlotState.WRITING}
    engine.wait(10.0)
    assert not engine.far.open, "a load is hedged once"
    engine.near.run()
    assert engine.read(A, ctx) == list(first.slots)
    assert engine.counts.won == 0
    engine.manager.on_request_finished(ctx)
    engine.check_rest()


def test_close() -> None:
    """Close waits for the losing load too; while one runs, the memory must not be freed, and no hedge starts."""
    engine = Hedging().learned()
    ctx, _, hedge = engine.hedged()
    waiting = engine.begin(keys_of(5))
    engine.near.drains = False
    assert not engine.manager.close(0.0)
    assert engine.primary.slot_of(A[0]) == hedge.slots[0]
    engine.wait(10.0)
    assert engine.far.submitted(True) == []
    engine.near.run()
    engine.wait(0.0)
    assert engine.manager.close(0.0)
    for one in (ctx, waiting):
        engine.manager.on_request_finished(one)
    engine.check_rest()


def test_only_unusually_slow_loads_are_hedged() -> None:
    """The second tier is used from the 95th percentile on, for this tier and this number of blocks."""
    engine = Hedging().learned(200)
    usual_s = engine.gate.p95_s(0, 1)
    assert usual_s is not None and 1.4 * USUAL_S < usual_s < 1.6 * USUAL_S
    ctx = engine.begin(A[:1])
    engine.wait(0.99 * usual_s)
    assert not engine.far.open and ("lookup", A[0]) not in engine.far.calls
    engine.wait(0.02 * usual_s)
    assert engine.far.submitted(True) == A[:1]
    engine.manager.on_request_finished(ctx)
    engine.near.run()
    engine.check_rest()


def test_the_budget_is_never_exceeded() -> None:
    """If every load is slow, at most one block in 20 is hedged at any time."""
    engine = Hedging().learned(20)
    submitted = 20
    rng = random.Random(1)
    for _ in range(300):
        keys = keys_of(*rng.sample(range(200), rng.randrange(1, 5)))
        keys = engine.primary.missing(keys)
        if keys:
            ctx = engine.begin(keys)
            engine.wait(rng.choice((0.0, USUAL_S, 1.0)))
            submitted += len(keys)
            assert engine.counts.hedged <= 0.05 * submitted
            engine.near.run()
            engine.far.run()
            engine.wait(0.0)
            engine.manager.on_request_finished(ctx)
        engine.evict_all()
    assert engine.counts.hedged > 0.02 * submitted
    engine.check_rest()


def test_hedge_beyond_the_budget_waits() -> None:
    """The oldest slow load is hedged as soon as other loads have earned its budget."""
    engine = Hedging().learned(20)
    slow = engine.begin(A)
    engine.wait(1.0)
    assert not engine.far.open, "20 loads have earned one block"
    for number in range(10, 50):
        ctx = engine.begin(keys_of(number))
        engine.near.run(1, index=1)
        engine.wait(0.0)
        engine.manager.on_request_finished(ctx)
        if engine.far.open:
            break
    assert number in range(27, 30), "after 18 or so more"
    assert engine.far.submitted(True) == A
    engine.far.run()
    engine.read(A, slow)
    engine.manager.on_request_finished(slow)
    engine.near.run()
    engine.check_rest()


def test_a_long_load_is_not_hedged_and_holds_up_no_other() -> None:
    """A hedge takes at most its share of the slots."""
    engine = Hedging().learned()
    long, short = engine.begin(keys_of(*range(10, 15))), engine.begin(A)
    engine.wait(1.0)
    assert engine.far.submitted(True) == A
    for ctx in (long, short):
        engine.manager.on_request_finished(ctx)
    engine.check_rest()


def test_accumulated_budget_is_bounded() -> None:
    """After any number of loads, a stall gets a burst of one share of the slots, then one block in 20."""
    engine = Hedging(slots=256).learned(400)
    contexts = []
    for number in range(25):
        contexts.append(engine.begin(keys_of(number)))
        engine.wait(0.02)
        engine.far.run()
        engine.wait(0.0)
    assert engine.counts.hedged == 256 // 32 + 1
    for ctx in contexts:
        engine.manager.on_request_finished(ctx)
    engine.check_rest()


def test_unawaited_loads_are_not_hedged() -> None:
    """Loads of ended requests, and loads abandoned before the budget allowed a hedge, are not hedged."""
    engine = Hedging(load_s_max=5.0).learned(20)
    ended, slow = engine.begin(keys_of(5)), engine.begin(A)
    engine.manager.on_request_finished(ended)
    engine.wait(1.0)
    engine.wait(5.0)
    assert engine.manager.stats().primary.abandoned == 3
    engine.hedges.budget = 4.0
    engine.wait(0.0)
    assert not engine.far.open and engine.counts == HedgeCounts()
    engine.manager.on_request_finished(slow)
    engine.check_rest()


def test_outrun_loads_are_measured() -> None:
    """The first tier's real load time counts for its percentile, even if the hedge won."""
    engine = Hedging().learned()
    before = engine.counts
    usual_s = engine.gate.p95_s(0, 1)
    for number in range(2):
        ctx, _, _ = engine.hedged(keys_of(number))
        engine.far.run()
        engine.read(keys_of(number), ctx)
        engine.near.run()
        engine.manager.on_request_finished(ctx)
        engine.settle()
    after_s = engine.gate.p95_s(0, 1)
    assert usual_s is not None and after_s is not None and after_s > 1.0 > usual_s
    assert engine.counts.won == before.won + 2
    engine.check_rest()


def test_the_gate_counts_won_blocks() -> None:
    """A block that the gate chose to load counts as loaded, whichever tier delivered it."""
    engine = Hedging().learned()
    for _ in range(3):
        engine.manager.note_step([(1024, 0)], 1.0)
    ctx = engine.request()
    engine.manager.set_keys(ctx, A, ends=[400, 800])
    assert engine.look(A, ctx) == ["hit_pending"] * 2
    engine.manager.on_step_end()
    before = engine.manager.stats().gate.loaded
    engine.wait(0.05)
    engine.far.run()
    engine.read(A, ctx)
    gate = engine.manager.stats().gate
    assert (gate.loaded - before, gate.abandoned) == (2, 0)
    engine.manager.on_request_finished(ctx)
    engine.check_rest()


def test_hedges_under_way_have_their_share_of_slots() -> None:
    """If the second tier stalls too, it gets no more hedges than that share."""
    engine = Hedging().learned()
    for number in range(120):
        ctx = engine.begin(keys_of(number))
        engine.wait(USUAL_S if number % 10 else 1.0)
        engine.near.run()
        engine.wait(0.0)
        engine.manager.on_request_finished(ctx)
    assert engine.counts.hedged == len(engine.far.submitted(True)) == SLOTS // 32
    assert engine.hedges.budget > 1, "which would allow more"
    engine.check_rest()


def test_a_second_tier_that_does_not_know_yet() -> None:
    """The load is hedged once the second tier answers HIT, and never after MISS; other loads are not held up."""
    engine = Hedging().learned()
    engine.far.unknown.update(keys_of(1, 3))
    del engine.far.blocks[key_of(3)]
    contexts = [engine.begin(keys_of(number)) for number in (1, 2, 3)]
    engine.wait(1.0)
    assert engine.far.submitted(True) == keys_of(2)
    engine.far.unknown.clear()
    engine.wait(0.0)
    assert engine.far.submitted(True) == keys_of(2, 1)
    asked = engine.far.calls.count(("lookup", key_of(3)))
    engine.wait(0.0)
    assert engine.far.calls.count(("lookup", key_of(3))) == asked
    for ctx in contexts:
        engine.manager.on_request_finished(ctx)
    engine.check_rest()


def test_a_tier_must_hold_all_blocks_of_the_load() -> None:
    """A tier that lacks one block is not used for the others; a third tier may have all of them."""
    engine = Hedging(tiers=("near", "middle", "far")).learned()
    del engine.tiers[1].blocks[A[1]]
    ctx, _, _ = engine.hedged()
    assert not engine.tiers[1].open
    engine.far.run()
    engine.read(A, ctx)
    assert engine.counts.won == 2
    engine.manager.on_request_finished(ctx)
    engine.near.run()
    engine.check_rest()


def test_tiers_that_are_not_asked() -> None:
    """Tiers outside the request's policy, and tiers before the loading one, get no hedge."""
    engine = Hedging().learned()
    engine.begin(A, load=["near"])
    engine.wait(1.0)
    assert not engine.far.open

    engine = Hedging().learned()
    for _ in range(3):
        engine.gate.note_load(1, 1, USUAL_S)
    del engine.near.blocks[A[0]]
    ctx = engine.begin(A[:1])
    assert engine.far.submitted(True) == A[:1]
    engine.near.blocks[A[0]] = payload(A[0])
    engine.wait(10.0)
    assert len(engine.far.open) == 1 and not engine.near.open, "only a later tier is asked"
    engine.manager.on_request_finished(ctx)
    engine.check_rest()


def test_a_failed_tier_is_not_asked() -> None:
    """If the second tier failed to load a block for this request, it is not tried again."""
    engine = Hedging().learned()
    content = engine.near.blocks.pop(A[0])
    ctx = engine.begin(A[:1])
    engine.far.run(failing=A[:1])
    engine.near.blocks[A[0]] = content
    assert engine.look(A[:1], ctx) == ["hit_pending"]
    engine.manager.on_step_end()
    engine.wait(10.0)
    assert engine.near.submitted(True) == A[:1] and not engine.far.open
    engine.manager.on_request_finished(ctx)
    engine.check_rest()


def test_slots_for_a_hedge() -> None:
    """A hedge evicts the coldest blocks, but no promised or pinned ones, and never all blocks."""
    engine = Hedging(64).learned()
    engine.evict_all()
    crowd = [key_of(100 + number) for number in range(63)]
    storing = engine.request(crowd, tiers=[])
    engine.store(crowd, storing)
    engine.manager.on_request_finished(storing)
    ctx = engine.begin(A[:1])
    assert engine.manager.stats().primary.free == 0
    other = engine.request()
    assert engine.look(crowd[-1:], other) == ["hit"], "promised; by age it would be the first to go"
    engine.manager.take_events()
    engine.wait(1.0)
    (_, hedge) = engine.far.open[-1]
    assert crowd[-1] in engine.primary and crowd[-2] not in engine.primary
    gone = [event for event in engine.manager.take_events() if event.cause is RemovalCause.EVICTED]
    assert (gone[-1].tier, list(gone[-1].keys)) == ("cpu", [crowd[-2]])
    engine.far.run()
    assert engine.read(A[:1], ctx) == list(hedge.slots)
    for one in (ctx, other):
        engine.manager.on_request_finished(one)
    engine.near.run()
    engine.check_rest()


def test_no_slots_for_a_hedge() -> None:
    """If no block can be evicted, the first load continues alone."""
    engine = Hedging(64).learned()
    engine.evict_all()
    crowd = [key_of(100 + number) for number in range(63)]
    storing = engine.request(crowd, tiers=[])
    engine.store(crowd, storing)
    engine.manager.on_request_finished(storing)
    reader = engine.request()
    engine.look(crowd, reader)
    assert engine.manager.prepare_load(crowd, reader) is not None
    ctx = engine.begin(A[:1])
    engine.wait(1.0)
    assert not engine.far.submitted(True) and engine.counts == HedgeCounts()
    engine.manager.complete_load(crowd, reader)
    for one in (ctx, reader):
        engine.manager.on_request_finished(one)
    engine.check_rest()


def test_won_blocks_are_not_copied_to_the_first_tier() -> None:
    """The first tier holds them: back-fill is for blocks that only a slower tier has."""
    engine = Hedging().learned()
    ctx, _, _ = engine.hedged()
    engine.far.run()
    for _ in range(3):
        engine.read(A, ctx)
        engine.manager.on_request_finished(ctx)
        engine.manager.on_step_end()
        ctx = engine.request()
    assert engine.near.submitted(False) == []
    engine.manager.on_request_finished(ctx)
    engine.check_rest()


def test_statistics() -> None:
    """No load counts as failed; loads count for the tier that delivered; the extra bytes count as hedges."""
    engine = Hedging().learned()
    before = engine.manager.stats()
    failed = sum(tally.failed_load_jobs for tally in engine.manager.tally.tiers)
    for number, winner in ((10, engine.far), (20, engine.near)):
        keys = keys_of(number)
        ctx, _, _ = engine.hedged(keys)
        winner.run()
        engine.read(keys, ctx)
        engine.manager.on_request_finished(ctx)
        engine.settle()
    after = engine.manager.stats()
    loaded = [new.loaded - old.loaded for new, old in zip(after.tiers, before.tiers, strict=True)]
    assert loaded == [1, 1]
    assert [flow.failed_loads for flow in after.tiers] == [0, 0]
    assert sum(tally.failed_load_jobs for tally in engine.manager.tally.tiers) == failed
    assert after.hedges == HedgeCounts(hedged=2, won=1, extra_bytes=2 * ROW_BYTES)


@pytest.mark.parametrize("options", [{"hedge": False}, {"gate": False}, {"tiers": ("near",)}])
def test_off(options: dict[str, object]) -> None:
    """Without hedging, or with one tier, no hedging state is created, and requests wait for slow loads."""
    engine = Hedging(**options)  # type: ignore[arg-type]
    assert not engine.parts.has_hedges
    engine.learned()
    ctx = engine.begin(A)
    engine.wait(20.0)
    assert engine.tiers[-1] is engine.near or not engine.far.open
    engine.near.run()
    engine.read(A, ctx)
    assert engine.counts == HedgeCounts()


def test_memory_is_bounded() -> None:
    """Reported loads are forgotten once they would have become slow."""
    engine = Hedging().learned(300)
    engine.wait(10.0)
    assert engine.hedges.due == [] and len(engine.parts.jobs) == 0


class Stalling:
    """Gives each load of a tier its own duration."""

    def __init__(self, tier: FakeTier, engine: Engine, rng: random.Random, share: float) -> None:
        self.tier, self.engine, self.rng, self.share = tier, engine, rng, share
        self.loads = 0
        self._ends: dict[int, float] = {}
        tier.on_submit = self._submitted

    def _submitted(self, tier: FakeTier, is_load: bool, job: TransferJob) -> None:
        self.loads += is_load * len(job.keys)
        stall_s = 1.0 if self.rng.random() < self.share else 0.0
        self._ends[job.job_id] = self.engine.clock() + self.rng.uniform(0.5, 1.5) * USUAL_S + stall_s

    def run(self) -> None:
        """Finish the loads whose time is over."""
        index = 0
        while index < len(self.tier.open):
            if self._ends[self.tier.open[index][1].job_id] <= self.engine.clock():
                self.tier.run(1, index=index)
            else:
                index += 1


@pytest.mark.parametrize("seed", range(sized(3, full=3, quick=1)))
def test_stalls_of_one_block_in_a_hundred(seed: int) -> None:
    """Hedging cuts the 99th percentile to a fifth or less, for at most 5 % more reads."""
    p99, reads = [], []
    for hedge in (False, True):
        engine, rng = Hedging(hedge=hedge), random.Random(seed)
        stalling = [Stalling(engine.near, engine, rng, 0.01), Stalling(engine.far, engine, rng, 0.0)]
        took: list[float] = []
        for number in range(4000):
            keys = [b"read-%d" % number]
            for tier in engine.tiers:
                tier.blocks = {keys[0]: payload(keys[0])}  # type: ignore[assignment]
            ctx, began = engine.begin(keys), engine.clock()
            while engine.look(keys, ctx) != ["hit"]:
                engine.wait(0.001)
                for one in stalling:
                    one.run()
            engine.read(keys, ctx)
            took.append(engine.clock() - began)
            engine.manager.on_request_finished(ctx)
        p99.append(sorted(took)[-len(took) // 100])
        reads.append(sum(one.loads for one in stalling))
        engine.clock.now += 10
        for one in stalling:
            one.run()
        engine.check_rest()
    assert p99[0] >= 5 * p99[1]
    assert reads[0] == 4000 < reads[1] <= 1.05 * reads[0]


@pytest.mark.parametrize("seed", range(sized(20, full=20, quick=5)))
def test_random_order(seed: int) -> None:
    """In any order of ends, failures, stalls and resets: right bytes, no late write, and no state left."""
    rng = random.Random(seed)
    engine = Hedging(slots=96, load_s_max=3.0).learned()
    engine.hedges.blocks_max = 8
    open_requests: list[tuple[list[BlockKey], RequestContext]] = []
    for _ in range(400):
        engine.hedges.budget = 8.0
        what = rng.random()
        if what < 0.3:
            start = rng.randrange(190)
            keys = keys_of(*range(start, start + rng.randrange(1, 6)))
            open_requests.append((keys, engine.request(keys)))
        elif what < 0.7:
            failing = [key_of(number) for number in range(200) if rng.random() < rng.choice((0, 0, 0.3))]
            rng.choice(engine.tiers).run(rng.randrange(1, 4), failing=failing, index=rng.randrange(3))
        elif what < 0.72:
            for tier in engine.tiers:
                tier.drains = rng.random() < 0.5
            engine.manager.reset(0.0)
        elif what < 0.78 and open_requests:
            engine.manager.on_request_finished(open_requests.pop(rng.randrange(len(open_requests)))[1])
        for keys, ctx in open_requests:
            ready = []
            for key in keys:
                answer = engine.manager.lookup(key, ctx)
                if answer is LookupResult.HIT:
                    ready.append(key)
                elif answer is LookupResult.MISS:
                    break
            if ready and rng.random() < 0.5:
                slots = engine.manager.prepare_load(ready, ctx)
                assert slots is not None
                assert [bytes(engine.primary.row(slot)) for slot in slots] == [payload(key) for key in ready]
                engine.manager.complete_load(ready, ctx)
        engine.wait(rng.choice((0.0, 0.002, 0.02, 0.5)))
    assert engine.counts.won > 0 and engine.counts.hedged > engine.counts.won
    for _, ctx in open_requests:
        engine.manager.on_request_finished(ctx)
    engine.check_rest()


@pytest.mark.parametrize("reported", [False, True])
def test_a_hedge_without_a_report_does_not_occupy_the_budget_for_good(reported: bool) -> None:
    """After ``load_s_max`` it no longer counts as running, even if it is reported later."""
    engine = Hedging(load_s_max=5.0).learned()
    ctx, _, hedge = engine.hedged()
    assert engine.hedges.under_way == 2
    engine.near.run()
    engine.read(A, ctx)
    for seconds in (5.0, 0.0):
        engine.wait(seconds)
    assert engine.hedges.under_way == 0 and engine.manager.stats().tiers[1].loading == 0
    assert engine.states(hedge.slots) == {SlotState.ABANDONED}
    if reported:
        engine.far.run()
        engine.wait(0.0)
        assert engine.hedges.under_way == 0 and engine.states(hedge.slots) == {SlotState.FREE}
    engine.manager.on_request_finished(ctx)
    engine.check_rest()
