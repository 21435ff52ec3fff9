"""The engine of a replay: calls the manager like a scheduler, without computing anything."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from kvstore.cli.bench.room import Room
from kvstore.cli.bench.traces import Trace, TraceRequest
from kvstore.primary import PrimaryTier
from kvstore.tenants import OTHERS, Tags, Tenants
from kvstore.tiering import TieringManager
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
    """A tier without a medium: it keeps keys and sizes, and evicts like a real one.

    Stores finish immediately, and so do loads without a link. With a link, loads take simulated time. A replay is
    therefore reproducible.

    Args:
        room: Its blocks.
        capacity_bytes: Capacity, for its statistics; 0 for no limit.
        link: Bandwidth and latency of loads; None: loads finish immediately.
    """

    def __init__(
        self,
        name: str,
        room: Room,
        *,
        block_bytes: int,
        capacity_bytes: int = 0,
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
        self._capacity_bytes = capacity_bytes
        self._room = room
        self._loads: list[TransferJob] = []
        self._stores: list[TransferJob] = []
        self._touched: list[Sequence[BlockKey]] = []
        self._finished: list[JobResult] = []
        self._lookups = {LookupResult.HIT.value: 0, LookupResult.MISS.value: 0}
        self._stored_blocks = 0
        self._loaded_blocks = 0

    def lookup(self, key: BlockKey, ctx: RequestContext | None = None) -> LookupResult:
        answer = LookupResult.HIT if key in self._room else LookupResult.MISS
        self._lookups[answer.value] += 1
        return answer

    def submit_store(self, job: TransferJob) -> None:
        self._stores.append(job)

    def submit_load(self, job: TransferJob) -> None:
        self._loads.append(job)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._touched.append(keys)

    def flush(self) -> None:
        """As with a real tier, loads and uses come before stores."""
        loads, touched, stores = self._loads, self._touched, self._stores
        self._loads, self._touched, self._stores = [], [], []
        for job in loads:
            self._load(job)
        # In order of submission, like tiers with a medium.
        for key in itertools.chain.from_iterable(touched):
            self._room.touch(key)
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
            self._room.remove(key)

    def on_request_finished(self, ctx: RequestContext) -> None:
        """Nothing is kept for a request."""

    def take_events(self) -> Sequence[TierEvent]:
        """A replay needs none."""
        return ()

    def stats(self) -> TierStats:
        return TierStats(
            self.name,
            blocks=len(self._room),
            used_bytes=len(self._room) * self._block_bytes,
            capacity_bytes=self._capacity_bytes,
            lookups=dict(self._lookups),
            removals={RemovalCause.EVICTED.value: self._room.evicted_blocks},
            bytes_stored=self._stored_blocks * self._block_bytes,
            bytes_loaded=self._loaded_blocks * self._block_bytes,
        )

    def drain(self, timeout_s: float | None = None) -> bool:
        self.flush()
        return not self._under_way

    def close(self, timeout_s: float | None = None) -> None:
        self.flush()

    def _load(self, job: TransferJob) -> None:
        outcomes = [Outcome.OK if key in self._room else Outcome.MISS for key in job.keys]
        for key in job.keys:
            self._room.touch(key)
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
        outcomes = list(self._room.store(job.keys).values())
        stored = outcomes.count(Outcome.OK)
        self._stored_blocks += stored
        self._finished.append(self._result(job, outcomes, stored))

    def _result(self, job: TransferJob, outcomes: Sequence[Outcome], moved_blocks: int) -> JobResult:
        good = tuple(key for key, outcome in zip(job.keys, outcomes, strict=True) if outcome.ok)
        size_bytes = moved_blocks * self._block_bytes
        return JobResult(job.job_id, len(good) == len(job.keys), good, size_bytes, 0.0, outcomes)


@SecondaryTierManager.register
class WatchedTier:
    """Wraps a tier and records the blocks that each request loads from it."""

    def __init__(self, tier: SecondaryTierManager) -> None:
        self._tier = tier
        self.loads: dict[str, set[BlockKey]] = {}  # Blocks of submitted loads, by request.

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def submit_load(self, job: TransferJob) -> None:
        """Records the keys for the job's request."""
        if job.ctx is not None:
            self.loads.setdefault(job.ctx.request_id, set()).update(job.keys)
        self._tier.submit_load(job)


