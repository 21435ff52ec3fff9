"""Hedged reads over real tiers with faults: right bytes, and no write to any slot but those of loads."""

from __future__ import annotations

import itertools
import random
from functools import partial

import pytest

from kvstore.namespace import Namespace
from kvstore.primary.tier import PrimaryTier, SlotState
from kvstore.testing import Fault, FaultKind, FaultPlan, FaultyBackend, eventually
from kvstore.testing.records import CANARY
from kvstore.tiering import TieringConfig, TieringManager
from kvstore.tiers import open_tier
from kvstore.types import BlockKey, LookupResult, RequestContext
from tests.tiering.parts import Parts

SLOT_BYTES = 512
SLOTS = 64
BLOCKS = 40
_shelves = (f"hedged-{number}" for number in itertools.count())

DAMAGE = [FaultKind.FLIP_HEADER, FaultKind.FLIP_PAYLOAD, FaultKind.SHORT, FaultKind.MISDIRECT]


def content(key: BlockKey) -> bytes:
    """Return the bytes of a block."""
    return random.Random(key).randbytes(SLOT_BYTES)


class Rig:
    """A manager over two tiers of the memory backend with faults, and a loop of steps that checks all slots.

    Attributes:
        plans: Faults of each tier.
        blank: Slots that were free and filled with the canary after the last step.
    """

    def __init__(self) -> None:
        self.plans = [FaultPlan(seed=1), FaultPlan(seed=2)]
        self.memory = memoryview(bytearray(SLOT_BYTES * SLOTS))
        self.tiers = [
            open_tier(
                {"backend": "memory", "shelf": next(_shelves), "load_timeout": 60, "breaker_failures": 1000},
                primary=self.memory, slot_bytes=SLOT_BYTES, namespace=Namespace({"model": "hedged"}), name=name,
                wrap_backend=partial(FaultyBackend, plan=plan),
            )
            for name, plan in zip(("near", "far"), self.plans, strict=True)
        ]  # fmt: skip
        self.primary = PrimaryTier(self.memory, SLOT_BYTES)
        config = TieringConfig(wait_s_max=30.0, promotion_share=1.0)
        self.manager = TieringManager(self.primary, self.tiers, config)
        parts = Parts(self.manager)
        self.hedges = parts.hedges
        self.hedges.blocks_max = 4
        # Timings on a busy machine must not matter here: every load that lasts for a step is hedged.
        parts.gate.p95_s = lambda tier, blocks: 0.0  # type: ignore[method-assign]
        self.keys = [b"key-%04d" % number for number in range(BLOCKS)]
        self._requests = itertools.count()
        self.make_blank()

    def request(self) -> RequestContext:
        """Begin a request that stores nothing."""
        ctx = RequestContext(f"request-{next(self._requests)}", {"store": False})
        self.manager.on_new_request(ctx)
        return ctx

    def fill(self) -> None:
        """Store all blocks in both tiers."""
        ctx = RequestContext("fill")
        plan = self.manager.prepare_store(self.keys, ctx)
        assert plan is not None
        for key, slot in zip(plan.keys, plan.slots, strict=True):
            self.primary.row(slot)[:] = content(key)
        self.manager.complete_store(plan.keys, ctx)
        self.manager.on_request_finished(ctx)
        self.rest()
        self.forget()

    def forget(self) -> None:
        """Drop all blocks from the primary tier only."""
        for key in self.keys:
            self.primary.remove(key)
        self.make_blank()

    def step(self) -> None:
        """Check the slots that tiers may not touch, make a step with room for hedges, and check them again."""
        self.check()
        self.hedges.budget = 4.0
        self.manager.on_step_end()
        self.check()
        self.make_blank()

    def rest(self) -> None:
        """Step until no I/O is in flight; also release calls that stalled after their plan was cleared."""

        def at_rest() -> bool:
            for plan in self.plans:
                plan.release()
            self.step()
            return not self.manager.has_pending_work

        eventually(at_rest)

    def load(self, keys: list[BlockKey], ctx: RequestContext) -> list[BlockKey]:
        """Step until each block is loaded or lost; return the loaded ones after comparing their bytes."""
        answers: dict[BlockKey, LookupResult] = {}

        def settled() -> bool:
            self.step()
            answers.update({key: self.manager.lookup(key, ctx) for key in keys})
            return {LookupResult.RETRY, LookupResult.HIT_PENDING}.isdisjoint(answers.values())

        eventually(settled)
        there = [key for key in keys if answers[key] is LookupResult.HIT]
        slots = self.manager.prepare_load(there, ctx)
        assert slots is not None
        assert [bytes(self.primary.row(slot)) for slot in slots] == [content(key) for key in there]
        self.manager.complete_load(there, ctx)
        return there

    def check(self) -> None:
        """Check that every complete block has its bytes, and that no free slot was written to."""
        for slot in self.blank:
            if self.primary.state_of(slot) is SlotState.FREE:
                assert bytes(self.primary.row(slot)) == bytes([CANARY]) * SLOT_BYTES, f"late write to slot {slot}"
        for key in self.keys:
            if self.primary.lookup(key) is SlotState.READY:
                slot = self.primary.slot_of(key)
                assert slot is not None and bytes(self.primary.row(slot)) == content(key), f"wrong bytes: {key!r}"

    def close(self) -> None:
        """Release all stalled calls, and close."""
        for plan in self.plans:
            plan.clear()
        self.rest()
        stats = self.manager.stats()
        assert (stats.primary.abandoned, stats.primary.writing, stats.jobs, stats.requests) == (0, 0, 0, 0)
        assert self.manager.close(30.0)
        self.check()

    def make_blank(self) -> None:
        self.blank = [slot for slot in range(SLOTS) if self.primary.state_of(slot) is SlotState.FREE]
        for slot in self.blank:
            self.primary.row(slot)[:] = bytes([CANARY]) * SLOT_BYTES


