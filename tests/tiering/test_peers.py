"""The manager with a tier that others fill, and with lent rows."""

from __future__ import annotations

from kvstore.primary.lending import Lender
from kvstore.primary.tier import PrimaryTier
from kvstore.tiering import TieringConfig, TieringManager
from kvstore.types import RequestContext
from tests.tiering.engine import Engine, key_of, keys_of
from tests.tiering.fake_tier import ROW_BYTES, FakeTier, payload


class OthersFill(FakeTier):
    """A load-only tier."""

    takes_stores = False


class Mixed(Engine):
    """An engine over a tier filled by others, with a disk after it."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.primary = PrimaryTier(memoryview(bytearray(8 * ROW_BYTES)), ROW_BYTES)
        self.peer, self.disk = OthersFill("peer", self.primary), FakeTier("disk", self.primary)
        self.tiers = [self.peer, self.disk]
        config = TieringConfig(store_share=1.0, promotion_share=1.0, **options)  # type: ignore[arg-type]
        self.manager = TieringManager(self.primary, self.tiers, config, clock=self.clock)


def test_a_tier_that_others_fill_is_not_stored_to() -> None:
    """New blocks are stored only in other tiers, even lazily or by name, and nothing waits for the load-only tier."""
    for policy in ({}, {"lazy": True}, {"min_uses": 2}, {"cpu": False}, {"tiers": ["peer", "disk"]}):
        engine = Mixed(policy=policy)
        engine.store_and_forget(keys_of(1, 2, 3))
        engine.store_and_forget(keys_of(1, 2, 3))
        engine.manager.close()
        assert "submit_store" not in [name for name, _ in engine.peer.calls]
        assert engine.peer.blocks == {}
        assert set(engine.disk.blocks) == set(keys_of(1, 2, 3)), policy


def test_alone_it_costs_no_job() -> None:
    """Without another tier a store causes no job, and pins nothing."""
    primary = PrimaryTier(memoryview(bytearray(8 * ROW_BYTES)), ROW_BYTES)
    manager = TieringManager(primary, [OthersFill("peer", primary)], TieringConfig())
    ctx = RequestContext("request")
    manager.on_new_request(ctx)
    plan = manager.prepare_store(keys_of(1, 2), ctx)
    assert plan is not None
    manager.complete_store(plan.keys, ctx)
    manager.on_step_end()
    assert not manager.has_pending_work and primary.stats().pinned == 0


def test_a_lent_row_is_used_again_after_its_loan() -> None:
    """A block evicted while it is lent keeps its slot; one step after the loan's end the slot is free."""
    engine = Engine(slots=4)
    lender = Lender(engine.primary)
    engine.store_and_forget(keys_of(1, 2, 3, 4))
    loan = lender.lend(key_of(4))
    assert loan is not None
    engine.store_and_forget(keys_of(5, 6, 7))
    assert engine.look(keys_of(4), engine.request()) == ["hit_pending"]
    assert bytes(loan.row) == payload(key_of(4))
    assert engine.manager.stats().primary.abandoned == 1
    lender.give_back(loan)
    engine.settle_steps(2)
    assert engine.manager.stats().primary.abandoned == 0
