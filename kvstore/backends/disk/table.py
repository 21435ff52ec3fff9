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
_LOAD_MAX: Final = 0.5
"""Fuller, a lookup of what is not there would look at many rows, and forgetting one at more."""


class DigestTable:
    """Places (0 and above) by 64-bit digest. Used from one thread.

    Args:
        expected: How many there will be about; more make it grow, which takes a moment.
    """

    _rows: int

    def __init__(self, expected: int = 0) -> None:
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
        if not len(digests):
            return
        kept = np.flatnonzero(self._places != NOWHERE)
        self._build(np.concatenate([self._digests[kept], digests]), np.concatenate([self._places[kept], places]))

    def _grow(self, expected: int) -> None:
        kept = np.flatnonzero(self._places != NOWHERE)
        digests, places = self._digests[kept], self._places[kept]
        self._make(expected)
        self._build(digests, places)

    def _build(self, digests: npt.NDArray[np.uint64], places: npt.NDArray[np.int64]) -> None:
        """Fill the table anew; of equal digests the first counts."""
        # A row's home rises with the digest, so that in this order each lies at home or behind the one before.
        order = np.argsort(digests, kind="stable")
        digests, places = digests[order], places[order]
        first = np.concatenate([[True], digests[1:] != digests[:-1]])
        digests, places = digests[first], places[first]
        self._make(max(self._expected, len(digests)))
        steps = np.arange(len(digests))
        homes = (((digests >> np.uint64(32)) * np.uint64(self._rows)) >> np.uint64(32)).astype(np.int64)
        rows = np.maximum.accumulate(homes - steps) + steps
        fits = int(np.searchsorted(rows, self._rows))
        self._digests[rows[:fits]], self._places[rows[:fits]] = digests[:fits], places[:fits]
        self._count = fits
        # What is pushed over the end goes on at the beginning.
        for digest, place in zip(digests[fits:].tolist(), places[fits:].tolist(), strict=True):
            self.set(digest, place)

    def _make(self, expected: int) -> None:
        self._expected = expected
        self._count = 0
        self._rows = max(_ROWS_MIN, int(expected / _LOAD_MAX) + 1)
        self._count_max = int(self._rows * _LOAD_MAX) + 1
        self._digests: npt.NDArray[np.uint64] = np.zeros(self._rows, np.uint64)
        self._places: npt.NDArray[np.int64] = np.full(self._rows, NOWHERE, np.int64)
        # Element by element a memoryview is three times as quick as an array.
        self._digest_view, self._place_view = self._digests.data, self._places.data
