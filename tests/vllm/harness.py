"""vLLM's tiering manager or ours, driven as vLLM's scheduler drives it, with a pattern of bytes where a GPU writes."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore.testing.waiting import eventually
from kvstore.vllm.compat import chunk_ids

BLOCK_BYTES = 8192
ROWS = 64


def offloading_config(tiers: Sequence[dict[str, Any]], *, events: bool = False, **changes: Any) -> OffloadingConfig:
    """Return a configuration as vLLM's connector makes it, with fields replaced."""
    fields: dict[str, Any] = {
        "groups": (OffloadingGroupConfig(tokens_per_block=16, layer_names=("l0", "l1"), group_id=0),),
        "worker_kv_bytes_per_block": BLOCK_BYTES,
        "enable_kv_cache_events": events,
        "extra_config": {"cpu_bytes_to_use": ROWS * BLOCK_BYTES, "secondary_tiers": [dict(tier) for tier in tiers]},
        "engine_id": f"kvstore-test-{uuid.uuid4().hex}",
        "model": OffloadingModelConfig(name="org/model", dtype="float16"),
        "cache": OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        "parallel": parallel(),
        "kv_cache_layout": "LBHNC",
    }
    return OffloadingConfig(**{**fields, **changes})


def parallel(**changes: Any) -> OffloadingParallelConfig:
    """Return the parallel part of a configuration, of one worker unless changed."""
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
    return OffloadingParallelConfig(**{**fields, **changes})


def key_of(number: int, group: int = 0) -> bytes:
    """Return a key as vLLM makes them: a block hash and the group."""
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


def pattern_of(key: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes that the block of a key holds in these tests."""
    rng = np.random.default_rng(int.from_bytes(key[24:32], "big"))
    return rng.integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


class Driver:
    """A manager, of stock ``TieringOffloadingSpec`` unless another spec is given, and what drives it.

    Args:
        tiers: ``secondary_tiers``.
        spec_class: The spec.
        events: Whether KV cache events are wanted.
        changes: Other fields of the configuration.
    """

    def __init__(
        self, tiers: Sequence[dict[str, Any]], *, spec_class: Any = TieringOffloadingSpec, **changes: Any
    ) -> None:
        self.spec = spec_class(offloading_config(tiers, **changes))
        self.manager = self.spec.get_manager()
        self.tiers = getattr(self.manager, "secondary_tiers", [])
        self.events: list[Any] = []
        self.steps = 0
        self._requests = 0

    def request(self, **fields: Any) -> ReqContext:
        """Begin a request."""
        self._requests += 1
        context = ReqContext(req_id=f"r{self._requests}", **fields)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        """End a scheduler step; its KV cache events are added to ``events``."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        self.events.extend(self.manager.take_events())

    def settle(self) -> None:
        """Step until no job is under way."""

        def idle() -> bool:
            self.step()
            return not self.manager.has_pending_work()

        eventually(idle, 60, what="all jobs reported")

    def store(self, keys: Sequence[bytes]) -> None:
        """Let a request compute and offload blocks, and wait until all tiers have reported."""
        context = self.request()
        prepared = self.manager.prepare_store(keys, context)
        assert prepared is not None
        rows = self._rows()
        for key, row in zip(prepared.keys_to_store, chunk_ids(prepared.store_spec), strict=True):
            rows[row] = pattern_of(key)
        self.manager.complete_store(prepared.keys_to_store, context)
        self.settle()
        self.manager.on_request_finished(context)

    def lookup(self, keys: Sequence[bytes], context: ReqContext, steps_max: int = 100_000) -> list[LookupResult]:
        """Look keys up step by step until each is answered HIT or MISS; the number of steps is ``self.steps``."""
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
        """Let a request look keys up; return those that were found, after comparing their bytes."""
        context = self.request()
        answers = self.lookup(keys, context)
        found = [key for key, answer in zip(keys, answers, strict=True) if answer is LookupResult.HIT]
        if found:
            spec = self.manager.prepare_load(found, context)
            rows = self._rows()
            for key, row in zip(found, chunk_ids(spec), strict=True):
                assert np.array_equal(rows[row], pattern_of(key)), f"wrong bytes for {key.hex()}"
            self.manager.complete_load(found, context)
        self.manager.on_request_finished(context)
        return found

    def forget_primary(self) -> None:
        """Empty the primary tier, as vLLM does when the cache is reset; the secondary tiers keep theirs."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):  # vLLM 0.33 holds promotions back until workers have answered.
            self.manager.on_reset_flushed()

    def close(self) -> None:
        """Shut down as the engine does."""
        self.manager.shutdown()

    def _rows(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        view = self.spec._scheduler_mmap.create_kv_memoryview()
        return np.frombuffer(view.cast("B"), dtype=np.uint8).reshape(-1, BLOCK_BYTES)
