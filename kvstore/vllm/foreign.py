"""Secondary tiers of vLLM and of third parties (``fs``, ``obj``, ``p2p``, ``kvcr``, …) under kvstore's manager.

The calls and their order are the same as in vLLM's own ``TieringOffloadingManager``, with two additions:

- **Identity.** Such a tier names blocks by vLLM's keys and a few fields of the configuration. Here, the hash in each
  key is combined (XOR) with a mask derived from kvstore's namespace and epoch. Blocks of another model revision, layout
  or row length, and blocks from before a reset, therefore have other names and are never found.
- **Isolation.** An exception causes only a miss or a failed job of this tier, or disables one of its callbacks. A drain
  that exceeds its deadline stops the tier until a later drain ends, and the scheduler continues.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult as VllmLookupResult
from vllm.v1.kv_offload.base import (
    OffloadingEvent,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult as VllmJobResult
from vllm.v1.kv_offload.tiering.base import ParentManager
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager as VllmTier
from vllm.v1.kv_offload.tiering.base import TransferJob as VllmTransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvstore.errors import KVStoreError
from kvstore.namespace import Namespace
from kvstore.tiering import TieringManager
from kvstore.tiers.base import SecondaryTierManager, TierStats
from kvstore.types import BlockKey, JobResult, Locality, LookupResult, Medium, RequestContext, TierEvent, TransferJob
from kvstore.vllm.options import FOREIGN_OPTIONS
from kvstore.vllm.tags import Check

logger = logging.getLogger("kvstore.vllm.foreign")

_ANSWERS = {VllmLookupResult.HIT: LookupResult.HIT, VllmLookupResult.RETRY: LookupResult.RETRY}

_STRIKES_MAX = 3
"""Consecutive exceptions of a callback after which it is not called again, as for calls by the manager."""

_PATIENCE_S = 1.0
"""Time after which a drain or shutdown that still runs is logged."""

_GROUP_BYTES = 4
"""Length of the number of the group of layers, at the end of a vLLM key."""


@dataclass(slots=True, eq=False)
class VllmRequest(RequestContext):
    """A request with vLLM's own context."""

    vllm: ReqContext | None = None  # vLLM's context, which its tiers expect.
    origin: ForeignTier | None = None
    """The tier that made this request for another engine; that tier is not called for it."""
    adapter: Check | None = None
    """The check of its LoRA adapter, whose digest ends the tag."""
    is_tagged: bool = False  # Whether the tag is complete.
    is_excluded: bool = False
    """Whether it neither loads nor stores, because the content of its adapter is not known exactly."""

    def complete_tag(self) -> bool:
        """Complete the tag once the adapter's check has ended; return whether it is complete. Keys contain the tag."""
        if not self.is_tagged and (self.adapter is None or self.adapter.is_done):
            self.is_tagged = True
            if self.adapter is not None:
                self.is_excluded = self.adapter.digest is None
                self.tag += self.adapter.digest or b""
        return self.is_tagged

    def ours(self, keys: Collection[bytes]) -> Collection[BlockKey]:
        """Return our keys for vLLM's keys, in the same order if they are ordered."""
        if not self.tag:
            return keys
        made = (self.tag + key for key in keys)
        return list(made) if isinstance(keys, Sequence) else frozenset(made)


def open_foreign_tier(
    options: Mapping[str, Any], name: str, view: memoryview, spec: Any, namespace: Namespace
) -> ForeignTier:
    """Create a tier through vLLM's factory.

    Args:
        view: The primary tier, of shape (rows, bytes per row).

    Raises:
        Exception: Any exception of the tier's constructor; vLLM then does not start.
    """
    theirs = {key: value for key, value in options.items() if key not in FOREIGN_OPTIONS}
    tier = SecondaryTierFactory.create_secondary_tier(theirs, view, spec)
    return ForeignTier(tier, name, namespace, keeps_blocks=options.get("reset", "forget") == "keep")


