"""The contract of a secondary tier as a test suite, to be subclassed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

from kvstore.errors import BackendError
from kvstore.namespace import Namespace
from kvstore.testing.faults import Fault, FaultKind, FaultPlan
from kvstore.testing.seeds import with_seed
from kvstore.testing.tier_rig import TierRig
from kvstore.types import (
    KEY_BYTES_MAX,
    BlockKey,
    JobResult,
    LookupResult,
    Outcome,
    RemovalCause,
    RequestContext,
    TransferJob,
)


class TierHarness:
    """Properties of the tested tier, set by a subclass of :class:`~kvstore.testing.TierTests`."""

    authoritative: ClassVar[bool] = True  # Whether the tier knows all blocks, so that a miss needs no query.
    persistent: ClassVar[bool] = True
    """Whether blocks outlive a close, and are found again with the same configuration."""
    deletes: ClassVar[bool] = True  # Whether the backend can remove.
    forgets: ClassVar[bool] = True
    """Whether all blocks of a tenant can be removed. The backend must be able to remove, and to list its medium."""
    slot_bytes: ClassVar[int] = 16384  # Length of a slot.
    slots: ClassVar[int] = 64  # Number of slots.
    timeout_s: float = 20.0  # Limit of every wait.
    namespace: Namespace = Namespace({"suite": "tier"})  # Namespace of the blocks.
    rng: random.Random  # Seeded; fresh in each check.

    def make_config(self) -> dict[str, Any]:
        """Return the configuration of a tier over an empty medium (another one in each call)."""
        raise NotImplementedError

    def small_config(self, capacity_bytes: int) -> dict[str, Any] | None:
        """Return the same with a capacity; None if it can't have one."""
        return None

    def rig(
        self,
        config: dict[str, Any] | None = None,
        *,
        plan: FaultPlan | None = None,
        namespace: Namespace | None = None,
        **options: Any,
    ) -> TierRig:
        """Open a tier (by default on an empty medium), with faults around its backend if there is a plan.

        Deadlines that neither the configuration nor the check sets are as long as the suite's longest wait, so that
        other checks also pass on a busy machine.
        """
        patient = {"load_timeout": self.timeout_s, "lookup_timeout": self.timeout_s}
        return TierRig(
            {**patient, **(config or self.make_config()), **options},
            namespace=namespace or self.namespace,
            slot_bytes=self.slot_bytes,
            slots=self.slots,
            timeout_s=self.timeout_s,
            plan=plan,
        )

    def keys(self, count: int) -> list[BlockKey]:
        """Return new keys."""
        return [self.rng.randbytes(32) for _ in range(count)]


