"""Tiers of vLLM and of third parties under kvstore's manager."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.config import OffloadingModelConfig

from kvstore.errors import KVStoreError
from kvstore.namespace import Namespace
from kvstore.testing.waiting import eventually
from kvstore.types import RequestContext
from kvstore.vllm.foreign import ForeignTier
from tests.vllm import other_tiers
from tests.vllm.engine_config import engine
from tests.vllm.harness import BLOCK_BYTES, Driver, Drivers, key_of, pattern_of
from tests.vllm.other_tiers import MADE, DictTier

KEYS = [key_of(number) for number in range(1, 9)]
DICT = {"type": "DictTier", "module_path": other_tiers.__name__}


@pytest.fixture
def drive() -> Iterator[Drivers]:
    """Start drivers."""
    drivers = Drivers()
    yield drivers
    drivers.close()
    MADE.clear()


def foreign_of(driver: Driver) -> ForeignTier:
    """Return the adapter of the third-party tier."""
    return next(tier for tier in driver.manager.manager.tiers if isinstance(tier, ForeignTier))


def fs(root: Path, **more: Any) -> dict[str, Any]:
    """Return the options of vLLM's own ``fs`` tier."""
    return {"type": "fs", "root_dir": str(root), **more}


def test_blocks_of_vllms_fs_tier_are_found_after_a_restart(drive: Drivers, tmp_path: Path) -> None:
    """With ``fs`` beside our tiers kvstore's manager is used, and another engine loads the blocks from ``fs``."""
    driver = drive({"type": "memory"}, fs(tmp_path))
    driver.store(KEYS)
    assert [tier.name for tier in driver.manager.manager.tiers] == ["memory", "fs"]
    drive.close()
    driver = drive({"type": "memory"}, fs(tmp_path))
    assert driver.load(KEYS) == KEYS
    assert [flow.loaded for flow in driver.manager.manager.stats().tiers] == [0, len(KEYS)]


def test_a_block_of_another_namespace_is_not_found(drive: Drivers, tmp_path: Path) -> None:
    """``fs`` has no field for the attention backend, but kvstore's namespace has one, so block names differ."""
    drive(fs(tmp_path)).store(KEYS)
    drive.close()
    another = engine(**{"attention_config.backend_per_kind": {"full": "FLASH"}})
    assert drive(fs(tmp_path), vllm_config=another).load(KEYS) == []


@pytest.mark.parametrize(("options", "found"), [({}, []), ({"reset": "keep"}, KEYS)])
def test_a_reset_begins_an_epoch(drive: Drivers, tmp_path: Path, options: dict[str, Any], found: list[bytes]) -> None:
    """Blocks from before a reset are found only if the tier keeps them; later blocks are found."""
    driver = drive(fs(tmp_path, **options))
    driver.store(KEYS)
    driver.forget_primary()
    assert driver.load(KEYS) == found
    driver.store(KEYS)
    assert driver.load(KEYS) == KEYS


def test_a_truncated_file_of_fs_is_a_miss(drive: Drivers, tmp_path: Path) -> None:
    """A failed load keeps the blocks before the failure, and its request does not look them up again."""
    driver = drive(fs(tmp_path, reset="keep"))
    driver.store(KEYS)
    files = sorted(tmp_path.rglob("*.bin"))
    assert len(files) == len(KEYS)
    for path in files:
        path.write_bytes(path.read_bytes()[:100])
    driver.forget_primary()
    assert driver.load(KEYS) == []


@pytest.mark.parametrize(
    "method",
    [
        "lookup", "submit_store", "submit_load", "get_finished_jobs", "on_new_request", "on_request_finished",
        "on_schedule_end", "serve_external_requests", "has_pending_work", "get_stats", "take_events", "drain_jobs",
    ],
)  # fmt: skip
def test_an_exception_costs_the_tier_only(drive: Drivers, tmp_path: Path, method: str) -> None:
    """Whatever a tier raises, the other tier stores and loads, no call raises, and the error is counted."""
    driver = drive(DICT, {"type": "file", "path": str(tmp_path), "capacity": "64MiB", "reset": "keep"}, events=True)
    (tier,) = MADE
    tier.blocks = dict.fromkeys(foreign_of(driver).masked(key) for key in KEYS[:1])  # A HIT.
    tier.raises = {method}
    context = driver.request()
    for key in KEYS:
        driver.copy(*driver.begin_store([key], context))
        driver.step()
        driver.manager.get_stats()
        driver.manager.has_pending_work()
    driver.manager.on_request_finished(context)
    tier.raises |= {"submit_load", "lookup"}
    driver.settle_tier("file")
    driver.forget_primary()
    assert driver.load(KEYS) == KEYS
    assert driver.manager.errors.count == 0
    stats = driver.manager.manager.stats().tiers[0]
    assert stats.errors + foreign_of(driver).errors > 0
    tier.raises = set()


