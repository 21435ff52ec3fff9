"""kvstore's tier as vLLM's tiering manager knows it: a thin adapter, which never raises and never loses a job."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from vllm.v1.kv_offload.base import Locality as VllmLocality
from vllm.v1.kv_offload.base import LookupResult as VllmLookupResult
from vllm.v1.kv_offload.base import Medium as VllmMedium
from vllm.v1.kv_offload.base import (
    OffloadingEvent,
    OffloadingMetricMetadata,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult as VllmJobResult
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.base import TransferJob as VllmTransferJob

from kvstore.tiering.events import merged
from kvstore.tiers import open_tier
from kvstore.types import JobResult, LookupResult, RequestContext, TransferJob
from kvstore.vllm.compat import (
    cache_hit_source,
    chunk_ids,
    current_engine_config,
    emits_events,
    make_event,
    make_result,
    request_keys,
    supported_kwargs,
)
from kvstore.vllm.guard import ErrorLog, guarded
from kvstore.vllm.metrics import TierMetrics, metric_definitions
from kvstore.vllm.namespace import engine_namespace
from kvstore.vllm.options import check_options, tier_name

__all__ = ["KVStoreTier"]

logger = logging.getLogger("kvstore.vllm.tier")

_vllm_logger = logging.getLogger("vllm.kvstore")
"""For the one line that belongs into vLLM's own log, which shows nothing below a warning of any other logger."""

_ANSWERS = {
    LookupResult.HIT: VllmLookupResult.HIT,
    LookupResult.MISS: VllmLookupResult.MISS,
    LookupResult.RETRY: VllmLookupResult.RETRY,
}

_REPORT_INTERVAL_S = 0.25
"""Between two reports of metrics; a step is faster, and people look every few seconds."""

_DRAIN_LOG_S = 10.0
"""A drain that takes longer says so, and goes on: slots must not be reused while I/O may touch them."""

_TOUCHED_KEYS_MAX = 1024
"""Blocks of a finished request that count as used, from the start of its prompt: without them the rest is worth
nothing. Noting them takes some 100 us, which is all that the scheduler should spend on it."""