class TierValueTests(TierHarness):
    """Stores, lookups and loads, one step after the other."""

    @with_seed
    def test_stored_blocks_are_hits_and_load_back(self) -> None:
        """A lookup finds stored blocks, and a load returns their bytes in other slots."""
        with self.rig() as rig:
            keys = self.keys(20)
            stored = rig.store(keys)
            assert stored.success and list(stored.successful_keys) == keys, f"a plain store: {stored}"
            assert stored.size_bytes == 20 * self.slot_bytes, f"a store of 20 blocks moved {stored.size_bytes} bytes"
            assert [rig.lookup(key) for key in keys] == [LookupResult.HIT] * 20, (
                "a stored block is not a hit: get_into and exists must find a block as soon as put returns"
            )
            shuffled = self.rng.sample(keys, 20)
            loaded = rig.load(shuffled)
            assert loaded.success, f"a plain load: {loaded}"
            assert loaded.size_bytes == 20 * self.slot_bytes, f"a load of 20 blocks moved {loaded.size_bytes} bytes"
            assert rig.untouched(range(20, self.slots)), "a slot without a job was written"

    @with_seed
    def test_unknown_blocks_are_misses(self) -> None:
        """A block that was never stored is a MISS; of an authoritative medium already at the first lookup."""
        with self.rig() as rig:
            rig.recovered()
            for key in self.keys(10):
                if self.authoritative:
                    answer = rig.tier.lookup(key)
                    assert answer is LookupResult.MISS, (
                        f"first lookup of an unknown block: {answer}; set authoritative to False if others write to it"
                    )
                assert rig.lookup(key) is LookupResult.MISS, (
                    "a block that was never stored is a hit: exists is False for it"
                )
            loaded = rig.load(self.keys(3))
            assert list(loaded.outcomes) == [Outcome.MISS] * 3, f"load of unknown blocks: {loaded}"

    @with_seed
    def test_a_partial_load_is_exact(self) -> None:
        """A load of hits and misses in any order reports exactly the hits."""
        with self.rig() as rig:
            held = self.keys(12)
            rig.store(held)
            for _ in range(5):
                keys = [*self.rng.sample(held, 6), *self.keys(5)]
                self.rng.shuffle(keys)
                loaded = rig.load(keys)
                assert list(loaded.successful_keys) == [key for key in keys if key in held], f"{loaded}"
                expected = [Outcome.OK if key in held else Outcome.MISS for key in keys]
                assert list(loaded.outcomes) == expected, f"{loaded.outcomes}, expected {expected}"
                assert loaded.size_bytes == 6 * self.slot_bytes, f"{loaded.size_bytes} bytes reported for 6 blocks"

    @with_seed
    def test_storing_again_is_a_success_that_moves_nothing(self) -> None:
        """Blocks that are already stored are EXISTS, count as stored, and are not written again."""
        with self.rig() as rig:
            held, new = self.keys(5), self.keys(3)
            rig.store(held)
            keys = self.rng.sample(held + new, 8)
            stored = rig.store(keys)
            assert stored.success, f"{stored}"
            expected = [Outcome.EXISTS if key in held else Outcome.OK for key in keys]
            assert list(stored.outcomes) == expected, f"{stored.outcomes}, expected {expected}"
            assert stored.size_bytes == 3 * self.slot_bytes, f"{stored.size_bytes} bytes moved for 3 new blocks"
            assert rig.load(held + new).success, "not all blocks can be loaded"

    @with_seed
    def test_forgotten_blocks_are_gone(self) -> None:
        """``forget`` removes exactly the blocks whose keys begin with a prefix; they can be stored again."""
        if not self.forgets:
            return
        with self.rig() as rig:
            ours, others = ([name + key[8:] for key in self.keys(12)] for name in (b"tenant-1", b"tenant-2"))
            for keys in (ours, others):
                rig.store(keys)
            rig.until(lambda: rig.tier.forget(b"tenant-1"), "the tenant to be forgotten")
            assert [rig.lookup(key) for key in ours] == [LookupResult.MISS] * 12, (
                "a forgotten block is found: delete and scan must agree, or set forgets to False"
            )
            assert list(rig.load(ours).outcomes) == [Outcome.MISS] * 12, "a forgotten block can be loaded"
            assert rig.load(others).success, "another tenant's block is gone"
            rig.until(lambda: rig.tier.forget(b"tenant-1"), "the second removal")
            assert list(rig.store(ours).outcomes) == [Outcome.OK] * 12, "a forgotten block is still there"
            assert rig.load(ours).success, "a block stored after the tenant was forgotten can't be loaded"

    @with_seed
    def test_every_job_is_reported_once_and_right(self) -> None:
        """Each of many concurrent jobs on the same keys is reported once, and loaded blocks have the right bytes."""
        with self.rig() as rig:
            pool = self.keys(40)
            free = list(range(self.slots - 4))
            running: dict[int, tuple[str, list[BlockKey], list[int]]] = {}
            for _ in range(150):
                count = self.rng.randrange(1, 7)
                while len(free) < count:
                    rig.until(lambda: any(job_id in rig.results for job_id in running), "a job to end")
                    free += self._ended(rig, running)
                slots = [free.pop(self.rng.randrange(len(free))) for _ in range(count)]
                keys = self.rng.sample(pool, count)
                kind = self.rng.choice(("store", "load"))
                submit = rig.submit_store if kind == "store" else rig.submit_load
                running[submit(keys, slots)] = (kind, keys, slots)
            rig.until(lambda: all(job_id in rig.results for job_id in running), "the end of all jobs")
            self._ended(rig, running)
            assert rig.tier.stats().outcomes.get("load.ok"), "no load found a stored block"
            assert rig.untouched(range(self.slots - 4, self.slots)), "a slot without a job was written"

    @with_seed
    def test_drain_waits_for_all_jobs(self) -> None:
        """After a drain no job runs, and all results can be fetched."""
        with self.rig() as rig:
            keys = self.keys(30)
            jobs = [rig.submit_store(keys[i : i + 3], range(i, i + 3)) for i in range(0, 30, 3)]
            assert rig.tier.drain(timeout_s=rig.timeout_s), "a drain of ten small stores did not end"
            assert rig.tier.stats().jobs_in_flight == 0, "jobs in flight after a drain"
            rig.step()
            assert set(rig.results) == set(jobs), "not all results can be fetched after a drain"
            assert rig.tier.drain(timeout_s=rig.timeout_s), "a drain of nothing did not end"

    @with_seed
    def test_invalid_arguments_raise_nothing(self) -> None:
        """With invalid arguments no method raises, every job is reported, and the tier continues to work."""
        with self.rig() as rig:
            good = self.keys(4)
            rig.store(good)
            odd_keys: list[Any] = [b"", b"x" * (KEY_BYTES_MAX + 1), "text", 7, None, b"\0" * 1000]
            for key in odd_keys:
                rig.tier.lookup(key)
                rig.tier.touch([key])
                rig.tier.remove([key])
            odd_jobs: list[tuple[Any, Any]] = [
                ((), ()),
                (good[:1], (-1,)),
                (good[:1], (self.slots,)),
                (good[:1], (10**12,)),
                (good[:2], (0,)),
                (self.keys(1), (0, 1)),
                (good[:1] * 2, (0, 1)),
                *(((key,), (0,)) for key in odd_keys),
            ]
            submits: tuple[Callable[[TransferJob], None], ...] = (rig.tier.submit_load, rig.tier.submit_store)
            for submit in submits:
                for keys, slots in odd_jobs:
                    submit(rig.job(keys, slots))
                    rig.step()
            rig.tier.on_request_finished(RequestContext("never seen"))
            jobs = 1 + 2 * len(odd_jobs)
            rig.until(lambda: len(rig.results) == jobs, f"reports of {jobs} jobs, most of them invalid")
            assert rig.load(good).success, "stored blocks can't be loaded after invalid calls"
            assert rig.store(self.keys(3)).success, "nothing can be stored after invalid calls"

    def _ended(self, rig: TierRig, running: dict[int, tuple[str, list[BlockKey], list[int]]]) -> Sequence[int]:
        """Check the jobs that have ended; return their slots, filled with the canary."""
        freed: list[int] = []
        for job_id in [job_id for job_id in running if job_id in rig.results]:
            kind, keys, slots = running.pop(job_id)
            result: JobResult = rig.results[job_id]
            if kind == "load":
                rig.prove(result, keys, slots)
                assert set(result.outcomes) <= {Outcome.OK, Outcome.MISS}, f"a load: {result}"
            else:
                assert result.success, f"a store: {result}"
                unchanged = all(rig.content(slot) == rig.payload(key) for key, slot in zip(keys, slots, strict=True))
                assert unchanged, "a store changed the slots that it stores from"
            for slot in slots:
                rig.fill(slot)
            freed += slots
        return freed


