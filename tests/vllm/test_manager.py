"""KVStoreTier under vLLM's own TieringOffloadingManager and under ours, configured by a user's JSON."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, Medium, ReqContext
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore.testing.waiting import eventually
from kvstore.types import Locality
from kvstore.types import Medium as OurMedium
from kvstore.vllm.compat import cache_hit_source
from kvstore.vllm.region import region_path
from kvstore.vllm.spec import KVStoreOffloadingSpec
from tests.disk.placed import flip, placed
from tests.vllm.harness import Driver, key_of

MODULE = {"type": "KVStoreTier", "module_path": "kvstore.vllm"}

Open = Callable[..., Driver]

both_managers = pytest.mark.parametrize("spec_class", [TieringOffloadingSpec, KVStoreOffloadingSpec])
"""Stock vLLM with our tiers, and our spec with our manager."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Open drivers and close them at the end of the test; no file may be left in /dev/shm then."""
    # A start waits one second for recovery: long for an empty directory, and too short on a slow machine.
    monkeypatch.setattr("kvstore.tiers.opening._RECOVERY_WAIT_S", 60.0)
    drivers: list[Driver] = []

    def open_(*args: Any, **kwargs: Any) -> Driver:
        drivers.append(Driver(*args, **kwargs))
        return drivers[-1]

    yield open_
    for driver in drivers:
        driver.close()
    paths = [region_path(driver.spec.config.engine_id) for driver in drivers]
    assert [path for path in paths if os.path.exists(path)] == []


def file_tier(directory: Path, **options: Any) -> dict[str, Any]:
    """Return the JSON of a file tier that keeps its blocks at a reset."""
    return {**MODULE, "backend": "file", "path": str(directory), "capacity": "1GiB", "reset": "keep", **options}


@both_managers
def test_blocks_come_back_from_the_tier(opened: Open, spec_class: Any, tmp_path: Path) -> None:
    """Offloaded blocks are found byte by byte after the primary tier was emptied."""
    driver = opened([file_tier(tmp_path)], spec_class=spec_class)
    keys = [key_of(i) for i in range(12)]
    driver.store(keys)
    driver.forget_primary()
    assert driver.load(keys) == keys


@both_managers
def test_blocks_survive_the_engine(opened: Open, spec_class: Any, tmp_path: Path) -> None:
    """A second manager on the same directory finds exactly the blocks that the first one stored."""
    keys = [key_of(i) for i in range(12)]
    first = opened([file_tier(tmp_path)], spec_class=spec_class)
    first.store(keys)
    first.close()
    second = opened([file_tier(tmp_path)], spec_class=spec_class)
    assert second.load([*keys, key_of(99)]) == keys


def test_another_namespace_is_another_cache(opened: Open, tmp_path: Path) -> None:
    """The user's ``namespace`` separates the blocks of two engines on one directory."""
    keys = [key_of(i) for i in range(4)]
    opened([file_tier(tmp_path, namespace="a")]).store(keys)
    assert opened([file_tier(tmp_path, namespace="b")]).load(keys) == []


@both_managers
def test_an_absent_block_costs_no_step(opened: Open, tmp_path: Path, spec_class: Any) -> None:
    """A lookup of an absent block is a MISS in the same step, under vLLM's spec and ours."""
    driver = opened([file_tier(tmp_path)], spec_class=spec_class)
    context = driver.request()
    assert driver.lookup([key_of(1)], context) == [LookupResult.MISS]
    assert driver.steps == 1
    driver.manager.on_request_finished(context)


def test_short_types_work_in_our_spec(opened: Open, tmp_path: Path) -> None:
    """A tier's type may be a backend's name, beside vLLM's own types; two of one backend get different labels."""
    tiers = [
        {"type": "memory"},
        {"type": "file", "path": str(tmp_path), "capacity": "1GiB"},
        {"type": "memory"},
        {"type": "fs", "root_dir": str(tmp_path / "fs"), "reset": "keep"},
    ]
    driver = opened(tiers, spec_class=KVStoreOffloadingSpec)
    assert [tier.name for tier in driver.manager.manager.tiers] == ["memory", "file", "memory-2", "fs"]
    keys = [key_of(i) for i in range(4)]
    driver.store(keys)
    driver.forget_primary()
    assert driver.load(keys) == keys


