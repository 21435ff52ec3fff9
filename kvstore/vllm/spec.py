"""The offloading spec: kvstore's tiers by short names, and kvstore's manager, on every platform."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore.errors import ConfigError
from kvstore.vllm.compat import (
    chosen_attention,
    leave_zeros_out,
    open_region,
    poll_briefly,
    region_shape,
    tolerate_unnaming,
    window_groups,
)
from kvstore.vllm.connector import current_engine
from kvstore.vllm.copies import CountingWorker, LoadFailures, counters_of
from kvstore.vllm.layout import (
    WorkerNote,
    is_certified,
    leave_note,
    take_note,
    with_canonical_layout,
    with_whole_rows,
    without_synchronous_loads,
)
from kvstore.vllm.manager import open_manager
from kvstore.vllm.metrics import engine_metric_definitions, manager_metric_definitions, metric_definitions
from kvstore.vllm.options import (
    TIER_TYPE,
    check_options,
    check_tiering,
    is_own_manager,
    option_faults,
    unknown_options,
    uses_huge_pages,
    with_short_types,
)
from kvstore.vllm.region import use_locked_region
from kvstore.vllm.worker import HostOffloadingWorker


class KVStoreOffloadingSpec(TieringOffloadingSpec):
    """vLLM's ``TieringOffloadingSpec`` with kvstore's tiers and manager, also on the CPU platform.

    ``secondary_tiers`` accepts kvstore's tiers by the name of their backend, ``{"type": "file", "path": …}``. The
    object ``"tiering"`` has the options of kvstore's manager (:class:`kvstore.tiering.TieringConfig`).
    ``"manager": "vllm"`` selects vLLM's own manager. Tiers of vLLM and of third parties run alongside ours
    (:mod:`kvstore.vllm.foreign`). On the CPU platform, rows have the canonical layout if vLLM can certify it
    (:mod:`kvstore.vllm.layout`). On every platform, ``"canonical_layout"`` (``true`` or ``false``) overrides the
    default. All options are checked here, before the engine starts.
    """

    config: OffloadingConfig

    def __init__(self, config: OffloadingConfig) -> None:
        extra = with_short_types(config.extra_config)
        for tier in extra["secondary_tiers"]:
            if tier["type"] == TIER_TYPE:
                check_options(tier, tier_type=TIER_TYPE)
        for fault in (*option_faults(extra), *unknown_options(extra)[0]):
            raise ConfigError(fault)
        self._tiering = check_tiering(extra)
        self.engine = current_engine()
        has_workers = self.engine.kv_cache_config is not None
        use_locked_region(config.engine_id, huge_pages=uses_huge_pages(extra), has_workers=has_workers)
        whole = with_whole_rows(dataclasses.replace(config, extra_config=extra), self.engine)
        self._direct_config: OffloadingConfig = without_synchronous_loads(whole, self.engine)
        all_ours = all(tier["type"] == TIER_TYPE for tier in extra["secondary_tiers"])
        # vLLM's own tiers expect one row length per namespace and delete shorter files. Our manager separates lengths.
        may_choose = all_ours or self._tiering is not None
        super().__init__(with_canonical_layout(self._direct_config, self.engine) if may_choose else self._direct_config)
        # Groups of layers whose blocks vLLM frees while a request runs.
        self.window_groups = window_groups(self.engine.kv_cache_config)
        # The workers' attention backends, set when the manager is made; None if unknown.
        self.attention: str | None = None
        self._host_worker: HostOffloadingWorker | None = None
        self._own_manager: OffloadingManager | None = None
        self._counting_worker: OffloadingWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Declare the metrics of every tier, of vLLM's manager, and of our manager if it is used."""
        # vLLM's front end, which logs the metrics, calls only this method.
        leave_zeros_out()
        extra = with_short_types(extra_config)
        ours = {**metric_definitions(), **manager_metric_definitions(), **engine_metric_definitions()}
        return {**super().build_metric_definitions(extra), **(ours if is_own_manager(extra) else {})}

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """Declare the labels of vLLM's information metric (0.33)."""
        return super().config_info_keys(with_short_types(extra_config))

    def get_manager(self) -> OffloadingManager:
        """Return the manager (scheduler side), made at the first call."""
        note = take_note(self.config.engine_id)
        canonical = note.canonical if note is not None and self._leaves_layout else None
        if canonical and not self.config.canonical_layout:
            raise ConfigError(
                "The workers have the canonical layout, and the scheduler does not. Give 'canonical_layout': false."
            )
        if canonical is False and self.config.canonical_layout:
            self._use_direct_rows()
        self.attention = None if note is None else note.attention
        if self._tiering is None:
            manager = super().get_manager()
        else:
            if self._own_manager is None:
                self._own_manager = open_manager(self, self._tiering)
            manager = self._own_manager
        _unname_region(getattr(self, "_scheduler_mmap", None))
        return manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker: vLLM's own on an accelerator, or the host worker if the KV cache is in host memory."""
        chosen = self.config.canonical_layout and self._leaves_layout
        if chosen and not is_certified(kv_caches):
            self._use_direct_rows()
        worker = self._get_worker(kv_caches)
        if self._tiering is not None:
            worker = self._counting_worker = self._counting_worker or self._counting(worker)
        note = WorkerNote(self.config.canonical_layout, chosen_attention(self.engine.engine_config))
        leave_note(self.config.engine_id, note, expects_canonical=chosen)
        return worker

    @property
    def _leaves_layout(self) -> bool:
        """Whether kvstore chooses the layout of the rows."""
        return "canonical_layout" not in self._direct_config.extra_config

    def _use_direct_rows(self) -> None:
        """Change to vLLM's direct layout.

        Its rows may differ in length and number, because all ranks share a canonical row but not a direct one. So vLLM
        derives all its values from the configuration again.
        """
        super().__init__(self._direct_config)

    def _counting(self, worker: OffloadingWorker) -> OffloadingWorker:
        """Return a worker that counts finished copies for our manager."""
        worker_half, parallel = self.engine.worker, self.config.parallel
        single = len(getattr(self.engine.kv_cache_config, "kv_cache_groups", ())) == 1
        failures = LoadFailures(getattr(worker_half, "_load_jobs", {}), by_block=single)
        self.engine.load_failures = failures
        ours = isinstance(worker, HostOffloadingWorker)
        region = worker.region if ours else getattr(worker, "_mmap_region", None)
        counters = counters_of(region, *region_shape(self), parallel.world_size)
        return CountingWorker(
            worker,
            counters,
            parallel.rank,
            stores=getattr(worker_half, "_is_store_writer", True),
            failures=failures,
        )

    def _get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if any(tensor.tensor.device.type != "cpu" for tensor in kv_caches.tensors):
            worker = super().get_worker(kv_caches)
            tolerate_unnaming(worker)
            return worker
        if self._host_worker is None:
            poll_briefly()
            region = open_region(self, rank=0 if self.replicated_layout else self.config.parallel.rank)
            try:
                if self.config.canonical_layout:
                    self._validate_canonical_refs(kv_caches)
                self._host_worker = HostOffloadingWorker(
                    kv_caches,
                    self.blocks_per_chunk,
                    region,
                    canonical_layout=self.config.canonical_layout,
                )
            except BaseException:
                # No worker owns the region now; remove its file from /dev/shm.
                region.cleanup()
                raise
        return self._host_worker


def _unname_region(region: Any) -> None:
    """Remove the name of the shared region from /dev/shm once every process has mapped it.

    vLLM creates the scheduler after all workers have mapped the region. Without a name, the memory is freed when the
    last process exits, even if the engine crashes.
    """
    if region is None or region._creator:
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(region.mmap_path)