class Result:
    """A result of any shape."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


@pytest.mark.parametrize(
    "malformed",
    [
        lambda job_id: None,
        lambda job_id: Result(job_id=[job_id], success=True),
        lambda job_id: Result(job_id=job_id + 100, success=True, successful_keys=None, transfer_time=None),
        lambda job_id: Result(job_id=job_id),
        lambda job_id: Result(job_id=job_id, success=False, successful_keys=[["x"]], transfer_time=None),
        lambda job_id: Result(job_id=job_id, success=False, successful_keys=[b"unknown"], transfer_time=None),
    ],
    ids=["none", "odd id", "unknown id", "no fields", "odd keys", "unknown keys"],
)
def test_a_malformed_result_costs_its_own_job(drive: Drivers, malformed: Any) -> None:
    """Whatever a tier reports for one job, its other results count, and no slot stays pinned."""
    driver = drive(DICT)
    (tier,) = MADE
    tier.holds = True
    for key in KEYS[:3]:
        driver.store_now([key])
    first, second, third = tier.held
    # The malformed result comes first, and the correct ones after it.
    tier._results = [malformed(second.job_id), first, third, second]
    tier.held = []
    driver.settle()
    stats = driver.manager.manager.stats()
    assert (stats.jobs, stats.primary.pinned) == (0, 0)
    assert stats.tiers[0].stored >= 2
    assert driver.manager.errors.count == 0
    tier.holds = False


@pytest.mark.usefixtures("short_drain")
def test_a_drain_that_hangs_stops_the_tier(drive: Drivers) -> None:
    """A reset ends at its limit; slots are freed when the drain ends, not before; the next reset starts the tier."""
    driver = drive(DICT, {"type": "memory"})
    (tier,) = MADE
    tier.holds = True
    tier.gate.clear()
    context = driver.request()
    driver.copy(*driver.begin_store(KEYS, context))
    driver.step()
    driver.forget_primary()
    assert driver.manager.manager.stats().primary.abandoned == len(KEYS)
    calls = len(tier.calls)
    foreign = foreign_of(driver)
    assert not foreign.stats().ready
    foreign.touch(KEYS)
    driver.store_now(KEYS[:2])
    assert driver.lookup([key_of(99)], context) == [LookupResult.MISS]
    driver.manager.on_request_finished(driver.request())
    driver.settle_tier("memory")
    assert len(tier.calls) == calls, tier.calls[calls:]
    assert driver.manager.manager.stats().primary.abandoned == len(KEYS)
    tier.gate.set()
    driver.settle()
    assert driver.manager.manager.stats().primary.abandoned == 0
    driver.manager.on_request_finished(context)
    tier.holds = False
    driver.forget_primary()
    driver.store(KEYS[2:4])
    assert len(tier.blocks) == len(KEYS) + 2 and foreign.stats().ready


def test_close_drains_a_slow_tier(drive: Drivers) -> None:
    """A tier whose drain takes longer than one round of the close gets all blocks, and is shut down."""
    driver = drive(DICT)
    (tier,) = MADE

    def drain_jobs() -> None:
        time.sleep(0.12)
        tier._results, tier.held = [*tier._results, *tier.held], []

    tier.holds, tier.drain_jobs = True, drain_jobs
    driver.store_now([key_of(number) for number in range(40)])
    assert len(tier.blocks) < 40
    drive.close()
    assert len(tier.blocks) == 40 and tier.calls[-1] == "shutdown"


def test_a_shutdown_waits_for_a_drain(drive: Drivers) -> None:
    """A tier is not shut down while a drain of it runs, and then only once."""
    foreign = foreign_of(drive(DICT))
    (tier,) = MADE
    tier.gate.clear()
    assert not foreign.drain(0.01) and not foreign.drain(0.01)
    with pytest.raises(KVStoreError, match="did not shut down"):
        foreign.close(0.01)
    assert tier.calls == ["drain_jobs"]
    tier.gate.set()
    tier.raises = {"shutdown"}
    for _ in range(2):
        with pytest.raises(KVStoreError, match="shutdown is broken"):
            foreign.close(60)
    assert tier.calls.count("shutdown") == 1
    tier.raises = set()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.usefixtures("short_drain")
def test_slots_of_unreported_jobs_are_freed_after_a_drain(drive: Drivers, fails: bool) -> None:
    """Jobs that a late drain has not reported have failed; after a drain that fails, the tier may still use slots."""
    driver = drive(DICT)
    (tier,) = MADE
    foreign = foreign_of(driver)
    drained = threading.Event()

    def drain_jobs() -> None:
        drained.wait(60)
        if fails:
            raise OSError("the medium is gone")

    tier.holds, tier.drain_jobs = True, drain_jobs
    driver.store_now(KEYS)
    driver.forget_primary()
    assert driver.manager.manager.stats().primary.abandoned == len(KEYS)
    drained.set()
    eventually(lambda: not foreign._stopped.is_alive(), 60, "the end of the drain")
    driver.step()
    assert driver.manager.manager.stats().primary.abandoned == (len(KEYS) if fails else 0)
    tier.holds = False


def test_hit_is_counted_under_the_source_of_its_tier(drive: Drivers) -> None:
    """Another's tier names the source of its blocks; without a name, there is no source."""
    driver = drive({**DICT, "reset": "keep"})
    (tier,) = MADE
    for source in (None, "elsewhere"):
        driver.store(KEYS)
        driver.forget_primary()
        tier.cache_hit_source = source
        context = driver.request()
        assert driver.lookup(KEYS, context) == [LookupResult.HIT] * len(KEYS)
        assert {driver.manager.get_load_source(key, context) for key in KEYS} == {source}
        driver.manager.on_request_finished(context)


