"""Counts for an engine's own metrics: each tier's first answer to each request, and the timed answers."""

from __future__ import annotations

from kvstore.tiering.tally import TIMED_EVERY
from kvstore.types import JobResult, LookupResult
from tests.tiering.engine import Engine, keys_of
from tests.tiering.fake_tier import payload


def test_a_request_counts_once_for_each_block_and_tier() -> None:
    """Only each tier's first answer to a request counts, however often it looks up; another request counts again."""
    engine = Engine(tiers=["disk", "far"])
    engine.tiers[1].blocks.update({key: payload(key) for key in keys_of(1)})
    primary, (disk, far) = engine.manager.tally.primary, engine.manager.tally.tiers
    ctx = engine.request()
    engine.load(keys_of(1), ctx)
    engine.look(keys_of(1, 2, 2), ctx)
    assert (primary.queries, primary.hits) == (2, 0), "it was promoted for this request: no hit"
    assert (disk.queries, disk.hits, far.queries, far.hits) == (2, 0, 2, 1)
    engine.look(keys_of(1), engine.request())
    assert (primary.queries, primary.hits, far.queries) == (3, 1, 2)


def test_one_answer_in_sixteen_is_timed() -> None:
    """The first answer of each tier is timed, then one in sixteen; the others count with the last measured time."""
    engine = Engine(slots=4 * TIMED_EVERY)
    here = list(range(2 * TIMED_EVERY))
    engine.store_and_forget(keys_of(*here))
    ctx = engine.request()
    engine.look(keys_of(*here), ctx)
    engine.look(keys_of(*range(100, 100 + TIMED_EVERY + 1)), ctx)
    engine.look(keys_of(100), ctx)
    tally = engine.manager.tally
    for counts, answers in ((tally.primary, 3 * TIMED_EVERY + 1), (tally.tiers[0], TIMED_EVERY + 1)):
        samples = list(counts.lookup_samples)
        assert len(samples) == counts.queries == answers, "an answer that is repeated is none"
        assert all(0 < sample < 10 for sample in samples)
        for first in range(0, answers, TIMED_EVERY):
            assert len(set(samples[first : first + TIMED_EVERY])) == 1


def test_an_answer_that_took_steps_is_a_wait() -> None:
    """The time from the first RETRY to the answer counts once as a wait; an immediate answer is no wait."""
    engine = Engine()
    tally = engine.manager.tally.tiers[0]
    ctx = engine.request()
    engine.tier.unknown.update(keys_of(1))
    for _ in range(3):
        assert engine.look(keys_of(1, 2), ctx) == ["retry", "miss"]
        engine.clock.now += 0.25
        engine.step()
    assert (tally.queries, list(tally.wait_samples)) == (1, [])
    engine.tier.unknown.clear()
    assert engine.look(keys_of(1), ctx) == ["miss"]
    assert (tally.queries, list(tally.wait_samples)) == (2, [0.75])
    engine.look(keys_of(1), ctx)
    assert (tally.queries, list(tally.wait_samples)) == (2, [0.75])


def test_jobs_that_failed_are_counted_by_direction() -> None:
    """A partially failed job counts as failed, and so does a load that was abandoned before it succeeded."""
    engine = Engine(load_s_max=10.0)
    tally = engine.manager.tally.tiers[0]
    engine.store(keys_of(1, 2))
    engine.tier.run(failing=keys_of(2))
    engine.settle_steps(2)
    assert (tally.failed_store_jobs, tally.failed_load_jobs) == (1, 0)
    engine.tier.blocks.update({key: payload(key) for key in keys_of(3, 4)})
    ctx = engine.request()
    assert engine.look(keys_of(3), ctx) == ["hit_pending"]
    engine.manager.on_step_end()
    engine.clock.now += 1
    engine.tier.run()
    assert engine.look(keys_of(3), ctx) == ["hit"]
    assert (tally.failed_load_jobs, list(tally.loaded_samples), list(tally.failed_samples)) == (0, [1.0], [])
    assert engine.look(keys_of(4), ctx) == ["hit_pending"]
    engine.manager.on_step_end()
    engine.clock.now += 11
    engine.manager.on_step_end()
    engine.tier.run()
    engine.settle()
    assert (tally.failed_load_jobs, list(tally.failed_samples)) == (1, [11.0])
    assert LookupResult.MISS in {engine.manager.lookup(key, ctx) for key in keys_of(4)}


def test_the_time_of_jobs_is_summed_by_direction() -> None:
    """The tier's reported job times are summed, with loads and stores separate."""
    engine = Engine()
    tally = engine.manager.tally.tiers[0]
    engine.store(keys_of(1))
    engine.tier.run()
    [(is_load, job, result)] = engine.tier.done
    engine.tier.done = [(is_load, job, JobResult(result.job_id, True, result.successful_keys, seconds=0.5))]
    engine.settle_steps(2)
    assert (tally.store_seconds, tally.load_seconds) == (0.5, 0.0)