class KVStoreTier(SecondaryTierManager):
    """A kvstore tier for vLLM's ``TieringOffloadingSpec``.

    ``{"type": "KVStoreTier", "module_path": "kvstore.vllm", "backend": "file", "path": …}`` in ``secondary_tiers``
    makes one. All keys but ``type``, ``module_path``, ``backpressure`` and ``locality`` belong to the backend.

    The methods are vLLM's contract (``SecondaryTierManager``). Beyond it they guarantee that none raises, that each
    job is reported exactly once, and that a block whose load failed is a MISS for that request from then on.

    Raises:
        ConfigError: The options can't be used.
        BackendError: The medium refuses, and the tier is ``required``.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        base = super().__init__
        known = {"backpressure_detector": backpressure_detector}
        base(offloading_spec, primary_kv_view, tier_type, **supported_kwargs(SecondaryTierManager.__init__, known))
        config = check_options(options, tier_type=tier_type)
        _make_name_unique(config, offloading_spec)
        if primary_kv_view.strides is None:
            raise TypeError("the view of the primary tier has no strides; expected rows of one length")
        slot_bytes = primary_kv_view.strides[0]
        namespace = engine_namespace(offloading_spec, slot_bytes, current_engine_config())
        self._jobs: dict[int, frozenset[bytes]] = {}
        self._lost: list[int] = []
        self._results: list[VllmJobResult] = []
        self._reported_at = 0.0
        self._unreported_jobs = False
        self._emits_events = emits_events(offloading_spec)
        # Rows can't be had from a view of two dimensions, only from the bytes as a whole.
        self._rows: memoryview = primary_kv_view.cast("B")
        try:
            self._tier = open_tier(config, primary=self._rows, slot_bytes=slot_bytes, namespace=namespace)
        except BaseException:
            self._rows.release()
            raise
        self._take_on_its_nature(options.get("locality"))
        self.errors = ErrorLog(self._tier.name)
        self._metrics = TierMetrics(self._tier.name)
        _vllm_logger.info("kvstore tier %s opened, namespace %s", self._tier.name, namespace.hex)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Declare the metrics that ``get_stats`` fills; connects to nothing."""
        return metric_definitions()

    @property
    def label(self) -> str:
        """Name of this tier in metrics: the option ``label``, else the backend's name."""
        return self._tier.name

    @guarded(RequestOffloadingContext)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Note a request; its new blocks are wanted, not those that the tier was offered before."""
        _context(req_context)
        return RequestOffloadingContext()

    @guarded(lambda: VllmLookupResult.MISS)
    def lookup(self, key: bytes, req_context: ReqContext) -> VllmLookupResult:
        """Answer HIT or MISS in the same step where the tier knows, else RETRY, never for longer than its deadline."""
        return _ANSWERS.get(self._tier.lookup(key, _context(req_context)), VllmLookupResult.MISS)

    @guarded(lambda: None)
    def submit_store(self, job_metadata: VllmTransferJob) -> None:
        """Enqueue a store; handed over at the end of the step."""
        self._submit(job_metadata, lambda job: self._tier.submit_store(job))

    @guarded(lambda: None)
    def submit_load(self, job_metadata: VllmTransferJob) -> None:
        """Enqueue a load; handed over at the end of the step, which is right after."""
        self._submit(job_metadata, lambda job: self._tier.submit_load(job))

    def get_finished_jobs(self) -> Iterable[VllmJobResult]:
        """Return the jobs that ended since the last call, each exactly once."""
        self._collect()
        finished, self._results = self._results, []
        self._unreported_jobs = self._unreported_jobs or bool(finished)
        return finished

    @guarded(lambda: False)
    def has_pending_work(self) -> bool:
        """Whether there is something to fetch; jobs under way keep the engine stepping without this."""
        return bool(self._lost or self._results) or (self._emits_events and self._tier.has_unreported)

    @guarded(list)
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the blocks that entered or left the tier since the last call."""
        if not self._emits_events:
            return []
        return [
            make_event(
                event.keys,
                self.medium,
                removed=event.cause is not None,
                tier=self._tier.name,
                locality=self.locality,
            )
            for event in merged(self._tier.take_events())
        ]

    @guarded(lambda: None)
    def touch(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        """Note a use of blocks (vLLM up to 0.30 tells)."""
        self._tier.touch(list(keys)[:_TOUCHED_KEYS_MAX])

    @guarded(lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the request. Its blocks count as used, also those that never had to come from this tier."""
        self._tier.touch(request_keys(req_context, _TOUCHED_KEYS_MAX))
        self._tier.on_request_finished(_context(req_context))

    @guarded(lambda: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Hand over what the step submitted, with one wake-up of the I/O side."""
        self._tier.flush()
        if not self._emits_events and self._tier.has_unreported:
            self._tier.take_events()

    @guarded(lambda: None)
    def drain_jobs(self) -> None:
        """Block until no I/O touches the primary tier; all results are there for the next ``get_finished_jobs``.

        Then a new epoch begins, unless the tier is to keep its blocks (``"reset": "keep"``).
        """
        started = time.monotonic()
        while not self._tier.drain(_DRAIN_LOG_S):
            if time.monotonic() - started < _DRAIN_LOG_S:
                break  # All I/O has ended, and yet a job has no result.
            started = time.monotonic()
            logger.warning("kvstore tier %s: still waiting for %d jobs to end", self._tier.name, len(self._jobs))
        self._collect()
        # Nothing runs any more, so a job without a result will never have one.
        self._lost.extend(self._jobs.keys() - set(self._lost))
        # vLLM drains a tier only to reset its caches, and tells it of the reset by nothing else.
        self._tier.begin_epoch()

    @guarded(lambda: None)
    def get_stats(self) -> Any:
        """Return what changed in our metrics, a few times a second."""
        now = time.monotonic()
        ended = self._unreported_jobs and not self._jobs  # The engine may go idle now, and nobody will ask again.
        if now - self._reported_at < _REPORT_INTERVAL_S and not ended:
            return None
        self._reported_at, self._unreported_jobs = now, False
        return self._metrics.report(self._tier.stats(), self._tier.take_samples(), self.errors.count)

    @guarded(lambda: None)
    def shutdown(self) -> None:
        """End all I/O and let go of the primary tier's memory. May be called again."""
        self._tier.close()
        with contextlib.suppress(BufferError):
            # Held by I/O that did not end in time; closing has said so.
            self._rows.release()

    def _take_on_its_nature(self, locality: str | None) -> None:
        """Take over medium and locality, by which requests choose the tiers to load from."""
        self.medium = VllmMedium[self._tier.medium.name]
        self.locality = VllmLocality(locality if locality is not None else self._tier.locality.value)
        source = cache_hit_source(self._tier.medium, self._tier.locality)
        if source is not None:
            self.cache_hit_source = source

    def _submit(self, job: VllmTransferJob, submit: Callable[[TransferJob], None]) -> None:
        keys = tuple(job.keys)
        self._jobs[job.job_id] = frozenset(keys)
        try:
            submit(TransferJob(job.job_id, keys, chunk_ids(job), _context(job.req_context)))
        # A job that was not accepted is not under way, so it is safe to report it as failed; it must be reported.
        except Exception:
            self.errors.note("submit_load" if job.is_promotion else "submit_store")
            self._lost.append(job.job_id)

    @guarded(lambda: None)
    def _collect(self) -> None:
        """Fetch results into ``_results``, where they are safe from an error half-way."""
        while self._lost:
            job_id = self._lost.pop()
            if self._jobs.pop(job_id, None) is not None:
                self._results.append(make_result(job_id, False))
        for done in self._tier.get_finished():
            keys = self._jobs.pop(done.job_id, None)
            if keys is None:
                logger.debug("kvstore tier %s: second result of job %d dropped", self._tier.name, done.job_id)
                continue
            self._results.append(_vllm_result(done, keys))


def _make_name_unique(config: dict[str, Any], offloading_spec: Any) -> None:
    """Label a tier whose name an earlier tier of the same spec has: metrics and events of the two must differ."""
    taken: list[str] = offloading_spec.__dict__.setdefault("kvstore_tier_names", [])
    if tier_name(config) in taken:
        config["label"] = f"{tier_name(config)}-{len(taken)}"
    taken.append(tier_name(config))


def _vllm_result(done: JobResult, keys: frozenset[bytes]) -> VllmJobResult:
    """Return a result as vLLM wants it; it asserts that the successful keys are keys of the job."""
    good = [key for key in done.successful_keys if key in keys]
    return make_result(
        done.job_id,
        done.success,
        successful_keys=tuple(good) if good and not done.success else None,
        transfer_time=done.seconds,
        transfer_bytes=done.size_bytes,
    )


def _context(req_context: ReqContext) -> RequestContext:
    """Return our view of a request, kept with vLLM's."""
    found: RequestContext | None = req_context.get_state(RequestContext)
    if found is not None:
        return found
    params = (req_context.kv_transfer_params or {}).get("kvstore")
    ours = RequestContext(req_context.req_id, dict(params) if isinstance(params, Mapping) else {})
    req_context.set_state(ours)
    return ours
