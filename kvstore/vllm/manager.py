"""Adapter from kvstore's manager to vLLM's ``OffloadingConnector``; the default manager of our spec."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.kv_offload.base import Locality as VllmLocality
from vllm.v1.kv_offload.base import LookupResult as VllmLookupResult
from vllm.v1.kv_offload.base import Medium as VllmMedium
from vllm.v1.kv_offload.base import (
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore.backends.base import Backend
from kvstore.errors import KVStoreError
from kvstore.namespace import Namespace
from kvstore.primary.lending import Lender
from kvstore.primary.tier import PrimaryTier
from kvstore.tiering import TieringConfig, TieringManager
from kvstore.tiering.events import PRIMARY_NAME, BlockEvent
from kvstore.tiers import AsyncTier, open_tier
from kvstore.types import BlockKey, Locality, LookupResult, Medium
from kvstore.vllm.compat import (
    cache_hit_source,
    emits_events,
    make_event,
    open_region,
    primary_info,
    request_ends,
    request_params,
    steps_under_way_max,
    tier_info,
    unfilled_event,
)
from kvstore.vllm.copies import Slots, WorkerReports
from kvstore.vllm.events import Lineage, Statements
from kvstore.vllm.foreign import ForeignTier, ForeignTiers, VllmRequest, open_foreign_tier
from kvstore.vllm.guard import ErrorLog, guarded
from kvstore.vllm.layout import useful_bytes, warn_of_waste
from kvstore.vllm.metrics import HitSummary, ManagerMetrics, StandardMetrics, TierMetrics, UnreadWarning, report_engine
from kvstore.vllm.namespace import engine_namespace
from kvstore.vllm.options import TIER_TYPE, check_options, eviction_policy, tier_name
from kvstore.vllm.region import described_pages, region_pages
from kvstore.vllm.startup import described, described_slots, errors_logged, show_logs
from kvstore.vllm.steps import IdleWaker, Pauses, StepTimes
from kvstore.vllm.tags import Adapters, Check, RequestTags, of_replica, remote_fields, serves_peers

logger = logging.getLogger("kvstore.vllm.manager")

_ANSWERS = {answer: VllmLookupResult[answer.name] for answer in LookupResult}
_REPORT_INTERVAL_S = 0.25
_DRAIN_S = 10.0
"""Limit for a reset, during which the engine is blocked, if a medium hangs. Successful I/O is far faster."""
_CLOSE_S = 5.0


class KVStoreOffloadingManager(OffloadingManager):
    """A :class:`kvstore.tiering.TieringManager` behind the interface of vLLM's scheduler.

    Created by :func:`open_manager`. No method raises.
    """

    def __init__(
        self,
        manager: TieringManager,
        tiers: Sequence[AsyncTier | ForeignTier],
        region: Any,
        views: Sequence[memoryview],
        spec: Any,
        tags: RequestTags,
    ) -> None:
        self.manager = manager
        self.errors = ErrorLog("manager")
        self._tiers = tuple(tier for tier in tiers if isinstance(tier, AsyncTier))
        self._foreign = ForeignTiers(manager, [tier for tier in tiers if isinstance(tier, ForeignTier)], self._context)
        self._region = region
        self._views = tuple(views)
        self._emits_events = emits_events(spec)
        self._metrics = [TierMetrics(tier.name) for tier in self._tiers]
        self._manager_metrics = ManagerMetrics(manager.primary.slot_bytes, useful_bytes(spec, spec.engine))
        self._doubts = spec.engine.doubts
        self._pages = region_pages(spec.config.engine_id)
        self._standard_metrics = StandardMetrics(
            [tier.name for tier in tiers],
            manager.primary.slot_bytes,
            TieringOffloadingSpec.build_metric_definitions(spec.extra_config),
        )
        self._primary_info = primary_info(spec)
        self._media: dict[str, tuple[Any, Any]] = {}
        for tier, options in zip(tiers, spec.secondary_tier_configs, strict=True):
            if isinstance(tier, ForeignTier):
                self._media[tier.name] = tier.tier.medium, tier.tier.locality
            else:
                locality = VllmLocality(options.get("locality") or tier.locality.value)
                self._media[tier.name] = VllmMedium[tier.medium.name], locality
        media = [(VllmMedium.CPU, VllmLocality.LOCAL), *self._media.values()]
        self._statements = Statements(media, all_shared=bool(tags.tag_bytes))
        if self._emits_events:
            spec.engine.on_cleared.append(self._restate_events)
            manager.take_unfilled()
        self._tags = tags
        self._tag_bytes = tags.tag_bytes
        self._unconfirmed: list[tuple[VllmRequest, Collection[BlockKey], Check, Check]] = []
        """Stores whose adapter is being checked again: request, blocks, first and second check."""
        self._lineage = Lineage(self._tiers if self._emits_events else (), spec.engine, self._tag_bytes)
        self._by_name = {tier.name: tier for tier in self._tiers}
        self._without_keys: set[str] = set()
        self._window_groups = spec.window_groups
        self._hands_over = serves_peers(spec.secondary_tier_configs)
        self._summary = HitSummary()
        self._unread = UnreadWarning()
        self._reported_at = 0.0
        self._has_stepped = False
        self._busy = False
        self._pauses = Pauses(enabled=getattr(spec.config.parallel, "data_parallel_size", 1) == 1)
        self._loading: set[str] = set()
        """Requests whose blocks are being copied to the device."""
        self._waker = IdleWaker(self._tiers)
        self._steps = None
        if manager.is_gated:
            self._steps = StepTimes(manager.note_step, steps_under_way_max(spec.engine.engine_config))
        spec.engine.on_scheduled.append(self._on_scheduled)

    @guarded(RequestOffloadingContext)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Register a request. Its keys become known at its first lookup."""
        ctx = self._context(req_context)
        self._without_keys.add(ctx.request_id)
        self.manager.on_new_request(ctx)
        return self._foreign.begin(ctx)

    @guarded(lambda: VllmLookupResult.MISS)
    def lookup(self, key: bytes, req_context: ReqContext) -> VllmLookupResult:
        """Look up a block; answers in the same step if the tiers can."""
        ctx = self._context(req_context)
        if not ctx.complete_tag():
            self._pauses.note_waiting(for_engine=False)
            return VllmLookupResult.RETRY
        if ctx.is_excluded:
            self.manager.exclude(ctx, len(request_ends(req_context)))
            return VllmLookupResult.MISS
        if ctx.request_id in self._without_keys:
            self._set_keys(ctx, req_context)
        answer = _ANSWERS[self.manager.lookup(ctx.tag + key, ctx)]
        if answer is VllmLookupResult.RETRY:
            self._pauses.note_waiting(for_engine=bool(ctx.patience_s))
        return answer

    @guarded(lambda: None)
    def exclude(self, req_context: ReqContext, blocks: int) -> None:
        """Note that vLLM asks for none of the ``blocks`` blocks that an unproven request computes."""
        self.manager.exclude(self._context(req_context), blocks)

    @guarded(lambda: None)
    def account(self, req_context: ReqContext) -> dict[str, Any] | None:
        """Return where the blocks of a request came from, if it asked for that; see :meth:`TieringManager.account`."""
        return self.manager.account(self._context(req_context))

    @guarded(lambda: cache_hit_source(Medium.CPU, Locality.LOCAL))
    def get_load_source(self, key: bytes, req_context: ReqContext) -> Any:
        """Return the source of a hit: the tier from which the block was promoted for this request, or host memory."""
        ctx = self._context(req_context)
        tier = self.manager.source_of(ctx.tag + key, ctx)
        if tier is None:
            return cache_hit_source(Medium.CPU, Locality.LOCAL)
        if isinstance(tier, ForeignTier):
            return getattr(tier.tier, "cache_hit_source", None)
        _, locality = self._media[tier.name]
        return cache_hit_source(tier.medium, Locality(locality.value))

    def prepare_load(self, keys: Collection[bytes], req_context: ReqContext) -> Slots:
        """Pin blocks for a copy to the device.

        vLLM passes only hits of this step, which stay until its end. If a block is missing nevertheless, the worker
        copies nothing and reports the load as failed (see :class:`kvstore.vllm.copies.LoadFailures`).
        """
        slots = self._pin(list(keys), req_context)
        self._loading.add(req_context.req_id)
        if slots is None:
            return Slots([0] * len(keys), 0, is_void=True)
        return Slots(slots, self.manager.copy_lane)

    @guarded(lambda: None)
    def complete_load(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        """End the copy to the device."""
        ctx = self._context(req_context)
        self._loading.discard(ctx.request_id)
        self.manager.complete_load(ctx.ours(keys), ctx)

    @guarded(lambda: None)
    def prepare_store(self, keys: Collection[bytes], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Find room for blocks. Returns None if there is no room now; vLLM then offers the blocks again."""
        ctx = self._context(req_context)
        if not ctx.complete_tag():
            return None
        if ctx.is_excluded:
            return PrepareStoreOutput([], Slots([], self.manager.copy_lane), [])
        if ctx.request_id in self._without_keys:
            self._set_keys(ctx, req_context)
        ours = ctx.ours(list(keys))
        plan = self.manager.prepare_store(ours, ctx)
        if plan is None:
            return None
        if self._foreign:
            copied = frozenset(plan.keys)
            self._foreign.offer((key for key in ours if key not in copied), ctx)
        slots = Slots(plan.slots, self.manager.copy_lane)
        return PrepareStoreOutput(self._theirs(plan.keys), slots, self._theirs(plan.evicted))

    @guarded(lambda: None)
    def complete_store(self, keys: Collection[bytes], req_context: ReqContext, success: bool = True) -> None:
        """End the copy from the device and store the blocks to the tiers.

        Those of a LoRA adapter wait for another check: its files may have been replaced after the check for the tag and
        before a worker loaded them.
        """
        ctx = self._context(req_context)
        adapters = self._tags.adapters
        if success and adapters is not None and ctx.adapter is not None:
            self._unconfirmed.append((ctx, ctx.ours(keys), ctx.adapter, adapters.check_again(ctx.adapter)))
        else:
            self.manager.complete_store(ctx.ours(keys), ctx, success)

    def _confirm(self, adapters: Adapters) -> None:
        """Complete the stores whose adapters have been checked again."""
        waiting = []
        for ctx, keys, first, again in self._unconfirmed:
            if again.is_done:
                self._end_store(keys, ctx, adapters.is_unchanged(first, again))
            else:
                waiting.append((ctx, keys, first, again))
        self._unconfirmed = waiting

    @guarded(lambda: None)
    def _end_store(self, keys: Collection[BlockKey], ctx: VllmRequest, success: bool) -> None:
        """End one store; an error concerns neither the others nor the rest of the step."""
        self.manager.complete_store(keys, ctx, success)

    @guarded(lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        """Record the end of a request."""
        self._busy = True
        ctx = self._context(req_context)
        for names in (self._without_keys, self._loading):
            names.discard(ctx.request_id)
        self._foreign.finish(ctx)

    @guarded(lambda: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Submit the I/O of the step with one wake-up of the I/O side."""
        self._has_stepped = True
        self._waker.note_step()
        self._foreign.step(context)
        if self._unconfirmed and (adapters := self._tags.adapters) is not None:
            self._confirm(adapters)
        self.manager.on_step_end(context.new_req_ids)
        self._busy = self._busy or self.manager.has_pending_work

    @guarded(lambda: None)
    def _on_scheduled(self, scheduler_output: Any) -> None:
        if self._steps is not None:
            self._steps.begin(scheduler_output, time.monotonic())
        computes = bool(scheduler_output.num_scheduled_tokens)
        self._pauses.end_step(is_busy=computes or bool(self._loading) or self.manager.has_pending_work)

    @guarded(lambda: False)
    def has_pending_work(self) -> bool:
        """Whether the engine should keep stepping: I/O is in progress, or events or metrics are pending."""
        busy = self.manager.has_pending_work
        self._busy = self._busy or busy
        return (
            busy
            or bool(self._unconfirmed)
            or self._foreign.has_pending_work
            or not self._has_stepped
            or self._waker.due
            or self.manager.has_unreported
            or any(tier.has_unreported for tier in self._tiers)
        )

    @guarded(list)
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the blocks that entered and left each tier."""
        if not self._emits_events:
            return []
        self._lineage.begin()
        theirs = [(tier.name, event) for tier in self._foreign for event in tier.take_vllm_events()]
        ours = self.manager.take_events()
        for event in ours:
            if event.tier in self._by_name:
                self._lineage.note(self._by_name[event.tier], event.keys, removed=event.cause is not None)
        stated = self._statements.merge([*theirs, *((event.tier, self._vllm_event(event)) for event in ours)])
        unfilled = self._theirs(self.manager.take_unfilled())
        if unfilled and self._tag_bytes:
            held = set(self._theirs([*self.manager.primary.keys()]))  # Other tags may have the block.
            unfilled = [key for key in unfilled if key not in held]
        dropped = unfilled_event(unfilled)
        return stated if dropped is None else [*stated, dropped]

    @guarded(lambda: None)
    def reset_cache(self) -> None:
        """Clear the primary tier and begin a new epoch in the others, after their I/O has ended or timed out.

        Slots of unfinished I/O stay out of use until it ends. Slots of running or deferred worker copies stay out of
        use until the workers' counters or :meth:`on_reset_flushed` prove the end of the copies.
        """
        self._unconfirmed.clear()
        self._foreign.reset()
        if not self.manager.reset(_DRAIN_S) and self.manager.has_pending_work:
            logger.warning(
                "%d jobs of the tiers did not end within %.0f s of a reset. Their slots stay unused until they do.",
                self.manager.stats().jobs,
                _DRAIN_S,
            )

    @guarded(lambda: None)
    def on_reset_flushed(self) -> None:
        """Record that every copy from before a reset has ended (called by vLLM since 0.33)."""
        self.manager.on_copies_ended()

    @guarded(lambda: None)
    def get_stats(self) -> Any:
        """Return changed metrics, a few times per second and before the engine goes idle. Called after each step."""
        now = time.monotonic()
        if self._steps is not None:
            self._steps.end(now)
        ended = self._busy and not self.manager.has_pending_work and not self.manager.has_requests
        if now - self._reported_at < _REPORT_INTERVAL_S and not ended:
            return None
        self._reported_at, self._busy = now, self._busy and not ended
        stats = self.manager.stats()
        self._summary.note(now, stats, self.manager.tally, self.manager.primary.slot_bytes)
        self._unread.note(now, stats, self.manager.primary.slot_bytes)
        callback_errors = {tier.name: tier.errors for tier in self._foreign}
        merged = self._manager_metrics.report(stats, self.errors.count, callback_errors)
        merged.aggregate(self._standard_metrics.report(stats, self.manager.tally))
        merged.aggregate(report_engine(self._doubts, self._pages))
        tier_stats = {each.name: each for each in self.manager.tier_stats()}
        for tier, metrics in zip(self._tiers, self._metrics, strict=True):
            merged.aggregate(metrics.report(tier_stats[tier.name], tier.take_samples(), 0))
        for foreign in self._foreign:
            theirs = foreign.call(foreign.tier.get_stats)
            if theirs is not None and not theirs.is_empty():
                merged.aggregate(theirs)
        return merged

    @guarded(lambda: [{}])
    def config_info(self) -> Sequence[Mapping[str, Any]]:
        """Return the labels of vLLM's information metric (0.33): one series per tier, the primary tier first."""
        series: list[dict[str, Any]] = [{"tier": label} for label in self._standard_metrics.tier_labels]
        series[0] |= self._primary_info
        for place, tier in enumerate(self.manager.tiers, 1):
            if isinstance(tier, ForeignTier):
                series[place] |= tier.call(tier_info, tier.tier, default={})
        return series

    @guarded(lambda: None)
    def shutdown(self) -> None:
        """Write back lazy blocks, end all I/O within seconds, and release the memory. Idempotent."""
        self._waker.close()
        self._unconfirmed.clear()
        ended = self.manager.close(_CLOSE_S)
        for view in self._views:
            with contextlib.suppress(BufferError):
                view.release()
        if ended and self._region is not None:
            self._region.cleanup()
            self._region = None

    def _vllm_event(self, event: BlockEvent) -> OffloadingEvent:
        removed, keys = event.cause is not None, self._theirs(event.keys)
        if event.tier == PRIMARY_NAME:
            return make_event(keys, VllmMedium.CPU, removed=removed)
        medium, locality = self._media[event.tier]
        return make_event(keys, medium, removed=removed, locality=locality)

    @guarded(lambda: None)
    def _restate_events(self) -> None:
        self._statements.clear()
        self.manager.restate_events()

    def _theirs(self, keys: Sequence[BlockKey]) -> list[bytes]:
        """Return vLLM's keys for blocks of ours."""
        return [key[self._tag_bytes :] for key in keys] if self._tag_bytes else list(keys)

    @guarded(lambda: None)
    def _pin(self, keys: Sequence[bytes], req_context: ReqContext) -> list[int] | None:
        """Pin blocks for a load and return their slots; None, with an error recorded, if a block is missing."""
        ctx = self._context(req_context)
        slots = self.manager.prepare_load(list(ctx.ours(keys)), ctx)
        if slots is None:
            raise KVStoreError(
                f"Not all of {len(keys)} blocks to load for request {req_context.req_id} are in the primary tier. "
                "Expected blocks that a lookup of the same step answered HIT."
            )
        return slots

    def _set_keys(self, ctx: VllmRequest, req_context: ReqContext) -> None:
        """Pass a request's blocks and their ends to the manager, once vLLM provides them."""
        ends = request_ends(req_context)
        if ends:
            self._without_keys.discard(ctx.request_id)
            weighed = None
            if self._window_groups:
                weighed = ctx.ours(
                    {key for key in ends if get_offload_group_idx(OffloadKey(key)) not in self._window_groups}
                )
            self.manager.set_keys(ctx, tuple(ctx.ours(tuple(ends))), ends=tuple(ends.values()), weighed=weighed)

    def _context(self, req_context: ReqContext, origin: ForeignTier | None = None) -> VllmRequest:
        """Return our context of a request, stored in vLLM's."""
        found: VllmRequest | None = req_context.get_state(VllmRequest)
        if found is not None:
            return found
        params = request_params(req_context)
        params = {} if params is None else params
        # vLLM's kv_load_tiers. Our parameters can only restrict it further.
        allowed = [name for name, medium in self._media.items() if req_context.load_tier_filter.allows(*medium)]
        if origin is not None and origin.name in allowed:
            allowed.remove(origin.name)
        load_tiers = tuple(allowed) if len(allowed) < len(self._media) else None
        remote = remote_fields(req_context.kv_transfer_params, serves=self._hands_over)
        tag, check = self._tags.of(params)
        ours = VllmRequest(
            req_context.req_id, params, load_tiers, **remote, vllm=req_context, origin=origin, tag=tag, adapter=check
        )
        req_context.set_state(ours)
        return ours


@errors_logged()
def open_manager(spec: Any, config: TieringConfig) -> KVStoreOffloadingManager:
    """Open the primary tier in the region of vLLM's workers, the tiers, and their manager.

    Args:
        config: From :func:`check_tiering`.

    Raises:
        ConfigError: A tier can't be used.
        BackendError: A medium can't be opened, and its tier is ``required``.
    """
    show_logs()
    region = open_region(spec, rank=None)
    config = dataclasses.replace(config, events=emits_events(spec))
    tiers: list[AsyncTier | ForeignTier] = []
    views: list[memoryview] = []
    try:
        shaped = region.create_kv_memoryview()
        rows = shaped.cast("B")
        views += [rows, shaped]
        slot_bytes = shaped.strides[0]
        slots = shaped.shape[0] - 1  # The last row holds the workers' counters.
        counters = rows[slots * slot_bytes :]
        views.insert(0, counters)
        primary = PrimaryTier(rows, slot_bytes, policy=eviction_policy(spec.extra_config), slots=slots)
        reports = WorkerReports(counters, spec.config.parallel.world_size)
        tags = RequestTags(config.tenants, spec.engine)
        # Includes the form of the tags: a peer with other tags then reports a mismatch, instead of finding no blocks.
        fields = {"keys": "+".join(tags.parts)} if tags.parts else {}
        namespace = engine_namespace(spec, slot_bytes, spec.engine).with_fields(**fields)
        stored: list[Backend] = []
        for options in spec.secondary_tier_configs:
            if options["type"] != TIER_TYPE:
                tiers.append(open_foreign_tier(options, tier_name(options), shaped, spec, namespace))
                continue
            checked = of_replica(check_options(options, tier_type=TIER_TYPE), spec)
            # One lender per tier, because each tier has its own epochs. They share the list of local backends to serve.
            lender = Lender(primary, stored) if serves_peers(spec.secondary_tier_configs) else None
            opened = open_tier(
                checked,
                primary=rows,
                slot_bytes=slot_bytes,
                namespace=namespace,
                lender=lender,
                events=config.events,
                tenants=config.tenants,
                io="process",
            )
            tiers.append(opened)
        manager = TieringManager(primary, tiers, config, reports=reports)
        own = KVStoreOffloadingManager(manager, tiers, region, views, spec, tags)
    except BaseException:
        for tier in tiers:
            with contextlib.suppress(KVStoreError):
                tier.close(_CLOSE_S)
        for view in views:
            with contextlib.suppress(BufferError):
                view.release()
        region.cleanup()
        raise
    spec._scheduler_mmap = region
    _log_start(primary, tiers, spec, namespace, config.policy)
    return own


def _log_start(
    primary: PrimaryTier,
    tiers: Sequence[AsyncTier | ForeignTier],
    spec: Any,
    namespace: Namespace,
    policy: Mapping[str, Any],
) -> None:
    """Log the primary tier, the tiers and the default policy in one line, and rows that are mostly empty."""
    useful = useful_bytes(spec, spec.engine)
    lines = [
        tier.name if isinstance(tier, ForeignTier) else described(tier, check_options(options, tier_type=TIER_TYPE))
        for tier, options in zip(tiers, spec.secondary_tier_configs, strict=True)
    ]
    logger.info(
        "kvstore manages %d slots of %s, %s, and the tiers %s%s; namespace %s",
        primary.slots,
        described_slots(spec, primary.slot_bytes, useful),
        described_pages(spec.config.engine_id),
        ", ".join(lines),
        f", with the default policy {json.dumps(policy, default=str)}" if policy else "",
        namespace.hex,
    )
    warn_of_waste(useful, primary.slot_bytes)
    logger.debug("Namespace %s: %s", namespace.hex, namespace.document())