class ForeignTier(SecondaryTierManager):
    """A tier with vLLM's interface, adapted to kvstore's.

    Its methods may raise. The manager's link to a tier turns exceptions into misses and failed jobs.

    Args:
        tier: The tier; closed by :meth:`close`.
        keeps_blocks: Whether blocks stored before a reset are found after it.
    """

    def __init__(self, tier: VllmTier, name: str, namespace: Namespace, *, keeps_blocks: bool = False) -> None:
        self.tier = tier
        self.name = name
        self.medium = Medium[tier.medium.name] if tier.medium is not None else Medium.STORAGE
        self.locality = Locality[tier.locality.name] if tier.locality is not None else Locality.LOCAL
        self.errors = 0  # Exceptions of its callbacks.
        self.context = ScheduleEndContext((), ())  # The step that :meth:`flush` ends.
        self._namespace = namespace
        self._keeps_blocks = keeps_blocks
        self._epoch = b""
        self._masks: dict[int, int] = {}
        self._jobs: dict[int, tuple[VllmTransferJob, dict[bytes, BlockKey]]] = {}
        """Unfinished jobs, with their keys by the tier's names."""
        self._results: list[JobResult] = []
        self._no_request = ReqContext(req_id=f"kvstore-{name}")
        """The request of jobs without one, such as the write-back of evicted blocks."""
        self._has_begun_no_request = False
        self._strikes: dict[Callable[..., Any], int] = {}
        self._stopped: _Call | None = None
        """A running or overdue drain, or a shutdown. The tier gets no other calls until a later :meth:`drain` has found
        it ended."""

    def masked(self, key: bytes) -> bytes:
        """Return the tier's name for a key, or the key for such a name (the mapping is its own inverse)."""
        size = max(0, len(key) - _GROUP_BYTES)
        mask = self._masks.get(size)
        if mask is None:
            pad = hashlib.shake_256(self._namespace.digest + self._epoch).digest(size)
            mask = self._masks[size] = int.from_bytes(pad, "big")
        return (int.from_bytes(key[:size], "big") ^ mask).to_bytes(size, "big") + key[size:]

    def lookup(self, key: BlockKey, ctx: RequestContext | None = None) -> LookupResult:
        """Return the tier's answer."""
        if self._stopped is not None:
            return LookupResult.MISS
        return _ANSWERS.get(self.tier.lookup(self.masked(key), self._request(ctx)), LookupResult.MISS)

    def submit_store(self, job: TransferJob) -> None:
        """Submit a store, unless vLLM's backpressure detector drops it."""
        detector = getattr(self.tier, "bp_detector", None)
        if detector is not None and not detector.should_store(len(job.keys)):
            self._results.append(JobResult(job.job_id, False, ()))
            return
        self._submit(self.tier.submit_store, job, is_load=False)

    def submit_load(self, job: TransferJob) -> None:
        self._submit(self.tier.submit_load, job, is_load=True)

    def note_job(self, job: TransferJob, *, is_load: bool) -> VllmTransferJob:
        """Register a job and return vLLM's form of it."""
        names = {self.masked(key): key for key in job.keys}
        rows = np.array(job.slots, dtype=np.int32)
        theirs = VllmTransferJob(job.job_id, list(names), rows, is_load, self._request(job.ctx))
        self._jobs[job.job_id] = theirs, names
        return theirs

    def get_finished(self) -> Sequence[JobResult]:
        """Return the finished jobs. vLLM's tiers also do internal work in this call."""
        if self._stopped is None:
            self._collect()
        elif self._jobs and not self._stopped.is_alive():
            self._collect()
            if self._stopped.failure is None:
                self._fail_jobs()
        results, self._results = self._results, []
        return results

    def flush(self) -> None:
        """End the tier's step."""
        if self._stopped is None:
            self.tier.on_schedule_end(self.context)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Record a use of blocks."""
        if self._stopped is None:
            self.tier.touch([self.masked(key) for key in keys], self._request(None))

    def begin_epoch(self) -> bool:
        """Change the names of all blocks, unless the tier keeps its blocks."""
        if not self._keeps_blocks:
            self.take_vllm_events()  # Discarded: their names are from the old epoch.
            self._epoch = os.urandom(16)
            self._masks.clear()
        detector = getattr(self.tier, "bp_detector", None)
        if detector is not None:
            detector.reset()
        return True

    def on_request_finished(self, ctx: RequestContext) -> None:
        """Notify the tier of the end of a request, unless the tier made the request itself."""
        is_vllms = isinstance(ctx, VllmRequest) and ctx.vllm is not None and ctx.origin is not self
        # Contexts without a request of vLLM use ``_no_request``, which never ends.
        if self._stopped is None and is_vllms:
            self.tier.on_request_finished(self._request(ctx))

    def take_events(self) -> Sequence[TierEvent]:
        """Return no events; :meth:`take_vllm_events` returns the tier's events in vLLM's form."""
        return ()

    def stats(self) -> TierStats:
        """Return statistics without counts, because the tier reports its own through vLLM."""
        return TierStats(self.name, ready=self._stopped is None)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait for the tier's I/O on a thread; if an earlier drain still runs, for that one.

        vLLM's manager waits without a limit. There are no other calls to the tier while the thread runs.
        """
        if not self._run(self.tier.drain_jobs, timeout_s):
            return False
        self._collect()
        self._fail_jobs()
        return True

    def close(self, timeout_s: float | None = None) -> None:
        """Shut the tier down on a thread.

        Raises:
            KVStoreError: It did not end in time, or failed, and may still access the primary tier.
        """
        if not self._run(self.tier.shutdown, timeout_s):
            raise KVStoreError(f"Tier {self.name} did not shut down; the primary tier's memory stays mapped.")
        self._fail_jobs()

    def call(self, callback: Callable[..., Any], *args: Any, default: Any = None) -> Any:
        """Call a method outside kvstore's interface; return the default if it fails."""
        strikes = self._strikes.get(callback, 0)
        if strikes >= _STRIKES_MAX or self._stopped is not None:
            return default
        try:
            found = callback(*args)
        except Exception:  # Any exception is a failure of the tier, and must not end the engine.
            self.errors += 1
            self._strikes[callback] = strikes + 1
            if strikes == 0:
                name = getattr(callback, "__name__", repr(callback))
                logger.exception(
                    "Tier %s raised in %s; after %d in a row it is no longer called", self.name, name, _STRIKES_MAX
                )
            return default
        self._strikes.pop(callback, None)
        return found

    def take_vllm_events(self) -> list[OffloadingEvent]:
        """Return the tier's KV cache events with vLLM's keys."""
        taken = self.call(self.tier.take_events, default=())
        try:
            return [replace(event, keys=[self.masked(key) for key in event.keys]) for event in taken]
        except Exception:  # A generator of the tier may raise here; see call().
            self.errors += 1
            return []

    def _submit(self, submit: Callable[[VllmTransferJob], None], job: TransferJob, *, is_load: bool) -> None:
        if self._stopped is not None:
            self._results.append(JobResult(job.job_id, False, ()))
            return
        submit(self.note_job(job, is_load=is_load))

    def _request(self, ctx: RequestContext | None) -> ReqContext:
        if isinstance(ctx, VllmRequest) and ctx.vllm is not None:
            return ctx.vllm
        if not self._has_begun_no_request:
            self._has_begun_no_request = True
            self.call(self.tier.on_new_request, self._no_request)
        return self._no_request

    def _collect(self) -> None:
        for result in self.tier.get_finished_jobs():
            try:
                self._results.append(self._converted(result))
            except Exception:  # A malformed result fails only its own job, if it has a job id.
                self._note_malformed(result)

    def _converted(self, result: VllmJobResult) -> JobResult:
        job, names = self._jobs.pop(result.job_id, (None, {}))
        good = names if result.success else result.successful_keys or ()
        if job is not None and not job.is_promotion:
            self._note_store(job, result)
        seconds, size_bytes = result.transfer_time or 0.0, result.transfer_bytes or 0
        keys = [names[key] for key in good if key in names]
        return JobResult(result.job_id, result.success, keys, size_bytes, seconds)

    def _note_malformed(self, result: Any) -> None:
        self.errors += 1
        if self.errors == 1:
            logger.exception("Tier %s returned the result %.200r; further ones are only counted", self.name, result)
        job_id = getattr(result, "job_id", None)
        if isinstance(job_id, int):
            self._jobs.pop(job_id, None)
            self._results.append(JobResult(job_id, False, ()))

    def _note_store(self, job: VllmTransferJob, result: VllmJobResult) -> None:
        """Pass the result of a store to vLLM's backpressure detector."""
        detector = getattr(self.tier, "bp_detector", None)
        if detector is None:
            return
        if result.success:
            size_bytes = result.transfer_bytes
            whole = len(job.keys) * self.tier.block_size_bytes
            detector.update(job.submit_time, whole if size_bytes is None else size_bytes)
        elif hasattr(detector, "on_store_failed"):
            detector.on_store_failed()

    def _fail_jobs(self) -> None:
        """Report jobs without a result as failed. Only safe while no I/O of the tier accesses the primary tier."""
        self._results += [JobResult(job_id, False, ()) for job_id in self._jobs]
        self._jobs.clear()

    def _run(self, method: Callable[[], None], timeout_s: float | None) -> bool:
        """Call a method that may block on a thread, or wait for a call of it that still runs.

        Returns:
            Whether it ended in time. After a shutdown, the tier gets no more calls.

        Raises:
            KVStoreError: The method raised.
        """
        if (other := self._stopped) is not None and other.method != method:
            other.join(timeout_s)
            if other.is_alive():
                return False
            self._stopped = None
        call = self._stopped = self._stopped or _Call(method, self.name)
        call.join(timeout_s)
        if call.is_alive():
            if not call.is_logged and time.monotonic() - call.since > _PATIENCE_S:
                call.is_logged = True
                logger.error(
                    "Tier %s gets no work: %s has not ended after %.0f s. The slots of its unfinished jobs stay unused "
                    "until it does.",
                    self.name,
                    method.__name__,
                    time.monotonic() - call.since,
                )
            return False
        if method != self.tier.shutdown:
            self._stopped = None
        if call.failure is not None:
            raise KVStoreError(f"{method.__name__} of tier {self.name} failed: {call.failure!r}") from call.failure
        return True