class TierLifecycleTests(TierHarness):
    """Close, restart, capacity, events and statistics."""

    @with_seed
    def test_close_reports_running_jobs(self) -> None:
        """Jobs in flight at close are reported once, and the primary tier is released (checked by the rig)."""
        for _ in range(5):
            with self.rig() as rig:
                held = self.keys(10)
                rig.store(held)
                rig.submit_load(held, range(20, 30))
                for start in range(30, 60, 10):
                    rig.submit_store(self.keys(10), range(start, start + 10))
                for _ in range(self.rng.randrange(3)):
                    rig.step()

    @with_seed
    def test_a_closed_tier_answers(self) -> None:
        """After a close, and a second one, no method raises: lookups miss, jobs fail and are reported."""
        with self.rig() as rig:
            keys = self.keys(3)
            rig.store(keys)
            rig.tier.close()
            rig.tier.close()
            assert rig.tier.lookup(self.keys(1)[0]) is not LookupResult.HIT, "a closed tier has a hit for a new key"
            rig.tier.touch(keys)
            rig.tier.on_request_finished(RequestContext("gone"))
            rig.tier.take_events()
            rig.tier.stats()
            jobs = [rig.submit_load(keys), rig.submit_store(self.keys(3), [5, 6, 7])]
            rig.step()
            assert rig.tier.drain(timeout_s=1.0), "the drain of a closed tier did not end"
            rig.step()
            for job_id in jobs:
                assert job_id in rig.results, f"job {job_id}, submitted after close, was not reported"
                assert not rig.results[job_id].success, f"job {job_id}, submitted after close, succeeded"

    @with_seed
    def test_events_report_stored_and_evicted_blocks(self) -> None:
        """Each block has one event when it is stored, and one when it is evicted; loads have none."""
        config = self.small_config(20 * (self.slot_bytes + 4096))
        with self.rig(config) as rig:
            rig.recovered()
            entered: list[BlockKey] = []
            left: list[BlockKey] = []

            def collect() -> bool:
                for event in rig.tier.take_events():
                    assert event.cause in (None, RemovalCause.EVICTED), f"{event}"
                    (entered if event.cause is None else left).extend(event.keys)
                return True

            stored: list[BlockKey] = []
            for _ in range(8):
                stored += rig.store(self.keys(6)).successful_keys
                collect()
            rig.until(lambda: collect() and set(entered) == set(stored), "events of all stores")
            assert len(entered) == len(set(entered)) and len(left) == len(set(left)), "a block was reported twice"
            assert set(left) <= set(entered), "a block left without having entered"
            assert config is None or left, (
                "48 blocks were stored into room for 20, and no eviction was reported: call the removal listener"
            )
            rig.load(stored[-3:])
            assert [event for event in rig.tier.take_events() if event.cause is None] == [], "a load reported a store"

    @with_seed
    def test_evicted_blocks_are_misses(self) -> None:
        """A tier over its capacity misses evicted blocks in the same step, and loads the kept ones."""
        config = self.small_config(20 * (self.slot_bytes + 4096))
        if config is None:
            return
        with self.rig(config) as rig:
            stored: list[BlockKey] = []
            for _ in range(8):
                stored += rig.store(self.keys(6)).successful_keys
            rig.until(lambda: rig.tier.stats().blocks, "statistics")
            rig.until(lambda: rig.tier.stats().used_bytes <= rig.tier.stats().capacity_bytes, "use within capacity")
            hits = [key for key in stored if rig.lookup(key) is LookupResult.HIT]
            assert 0 < len(hits) < len(stored), f"{len(hits)} hits of {len(stored)} stored"
            for start in range(0, len(hits), 8):
                rig.load(hits[start : start + 8])

    @with_seed
    def test_blocks_outlive_a_restart(self) -> None:
        """A new tier over the same medium finds and loads the blocks; a tier with another namespace does not."""
        if not self.persistent:
            return
        config, keys = self.make_config(), self.keys(30)
        with self.rig(config) as rig:
            rig.store(keys)
        others: list[tuple[Namespace | None, dict[str, str]]] = [
            (Namespace({"suite": "another"}), {}),
            (None, {"namespace": "salt"}),
        ]
        for namespace, options in others:
            with self.rig({**config, **options}, namespace=namespace) as rig:
                rig.recovered()
                assert rig.lookup(keys[0]) is LookupResult.MISS, (
                    "a hit for a block of another namespace: keep blocks by namespace and key"
                )
                assert list(rig.load(keys[:2]).outcomes) == [Outcome.MISS] * 2, "loaded a block of another namespace"
        with self.rig(config) as rig:
            rig.recovered()
            assert [rig.lookup(key) for key in keys] == [LookupResult.HIT] * 30, (
                "a block was lost by a restart: find stored blocks when opened, or set persistent to False"
            )
            assert rig.load(keys).success, "a block can't be loaded after a restart"
            assert list(rig.store(keys[:4]).outcomes) == [Outcome.EXISTS] * 4, (
                "stored again after a restart: put is EXISTS for a block on the medium"
            )

    @with_seed
    def test_statistics_add_up(self) -> None:
        """Counts of blocks, bytes, lookups and outcomes match the calls made."""
        with self.rig() as rig:
            rig.recovered()
            keys = self.keys(10)
            rig.store(keys)
            rig.load([*keys[:4], *self.keys(2)])
            for key in keys:
                rig.lookup(key)
            stats = rig.tier.stats()
            assert stats.bytes_stored == 10 * self.slot_bytes, f"{stats}"
            assert stats.bytes_loaded == 4 * self.slot_bytes, f"{stats}"
            outcomes = {name: count for name, count in stats.outcomes.items() if count}
            assert outcomes == {"store.ok": 10, "load.ok": 4, "load.miss": 2}, f"{stats}"
            assert stats.lookups.get("hit") == 10, f"{stats}"
            assert (stats.jobs_in_flight, stats.bytes_in_flight, stats.shed_blocks) == (0, 0, 0), f"{stats}"
            assert (stats.load_breaker, stats.store_breaker) == ("closed", "closed"), f"{stats}"

    @with_seed
    def test_two_tiers_do_not_disturb_each_other(self) -> None:
        """Two tiers of one process share only a loop; one continues when the other closes."""
        with ExitStack() as stack:
            first = stack.enter_context(self.rig())
            keys = self.keys(5)
            with self.rig() as second:
                first.store(keys)
                second.recovered()
                assert second.lookup(keys[0]) is LookupResult.MISS, (
                    "a tier finds blocks of another medium: make_config must return a new medium"
                )
                second.store(keys[:2])
            assert first.load(keys).success, "a tier can't load after another one was closed"


