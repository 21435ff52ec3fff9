"""The engine's copies between device and primary tier, and the slots they may still access after a reset."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from kvstore.primary.tier import PrimaryTier
from kvstore.tiering.core import Part

logger = logging.getLogger("kvstore.tiering")

_WARN_AFTER_S = 30.0
"""Far longer than any copy takes while the engine makes steps."""


class CopyReports(Protocol):
    """Reports of the copying side, by lane. Each copy is assigned a lane number when it is prepared."""

    lanes: int  # Number of lanes, at least 1.

    def ended(self, lane: int, loads: int, stores: int) -> bool:
        """Return whether all copies of a lane have provably ended, given how many were ever prepared in it."""


class Copies(Part):
    """Keeps slots out of use while a copy from before a reset may still access them.

    An engine may reset the cache while it copies, and may execute a prepared copy much later (a store deferred to the
    next step, or until the engine wakes up). A reset begins a new lane, so that copies from before and after it are
    counted separately. Once the copies ended in the old lane equal the copies prepared in it, no copy accesses its
    slots any more.

    ``reports``: reports of the copying side; None: only :meth:`all_ended` proves the end of copies.
    """

    def __init__(
        self, primary: PrimaryTier, reports: CopyReports | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._primary = primary
        self._reports = reports
        self._clock = clock
        self._begun = [[0, 0] for _ in range(1 if reports is None else reports.lanes)]
        self._waiting: dict[int, set[int]] = {}
        """Slots that the copies of each lane may access."""
        self._since = 0.0
        self._warned = False
        self.lane = 0  # Lane for new copies.

    def begin(self, *, is_load: bool) -> None:
        """Count a prepared copy in the current lane."""
        self._begun[self.lane][is_load] += 1

    def leave_behind(self, slots: Iterable[int]) -> set[int]:
        """Record the slots of unfinished copies that a reset voids.

        Returns:
            The slots, each once. The caller marks them ABANDONED; they are reclaimed when the copies have ended.
        """
        left = set(slots)
        if left:
            if not self._waiting:
                self._since, self._warned = self._clock(), False
            self._waiting.setdefault(self.lane, set()).update(left)
            self.active = True
            # Without a spare lane, new copies count in the current one, which delays the proof for the old ones.
            spare = (lane for lane in range(len(self._begun)) if lane not in self._waiting and self._ended(lane))
            self.lane = next(spare, self.lane)
        return left

    def step(self) -> bool:
        """Reclaim the slots whose copies have ended according to the reports."""
        for lane in [lane for lane in self._waiting if self._ended(lane)]:
            self._reclaim_lane(lane)
        if self._waiting and not self._warned and self._clock() - self._since > _WARN_AFTER_S:
            self._warned = True
            logger.warning(
                "%d slots of the primary tier are out of use since a reset %.0f s ago: nothing proves that the copies "
                "to or from them have ended.",
                sum(map(len, self._waiting.values())),
                self._clock() - self._since,
            )
        return bool(self._waiting)

    def all_ended(self) -> None:
        """Reclaim all slots: the engine guarantees that every copy unfinished at a reset has ended."""
        for lane in list(self._waiting):
            self._reclaim_lane(lane)

    def _ended(self, lane: int) -> bool:
        stores, loads = self._begun[lane]
        return self._reports is not None and self._reports.ended(lane, loads, stores)

    def _reclaim_lane(self, lane: int) -> None:
        for slot in self._waiting.pop(lane):
            self._primary.reclaim(slot)