PRIMARY: Final = "cpu"
"""Name of the primary tier in results, as in policies."""

_STORE_WAIT_S: Final = 5.0
"""Longest wait of a request for free slots; then it continues without storing its blocks, like in an engine."""

_IDLE_S: Final = 0.0005
"""Pause after a step without progress; an engine's step is longer."""

_SIMULATED_IDLE_S: Final = 0.01
"""Longest pause in simulated time; an engine polls pending loads at least this often."""

_MIX: Final = 0x9E3779B97F4A7C15
"""Spreads the numbers of blocks over all bits of their contents (2^64 divided by the golden ratio)."""


class Pace:
    """Arrival times of requests, and the manager's clock.

    Args:
        speed: Factor to the recorded speed; None: as fast as possible.
        real: False for simulated time, which follows the trace without waiting.
        timed: Whether simulated time passes while an engine loads and computes, so that requests may have to wait.
    """

    def __init__(self, speed: float | None, *, real: bool, timed: bool = False) -> None:
        self._speed = speed
        self._real = real
        self.is_timed = timed
        self._started = time.monotonic()
        self._now_s = 0.0

    def now_s(self) -> float:
        """Return the current real or simulated time, in seconds."""
        return time.monotonic() if self._real else self._now_s

    def wait_s(self, request: TraceRequest) -> float:
        """Return the time until a request arrives; 0 if it has arrived."""
        at_s = request.timestamp / 1000 / (self._speed or 1.0)
        if self._real:
            return max(0.0, at_s - (time.monotonic() - self._started)) if self._speed else 0.0
        if self.is_timed:
            return max(0.0, at_s - self._now_s)
        self._now_s = max(self._now_s, at_s)
        return 0.0

    def idle(self, wait_s: float) -> None:
        """Sleep, or advance the simulated time."""
        if self._real:
            time.sleep(wait_s)
        else:
            self._now_s += wait_s


@dataclass(slots=True)
class ReplayCounts:
    """Results of a replay."""

    requests: int = 0  # Requests replayed.
    blocks: int = 0  # Their blocks.
    tokens: int = 0  # Their tokens.
    hit_blocks: Counter[str] = field(default_factory=Counter)  # Blocks that need not be computed, by tier.
    hit_tokens: Counter[str] = field(default_factory=Counter)  # Their tokens.
    tenant_blocks: Counter[str] = field(default_factory=Counter)  # Blocks by tenant, of requests that name one.
    tenant_hits: Counter[str] = field(default_factory=Counter)  # Those that need not be computed.
    refused_blocks: int = 0  # Blocks without room in the primary tier.
    wrong_blocks: int = 0  # Loaded blocks that differ from the stored ones.
    waits_s: list[float] = field(default_factory=list)
    """Time from a request's arrival until its blocks were loaded, for each request with hits."""
    ttfts_s: list[float] = field(default_factory=list)
    """Time from a request's arrival until its prompt was computed, for each request, if that takes time."""


@dataclass(slots=True, eq=False)
class _Live:
    """A request in progress."""

    request: TraceRequest
    ctx: RequestContext
    keys: Sequence[BlockKey]
    arrived_s: float
    done: int = -1
    """Blocks loaded or stored; -1 until the lookup is complete."""
    refused_s: float | None = None