def test_only_allowed_tiers_are_asked(opened: Open) -> None:
    """Medium and locality are those of the backend, so a request's load filter works."""
    driver = opened([{**MODULE, "backend": "memory"}, {**MODULE, "backend": "memory", "locality": "REMOTE"}])
    assert [(tier.medium.value, tier.locality.value) for tier in driver.tiers] == [("CPU", "LOCAL"), ("CPU", "REMOTE")]


@both_managers
def test_reset_waits_for_io_and_loses_no_job(opened: Open, spec_class: Any, tmp_path: Path) -> None:
    """A cache reset right after stores were submitted drains them; vLLM asserts that no job is left."""
    driver = opened([file_tier(tmp_path)], spec_class=spec_class)
    assert driver.manager.has_pending_work(), "an engine that starts makes a step, by which metrics are there"
    driver.step()
    keys = [key_of(i) for i in range(30)]
    context = driver.request()
    prepared = driver.manager.prepare_store(keys, context)
    driver.manager.complete_store(prepared.keys_to_store, context)
    driver.manager.reset_cache()
    assert not driver.manager.has_pending_work()


@both_managers
def test_events_report_stores_and_removals(opened: Open, spec_class: Any, tmp_path: Path) -> None:
    """Every block that entered the tier is reported as stored, and after its eviction as removed."""
    driver = opened([file_tier(tmp_path, capacity="192KiB")], spec_class=spec_class, events=True)

    def ours(*, removed: bool) -> set[bytes]:
        events = [event for event in driver.events if event.medium is Medium.STORAGE and event.removed is removed]
        assert all(event.removal_expected is not removed for event in events)
        assert {event.ownership for event in events} <= {None}
        return {key for event in events for key in event.keys}

    for start in range(0, 60, 10):
        driver.store([key_of(i) for i in range(start, start + 10)])
    eventually(lambda: driver.step() or ours(removed=True), what="a removal event")
    assert ours(removed=True) <= ours(removed=False) <= {key_of(i) for i in range(60)}


