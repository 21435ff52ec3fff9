"""Scheduler time per block: kvstore's TieringManager and vLLM's TieringOffloadingManager, in one process.

Both managers have one tier, a dict that answers immediately and finishes a job at the next poll, so that only the
managers' own time is measured. Requests have 256 blocks. Times are CPU time per block, which depends little on the
load of the machine. Runs of the managers alternate, after one that is not counted. A row is the median of its runs
(small sizes have more runs), and ``share`` is the median ratio of kvstore's time to vLLM's over the pairs of runs.

kvstore's manager calls as many functions per block with 10,000 blocks as with 500 (its tests count them). It still
takes longer with more blocks, because a smaller part of its data is in the processor's caches. The rows of ``dict``
show this cost alone: one ``in`` per block, on a plain dict of as many keys. ``kvstore-tenants`` is kvstore with eight
tenants and the tags of their keys; new blocks belong to another tenant than the evicted blocks.

    python bench/manager_vs_vllm.py [--quick] [--runs N] [--sizes BLOCKS ...] [--json FILE]

Needs vLLM (0.32).
"""

from __future__ import annotations

import gc
import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

# Add the repository, so that this file runs as a program.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import Row, arguments, needs, reporting, runs_of

needs("vllm")

import vllm
from vllm.v1.kv_offload.base import LookupResult as VllmLookupResult
from vllm.v1.kv_offload.base import ReqContext, RequestOffloadingContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import JobResult as VllmJobResult
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager as VllmSecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from kvstore import SecondaryTierManager, TierStats
from kvstore.primary.tier import PrimaryTier
from kvstore.tenants import TAG_BYTES, Tags, Tenant, Tenants
from kvstore.tiering import TieringConfig, TieringManager
from kvstore.types import JobResult, Locality, LookupResult, Medium, RequestContext, TierEvent, TransferJob

BLOCKS_PER_REQUEST = 256
SLOT_BYTES = 64
"""The managers never access the bytes."""
TIMED_BLOCKS = 8192
"""Blocks timed per run: enough for the clock's resolution, few enough for a short run without disturbances."""
_now = time.thread_time


class _Answers:
    """Shared behaviour of both managers' tiers: answers immediately, and finishes jobs at the next poll."""

    hit: Any
    miss: Any
    finished_job: Callable[[Any], Any]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.held: set[bytes] = set()
        self.finished: list[Any] = []

    def lookup(self, key: bytes, ctx: Any = None) -> Any:
        return self.hit if key in self.held else self.miss

    def submit_store(self, job: Any) -> None:
        self.finished.append(self.finished_job(job))

    def submit_load(self, job: Any) -> None:
        self.finished.append(self.finished_job(job))

    def get_finished(self) -> Sequence[Any]:
        finished, self.finished = self.finished, []
        return finished


class DictTier(_Answers, SecondaryTierManager):
    """A tier of kvstore with minimal cost."""

    name, medium, locality = "dict", Medium.STORAGE, Locality.LOCAL
    hit, miss = LookupResult.HIT, LookupResult.MISS

    def finished_job(self, job: TransferJob) -> JobResult:
        return JobResult(job.job_id, True, job.keys)

    def flush(self) -> None: ...

    def touch(self, keys: Sequence[bytes]) -> None: ...

    def on_request_finished(self, ctx: RequestContext) -> None: ...

    def take_events(self) -> Sequence[TierEvent]:
        return ()

    def stats(self) -> TierStats:
        return TierStats(self.name)

    def drain(self, timeout_s: float | None = None) -> bool:
        return True

    def close(self, timeout_s: float | None = None) -> None: ...


class VllmDictTier(_Answers, VllmSecondaryTierManager):
    """The same for vLLM's manager."""

    hit, miss = VllmLookupResult.HIT, VllmLookupResult.MISS

    def __init__(self, view: memoryview) -> None:
        super().__init__(None, view, "dict")

    def finished_job(self, job: Any) -> VllmJobResult:
        return VllmJobResult(job.job_id, True)

    def get_finished_jobs(self) -> Iterable[VllmJobResult]:
        return self.get_finished()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None: ...


