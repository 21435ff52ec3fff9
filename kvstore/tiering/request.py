"""What the manager knows of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstore.tiering.link import TierLink
from kvstore.tiering.policy import OffloadPolicy
from kvstore.types import BlockKey, RequestContext

__all__ = ["RequestState"]


class RequestState:
    """A request from its first mention until nothing of it is under way.

    Attributes:
        ctx: The request.
        policy: Its offload policy.
        store_links: The tiers that it may store to.
        load_links: The tiers that it may load from, in order.
        keys: Its blocks in prefix order, as far as known.
        ends: End of each block in tokens from the start, where known.
        tokens_max: Only blocks that end here or before may be stored; None for all.
        open: Blocks that the engine is filling for it, with their slots, in prefix order.
        loading: Blocks that the engine is reading for it, with how often.
        claims: Blocks promoted for it that it has not loaded yet; each has a pin.
        promoting: Blocks whose promotion for it has not ended.
        failed: Blocks whose load failed for it, with the tiers (bits) that failed.
        sources: Blocks promoted for it, with the tier that each came from.
        asked: Blocks that it looked up, with the tiers (bits) whose answer was counted.
        retried: Blocks and tiers (bits) that answered RETRY so far, with when they did first.
        cut: Tiers (bits) that a block of it was not stored to for want of room, with that block's end (-1: unknown).
        seen: Blocks that count as seen by it.
        wait_until: Until when it may be asked to wait for a tier's answer or for room.
        prefetched: Blocks of ``keys`` that prefetch has asked for.
        finished: Whether the engine has ended it.
    """

    __slots__ = (
        "asked",
        "claims",
        "ctx",
        "cut",
        "ends",
        "failed",
        "finished",
        "keys",
        "load_links",
        "loading",
        "open",
        "policy",
        "prefetched",
        "promoting",
        "retried",
        "seen",
        "sources",
        "store_links",
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
        self.seen: set[BlockKey] = set()
        self.wait_until: float | None = None
        self.prefetched = 0
        self.finished = False

    @property
    def idle(self) -> bool:
        """Whether nothing of it is under way."""
        return not (self.open or self.loading or self.promoting)

    def may_store(self, key: BlockKey) -> bool:
        """Tell whether its policy lets a block be stored, by its position; unknown positions lie after the prompt."""
        return self.tokens_max is None or self.ends.get(key, self.tokens_max + 1) <= self.tokens_max

    def is_cut(self, key: BlockKey, bit: int) -> bool:
        """Tell whether a block lies behind one that did not get into a tier, where nobody would find it."""
        end = self.cut.get(bit)
        return end is not None and self.ends.get(key, end + 1) > end

    def note_cut(self, key: BlockKey, bit: int) -> None:
        """Note that a block did not get into a tier."""
        end = self.ends.get(key, -1)
        self.cut[bit] = min(end, self.cut.get(bit, end))

    def void(self) -> None:
        """Forget what was under way, as the primary tier was cleared."""
        self.open.clear()
        self.loading.clear()
        self.claims.clear()
        self.promoting = 0
        self.cut.clear()
        self.sources.clear()