class TierEpochTests(TierHarness):
    """Single and consecutive resets of a tier, also with unfinished stores."""

    @with_seed
    def test_a_new_epoch_finds_nothing_of_an_earlier_one(self) -> None:
        """After a reset every block is a miss, immediately and later, until it is stored again and found."""
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
            assert list(again.outcomes) == [Outcome.OK] * 6, f"treated as blocks of an earlier epoch: {again}"
            assert rig.load(keys[:6]).success, "a block of the new epoch can't be loaded"
            assert rig.lookup(keys[6]) is LookupResult.MISS, "a block that was not stored again is found"

    @with_seed
    def test_a_store_that_ends_after_the_reset_stays_in_its_epoch(self) -> None:
        """A store that the medium finishes late is reported, and never found in the new epoch."""
        plan = FaultPlan([Fault("put", FaultKind.STALL)])
        with self.rig(plan=plan, reset="forget", store_timeout=self.timeout_s) as rig:
            rig.recovered()
            keys = self.keys(3)
            job = rig.submit_store(keys)
            rig.until(lambda: plan.stalled, "the stall")
            rig.tier.begin_epoch()
            rig.step()
            assert rig.tier.stats().epoch is None, "an epoch began during a store of the previous one"
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
        """After several resets in quick succession, only blocks of the current epoch are found."""
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
        """A new tier finds blocks stored before the first reset, and none stored after it."""
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
            assert [rig.lookup(key) for key in after] == [LookupResult.MISS] * 6, "found a block of another epoch"

    @with_seed
    def test_a_tier_that_closes_while_its_epoch_changes_releases_the_medium(self) -> None:
        """If a close interrupts an epoch change at any point, the next tier on the medium opens immediately."""
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


