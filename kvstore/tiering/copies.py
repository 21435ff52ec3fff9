"""The engine's copies between device and primary tier: which slots one may still touch after a reset."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from kvstore.primary.tier import PrimaryTier

__all__ = ["Copies", "CopyReports", "NoReports"]

logger = logging.getLogger("kvstore.tiering")

_WARN_AFTER_S = 30.0
"""Far longer than any copy of an engine that makes steps."""


class CopyReports(Protocol):
    """What the side that copies reports of itself, by lane: a number that each copy is given when it is prepared.

    Attributes:
        lanes: How many lanes there are, at least 1.
    """

    lanes: int

    def ended(self, lane: int, loads: int, stores: int) -> bool:
        """Tell whether so many loads and stores of a lane, all that were ever prepared in it, have provably ended."""
        ...


class NoReports:
    """Nothing is reported: only :meth:`Copies.all_ended` proves an end."""

    lanes = 1

    def ended(self, lane: int, loads: int, stores: int) -> bool:
        """Prove nothing."""
        return False


class Copies:
    """Keeps slots out of use that a copy from before a reset may still touch, until all such copies have ended.

    An engine may reset the cache while it copies, and what it has prepared it may copy much later (a store that is put
    off until the next step, or until the engine wakes up). A reset begins a new lane, so that the copies from before it
    can be counted apart from those after it: once as many have ended in the old lane as were prepared in it, nothing
    touches its slots any more.

    Args:
        primary: The primary tier.
        reports: What the side that copies reports.
        clock: Monotonic seconds.

    Attributes:
        lane: Lane of the copies that are prepared now.
    """

    def __init__(self, primary: PrimaryTier, reports: CopyReports, clock: Callable[[], float] = time.monotonic) -> None:
        self._primary = primary
        self._reports = reports
        self._clock = clock
        self._begun = [[0, 0] for _ in range(reports.lanes)]
        self._waiting: dict[int, set[int]] = {}
        """Slots that the copies of each lane may touch."""
        self._since = 0.0
        self._warned = False
        self.lane = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def begin(self, *, is_load: bool) -> None:
        """Note that a copy is prepared, in the lane of now."""
        self._begun[self.lane][is_load] += 1

    def leave_behind(self, slots: Iterable[int]) -> set[int]:
        """Note which slots the unfinished copies touch when a reset voids them.

        Returns:
            The slots, each once: they are to be ABANDONED, and are reclaimed when the copies have ended.
        """
        left = set(slots)
        if left:
            if not self._waiting:
                self._since, self._warned = self._clock(), False
            self._waiting.setdefault(self.lane, set()).update(left)
            # With no lane to spare the copies to come are counted with the old ones, whose end is proven later then.
            spare = (lane for lane in range(len(self._begun)) if lane not in self._waiting and self._ended(lane))
            self.lane = next(spare, self.lane)
        return left

    def reclaim(self) -> None:
        """Put slots back into use whose copies have ended according to the reports; cheap, once per step."""
        for lane in [lane for lane in self._waiting if self._ended(lane)]:
            self._put_back(lane)
        if self._waiting and not self._warned and self._clock() - self._since > _WARN_AFTER_S:
            self._warned = True
            logger.warning(
                "%d slots of the primary tier are out of use since a reset %.0f s ago: nothing proves that the copies "
                "to or from them have ended.",
                sum(map(len, self._waiting.values())),
                self._clock() - self._since,
            )

    def all_ended(self) -> None:
        """Note that every copy which was unfinished at a reset has ended, as the engine says."""
        for lane in list(self._waiting):
            self._put_back(lane)

    def _ended(self, lane: int) -> bool:
        stores, loads = self._begun[lane]
        return self._reports.ended(lane, loads, stores)

    def _put_back(self, lane: int) -> None:
        for slot in self._waiting.pop(lane):
            self._primary.reclaim(slot)
