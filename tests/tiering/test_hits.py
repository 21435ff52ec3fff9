"""A block answered with HIT can be loaded until the step ends, whatever else the step does."""

from __future__ import annotations

import random

import pytest

from kvstore.eviction import POLICY_NAMES
from kvstore.types import BlockKey, RequestContext
from tests.tiering.engine import Engine, keys_of
from tests.tiering.fake_tier import payload

SLOTS, BLOCKS, STEPS = 12, 40, 150


class Step:
    """The actions of an engine between the lookups of a request and its load, in one step.

    Resets are excluded: vLLM makes them between two steps, never between the lookups and the loads of one step.
    """

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self.engine = engine
        self.rng = rng
        self.reads: list[tuple[RequestContext, list[BlockKey]]] = []
        self.hits: list[tuple[RequestContext, list[BlockKey]]] = []

    def some(self) -> list[BlockKey]:
        """Return a run of blocks."""
        first = self.rng.randrange(BLOCKS)
        return keys_of(*range(first, min(BLOCKS, first + self.rng.randrange(1, 6))))

    def request(self) -> RequestContext:
        """Start a request with a policy that pins, holds, restricts or drops."""
        policies = ({}, {}, {"cpu": False}, {"lazy": True}, {"retain": 50}, {"demote": True}, {"ttl": 3})
        return self.engine.request(**self.rng.choice(policies))

    def look(self) -> None:
        """Look up a prefix; hits will be loaded at the end of the step."""
        ctx, keys = self.request(), self.some()
        answers = self.engine.look(keys, ctx)
        found = [key for key, answer in zip(keys, answers, strict=True) if answer == "hit"]
        if found:
            self.hits.append((ctx, found))

    def store(self) -> None:
        """Store blocks immediately, or fail to."""
        ctx = self.request()
        plan = self.engine.manager.prepare_store(self.some(), ctx)
        if plan is not None:
            self.engine.manager.complete_store(self.engine.fill(plan).keys, ctx, success=self.rng.random() < 0.9)
        self.engine.manager.on_request_finished(ctx)

    def end_read(self) -> None:
        """End a load of an earlier step, and its request."""
        if self.reads:
            ctx, keys = self.reads.pop(self.rng.randrange(len(self.reads)))
            self.engine.manager.complete_load(keys, ctx)
            self.engine.manager.on_request_finished(ctx)

    def remove(self) -> None:
        """Remove blocks everywhere."""
        self.engine.manager.remove(self.some()[:1])

    def progress(self) -> None:
        """Let the tier run some of its jobs, and advance the clock."""
        self.engine.tier.run(self.rng.randrange(8), failing=self.some() if self.rng.random() < 0.2 else ())
        self.engine.clock.now += self.rng.random()

    def load_all(self) -> int:
        """Load the hits of this step, and end the step; return the number of loads."""
        for ctx, keys in self.hits:
            slots = self.engine.manager.prepare_load(keys, ctx)
            assert slots is not None, "a hit of this step is not there any more"
            assert [bytes(self.engine.primary.row(slot)) for slot in slots] == [payload(key) for key in keys]
        loads, self.reads = len(self.hits), self.reads + self.hits
        self.hits = []
        self.engine.manager.on_step_end()
        return loads


@pytest.mark.parametrize("eviction", POLICY_NAMES)
@pytest.mark.parametrize("seed", range(6))
def test_a_hit_can_be_loaded_until_the_step_ends(eviction: str, seed: int) -> None:
    """Promotions, stores, removals, ends of other requests and time remove no hit before it is loaded."""
    engine = Engine(slots=SLOTS, eviction=eviction, load_s_max=5.0, wait_s_max=1.0)
    step = Step(engine, random.Random(seed))
    actions = (step.look, step.look, step.store, step.store, step.end_read, step.remove, step.progress)
    loads = 0
    for _ in range(STEPS):
        for _ in range(step.rng.randrange(1, 12)):
            step.rng.choice(actions)()
        loads += step.load_all()
        while len(step.reads) > 2:
            step.end_read()
    assert loads > STEPS / 10
