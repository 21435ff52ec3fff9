"""Which objects leave when a prefix holds more bytes than it may: decisions, no I/O."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvstore.backends.s3.client import ObjectInfo
from kvstore.backends.s3.keys import ObjectName
from kvstore.backends.s3.uses import name_digest
from kvstore.types import RemovalCause

__all__ = ["EvictionPlan", "Victim"]

_LOW_WATERMARK: Final = 0.9
"""Evictions end here: far enough below the capacity that they need not begin again at the next round."""

_VICTIMS_MAX: Final = 100_000
"""Objects that leave in one round, about 30 MB of memory; a round later it goes on."""


@dataclass(frozen=True, slots=True)
class Victim:
    """An object that has to leave.

    Attributes:
        name: Of the object.
        size_bytes: Its length.
        cause: Evicted for space, or expired.
    """

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
        # The coldest so far, the warmest of them on top; so that memory stays bounded however many there are.
        self._coldest: list[tuple[float, str, int]] = []
        self.objects = 0
        self.used_bytes = 0

    def see(self, info: ObjectInfo, name: ObjectName | None) -> None:
        """Take note of an object, and of what its name says.

        What engines tell each other, which is a few bytes, does not leave; nor does what others keep under the prefix,
        be it a tier with a longer one: a capacity or time to live of ours says nothing of that.
        """
        self.objects += 1
        self.used_bytes += info.size_bytes
        if not (self._capacity_bytes or self._expire_before) or name is None or name.kind == "note":
            return
        # Of what nobody knows the age nothing expires, and for space it leaves last.
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
