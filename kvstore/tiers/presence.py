"""Presence: which blocks a tier holds, as far as its scheduler half knows."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence

from kvstore.bounded import BoundedDict
from kvstore.types import BlockKey

__all__ = ["Known", "Presence"]

_ABSENT_MAX = 1 << 18
"""Negative answers remembered; a shared tier asked for more distinct keys than this within the TTL asks again."""


_SHARED_MAX = 1 << 20
"""Blocks of a shared tier remembered as held (about a quarter of a gigabyte): the medium may hold any number, and is
asked again for those that are forgotten. Of an exclusive tier all are kept: its capacity is their bound."""


class Known(enum.Enum):
    """What is known of a key without asking the medium."""

    PRESENT = "present"
    ABSENT = "absent"
    UNKNOWN = "unknown"


class Presence:
    """The keys that a tier holds, fed by notices of its I/O half.

    Of an exclusive tier the set is authoritative once recovery has ended: what is not in it is absent. Of a shared
    tier it is a cache: answers hold for their TTL, and what is not in it has to be asked for.

    Recovered keys are taken in a few at a time (:meth:`absorb`), as a million of them at once would hold up a step.
    """

    def __init__(
        self, *, exclusive: bool, positive_ttl_s: float, negative_ttl_s: float, shared_max: int = _SHARED_MAX
    ) -> None:
        self._exclusive = exclusive
        self._held_max = shared_max
        self._positive_ttl_s = positive_ttl_s
        self._negative_ttl_s = negative_ttl_s
        self._held: set[BlockKey] = set()
        self._held_until: dict[BlockKey, float] = {}
        self._absent_until: BoundedDict[BlockKey, float] = BoundedDict(_ABSENT_MAX)
        self._recovered: deque[Sequence[BlockKey]] = deque()
        self._gone_since_start: set[BlockKey] = set()
        self._scan_ended = False
        self.complete = False

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._held

    def keys(self) -> list[BlockKey]:
        """Return the keys that are known to be held."""
        return list(self._held)

    def known(self, key: BlockKey, now: float) -> Known:
        """Tell what is known of a key at ``now`` (monotonic seconds)."""
        if key in self._held:
            if self._exclusive or now < self._held_until.get(key, 0.0):
                return Known.PRESENT
            return Known.UNKNOWN
        if self.complete and self._exclusive:
            return Known.ABSENT
        until = self._absent_until.get(key)
        return Known.ABSENT if until is not None and now < until else Known.UNKNOWN

    def unknown_among(self, keys: Sequence[BlockKey], now: float) -> list[int]:
        """Return the places of those keys that are not known to be present."""
        held = self._held
        if self._exclusive:
            return [i for i, key in enumerate(keys) if key not in held]
        return [i for i, key in enumerate(keys) if self.known(key, now) is not Known.PRESENT]

    def add(self, keys: Sequence[BlockKey], now: float) -> None:
        """Note blocks that were put or found."""
        self._held.update(keys)
        if self._absent_until:
            for key in keys:
                self._absent_until.pop(key, None)
        if not self._exclusive:
            until = now + self._positive_ttl_s
            for key in keys:
                self._held_until.pop(key, None)  # So that the order of the dict is that of the answers.
                self._held_until[key] = until
            self._forget_oldest()

    def remove(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Note blocks that are gone; return those that were held."""
        gone = [key for key in keys if key in self._held]
        self._held.difference_update(gone)
        for key in gone:
            self._held_until.pop(key, None)
        if not self.complete:
            self._gone_since_start.update(keys)
        return gone

    def note_absent(self, keys: Sequence[BlockKey], now: float) -> list[BlockKey]:
        """Note that the medium was asked and does not hold blocks; return those that were held until now."""
        gone = self.remove(keys)
        until = now + self._negative_ttl_s
        for key in keys:
            self._absent_until[key] = until
        return gone

    def recover(self, keys: Sequence[BlockKey]) -> None:
        """Queue keys that the scan at start found."""
        self._recovered.append(keys)

    def end_recovery(self, *, authoritative: bool) -> None:
        """Note that the scan has ended; presence is complete when all that it found is absorbed.

        Args:
            authoritative: Whether it found all there is. If not, the medium is asked, as that of a shared tier is.
        """
        self._scan_ended = True
        self._exclusive = self._exclusive and authoritative

    def absorb(self, now: float) -> Sequence[BlockKey]:
        """Take in one batch of recovered keys; return it."""
        if self.complete:
            return ()
        batch: Sequence[BlockKey] = ()
        if self._recovered:
            found = self._recovered.popleft()
            # What was evicted after the scan saw it must not come back.
            batch = [key for key in found if key not in self._gone_since_start] if self._gone_since_start else found
            self.add(batch, now)
        if self._scan_ended and not self._recovered:
            self.complete = True
            self._gone_since_start.clear()
        return batch

    def _forget_oldest(self) -> None:
        """Keep a shared tier's answers bounded; nothing is said of blocks that are forgotten, only known."""
        while len(self._held_until) > self._held_max:
            oldest = next(iter(self._held_until))
            del self._held_until[oldest]
            self._held.discard(oldest)
