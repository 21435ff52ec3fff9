"""vLLM's tiering manager or ours, driven as by vLLM's scheduler, with byte patterns in place of GPU data."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingWorker,
    ReqContext,
    ScheduleEndContext,
    TransferResult,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore.testing.waiting import eventually
from kvstore.vllm.compat import region_shape
from kvstore.vllm.connector import EngineContext
from kvstore.vllm.copies import CountingWorker, LoadFailures, counters_of
from kvstore.vllm.region import use_locked_region
from kvstore.vllm.spec import KVStoreOffloadingSpec
from tests.vllm.engine_config import engine

_NO_BLOCKS = GPULoadStoreSpec([], group_sizes=[0], block_indices=[0])
"""There is no device."""

BLOCK_BYTES = 8192
ROWS = 64


def offloading_config(tiers: Sequence[dict[str, Any]], *, events: bool = False, **changes: Any) -> OffloadingConfig:
    """Return a configuration like that of vLLM's connector, with fields replaced."""
    fields: dict[str, Any] = {
        "groups": (_make(OffloadingGroupConfig, tokens_per_block=16, layer_names=("l0", "l1"), group_id=0),),
        "worker_kv_bytes_per_block": BLOCK_BYTES,
        "enable_kv_cache_events": events,
        "extra_config": {"cpu_bytes_to_use": ROWS * BLOCK_BYTES, "secondary_tiers": [dict(tier) for tier in tiers]},
        "engine_id": f"kvstore-test-{uuid.uuid4().hex}",
        "model": OffloadingModelConfig(name="org/model", dtype="float16"),
        "cache": _make(OffloadingCacheConfig, tokens_per_hash=16, blocks_per_chunk=1),
        "parallel": parallel(),
        "kv_cache_layout": "LBHNC",
    }
    return _make(OffloadingConfig, **{**fields, **changes})


def _make(cls: Any, **fields: Any) -> Any:
    """Build a vLLM configuration with the fields of the running version."""
    known = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in fields.items() if name in known})


def parallel(**changes: Any) -> OffloadingParallelConfig:
    """Return the parallel part of a configuration, with one worker unless changed."""
    fields: dict[str, Any] = {
        "rank": 0,
        "world_size": 1,
        "tp_size": 1,
        "pp_size": 1,
        "pcp_size": 1,
        "dcp_size": 1,
        "data_parallel_index": 0,
        "data_parallel_size": 1,
        "data_parallel_rank_local": None,
        "is_parallelism_agnostic": False,
    }
    return _make(OffloadingParallelConfig, **{**fields, **changes})


def key_of(number: int, group: int = 0) -> bytes:
    """Return a key in vLLM's format: a block hash and the group."""
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