class Ours:
    """kvstore's manager, with the timed calls."""

    system = "kvstore"
    tenants: Tenants | None = None

    def __init__(self, slots: int) -> None:
        self.tier = DictTier()
        primary = PrimaryTier(memoryview(bytearray(slots * SLOT_BYTES)), SLOT_BYTES)
        # No limits on shares of the primary tier, because vLLM's manager has none.
        config = TieringConfig(promotion_share=1.0, store_share=1.0, tenants=self.tenants)
        self.manager = TieringManager(primary, [self.tier], config)
        self.finish = self.manager.on_request_finished
        self.lookup = self.manager.lookup
        self.prepare_store = self.manager.prepare_store
        self.step = self.manager.on_step_end

    def context(self, name: str) -> RequestContext:
        ctx = RequestContext(name)
        self.manager.on_new_request(ctx)
        return ctx

    def complete_store(self, plan: Any, ctx: RequestContext) -> None:
        self.manager.complete_store(plan, ctx)

    def hold(self, keys: Sequence[bytes]) -> None:
        self.tier.held.update(keys)

    @staticmethod
    def keys_of(plan: Any) -> Collection[bytes]:
        """Return the argument of complete_store: a set, as from vLLM's scheduler."""
        return set(plan.keys)

    def end_step(self) -> None:
        self.step()


class Shared(Ours):
    """kvstore's manager with tenants; the timed calls add tags to keys, as in vLLM."""

    system = "kvstore-tenants"
    tenants = Tenants(by="parameter", named={f"tenant-{number}": Tenant(guaranteed=0.1) for number in range(8)})

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        tags = Tags(self.tenants)
        self.tags = tags.of("tenant-0"), tags.of("tenant-1")
        lookup, prepare, complete = self.manager.lookup, self.manager.prepare_store, self.manager.complete_store
        self.lookup = lambda key, ctx: lookup(ctx.tag + key, ctx)
        self.prepare_store = lambda keys, ctx: prepare([ctx.tag + key for key in keys], ctx)
        self.complete_store = lambda keys, ctx: complete(frozenset(ctx.tag + key for key in keys), ctx)

    def context(self, name: str) -> RequestContext:
        """Begin a request; requests that evict blocks belong to another tenant."""
        ctx = RequestContext(name, tag=self.tags[name.startswith(("store_full", "promote"))])
        self.manager.on_new_request(ctx)
        return ctx

    def hold(self, keys: Sequence[bytes]) -> None:
        self.tier.held.update(self.tags[1] + key for key in keys)

    @staticmethod
    def keys_of(plan: Any) -> Collection[bytes]:
        """Return the argument of complete_store: keys without tags, as from vLLM."""
        return {key[TAG_BYTES:] for key in plan.keys}


