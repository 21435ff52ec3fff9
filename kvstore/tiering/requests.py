"""The requests that the manager knows: their policies, blocks, and unfinished work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.tiering.link import TierLink
from kvstore.tiering.policy import OffloadPolicy, PolicyParser
from kvstore.tiering.recording import RequestFeed
from kvstore.types import BlockKey, RequestContext

__all__ = ["Decision", "RequestState", "Requests"]


@dataclass(slots=True)
class Decision:
    """The gate's decision on a request.

    Attributes:
        step: Step in which it was made last.
        limit: End of the last block to load, in tokens; None for no limit.
        found: Answers of the tiers in this step, by block.
        start: Tokens before the blocks to load.
        waiting: Requests that waited to be computed, itself included.
        recompute_s: Estimated time that these would wait for the blocks to be computed; 0 if there is no decision.
        patience_s: Longest wait for a tier's answer or for room; None for that of the configuration.
        unknown: Index of the tier whose answer it waits for, and the times when it asked first and last.
        since: Time of its first load that it has not used yet.
    """

    step: int = -1
    limit: int | None = None
    found: dict[BlockKey, tuple[TierLink | None, TierLink | None]] = field(default_factory=dict)
    start: int = 0
    waiting: int = 1
    recompute_s: float = 0.0
    patience_s: float | None = None
    unknown: tuple[int, float, float] | None = None
    since: float | None = None


class RequestState:
    """A request from its first mention until its last work has ended.

    Attributes:
        ctx: The request.
        policy: Its offload policy.
        store_links: Tiers that it may store to.
        load_links: Tiers that it may load from, in order.
        keys: Its known blocks in prefix order.
        places: Place in ``keys`` of each block that the gate weighs.
        ends: End of each block in tokens from the start, where known.
        tokens_max: Only blocks that end here or before may be stored; None for all.
        open: Blocks that the engine is filling for it, with their slots, in prefix order.
        loading: Blocks that the engine is reading for it, with the number of reads.
        claims: Blocks promoted for it and not yet loaded; each has a pin.
        promoting: Blocks whose promotion for it has not ended.
        failed: Blocks whose load failed, with the tiers (bits) that failed.
        sources: Blocks promoted for it, with the tier of each.
        asked: Blocks that it looked up, with the tiers (bits) whose answers were counted.
        retried: Blocks and tiers (bits) that have only answered RETRY, with the time of the first.
        cut: Tiers (bits) that lacked room for one of its blocks, with the end of the first such block (-1: unknown).
        over_rate: Tiers (bits) to which its tenant's rate lets it store nothing more.
        seen: Blocks whose sighting was counted.
        handed: Blocks held for the engine that it is handed over to.
        stored: Blocks that it stored, if its policy has hints for its end.
        wait_until: End of its wait for a tier's answer or for room.
        gated: What the gate decided for it.
        prefetched: Number of ``keys`` that prefetch has looked up.
        finished: Whether it has ended for the engine.
    """

    __slots__ = (
        "asked",
        "claims",
        "ctx",
        "cut",
        "ends",
        "failed",
        "finished",
        "gated",
        "handed",
        "keys",
        "load_links",
        "loading",
        "open",
        "over_rate",
        "places",
        "policy",
        "prefetched",
        "promoting",
        "retried",
        "seen",
        "sources",
        "store_links",
        "stored",
        "tokens_max",
        "wait_until",
    )

    def __init__(
        self,
        ctx: RequestContext,
        policy: OffloadPolicy,
        store_links: tuple[TierLink, ...],
        load_links: tuple[TierLink, ...],
    ) -> None:
        self.ctx = ctx
        self.policy = policy
        self.store_links = store_links
        self.load_links = load_links
        self.keys: Sequence[BlockKey] = ()
        self.ends: Mapping[BlockKey, int] = {}
        self.places: Mapping[BlockKey, int] = {}
        self.tokens_max: int | None = None if policy.stores_all else 0
        self.open: dict[BlockKey, int] = {}
        self.loading: dict[BlockKey, int] = {}
        self.claims: dict[BlockKey, None] = {}
        self.promoting = 0
        self.failed: dict[BlockKey, int] = {}
        self.sources: dict[BlockKey, TierLink] = {}
        self.asked: dict[BlockKey, int] = {}
        self.retried: dict[tuple[BlockKey, int], float] = {}
        self.cut: dict[int, int] = {}
        self.over_rate = 0
        self.seen: set[BlockKey] = set()
        self.handed: set[BlockKey] = set()
        self.stored: list[BlockKey] = []
        self.wait_until: float | None = None
        self.gated = Decision()
        self.prefetched = 0
        self.finished = False

    @property
    def idle(self) -> bool:
        """Whether it has no unfinished work."""
        return not (self.open or self.loading or self.promoting)

    def may_store(self, key: BlockKey) -> bool:
        """Whether its policy allows a block by its position; unknown positions are after the prompt."""
        return self.tokens_max is None or self.ends.get(key, self.tokens_max + 1) <= self.tokens_max

    def after(self, tokens: int, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Return those of its blocks that end after so many tokens; unknown positions are after the prompt."""
        return [key for key in keys if self.ends.get(key, tokens + 1) > tokens]

    def is_cut(self, key: BlockKey, bit: int) -> bool:
        """Whether a block follows one that did not get into a tier, so that no lookup would reach it."""
        end = self.cut.get(bit)
        return end is not None and self.ends.get(key, end + 1) > end

    def note_cut(self, key: BlockKey, bit: int) -> None:
        """Note that a block did not get into a tier."""
        end = self.ends.get(key, -1)
        self.cut[bit] = min(end, self.cut.get(bit, end))

    def void(self) -> None:
        """Forget unfinished work, because the primary tier was cleared."""
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
        links: The tiers, in order.
        parser: Reads their policies.
        tokens_per_block: Tokens of a block, for requests that don't give the ends of their blocks.
        feed: Receives each request once its blocks are known.

    Attributes:
        by_id: The requests.
        refusing: Ids of requests that may load nothing.
        waiting: Ids of requests that have not begun to compute.
    """

    def __init__(
        self, links: Sequence[TierLink], parser: PolicyParser, tokens_per_block: int, feed: RequestFeed | None = None
    ) -> None:
        self._links = tuple(links)
        self._parser = parser
        self._tokens_per_block = tokens_per_block
        self._feed = feed
        self.by_id: dict[str, RequestState] = {}
        self.refusing: set[str] = set()
        self.waiting: set[str] = set()
        self._returns = 0

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(list(self.by_id.values()))

    def begin(self, ctx: RequestContext) -> RequestState:
        """Add a request; a known id starts over and inherits its engine's unfinished copies."""
        policy = self._parser.parse(ctx.params)
        storable = tuple(link for link in self._chosen(policy.tiers) if link.takes_stores)
        state = RequestState(ctx, policy, storable, self._loadable(policy, ctx))
        before = self.by_id.get(ctx.request_id)
        if before is not None:
            state.open, state.loading = before.open, before.loading
            before.open, before.loading, before.finished = {}, {}, True
        self.by_id[ctx.request_id] = state
        self.waiting.add(ctx.request_id)
        if policy.load:
            self.refusing.discard(ctx.request_id)
        else:
            self.refusing.add(ctx.request_id)
        return state

    def locate(
        self, state: RequestState, keys: Sequence[BlockKey], ends: Sequence[int] | None, prompt_tokens: int | None
    ) -> None:
        """Set a request's blocks and their ends.

        Args:
            state: The request.
            keys: Its blocks, in prefix order.
            ends: End of each in tokens from the start; by default each has ``tokens_per_block``.
            prompt_tokens: Length of the prompt; by default the largest end.
        """
        size = self._tokens_per_block
        known = ends if ends is not None else range(size, size * len(keys) + 1, size)
        state.keys = keys
        state.ends = dict(zip(keys, known, strict=False))
        if not state.policy.stores_all:
            state.tokens_max = state.policy.tokens_max(_length(state.ends, prompt_tokens))
        if self._feed is not None:
            self._feed.send(state.ends, _length(state.ends, prompt_tokens))

    def returning(self, state: RequestState, keys: Sequence[BlockKey]) -> RequestState:
        """Return a request that only loads blocks of one that has ended; :meth:`resume` adds it."""
        self._returns += 1
        # No engine has such an id.
        ctx = RequestContext(f"\0returns-{self._returns}", load_tiers=state.ctx.load_tiers, tag=state.ctx.tag)
        again = RequestState(ctx, OffloadPolicy(store=False), (), state.load_links)
        again.keys, again.ends, again.finished = keys, state.ends, True
        return again

    def resume(self, state: RequestState) -> None:
        """Add a request that was made by :meth:`returning`."""
        self.by_id[state.ctx.request_id] = state

    def end(self, state: RequestState) -> bool:
        """Forget a request; return whether it was current (neither forgotten before nor started over)."""
        if self.by_id.get(state.ctx.request_id) is not state:
            return False
        del self.by_id[state.ctx.request_id]
        self.refusing.discard(state.ctx.request_id)
        self.waiting.discard(state.ctx.request_id)
        return True

    def _chosen(self, names: tuple[str, ...] | None) -> tuple[TierLink, ...]:
        return self._links if names is None else tuple(link for link in self._links if link.name in names)

    def _loadable(self, policy: OffloadPolicy, ctx: RequestContext) -> tuple[TierLink, ...]:
        links = self._chosen(policy.load_tiers) if policy.load else ()
        return links if ctx.load_tiers is None else tuple(link for link in links if link.name in ctx.load_tiers)


def _length(ends: Mapping[BlockKey, int], prompt_tokens: int | None) -> int:
    """Return the length of a prompt in tokens, as far as it is known."""
    return prompt_tokens if prompt_tokens is not None else max(ends.values(), default=0)