class _Call(threading.Thread):
    """One call of a tier's method on its own thread."""

    def __init__(self, method: Callable[[], None], name: str) -> None:
        super().__init__(name=f"kvstore-{method.__name__}-{name}", daemon=True)
        self.method = method
        self.since = time.monotonic()
        self.is_logged = False
        self.failure: BaseException | None = None  # Its exception.
        self.start()

    def run(self) -> None:
        """Make the call."""
        try:
            self.method()
        except BaseException as failure:  # Raised again on the scheduler's thread.
            self.failure = failure


class ForeignTiers:
    """All foreign tiers of a manager: makes the calls of vLLM's interface that have no counterpart in kvstore's.

    ``context``: returns kvstore's context of a vLLM request; the second argument is the tier that made it, or None.
    """

    def __init__(
        self,
        manager: TieringManager,
        tiers: Sequence[ForeignTier],
        context: Callable[[ReqContext, ForeignTier | None], VllmRequest],
    ) -> None:
        self._manager = manager
        self._tiers = tuple(tiers)
        self._context = context
        self._parents = [_Parent(self, manager, tier) for tier in tiers]
        self._whole: dict[str, list[ForeignTier]] = {}
        """Tiers that store every block of a request, including blocks stored before, by request id."""
        self._late: dict[VllmRequest, list[BlockKey]] = {}
        """Blocks, by request, whose slots were still being written when they were last offered to these tiers."""
        self._ending: set[VllmRequest] = set()
        """Finished requests with such blocks."""

    def __bool__(self) -> bool:
        return bool(self._tiers)

    def __iter__(self) -> Any:
        return iter(self._tiers)

    def begin(self, ctx: VllmRequest) -> RequestOffloadingContext:
        """Begin a request in all tiers except its origin; return vLLM's policy for offering its blocks."""
        for tier in self._tiers:
            if tier is ctx.origin:
                continue
            wanted = tier.call(tier.tier.on_new_request, ctx.vllm)
            if getattr(wanted, "policy", None) is OffloadPolicy.REQUEST_LEVEL:
                self._whole.setdefault(ctx.request_id, []).append(tier)
        wants_all = ctx.request_id in self._whole
        return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL) if wants_all else RequestOffloadingContext()

    def offer(self, keys: Iterable[BlockKey], ctx: VllmRequest) -> None:
        """Store blocks of the primary tier to the tiers that store every block of the request."""
        tiers = self._whole.get(ctx.request_id)
        if tiers and (offered := list(keys)):
            for tier in tiers:
                if late := self._manager.offer(tier, offered, ctx):
                    self._late.setdefault(ctx, []).extend(late)

    def finish(self, ctx: VllmRequest) -> None:
        """End a request here and in the manager, as soon as no block for these tiers is still being written.

        Another request may be writing such a block, and the engine that waits for this request's blocks needs it.
        """
        if ctx in self._late:
            self._ending.add(ctx)
            return
        self._whole.pop(ctx.request_id, None)
        self._manager.on_request_finished(ctx)

    def step(self, context: ScheduleEndContext) -> None:
        """Serve other engines. Call this before the manager ends its step."""
        late, self._late = self._late, {}
        for ctx, keys in late.items():
            self.offer(dict.fromkeys(keys), ctx)
        for ctx in self._ending - self._late.keys():
            self._ending.discard(ctx)
            self.finish(ctx)
        for tier, parent in zip(self._tiers, self._parents, strict=True):
            tier.context = context
            parent.promised = 0
            tier.call(tier.tier.serve_external_requests, parent)

    def reset(self) -> None:
        """Drop waiting blocks, because the primary tier is cleared."""
        self._late.clear()

    @property
    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping for a tier."""
        return bool(self._late) or any(tier.call(tier.tier.has_pending_work, default=False) for tier in self._tiers)


class _Parent(ParentManager):
    """The manager's interface for a tier that serves another engine; see vLLM's ``ParentManager``."""

    def __init__(self, tiers: ForeignTiers, manager: TieringManager, origin: ForeignTier) -> None:
        self._tiers = tiers
        self._manager = manager
        self._origin = origin
        self.promised = 0  # Blocks answered HIT in this step. Each needs room in the tier's share of the primary tier.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Begin a request of another engine."""
        ctx = self._tiers._context(req_context, self._origin)
        self._manager.on_new_request(ctx)
        return self._tiers.begin(ctx)

    def lookup(self, key: bytes, req_context: ReqContext) -> VllmLookupResult:
        """Look up a block in the primary tier and all tiers except the calling one; begins promotions."""
        ctx = self._tiers._context(req_context, self._origin)
        found = self._manager.lookup(self._origin.masked(key), ctx)
        if found is LookupResult.HIT:
            if not self._manager.has_room(self._origin, self.promised + 1):
                return VllmLookupResult.MISS
            self.promised += 1
        return VllmLookupResult[found.name]

    def create_store_job(self, keys: Collection[bytes], req_context: ReqContext) -> VllmTransferJob:
        """Pin blocks that were answered HIT in this step, until the tier reports the job.

        Raises:
            KVStoreError: A block is not in the primary tier.
        """
        ctx = self._tiers._context(req_context, self._origin)
        job = self._manager.lend(self._origin, [self._origin.masked(key) for key in keys], ctx)
        if job is None:
            raise KVStoreError(f"Tier {self._origin.name} requested pins of {len(keys)} blocks; not all are hits.")
        return self._origin.note_job(job, is_load=False)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """End a request of another engine."""
        ctx = self._tiers._context(req_context, self._origin)
        self._tiers.finish(ctx)