@both_managers
def test_a_job_is_one_event(opened: Open, spec_class: Any, tmp_path: Path) -> None:
    """Stores, evictions and promotions of many blocks give one event per tier and step, not one per block."""
    driver = opened([file_tier(tmp_path)], spec_class=spec_class, events=True)
    rows = driver.slots
    waves = [[key_of(wave * rows + i) for i in range(rows)] for wave in range(2)]
    driver.store(waves[0])
    driver.store(waves[1])
    stored = [len(event.keys) for event in driver.events if event.medium is Medium.CPU and not event.removed]
    removed = [len(event.keys) for event in driver.events if event.medium is Medium.CPU and event.removed]
    assert (stored, removed) == ([rows, rows], [rows])
    written = [event for event in driver.events if event.medium is Medium.STORAGE]
    assert sum(len(event.keys) for event in written) == 2 * rows
    assert len(written) < rows, "the file tier reports what it wrote in batches"
    driver.events.clear()
    promoted = waves[0][: rows // 4]
    assert driver.load(promoted) == promoted
    driver.step()
    sizes = {removed: [len(e.keys) for e in driver.events if e.removed is removed] for removed in (False, True)}
    assert sum(sizes[False]) == sum(sizes[True]) == len(promoted)
    if spec_class is KVStoreOffloadingSpec:
        assert len(sizes[True]) == 1, "what one step evicted is one event"


@both_managers
def test_no_events_unless_enabled(opened: Open, spec_class: Any, tmp_path: Path) -> None:
    """Without KV cache events no events accumulate, and an idle engine does not step for them."""
    driver = opened([file_tier(tmp_path)], spec_class=spec_class)
    driver.store([key_of(i) for i in range(5)])
    assert driver.events == []
    assert not driver.manager.has_pending_work()


@pytest.mark.skipif(cache_hit_source(OurMedium.CPU, Locality.LOCAL) is None, reason="vLLM asks since 0.32")
@both_managers
def test_hits_are_counted_by_tier(opened: Open, spec_class: Any, tmp_path: Path) -> None:
    """A block promoted from disk for a request counts as a disk hit, and as a host hit later."""
    driver = opened([file_tier(tmp_path)], spec_class=spec_class)
    keys = [key_of(i) for i in range(4)]
    driver.store(keys)
    driver.forget_primary()
    driver.load(keys[:1])
    context = driver.request()
    assert driver.lookup(keys, context) == [LookupResult.HIT] * 4
    sources = [driver.manager.get_load_source(key, context).value for key in keys]
    assert sources == ["host", "disk", "disk", "disk"]
    other = driver.request()
    assert driver.lookup(keys, other) == [LookupResult.HIT] * 4
    assert {driver.manager.get_load_source(key, other).value for key in keys} == {"host"}
    driver.manager.on_request_finished(context)
    driver.manager.on_request_finished(other)


def test_a_failed_load_never_hits_again_for_its_request(opened: Open, tmp_path: Path) -> None:
    """A block whose load fails is a MISS within a few steps (repeated HITs would loop forever, #49176)."""
    driver = opened([file_tier(tmp_path)])
    keys = [key_of(i) for i in range(8)]
    driver.store(keys)
    driver.forget_primary()
    damage_blocks(tmp_path)
    context = driver.request()
    assert driver.lookup(keys, context) == [LookupResult.MISS] * len(keys)
    for _ in range(5):
        assert driver.lookup(keys, context, steps_max=1) == [LookupResult.MISS] * len(keys)
    driver.manager.on_request_finished(context)


def test_a_tier_that_raises_is_a_miss(opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An error inside kvstore reaches neither manager nor engine: misses, failed jobs, one log line per place."""
    driver = opened([file_tier(tmp_path)])
    driver.store([key_of(0)])
    driver.forget_primary()
    tier = driver.tiers[0]
    healthy, tier.tier = tier.tier, _Broken(tier.tier.name)
    with caplog.at_level(logging.ERROR, logger="kvstore.vllm.tier"):
        assert driver.load([key_of(0)]) == []
        driver.store([key_of(1), key_of(2)])
        assert driver.load([key_of(0)]) == []
        driver.step()
        driver.manager.get_stats()
        driver.manager.reset_cache()
    ours = [record for record in caplog.records if record.name == "kvstore.vllm.tier"]
    places = [record.args[1] for record in ours if isinstance(record.args, tuple)]
    assert len(places) == len(set(places)) and {"lookup", "submit_store"} <= set(places)
    assert tier.errors.count > len(places)
    tier.tier = healthy
    assert driver.load([key_of(0)]) == [key_of(0)]


def test_a_job_that_is_not_accepted_is_reported_once(opened: Open) -> None:
    """A submit that raises gives exactly one failed result; a second report of the job is dropped."""
    tier = opened([{**MODULE, "backend": "memory"}]).tiers[0]
    healthy, tier.tier = tier.tier, _Broken("broken")
    context = ReqContext(req_id="x")
    tier.submit_store(TransferJob(7, [key_of(1)], [0], False, context))
    assert tier.has_pending_work()
    tier.tier = healthy
    assert [(r.job_id, r.success) for r in tier.get_finished_jobs()] == [(7, False)]
    assert list(tier.get_finished_jobs()) == []


@both_managers
def test_shutdown_releases_the_primary_tier(
    opened: Open, spec_class: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After shutdown no reference to the memory is left: vLLM can close its mapping without a warning."""
    driver = opened([file_tier(tmp_path)], spec_class=spec_class)
    driver.store([key_of(i) for i in range(10)])
    is_ours = spec_class is KVStoreOffloadingSpec
    region = driver.manager._region if is_ours else driver.manager.primary_tier._mmap_region
    with caplog.at_level(logging.WARNING):
        driver.close()
    assert region.mmap_obj is None
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not [record for record in warnings if "mmap" in record.getMessage()]
    if not is_ours:
        driver.tiers[0].shutdown()


class _Broken:
    """A tier whose methods all raise."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(f"broken {name}")

        return call


def damage_blocks(directory: Path) -> None:
    """Flip a byte of every block's payload."""
    places = placed(directory).values()
    assert places
    for place in places:
        flip(place, 4096 + 100)


def test_the_memory_stays_mapped_while_io_may_touch_it(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shutdown with unfinished I/O leaves the region mapped; a later one unmaps it."""
    driver = opened([file_tier(tmp_path)], spec_class=KVStoreOffloadingSpec)
    unmapped: list[bool] = []
    region = driver.manager._region
    monkeypatch.setattr(region, "cleanup", lambda: unmapped.append(True))
    close = driver.manager.manager.close
    monkeypatch.setattr(driver.manager.manager, "close", lambda timeout_s: close(timeout_s) and False)
    driver.manager.shutdown()
    assert not unmapped and driver.manager._region is region
    monkeypatch.undo()
