"""Copies of workers that outlive a reset, and the counters that prove when they have ended."""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, OffloadingManager, TransferResult

from kvstore.backends.memory import MemoryBackend, MemoryConfig
from kvstore.testing import Fault, FaultKind, FaultPlan, FaultyBackend
from kvstore.vllm.compat import region_shape
from kvstore.vllm.connector import EngineContext, KVStoreConnector
from kvstore.vllm.copies import LANES, CountingWorker, LoadFailures, Slots, WorkerReports, counters_of
from kvstore.vllm.spec import KVStoreOffloadingSpec
from tests.vllm.harness import BLOCK_BYTES, Driver, LateWorker, key_of, parallel, pattern_of

DISK = [{"type": "memory", "reset": "keep"}]
"""A tier whose blocks outlive a reset, so that promotions may collide with copies from before it."""
KEYS = [key_of(number) for number in range(60)]
NO_ROWS = np.zeros((1, 1), np.uint8)
LATE = [key_of(1000 + number) for number in range(5)]

Open = Callable[..., Driver]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Open drivers of our manager, and close them with their regions at the end of the test."""
    drivers: list[Driver] = []

    def open_(tiers: Sequence[dict[str, Any]] = DISK, **changes: Any) -> Driver:
        drivers.append(Driver(tiers, spec_class=KVStoreOffloadingSpec, **changes))
        return drivers[-1]

    yield open_
    for driver in drivers:
        driver.close()
    assert not [d for d in drivers if any(d.spec.config.engine_id in name for name in os.listdir("/dev/shm"))]


def stats(driver: Driver) -> Any:
    """Return the slots of the primary tier by state."""
    return driver.manager.manager.stats().primary


def load_all(driver: Driver, keys: list[bytes]) -> None:
    """Load as many blocks at a time as fit, and compare their bytes."""
    for at in range(0, len(keys), 20):
        assert driver.load(keys[at : at + 20]) == keys[at : at + 20]


@pytest.mark.parametrize("finished", [False, True], ids=["request goes on", "request was aborted"])
def test_a_store_that_is_made_after_a_reset(opened: Open, finished: bool) -> None:
    """A store executed long after a reset, as after a sleep, overwrites no block promoted since."""
    driver = opened()
    driver.store(KEYS)
    driver.forget_primary()
    context = driver.request()
    (job,) = driver.begin_store(LATE, context)
    if finished:
        driver.manager.on_request_finished(context)
    driver.forget_primary()
    assert stats(driver).abandoned == len(LATE)
    load_all(driver, KEYS)
    assert stats(driver).abandoned == len(LATE)
    driver.copy(job)
    load_all(driver, KEYS)
    driver.settle()
    assert stats(driver).abandoned == 0
    assert driver.lookup(LATE[:1], driver.request()) == [LookupResult.MISS], "a store from before a reset is no block"


def test_a_load_that_is_made_after_a_reset(opened: Open) -> None:
    """A load that the worker executes after a reset reads the blocks that it was prepared for."""
    driver = opened()
    driver.store(LATE)
    driver.store(KEYS[:50])
    context = driver.request()
    assert set(driver.lookup(LATE, context)) == {LookupResult.HIT}
    job = driver.begin_load(LATE, context)
    driver.forget_primary()
    load_all(driver, KEYS[:50])
    driver.copy(job)
    assert driver.late.seen[job] == [pattern_of(key).tobytes() for key in LATE]
    driver.settle()
    assert stats(driver).abandoned == 0


def test_copies_without_a_reset_end_normally(opened: Open) -> None:
    """Without a reset copies end as usual, and the next reset has no copies to wait for."""
    driver = opened()
    context = driver.request()
    driver.copy(*driver.begin_store(LATE, context))
    assert set(driver.lookup(LATE, context)) == {LookupResult.HIT}
    job = driver.begin_load(LATE, context)
    driver.copy(job)
    assert driver.late.seen[job] == [pattern_of(key).tobytes() for key in LATE]
    driver.manager.on_request_finished(context)
    driver.settle()
    driver.forget_primary()
    assert stats(driver).abandoned == 0 and driver.manager.errors.count == 0


def test_resets_one_after_the_other(opened: Open) -> None:
    """Each reset waits for its own copies; the last report frees the last slots."""
    driver = opened()
    jobs: list[int] = []
    for number in range(LANES + 3):
        jobs += driver.begin_store([key_of(2000 + number)], driver.request())
        driver.forget_primary()
    assert stats(driver).abandoned == len(jobs)
    for left, job in reversed(list(enumerate(reversed(jobs)))):
        driver.copy(job)
        driver.step()
        assert stats(driver).abandoned <= len(jobs) and (stats(driver).abandoned == 0) == (left == 0)


def test_reset_notice_of_vllm_frees_the_slots(opened: Open) -> None:
    """``on_reset_flushed`` (0.33) frees the slots, even if no copy was counted."""
    driver = opened()
    driver.begin_store(LATE, driver.request())
    driver.manager.reset_cache()
    driver.step()
    assert stats(driver).abandoned == len(LATE)
    driver.manager.on_reset_flushed()
    assert stats(driver).abandoned == 0


@pytest.mark.usefixtures("short_drain")
def test_a_medium_that_hangs_holds_no_reset_up(opened: Open) -> None:
    """A reset ends although a tier's I/O does not: its slots stay out of use, and the engine continues."""
    driver = opened([{"type": f"{__name__}:Hanging", "store_timeout": 600}])
    driver.copy(*driver.begin_store(LATE, driver.request()))
    driver.step()
    driver.forget_primary()
    assert stats(driver).abandoned == len(LATE) and driver.manager.errors.count == 0
    driver.copy(*driver.begin_store(KEYS[:5], driver.request()))
    assert set(driver.lookup(KEYS[:5], driver.request())) == {LookupResult.HIT}


