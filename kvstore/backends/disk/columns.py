"""What lies in each slot of an owner, as whole arrays: 53 bytes a slot with keys as vLLM has them. No I/O."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.backends.disk.layout import Kind
from kvstore.types import BlockKey

__all__ = ["OUT_OF_USE", "Columns"]

OUT_OF_USE: Final = 0xFFFFFFFF
"""Size of what lies in a slot that is never written again."""

_KEY_BYTES_MIN: Final = 36
"""Width of the key column to begin with: what vLLM's keys have."""


class Columns:
    """Size, key, digest and last use by slot; ``size`` is 0 where a slot is free.

    Args:
        segment_slots: Slots of each segment.
        segments: How many segments to make room for at once; more can come.
        width: Width of the key column to begin with.

    Attributes:
        segments: Number of each segment's path plus one; 0 where there is none.
    """

    def __init__(self, segment_slots: int, segments: int = 0, width: int = _KEY_BYTES_MIN) -> None:
        self.segment_slots = segment_slots
        self.segments = np.zeros(segments, np.uint8)
        self.width = width
        slots = segments * segment_slots
        self.size = np.zeros(slots, np.uint32)
        self.used = np.zeros(slots, np.uint32)
        self.digest = np.zeros(slots, np.uint64)
        self.key_length = np.zeros(slots, np.uint8)
        self.keys = np.zeros((slots, self.width), np.uint8)
        self._bind()

    def shallow(self) -> Columns:
        """Return another name for the same arrays, which goes on meaning these when this one gets larger ones."""
        return copy.copy(self)

    def key(self, slot: int) -> BlockKey:
        """Return the key of the record in a slot."""
        start = slot * self.width
        return bytes(self._key_view[start : start + self._length_view[slot]])

    def holds(self, slot: int, key: BlockKey) -> bool:
        """Tell whether a slot holds the record of a key."""
        start = slot * self.width
        return self._length_view[slot] == len(key) and self._key_view[start : start + len(key)] == key

    def size_bytes(self, slot: int) -> int:
        """Return the length of the record in a slot."""
        return self._size_view[slot]

    def digest_at(self, slot: int) -> int:
        """Return the digest of the key in a slot, or of the one that was there last."""
        return self._digest_view[slot]

    def used_at(self, slot: int) -> int:
        """Return the tick of the last use of a slot."""
        return self._used_view[slot]

    def use(self, slot: int, tick: int) -> None:
        """Note a use."""
        self._used_view[slot] = tick

    def set(self, slot: int, size_bytes: int, digest: int, key: BlockKey, tick: int) -> None:
        """Note that a slot holds a record."""
        if len(key) > self.width:
            self._widen(len(key))
        start = slot * self.width
        self._key_view[start : start + len(key)] = key
        self._length_view[slot] = len(key)
        self._digest_view[slot], self._used_view[slot] = digest, tick
        self._size_view[slot] = size_bytes

    def clear(self, slot: int, size_bytes: int = 0) -> None:
        """Note that a slot holds nothing, or is out of use."""
        self._size_view[slot] = size_bytes

    def held(self) -> npt.NDArray[np.int64]:
        """Return the slots that hold records."""
        return np.flatnonzero((self.size != 0) & (self.size != OUT_OF_USE))

    def free_slots(self, segment: int) -> npt.NDArray[np.int64]:
        """Return the free slots of a segment, last first."""
        start = segment * self.segment_slots
        return start + np.flatnonzero(self.size[start : start + self.segment_slots] == 0)[::-1]

    def keys_in(self, slots: npt.NDArray[np.int64]) -> list[BlockKey]:
        """Return the keys in slots."""
        lengths = self.key_length[slots]
        rows: list[bytes] = np.ascontiguousarray(self.keys[slots]).view(f"V{self.width}").ravel().tolist()
        if len(rows) and not (lengths == self.width).all():
            rows = [key[:length] for key, length in zip(rows, lengths.tolist(), strict=True)]
        return rows

    def open_segment(self, segment: int, path: int) -> None:
        """Note a segment, with all of its slots free."""
        self.reserve(segment + 1)
        self.segments[segment] = path + 1
        self._clear_segment(segment)

    def drop_segment(self, segment: int) -> None:
        """Note that a segment is gone, with all that was in it."""
        if segment < len(self.segments):
            self.segments[segment] = 0
            self._clear_segment(segment)

    def reserve(self, segments: int) -> None:
        """Make room for so many segments."""
        more = segments - len(self.segments)
        if more <= 0:
            return
        slots = more * self.segment_slots
        self.segments = np.concatenate([self.segments, np.zeros(more, np.uint8)])
        for name in ("size", "used", "digest", "key_length"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(slots, old.dtype)]))
        self.keys = np.concatenate([self.keys, np.zeros((slots, self.width), np.uint8)])
        self._bind()

    def apply(self, records: npt.NDArray[Any], ticks: npt.NDArray[np.uint32]) -> None:
        """Do what journal records say, in their order; what is said of segments that are not there is left out."""
        kinds = records["kind"]
        start = 0
        for at in [*np.flatnonzero(kinds >= Kind.SEGMENT).tolist(), len(records)]:
            self._apply_slots(records[start:at], ticks[start:at])
            if at < len(records):
                segment = int(records["slot"][at]) // self.segment_slots
                if kinds[at] == Kind.SEGMENT:
                    self.open_segment(segment, int(records["size"][at]))
                elif kinds[at] == Kind.DROP:
                    self.drop_segment(segment)
            start = at + 1

    def _apply_slots(self, records: npt.NDArray[Any], ticks: npt.NDArray[np.uint32]) -> None:
        known = records["slot"] < len(self.size)
        records, ticks = records[known], ticks[known]
        if not len(records):
            return
        width = int(records["key_length"].max())
        if width > self.width:
            self._widen(width)
        slots, kinds = records["slot"], records["kind"]
        # Of several records of one slot the last one counts, which is what assigning to repeated places does.
        self.size[slots] = np.where(
            kinds == Kind.ADD, records["size"], np.where(kinds == Kind.BAD, np.uint32(OUT_OF_USE), np.uint32(0))
        )
        self.digest[slots] = records["digest"]
        self.key_length[slots] = records["key_length"]
        self.used[slots] = ticks
        keys = np.ascontiguousarray(records["key"]).view(np.uint8).reshape(len(records), -1)
        self.keys[slots] = keys[:, : self.width]

    def _clear_segment(self, segment: int) -> None:
        start = segment * self.segment_slots
        self.size[start : start + self.segment_slots] = 0

    def _widen(self, key_bytes: int) -> None:
        wider = np.zeros((len(self.keys), key_bytes), np.uint8)
        wider[:, : self.width] = self.keys
        self.keys, self.width = wider, key_bytes
        self._bind()

    def _bind(self) -> None:
        # Element by element a memoryview is three times as quick as an array.
        self._size_view, self._used_view = self.size.data, self.used.data
        self._digest_view, self._length_view = self.digest.data, self.key_length.data
        self._key_view: memoryview = self.keys.reshape(-1).data

    def arrays(self) -> Sequence[npt.NDArray[Any]]:
        """Return the columns in the order in which a snapshot has them."""
        return (self.size, self.used, self.digest, self.key_length, self.keys)
