"""kvstore's own manager behind vLLM's ``OffloadingConnector``: a thin adapter, and the default of our spec."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
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

from kvstore.config import nearest_name
from kvstore.errors import ConfigError, KVStoreError
from kvstore.eviction import make_policy
from kvstore.primary.tier import PrimaryTier
from kvstore.tiering import TieringConfig, TieringManager
from kvstore.tiering.events import PRIMARY_NAME, BlockEvent
from kvstore.tiering.policy import PolicyParser
from kvstore.tiers import AsyncTier, open_tier
from kvstore.types import Locality, LookupResult, Medium, RequestContext
from kvstore.vllm.compat import (
    cache_hit_source,
    current_engine_config,
    emits_events,
    make_event,
    open_region,
    primary_info,
    request_ends,
)
from kvstore.vllm.copies import Slots, WorkerReports
from kvstore.vllm.guard import ErrorLog, guarded
from kvstore.vllm.metrics import ManagerMetrics, TierMetrics
from kvstore.vllm.namespace import engine_namespace
from kvstore.vllm.options import TIER_TYPE, check_options, tier_name
from kvstore.vllm.standard_metrics import StandardMetrics

__all__ = ["KVStoreOffloadingManager", "check_tiering", "is_own_manager", "open_manager"]

logger = logging.getLogger("kvstore.vllm.manager")
_vllm_logger = logging.getLogger("vllm.kvstore")

_ANSWERS = {
    LookupResult.HIT: VllmLookupResult.HIT,
    LookupResult.HIT_PENDING: VllmLookupResult.HIT_PENDING,
    LookupResult.MISS: VllmLookupResult.MISS,
    LookupResult.RETRY: VllmLookupResult.RETRY,
}
_REPORT_INTERVAL_S = 0.25
_DRAIN_S = 10.0
"""Far longer than I/O takes that goes well. A medium that hangs must not hang the engine, which makes no step before
the reset ends."""
_CLOSE_S = 5.0


class KVStoreOffloadingManager(OffloadingManager):
    """A :class:`kvstore.tiering.TieringManager` as vLLM's scheduler knows it.

    Made by :func:`open_manager`. No method ever raises.
    """

    def __init__(
        self,
        manager: TieringManager,
        tiers: Sequence[AsyncTier],
        region: Any,
        views: Sequence[memoryview],
        spec: Any,
    ) -> None:
        self.manager = manager
        self.errors = ErrorLog("manager")
        self._tiers = tuple(tiers)
        self._region = region
        self._views = tuple(views)
        self._emits_events = emits_events(spec)
        self._metrics = [TierMetrics(tier.name) for tier in tiers]
        self._manager_metrics = ManagerMetrics()
        self._standard_metrics = StandardMetrics(
            [tier.name for tier in tiers],
            manager.primary.slot_bytes,
            TieringOffloadingSpec.build_metric_definitions(spec.extra_config),
        )
        self._primary_info = primary_info(spec)
        self._media = {
            tier.name: (VllmMedium[tier.medium.name], VllmLocality(options.get("locality") or tier.locality.value))
            for tier, options in zip(tiers, spec.secondary_tier_configs, strict=True)
        }
        self._untold: set[str] = set()
        self._window_groups = spec.window_groups
        self._live: set[str] = set()
        self._outlived_reset: set[str] = set()
        self._reported_at = 0.0
        self._busy = False

    @guarded(RequestOffloadingContext)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Note a request; its keys are known at its first lookup."""
        ctx = self._context(req_context)
        self._untold.add(ctx.request_id)
        self._live.add(ctx.request_id)
        self.manager.on_new_request(ctx)
        return RequestOffloadingContext()

    @guarded(lambda: VllmLookupResult.MISS)
    def lookup(self, key: bytes, req_context: ReqContext) -> VllmLookupResult:
        """Answer in the same step where the tiers know."""
        ctx = self._context(req_context)
        if ctx.request_id in self._untold:
            self._tell_keys(ctx, req_context)
        return _ANSWERS[self.manager.lookup(key, ctx)]

    @guarded(lambda: cache_hit_source(Medium.CPU, Locality.LOCAL))
    def get_load_source(self, key: bytes, req_context: ReqContext) -> Any:
        """Return where a hit came from: the tier it was promoted from for this request, else host memory."""
        tier = self.manager.source_of(key, self._context(req_context))
        if tier is None:
            return cache_hit_source(Medium.CPU, Locality.LOCAL)
        _, locality = self._media[tier.name]
        return cache_hit_source(tier.medium, Locality(locality.value))

    def prepare_load(self, keys: Collection[bytes], req_context: ReqContext) -> Slots:
        """Pin blocks for a copy to the device.

        vLLM asks only for what was a hit in this step, and that stays. If a block is missing all the same, the worker
        copies nothing and reports the load as failed (see :mod:`kvstore.vllm.load_failures`).
        """
        slots = self._pin(list(keys), req_context)
        if slots is None:
            return Slots([0] * len(keys), 0, is_void=True)
        return Slots(slots, self.manager.copy_lane)

    @guarded(lambda: None)
    def complete_load(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        """End the copy to the device."""
        self.manager.complete_load(keys, self._context(req_context))

    @guarded(lambda: None)
    def prepare_store(self, keys: Collection[bytes], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Find room for blocks; None if there is none now, and vLLM offers them again.

        After a reset vLLM offers all blocks of a request anew. Those of a sliding window may hold another request's
        tokens by then: it still knows the ids of blocks that it has freed long since. They are not taken.
        """
        ctx = self._context(req_context)
        if ctx.request_id in self._outlived_reset:
            keys = [key for key in keys if get_offload_group_idx(OffloadKey(key)) not in self._window_groups]
        if ctx.request_id in self._untold:
            self._tell_keys(ctx, req_context)
        plan = self.manager.prepare_store(list(keys), ctx)
        if plan is None:
            return None
        slots = Slots(plan.slots, self.manager.copy_lane)
        return PrepareStoreOutput(list(plan.keys), slots, list(plan.evicted))

    @guarded(lambda: None)
    def complete_store(self, keys: Collection[bytes], req_context: ReqContext, success: bool = True) -> None:
        """End the copy from the device; the blocks go on to the tiers."""
        self.manager.complete_store(keys, self._context(req_context), success)

    @guarded(lambda: None)
    def touch(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        """Note a use of blocks (vLLM up to 0.30 tells)."""
        self.manager.touch(list(keys))

    @guarded(lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        """Note that a request has ended."""
        ctx = self._context(req_context)
        for names in (self._untold, self._live, self._outlived_reset):
            names.discard(ctx.request_id)
        self.manager.on_request_finished(ctx)

    @guarded(lambda: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Hand over the I/O of the step, with one wake-up of the I/O side."""
        self.manager.on_step_end(context.new_req_ids)
        self._busy = self._busy or self.manager.has_pending_work
        if not self._emits_events:
            for tier in self._tiers:
                if tier.has_unreported:
                    tier.take_events()

    @guarded(lambda: False)
    def has_pending_work(self) -> bool:
        """Whether the engine should go on stepping: I/O is under way, or events wait."""
        busy = self.manager.has_pending_work
        self._busy = self._busy or busy
        return busy or (self._emits_events and any(tier.has_unreported for tier in self._tiers))

    @guarded(list)
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return which blocks entered and left which tier."""
        if not self._emits_events:
            return []
        return [self._vllm_event(event) for event in self.manager.take_events()]

    @guarded(lambda: None)
    def reset_cache(self) -> None:
        """Drop the primary tier and begin a new epoch in the others, once their I/O has ended or some time is over.

        Slots that unfinished I/O may still touch stay out of use until it ends. So do those of copies of the workers
        that go on, or are yet to begin, until the workers' counters or :meth:`on_reset_flushed` prove their end.
        """
        self._outlived_reset |= self._live
        if not self.manager.reset(_DRAIN_S) and self.manager.has_pending_work:
            logger.warning(
                "%d jobs of the tiers did not end within %.0f s of a reset. Their slots stay out of use until they do.",
                self.manager.stats().jobs,
                _DRAIN_S,
            )

    @guarded(lambda: None)
    def on_reset_flushed(self) -> None:
        """Note that every copy from before a reset has ended (vLLM from 0.33 on says so)."""
        self.manager.on_copies_ended()

    @guarded(lambda: None)
    def get_stats(self) -> Any:
        """Return what changed in our metrics, a few times a second and when the engine may go idle."""
        now = time.monotonic()
        ended = self._busy and not self.manager.has_pending_work
        if now - self._reported_at < _REPORT_INTERVAL_S and not ended:
            return None
        self._reported_at, self._busy = now, False
        stats = self.manager.stats()
        merged = self._manager_metrics.report(stats, self.errors.count)
        merged.aggregate(self._standard_metrics.report(stats, self.manager.tally))
        for tier, metrics in zip(self._tiers, self._metrics, strict=True):
            merged.aggregate(metrics.report(tier.stats(), tier.take_samples(), 0))
        return merged

    @guarded(lambda: [{}])
    def config_info(self) -> Sequence[Mapping[str, Any]]:
        """Return the labels of vLLM's information metric (0.33): one series a tier, the primary tier first."""
        series: list[dict[str, Any]] = [{"tier": label} for label in self._standard_metrics.tier_labels]
        series[0] |= self._primary_info
        return series

    @guarded(lambda: None)
    def shutdown(self) -> None:
        """Write back what is owed, end all I/O within seconds, give the memory back. May be called again."""
        ended = self.manager.close(_CLOSE_S)
        for view in self._views:
            with contextlib.suppress(BufferError):
                view.release()
        if ended and self._region is not None:
            self._region.cleanup()
            self._region = None

    def _vllm_event(self, event: BlockEvent) -> OffloadingEvent:
        removed = event.cause is not None
        if event.tier == PRIMARY_NAME:
            return make_event(event.keys, VllmMedium.CPU, removed=removed)
        medium, locality = self._media[event.tier]
        return make_event(event.keys, medium, removed=removed, tier=event.tier, locality=locality)

    @guarded(lambda: None)
    def _pin(self, keys: list[bytes], req_context: ReqContext) -> list[int] | None:
        """Return the slots of blocks, pinned for a load; None if one is missing, which is noted as an error."""
        slots = self.manager.prepare_load(keys, self._context(req_context))
        if slots is None:
            raise KVStoreError(
                f"{len(keys)} blocks of request {req_context.req_id} are to be loaded, and not all of them are there. "
                "Expected what a lookup of the same step has answered HIT."
            )
        return slots

    def _tell_keys(self, ctx: RequestContext, req_context: ReqContext) -> None:
        """Tell the manager a request's blocks and where they end, once vLLM has said so (0.31 and later)."""
        ends = request_ends(req_context)
        if ends:
            self._untold.discard(ctx.request_id)
            self.manager.set_keys(ctx, tuple(ends), ends=tuple(ends.values()))

    def _context(self, req_context: ReqContext) -> RequestContext:
        """Return our view of a request, kept with vLLM's."""
        found: RequestContext | None = req_context.get_state(RequestContext)
        if found is not None:
            return found
        params: Any = (req_context.kv_transfer_params or {}).get("kvstore")
        # vLLM's own kv_load_tiers, which no parameter of ours widens.
        allowed = [name for name, nature in self._media.items() if req_context.load_tier_filter.allows(*nature)]
        load_tiers = tuple(allowed) if len(allowed) < len(self._tiers) else None
        ours = RequestContext(req_context.req_id, params if params is not None else {}, load_tiers)
        req_context.set_state(ours)
        return ours


def is_own_manager(extra_config: Mapping[str, Any]) -> bool:
    """Tell whether kvstore's manager is to be used.

    It is, unless ``"manager": "vllm"`` says otherwise, or something is configured that only vLLM's manager knows (a
    tier of vLLM's own, a ``CachePolicy``).

    Args:
        extra_config: ``kv_connector_extra_config``, its tiers spelled out.
    """
    needs_vllm = _theirs(extra_config) or "cache_policy_module_path" in extra_config
    default = "kvstore" if "tiering" in extra_config or not needs_vllm else "vllm"
    return bool(extra_config.get("manager", default) != "vllm")


def check_tiering(extra_config: Mapping[str, Any]) -> TieringConfig | None:
    """Return the configuration of kvstore's manager, or None if it is to be vLLM's (see :func:`is_own_manager`).

    Args:
        extra_config: ``kv_connector_extra_config``, its tiers spelled out.

    Raises:
        ConfigError: The manager, the eviction policy, an option of ``"tiering"``, a policy, or a tier can't be used.
    """
    theirs = _theirs(extra_config)
    choice = extra_config.get("manager")
    if choice not in ("kvstore", "vllm", None):
        raise ConfigError(f"manager is {choice!r}. Expected 'kvstore' (the default) or 'vllm'.")
    if not is_own_manager(extra_config):
        if "tiering" in extra_config:
            raise ConfigError("tiering configures kvstore's manager, and manager is 'vllm'. Remove one of them.")
        return None
    if theirs:
        raise ConfigError(
            f"A tier has the type {theirs[0]!r}, which is vLLM's own, and kvstore's manager is to manage it. Give "
            "kvstore's tiers only, or leave the manager to vLLM ('manager': 'vllm')."
        )
    make_policy(extra_config.get("eviction_policy", "lru"))
    if int(extra_config.get("store_threshold", 0)) > 1:
        raise ConfigError(
            f"store_threshold is {extra_config['store_threshold']}, which vLLM's tiering does not have either. Give "
            "'tiering': {'policy': {'min_uses': n}} for blocks to be stored at their n-th use."
        )
    options = extra_config.get("tiering", {})
    if not isinstance(options, Mapping):
        raise ConfigError(f"tiering is {options!r}. Expected a JSON object.")
    known = {field.name for field in dataclasses.fields(TieringConfig)} - {"prefetch", "events"}
    for name in options:
        if name not in known:
            near = nearest_name(str(name), known)
            hint = f" Did you mean {near!r}?" if near else ""
            raise ConfigError(f"tiering has no option {name!r}. Known: {', '.join(sorted(known))}.{hint}")
    try:
        config = msgspec.convert(dict(options), TieringConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"tiering: {error}") from error
    PolicyParser([tier_name(tier) for tier in extra_config["secondary_tiers"]], config.policy, config.allow)
    return config


def open_manager(spec: Any, config: TieringConfig) -> KVStoreOffloadingManager:
    """Open the primary tier in the region that vLLM's workers share, the tiers, and the manager of both.

    Args:
        spec: The offloading spec.
        config: From :func:`check_tiering`.

    Raises:
        ConfigError: A tier can't be used.
        BackendError: A medium refuses, and its tier is ``required``.
    """
    region = open_region(spec, rank=None)
    # A request's keys are known when it is looked up, so that there is nothing to fetch before that.
    config = dataclasses.replace(config, prefetch=False, events=emits_events(spec))
    tiers: list[AsyncTier] = []
    views: list[memoryview] = []
    try:
        shaped = region.create_kv_memoryview()
        rows = shaped.cast("B")
        views += [rows, shaped]
        slot_bytes = shaped.strides[0]
        # The last row has the counters of the workers.
        slots = shaped.shape[0] - 1
        counters = rows[slots * slot_bytes :]
        views.insert(0, counters)
        primary = PrimaryTier(rows, slot_bytes, policy=spec.eviction_policy, slots=slots)
        reports = WorkerReports(counters, spec.config.parallel.world_size)
        namespace = engine_namespace(spec, slot_bytes, current_engine_config())
        for options in spec.secondary_tier_configs:
            checked = check_options(options, tier_type=TIER_TYPE)
            tiers.append(open_tier(checked, primary=rows, slot_bytes=slot_bytes, namespace=namespace))
        manager = TieringManager(primary, tiers, config, reports=reports)
    except BaseException:
        for tier in tiers:
            tier.close()
        for view in views:
            view.release()
        region.cleanup()
        raise
    spec._scheduler_mmap = region
    _vllm_logger.info(
        "kvstore manages %d slots and the tiers %s, namespace %s", primary.slots, [t.name for t in tiers], namespace.hex
    )
    return KVStoreOffloadingManager(manager, tiers, region, views, spec)


def _theirs(extra_config: Mapping[str, Any]) -> list[str]:
    """Return the types of the tiers that are not kvstore's."""
    return [tier["type"] for tier in extra_config["secondary_tiers"] if tier["type"] != TIER_TYPE]
