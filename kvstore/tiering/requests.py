"""The manager's requests: their policies, blocks, and unfinished work."""

from __future__ import annotations

import operator
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from kvstore.tiering.link import TierLink
from kvstore.tiering.policy import HAND_OVER, OffloadPolicy, PolicyParser
from kvstore.tiering.recording import RequestFeed
from kvstore.types import BlockKey, MissCause, RequestContext

TierAnswer: TypeAlias = "tuple[TierLink | None, TierLink | None]"
"""The tier to load a block from, or None; and in that case the tier whose answer is outstanding, or None."""


ALL_TIERS: Final = -1
"""Index for causes of misses that concern all tiers. Among the origins of loaded blocks, it is the primary tier's."""


@dataclass(slots=True)
class Decision:
    """The gate's decision on a request."""

    step: int = -1  # Step of the last decision.
    limit: int | None = None  # End of the last block to load, in tokens; None for no limit.
    declined: tuple[int, MissCause] | None = None  # Index of the tier for which there is a limit, and the cause.
    found: dict[BlockKey, TierAnswer] = field(default_factory=dict)  # Answers of the tiers in this step, by block.
    start: int = 0  # Tokens before the blocks to load.
    waiting: int = 1  # Number of requests waiting to be computed, including this one.
    recompute_s: float = 0.0
    """Estimated computing time of the blocks, multiplied by ``waiting``; 0 if there is no decision."""
    patience_s: float | None = None  # Longest wait for a tier's answer or for room; None for the configured wait.
    unknown: tuple[int, float, float] | None = None
    """Index of the tier whose answer is outstanding, and the times of the first and last lookup there."""
    since: float | None = None  # Time of the first load that the request has not used yet.
    under_way: int = 0  # Blocks in progress in the tier when the last load began, including that load.


@dataclass(frozen=True, slots=True)
class HandOverWait:
    """A request's wait for another engine."""

    since: float  # Time of its first lookup of a block that it waits for.
    start: int  # Tokens before that block.
    total_s: float  # Estimated time to compute the prompt from there.


@dataclass(slots=True, eq=False)
class RequestState:
    """A request, from its first mention until its last work has ended."""

    ctx: RequestContext  # The request.
    policy: OffloadPolicy  # Its offload policy.
    store_links: tuple[TierLink, ...]  # Tiers that it may store to.
    load_links: tuple[TierLink, ...]  # Tiers that it may load from, in order.
    hands_over: bool = False  # Whether its blocks are kept for another engine.
    keys: Sequence[BlockKey] = ()  # Its known blocks in prefix order.
    weighed: Collection[BlockKey] = ()  # Its blocks of layers that need every block of the prefix.
    ends: Mapping[BlockKey, int] = field(default_factory=dict)
    """End of each block in tokens from the start, where known."""
    has_groups: bool = False  # Whether its keys belong to several groups of layers, one group after the other.
    tokens_max: int | None = None  # Only blocks that end at or before this position may be stored; None for all.
    open: dict[BlockKey, int] = field(default_factory=dict)
    """Blocks that the engine is filling for it, with their slots, in prefix order."""
    loading: dict[BlockKey, int] = field(default_factory=dict)
    """Blocks that the engine is reading for it, with the number of reads."""
    claims: dict[BlockKey, None] = field(default_factory=dict)
    """Blocks promoted for it but not yet loaded; each has a pin."""
    promoting: int = 0  # Number of blocks being promoted for it.
    failed: dict[BlockKey, int] = field(default_factory=dict)
    """Blocks whose load failed, with the tiers (bits) that failed."""
    failures: dict[int, MissCause] = field(default_factory=dict)
    """Tiers (by index) of which a load failed, with the cause of the last one."""
    sources: dict[BlockKey, TierLink] = field(default_factory=dict)  # Blocks promoted for it, with the tier of each.
    asked: dict[BlockKey, int] = field(default_factory=dict)
    """Blocks that it looked up, with the tiers (bits) whose answers were counted."""
    retried: dict[tuple[BlockKey, int], float] = field(default_factory=dict)
    """Blocks and tiers (bits) with RETRY as the only answer so far, with the time of the first answer."""
    missed: dict[int, MissCause] = field(default_factory=dict)
    """Tiers (by index, :data:`ALL_TIERS`) whose last answer was a miss, with its cause."""
    served: dict[int, int] = field(default_factory=dict)  # Number of blocks that it loads, by tier of origin.
    load_times: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Begin of the first and end of the last load from each tier."""
    served_to: int = 0  # End of the last block that it loads, in tokens.
    computed: int | None = None  # Number of blocks that it computes although it looked for them; None: not known yet.
    cut: dict[int, int] = field(default_factory=dict)
    """Tiers (bits) that lacked room for one of its blocks, with the end of the first such block (-1: unknown)."""
    over_rate: int = 0  # Tiers (bits) to which it may store nothing more, because of its tenant's rate.
    seen: set[BlockKey] = field(default_factory=set)  # Blocks whose sighting was counted.
    handed: set[BlockKey] = field(default_factory=set)  # Blocks held for the engine that takes over the request.
    stored: list[BlockKey] = field(default_factory=list)  # Blocks that it stored, if its policy acts at its end.
    wait_until: float | None = None  # End of its wait for a tier's answer or for room.
    handed_over: HandOverWait | None = None  # Its wait for another engine's blocks, once it has begun.
    gated: Decision = field(default_factory=Decision)  # The gate's decision on it.
    finished: bool = False  # Whether it has ended for the engine.

    def __post_init__(self) -> None:
        if not self.policy.stores_all:
            self.tokens_max = 0

    @property
    def idle(self) -> bool:
        """Whether it has no unfinished work."""
        return not (self.open or self.loading or self.promoting)

    @property
    def counted(self) -> Collection[BlockKey]:
        """The blocks that counts of misses and the account include; those of windows are left out."""
        return self.weighed or self.ends

    def may_store(self, key: BlockKey) -> bool:
        """Whether its policy allows a block at this position; unknown positions are after the prompt."""
        return self.tokens_max is None or self.ends.get(key, self.tokens_max + 1) <= self.tokens_max

    def after(self, tokens: int, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Return its blocks that end after ``tokens`` tokens; unknown positions are after the prompt."""
        return [key for key in keys if self.ends.get(key, tokens + 1) > tokens]

    def by_position(self, keys: Collection[BlockKey]) -> Sequence[BlockKey]:
        """Return blocks by position. A prefix is loaded only up to the first missing block of any group of layers."""
        if not self.has_groups:
            return keys if isinstance(keys, Sequence) else tuple(keys)
        return sorted(keys, key=lambda key: self.ends.get(key, sys.maxsize))

    def is_cut(self, key: BlockKey, bit: int) -> bool:
        """Whether a block follows a block that a tier lacked room for, so that no lookup there would reach it."""
        end = self.cut.get(bit)
        return end is not None and self.ends.get(key, end + 1) > end

    def note_cut(self, key: BlockKey, bit: int) -> None:
        """Note that a tier lacked room for a block."""
        end = self.ends.get(key, -1)
        self.cut[bit] = min(end, self.cut.get(bit, end))

    def void(self) -> None:
        """Drop all unfinished work, because the primary tier was cleared."""
        self.open.clear()
        self.loading.clear()
        self.claims.clear()
        self.promoting = 0
        self.cut.clear()
        self.over_rate = 0
        self.sources.clear()
        self.gated = Decision()
        self.handed.clear()
        self.stored.clear()


