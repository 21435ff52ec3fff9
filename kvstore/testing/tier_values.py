"""The part of the tier suite where the medium does what it should."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from kvstore.namespace import Namespace
from kvstore.testing.seeds import with_seed
from kvstore.testing.tier_harness import TierHarness
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

__all__ = ["TierValueTests"]


class TierValueTests(TierHarness):
    """Stores, lookups and loads, one step after the other."""

    @with_seed
    def test_stored_blocks_are_hits_and_load_back(self) -> None:
        """What a store job put is found by a lookup and comes back byte by byte, into other slots."""
        with self.rig() as rig:
            keys = self.keys(20)
            stored = rig.store(keys)
            assert stored.success and list(stored.successful_keys) == keys, f"a plain store: {stored}"
            assert stored.size_bytes == 20 * self.slot_bytes, f"a store of 20 blocks moved {stored.size_bytes} bytes"
            assert [rig.lookup(key) for key in keys] == [LookupResult.HIT] * 20, "a stored block is no hit"
            shuffled = self.rng.sample(keys, 20)
            loaded = rig.load(shuffled)
            assert loaded.success, f"a plain load: {loaded}"
            assert loaded.size_bytes == 20 * self.slot_bytes, f"a load of 20 blocks moved {loaded.size_bytes} bytes"
            assert rig.untouched(range(20, self.slots)), "a slot was written that no job had"

    @with_seed
    def test_unknown_blocks_are_misses(self) -> None:
        """A block that nobody stored is a MISS; an exclusive tier says so in the same step."""
        with self.rig() as rig:
            rig.recovered()
            for key in self.keys(10):
                if self.exclusive:
                    answer = rig.tier.lookup(key)
                    assert answer is LookupResult.MISS, f"first lookup of an unknown block: {answer}"
                assert rig.lookup(key) is LookupResult.MISS, "a block that nobody stored is a hit"
            loaded = rig.load(self.keys(3))
            assert list(loaded.outcomes) == [Outcome.MISS] * 3, f"load of unknown blocks: {loaded}"

    @with_seed
    def test_a_partial_load_is_exact(self) -> None:
        """Of a job with hits and misses exactly the hits are reported, wherever they stand."""
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
                assert loaded.size_bytes == 6 * self.slot_bytes, f"{loaded.size_bytes} bytes said to be moved for 6"

    @with_seed
    def test_storing_again_is_a_success_that_moves_nothing(self) -> None:
        """Blocks that are there already are EXISTS, count as stored, and are not written again."""
        with self.rig() as rig:
            held, new = self.keys(5), self.keys(3)
            rig.store(held)
            keys = self.rng.sample(held + new, 8)
            stored = rig.store(keys)
            assert stored.success, f"{stored}"
            expected = [Outcome.EXISTS if key in held else Outcome.OK for key in keys]
            assert list(stored.outcomes) == expected, f"{stored.outcomes}, expected {expected}"
            assert stored.size_bytes == 3 * self.slot_bytes, f"{stored.size_bytes} bytes moved for 3 new blocks"
            assert rig.load(held + new).success, "not all of them can be loaded"

    @with_seed
    def test_every_job_is_reported_once_and_right(self) -> None:
        """Many jobs in flight, on the same keys: each is reported once, and what it says is loaded is right."""
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
            assert rig.tier.stats().outcomes.get("load.ok"), "no load met a block that was stored"
            assert rig.untouched(range(self.slots - 4, self.slots)), "a slot was written that no job had"

    @with_seed
    def test_drain_waits_for_all_jobs(self) -> None:
        """After a drain no job runs, and the results are there to be fetched."""
        with self.rig() as rig:
            keys = self.keys(30)
            jobs = [rig.submit_store(keys[i : i + 3], range(i, i + 3)) for i in range(0, 30, 3)]
            assert rig.tier.drain(timeout_s=rig.timeout_s), "a drain of ten small stores did not end"
            assert rig.tier.stats().jobs_in_flight == 0, "jobs in flight after a drain"
            rig.step()
            assert set(rig.results) == set(jobs), "a drain ended and not all jobs can be fetched"
            assert rig.tier.drain(timeout_s=rig.timeout_s), "a drain of nothing did not end"

    @with_seed
    def test_close_reports_what_runs_and_lets_go(self) -> None:
        """Jobs that run when the tier closes are reported, once; the primary tier is free then (the rig checks)."""
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
            assert rig.tier.drain(timeout_s=1.0), "a closed tier has something to drain"
            rig.step()
            for job_id in jobs:
                assert job_id in rig.results, f"job {job_id}, submitted after close, was not reported"
                assert not rig.results[job_id].success, f"job {job_id}, submitted after close, succeeded"

    @with_seed
    def test_events_name_what_entered_and_left(self) -> None:
        """Each block is told once when it was stored, and once when it was evicted; loads tell nothing."""
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
            assert len(entered) == len(set(entered)) and len(left) == len(set(left)), "a block was told twice"
            assert set(left) <= set(entered), "a block left that never entered"
            assert config is None or left, "48 blocks were stored into room for 20, and none is told to have left"
            rig.load(stored[-3:])
            assert [event for event in rig.tier.take_events() if event.cause is None] == [], "a load told of a store"

    @with_seed
    def test_evicted_blocks_are_misses(self) -> None:
        """A tier over its capacity misses what it evicted, in the same step, and loads what it kept."""
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
        """A new tier over the same medium finds the blocks and loads them; one of another namespace does not."""
        if not self.persistent:
            return
        config, keys = self.make_config(), self.keys(30)
        with self.rig(config) as rig:
            rig.store(keys)
        others: list[dict[str, Any]] = [{"namespace": Namespace({"suite": "another"})}, {"config_namespace": "salt"}]
        for other in others:
            options = {"namespace": other["config_namespace"]} if "config_namespace" in other else {}
            with self.rig({**config, **options}, namespace=other.get("namespace")) as rig:
                rig.recovered()
                assert rig.lookup(keys[0]) is LookupResult.MISS, f"a hit of another namespace: {other}"
                assert list(rig.load(keys[:2]).outcomes) == [Outcome.MISS] * 2, f"loaded of another namespace: {other}"
        with self.rig(config) as rig:
            rig.recovered()
            assert [rig.lookup(key) for key in keys] == [LookupResult.HIT] * 30, "a block was lost by a restart"
            assert rig.load(keys).success, "a block can't be loaded after a restart"
            assert list(rig.store(keys[:4]).outcomes) == [Outcome.EXISTS] * 4, "stored again after a restart"

    @with_seed
    def test_statistics_add_up(self) -> None:
        """Counts of blocks, bytes, lookups and outcomes are those of what was done."""
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
        """Two tiers of one process share a loop and nothing else; one goes on when the other closes."""
        with ExitStack() as stack:
            first = stack.enter_context(self.rig())
            keys = self.keys(5)
            with self.rig() as second:
                first.store(keys)
                second.recovered()
                assert second.lookup(keys[0]) is LookupResult.MISS, "a tier finds blocks of another medium"
                second.store(keys[:2])
            assert first.load(keys).success, "a tier can't load after another one was closed"

    @with_seed
    def test_nonsense_raises_nothing(self) -> None:
        """Whatever is handed over, no method raises, every job is reported, and the tier goes on working."""
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
            rig.until(lambda: len(rig.results) == jobs, f"reports of {jobs} jobs, most of them nonsense")
            assert rig.load(good).success, "after nonsense, what was stored before can't be loaded"
            assert rig.store(self.keys(3)).success, "after nonsense, nothing can be stored"

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
