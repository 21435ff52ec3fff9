"""Replay of a trace through the tiers: hit rates by policy and capacity."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, cast

from kvstore.backends.base import Backend, RecordGeometry
from kvstore.cli.bench.engine import PRIMARY, DryTier, Link, Pace, ReplayCounts, ReplayEngine, WatchedTier, block_keys
from kvstore.cli.bench.room import AGES, PolicyRoom, Room, SlotsRoom
from kvstore.cli.bench.traces import Trace
from kvstore.cli.interruption import run_interruptibly
from kvstore.cli.tier_argument import TierArgument
from kvstore.errors import ConfigError
from kvstore.eviction import DEFAULT_POLICY, make_policy
from kvstore.namespace import Namespace
from kvstore.primary import PrimaryTier, Region, rounded_up
from kvstore.quantity import Capacity
from kvstore.registry import BACKENDS
from kvstore.tenants import Tags, Tenants
from kvstore.tiering import TieringConfig, TieringManager
from kvstore.tiering.policy import PARAMETERS
from kvstore.tiers import SecondaryTierManager, open_tier
from kvstore.types import BlockKey, RemovalCause

OPTIMUM: Final = "belady"
"""Name of the optimal policy, used in place of an eviction policy."""

_DISK_TIERS: Final = ("file", "nvme")
_AUTO_SHARES: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_PERCENTILES: Final = (50, 95, 99)
_REMOVED_AT_ONCE: Final = 1000


_OPTIONS: Final = {
    "bytes_per_token": "--bytes-per-token",
    "prefill_tokens_per_s": "--prefill",
    "step_tokens": "--step-tokens",
    "concurrency": "--concurrency",
    "speed": "--speed",
}
"""Settings that must be above 0, with their options."""


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """Settings of all cases of a replay."""

    tiers: Sequence[TierArgument] = ()  # The tiers below the primary one, the fastest first.
    cpu_bytes: int | None = None
    """Capacity of the primary tier; None: unlimited, in a dry replay only. Without other tiers, the case's capacity
    overrides it."""
    cpu_policy: str = DEFAULT_POLICY  # Eviction policy of the primary tier, with other tiers.
    dry: bool = True  # Keys and sizes only: no bytes, no media, no waiting.
    bytes_per_token: int = 128 << 10  # KV cache of one token; the default is that of Llama 3.1 8B in 16 bits.
    prefill_tokens_per_s: float = 10_000.0  # Rate of the engine, to compute the time saved.
    step_tokens: int = 8192  # Tokens that the engine computes, and stores, in one step.
    concurrency: int = 8  # Concurrent requests; a dry replay without ``links`` runs one request at a time.
    speed: float | None = None  # Factor to the recorded speed; None: as fast as possible.
    offload: Mapping[str, Any] = field(default_factory=dict)
    """Offload policy of all requests, as for ``TieringConfig.policy``."""
    tenants: Tenants | None = None
    """Tenants that share the tiers; requests name theirs in the parameter ``tenant`` of their policies."""
    links: Sequence[Link] = ()
    """Bandwidth and latency of each tier of a dry replay; with links, loads and computing take simulated time."""
    gate: bool = True  # Whether the manager's gate decides which blocks are worth loading.

    def __post_init__(self) -> None:
        for name, option in _OPTIONS.items():
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{option} is {value!r}. Expected more than 0.")
        if self.links and not (self.dry and len(self.links) == len(self.tiers)):
            raise ConfigError(
                f"{len(self.links)} links for {len(self.tiers)} tiers. Give --link once for each --tier, with --dry."
            )

    @property
    def requests_at_once(self) -> int:
        """Concurrent requests of a replay."""
        return 1 if self.dry and not self.links else self.concurrency

    def block_bytes(self, trace: Trace) -> int:
        """Return the length of a block, rounded up to whole pages unless the replay is dry."""
        size_bytes = self.bytes_per_token * trace.block_tokens
        return size_bytes if self.dry else rounded_up(size_bytes)


@dataclass(frozen=True, slots=True)
class ReplayCase:
    """Parameters that vary between replays of one trace. They apply to the last tier, or to a lone primary tier."""

    policy: str | None = None  # Eviction policy; None: the tier's own.
    capacity_bytes: int | None = None
    """Capacity; None: as configured in the tier's JSON, or ``cpu_bytes`` for the primary tier."""


