"""Pins: blocks that requests hold in the primary tier, each for a lease, within a share of the tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from kvstore.primary.tier import PrimaryTier, SlotState
from kvstore.tiering.deadlines import Deadlines
from kvstore.types import BlockKey

_SLACK: Final = 64
"""Leases of removed blocks tolerated before a cleanup."""


class Pins:
    """Protects blocks from eviction until their leases end. A use renews a lease.

    The blocks of one call belong to one tenant. A block held only for other engines is released as soon as each of
    them has fetched it.

    Args:
        primary: The primary tier.
        blocks_max: Maximum blocks that may be held; see :meth:`PrimaryTier.may_hold` for the limit of a tenant.
        lease_s_max: Longest lease, and the default.
        clock: Monotonic seconds.
    """

    def __init__(self, primary: PrimaryTier, blocks_max: int, lease_s_max: float, clock: Callable[[], float]) -> None:
        self._primary = primary
        self._blocks_max = blocks_max
        self._lease_s_max = lease_s_max
        self._clock = clock
        self._ends: Deadlines[BlockKey] = Deadlines()
        self._lengths: dict[BlockKey, float] = {}
        """Length of each lease, in seconds."""
        self._fetches: dict[BlockKey, int] = {}
        """Outstanding fetches of each block held only for fetches."""
        self.refused_blocks = 0  # Blocks not held because the share was used up.

    def __bool__(self) -> bool:
        return bool(self._lengths)

    def hold(self, keys: Iterable[BlockKey], lease_s: float | None) -> None:
        """Hold the READY blocks among ``keys``; None: for the longest lease."""
        for key in self._hold(keys, lease_s):
            self._fetches.pop(key, None)

    def hold_for_fetch(self, keys: Iterable[BlockKey], lease_s: float) -> None:
        """Hold the READY blocks among ``keys`` until an engine has fetched them; each call adds one engine."""
        keys = tuple(keys)
        free = {key for key in keys if key not in self._primary.marks.held}
        for key in self._hold(keys, lease_s):
            if key in free:
                self._fetches[key] = 1
            elif key in self._fetches:
                self._fetches[key] += 1

    def fetched(self, keys: Iterable[BlockKey]) -> None:
        """Note that another engine has fetched blocks."""
        for key in keys:
            due = self._fetches.get(key, 0)
            if due > 1:
                self._fetches[key] = due - 1
            elif due:
                self.release((key,))

    def _hold(self, keys: Iterable[BlockKey], lease_s: float | None) -> list[BlockKey]:
        self.sweep()
        keys = tuple(keys)
        held: list[BlockKey] = []
        room = self._primary.may_hold(keys[0], self._blocks_max) if keys else 0
        length = self._lease_s_max if lease_s is None else min(lease_s, self._lease_s_max)
        end = self._clock() + length
        for key in keys:
            if self._primary.lookup(key) is not SlotState.READY:
                continue
            if key not in self._primary.marks.held:
                if not room:
                    self.refused_blocks += 1
                    continue
                room -= 1
                self._primary.hold(key)
            held.append(key)
            self._ends.set(key, max(end, self._ends.get(key, end)))
            self._lengths[key] = max(length, self._lengths.get(key, length))
        return held

    def use(self, keys: Iterable[BlockKey]) -> None:
        """Renew the leases of held blocks."""
        now = self._clock()
        for key in keys:
            length = self._lengths.get(key)
            if length is not None:
                self._ends.set(key, max(self._ends.get(key, now), now + length))

    def unpin(self, keys: Iterable[BlockKey]) -> None:
        """End leases, except of blocks held only for other engines."""
        self.release([key for key in keys if key not in self._fetches])

    def release(self, keys: Iterable[BlockKey]) -> None:
        """End leases."""
        for key in keys:
            self._ends.remove(key)
            self._lengths.pop(key, None)
            self._fetches.pop(key, None)
            self._primary.release(key)

    def sweep(self) -> None:
        """Release the blocks whose leases have ended."""
        self.release(self._ends.take_due(self._clock()))
        if len(self._lengths) > 2 * len(self._primary.marks.held) + _SLACK:
            self.release([key for key in self._lengths if key not in self._primary.marks.held])

    def clear(self) -> None:
        """Drop all state, because the primary tier is cleared."""
        self._ends.clear()
        self._lengths.clear()
        self._fetches.clear()
