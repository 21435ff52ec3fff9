"""A table from key digests to places: 16 bytes per row in two arrays; a dict takes two hundred. No I/O.

Open addressing with linear probing; a removal closes the gap, so that lookups stay short.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

NOWHERE: Final = -1
"""Place of a digest that is not in a table."""

_ROWS_MIN: Final = 64
_LOAD_MAX: Final = 0.5
"""In a fuller table, lookups of absent digests and removals would read many rows."""


class DigestTable:
    """Places (0 and above) by 64-bit digest, sized for ``expected`` entries; growing takes a moment.

    Attributes:
        rows: Number of rows, including empty ones.
    """

    def __init__(self, expected: int = 0) -> None:
        self._make(expected)

    def __len__(self) -> int:
        return self._count

    def find(self, digest: int) -> int:
        """Return the place of a digest, or ``NOWHERE``."""
        places, digests = self._place_view, self._digest_view
        i = ((digest >> 32) * self.rows) >> 32
        while (place := places[i]) != NOWHERE:
            if digests[i] == digest:
                return place
            i = i + 1 if i + 1 < self.rows else 0
        return NOWHERE

    def set(self, digest: int, place: int) -> None:
        """Set the place of a digest, replacing any earlier one."""
        places, digests = self._place_view, self._digest_view
        i = ((digest >> 32) * self.rows) >> 32
        while places[i] != NOWHERE:
            if digests[i] == digest:
                places[i] = place
                return
            i = i + 1 if i + 1 < self.rows else 0
        digests[i], places[i] = digest, place
        self._count += 1
        if self._count > self._count_max:
            self._grow(2 * self._count)

    def remove(self, digest: int, place: int) -> bool:
        """Remove a digest if it has this place; return whether it had."""
        places, digests, rows = self._place_view, self._digest_view, self.rows
        i = ((digest >> 32) * rows) >> 32
        while digests[i] != digest or places[i] == NOWHERE:
            if places[i] == NOWHERE:
                return False
            i = i + 1 if i + 1 < rows else 0
        if places[i] != place:
            return False
        # Each digest that was displaced past the gap moves into it, and leaves a new gap.
        hole = i
        while True:
            i = i + 1 if i + 1 < rows else 0
            if places[i] == NOWHERE:
                break
            home = ((digests[i] >> 32) * rows) >> 32
            if (i - home) % rows >= (i - hole) % rows:
                digests[hole], places[hole] = digests[i], places[i]
                hole = i
        places[hole] = NOWHERE
        self._count -= 1
        return True

    def add_all(self, digests: npt.NDArray[np.uint64], places: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Add many places at once; a digest already present keeps its place. Return which were added."""
        if self._count + len(digests) >= self._count_max:
            self._grow(2 * (self._count + len(digests)))
        rows = self._homes(digests)
        noted = np.zeros(len(digests), np.bool_)
        left = np.arange(len(digests))
        while len(left):
            # If several find the same empty row, the last assignment counts; reversed, that is the first of them.
            new = left[self._places[rows[left]] == NOWHERE][::-1]
            self._digests[rows[new]], self._places[rows[new]] = digests[new], places[new]
            noted[new] = self._places[rows[new]] == places[new]
            left = left[self._digests[rows[left]] != digests[left]]
            rows[left] = (rows[left] + 1) % self.rows
        self._count += int(noted.sum())
        return noted

    def find_all(self, digests: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return the places of many digests."""
        rows = self._homes(digests)
        places = np.full(len(digests), NOWHERE, np.int64)
        left = np.arange(len(digests))
        while len(left):
            found = self._places[rows[left]]
            same = self._digests[rows[left]] == digests[left]
            places[left[same]] = found[same]
            left = left[~same & (found != NOWHERE)]
            rows[left] = (rows[left] + 1) % self.rows
        return places

    def _homes(self, digests: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return the rows where digests are looked for first."""
        return (((digests >> np.uint64(32)) * np.uint64(self.rows)) >> np.uint64(32)).astype(np.int64)

    def _grow(self, expected: int) -> None:
        kept = np.flatnonzero(self._places != NOWHERE)
        digests, places = self._digests[kept], self._places[kept]
        self._make(expected)
        self.add_all(digests, places)

    def _make(self, expected: int) -> None:
        self._count = 0
        self.rows = max(_ROWS_MIN, int(expected / _LOAD_MAX) + 1)
        self._count_max = int(self.rows * _LOAD_MAX) + 1
        self._digests: npt.NDArray[np.uint64] = np.zeros(self.rows, np.uint64)
        self._places: npt.NDArray[np.int64] = np.full(self.rows, NOWHERE, np.int64)
        # Access to single elements is three times as fast through a memoryview as through an array.
        self._digest_view, self._place_view = self._digests.data, self._places.data
