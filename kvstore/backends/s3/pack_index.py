"""What lies in which pack, as far as this engine knows. Plain state, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.backends.s3.pack_format import PackEntry
from kvstore.bounded import BoundedDict
from kvstore.types import BlockKey

__all__ = ["PackIndex", "Place"]

_BLOCKS_MAX: Final = 1_000_000
"""Blocks it remembers, about 250 MB of memory; beyond it the oldest packs are forgotten: misses."""

_EMPTIED_MAX: Final = 10_000
"""Packs without blocks it remembers, so that they are not read again while they are still listed."""

_GONE_MAX: Final = 100_000
"""Removals it remembers of packs that it has not seen: clocks differ, so a note may come before its pack."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record lies: in which object, and where in it."""

    pack: str
    offset: int
    size_bytes: int

    def is_followed_by(self, other: Place) -> bool:
        """Tell whether another record begins where this one ends."""
        return (self.pack, self.offset + self.size_bytes) == (other.pack, other.offset)


class PackIndex:
    """Keys to places. Of a key that lies in several packs, the pack with the last name counts.

    ``blocks_max`` and ``emptied_max`` bound the blocks, and the packs of which nothing is left, that it remembers.
    """

    def __init__(self, blocks_max: int = _BLOCKS_MAX, emptied_max: int = _EMPTIED_MAX) -> None:
        self._blocks_max = blocks_max
        self._places: dict[BlockKey, Place] = {}
        self._packs: dict[str, dict[BlockKey, None]] = {}
        # Where else it lies, the last pack last: two engines may write a block at the same time.
        self._twins: dict[BlockKey, list[Place]] = {}
        self._emptied: BoundedDict[str, None] = BoundedDict(emptied_max)
        self._gone: BoundedDict[tuple[str, BlockKey], None] = BoundedDict(_GONE_MAX)
        self._entries = 0

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def knows(self, pack: str) -> bool:
        """Tell whether a pack was added already."""
        return pack in self._packs or pack in self._emptied

    def place(self, key: BlockKey) -> Place | None:
        """Return where a block lies."""
        return self._places.get(key)

    def packs_of(self, key: BlockKey) -> list[str]:
        """Return all packs that a block is known to lie in."""
        there = self._places.get(key)
        return [] if there is None else [there.pack, *(twin.pack for twin in reversed(self._twins.get(key, ())))]

    def add(self, pack: str, entries: Iterable[PackEntry]) -> None:
        """Take in a pack; what a note said is gone from it stays out."""
        if self.knows(pack):
            return
        keys = self._packs[pack] = {}
        for entry in entries:
            if self._gone.pop((pack, entry.key), entry) is None or entry.key in keys:
                continue
            keys[entry.key] = None
            place = Place(pack, entry.offset, entry.size_bytes)
            there = self._places.get(entry.key)
            if there is not None:
                self._twins.setdefault(entry.key, []).append(min(there, place, key=_pack_of))
                self._twins[entry.key].sort(key=_pack_of)
            if there is None or there.pack < pack:
                self._places[entry.key] = place
        self._entries += len(keys)
        if not keys:
            self._note_emptied(pack)
        while self._entries > self._blocks_max and len(self._packs) > 1:
            self.forget(next(iter(self._packs)))

    def remove(self, removed: Sequence[tuple[str, BlockKey]]) -> list[str]:
        """Take note that blocks are gone from packs; return the packs in which nothing is left.

        Such a pack stays known: it may be listed once more before it is deleted.
        """
        empty = []
        for pack, key in removed:
            keys = self._packs.get(pack)
            if keys is None:
                self._gone[pack, key] = None
                continue
            if key in keys:
                del keys[key]
                self._entries -= 1
                if not keys:
                    empty.append(pack)
                    self._note_emptied(pack)
            self._drop(pack, key)
        return empty

    def forget(self, pack: str) -> list[BlockKey]:
        """Drop a pack that is there no more; return the blocks that went with it, and lie in no other one."""
        keys = self._packs.pop(pack, {})
        self._entries -= len(keys)
        return [key for key in keys if self._drop(pack, key)]

    def _note_emptied(self, pack: str) -> None:
        del self._packs[pack]
        self._emptied[pack] = None

    def _drop(self, pack: str, key: BlockKey) -> bool:
        """Forget one of the packs of a block; True if it was the last one."""
        there = self._places.get(key)
        if there is None:
            return False
        twins = [twin for twin in self._twins.pop(key, ()) if twin.pack != pack]
        if there.pack == pack:
            if not twins:
                del self._places[key]
                return True
            self._places[key] = twins.pop()
        if twins:
            self._twins[key] = twins
        return False


def _pack_of(place: Place) -> str:
    return place.pack
