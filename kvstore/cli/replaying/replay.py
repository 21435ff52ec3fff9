"""Replay of a trace through the tiers: hit rates by policy and capacity."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, cast

from kvstore.backends.base import Backend, RecordGeometry
from kvstore.cli.interruption import Runner
from kvstore.cli.replaying.engine import PRIMARY, Pace, ReplayCounts, ReplayEngine, block_keys
from kvstore.cli.replaying.optimum import OPTIMUM, optimal_hits
from kvstore.cli.replaying.tiers import DryTier, Link, WatchedTier
from kvstore.cli.replaying.traces import Trace
from kvstore.cli.tier_argument import TierArgument
from kvstore.errors import ConfigError
from kvstore.eviction import make_policy
from kvstore.namespace import Namespace
from kvstore.primary import PrimaryTier, Region, rounded_up
from kvstore.quantity import Capacity
from kvstore.registry import BACKENDS
from kvstore.tenants import Tags, Tenants
from kvstore.tiering import TieringConfig, TieringManager
from kvstore.tiers import SecondaryTierManager, open_tier
from kvstore.types import BlockKey, RemovalCause

__all__ = ["ReplayCase", "ReplaySettings", "auto_capacities", "check_case", "replay", "replay_row"]

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
    """Settings of all cases of a replay.

    Attributes:
        tiers: The tiers below the primary one, the fastest first.
        cpu_bytes: Capacity of the primary tier; None: that of the case without other tiers, otherwise unlimited.
        cpu_policy: Eviction policy of the primary tier, with other tiers.
        dry: Keys and sizes only: no bytes, no media, no waiting.
        bytes_per_token: KV cache of one token; the default is that of Llama 3.1 8B in 16 bits.
        prefill_tokens_per_s: Rate of the engine, to compute the time saved.
        step_tokens: Tokens that the engine computes, and stores, in one step.
        concurrency: Concurrent requests; a dry replay without ``links`` runs one after the other.
        speed: Factor to the recorded speed; None: as fast as possible.
        offload: Offload policy of all requests, as for ``TieringConfig.policy``.
        tenants: Who shares the tiers; requests name their tenants in the parameter ``tenant`` of their policies.
        links: How fast the tiers of a dry replay deliver; loads and computing take simulated time then.
        gate: Whether the manager's gate decides what is worth loading.
    """

    tiers: Sequence[TierArgument] = ()
    cpu_bytes: int | None = None
    cpu_policy: str = "lru"
    dry: bool = True
    bytes_per_token: int = 128 << 10
    prefill_tokens_per_s: float = 10_000.0
    step_tokens: int = 8192
    concurrency: int = 8
    speed: float | None = None
    offload: Mapping[str, Any] = field(default_factory=dict)
    tenants: Tenants | None = None
    links: Sequence[Link] = ()
    gate: bool = True

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
        """Return the bytes of a block; where they are real, whole pages."""
        size_bytes = self.bytes_per_token * trace.block_tokens
        return size_bytes if self.dry else rounded_up(size_bytes)


@dataclass(frozen=True, slots=True)
class ReplayCase:
    """Parameters that vary between replays of one trace, for the last tier, or the primary one without others.

    Attributes:
        policy: Eviction policy.
        capacity_bytes: Capacity; None: unlimited (in a dry replay), or that of its JSON.
    """

    policy: str = "lru"
    capacity_bytes: int | None = None


def replay(
    trace: Trace,
    case: ReplayCase,
    settings: ReplaySettings | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Replay a trace once; return the row of a report (see :func:`replay_row`).

    Other contents of real tiers stay: the blocks have their own namespace, and are removed at the end. ``on_progress``
    is called occasionally with the number of ended requests.

    Raises:
        ConfigError: Tiers, policies or sizes can't be used.
        BackendError: A medium refuses.
    """
    settings = settings or ReplaySettings()
    check_case(trace, case, settings)
    block_bytes = settings.block_bytes(trace)
    if case.policy == OPTIMUM:
        return _optimal_row(trace, case, settings)
    pace = Pace(settings.speed, real=not settings.dry, timed=bool(settings.links))
    config = TieringConfig(
        policy=settings.offload, tokens_per_block=trace.block_tokens, tenants=settings.tenants, gate=settings.gate
    )
    with contextlib.ExitStack() as stack:
        primary = stack.enter_context(_primary(trace, case, settings, block_bytes))
        tiers = [
            WatchedTier(tier) for tier in stack.enter_context(_tiers(trace, case, settings, primary, block_bytes, pace))
        ]
        manager = TieringManager(primary, cast("list[SecondaryTierManager]", tiers), config, clock=pace.now_s)
        stack.callback(manager.close)
        engine = ReplayEngine(
            trace,
            manager,
            primary,
            tiers,
            pace,
            step_blocks=settings.step_tokens // trace.block_tokens,
            concurrency=settings.requests_at_once,
            with_bytes=not settings.dry,
            tenants=settings.tenants,
            prefill_tokens_per_s=settings.prefill_tokens_per_s,
        )
        started = time.perf_counter()
        engine.run(on_progress)
        seconds = time.perf_counter() - started
        return replay_row(trace, case, settings, engine, manager, seconds)