def test_end_of_an_unannounced_request_is_not_reported(drive: Drivers) -> None:
    """A tier is notified of the end of a request only after a notification of its start."""
    foreign = foreign_of(drive(DICT))
    (tier,) = MADE
    foreign.on_request_finished(RequestContext("not of vLLM"))
    assert not tier.calls


def test_a_tier_serves_another_engine(drive: Drivers) -> None:
    """The tier finds blocks of the primary tier and, by promotion, of other tiers, and reads them from pinned rows."""
    driver = drive(DICT, {"type": "memory", "reset": "keep"})
    (tier,) = MADE
    foreign = foreign_of(driver)
    driver.store(KEYS)
    driver.forget_primary()
    driver.store(KEYS[:2])
    tier.blocks.clear()
    tier.wanted = [foreign.masked(key) for key in [*KEYS, key_of(99)]]

    def lent() -> bool:
        driver.step()
        return bool(tier.lent)

    eventually(lent, 60, what="blocks promoted and pinned")
    assert [answer.name for answer in tier.answers.values()] == ["HIT"] * len(KEYS) + ["MISS"]
    (job,) = tier.lent
    for key in KEYS:
        assert tier.row_of(job, foreign.masked(key)) == pattern_of(key).tobytes()
    tier.end(job)
    driver.settle()
    assert driver.manager.manager.stats().primary.pinned == 0


def test_a_tier_is_not_asked_for_its_own_requests(drive: Drivers) -> None:
    """A block that only the serving tier has is a miss for the engine that it serves, and not promoted."""
    driver = drive(DICT, {"type": "memory"})
    (tier,) = MADE
    foreign = foreign_of(driver)
    name = foreign.masked(KEYS[0])
    tier.blocks, tier.wanted, tier.calls = {name: b""}, [name], []

    def answered() -> bool:
        driver.step()
        return not tier.wanted

    eventually(answered, 30, what="an answer")
    assert tier.answers == {name: LookupResult.MISS}
    assert "lookup" not in tier.calls


def test_lent_blocks_stay_until_the_tier_reports(drive: Drivers) -> None:
    """A block pinned by a tier is not evicted until the tier's report. The tier's share bounds its pins."""
    driver = drive(DICT, {"type": "memory"})
    (tier,) = MADE
    foreign = foreign_of(driver)
    driver.store(KEYS)
    tier.wanted = [foreign.masked(key) for key in KEYS]
    driver.step()
    stats = driver.manager.manager.stats()
    assert (stats.primary.pinned, stats.tiers[0].storing) == (len(KEYS), len(KEYS))
    many = [key_of(number) for number in range(100, 100 + driver.slots - len(KEYS))]
    for key in many:
        driver.store_now([key])
    assert all(key in driver.manager.manager.primary for key in KEYS)
    tier.end(tier.lent[0])
    driver.settle()
    assert driver.manager.manager.stats().primary.pinned == 0
    tier.answers = {}
    tier.wanted = [foreign.masked(key) for key in many]
    driver.step()
    given = [answer for answer in tier.answers.values() if answer is LookupResult.HIT]
    assert 0 < len(given) < len(many)
    assert driver.manager.manager.stats().tiers[0].storing == len(given)
    tier.end(tier.lent[1])
    driver.settle()


