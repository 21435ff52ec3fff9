"""Misses: blocks of prompts that are computed, by tier and cause, and the account of a single request."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from kvstore.bounded import BoundedDict
from kvstore.tiering.events import ALL_TIERS_NAME, PRIMARY_NAME
from kvstore.tiering.link import Reasons, TierLink
from kvstore.tiering.requests import ALL_TIERS, RequestState
from kvstore.types import BlockKey, MissCause

logger = logging.getLogger("kvstore.tiering")

_COMPUTED_MAX: Final = 1 << 16
"""Requests whose first computed block is remembered (some 10 MB)."""


class Misses:
    """Counts the blocks that requests looked for and compute nevertheless, once per request.

    A request's lookups end at its first miss, which decides about all blocks behind it. So these count as well, for
    each tier with the cause of its last miss.

    Args:
        links: The tiers.
        absent: Why blocks are not in the primary tier, if there are no tiers.
    """

    def __init__(self, links: Sequence[TierLink], absent: Reasons) -> None:
        self._links = links
        self._absent = absent
        self._names = {ALL_TIERS: ALL_TIERS_NAME} | {link.index: link.name for link in links}
        self._computed: BoundedDict[BlockKey, None] = BoundedDict(_COMPUTED_MAX)
        # Computed blocks, by name of the tier, then by cause.
        self.blocks: dict[str, dict[MissCause, int]] = {name: {} for name in self._names.values()}
        self.repeated = 0  # Requests whose first computed block an earlier request had computed.

    def count_served(self, state: RequestState, keys: Sequence[BlockKey]) -> None:
        """Count the blocks that a request loads."""
        served, sources, ends = state.served, state.sources, state.ends
        origins = [link.index for key in keys if (link := sources.get(key)) is not None] if sources else []
        for index, count in (*Counter(origins).items(), (ALL_TIERS, len(keys) - len(origins))):
            served[index] = served.get(index, 0) + count
        state.served_to = max(state.served_to, *[ends.get(key, 0) for key in keys], 0)

    def settle(self, state: RequestState) -> None:
        """Count the misses of a request that computes from now on; only the first call has an effect."""
        if state.computed is not None or not state.asked:
            return
        first = next(iter(state.asked))
        if state.ends:
            start, counted = max(state.served_to + 1, state.ends.get(first, 0)), state.counted
            blocks = [key for key, end in state.ends.items() if end >= start and key in counted]
            self._count(state, len(blocks), blocks[0] if blocks else None)
        else:
            self._count(state, max(0, len(state.asked) - sum(state.served.values())), first)

    def exclude(self, state: RequestState, blocks: int) -> None:
        """Count the blocks of an unproven request."""
        if state.computed is None:
            state.missed[ALL_TIERS] = MissCause.UNPROVEN
            self._count(state, blocks, None)

    def _count(self, state: RequestState, blocks: int, first: BlockKey | None) -> None:
        """Count the misses of a request, which computes ``blocks`` blocks."""
        state.computed, missed = blocks, state.missed
        if state.policy.load and ALL_TIERS not in missed:
            excluded = [link.index for link in self._links if link not in state.load_links]
            missed.update(dict.fromkeys(excluded, MissCause.POLICY))
            if not self._links:
                missed[ALL_TIERS] = MissCause.ABSENT if first is None else self._absent.get(first, MissCause.ABSENT)
        if blocks and first is not None:
            for link in self._links:
                if missed.get(link.index) is MissCause.ABSENT and (reason := link.unstored.get(first)):
                    missed[link.index] = reason
            self.repeated += first in self._computed
            self._computed[first] = None
        for index, cause in missed.items() if blocks else ():
            counts = self.blocks[self._names[index]]
            counts[cause] = counts.get(cause, 0) + blocks
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("Request %s: %s", state.ctx.request_id, account_of(state, self._links))


def account_of(state: RequestState, links: Sequence[TierLink]) -> dict[str, Any]:
    """Return where the blocks of a request came from, as JSON; see :meth:`TieringManager.account`."""
    tiers: dict[str, dict[str, Any]] = {}
    computed = state.computed or 0
    if served := state.served.get(ALL_TIERS):
        tiers[PRIMARY_NAME] = {"blocks": served}
    for link in links:
        tier: dict[str, Any] = {"blocks": state.served.get(link.index, 0)}
        if tier["blocks"] and link.index in state.load_times:
            began, ended = state.load_times[link.index]
            tier["seconds"] = round(ended - began, 6)
        if computed and (cause := state.missed.get(link.index)):
            tier["missed"] = cause.value
        tiers[link.name] = tier
    # The blocks of a request for which nothing is looked up may be unknown.
    blocks = max(len(state.counted), computed)
    account: dict[str, Any] = {"blocks": blocks, "computed": computed, "tiers": tiers}
    if computed and (cause := state.missed.get(ALL_TIERS)):
        account["missed"] = cause.value
    return account