_LATE_S = 0.05
"""Time to watch slots that must not be written; a late write can only be detected by waiting."""

_DAMAGE = (FaultKind.FLIP_HEADER, FaultKind.FLIP_PAYLOAD, FaultKind.SHORT, FaultKind.MISDIRECT)


class TierFaultTests(TierHarness):
    """Every kind of fault of :class:`~kvstore.testing.Fault`, around the tier's own backend."""

    @with_seed
    def test_a_block_damaged_on_the_medium_is_lost_once(self) -> None:
        """A damaged record is CORRUPT, its neighbours load, and it is a miss until it is stored again."""
        for kind in _DAMAGE:
            self._damage_block("put", kind)

    @with_seed
    def test_a_block_damaged_on_its_way_is_not_loaded(self) -> None:
        """The same for a damaged read of an intact record. On a shared medium the record stays."""
        for kind in _DAMAGE:
            self._damage_block("get", kind, stays=not self.authoritative)

    @with_seed
    def test_a_write_that_was_lost_is_a_miss(self) -> None:
        """If a medium returns OK and stores nothing, the block is lost; the tier detects this at the first load."""
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
        """An I/O error of one block in a load or store does not affect the other blocks."""
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
            assert answer is LookupResult.MISS, "the request would repeat the failed load"
            rig.tier.on_request_finished(ctx)
            assert rig.tier.stats().last_error, "a failure without an error text"

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
            assert time.monotonic() - started >= 0.2, "abandoned before its deadline"
            assert list(loaded.outcomes) == [Outcome.TIMEOUT] * 6, f"{loaded}"
            for slot in range(6):
                rig.fill(slot)
            plan.clear()
            time.sleep(_LATE_S)
            assert rig.untouched(range(self.slots)), (
                "a slot was written after its load had been reported: get_into must not write once it was cancelled"
            )

    @with_seed
    def test_a_stalled_store_ends_at_its_deadline(self) -> None:
        """A hanging store is reported as TIMEOUT; later contents of its slots are never loaded under its keys."""
        plan = FaultPlan()
        with self.rig(plan=plan, store_timeout=0.2, negative_ttl=0.01) as rig:
            keys = self.keys(6)
            plan.add(Fault("put", FaultKind.STALL, times=None))
            stored = rig.store(keys)
            assert list(stored.outcomes) == [Outcome.TIMEOUT] * 6, f"{stored}"
            plan.clear()
            # A late write may have published any of them; the rig compares blocks reported as loaded.
            rig.load(keys)
            rig.until(lambda: rig.store(self.keys(2)).success, "a store after the stall")

    @with_seed
    def test_stores_are_shed_and_loads_are_not(self) -> None:
        """While stores hang, further stores are dropped immediately and counted, and loads continue."""
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
            assert rig.finish(hanging).success, "a resumed store did not succeed"
            assert rig.store(self.keys(3)).success, "stores are shed though nothing is in flight"

    @with_seed
    def test_a_failing_medium_is_avoided_until_it_recovers(self) -> None:
        """After consecutive failed loads the breaker opens: lookups miss, loads fail immediately; it closes again."""
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
            assert rig.lookup(keys[10]) is LookupResult.HIT, (
                "a miss though the medium has recovered: probe succeeds once it serves again"
            )
            assert rig.load(keys[10:]).success, "can't load though the medium has recovered"

    @with_seed
    def test_failing_stores_stop_until_a_trial_succeeds(self) -> None:
        """The same for stores: after consecutive failures they are dropped until an occasional trial succeeds."""
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
    def test_a_full_medium_refuses_stores_only(self) -> None:
        """NO_SPACE opens the breaker of stores, and loads continue."""
        plan = FaultPlan()
        with self.rig(plan=plan, breaker_failures=2) as rig:
            held = self.keys(3)
            rig.store(held)
            plan.add(Fault("put", FaultKind.NO_SPACE, times=None))
            for _ in range(2):
                assert list(rig.store(self.keys(2)).outcomes) == [Outcome.NO_SPACE] * 2, "not NO_SPACE"
            stats = rig.tier.stats()
            assert (stats.store_breaker, stats.load_breaker) == ("open", "closed"), f"{stats}"
            assert rig.load(held).success, "can't load from a full medium"

    @with_seed
    def test_a_store_under_way_is_forgotten_too(self) -> None:
        """``forget`` does not complete while a store of the tenant's blocks is in progress or the medium fails."""
        if not self.forgets:
            return
        plan = FaultPlan()
        with self.rig(plan=plan, store_timeout=0.05, breaker_cooldown=0.01, breaker_cooldown_max=0.05) as rig:
            first, late = ([b"tenant-1" + key[8:] for key in self.keys(4)] for _ in range(2))
            rig.store(first)
            plan.add(Fault("put", FaultKind.STALL), Fault("delete", FaultKind.ERROR))
            hanging = rig.submit_store(late)
            rig.until(lambda: hanging in rig.results, "the deadline of the store")
            for _ in range(5):
                rig.step()
                assert not rig.tier.forget(b"tenant-1"), "reported as forgotten while a store may still end"
            plan.clear()
            rig.until(lambda: rig.tier.forget(b"tenant-1"), "the tenant to be forgotten")
            rig.until(
                lambda: [rig.lookup(key) for key in first + late] == [LookupResult.MISS] * 8, "a miss for every block"
            )
            assert list(rig.load(first + late).outcomes) == [Outcome.MISS] * 8, "a forgotten block reappeared"

    @with_seed
    def test_a_failed_lookup_is_not_an_absence(self) -> None:
        """If the medium cannot answer, a lookup misses; it hits again as soon as the medium answers."""
        if self.authoritative or not self.persistent:
            return
        config, keys, plan = self.make_config(), self.keys(4), FaultPlan()
        with self.rig(config) as rig:
            rig.store(keys)
        plan.add(*(Fault(op, FaultKind.ERROR, times=None) for op in ("exists", "scan", "probe")))
        with self.rig(config, plan=plan, breaker_cooldown=0.01, negative_ttl=3600) as rig:
            for key in keys:
                assert rig.lookup(key) is LookupResult.MISS, "a hit while the medium can't answer"
            plan.clear()
            rig.until(lambda: rig.lookup(keys[0]) is LookupResult.HIT, "a hit after the medium has recovered")

    @with_seed
    def test_a_key_without_an_answer_costs_only_itself(self) -> None:
        """A key of unknown presence is a miss for ``negative_ttl``; all others stay hits."""
        if self.authoritative or not self.persistent:
            return
        config, keys = self.make_config(), self.keys(4)
        with self.rig(config) as rig:
            rig.store(keys)
        # Without recovery, because otherwise no query would reach the medium.
        faults = Fault("exists", FaultKind.DROP), Fault("scan", FaultKind.ERROR)
        with self.rig(config, plan=FaultPlan(faults), negative_ttl=3600, breaker_failures=1) as rig:
            assert rig.lookup(keys[0]) is LookupResult.MISS, "a hit for a block of unknown presence"
            for key in keys[1:]:
                assert rig.lookup(key) is LookupResult.HIT, "one key without an answer hid another one"
            assert rig.tier.stats().load_breaker == "closed", "one key without an answer opened the breaker"
            assert rig.lookup(keys[0]) is LookupResult.MISS, "queried again immediately"
        with self.rig(config, plan=FaultPlan(faults), negative_ttl=0.01) as rig:
            rig.until(lambda: rig.lookup(keys[0]) is LookupResult.HIT, "a hit once the medium answers")

    @with_seed
    def test_close_ends_hanging_jobs(self) -> None:
        """A tier closes although its medium hangs: jobs are abandoned, the primary tier is released."""
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
            assert rig.untouched(range(10, 14)), "a slot was written by an abandoned load"

    @with_seed
    def test_a_medium_may_be_missing_at_start(self) -> None:
        """Without its medium a required tier raises and cleans up; an optional one starts and uses it later."""
        config, plan = self.make_config(), FaultPlan([Fault("open", FaultKind.ERROR, times=None)])
        try:
            with self.rig(config, plan=plan, required=True):
                raise AssertionError("a required tier opened without its medium: open raises a BackendError")
        except BackendError:
            pass
        with self.rig(config, plan=plan, required=False, breaker_cooldown=0.01, breaker_failures=1) as rig:
            keys = self.keys(3)
            for key in keys:
                assert rig.lookup(key) is LookupResult.MISS, "a hit without a medium"
            assert not rig.store(keys).success, "stored without a medium"
            plan.clear()
            rig.until(lambda: rig.store(keys).success, "a store after the medium has appeared")
            rig.until(lambda: rig.lookup(keys[0]) is LookupResult.HIT, "a hit after the medium has appeared")
            assert rig.load(keys).success, "can't load after the medium has appeared"

    @with_seed
    def test_no_fault_causes_wrong_bytes(self) -> None:
        """With a mixture of all faults every job is reported once, and reported blocks have the right bytes."""
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
            # At least 100 rounds, then until every kind of fault of ``put`` was injected, up to 1000.
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

    def _damage_block(self, op: str, kind: FaultKind, *, stays: bool = False) -> None:
        """Damage one block in its store or load, and check the tier's reaction."""
        plan = FaultPlan(seed=self.rng.randrange(1 << 30))
        with self.rig(plan=plan, negative_ttl=0.01) as rig:
            keys = self.keys(8)
            bad, fault = keys[2], Fault(op, kind, at=3)
            if op == "put":
                plan.add(fault)
            assert rig.store(keys).success, f"{kind}: not stored"
            if op == "get":
                plan.add(fault)
            rig.tier.take_events()
            loaded = rig.load(keys)
            assert plan.injected[kind] == 1, f"{kind}: not injected, {plan}"
            expected = [Outcome.CORRUPT if key == bad else Outcome.OK for key in keys]
            assert list(loaded.outcomes) == expected, f"{kind}: {loaded}"
            assert sum(rig.tier.stats().faults.values()) == 1, f"{kind}: not counted by cause, {rig.tier.stats()}"
            # A block that stays may be a hit again after a pause, which may end at any time.
            assert stays or rig.lookup(bad) is LookupResult.MISS, f"{kind}: a damaged block is a hit again"
            left = [(event.keys, event.cause) for event in rig.tier.take_events() if event.cause is not None]
            assert left == [((bad,), RemovalCause.CORRUPT)], f"{kind}: reported removals: {left}"
            if not stays and self.deletes:
                rig.until(lambda: rig.store([bad]).outcomes[0] is Outcome.OK, f"{kind}: a new store of the block")
            if stays or self.deletes:
                rig.until(lambda: rig.lookup(bad) is LookupResult.HIT, f"{kind}: a hit for the intact block")
                assert rig.load([bad]).success, f"{kind}: the intact block can't be loaded"


class TierTests(TierValueTests, TierLifecycleTests, TierEpochTests, TierFaultTests):
    """Contract of a tier on a backend, in about thirty tests.

    It checks the whole path from a scheduler to the medium and back. Subclass it with the configuration of a tier on
    your backend::

        class TestMyTier(TierTests):
            persistent = False

            def make_config(self) -> dict[str, Any]:
                return {"backend": "my_package.my_module:MyBackend", "url": "…"}

    Plain pytest runs it, without a plugin. A failure shows the seed that repeats it.
    """
