"""A small engine over a TieringManager: stores and loads blocks whose content identifies their key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kvstore.primary.tier import PrimaryTier
from kvstore.tiering import StorePlan, TieringConfig, TieringManager
from kvstore.tiering.policy import PARAMETERS
from kvstore.types import BlockKey, LookupResult, RequestContext
from tests.tiering.fake_tier import ROW_BYTES, FakeTier, payload
from tests.tiering.parts import Parts


def key_of(number: int) -> BlockKey:
    """Return a key by its number."""
    return b"block-%04d" % number


def keys_of(*numbers: int) -> list[BlockKey]:
    """Return keys by their numbers."""
    return [key_of(number) for number in numbers]


def deadlines_of(shown: object) -> tuple[int, int]:
    """Return the number of keys with a deadline, of an object that shows them, and of their entries in memory."""
    found = re.search(r"Deadlines\((\d+) keys, (\d+) entries\)", repr(shown))
    assert found is not None, shown
    return int(found[1]), int(found[2])


class Clock:
    """A clock controlled by the test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """A manager, its primary tier, its fake tiers, and short forms of an engine's calls."""

    def __init__(
        self, slots: int = 8, tiers: Sequence[str] = ("disk",), *, capacity: int | None = None, **options: Any
    ) -> None:
        policy, reports = options.pop("eviction", "lru"), options.pop("reports", None)
        self.clock = Clock()
        self.primary = PrimaryTier(memoryview(bytearray(slots * ROW_BYTES)), ROW_BYTES, policy=policy)
        self.tiers = [FakeTier(name, self.primary, capacity) for name in tiers]
        # The whole tier and all parameters by default, so that tests of other properties can ignore limits.
        shares = {"store_share": 1.0, "promotion_share": 1.0, "retain_share": 1.0}
        options = {**shares, "allow": PARAMETERS, "events": True} | options
        self.manager = TieringManager(
            self.primary, self.tiers, TieringConfig(**options), clock=self.clock, reports=reports
        )
        self.parts = Parts(self.manager)
        self._requests = 0

    @property
    def tier(self) -> FakeTier:
        """The first tier."""
        return self.tiers[0]

    def request(
        self, keys: Sequence[BlockKey] = (), *, prompt_tokens: int | None = None, **params: Any
    ) -> RequestContext:
        """Start a request."""
        self._requests += 1
        ctx = RequestContext(f"request-{self._requests}", params)
        self.manager.on_new_request(ctx, keys, prompt_tokens=prompt_tokens)
        return ctx

    def fill(self, plan: StorePlan | None) -> StorePlan:
        """Copy the blocks of a plan into their slots."""
        assert plan is not None
        for key, slot in zip(plan.keys, plan.slots, strict=True):
            self.primary.row(slot)[:] = payload(key)
        return plan

    def store(self, keys: Sequence[BlockKey], ctx: RequestContext | None = None, **params: Any) -> StorePlan:
        """Store blocks into the primary tier; the tiers' jobs stay open."""
        ctx = ctx or self.request(keys, **params)
        plan = self.fill(self.manager.prepare_store(keys, ctx))
        self.manager.complete_store(list(plan.keys), ctx)
        return plan

    def step(self) -> None:
        """End a step; the tiers run their jobs, and report them in the next one."""
        self.manager.on_step_end()
        for tier in self.tiers:
            tier.run()

    def settle(self) -> None:
        """Step until no I/O is running."""
        for _ in range(100):
            self.step()
            if not self.manager.has_pending_work:
                return
        raise AssertionError(f"still busy: {self.manager.stats()}")

    def settle_steps(self, count: int) -> None:
        """Run some steps."""
        for _ in range(count):
            self.step()

    def store_and_forget(self, keys: Sequence[BlockKey], **params: Any) -> None:
        """Store blocks down to the tiers in a separate request."""
        ctx = self.request(keys, **params)
        self.store(keys, ctx)
        self.manager.on_request_finished(ctx)
        self.settle()

    def use(self, keys: Sequence[BlockKey], **params: Any) -> None:
        """Load blocks in a separate request."""
        ctx = self.request(keys, **params)
        self.load(keys, ctx)
        self.manager.on_request_finished(ctx)

    def evict_all(self) -> None:
        """Evict every block from the primary tier, in the next step; none may be pinned or dirty."""
        self.manager.on_step_end()
        ctx = self.request(tiers=[])
        plan = self.manager.prepare_store([b"crowd-%d" % number for number in range(self.primary.slots)], ctx)
        assert plan is not None
        self.manager.complete_store(plan.keys, ctx, success=False)
        self.manager.on_request_finished(ctx)

    def resident(self) -> list[BlockKey]:
        """Return the test's keys that have a slot."""
        return [key_of(number) for number in range(200) if key_of(number) in self.primary]

    def look(self, keys: Sequence[BlockKey], ctx: RequestContext) -> list[str]:
        """Look up blocks; return the names of the answers."""
        return [self.manager.lookup(key, ctx).value for key in keys]

    def load(self, keys: Sequence[BlockKey], ctx: RequestContext) -> list[bytes]:
        """Look up until no answer is pending, then read; every block must be present."""
        for _ in range(100):
            answers = {self.manager.lookup(key, ctx) for key in keys}
            if answers == {LookupResult.HIT}:
                slots = self.manager.prepare_load(keys, ctx)
                assert slots is not None
                content = [bytes(self.primary.row(slot)) for slot in slots]
                self.manager.complete_load(keys, ctx)
                return content
            assert LookupResult.MISS not in answers, answers
            self.step()
        raise AssertionError("never ready")
