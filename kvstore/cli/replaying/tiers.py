"""Tiers of a replay: a simulated tier with keys only, and a wrapper that counts the loads of a tier."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvstore.eviction import make_policy
from kvstore.tenants import Tenants
from kvstore.tiers.base import SecondaryTierManager, TierStats
from kvstore.types import (
    BlockKey,
    JobResult,
    Locality,
    LookupResult,
    Medium,
    Outcome,
    RemovalCause,
    RequestContext,
    TierEvent,
    TransferJob,
)


@dataclass(frozen=True, slots=True)
class Link:
    """Bandwidth and latency of a simulated tier. Loads run one at a time; each ends one latency after its last byte."""

    bytes_per_s: float
    latency_s: float = 0.0


class DryTier(SecondaryTierManager):
    """A tier without a medium: it keeps keys and sizes, and uses the real eviction policies.

    Stores finish immediately, and so do loads without a link. With a link, loads take simulated time. A replay is
    therefore reproducible.

    Args:
        name: Its name.
        block_bytes: Length of a block.
        capacity_blocks: Capacity; None for no limit.
        policy: Eviction policy.
        tenants: Tenants that share the tier.
        link: Bandwidth and latency of loads; None: loads finish immediately.
        clock: Simulated time in seconds.
    """

    def __init__(
        self,
        name: str,
        *,
        block_bytes: int,
        capacity_blocks: int | None,
        policy: str = "lru",
        tenants: Tenants | None = None,
        link: Link | None = None,
        clock: Callable[[], float] = float,
    ) -> None:
        self.name = name
        self._link = link
        self._clock = clock
        self._free_at_s = 0.0
        self._under_way: deque[tuple[float, JobResult]] = deque()
        """End times and results of loads, in order of their ends."""
        self.medium = Medium.STORAGE
        self.locality = Locality.LOCAL
        self._block_bytes = block_bytes
        self._capacity_blocks = capacity_blocks
        self._policy = make_policy(policy, capacity_blocks or 0, tenants)
        self._loads: list[TransferJob] = []
        self._stores: list[TransferJob] = []
        self._touched: list[Sequence[BlockKey]] = []
        self._finished: list[JobResult] = []
        self._lookups = {LookupResult.HIT.value: 0, LookupResult.MISS.value: 0}
        self._stored_blocks = 0
        self._loaded_blocks = 0
        self._evicted_blocks = 0

    def lookup(self, key: BlockKey, ctx: RequestContext | None = None) -> LookupResult:
        answer = LookupResult.HIT if key in self._policy else LookupResult.MISS
        self._lookups[answer.value] += 1
        return answer

    def submit_store(self, job: TransferJob) -> None:
        self._stores.append(job)

    def submit_load(self, job: TransferJob) -> None:
        self._loads.append(job)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._touched.append(keys)

    def flush(self) -> None:
        """See :meth:`SecondaryTierManager.flush`. As with a real tier, loads and uses come before stores."""
        loads, touched, stores = self._loads, self._touched, self._stores
        self._loads, self._touched, self._stores = [], [], []
        for job in loads:
            self._load(job)
        # In order of submission, like tiers with a medium.
        for key in itertools.chain.from_iterable(touched):
            self._policy.touch(key)
        for job in stores:
            self._store(job)

    def get_finished(self) -> Sequence[JobResult]:
        self.flush()
        finished, self._finished = self._finished, []
        while self._under_way and self._under_way[0][0] <= self._clock():
            finished.append(self._under_way.popleft()[1])
        return finished

    @property
    def next_end_s(self) -> float:
        """Time at which the next load ends; infinite without one."""
        return self._under_way[0][0] if self._under_way else math.inf

    def remove(self, keys: Sequence[BlockKey], cause: RemovalCause = RemovalCause.REMOVED) -> None:
        for key in keys:
            self._policy.remove(key)

    def on_request_finished(self, ctx: RequestContext) -> None:
        """See :meth:`SecondaryTierManager.on_request_finished`."""

    def take_events(self) -> Sequence[TierEvent]:
        """See :meth:`SecondaryTierManager.take_events`. A replay needs none."""
        return ()

    def stats(self) -> TierStats:
        return TierStats(
            self.name,
            blocks=len(self._policy),
            used_bytes=len(self._policy) * self._block_bytes,
            capacity_bytes=(self._capacity_blocks or 0) * self._block_bytes,
            lookups=dict(self._lookups),
            removals={RemovalCause.EVICTED.value: self._evicted_blocks},
            bytes_stored=self._stored_blocks * self._block_bytes,
            bytes_loaded=self._loaded_blocks * self._block_bytes,
        )

    def drain(self, timeout_s: float | None = None) -> bool:
        self.flush()
        return not self._under_way

    def close(self, timeout_s: float | None = None) -> None:
        self.flush()

    def _load(self, job: TransferJob) -> None:
        outcomes = [Outcome.OK if key in self._policy else Outcome.MISS for key in job.keys]
        for key in job.keys:
            self._policy.touch(key)
        loaded = sum(outcome is Outcome.OK for outcome in outcomes)
        self._loaded_blocks += loaded
        result = self._result(job, outcomes, loaded)
        if self._link is None:
            self._finished.append(result)
            return
        now_s = self._clock()
        self._free_at_s = max(now_s, self._free_at_s) + result.size_bytes / self._link.bytes_per_s
        ends_s = self._free_at_s + self._link.latency_s
        self._under_way.append((ends_s, replace(result, seconds=ends_s - now_s)))

    def _store(self, job: TransferJob) -> None:
        new = [key for key in job.keys if key not in self._policy]
        kept = new
        if self._capacity_blocks is not None:
            self._evicted_blocks += len(self._policy.victims(len(self._policy) + len(new) - self._capacity_blocks))
            kept = new[: self._capacity_blocks - len(self._policy)]
        for key in kept:
            self._policy.insert(key)
        self._stored_blocks += len(kept)
        fates = dict.fromkeys(new, Outcome.NO_SPACE) | dict.fromkeys(kept, Outcome.OK)
        self._finished.append(self._result(job, [fates.get(key, Outcome.EXISTS) for key in job.keys], len(kept)))

    def _result(self, job: TransferJob, outcomes: Sequence[Outcome], moved_blocks: int) -> JobResult:
        good = tuple(key for key, outcome in zip(job.keys, outcomes, strict=True) if outcome.ok)
        size_bytes = moved_blocks * self._block_bytes
        return JobResult(job.job_id, len(good) == len(job.keys), good, size_bytes, 0.0, outcomes)


class WatchedTier:
    """Wraps a tier and records the blocks that each request loads from it."""

    def __init__(self, tier: SecondaryTierManager) -> None:
        self._tier = tier
        self.loads: dict[str, set[BlockKey]] = {}  # Blocks of submitted loads, by request.

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def submit_load(self, job: TransferJob) -> None:
        """See :meth:`SecondaryTierManager.submit_load`; records the keys for the job's request."""
        if job.ctx is not None:
            self.loads.setdefault(job.ctx.request_id, set()).update(job.keys)
        self._tier.submit_load(job)