def test_a_worker_that_never_came_proves_nothing(opened: Open) -> None:
    """With two workers both counters matter: the slots stay out of use until both have ended their copies."""
    driver = opened(parallel=parallel(world_size=2, tp_size=2), worker_kv_bytes_per_block=BLOCK_BYTES // 2)
    context = driver.request()
    prepared = driver.manager.prepare_store(LATE, context)
    driver.manager.reset_cache()
    region, (rows, row_bytes) = driver.spec._scheduler_mmap, region_shape(driver.spec)
    late = [LateWorker(driver.late.rows) for _ in range(2)]
    workers = [driver.worker]
    counters = counters_of(region, rows, row_bytes, 2)
    second = CountingWorker(late[1], counters, 1, stores=True, failures=LoadFailures({}, by_block=True))
    workers.append(second)
    for inner, worker in zip([driver.late, late[1]], workers, strict=True):
        driver.step()
        assert stats(driver).abandoned == len(LATE)
        inner.patterns[7] = list(prepared.keys_to_store)
        worker.submit_store(7, GPULoadStoreSpec([], [0], [0]), prepared.store_spec)
        driver.step()
        assert stats(driver).abandoned == len(LATE)
        worker.wait({7})
        assert [result.job_id for result in worker.get_finished()] == [7]
    driver.step()
    assert stats(driver).abandoned == 0
    del late[0].rows, late[1].rows
    second.shutdown()


def test_a_worker_that_stores_nothing() -> None:
    """If one rank stores for all in vLLM, only the loads of the other ranks are waited for."""
    row = memoryview(bytearray(4096))
    reports = WorkerReports(row, 2)
    assert not reports.ended(0, 0, 0), "no worker is there yet"
    words = row.cast("Q")
    words[0], words[17] = 2, 1
    assert reports.ended(0, 0, 0) and not reports.ended(0, 0, 1)
    words[2] = 1
    assert reports.ended(0, 0, 1) and not reports.ended(0, 1, 1)
    words[1] = words[18] = 1
    assert reports.ended(0, 1, 1) and not reports.ended(1, 1, 1)
    assert not WorkerReports(memoryview(bytearray(256)), 2).ended(0, 0, 0), "too short for two"


def test_second_worker_of_a_rank_continues_its_counters() -> None:
    """A second worker of a rank continues the counters of the first, and its stores still count."""
    with mmap.mmap(-1, mmap.PAGESIZE) as counters:
        reports = WorkerReports(memoryview(counters), 1)
        for _ in range(2):
            CountingWorker(LateWorker(NO_ROWS), counters, 0, stores=True, failures=LoadFailures({}, by_block=True))
            assert reports.ended(0, 0, 0) and not reports.ended(0, 0, 1)
        del reports


@pytest.mark.parametrize("region", [SimpleNamespace(), SimpleNamespace(fd=None)])
def test_a_region_of_an_unknown_form_has_no_counters(region: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The engine starts, with a warning about slots that a reset during a copy costs."""
    assert counters_of(region, 4, mmap.PAGESIZE, 1) is None
    assert "Finished copies are not counted" in caplog.text


def test_the_end_of_a_worker_closes_its_counters() -> None:
    """The page is unmapped with the worker, at the first of several calls."""
    counters = mmap.mmap(-1, mmap.PAGESIZE)
    worker = CountingWorker(LateWorker(NO_ROWS), counters, 0, stores=True, failures=LoadFailures({}, by_block=True))
    for _ in range(2):
        worker.shutdown()
        assert counters.closed


def test_a_block_that_is_missing_kills_no_engine(opened: Open) -> None:
    """A load of a missing block raises no error; the worker copies no bytes, and reports the load as failed."""
    driver = opened()
    driver.store(LATE)
    context = driver.request()
    spec = driver.manager.prepare_load([*LATE, key_of(5)], context)
    assert isinstance(spec, Slots) and spec.is_void and len(spec.chunk_ids) == 6
    driver.expects_errors = True
    assert driver.manager.errors.count == 1 and stats(driver).pinned == 0
    assert pickle.loads(pickle.dumps(spec)).is_void
    failures = LoadFailures({}, by_block=True)
    connector, worker = Connector(failures), CountingWorker(Unused(NO_ROWS), None, 0, stores=True, failures=failures)
    assert worker.submit_load(1, spec, GPULoadStoreSpec([3, 4], [2], [0]))
    assert [result.job_id for result in worker.get_finished()] == [1]
    assert connector.get_block_ids_with_load_errors() == {3, 4}
    assert connector.get_block_ids_with_load_errors() == set()
    driver.manager.complete_load([*LATE, key_of(5)], context)
    driver.settle()
    assert stats(driver).abandoned == 0


def test_a_failed_load_of_a_model_with_several_kinds_of_blocks() -> None:
    """With several layer groups vLLM accepts only failed requests."""
    failures = LoadFailures({1: "r1", 2: None}, by_block=False)
    connector, worker = Connector(failures), CountingWorker(Unused(NO_ROWS), None, 0, stores=True, failures=failures)
    assert worker.submit_load(1, Slots([0], 0, is_void=True), GPULoadStoreSpec([3], [1], [0]))
    assert [result.job_id for result in worker.get_finished()] == [1]
    assert connector.get_transfer_results({"r2"}).failed_recving == set()
    assert connector.get_transfer_results({"r1", "r2"}).failed_recving == {"r1"}
    assert connector.get_transfer_results({"r1"}).failed_recving == set()
    with pytest.raises(RuntimeError, match="wrong ones"):
        worker.submit_load(2, Slots([0], 0, is_void=True), GPULoadStoreSpec([3], [1], [0]))


def test_no_method_raises(opened: Open) -> None:
    """Whatever error occurs inside, every method that vLLM calls returns an answer, and the error is counted."""
    driver = opened()
    driver.expects_errors = True
    context = driver.request()
    driver.manager.manager, inner = None, driver.manager.manager
    driver.manager._foreign._manager = None
    calls = {
        "lookup": (KEYS[0], context),
        "prepare_load": (KEYS, context),
        "prepare_store": (KEYS, context),
        "complete_load": (KEYS, context),
        "complete_store": (KEYS, context),
        "on_new_request": (context,),
        "on_request_finished": (context,),
        "on_reset_flushed": (),
        "reset_cache": (),
        "has_pending_work": (),
        "get_stats": (),
    }
    for name, arguments in calls.items():
        before = driver.manager.errors.count
        answer = getattr(driver.manager, name)(*arguments)
        assert driver.manager.errors.count == before + 1, name
        assert name != "prepare_load" or answer.is_void
    driver.manager.manager = driver.manager._foreign._manager = inner
    assert "on_reset_flushed" in calls or not hasattr(OffloadingManager, "on_reset_flushed")


class Hanging(FaultyBackend):
    """A medium whose puts never end."""

    config_type = MemoryConfig

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__(MemoryBackend(config), FaultPlan([Fault("put", FaultKind.DELAY, times=None, seconds=3600.0)]))


class Unused(LateWorker):
    """A worker that must not be called."""

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Fail."""
        raise AssertionError("a load was made that must not be")

    def get_finished(self) -> list[TransferResult]:
        """Return nothing."""
        return []


class Connector(KVStoreConnector):
    """Our connector in a worker without a model, whose loads end at once."""

    def __init__(self, failures: LoadFailures) -> None:
        self.engine = EngineContext(None)
        self.engine.load_failures = failures

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """End the loads of these requests."""
        return set(), set(finished_req_ids)
