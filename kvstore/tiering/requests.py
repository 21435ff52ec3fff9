"""The requests that the manager knows, and the tiers that each may use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.tiering.link import TierLink
from kvstore.tiering.policy import OffloadPolicy, PolicyParser
from kvstore.tiering.request import RequestState
from kvstore.types import BlockKey, RequestContext

__all__ = ["Requests"]


class Requests:
    """Requests by id, from their first mention until nothing of them is under way.

    Args:
        links: The tiers, in order.
        parser: Reads their policies.
        tokens_per_block: Tokens of a block, where a request does not tell where its blocks end.

    Attributes:
        by_id: The requests.
        refusing: Requests that may load nothing.
    """

    def __init__(self, links: Sequence[TierLink], parser: PolicyParser, tokens_per_block: int) -> None:
        self._links = tuple(links)
        self._parser = parser
        self._tokens_per_block = tokens_per_block
        self.by_id: dict[str, RequestState] = {}
        self.refusing: set[str] = set()

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(list(self.by_id.values()))

    def begin(self, ctx: RequestContext) -> RequestState:
        """Note a request; if its id is known, it is begun anew, and what is under way for it goes on."""
        policy = self._parser.parse(ctx.params)
        state = RequestState(ctx, policy, self._chosen(policy.tiers), self._loadable(policy, ctx))
        before = self.by_id.get(ctx.request_id)
        if before is not None:
            state.open, state.loading = before.open, before.loading
            before.open, before.loading, before.finished = {}, {}, True
        self.by_id[ctx.request_id] = state
        if policy.load:
            self.refusing.discard(ctx.request_id)
        else:
            self.refusing.add(ctx.request_id)
        return state

    def locate(
        self, state: RequestState, keys: Sequence[BlockKey], ends: Sequence[int] | None, prompt_tokens: int | None
    ) -> None:
        """Note a request's blocks and where they end.

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
            length = prompt_tokens if prompt_tokens is not None else max(state.ends.values(), default=0)
            state.tokens_max = state.policy.tokens_max(length)

    def end(self, state: RequestState) -> bool:
        """Forget a request; return whether it was known (not forgotten before, nor begun anew since)."""
        if self.by_id.get(state.ctx.request_id) is not state:
            return False
        del self.by_id[state.ctx.request_id]
        self.refusing.discard(state.ctx.request_id)
        return True

    def _chosen(self, names: tuple[str, ...] | None) -> tuple[TierLink, ...]:
        return self._links if names is None else tuple(link for link in self._links if link.name in names)

    def _loadable(self, policy: OffloadPolicy, ctx: RequestContext) -> tuple[TierLink, ...]:
        links = self._chosen(policy.load_tiers) if policy.load else ()
        return links if ctx.load_tiers is None else tuple(link for link in links if link.name in ctx.load_tiers)