def pattern_of(key: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the content of a key's block in these tests."""
    rng = np.random.default_rng(int.from_bytes(key[24:32], "big"))
    return rng.integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


def make_spec(config: OffloadingConfig, spec_class: Any = KVStoreOffloadingSpec, known: Any = None) -> Any:
    """Return a spec as made by our connector, in an engine with another configuration if given."""
    use_locked_region(config.engine_id, huge_pages=True)
    with EngineContext(known or engine()).entered():
        return spec_class(config)


class LateWorker(OffloadingWorker):
    """Copies patterns into the rows of stores on demand, possibly long after a reset."""

    def __init__(
        self, rows: np.ndarray[Any, np.dtype[np.uint8]], content_of: Callable[[bytes], Any] = pattern_of
    ) -> None:
        self.rows = rows  # The region.
        self.content_of = content_of  # The block of a key.
        self.seen: dict[int, list[bytes]] = {}  # Content of the rows of each load at the time of its copy.
        self._open: dict[int, tuple[list[int], list[bytes] | None]] = {}
        self._finished: list[TransferResult] = []
        self.patterns: dict[int, list[bytes]] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Accept a store of the blocks listed in ``patterns``."""
        self._open[job_id] = dst_spec.chunk_ids.tolist(), self.patterns.pop(job_id)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Accept a load."""
        self._open[job_id] = src_spec.chunk_ids.tolist(), None
        return True

    def wait(self, job_ids: set[int]) -> None:
        """Make the copies."""
        for job_id in sorted(job_ids & self._open.keys()):
            slots, keys = self._open.pop(job_id)
            if keys is None:
                self.seen[job_id] = [bytes(self.rows[slot]) for slot in slots]
            else:
                for key, slot in zip(keys, slots, strict=True):
                    self.rows[slot] = self.content_of(key)
            self._finished.append(TransferResult(job_id=job_id, success=True))

    def get_finished(self) -> list[TransferResult]:
        """Return the copies made."""
        finished, self._finished = self._finished, []
        return finished


class Driver:
    """A manager, of stock ``TieringOffloadingSpec`` unless another spec is given, and its driver."""

    def __init__(
        self,
        tiers: Sequence[dict[str, Any]],
        *,
        spec_class: Any = TieringOffloadingSpec,
        vllm_config: Any = None,
        content_of: Callable[[bytes], Any] = pattern_of,
        **changes: Any,
    ) -> None:
        self.engine = EngineContext(vllm_config or engine())
        with self.engine.entered():
            self.spec = spec_class(offloading_config(tiers, **changes))
            self.manager = self.spec.get_manager()
        self.tiers = getattr(self.manager, "secondary_tiers", [])
        self.events: list[Any] = []
        self.steps = 0
        self._requests = 0
        self.late = LateWorker(self._rows(), content_of)
        self.worker: OffloadingWorker = self.late
        self.slots = ROWS
        self.expects_errors = False  # Whether a test makes our manager fail.
        if hasattr(self.manager, "manager"):
            region, parallel = self.spec._scheduler_mmap, self.spec.config.parallel
            counters = counters_of(region, *region_shape(self.spec), parallel.world_size)
            self.slots -= 1  # The last row holds the counters.
            self.worker = CountingWorker(self.late, counters, 0, stores=True, failures=LoadFailures({}, by_block=True))
        self._jobs: dict[int, tuple[Any, Sequence[bytes], bool]] = {}
        self._flushing: set[int] = set()
        self._last_job = 0

    def begin_store(self, keys: Sequence[bytes], context: ReqContext) -> list[int]:
        """Submit a store to the worker; return its job, if there is anything to store."""
        prepared = self.manager.prepare_store(keys, context)
        assert prepared is not None
        if not prepared.keys_to_store:
            return []
        job_id = self._begin(context, prepared.keys_to_store, is_store=True)
        self.late.patterns[job_id] = list(prepared.keys_to_store)
        assert self.worker.submit_store(job_id, _NO_BLOCKS, prepared.store_spec)
        return [job_id]

    def begin_load(self, keys: Sequence[bytes], context: ReqContext) -> int:
        """Submit a load of hits to the worker; return its job."""
        job_id = self._begin(context, keys, is_store=False)
        assert self.worker.submit_load(job_id, self.manager.prepare_load(keys, context), _NO_BLOCKS)
        return job_id

    def copy(self, *job_ids: int) -> None:
        """Let the worker make and report copies, and the scheduler process the reports as its version does."""
        self.worker.wait(set(job_ids))
        for result in self.worker.get_finished():
            if result.job_id in self._jobs:
                context, keys, is_store = self._jobs.pop(result.job_id)
                (self.manager.complete_store if is_store else self.manager.complete_load)(set(keys), context)
            elif result.job_id in self._flushing:
                self._flushing.discard(result.job_id)
                self._end_reset()

    def _begin(self, context: ReqContext, keys: Sequence[bytes], *, is_store: bool) -> int:
        self._last_job += 1
        self._jobs[self._last_job] = context, keys, is_store
        return self._last_job

    def _end_reset(self) -> None:
        """Since 0.33 the scheduler reports when the last copy from before a reset has ended."""
        if not self._flushing and hasattr(OffloadingManager, "on_reset_flushed"):
            self.manager.on_reset_flushed()

    def request(self, **fields: Any) -> ReqContext:
        """Start a request."""
        self._requests += 1
        context = ReqContext(req_id=f"r{self._requests}", **fields)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        """End a scheduler step; its KV cache events are added to ``events``."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        self.events.extend(self.manager.take_events())

    def settle(self) -> None:
        """Step until no job is running."""

        def idle() -> bool:
            self.step()
            return not self.manager.has_pending_work()

        eventually(idle, 60, what="all jobs reported")

    def store(self, keys: Sequence[bytes]) -> None:
        """Compute and offload blocks in a request, and wait until all tiers have reported."""
        context = self.request()
        self.copy(*self.begin_store(keys, context))
        self.settle()
        self.manager.on_request_finished(context)

    def store_now(self, keys: Sequence[bytes]) -> None:
        """Compute and offload blocks in a request, and run a step; jobs may continue."""
        context = self.request()
        self.copy(*self.begin_store(keys, context))
        self.step()
        self.manager.on_request_finished(context)

    def settle_tier(self, name: str) -> None:
        """Step until one tier of kvstore's manager has no running job."""

        def idle() -> bool:
            self.step()
            (flow,) = [flow for flow in self.manager.manager.stats().tiers if flow.name == name]
            return not (flow.storing or flow.loading)

        eventually(idle, 60, what=f"all jobs of {name} reported")

    def lookup(self, keys: Sequence[bytes], context: ReqContext, steps_max: int = 100_000) -> list[LookupResult]:
        """Look keys up step by step until each is HIT or MISS; ``self.steps`` is the number of steps."""
        self.steps = 0
        answers: list[LookupResult] = []

        def answered() -> bool:
            nonlocal answers
            self.steps += 1
            assert self.steps <= steps_max, f"no answer in {steps_max} steps: {answers}"
            answers = [self.manager.lookup(key, context) for key in keys]
            self.step()
            return all(answer in (LookupResult.HIT, LookupResult.MISS) for answer in answers)

        eventually(answered, 60, what="an answer to every lookup")
        return answers

    def load(self, keys: Sequence[bytes]) -> list[bytes]:
        """Look keys up in a request; return the found ones, after comparing their bytes."""
        context = self.request()
        answers = self.lookup(keys, context)
        found = [key for key, answer in zip(keys, answers, strict=True) if answer is LookupResult.HIT]
        if found:
            job_id = self.begin_load(found, context)
            self.copy(job_id)
            for key, row in zip(found, self.late.seen.pop(job_id), strict=True):
                assert row == self.late.content_of(key).tobytes(), f"wrong bytes for {key.hex()}"
        self.manager.on_request_finished(context)
        return found

    def forget_primary(self) -> None:
        """Empty the primary tier, as vLLM's cache reset does; the secondary tiers keep their blocks."""
        self.manager.reset_cache()
        self._flushing |= set(self._jobs)
        self._jobs.clear()
        self._end_reset()

    def close(self) -> None:
        """Shut down as the engine does; fails if our manager caught an error."""
        self.late.rows = np.zeros((0, BLOCK_BYTES), np.uint8)
        if self.worker is not self.late:
            self.worker.shutdown()
        self.manager.shutdown()
        if (errors := getattr(self.manager, "errors", None)) is not None:
            assert self.expects_errors or errors.count == 0

    def _rows(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        view = self.spec._scheduler_mmap.create_kv_memoryview()
        return np.frombuffer(view.cast("B"), dtype=np.uint8).reshape(-1, BLOCK_BYTES)


class Drivers:
    """Starts drivers with kvstore's manager; a test's fixture closes all of them at its end."""

    def __init__(self) -> None:
        self.open: list[Driver] = []

    def __call__(self, *tiers: dict[str, Any], **changes: Any) -> Driver:
        self.open.append(Driver(tiers, spec_class=KVStoreOffloadingSpec, **changes))
        return self.open[-1]

    def close(self) -> None:
        """Close the open drivers."""
        while self.open:
            self.open.pop().close()
