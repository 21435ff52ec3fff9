"""The manager with a tier that others fill, and with lent rows."""

from __future__ import annotations

from kvstore.primary.lending import Lender
from kvstore.primary.tier import PrimaryTier
from kvstore.tiering import TieringConfig, TieringManager
from kvstore.types import LookupResult, RequestContext
from tests.tiering.engine import Engine, key_of, keys_of
from tests.tiering.fake_tier import ROW_BYTES, FakeTier, payload


class OthersFill(FakeTier):
    """A load-only tier."""

    takes_stores = False


class Mixed(Engine):
    """An engine over a tier filled by others, with a disk after it (or before it)."""

    def __init__(self, *, peer_first: bool = True, **options: object) -> None:
        super().__init__()
        self.primary = PrimaryTier(memoryview(bytearray(8 * ROW_BYTES)), ROW_BYTES)
        self.peer, self.disk = OthersFill("peer", self.primary), FakeTier("disk", self.primary)
        self.tiers = [self.peer, self.disk] if peer_first else [self.disk, self.peer]
        config = TieringConfig(store_share=1.0, promotion_share=1.0, prefetch=False, **options)  # type: ignore[arg-type]
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


def test_its_blocks_are_promoted_and_filled_back() -> None:
    """Its blocks are promoted; a disk before it gets them at the second use; the disk's blocks are not stored in it."""
    engine = Mixed(peer_first=False)
    engine.peer.blocks[key_of(1)] = payload(key_of(1))
    engine.disk.blocks[key_of(2)] = payload(key_of(2))
    for _ in range(3):
        ctx = engine.request()
        assert engine.load(keys_of(1, 2), ctx) == [payload(key_of(1)), payload(key_of(2))]
        engine.manager.on_request_finished(ctx)
        engine.settle()
    assert key_of(1) in engine.disk.blocks
    assert key_of(2) not in engine.peer.blocks


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


def test_a_lent_row_outlives_a_reset() -> None:
    """A reset does not wait for a loan; the row is out of use until the loan has ended."""
    engine = Engine(slots=4)
    lender = Lender(engine.primary)
    engine.store_and_forget(keys_of(1, 2))
    loan = lender.lend(key_of(2))
    assert loan is not None
    assert engine.manager.reset()
    engine.store_and_forget(keys_of(5, 6, 7))
    assert bytes(loan.row) == payload(key_of(2))
    lender.give_back(loan)
    engine.settle_steps(2)
    assert engine.manager.stats().primary.abandoned == 0
    assert engine.manager.lookup(key_of(2), engine.request()) is not LookupResult.HIT