def test_a_stalled_tier_is_outrun_and_writes_nowhere_else() -> None:
    """While the first tier stalls, blocks are loaded from the second; once it resumes, it writes to no slot in use."""
    rig = Rig()
    rig.fill()
    rig.plans[0].add(Fault("get", FaultKind.STALL, times=None))
    for key in rig.keys[:10]:
        ctx = rig.request()
        assert rig.load([key], ctx) == [key]
        rig.manager.on_request_finished(ctx)
    stats = rig.manager.stats()
    assert stats.hedges.won == 10 and stats.primary.abandoned == 10
    assert stats.hedges.extra_bytes == 10 * SLOT_BYTES
    rig.forget()
    rig.plans[0].clear()
    rig.rest()
    assert rig.manager.stats().primary.abandoned == 0
    rig.close()


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("late", [False, True])
def test_a_damaged_hedge_never_wins(kind: FaultKind, late: bool) -> None:
    """A second tier with damaged records delivers no block; the first one, however late, delivers it."""
    rig = Rig()
    rig.fill()
    ctx = rig.request()
    assert rig.load(rig.keys[20:21], ctx), "a target of misdirected reads"
    rig.rest()
    rig.plans[1].add(Fault("get", kind, times=None))
    if late:
        rig.plans[0].add(Fault("get", FaultKind.STALL))
    hedged = rig.manager.stats().hedges.hedged
    rig.manager.lookup(rig.keys[0], ctx)
    if late:
        eventually(lambda: (rig.step(), rig.plans[1].injected[kind])[1])
        assert rig.manager.lookup(rig.keys[0], ctx) is LookupResult.HIT_PENDING
        eventually(lambda: (rig.step(), rig.manager.stats().tiers[1].loading == 0)[1])
        assert rig.manager.lookup(rig.keys[0], ctx) is LookupResult.HIT_PENDING
        assert rig.manager.stats().hedges.hedged == hedged + 1
        rig.plans[0].release()
    assert rig.load(rig.keys[:1], ctx) == rig.keys[:1]
    assert rig.manager.stats().tiers[0].failed_loads == 0
    rig.manager.on_request_finished(ctx)
    rig.close()


def test_a_reset_while_both_load() -> None:
    """After a reset neither resumed load writes to a slot in use, and no earlier block is found."""
    rig = Rig()
    rig.fill()
    for plan in rig.plans:
        plan.add(Fault("get", FaultKind.STALL, times=None))
    ctx = rig.request()
    rig.manager.lookup(rig.keys[0], ctx)
    eventually(lambda: (rig.step(), rig.plans[0].stalled and rig.plans[1].stalled)[1])
    assert not rig.manager.reset(0.05)
    rig.make_blank()
    assert rig.manager.stats().primary.abandoned == 2
    rig.plans[1].clear()
    eventually(lambda: (rig.step(), rig.manager.stats().primary.abandoned == 1)[1])
    rig.plans[0].clear()
    rig.rest()
    assert rig.primary.keys() == []
    rig.manager.on_request_finished(ctx)
    rig.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_faults(seed: int) -> None:
    """Stalls, delays, damage and errors in both tiers, and resets of the primary tier's blocks: right bytes or none."""
    rng, rig = random.Random(seed), Rig()
    rig.fill()
    for plan in rig.plans:
        plan.rng.seed(seed)
        plan.add(
            Fault("get", FaultKind.STALL, times=None, probability=0.05),
            Fault("get", FaultKind.DELAY, times=None, probability=0.2, seconds=0.003),
            Fault("get", FaultKind.ERROR, times=None, probability=0.05),
            Fault("get", FaultKind.RAISE, times=None, probability=0.02),
            *(Fault("get", kind, times=None, probability=0.02) for kind in DAMAGE),
        )
    for number in range(150):
        ctx = rig.request()
        keys = rng.sample(rig.keys, rng.randrange(1, 5))
        for _ in range(rng.randrange(1, 6)):
            for key in keys:
                rig.manager.lookup(key, ctx)
            rig.step()
        if number % 10 == 0:
            for plan in rig.plans:
                plan.release()
        if rng.random() < 0.3:
            rig.forget()
        rig.manager.on_request_finished(ctx)
    rig.close()
    assert rig.manager.stats().hedges.hedged > 0