class Theirs:
    """vLLM's manager, with the timed calls."""

    system = "vllm-tiering"

    def __init__(self, slots: int) -> None:
        view = memoryview(bytearray(slots * SLOT_BYTES)).cast("B", (slots, SLOT_BYTES))
        self.tier = VllmDictTier(view)
        primary = CPUPrimaryTierOffloadingManager(num_chunks=slots, mmap_region=_Region(view))
        self.manager = TieringOffloadingManager(primary, [self.tier])
        self.finish = self.manager.on_request_finished
        self.lookup = self.manager.lookup
        self.prepare_store = self.manager.prepare_store

    def context(self, name: str) -> ReqContext:
        ctx = ReqContext(req_id=name)
        self.manager.on_new_request(ctx)
        return ctx

    def complete_store(self, keys: Collection[bytes], ctx: ReqContext) -> None:
        self.manager.complete_store(keys, ctx)

    def hold(self, keys: Sequence[bytes]) -> None:
        self.tier.held.update(keys)

    @staticmethod
    def keys_of(plan: Any) -> Collection[bytes]:
        return set(plan.keys_to_store)

    def end_step(self) -> None:
        """End a step and take the statistics, which would otherwise accumulate."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        self.manager.get_stats()


class _Region:
    def __init__(self, view: memoryview) -> None:
        self._view = view

    def create_kv_memoryview(self) -> memoryview:
        return self._view


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", help="blocks in the primary tier")
    options = parser.parse_args()
    sizes = options.sizes or ([1_000, 10_000] if options.quick else [1_000, 10_000, 100_000])
    columns = ["system", "op", "keys", "us_per_block", "share", "runs"]
    with reporting(options, columns, vllm=vllm.__version__) as rows:
        for size in sizes:
            rows += _compare(size, runs_of(options, 7, quick=3))


def _compare(size: int, rounds: int) -> Iterator[Row]:
    """Yield the rows of one size."""
    times: dict[tuple[str, str], list[float]] = {}
    rounds *= max(1, TIMED_BLOCKS // size)
    for round_number in range(-1, rounds):
        sides = (Ours, Theirs, Shared)
        for side in sides if round_number % 2 == 0 else reversed(sides):
            for op, seconds in _measure(side(size), size):
                if round_number >= 0:
                    times.setdefault((op, side.system), []).append(seconds)
        if round_number >= 0:
            times.setdefault(("hit", "dict"), []).append(_plain_dict(size))
    for op in ("hit", "promote", "miss", "store", "complete", "store_full"):
        for (name, system), found in times.items():
            if name == op:
                median = statistics.median(found)
                row: Row = {"bench": "manager", "system": system, "op": op, "keys": size, "us_per_block": median * 1e6}
                if system in (Ours.system, Shared.system):
                    pairs = zip(found, times[op, Theirs.system], strict=True)
                    row["share"] = statistics.median(ours / theirs for ours, theirs in pairs)
                yield {**row, "runs": rounds}


def _plain_dict(size: int) -> float:
    """Return the seconds per block of looking up the keys of hits in a dict."""
    held = dict.fromkeys(_key("resident", number) for number in range(size))
    timed = list(held)[:: max(1, size // TIMED_BLOCKS)]
    started = _now()
    for key in timed:
        assert key in held
    return (_now() - started) / len(timed)


def _measure(side: Ours | Theirs, size: int) -> Iterator[tuple[str, float]]:
    """Yield the seconds per block of each operation, with ``size`` blocks in a full primary tier at the end."""
    gc.collect()
    gc.disable()
    try:
        resident = [_key("resident", number) for number in range(size)]
        yield from _store(side, resident, ("store", "complete"))
        timed = resident[:: max(1, size // TIMED_BLOCKS)]
        yield "hit", _per_block(side, timed, "hit")
        yield "miss", _per_block(side, [_key("absent", number) for number in range(len(timed))], "miss")
        # From here on the primary tier is full, and every new block evicts another.
        yield from _store(side, [_key("new", number) for number in range(len(timed))], ("store_full", ""))
        below = [_key("below", number) for number in range(len(timed))]
        side.hold(below)
        yield "promote", _per_block(side, below, "promote")
    finally:
        gc.enable()


def _store(side: Any, keys: Sequence[bytes], ops: tuple[str, str]) -> Iterator[tuple[str, float]]:
    """Store keys request by request; yield the time of the last ``TIMED_BLOCKS`` of them."""
    prepare, complete, counted = 0.0, 0.0, 0
    first = max(0, len(keys) - TIMED_BLOCKS)
    for number, batch in _requests(keys):
        ctx = side.context(f"{ops[0]}-{number}")
        started = _now()
        plan = side.prepare_store(batch, ctx)
        prepared = _now()
        done = side.keys_of(plan)
        assert len(done) == len(batch)
        again = _now()
        side.complete_store(done, ctx)
        ended = _now()
        if number >= first:
            prepare, complete, counted = prepare + prepared - started, complete + ended - again, counted + len(batch)
        side.finish(ctx)
        side.end_step()
    yield ops[0], prepare / counted
    if ops[1]:
        yield ops[1], complete / counted


def _per_block(side: Any, keys: Sequence[bytes], name: str) -> float:
    """Return the seconds per key of looking up each key once, request by request."""
    total = 0.0
    for number, batch in _requests(keys):
        ctx = side.context(f"{name}-{number}")
        lookup: Callable[..., Any] = side.lookup
        lookup(batch[0], ctx) if name == "hit" else None  # The poll of the step belongs to no block.
        started = _now()
        for key in batch:
            lookup(key, ctx)
        total += _now() - started
        side.end_step()
        side.finish(ctx)
        side.end_step()
    return total / len(keys)


def _requests(keys: Sequence[bytes]) -> Iterator[tuple[int, Sequence[bytes]]]:
    for first in range(0, len(keys), BLOCKS_PER_REQUEST):
        yield first, keys[first : first + BLOCKS_PER_REQUEST]


def _key(name: str, number: int) -> bytes:
    """Return a key in vLLM's format: a hash, and the number of the group."""
    return hashlib.sha256(f"{name}-{number}".encode()).digest() + bytes(4)


if __name__ == "__main__":
    main()
