"""Adapter from a kvstore tier to vLLM's tiering manager. It never raises and never loses a job."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
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

from kvstore.tiers import open_tier
from kvstore.types import JobResult, LookupResult, RequestContext, TransferJob
from kvstore.vllm.compat import (
    cache_hit_source,
    emits_events,
    has_adapters,
    leave_zeros_out,
    make_event,
    request_ends,
    request_params,
)
from kvstore.vllm.connector import current_engine
from kvstore.vllm.events import Lineage
from kvstore.vllm.guard import ErrorLog, guarded
from kvstore.vllm.layout import useful_bytes, warn_of_waste
from kvstore.vllm.metrics import TierMetrics, engine_metric_definitions, metric_definitions, report_engine
from kvstore.vllm.namespace import engine_namespace
from kvstore.vllm.options import check_options, tier_name
from kvstore.vllm.region import described_pages, region_pages
from kvstore.vllm.startup import described, described_slots, errors_logged, show_logs
from kvstore.vllm.steps import IdleWaker
from kvstore.vllm.tags import remote_fields

logger = logging.getLogger("kvstore.vllm.tier")

_ANSWERS: dict[LookupResult, Any] = {
    answer: VllmLookupResult[answer.name] for answer in LookupResult if answer is not LookupResult.HIT_PENDING
}

_REPORT_INTERVAL_S = 0.25
"""Seconds between two reports of metrics. Steps are shorter; scrapes are seconds apart."""

_DRAIN_LOG_S = 10.0
"""Duration after which a drain logs a warning and continues, because slots must not be reused while I/O may access
them."""

_TOUCHED_KEYS_MAX = 1024
"""Maximum leading blocks of a finished request that count as used; later blocks are useless without them. Recording
them takes about 100 us, the limit for this on the scheduler's thread."""