def replay(
    trace: Trace,
    case: ReplayCase,
    settings: ReplaySettings | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Replay a trace once; return the row of a report: shares from 0 to 1, sizes in bytes, times in seconds.

    For each tier the row has its capacity (None for no limit), the bytes written and read, the evicted blocks, the
    blocks not stored, and the blocks and tokens that requests loaded from it.

    Existing contents of real tiers stay: the replay's blocks have a namespace of their own and are removed at the end.
    ``on_progress`` is called occasionally with the number of ended requests.

    Raises:
        ConfigError: Tiers, policies or sizes can't be used.
        BackendError: A medium fails.
    """
    settings = settings or ReplaySettings()
    found = _Replay(trace, case, settings)
    if case.policy == OPTIMUM:
        return found.optimum()
    pace = Pace(settings.speed, real=not settings.dry, timed=bool(settings.links))
    config = TieringConfig(
        policy=settings.offload, allow=PARAMETERS, tokens_per_block=trace.block_tokens, tenants=settings.tenants,
        gate=settings.gate,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        primary = found.primary(stack)
        tiers = [WatchedTier(tier) for tier in found.tiers(stack, primary, pace.now_s)]
        manager = TieringManager(primary, cast("list[SecondaryTierManager]", tiers), config, clock=pace.now_s)
        stack.callback(manager.close)
        engine = ReplayEngine(
            trace, manager, primary, tiers, pace, step_blocks=settings.step_tokens // trace.block_tokens,
            concurrency=settings.requests_at_once, with_bytes=not settings.dry, tenants=settings.tenants,
            prefill_tokens_per_s=settings.prefill_tokens_per_s,
        )  # fmt: skip
        started = time.perf_counter()
        engine.run(on_progress)
        return found.row_of(engine.counts, manager, time.perf_counter() - started)


def check_case(trace: Trace, case: ReplayCase, settings: ReplaySettings) -> None:
    """Check whether a case can be replayed; opens nothing."""
    _Replay(trace, case, settings)


def auto_capacities(trace: Trace, settings: ReplaySettings) -> list[int]:
    """Return capacities from a hundredth of the trace's blocks to all of them (no eviction)."""
    needed, block_bytes = len(_keys(trace, settings)), settings.block_bytes(trace)
    return sorted({max(1, round(needed * share)) * block_bytes for share in _AUTO_SHARES})


def _keys(trace: Trace, settings: ReplaySettings) -> set[BlockKey]:
    """Return the distinct keys of all blocks; a cache with room for all of them evicts nothing."""
    tags = None if settings.tenants is None else Tags(settings.tenants)
    return {key for request in trace for key in block_keys(request, tags)}


class _Replay:
    """A trace, a case and settings, checked together, and the values derived from them."""

    def __init__(self, trace: Trace, case: ReplayCase, settings: ReplaySettings) -> None:
        self._trace, self._case, self._settings = trace, case, settings
        self._block_bytes = settings.block_bytes(trace)
        self._keys = _keys(trace, settings)
        self._policy = own_policy(settings) if case.policy is None else case.policy
        if self._policy == AGES:
            if not settings.tiers:
                raise ConfigError(f"The policy {AGES!r} is that of the disk tier. Give --tier, or another policy.")
        elif self._policy != OPTIMUM:
            make_policy(self._policy)
        elif settings.tiers or not settings.dry:
            raise ConfigError(
                f"The policy {OPTIMUM!r} is a calculation for CPU memory alone. Give --dry, and no --tier."
            )
        elif settings.tenants is not None:
            raise ConfigError(f"The policy {OPTIMUM!r} knows no tenants. Replay it without --tenants.")
        self._slots = self._primary_slots()
        if settings.dry:
            self._dry_tiers(float)
        else:
            self._arguments = self._real_tiers()

    def primary(self, stack: contextlib.ExitStack) -> PrimaryTier:
        """Make the primary tier; with ``dry`` its slots have one byte, because they are never written."""
        policy = self._settings.cpu_policy if self._settings.tiers else self._policy
        memory, slot_bytes = memoryview(bytearray(self._slots)), 1
        if not self._settings.dry:
            region = stack.enter_context(Region.create(self._slots, self._block_bytes, name="kvstore-replay"))
            memory, slot_bytes = region.view(), region.slot_bytes
        primary = PrimaryTier(memory, slot_bytes, policy=policy)
        stack.callback(primary.close)
        return primary

    def tiers(
        self, stack: contextlib.ExitStack, primary: PrimaryTier, clock: Callable[[], float]
    ) -> Sequence[SecondaryTierManager]:
        """Make the other tiers; the stack removes this replay's blocks from real ones."""
        if self._settings.dry:
            return self._dry_tiers(clock)
        fields = {"kvstore": "replay", "run": secrets.token_hex(16), "block_bytes": self._block_bytes}
        namespace = Namespace(fields)
        tiers: list[SecondaryTierManager] = []
        for argument in self._arguments:
            stack.callback(_remove_blocks, argument, namespace, primary.slot_bytes, sorted(self._keys))
            tier = open_tier(
                argument.as_config(), primary=primary.memory, slot_bytes=primary.slot_bytes, namespace=namespace,
                events=False, tenants=self._settings.tenants,
            )  # fmt: skip
            stack.callback(tier.close)
            tiers.append(tier)
        return tiers

    def optimum(self) -> dict[str, Any]:
        """Return the row of an optimal cache, which chooses victims by future requests."""
        started = time.perf_counter()
        counts = ReplayCounts()
        for request, hits in zip(self._trace, _optimal_hits(self._trace, self._slots), strict=True):
            counts.requests += 1
            counts.blocks += len(request.hash_ids)
            counts.tokens += request.input_length
            counts.hit_blocks[PRIMARY] += hits
            counts.hit_tokens[PRIMARY] += self._trace.tokens_of(request, hits)
        missed = counts.blocks - counts.hit_blocks[PRIMARY]
        tier = self._primary_row(counts, stored=missed, evicted=max(0, missed - self._slots))
        return self._row(counts, [tier], time.perf_counter() - started)

    def row_of(self, counts: ReplayCounts, manager: TieringManager, seconds: float) -> dict[str, Any]:
        """Return the row of a finished replay."""
        stats = manager.stats()
        primary, flows = stats.primary, {flow.name: flow for flow in stats.tiers}
        tiers = [self._primary_row(counts, stored=primary.ready + primary.evicted, evicted=primary.evicted)]
        for tier in manager.tier_stats():
            flow = flows[tier.name]
            tiers.append(
                {
                    "name": tier.name,
                    "capacity_bytes": tier.capacity_bytes or None,
                    "stored_bytes": tier.bytes_stored,
                    "loaded_bytes": tier.bytes_loaded,
                    "evicted_blocks": tier.removals.get(RemovalCause.EVICTED.value, 0),
                    "not_stored_blocks": flow.failed_stores + flow.dropped,
                }
            )
        return self._row(counts, tiers, seconds) | {"gate": asdict(stats.gate)}

    def _primary_row(self, counts: ReplayCounts, *, stored: int, evicted: int) -> dict[str, Any]:
        return {
            "name": PRIMARY,
            "capacity_bytes": self._slots * self._block_bytes if self._slots < len(self._keys) else None,
            "stored_bytes": stored * self._block_bytes,
            "loaded_bytes": sum(counts.hit_blocks.values()) * self._block_bytes,
            "evicted_blocks": evicted,
            "not_stored_blocks": counts.refused_blocks,
        }

    def _row(self, counts: ReplayCounts, tiers: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
        case, settings = self._case, self._settings
        hit_blocks, hit_tokens = sum(counts.hit_blocks.values()), sum(counts.hit_tokens.values())
        for tier in tiers:
            tier |= {"hit_blocks": counts.hit_blocks[tier["name"]], "hit_tokens": counts.hit_tokens[tier["name"]]}
        return {
            "bench": "replay",
            "system": "+".join(["kvstore", *(tier["name"] for tier in tiers)]),
            "trace": self._trace.name,
            "dry": settings.dry,
            "policy": self._policy,
            "capacity_bytes": tiers[-1]["capacity_bytes"] if case.capacity_bytes is None else case.capacity_bytes,
            "requests": counts.requests,
            "block_bytes": self._block_bytes,
            "blocks": counts.blocks,
            "tokens": counts.tokens,
            "hit_blocks": hit_blocks,
            "hit_tokens": hit_tokens,
            "hit_rate": hit_blocks / counts.blocks if counts.blocks else 0.0,
            "hit_rate_tokens": hit_tokens / counts.tokens if counts.tokens else 0.0,
            "prefill_s_saved": hit_tokens / settings.prefill_tokens_per_s,
            "prefill_s": counts.tokens / settings.prefill_tokens_per_s,
            "evicted_blocks": sum(tier["evicted_blocks"] for tier in tiers),
            "tiers": tiers,
            "tenants": {
                name: {"blocks": blocks, "hit_blocks": counts.tenant_hits[name]}
                for name, blocks in sorted(counts.tenant_blocks.items())
            },
            **_percentiles("wait_s", counts.waits_s),
            **_percentiles("ttft_s", counts.ttfts_s),
            "wrong_blocks": counts.wrong_blocks,
            "verified": not settings.dry,
            "seconds": seconds,
        }

    def _primary_slots(self) -> int:
        """Return the number of slots of the primary tier: as many as fit, and at most one per block."""
        capacity_bytes = self._settings.cpu_bytes
        if not self._settings.tiers and self._case.capacity_bytes is not None:
            capacity_bytes = self._case.capacity_bytes
        if capacity_bytes is None and not self._settings.dry:
            raise ConfigError("Where bytes are real, CPU memory needs a size. Give --cpu, such as 4GiB, or --dry.")
        if capacity_bytes is None:
            return len(self._keys)
        return min(len(self._keys), self._blocks_in(capacity_bytes, PRIMARY))

    def _real_tiers(self) -> list[TierArgument]:
        """Return the tiers; the case's parameters apply to the last one."""
        case, arguments = self._case, list(self._settings.tiers)
        if arguments:
            last = arguments[-1]
            if "eviction" in last.config.__struct_fields__:
                last = last.with_options(eviction=self._policy)
            elif self._policy != _policy_of(last):
                raise ConfigError(
                    f"A {last.backend} tier can't evict by {self._policy!r}: it has no policy to choose. Leave "
                    "--policy out, or replay it dry."
                )
            arguments[-1] = last if case.capacity_bytes is None else last.with_options(capacity=case.capacity_bytes)
        # open_tier would add the option "namespace" to the blocks' namespace, but their removal would not.
        return [argument.with_options(namespace="") for argument in arguments]

    def _dry_tiers(self, clock: Callable[[], float]) -> list[DryTier]:
        """Make simulated tiers in place of the real ones; the case's parameters apply to the last one."""
        settings, tiers = self._settings, list[DryTier]()
        links: Sequence[Link | None] = settings.links or [None] * len(settings.tiers)
        for number, (argument, link) in enumerate(zip(settings.tiers, links, strict=True), 1):
            capacity = getattr(argument.config, "capacity", None)
            policy = _policy_of(argument)
            if number == len(settings.tiers):
                policy = self._policy
                capacity = capacity if self._case.capacity_bytes is None else self._case.capacity_bytes
            if isinstance(capacity, Capacity):
                capacity = capacity.size_bytes
                if capacity is None:
                    raise ConfigError(
                        f"The capacity of the {argument.name} tier is a share of a filesystem, and a dry replay has "
                        "none. Give bytes."
                    )
            room = self._room(argument.name, capacity or 0, policy)
            tiers.append(
                DryTier(
                    argument.name, room, block_bytes=self._block_bytes, capacity_bytes=capacity or 0, link=link,
                    clock=clock,
                )
            )  # fmt: skip
        return tiers

    def _room(self, name: str, capacity_bytes: int, policy: str) -> Room:
        """Make the room of a dry tier; a capacity of 0 is no limit."""
        tenants = self._settings.tenants
        if not capacity_bytes:
            return PolicyRoom("lru" if policy == AGES else policy, None, tenants)
        blocks = self._blocks_in(capacity_bytes, name)
        if policy == AGES:
            return SlotsRoom(capacity_bytes, self._block_bytes, tenants)
        return PolicyRoom(policy, blocks, tenants)

    def _blocks_in(self, capacity_bytes: int, name: str) -> int:
        if capacity_bytes < self._block_bytes:
            raise ConfigError(
                f"The capacity of {name} is {capacity_bytes} bytes, less than one block of {self._block_bytes}. Give "
                "more, or fewer bytes per token."
            )
        return capacity_bytes // self._block_bytes


def own_policy(settings: ReplaySettings) -> str:
    """Return the policy of the last tier, or of a lone primary tier."""
    return _policy_of(settings.tiers[-1]) if settings.tiers else DEFAULT_POLICY


def _policy_of(argument: TierArgument) -> str:
    return AGES if argument.backend in _DISK_TIERS else getattr(argument.config, "eviction", "lru")


def _percentiles(name: str, times_s: Sequence[float]) -> dict[str, float]:
    times = sorted(times_s)
    return {
        f"{name}_p{percent}": times[min(len(times) - 1, len(times) * percent // 100)] if times else 0.0
        for percent in _PERCENTILES
    }


def _remove_blocks(argument: TierArgument, namespace: Namespace, slot_bytes: int, keys: Sequence[BlockKey]) -> None:
    """Remove the blocks of a replay from the medium of a closed tier."""
    if argument.backend == "memory":
        return

    async def remove() -> None:
        backend: Backend = BACKENDS.find(argument.backend)(argument.config)
        try:
            await backend.open(namespace, RecordGeometry(backend.alignment, slot_bytes))
            for start in range(0, len(keys), _REMOVED_AT_ONCE):
                await backend.delete(keys[start : start + _REMOVED_AT_ONCE])
        finally:
            await backend.close()

    with asyncio.Runner() as runner:
        run_interruptibly(runner, remove())


def _optimal_hits(trace: Trace, slots: int) -> list[int]:
    """Return the hit blocks of each request in a cache that always drops the block with the latest next use.

    A new block may be dropped immediately. Among blocks used next by the same request, the end of the prompt is dropped
    first, because only an unbroken prefix counts as hits. Requests run one after the other.

    Source: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal, 1966.
    """
    uses: defaultdict[int, deque[int]] = defaultdict(deque)
    for number, request in enumerate(trace):
        for block in request.hash_ids:
            uses[block].append(number)
    cached: dict[int, float] = {}
    """Number of the next request that uses each cached block."""
    line: list[tuple[float, int, int]] = []
    """Heap of the cached blocks, the latest next use first. Entries that differ from ``cached`` are outdated."""
    hits: list[int] = []
    for request in trace:
        found = 0
        while found < len(request.hash_ids) and request.hash_ids[found] in cached:
            found += 1
        hits.append(found)
        for place, block in enumerate(request.hash_ids):
            uses[block].popleft()
            after = cached[block] = uses[block][0] if uses[block] else math.inf
            heapq.heappush(line, (-after, -place, block))
        while len(cached) > slots:
            after, _, block = heapq.heappop(line)
            if cached.get(block) == -after:
                del cached[block]
    return hits