def _optimal_row(trace: Trace, case: ReplayCase, settings: ReplaySettings) -> dict[str, Any]:
    """Return the row of a cache that knows the rest of the trace."""
    started = time.perf_counter()
    counts, block_bytes = ReplayCounts(), settings.block_bytes(trace)
    slots = _slots(trace, case, settings, block_bytes)
    for request, hits in zip(trace, optimal_hits(trace, slots), strict=True):
        counts.requests += 1
        counts.blocks += len(request.hash_ids)
        counts.tokens += request.input_length
        counts.hit_blocks[PRIMARY] += hits
        counts.hit_tokens[PRIMARY] += trace.tokens_of(request, hits)
    missed = counts.blocks - counts.hit_blocks[PRIMARY]
    tier = {
        "name": PRIMARY,
        "capacity_bytes": slots * block_bytes if slots < _distinct(trace, settings) else None,
        "stored_bytes": missed * block_bytes,
        "loaded_bytes": counts.hit_blocks[PRIMARY] * block_bytes,
        "evicted_blocks": max(0, missed - slots),
        "not_stored_blocks": 0,
    }
    return _row(trace, case, settings, counts, [tier], time.perf_counter() - started)


def replay_row(
    trace: Trace,
    case: ReplayCase,
    settings: ReplaySettings,
    engine: ReplayEngine,
    manager: TieringManager,
    seconds: float,
) -> dict[str, Any]:
    """Return the results as a row of a report: shares from 0 to 1, sizes in bytes, times in seconds.

    Of each tier: its capacity (None for no limit), the bytes written to it and read from it, the blocks that it dropped
    for space or did not store, and the blocks and tokens that requests loaded from it.
    """
    counts, block_bytes = engine.counts, settings.block_bytes(trace)
    primary, flows = manager.stats().primary, {flow.name: flow for flow in manager.stats().tiers}
    tiers: list[dict[str, Any]] = [
        {
            "name": PRIMARY,
            "capacity_bytes": primary.slots * block_bytes if primary.slots < _distinct(trace, settings) else None,
            "stored_bytes": (primary.ready + primary.evicted) * block_bytes,
            "loaded_bytes": sum(counts.hit_blocks.values()) * block_bytes,
            "evicted_blocks": primary.evicted,
            "not_stored_blocks": counts.refused_blocks,
        }
    ]
    for stats in manager.tier_stats():
        flow = flows[stats.name]
        tiers.append(
            {
                "name": stats.name,
                "capacity_bytes": stats.capacity_bytes or None,
                "stored_bytes": stats.bytes_stored,
                "loaded_bytes": stats.bytes_loaded,
                "evicted_blocks": stats.removals.get(RemovalCause.EVICTED.value, 0),
                "not_stored_blocks": flow.failed_stores + flow.dropped,
            }
        )
    return _row(trace, case, settings, counts, tiers, seconds) | {"gate": asdict(manager.stats().gate)}