class KVStoreTier(SecondaryTierManager):
    """A kvstore tier for vLLM's ``TieringOffloadingSpec``.

    Configured by ``{"type": "KVStoreTier", "module_path": "kvstore.vllm", "backend": "file", "path": …}`` in
    ``secondary_tiers``. All keys except ``type``, ``module_path``, ``backpressure`` and ``locality`` belong to the
    backend.

    The methods follow vLLM's contract (``SecondaryTierManager``). In addition, they never raise, each job is reported
    exactly once, and after a failed load the block is a MISS for that request.

    Raises:
        ConfigError: The options are not valid.
        BackendError: The medium can't be opened, and the tier is ``required``.
    """

    @errors_logged()
    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        show_logs()
        config = check_options(options, tier_type=tier_type)
        _make_name_unique(config, offloading_spec)
        if primary_kv_view.strides is None:
            raise TypeError("the view of the primary tier has no strides; expected rows of one length")
        slot_bytes = primary_kv_view.strides[0]
        engine = current_engine()
        namespace = engine_namespace(offloading_spec, slot_bytes, engine)
        if has_adapters(engine.engine_config):
            # vLLM's keys do not cover the content of adapters, so no other engine may read this engine's blocks.
            namespace = namespace.with_fields(engine=uuid.uuid4().hex)
            logger.warning(
                "With LoRA and vLLM's manager, tier %s keeps blocks for this engine only. For blocks that outlive it, "
                "use kvstore's manager (KVStoreOffloadingSpec).",
                tier_name(options),
            )
        self._jobs: dict[int, frozenset[bytes]] = {}
        self._lost: list[int] = []
        self._results: list[VllmJobResult] = []
        self._reported_at = 0.0
        self._has_stepped = False
        self._unreported_jobs = False
        self._emits_events = emits_events(offloading_spec)
        if self._emits_events:
            engine.on_cleared.append(self._restate_events)
        # Only a flat memoryview can be sliced into views of rows.
        self._rows: memoryview = primary_kv_view.cast("B")
        try:
            self.tier = open_tier(
                config,
                primary=self._rows,
                slot_bytes=slot_bytes,
                namespace=namespace,
                events=self._emits_events,
                io="process",
            )
        except BaseException:
            self._rows.release()
            raise
        # Requests select the tiers to load from by medium and locality.
        self.medium = VllmMedium[self.tier.medium.name]
        self.locality = VllmLocality(options.get("locality") or self.tier.locality.value)
        source = cache_hit_source(self.tier.medium, self.tier.locality)
        if source is not None:
            self.cache_hit_source = source
        self.errors = ErrorLog(self.tier.name)
        self._doubts = engine.doubts
        self._pages = region_pages(offloading_spec.config.engine_id)
        self._lineage = Lineage([self.tier] if self._emits_events else (), engine)
        self._metrics = TierMetrics(self.tier.name)
        self._waker = IdleWaker([self.tier])
        useful = useful_bytes(offloading_spec, engine)
        logger.info(
            "kvstore tier %s opened, slots of %s, %s, namespace %s",
            described(self.tier, config),
            described_slots(offloading_spec, slot_bytes, useful),
            described_pages(offloading_spec.config.engine_id),
            namespace.hex,
        )
        warn_of_waste(useful, slot_bytes)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Declare the metrics of ``get_stats``, without any connection."""
        # vLLM's front end, which logs the metrics, calls only this method.
        leave_zeros_out()
        return {**metric_definitions(), **engine_metric_definitions()}

    @property
    def label(self) -> str:
        """Name of this tier in metrics: the option ``label``, otherwise the backend's name."""
        return self.tier.name

    @guarded(RequestOffloadingContext)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Register a request; under the returned policy, vLLM offers only new blocks."""
        _context(req_context)
        return RequestOffloadingContext()

    @guarded(lambda: VllmLookupResult.MISS)
    def lookup(self, key: bytes, req_context: ReqContext) -> VllmLookupResult:
        """Return HIT or MISS in the same step if known, otherwise RETRY, at most until the lookup deadline."""
        return _ANSWERS.get(self.tier.lookup(key, _context(req_context)), VllmLookupResult.MISS)

    @guarded(lambda: None)
    def submit_store(self, job_metadata: VllmTransferJob) -> None:
        """Enqueue a store; submitted at the end of the step."""
        self._submit(job_metadata, self.tier.submit_store)

    @guarded(lambda: None)
    def submit_load(self, job_metadata: VllmTransferJob) -> None:
        """Enqueue a load; submitted at the end of the step, which follows immediately."""
        self._submit(job_metadata, self.tier.submit_load)

    def get_finished_jobs(self) -> Iterable[VllmJobResult]:
        """Return the jobs finished since the last call, each exactly once."""
        self._collect()
        finished, self._results = self._results, []
        self._unreported_jobs = self._unreported_jobs or bool(finished)
        return finished

    @guarded(lambda: False)
    def has_pending_work(self) -> bool:
        """Whether there are results or events to fetch. Running jobs keep the engine stepping without this.

        True until the first step, which reports the metrics with their initial zeros.
        """
        has_reports = not self._has_stepped or self._waker.due or bool(self._lost or self._results)
        return has_reports or (self._emits_events and self.tier.has_unreported)

    @guarded(list)
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the blocks that entered or left the tier since the last call."""
        if not self._emits_events:
            return []
        self._lineage.begin()
        events = self.tier.take_events()
        for event in events:
            self._lineage.note(self.tier, event.keys, removed=event.cause is not None)
        return [
            make_event(event.keys, self.medium, removed=event.cause is not None, locality=self.locality)
            for event in events
        ]

    @guarded(lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        """End a request. All its blocks count as used, including blocks not loaded from this tier."""
        self.tier.touch(list(itertools.islice(request_ends(req_context), _TOUCHED_KEYS_MAX)))
        self.tier.on_request_finished(_context(req_context))

    @guarded(lambda: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Submit the jobs of the step with one wake-up of the I/O side."""
        self._has_stepped = True
        self._waker.note_step()
        self.tier.flush()

    @guarded(lambda: None)
    def drain_jobs(self) -> None:
        """Block until no I/O accesses the primary tier and all results are ready for ``get_finished_jobs``.

        Then begin a new epoch, unless the tier keeps its blocks (``"reset": "keep"``).
        """
        started = time.monotonic()
        while not self.tier.drain(_DRAIN_LOG_S):
            if time.monotonic() - started < _DRAIN_LOG_S:
                break  # Returned early: all I/O has ended, but a job has no result.
            started = time.monotonic()
            logger.warning("kvstore tier %s: still waiting for %d jobs to end", self.tier.name, len(self._jobs))
        self._collect()
        # All I/O has ended, so these jobs will never have a result.
        self._lost.extend(self._jobs.keys() - set(self._lost))
        # vLLM drains a tier only at a cache reset, and gives no other signal of a reset.
        self.tier.begin_epoch()

    @guarded(lambda: None)
    def get_stats(self) -> Any:
        """Return changed metrics, a few times per second."""
        now = time.monotonic()
        ended = self._unreported_jobs and not self._jobs  # The engine may go idle now, without a later call.
        if now - self._reported_at < _REPORT_INTERVAL_S and not ended:
            return None
        self._reported_at, self._unreported_jobs = now, False
        report = self._metrics.report(self.tier.stats(), self.tier.take_samples(), self.errors.count)
        return report.aggregate(report_engine(self._doubts, self._pages))

    @guarded(lambda: None)
    def shutdown(self) -> None:
        """End all I/O and release the primary tier's memory. Idempotent."""
        self._waker.close()
        self.tier.close()
        with contextlib.suppress(BufferError):
            # Fails if I/O that did not end in time still uses the memory; close() has logged that.
            self._rows.release()

    @guarded(lambda: None)
    def _restate_events(self) -> None:
        self.tier.restate_events()

    def _submit(self, job: VllmTransferJob, submit: Callable[[TransferJob], None]) -> None:
        keys = tuple(job.keys)
        self._jobs[job.job_id] = frozenset(keys)
        try:
            submit(TransferJob(job.job_id, keys, job.chunk_ids.tolist(), _context(job.req_context)))
        # A rejected job does not run, so it is reported as failed.
        except Exception:
            self.errors.note("submit_load" if job.is_promotion else "submit_store")
            self._lost.append(job.job_id)

    @guarded(lambda: None)
    def _collect(self) -> None:
        """Collect results one by one into ``_results``, so that an error loses none of them."""
        while self._lost:
            job_id = self._lost.pop()
            if self._jobs.pop(job_id, None) is not None:
                self._results.append(VllmJobResult(job_id, False))
        for done in self.tier.get_finished():
            keys = self._jobs.pop(done.job_id, None)
            if keys is None:
                logger.debug("kvstore tier %s: second result of job %d dropped", self.tier.name, done.job_id)
                continue
            self._results.append(_vllm_result(done, keys))


def _make_name_unique(config: dict[str, Any], offloading_spec: Any) -> None:
    """Label a tier if an earlier tier of the spec has the same name, so that their metrics and events differ."""
    taken: list[str] = offloading_spec.__dict__.setdefault("kvstore_tier_names", [])
    if tier_name(config) in taken:
        config["label"] = f"{tier_name(config)}-{len(taken)}"
    taken.append(tier_name(config))


def _vllm_result(done: JobResult, keys: frozenset[bytes]) -> VllmJobResult:
    """Return vLLM's form of a result; vLLM asserts that the successful keys belong to the job."""
    good = [key for key in done.successful_keys if key in keys]
    return VllmJobResult(
        done.job_id,
        done.success,
        successful_keys=tuple(good) if good and not done.success else None,
        transfer_time=done.seconds,
        transfer_bytes=done.size_bytes,
    )


def _context(req_context: ReqContext) -> RequestContext:
    """Return our context of a request, stored in vLLM's."""
    found: RequestContext | None = req_context.get_state(RequestContext)
    if found is not None:
        return found
    params = request_params(req_context)
    remote = remote_fields(req_context.kv_transfer_params, serves=False)
    ours = RequestContext(req_context.req_id, dict(params) if isinstance(params, Mapping) else {}, **remote)
    req_context.set_state(ours)
    return ours
