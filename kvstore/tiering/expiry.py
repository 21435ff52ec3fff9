"""Expiry and removal: forbidden blocks leave every tier."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from kvstore.bounded import BoundedDict
from kvstore.primary.tier import PrimaryTier
from kvstore.tiering.cascades import Cascades
from kvstore.tiering.deadlines import Deadlines
from kvstore.tiering.events import EventLog
from kvstore.tiering.forgetting import Forgetting
from kvstore.tiering.jobs import JobTable
from kvstore.tiering.link import TierLink
from kvstore.types import BlockKey, RemovalCause

__all__ = ["Expiry", "Lifetimes"]

_EXPIRED_PER_STEP = 1024

_BLOCKS_MAX = 1 << 18
"""Most blocks with a lifetime; beyond it the shortest lifetimes end early."""


class Expiry:
    """Tracks forbidden blocks and removes them from all tiers.

    Attributes:
        active: Whether any block has a lifetime or is forbidden; if not, no call is needed.
        forgetting: The tenants that are being forgotten.
        expired: Blocks whose lifetime has ended, so far.
    """

    def __init__(
        self,
        primary: PrimaryTier,
        links: Sequence[TierLink],
        cascades: Cascades,
        log: EventLog,
        clock: Callable[[], float],
        jobs: JobTable,
    ) -> None:
        self._primary = primary
        self._links = links
        self._cascades = cascades
        self._log = log
        self._clock = clock
        self._lifetimes = Lifetimes()
        self.forgetting = Forgetting(primary, jobs, links, partial(self._drop, cause=RemovalCause.REMOVED), clock)
        self.active = False
        self.expired = 0

    def forbids(self, key: BlockKey) -> bool:
        """Whether a block must not be used any more."""
        return self._lifetimes.expired(key, self._clock()) or (bool(self.forgetting) and self.forgetting.covers(key))

    def begin(self, keys: Sequence[BlockKey], ttl_s: float | None) -> None:
        """Set the lifetime of blocks stored now."""
        if self.active or ttl_s is not None:
            self._lifetimes.begin(keys, None if ttl_s is None else self._clock() + ttl_s)
            self.active = True

    def extend(self, keys: Sequence[BlockKey], ttl_s: float | None) -> None:
        """Extend the lifetime of blocks that a request uses; without ``ttl_s`` it becomes unlimited."""
        if self.active:
            self._lifetimes.extend(keys, None if ttl_s is None else self._clock() + ttl_s)

    def remove(self, keys: Sequence[BlockKey], cause: RemovalCause) -> None:
        """Remove blocks from every tier; they are forbidden until stored again."""
        self._lifetimes.condemn(keys)
        self.active = True
        self._drop(keys, cause)
        for link in self._links:
            link.remove(keys, cause)

    def forget_tenant(self, tag: bytes) -> None:
        """Remove all blocks of a tenant from every tier; until they are gone it finds and stores nothing."""
        self.forgetting.begin(tag)
        self.active = True

    def make_way(self, keys: Sequence[BlockKey]) -> None:
        """Drop forbidden blocks that pins kept in the primary tier: they are about to be stored again."""
        self._drop([key for key in keys if self.forbids(key)], RemovalCause.EXPIRED)

    def arrived(self, link: TierLink, keys: Sequence[BlockKey]) -> None:
        """Remove blocks that became forbidden while a tier stored them, from it and from the primary tier."""
        late = [key for key in keys if self.forbids(key)]
        if late:
            self._drop(late, RemovalCause.EXPIRED)
            link.remove(late, RemovalCause.EXPIRED)

    def sweep(self) -> None:
        """Remove a bounded number of expired blocks."""
        gone = self._lifetimes.take_expired(self._clock(), _EXPIRED_PER_STEP)
        if gone:
            self.expired += len(gone)
            self.remove(gone, RemovalCause.EXPIRED)
        if self.forgetting:
            self.forgetting.advance()
        self.active = bool(self._lifetimes or self.forgetting)

    def _drop(self, keys: Sequence[BlockKey], cause: RemovalCause) -> None:
        gone = [key for key in keys if self._primary.remove(key)]
        self._cascades.evicted(gone)
        self._log.primary(gone, cause)


class Lifetimes:
    """Ends of the lifetimes of blocks, on the owner's clock.

    An expired block stays forbidden until it is stored again, because a tier may hold it for a while.

    Args:
        blocks_max: Blocks remembered, expired ones included.
    """

    def __init__(self, blocks_max: int = _BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        self._ends = Deadlines()
        self._gone: BoundedDict[BlockKey, None] = BoundedDict(blocks_max)

    def __bool__(self) -> bool:
        return bool(self._ends or self._gone)

    def __len__(self) -> int:
        return len(self._ends) + len(self._gone)

    def begin(self, keys: Sequence[BlockKey], end: float | None) -> None:
        """Set the end of blocks stored now (None: unlimited)."""
        for key in keys:
            self._gone.pop(key, None)
            self._ends.remove(key)
            if end is not None:
                self._ends.set(key, end)

    def extend(self, keys: Sequence[BlockKey], end: float | None) -> None:
        """Extend the end of blocks (None: unlimited); the longest one counts."""
        for key in keys:
            if end is None:
                self._ends.remove(key)
            elif self._ends.get(key, math.inf) < end:
                self._ends.set(key, end)

    def condemn(self, keys: Sequence[BlockKey]) -> None:
        """Forbid blocks, with or without a lifetime."""
        for key in keys:
            self._ends.remove(key)
            self._gone[key] = None

    def expired(self, key: BlockKey, now: float) -> bool:
        """Whether a block must not be used any more."""
        return key in self._gone or self._ends.get(key, math.inf) <= now

    def take_expired(self, now: float, count_max: int) -> list[BlockKey]:
        """Return blocks whose lifetime has ended since the last call, at most ``count_max``."""
        taken = self._ends.take_due(now, count_max, keep=self._blocks_max)
        for key in taken:
            self._gone[key] = None
        return taken