def test_request_level_policy_stores_every_block_again(drive: Drivers) -> None:
    """With the policy ``request_level`` blocks already in the primary tier are stored in that tier again."""
    driver = drive({**DICT, "whole": True}, {"type": "memory"})
    (tier,) = MADE
    driver.store(KEYS)
    tier.blocks.clear()
    driver.store(KEYS)
    assert len(tier.blocks) == len(KEYS)


@pytest.mark.parametrize("resets", [False, True])
def test_a_finished_request_waits_for_its_last_blocks(drive: Drivers, resets: bool) -> None:
    """A tier gets blocks that another request was writing when this one ended, then its end; a reset drops them."""
    driver = drive(DICT)
    (tier,) = MADE
    (job,) = driver.begin_store(KEYS[:4], driver.request())
    tier.whole = True
    context = driver.request()
    assert not driver.begin_store(KEYS[:4], context)
    driver.manager.on_request_finished(context)
    driver.step()
    assert driver.manager.has_pending_work() and "on_request_finished" not in tier.calls
    if resets:
        driver.forget_primary()
    driver.copy(job)
    driver.settle()
    ours = [name for name in tier.calls if name in ("submit_store", "on_request_finished")]
    assert ours == ["submit_store"] * (0 if resets else 2) + ["on_request_finished"]


def test_events_have_vllms_keys(drive: Drivers) -> None:
    """Events of a tier contain vLLM's block keys."""
    driver = drive(DICT, events=True)
    driver.store(KEYS)
    theirs = [event for event in driver.events if event.medium == "STORAGE"]
    assert [key for event in theirs for key in event.keys] == KEYS


def test_backpressure_drops_stores(drive: Drivers) -> None:
    """VLLM's detector may drop a store; other tiers still get the block, and loads continue."""
    driver = drive(DICT, {"type": "memory"})
    (tier,) = MADE
    updates: list[int] = []
    tier._bp_detector = SimpleNamespace(
        should_store=lambda blocks: len(tier.blocks) < 3,
        update=lambda since, size_bytes: updates.append(size_bytes),
        reset=updates.clear,
    )
    for key in KEYS:
        driver.store([key])
    assert len(tier.blocks) == 3 and updates == [BLOCK_BYTES] * 3
    assert driver.load(KEYS) == KEYS
    driver.forget_primary()
    assert updates == []


def test_two_tiers_of_a_type_have_names_of_their_own(drive: Drivers, tmp_path: Path) -> None:
    """A tier's name is its label, or its type with the position in the list."""
    driver = drive(fs(tmp_path / "a"), fs(tmp_path / "b"), fs(tmp_path / "c", label="slow"))
    assert [tier.name for tier in driver.manager.manager.tiers] == ["fs", "fs-1", "slow"]


def test_names_of_blocks_depend_on_namespace_and_epoch() -> None:
    """A key unmasked by its own mask keeps its group, and no two namespaces or epochs share a mask."""

    class Nothing:
        medium = locality = None

        def take_events(self) -> tuple[()]:
            return ()

    one, other = (ForeignTier(Nothing(), "x", Namespace({"model": name})) for name in "ab")  # type: ignore[arg-type]
    for key in (key_of(1), key_of(2**200, group=3), b"\x00\x00\x00\x01", b"short" + bytes(4)):
        assert one.masked(one.masked(key)) == key
        assert one.masked(key)[-4:] == key[-4:] and len(one.masked(key)) == len(key)
    names = {one.masked(KEYS[0]), other.masked(KEYS[0])}
    assert one.begin_epoch()
    names.add(one.masked(KEYS[0]))
    assert len(names) == 3 and KEYS[0] not in names


def test_the_model_name_is_part_of_the_names(drive: Drivers) -> None:
    """Names differ between two models in one tier."""
    names = set()
    for model in ("org/a", "org/b"):
        driver = drive(DICT, model=OffloadingModelConfig(name=model, dtype="float16"))
        driver.store(KEYS[:1])
        names |= set(MADE[-1].blocks)
    assert len(names) == 2
    assert all(isinstance(tier, DictTier) for tier in MADE)
