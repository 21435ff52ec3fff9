"""The part of the tier suite that is about epochs: after a reset nothing is found that was stored before it."""

from __future__ import annotations

from kvstore.testing.faults import Fault, FaultKind, FaultPlan
from kvstore.testing.seeds import with_seed
from kvstore.testing.tier_harness import TierHarness
from kvstore.types import LookupResult, Outcome

__all__ = ["TierEpochTests"]


class TierEpochTests(TierHarness):
    """Resets of a tier, alone and in a row, with stores under way."""

    @with_seed
    def test_a_new_epoch_finds_nothing_of_an_earlier_one(self) -> None:
        """After a reset every block is a miss, at once and later, until it is stored anew; then it is found."""
        with self.rig(reset="forget") as rig:
            rig.recovered()
            keys = self.keys(12)
            assert rig.store(keys).success
            assert rig.tier.drain(rig.timeout_s), "a drain of nothing did not end"
            rig.tier.begin_epoch()
            assert rig.tier.lookup(keys[0]) is LookupResult.MISS, "a hit right after the reset"
            rig.until(lambda: rig.tier.stats().epoch, "the new epoch")
            rig.recovered()
            assert [rig.lookup(key) for key in keys] == [LookupResult.MISS] * 12, "a block of an earlier epoch is found"
            loaded = rig.load(keys[:4])
            assert list(loaded.outcomes) == [Outcome.MISS] * 4, f"loaded from an earlier epoch: {loaded}"
            again = rig.store(keys[:6])
            assert list(again.outcomes) == [Outcome.OK] * 6, f"taken for the blocks of an earlier epoch: {again}"
            assert rig.load(keys[:6]).success, "a block of the new epoch can't be loaded"
            assert rig.lookup(keys[6]) is LookupResult.MISS, "a block that was not stored anew is found"

    @with_seed
    def test_a_store_that_ends_after_the_reset_stays_in_its_epoch(self) -> None:
        """A store that the medium finishes late is reported, and never found in the new epoch."""
        plan = FaultPlan([Fault("put", FaultKind.STALL)])
        with self.rig(plan=plan, reset="forget", store_timeout=self.timeout_s) as rig:
            rig.recovered()
            keys = self.keys(3)
            job = rig.submit_store(keys)
            rig.until(lambda: plan.stalled, "a store that is stuck")
            rig.tier.begin_epoch()
            rig.step()
            assert rig.tier.stats().epoch is None, "an epoch began while a store of the last one was under way"
            assert rig.tier.lookup(keys[0]) is LookupResult.MISS, "a hit while the epoch changes"
            shed = rig.finish(rig.submit_store(self.keys(2), [10, 11]))
            assert list(shed.outcomes) == [Outcome.SHED] * 2, f"a store while the epoch changes: {shed}"
            plan.clear()
            rig.finish(job)
            rig.until(lambda: rig.tier.stats().epoch, "the new epoch")
            rig.recovered()
            assert [rig.lookup(key) for key in keys] == [LookupResult.MISS] * 3, "a late store is found"
            assert list(rig.load(keys).outcomes) == [Outcome.MISS] * 3, "a late store is loaded"

    @with_seed
    def test_resets_in_a_row(self) -> None:
        """However quickly resets follow each other and stores, only what the present epoch stored is found."""
        with self.rig(reset="forget") as rig:
            rig.recovered()
            keys = self.keys(8)
            for _ in range(6):
                jobs = [rig.submit_store(keys)]
                for _ in range(self.rng.randrange(1, 4)):
                    rig.tier.begin_epoch()
                    if self.rng.random() < 0.5:
                        rig.step()
                for job in jobs:
                    rig.finish(job)
                rig.until(lambda: rig.tier.stats().epoch, "the new epoch")
                rig.recovered()
                assert [rig.lookup(key) for key in keys] == [LookupResult.MISS] * 8, "found after a reset"
            assert rig.store(keys).success and rig.load(keys).success, "the last epoch can't be used"

    @with_seed
    def test_a_restart_begins_in_the_base_epoch(self) -> None:
        """A new tier finds what was stored before the first reset, and nothing that was stored after it."""
        config, before, after = self.make_config(), self.keys(6), self.keys(6)
        with self.rig(config, reset="forget") as rig:
            rig.recovered()
            rig.store(before)
            rig.begin_epoch()
            rig.recovered()
            rig.store(after)
        with self.rig(config) as rig:
            rig.recovered()
            assert rig.tier.stats().epoch == "", "a tier opened in another epoch than the base one"
            found = [rig.lookup(key) for key in before]
            assert found == [LookupResult.HIT if self.persistent else LookupResult.MISS] * 6, f"{found}"
            assert [rig.lookup(key) for key in after] == [LookupResult.MISS] * 6, "found what another epoch stored"

    @with_seed
    def test_a_tier_that_closes_while_its_epoch_changes_lets_go_of_the_medium(self) -> None:
        """Wherever the change is interrupted, the next tier opens on the same medium at once."""
        config = self.make_config()
        for _ in range(4):
            with self.rig(config, reset="forget") as rig:
                rig.store(self.keys(2))
                rig.tier.begin_epoch()
                for _ in range(self.rng.randrange(3)):
                    rig.step()

    @with_seed
    def test_a_tier_may_keep_its_blocks(self) -> None:
        """With ``"reset": "keep"`` a reset changes nothing."""
        with self.rig(reset="keep") as rig:
            keys = self.keys(4)
            rig.store(keys)
            assert rig.begin_epoch() == "", "a tier that keeps its blocks left its epoch"
            assert rig.load(keys).success, "a tier that keeps its blocks lost one"