class ReplayEngine:
    """Replays a trace against a manager, in steps like an engine's scheduler.

    Each request looks up its blocks until the first miss, loads the found ones, and stores the rest in pieces of
    ``step_blocks``, like chunked prefill.

    Args:
        manager: The manager; it is not closed.
        step_blocks: Blocks computed and stored in one step of a request.
        concurrency: Most concurrent requests.
        with_bytes: Whether blocks have contents, which are compared when they are loaded.
        prefill_tokens_per_s: Rate of computing with a timed pace; all requests of a step share it.
    """

    def __init__(
        self,
        trace: Trace,
        manager: TieringManager,
        primary: PrimaryTier,
        tiers: Sequence[WatchedTier],
        pace: Pace,
        *,
        step_blocks: int,
        concurrency: int,
        with_bytes: bool,
        tenants: Tenants | None = None,
        prefill_tokens_per_s: float = 1.0,
    ) -> None:
        self._trace = trace
        self._manager = manager
        self._primary = primary
        self._tiers = tiers
        self._pace = pace
        self._step_blocks = max(1, step_blocks)
        self._concurrency = max(1, concurrency)
        self._with_bytes = with_bytes
        self._tags = None if tenants is None else Tags(tenants)
        self._names = {} if tenants is None else dict(tenants.values())
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._computed: list[tuple[int, int]] = []
        """Computed tokens and preceding tokens of each request in this step."""
        self._room = self._step_blocks
        """Blocks that may still be computed in this step, with a timed pace."""
        self.counts = ReplayCounts()

    def run(self, on_progress: Callable[[int], None] | None = None) -> None:
        """Replay all requests, and wait for their I/O.

        ``on_progress``: called occasionally with the number of ended requests.
        """
        coming = deque(self._trace.requests)
        live: list[_Live] = []
        while coming or live:
            wait_s = 0.0
            while coming and len(live) < self._concurrency:
                if (wait_s := self._pace.wait_s(coming[0])) > 0:
                    break
                live.append(self._admit(coming.popleft()))
            before = len(live)
            ended = [item for item in live if self._advance(item)]
            live = [item for item in live if item not in ended]
            self._manager.on_step_end()
            if self._pace.is_timed:
                self._pass_time(wait_s or math.inf)
                self.counts.ttfts_s += [self._pace.now_s() - item.arrived_s for item in ended]
            if len(live) < before and on_progress is not None:
                on_progress(self.counts.requests)
            elif self._pace.is_timed:
                continue
            elif live:
                self._pace.idle(_IDLE_S)
            elif wait_s:
                self._pace.idle(wait_s)
        while self._manager.has_pending_work:
            if self._pace.is_timed:
                self._pass_time(math.inf)
            else:
                self._pace.idle(_IDLE_S)
            self._manager.on_step_end()

    def _pass_time(self, wait_s: float) -> None:
        """Advance the time by the step's computing, or until a load ends or the next request arrives."""
        computed, self._computed, self._room = self._computed, [], self._step_blocks
        if computed:
            seconds = sum(tokens for tokens, _ in computed) / self._prefill_tokens_per_s
            self._pace.idle(seconds)
            self._manager.note_step(computed, seconds)
            return
        if self._manager.has_pending_work or math.isinf(wait_s):
            wait_s = min([wait_s, _SIMULATED_IDLE_S, *(tier.next_end_s - self._pace.now_s() for tier in self._tiers)])
        self._pace.idle(max(wait_s, _IDLE_S / 1000))

    def _admit(self, request: TraceRequest) -> _Live:
        keys = block_keys(request, self._tags)
        ctx = RequestContext(f"r{self.counts.requests + len(self._trace)}-{id(request):x}", request.kvstore)
        self._manager.on_new_request(ctx, keys, prompt_tokens=request.input_length)
        return _Live(request, ctx, keys, self._pace.now_s())

    def _advance(self, live: _Live) -> bool:
        """Advance a request as far as possible in this step; return whether it has ended."""
        if live.done < 0 and not self._load(live):
            return False
        end = min(len(live.keys), self._primary.slots)
        if live.done < end and not self._store(live, end):
            return False
        if live.done < len(live.keys):
            self.counts.refused_blocks += len(live.keys) - live.done
            self._compute(live, len(live.keys))
        self._manager.on_request_finished(live.ctx)
        self.counts.requests += 1
        return True

    def _load(self, live: _Live) -> bool:
        """Look up blocks and load the found ones; False: repeat in the next step."""
        manager, ctx = self._manager, live.ctx
        hits, is_pending = 0, False
        for key in live.keys:
            answer = manager.lookup(key, ctx)
            if answer is LookupResult.MISS:
                break
            hits += 1
            is_pending |= answer is not LookupResult.HIT
        if is_pending:
            return False
        if hits:
            keys = live.keys[:hits]
            slots = manager.prepare_load(keys, ctx)
            if slots is None:
                return False
            if self._with_bytes:
                pairs = zip(live.request.hash_ids, slots, strict=False)
                self.counts.wrong_blocks += sum(not self._is_right(number, slot) for number, slot in pairs)
            manager.complete_load(keys, ctx)
            self.counts.waits_s.append(self._pace.now_s() - live.arrived_s)
        self._count(live, hits)
        live.done = hits
        return True

    def _store(self, live: _Live, end: int) -> bool:
        """Store the next blocks; return whether the request has ended."""
        manager = self._manager
        if not self._room:
            return False
        keys = live.keys[live.done : min(end, live.done + self._step_blocks, live.done + self._room)]
        plan = manager.prepare_store(keys, live.ctx)
        if plan is None:
            now_s = self._pace.now_s()
            live.refused_s = live.refused_s or now_s
            # Without I/O in progress no slot will become free. An engine also computes blocks that it can't store.
            is_over = self._pace.is_timed or now_s - live.refused_s > _STORE_WAIT_S
            return is_over or not manager.has_pending_work
        live.refused_s = None
        if self._with_bytes:
            number_of = dict(zip(live.keys, live.request.hash_ids, strict=True))
            for key, slot in zip(plan.keys, plan.slots, strict=True):
                self._words(slot)[:] = _content(number_of[key])
        manager.complete_store(plan.keys, live.ctx)
        self._compute(live, live.done + len(keys))
        live.done += len(keys)
        return live.done >= end

    def _compute(self, live: _Live, end: int) -> None:
        """With a timed pace, record that a request computes its blocks up to ``end``."""
        if self._pace.is_timed:
            before = self._trace.tokens_of(live.request, live.done)
            self._computed.append((self._trace.tokens_of(live.request, end) - before, before))
            self._room = max(0, self._room - (end - live.done))

    def _count(self, live: _Live, hits: int) -> None:
        """Count a request's hits by tier of origin."""
        counts, trace, request = self.counts, self._trace, live.request
        name = tenant_of(request)
        if self._tags is not None:
            name = self._names.get(name, OTHERS)
        if name:
            counts.tenant_blocks[name] += len(live.keys)
            counts.tenant_hits[name] += hits
        counts.blocks += len(live.keys)
        counts.tokens += request.input_length
        loads = [(tier.name, found) for tier in self._tiers if (found := tier.loads.pop(live.ctx.request_id, None))]
        if not loads:
            # All hits were in the primary tier, or were promoted for other requests.
            if hits:
                counts.hit_blocks[PRIMARY] += hits
                counts.hit_tokens[PRIMARY] += trace.tokens_of(request, hits)
            return
        for index, key in enumerate(live.keys[:hits]):
            # If several tiers were to load it, the last one succeeded after the others had failed.
            name = next((name for name, found in reversed(loads) if key in found), PRIMARY)
            counts.hit_blocks[name] += 1
            counts.hit_tokens[name] += trace.tokens_of(request, index + 1) - trace.tokens_of(request, index)

    def _words(self, slot: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return np.frombuffer(self._primary.row(slot), np.uint64)

    def _is_right(self, number: int, slot: int) -> bool:
        return bool((self._words(slot) == _content(number)).all())


def tenant_of(request: TraceRequest) -> str:
    """Return the tenant value of a request; empty without one."""
    value = request.kvstore.get("tenant", "")
    return value if isinstance(value, str) else ""


def block_keys(request: TraceRequest, tags: Tags | None = None) -> tuple[BlockKey, ...]:
    """Return the keys of the blocks of a request, which begin with its tenant's tag if there are tenants."""
    tag = b"" if tags is None else tags.of(tenant_of(request))
    return tuple(tag + number.to_bytes(8, "big") for number in request.hash_ids)


def _content(number: int) -> np.uint64:
    """Return the fill word of a block."""
    return np.uint64((number + 1) * _MIX % (1 << 64))
