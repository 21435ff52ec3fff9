"""Expiry and removal: blocks that must not be used any more leave every tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.primary.tier import PrimaryTier
from kvstore.tiering.cascades import Cascades
from kvstore.tiering.events import EventLog
from kvstore.tiering.lifetimes import Lifetimes
from kvstore.tiering.link import TierLink
from kvstore.types import BlockKey, RemovalCause

__all__ = ["Expiry"]

_EXPIRED_PER_STEP = 1024


class Expiry:
    """Knows which blocks are forbidden, and takes them out of the primary tier and the others.

    Attributes:
        active: Whether any block has a lifetime or is forbidden: without, nobody need ask.
        expired: Blocks whose lifetime ended, so far.
    """

    def __init__(
        self,
        primary: PrimaryTier,
        links: Sequence[TierLink],
        cascades: Cascades,
        log: EventLog,
        clock: Callable[[], float],
    ) -> None:
        self._primary = primary
        self._links = links
        self._cascades = cascades
        self._log = log
        self._clock = clock
        self._lifetimes = Lifetimes()
        self.active = False
        self.expired = 0

    def forbids(self, key: BlockKey) -> bool:
        """Tell whether a block must not be used any more."""
        return self._lifetimes.expired(key, self._clock())

    def begin(self, keys: Sequence[BlockKey], ttl_s: float | None) -> None:
        """Note blocks that are stored now, to live that long."""
        if self.active or ttl_s is not None:
            self._lifetimes.begin(keys, None if ttl_s is None else self._clock() + ttl_s)
            self.active = True

    def extend(self, keys: Sequence[BlockKey], ttl_s: float | None) -> None:
        """Note that a request wants stored blocks to live that long from now."""
        if self.active:
            self._lifetimes.extend(keys, None if ttl_s is None else self._clock() + ttl_s)

    def remove(self, keys: Sequence[BlockKey], cause: RemovalCause) -> None:
        """Take blocks out of every tier; they are forbidden until they are stored anew."""
        self._lifetimes.condemn(keys)
        self.active = True
        self._drop(keys, cause)
        for link in self._links:
            link.remove(keys, cause)

    def make_way(self, keys: Sequence[BlockKey]) -> None:
        """Drop forbidden blocks that stayed in the primary tier because of their pins: they are to be stored anew."""
        self._drop([key for key in keys if self.forbids(key)], RemovalCause.EXPIRED)

    def arrived(self, link: TierLink, keys: Sequence[BlockKey]) -> None:
        """Take blocks out of a tier again that it stored while they became forbidden."""
        late = [key for key in keys if self.forbids(key)]
        if late:
            link.remove(late, RemovalCause.EXPIRED)

    def sweep(self) -> None:
        """Remove blocks whose lifetime has ended; a bounded number of them."""
        gone = self._lifetimes.take_expired(self._clock(), _EXPIRED_PER_STEP)
        if gone:
            self.expired += len(gone)
            self.remove(gone, RemovalCause.EXPIRED)
        self.active = bool(self._lifetimes)

    def _drop(self, keys: Sequence[BlockKey], cause: RemovalCause) -> None:
        gone = [key for key in keys if self._primary.remove(key)]
        self._cascades.evicted(gone)
        self._log.primary(gone, cause)
