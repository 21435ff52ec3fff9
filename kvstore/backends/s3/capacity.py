"""Which objects leave in a round of housekeeping: those over the capacity, the expired ones, old notes. No I/O."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.backends.s3.client import ObjectInfo
from kvstore.backends.s3.names import ObjectName
from kvstore.backends.s3.uses import name_digest
from kvstore.types import RemovalCause

__all__ = ["EvictionPlan", "OldNotes", "Victim"]

_LOW_WATERMARK: Final = 0.9
"""Evictions end here: far enough below the capacity that they need not begin again at the next round."""

_VICTIMS_MAX: Final = 100_000
"""Objects that leave in one round, about 30 MB of memory; a round later it goes on."""

_NOTES_MAX: Final = 100_000
"""Notes that are found in one round, about 15 MB of memory; a round later it goes on."""

_SKEW_S: Final = 3600.0
"""A note speaks of packs that were there when it was made, but the clocks of the engines that named them may differ: by
much less than this."""


@dataclass(frozen=True, slots=True)
class Victim:
    """An object that has to leave, evicted for space or expired."""

    name: str
    size_bytes: int
    cause: RemovalCause


class EvictionPlan:
    """Sees every object of a prefix once, and names those that are too old, and the coldest when it is too full.

    Cold is what was neither written nor used for long.

    Args:
        capacity_bytes: Most bytes they may have; 0 for any number.
        used_at: When objects were used last, by digest of their name.
        expire_before: What was neither written nor used since this moment leaves in any case.
        victims_max: Most objects to name.
    """

    def __init__(
        self,
        capacity_bytes: int,
        used_at: Mapping[int, int],
        *,
        expire_before: float = 0.0,
        victims_max: int = _VICTIMS_MAX,
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._used_at = used_at
        self._expire_before = expire_before
        self._victims_max = victims_max
        # The coldest so far, the warmest of them on top: memory stays bounded however many there are.
        self._coldest: list[tuple[float, str, int]] = []
        self.objects = 0
        self.used_bytes = 0

    def see(self, info: ObjectInfo, name: ObjectName | None) -> None:
        """Take note of an object, and of what its name says.

        Objects between engines, which have a few bytes, do not leave; nor does what others keep under the prefix, be it
        a tier with a longer one.
        """
        self.objects += 1
        self.used_bytes += info.size_bytes
        if not (self._capacity_bytes or self._expire_before) or name is None or name.kind == "note":
            return
        # Objects of unknown age never expire, and leave last for space.
        last = max(info.modified_at, float(self._used_at.get(name_digest(info.key), 0))) or math.inf
        entry = (-last, info.key, info.size_bytes)
        if len(self._coldest) < self._victims_max:
            heapq.heappush(self._coldest, entry)
        elif entry > self._coldest[0]:
            heapq.heapreplace(self._coldest, entry)

    def victims(self) -> list[Victim]:
        """Return the objects that have to leave, the coldest first."""
        excess = 0
        if 0 < self._capacity_bytes < self.used_bytes:
            excess = self.used_bytes - int(self._capacity_bytes * _LOW_WATERMARK)
        found = []
        for coldness, name, size in sorted(self._coldest, key=lambda entry: (-entry[0], entry[1])):
            expired = -coldness < self._expire_before
            if excess <= 0 and not expired:
                break
            found.append(Victim(name, size, RemovalCause.EXPIRED if expired else RemovalCause.EVICTED))
            excess -= size
        return found


class OldNotes:
    """Sees every object of a prefix once, in the order of names, and finds notes that are older than all packs.

    Names of packs and notes begin with their time, so the notes of a namespace that come before its first pack speak of
    packs that are gone. Notes that were written after ``written_before``, in seconds since the epoch, stay.
    """

    def __init__(self, written_before: float) -> None:
        self._written_before = written_before
        self._namespace = ""
        self._found: list[str] = []
        # Of the namespace that is being listed: name and time, until its first pack is seen.
        self._waiting: list[tuple[str, float]] | None = []

    def see(self, info: ObjectInfo, name: ObjectName | None) -> None:
        """Take note of an object, and of what its name says."""
        if name is None or name.kind == "block":
            return
        if name.namespace != self._namespace:
            self._take(math.inf)
            self._namespace, self._waiting = name.namespace, []
        if self._waiting is None:
            return
        if name.kind == "pack":
            self._take(name.made_at)
            self._waiting = None
        elif 0 < info.modified_at < self._written_before and len(self._found) + len(self._waiting) < _NOTES_MAX:
            self._waiting.append((info.key, name.made_at))

    def names(self) -> Sequence[str]:
        """Return the names of the notes; the list of objects has come to its end."""
        self._take(math.inf)
        self._waiting = None
        return self._found

    def _take(self, first_pack_at: float) -> None:
        self._found += [name for name, made_at in self._waiting or () if made_at + _SKEW_S < first_pack_at]