def _row(
    trace: Trace,
    case: ReplayCase,
    settings: ReplaySettings,
    counts: ReplayCounts,
    tiers: list[dict[str, Any]],
    seconds: float,
) -> dict[str, Any]:
    block_bytes = settings.block_bytes(trace)
    hit_blocks, hit_tokens = sum(counts.hit_blocks.values()), sum(counts.hit_tokens.values())
    for tier in tiers:
        tier |= {"hit_blocks": counts.hit_blocks[tier["name"]], "hit_tokens": counts.hit_tokens[tier["name"]]}
    return {
        "bench": "replay",
        "system": "+".join(["kvstore", *(tier["name"] for tier in tiers)]),
        "trace": trace.name,
        "dry": settings.dry,
        "policy": case.policy,
        "capacity_bytes": tiers[-1]["capacity_bytes"] if case.capacity_bytes is None else case.capacity_bytes,
        "requests": counts.requests,
        "block_bytes": block_bytes,
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


def _percentiles(name: str, times_s: Sequence[float]) -> dict[str, float]:
    times = sorted(times_s)
    return {
        f"{name}_p{percent}": times[min(len(times) - 1, len(times) * percent // 100)] if times else 0.0
        for percent in _PERCENTILES
    }


def _distinct(trace: Trace, settings: ReplaySettings) -> int:
    """Return the number of distinct blocks: with this capacity nothing is evicted."""
    if settings.tenants is None:
        return trace.distinct_blocks
    tags = Tags(settings.tenants)
    return len({key for request in trace for key in block_keys(request, tags)})


def check_case(trace: Trace, case: ReplayCase, settings: ReplaySettings) -> None:
    """Check whether a case can be replayed; opens nothing.

    Raises:
        ConfigError: Tiers, policies or sizes can't be used.
    """
    if case.policy != OPTIMUM:
        make_policy(case.policy)
    elif settings.tiers or not settings.dry:
        raise ConfigError(f"The policy {OPTIMUM!r} is a calculation for CPU memory alone. Give --dry, and no --tier.")
    elif settings.tenants is not None:
        raise ConfigError(f"The policy {OPTIMUM!r} knows no tenants. Replay it without --tenants.")
    block_bytes = settings.block_bytes(trace)
    _slots(trace, case, settings, block_bytes)
    if settings.dry:
        _dry_tiers(case, settings, block_bytes, float)
    else:
        _arguments(case, settings)


def auto_capacities(trace: Trace, settings: ReplaySettings) -> list[int]:
    """Return capacities from a hundredth of the trace's blocks to all of them, which needs no eviction."""
    needed, block_bytes = _distinct(trace, settings), settings.block_bytes(trace)
    return sorted({max(1, round(needed * share)) * block_bytes for share in _AUTO_SHARES})


@contextlib.contextmanager
def _primary(trace: Trace, case: ReplayCase, settings: ReplaySettings, block_bytes: int) -> Iterator[PrimaryTier]:
    """Make the primary tier; with ``dry`` its slots have one byte, because they are never written."""
    slots = _slots(trace, case, settings, block_bytes)
    policy = settings.cpu_policy if settings.tiers else case.policy
    if settings.dry:
        primary = PrimaryTier(memoryview(bytearray(slots)), 1, policy=policy)
        yield primary
        primary.close()
        return
    with Region.create(slots, block_bytes, name="kvstore-replay") as region:
        primary = PrimaryTier(region.view(), region.slot_bytes, policy=policy)
        yield primary
        primary.close()


def _slots(trace: Trace, case: ReplayCase, settings: ReplaySettings, block_bytes: int) -> int:
    """Return the number of slots of the primary tier: as many as fit, and at most one per block."""
    capacity_bytes = settings.cpu_bytes
    if not settings.tiers and case.capacity_bytes is not None:
        capacity_bytes = case.capacity_bytes
    if capacity_bytes is None and not settings.dry:
        raise ConfigError("Where bytes are real, CPU memory needs a size. Give --cpu, such as 4GiB, or --dry.")
    if capacity_bytes is None:
        return _distinct(trace, settings)
    return min(_distinct(trace, settings), _blocks(capacity_bytes, block_bytes, PRIMARY))


def _arguments(case: ReplayCase, settings: ReplaySettings) -> list[TierArgument]:
    """Return the real tiers of a case."""
    arguments = list(settings.tiers)
    if arguments:
        last = arguments[-1]
        if "eviction" in last.config.__struct_fields__:
            last = last.with_options(eviction=case.policy)
        elif case.policy != ReplayCase().policy:
            raise ConfigError(
                f"A {last.backend} tier can't evict by {case.policy!r}: it has no policy to choose. Replay it dry, or "
                "without the tier."
            )
        arguments[-1] = last if case.capacity_bytes is None else last.with_options(capacity=case.capacity_bytes)
    return arguments


def _dry_tiers(
    case: ReplayCase, settings: ReplaySettings, block_bytes: int, clock: Callable[[], float]
) -> list[DryTier]:
    """Make the tiers of a dry replay; the case is about the last of them."""
    last = len(settings.tiers) - 1
    links: Sequence[Link | None] = settings.links or [None] * len(settings.tiers)
    return [
        _dry_tier(argument, block_bytes, case if index == last else None, settings, link, clock)
        for index, (argument, link) in enumerate(zip(settings.tiers, links, strict=True))
    ]


@contextlib.contextmanager
def _tiers(
    trace: Trace, case: ReplayCase, settings: ReplaySettings, primary: PrimaryTier, block_bytes: int, pace: Pace
) -> Iterator[Sequence[SecondaryTierManager]]:
    """Make the tiers; real ones are emptied of this replay's blocks at the end."""
    if settings.dry:
        yield _dry_tiers(case, settings, block_bytes, pace.now_s)
        return
    # open_tier would add the option "namespace" to this namespace, but the removal of the blocks would not.
    arguments = [argument.with_options(namespace="") for argument in _arguments(case, settings)]
    namespace = Namespace({"kvstore": "replay", "run": secrets.token_hex(16), "block_bytes": block_bytes})
    tags = None if settings.tenants is None else Tags(settings.tenants)
    keys = sorted({key for request in trace for key in block_keys(request, tags)})
    with contextlib.ExitStack() as stack:
        tiers: list[SecondaryTierManager] = []
        for argument in arguments:
            stack.callback(_remove_blocks, argument, namespace, primary.slot_bytes, keys)
            tier = open_tier(
                argument.as_config(),
                primary=primary.memory,
                slot_bytes=primary.slot_bytes,
                namespace=namespace,
                events=False,
                tenants=settings.tenants,
            )
            stack.callback(tier.close)
            tiers.append(tier)
        yield tiers


def _remove_blocks(argument: TierArgument, namespace: Namespace, slot_bytes: int, keys: Sequence[BlockKey]) -> None:
    """Remove the blocks of a replay from the medium of a tier that is closed."""
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

    with Runner() as runner:
        runner.run(remove())


def _dry_tier(
    argument: TierArgument,
    block_bytes: int,
    case: ReplayCase | None,
    settings: ReplaySettings,
    link: Link | None,
    clock: Callable[[], float],
) -> DryTier:
    """Make a simulated tier in place of a real one, with the parameters of the case, if given."""
    capacity = getattr(argument.config, "capacity", None)
    if case is not None and case.capacity_bytes is not None:
        capacity = case.capacity_bytes
    if isinstance(capacity, Capacity):
        capacity = capacity.size_bytes
        if capacity is None:
            raise ConfigError(
                f"The capacity of the {argument.name} tier is a share of a filesystem, and a dry replay has none. "
                "Give bytes."
            )
    policy = case.policy if case is not None else getattr(argument.config, "eviction", "lru")
    # None and 0: without a limit.
    blocks = None if not capacity else _blocks(capacity, block_bytes, argument.name)
    return DryTier(
        argument.name,
        block_bytes=block_bytes,
        capacity_blocks=blocks,
        policy=policy,
        tenants=settings.tenants,
        link=link,
        clock=clock,
    )


def _blocks(capacity_bytes: int, block_bytes: int, name: str) -> int:
    if capacity_bytes < block_bytes:
        raise ConfigError(
            f"The capacity of {name} is {capacity_bytes} bytes, less than one block of {block_bytes}. Give more, or "
            "fewer bytes per token."
        )
    return capacity_bytes // block_bytes