class Requests:
    """Requests by id, from their first mention until their last work has ended.

    Args:
        tokens_per_block: Tokens per block, for requests without the ends of their blocks.
        feed: Receives each request once its blocks are known.
    """

    def __init__(
        self, links: Sequence[TierLink], parser: PolicyParser, tokens_per_block: int, feed: RequestFeed | None = None
    ) -> None:
        self._links = tuple(links)
        self._parser = parser
        self._tokens_per_block = tokens_per_block
        self._feed = feed
        self.by_id: dict[str, RequestState] = {}  # The requests.
        self.waiting: set[str] = set()  # Ids of requests that have not begun to compute.

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(list(self.by_id.values()))

    def begin(self, ctx: RequestContext) -> RequestState:
        """Add a request. A known id starts over, and inherits the engine's unfinished copies of the former request."""
        policy = self._parser.parse(ctx.params)
        storable = tuple(link for link in self._named(policy.tiers) if link.takes_stores)
        loadable = self._named(policy.load_tiers) if policy.load else ()
        if ctx.load_tiers is not None:
            loadable = tuple(link for link in loadable if link.name in ctx.load_tiers)
        hands_over = bool(ctx.hand_over_s) and self._parser.allows(HAND_OVER)
        state = RequestState(ctx, policy, storable, loadable, hands_over)
        before = self.by_id.get(ctx.request_id)
        if before is not None:
            state.open, state.loading = before.open, before.loading
            before.open, before.loading, before.finished = {}, {}, True
        self.by_id[ctx.request_id] = state
        self.waiting.add(ctx.request_id)
        return state

    def locate(
        self, state: RequestState, keys: Sequence[BlockKey], ends: Sequence[int] | None, prompt_tokens: int | None
    ) -> None:
        """Set a request's blocks and their ends.

        Args:
            ends: End of each block in tokens from the start; by default, each block has ``tokens_per_block`` tokens.
            prompt_tokens: Length of the prompt; by default the largest end.
        """
        size = self._tokens_per_block
        known = ends if ends is not None else range(size, size * len(keys) + 1, size)
        state.keys = keys
        state.ends = dict(zip(keys, known, strict=False))
        state.has_groups = any(map(operator.gt, known, known[1:]))
        if state.policy.stores_all and self._feed is None:
            return
        length = prompt_tokens if prompt_tokens is not None else max(state.ends.values(), default=0)
        if not state.policy.stores_all:
            state.tokens_max = state.policy.tokens_max(length)
        if self._feed is not None:
            self._feed.send(state.ends, length)

    def end(self, state: RequestState) -> bool:
        """Remove a request; return whether it was current (neither removed before nor started over)."""
        if self.by_id.get(state.ctx.request_id) is not state:
            return False
        del self.by_id[state.ctx.request_id]
        self.waiting.discard(state.ctx.request_id)
        return True

    def _named(self, names: tuple[str, ...] | None) -> tuple[TierLink, ...]:
        return self._links if names is None else tuple(link for link in self._links if link.name in names)
