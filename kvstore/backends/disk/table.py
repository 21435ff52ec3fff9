"""A table from digests of keys to places: 16 bytes a row in two arrays, where a dict takes two hundred. No I/O.

Open addressing with linear probing; what is removed is closed up behind it, so that lookups stay as short as they were.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["NOWHERE", "DigestTable"]

NOWHERE: Final = -1
"""Place of what is not in a table."""

_ROWS_MIN: Final = 64
_LOAD_MAX: Final = 0.67
"""Fuller, a lookup of what is not there would look at dozens of rows."""


class DigestTable:
    """Places (0 and above) by 64-bit digest. Used from one thread.

    Args:
        expected: How many there will be about; more make it grow, which takes a moment.
    """

    def __init__(self, expected: int = 0) -> None:
        self._count = 0
        self._make(expected)

    def __len__(self) -> int:
        return self._count

    @property
    def size_bytes(self) -> int:
        """Memory that it takes when every page of it is used."""
        return 16 * self._rows

    def find(self, digest: int) -> int:
        """Return the place of a digest, or ``NOWHERE``."""
        places, digests = self._place_view, self._digest_view
        i = ((digest >> 32) * self._rows) >> 32
        while (place := places[i]) != NOWHERE:
            if digests[i] == digest:
                return place
            i = i + 1 if i + 1 < self._rows else 0
        return NOWHERE

    def set(self, digest: int, place: int) -> None:
        """Note a place, instead of the one that the digest had."""
        places, digests = self._place_view, self._digest_view
        i = ((digest >> 32) * self._rows) >> 32
        while places[i] != NOWHERE:
            if digests[i] == digest:
                places[i] = place
                return
            i = i + 1 if i + 1 < self._rows else 0
        digests[i], places[i] = digest, place
        self._count += 1
        if self._count > self._count_max:
            self._grow(2 * self._count)

    def remove(self, digest: int, place: int) -> bool:
        """Forget a digest if it has this place; return whether it had."""
        places, digests, rows = self._place_view, self._digest_view, self._rows
        i = ((digest >> 32) * rows) >> 32
        while digests[i] != digest or places[i] == NOWHERE:
            if places[i] == NOWHERE:
                return False
            i = i + 1 if i + 1 < rows else 0
        if places[i] != place:
            return False
        # Close up: whoever probes past this row to get where it lies moves into it, and leaves a hole in turn.
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

    def add_all(self, digests: npt.NDArray[np.uint64], places: npt.NDArray[np.int64]) -> None:
        """Note many places by whole arrays; a digest that has a place already keeps it."""
        if self._count + len(digests) > self._count_max:
            self._grow(2 * (self._count + len(digests)))
        at = self._homes(digests)
        while len(digests):
            taken = self._places[at] != NOWHERE
            free = np.flatnonzero(~taken)
            # Of several that want the same row the last one written has it; the others look again.
            self._digests[at[free]] = digests[free]
            self._places[at[free]] = places[free]
            settled = self._digests[at] == digests
            self._count += len(np.unique(at[free]))
            left = ~settled
            at, digests, places = (at[left] + 1) % self._rows, digests[left], places[left]

    def forget_places(self, first: int, end: int) -> int:
        """Forget all digests whose places lie in a range; return how many."""
        doomed = (self._places >= first) & (self._places < end)
        count = int(np.count_nonzero(doomed))
        if count:
            kept = (self._places != NOWHERE) & ~doomed
            digests, places = self._digests[kept], self._places[kept]
            self._make(max(len(digests), int(self._count_max)))
            self._count = 0
            self.add_all(digests, places)
        return count

    def _grow(self, expected: int) -> None:
        kept = self._places != NOWHERE
        digests, places = self._digests[kept], self._places[kept]
        self._make(expected)
        self._count = 0
        self.add_all(digests, places)

    def _make(self, expected: int) -> None:
        self._rows = max(_ROWS_MIN, int(expected / _LOAD_MAX) + 1)
        self._count_max = int(self._rows * _LOAD_MAX) + 1
        self._digests: npt.NDArray[np.uint64] = np.zeros(self._rows, np.uint64)
        self._places: npt.NDArray[np.int64] = np.full(self._rows, NOWHERE, np.int64)
        # Element by element a memoryview is three times as quick as an array.
        self._digest_view, self._place_view = self._digests.data, self._places.data

    def _homes(self, digests: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        return (((digests >> np.uint64(32)) * np.uint64(self._rows)) >> np.uint64(32)).astype(np.int64)
