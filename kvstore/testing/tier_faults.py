"""The part of the tier suite where the medium lies, fails, hangs and comes back."""

from __future__ import annotations

import time
from typing import Any

from kvstore.errors import BackendError
from kvstore.testing.faults import Fault, FaultKind, FaultPlan
from kvstore.testing.seeds import with_seed
from kvstore.testing.tier_harness import TierHarness
from kvstore.testing.tier_rig import TierRig
from kvstore.types import BlockKey, LookupResult, Outcome, RemovalCause, RequestContext

__all__ = ["TierFaultTests"]

_LATE_S = 0.05
"""How long to watch slots that must not be written: that something never happens can only be seen by waiting."""

_DAMAGE = (FaultKind.FLIP_HEADER, FaultKind.FLIP_PAYLOAD, FaultKind.SHORT, FaultKind.MISDIRECT)


class TierFaultTests(TierHarness):
    """Every kind of fault of :class:`~kvstore.testing.Fault`, around the tier's own backend."""

    @with_seed
    def test_a_block_damaged_on_the_medium_is_lost_once(self) -> None:
        """A damaged record is CORRUPT, its neighbours load, and it is a miss from then on until it is stored anew."""
        for kind in _DAMAGE:
            plan = FaultPlan(seed=self.rng.randrange(1 << 30))
            with self.rig(plan=plan, negative_ttl=0.01) as rig:
                keys = self.keys(8)
                plan.add(Fault("put", kind, at=3))
                assert rig.store(keys).success, f"{kind}: the store noticed what only a load can"
                self._lost_once(rig, keys, keys[2], plan, kind)

    @with_seed
    def test_a_block_damaged_on_its_way_is_not_loaded(self) -> None:
        """The same when it is the read that is wrong. On a medium that others use, the good record stays."""
        for kind in _DAMAGE:
            plan = FaultPlan(seed=self.rng.randrange(1 << 30))
            with self.rig(plan=plan, negative_ttl=0.01) as rig:
                keys = self.keys(8)
                rig.store(keys)
                plan.add(Fault("get", kind, at=3))
                self._lost_once(rig, keys, keys[2], plan, kind, stays=not self.exclusive)

    @with_seed
    def test_a_write_that_was_lost_is_a_miss(self) -> None:
        """A medium that says OK and stores nothing costs a block; the tier learns of it at the first load."""
        plan = FaultPlan()
        with self.rig(plan=plan) as rig:
            keys = self.keys(6)
            plan.add(Fault("put", FaultKind.DROP, at=2))
            rig.store(keys)
            loaded = rig.load(keys)
            assert list(loaded.outcomes) == [Outcome.OK, Outcome.MISS, *[Outcome.OK] * 4], f"{loaded}"
            assert rig.lookup(keys[1]) is LookupResult.MISS, "a hit again for a block whose load was a miss"

    @with_seed
    def test_one_failed_block_fails_alone(self) -> None:
        """An I/O error of one block of a load or store leaves the others as they are."""
        plan = FaultPlan()
        with self.rig(plan=plan) as rig:
            keys = self.keys(6)
            plan.add(Fault("put", FaultKind.ERROR, at=4))
            stored = rig.store(keys)
            assert list(stored.outcomes) == [*[Outcome.OK] * 3, Outcome.IO_ERROR, *[Outcome.OK] * 2], f"{stored}"
            plan.add(Fault("get", FaultKind.ERROR, at=1))
            ctx = RequestContext("request")
            loaded = rig.load([key for key in keys if key != keys[3]], ctx)
            assert list(loaded.outcomes) == [Outcome.IO_ERROR, *[Outcome.OK] * 4], f"{loaded}"
            answer = rig.lookup(keys[0], ctx)
            assert answer is LookupResult.MISS, "the request is sent into the same failure again"
            rig.tier.on_request_finished(ctx)
            assert rig.tier.stats().last_error, "a failure that left no text"

    @with_seed
    def test_a_stalled_load_ends_at_its_deadline(self) -> None:
        """A load that hangs is reported as TIMEOUT, and its slots are not written after that."""
        plan = FaultPlan()
        with self.rig(plan=plan, load_timeout=0.2) as rig:
            keys = self.keys(6)
            rig.store(keys)
            plan.add(Fault("get", FaultKind.STALL, times=None))
            started = time.monotonic()
            loaded = rig.load(keys)
            assert time.monotonic() - started >= 0.2, "given up before its deadline"
            assert list(loaded.outcomes) == [Outcome.TIMEOUT] * 6, f"{loaded}"
            for slot in range(6):
                rig.fill(slot)
            plan.clear()
            time.sleep(_LATE_S)
            assert rig.untouched(range(self.slots)), "a slot was written after its load had been reported"

    @with_seed
    def test_a_stalled_store_ends_at_its_deadline(self) -> None:
        """A store that hangs is reported as TIMEOUT; what its slots hold later is never found under its keys."""
        plan = FaultPlan()
        with self.rig(plan=plan, store_timeout=0.2, negative_ttl=0.01) as rig:
            keys = self.keys(6)
            plan.add(Fault("put", FaultKind.STALL, times=None))
            stored = rig.store(keys)
            assert list(stored.outcomes) == [Outcome.TIMEOUT] * 6, f"{stored}"
            plan.clear()
            # A late write may have published any of them; the rig proves what is said to be loaded.
            rig.load(keys)
            rig.until(lambda: rig.store(self.keys(2)).success, "a store after the stall")

    @with_seed
    def test_stores_are_shed_and_loads_are_not(self) -> None:
        """While stores hang, more of them are dropped at once, counted, and loads go on."""
        plan = FaultPlan()
        with self.rig(plan=plan, store_backlog_bytes=4 * self.slot_bytes) as rig:
            held = self.keys(4)
            rig.store(held)
            plan.add(Fault("put", FaultKind.STALL, times=None))
            hanging = rig.submit_store(self.keys(4), range(20, 24))
            rig.until(lambda: plan.stalled, "the stall")
            shed = rig.submit_store(self.keys(3), range(30, 33))
            rig.step()
            assert shed in rig.results, "a store over the backlog was not reported in the same step"
            assert list(rig.results[shed].outcomes) == [Outcome.SHED] * 3, f"{rig.results[shed]}"
            assert rig.tier.stats().shed_blocks == 3, f"{rig.tier.stats()}"
            for _ in range(5):
                assert rig.load(held).success, "a load failed because stores hang"
            plan.clear()
            assert rig.finish(hanging).success, "a store that was let go on did not succeed"
            assert rig.store(self.keys(3)).success, "stores are shed though nothing is in flight"

    @with_seed
    def test_a_failing_medium_is_left_alone_and_taken_back(self) -> None:
        """After some failed loads in a row the breaker opens: lookups miss, loads fail at once; it closes again."""
        plan = FaultPlan()
        with self.rig(plan=plan, breaker_failures=3, breaker_cooldown=0.01, negative_ttl=0.001) as rig:
            keys = self.keys(20)
            rig.store(keys)
            plan.add(Fault("get", FaultKind.ERROR, times=None), Fault("probe", FaultKind.ERROR, times=None))
            for key in keys[:3]:
                rig.load([key])
            assert rig.tier.stats().load_breaker != "closed", f"three failed loads, and {rig.tier.stats()}"
            assert rig.tier.lookup(keys[10]) is LookupResult.MISS, "a hit while the breaker is open"
            injected = plan.injected[FaultKind.ERROR]
            job = rig.submit_load(keys[10:14])
            rig.step()
            assert job in rig.results and not rig.results[job].success, "a load waits though the breaker is open"
            rig.until(lambda: plan.injected[FaultKind.ERROR] > injected, "a probe of the medium")
            plan.clear()
            rig.until(lambda: rig.tier.stats().load_breaker == "closed", "the breaker to close")
            assert rig.lookup(keys[10]) is LookupResult.HIT, "a miss though the medium is back"
            assert rig.load(keys[10:]).success, "can't load though the medium is back"

    @with_seed
    def test_failing_stores_are_left_and_taken_up_again(self) -> None:
        """The same for stores: after failures in a row they are dropped, one is tried now and then, then all go."""
        plan = FaultPlan()
        with self.rig(plan=plan, breaker_failures=3, breaker_cooldown=0.01) as rig:
            held = self.keys(3)
            rig.store(held)
            plan.add(Fault("put", FaultKind.ERROR, times=None))
            rig.until(lambda: Outcome.SHED in rig.store(self.keys(1)).outcomes, "stores to be dropped")
            assert rig.tier.stats().store_breaker != "closed", f"{rig.tier.stats()}"
            assert rig.load(held).success, "loads fail because stores do"
            plan.clear()
            rig.until(lambda: rig.store(self.keys(1)).success, "a store to succeed again")
            assert rig.tier.stats().store_breaker == "closed", f"{rig.tier.stats()}"

    @with_seed
    def test_a_full_medium_is_not_a_broken_one(self) -> None:
        """NO_SPACE is an outcome of stores; it opens no breaker, and loads go on."""
        plan = FaultPlan()
        with self.rig(plan=plan, breaker_failures=2) as rig:
            held = self.keys(3)
            rig.store(held)
            plan.add(Fault("put", FaultKind.NO_SPACE, times=None))
            for _ in range(8):
                assert list(rig.store(self.keys(2)).outcomes) == [Outcome.NO_SPACE] * 2, "not NO_SPACE"
            assert rig.tier.stats().store_breaker == "closed", "a full medium opened the breaker"
            assert rig.load(held).success, "can't load from a full medium"

    @with_seed
    def test_a_failed_question_is_not_an_absence(self) -> None:
        """If the medium can't be asked, a lookup misses, and hits again as soon as it can."""
        if self.exclusive or not self.persistent:
            return
        config, keys, plan = self.make_config(), self.keys(4), FaultPlan()
        with self.rig(config) as rig:
            rig.store(keys)
        plan.add(*(Fault(op, FaultKind.ERROR, times=None) for op in ("exists", "scan", "probe")))
        with self.rig(config, plan=plan, breaker_cooldown=0.01, negative_ttl=3600) as rig:
            for key in keys:
                assert rig.lookup(key) is LookupResult.MISS, "a hit of a medium that can't be asked"
            plan.clear()
            rig.until(lambda: rig.lookup(keys[0]) is LookupResult.HIT, "a hit after the medium is back")

    @with_seed
    def test_a_key_that_is_not_answered_costs_only_itself(self) -> None:
        """A key of which the medium can't say whether it is there is a miss for a pause; all others stay hits."""
        if self.exclusive or not self.persistent:
            return
        config, keys = self.make_config(), self.keys(4)
        with self.rig(config) as rig:
            rig.store(keys)
        # Without recovery, or nothing would be asked for.
        faults = Fault("exists", FaultKind.DROP), Fault("scan", FaultKind.ERROR)
        with self.rig(config, plan=FaultPlan(faults), negative_ttl=3600, breaker_failures=1) as rig:
            assert rig.lookup(keys[0]) is LookupResult.MISS, "a hit of a block of which nothing is known"
            for key in keys[1:]:
                assert rig.lookup(key) is LookupResult.HIT, "one key without an answer hid another one"
            assert rig.tier.stats().load_breaker == "closed", "one key without an answer opened the breaker"
            assert rig.lookup(keys[0]) is LookupResult.MISS, "asked again at once"
        with self.rig(config, plan=FaultPlan(faults), negative_ttl=0.01) as rig:
            rig.until(lambda: rig.lookup(keys[0]) is LookupResult.HIT, "a hit once the medium can say")

    @with_seed
    def test_close_ends_what_hangs(self) -> None:
        """A tier whose medium hangs closes all the same: jobs are given up, the primary tier is free."""
        plan = FaultPlan()
        with self.rig(plan=plan) as rig:
            keys = self.keys(4)
            rig.store(keys)
            plan.add(Fault("get", FaultKind.STALL, times=None), Fault("put", FaultKind.STALL, times=None))
            jobs = [rig.submit_load(keys, range(10, 14)), rig.submit_store(self.keys(4), range(20, 24))]
            rig.until(lambda: plan.stalled == 2, "both jobs to hang")
            rig.tier.close(rig.timeout_s)
            rig.step()
            for job_id in jobs:
                assert job_id in rig.results, f"job {job_id} was not reported by close"
                assert set(rig.results[job_id].outcomes) == {Outcome.CANCELLED}, f"{rig.results[job_id]}"
            assert rig.untouched(range(10, 14)), "a slot was written by a load that was given up"

    @with_seed
    def test_a_medium_that_is_not_there_at_start(self) -> None:
        """A required tier raises and leaves nothing behind; another one starts without it and finds it later."""
        config, plan = self.make_config(), FaultPlan([Fault("open", FaultKind.ERROR, times=None)])
        try:
            with self.rig(config, plan=plan, required=True):
                raise AssertionError("a required tier opened without its medium")
        except BackendError:
            pass
        with self.rig(config, plan=plan, required=False, breaker_cooldown=0.01, breaker_failures=1) as rig:
            keys = self.keys(3)
            for key in keys:
                assert rig.lookup(key) is LookupResult.MISS, "a hit of a medium that is not there"
            assert not rig.store(keys).success, "stored to a medium that is not there"
            plan.clear()
            rig.until(lambda: rig.store(keys).success, "a store after the medium has come")
            rig.until(lambda: rig.lookup(keys[0]) is LookupResult.HIT, "a hit after the medium has come")
            assert rig.load(keys).success, "can't load after the medium has come"

    @with_seed
    def test_never_wrong_bytes_whatever_happens(self) -> None:
        """Under a mixture of all faults every job is reported once, and what is said to be loaded is right."""
        kinds = {
            "put": (*_DAMAGE, FaultKind.DROP, FaultKind.ERROR, FaultKind.RAISE, FaultKind.NO_SPACE, FaultKind.DELAY),
            "get": (*_DAMAGE, FaultKind.ERROR, FaultKind.RAISE, FaultKind.DELAY),
            "exists": (FaultKind.ERROR, FaultKind.DELAY),
        }
        faults = [Fault(op, kind, times=None, probability=0.02, seconds=0.001) for op in kinds for kind in kinds[op]]
        plan = FaultPlan(faults, seed=self.rng.randrange(1 << 30))
        options: dict[str, Any] = {"breaker_failures": 1000, "negative_ttl": 0.001, "positive_ttl": 0.001}
        with self.rig(plan=plan, **options) as rig:
            pool = self.keys(40)
            loaded = rounds = 0
            missing = set(kinds["put"])
            # A hundred rounds, and as many more as it takes to see every kind of fault.
            while rounds < 100 or (missing and rounds < 1000):
                rig.store([*self.rng.sample(pool, self.rng.randrange(1, 8)), *self.keys(2)])
                loaded += len(rig.load(self.rng.sample(pool, self.rng.randrange(1, 12))).successful_keys)
                rig.lookup(self.rng.choice(pool))
                missing -= set(plan.injected)
                rounds += 1
            assert not missing, f"never injected: {missing}; {plan}"
            assert loaded, "nothing could be loaded at all"
            plan.clear()
            fresh = self.keys(5)
            assert rig.store(fresh).success and rig.load(fresh).success, "the tier did not survive the faults"

    def _lost_once(
        self,
        rig: TierRig,
        keys: list[BlockKey],
        bad: BlockKey,
        plan: FaultPlan,
        kind: FaultKind,
        *,
        stays: bool = False,
    ) -> None:
        """Load keys of which one is damaged, and check what the tier makes of it."""
        rig.tier.take_events()
        loaded = rig.load(keys)
        assert plan.injected[kind] == 1, f"{kind}: not injected, {plan}"
        expected = [Outcome.CORRUPT if key == bad else Outcome.OK for key in keys]
        assert list(loaded.outcomes) == expected, f"{kind}: {loaded}"
        assert sum(rig.tier.stats().faults.values()) == 1, f"{kind}: not counted by cause, {rig.tier.stats()}"
        assert rig.lookup(bad) is LookupResult.MISS, f"{kind}: a hit again for a block that is damaged"
        left = [(event.keys, event.cause) for event in rig.tier.take_events() if event.cause is not None]
        assert left == [((bad,), RemovalCause.CORRUPT)], f"{kind}: told to have left: {left}"
        if stays:
            rig.until(lambda: rig.lookup(bad) is LookupResult.HIT, f"{kind}: a hit for a block that was never damaged")
            assert rig.load([bad]).success, f"{kind}: a block that was never damaged can't be loaded"
        elif self.deletes:
            rig.until(lambda: rig.store([bad]).outcomes[0] is Outcome.OK, f"{kind}: the block to be stored anew")
            rig.until(lambda: rig.lookup(bad) is LookupResult.HIT, f"{kind}: a hit for the new block")
            assert rig.load([bad]).success, f"{kind}: the new block can't be loaded"
