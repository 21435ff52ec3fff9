"""The free slots of several slabs: taken in runs, so that what is stored together lies together. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["SLAB_SHIFT", "FreeSlots", "SlotId"]

SlotId: TypeAlias = int
"""Number of the slab, shifted by ``SLAB_SHIFT``, plus the number of the slot in it."""

SLAB_SHIFT: Final = 32


class FreeSlots:
    """Slots that hold nothing. Freed ones are used again before fresh ones.

    Args:
        slabs: How many slabs there are.
    """

    def __init__(self, slabs: int) -> None:
        self._freed: list[list[SlotId]] = [[] for _ in range(slabs)]
        self._fresh: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64) for _ in range(slabs)]
        self._turn = 0

    def __len__(self) -> int:
        return sum(map(len, self._freed)) + sum(map(len, self._fresh))

    def add_fresh(self, slab: int, slots: npt.NDArray[np.int64]) -> None:
        """Add slots of a slab, last first; they are taken from the end."""
        self._fresh[slab] = np.concatenate([self._fresh[slab], slots + (slab << SLAB_SHIFT)])

    def add(self, slot: SlotId) -> None:
        """Add one slot."""
        self._freed[slot >> SLAB_SHIFT].append(slot)

    def take(self, count: int) -> list[SlotId]:
        """Take slots, spread evenly over the slabs while these have some; fewer if there are not so many."""
        slabs = len(self._freed)
        taken: list[SlotId] = []
        share = -(-count // slabs)
        # Twice around: the first round spreads, the second takes what is missing wherever it is.
        for limit in (share, count):
            for i in range(slabs):
                slab = (self._turn + i) % slabs
                taken += self._take_from(slab, min(limit, count - len(taken)))
        self._turn = (self._turn + 1) % slabs
        return taken

    def _take_from(self, slab: int, count: int) -> Sequence[SlotId]:
        if count <= 0:
            return ()
        freed = self._freed[slab]
        taken = freed[-count:]
        del freed[len(freed) - len(taken) :]
        # Slots that were freed together were mostly stored together: in ascending order they are one run again.
        taken.sort()
        fresh = self._fresh[slab]
        if len(taken) < count and len(fresh):
            more = fresh[-(count - len(taken)) :][::-1].tolist()
            self._fresh[slab] = fresh[: len(fresh) - len(more)]
            taken += more
        return taken
