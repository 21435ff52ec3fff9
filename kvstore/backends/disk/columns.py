"""The slots of an owner as arrays: 50 bytes per slot with vLLM's keys. No I/O."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.backends.disk.layout import RECORD, Kind, Row
from kvstore.types import KEY_BYTES_MAX, BlockKey

OUT_OF_USE: Final = 0xFFFFFFFF
"""Size of a slot that is never written again."""

EMPTY: Final = 0xFF
"""Age of a slot that holds no block."""

_KEY_BYTES_MIN: Final = 36
"""Initial width of the key column: the length of vLLM's keys."""


class Columns:
    """Size, key, digest and age by slot; ``size`` is 0 for a free slot."""

    def __init__(self, segment_slots: int) -> None:
        self.segment_slots = segment_slots
        # Path number of each segment plus one; 0 for a segment that does not exist.
        self.segments = np.zeros(0, np.uint8)
        self.width = _KEY_BYTES_MIN  # Width of the key column, in bytes.
        self.size = np.zeros(0, np.uint32)
        self.age = np.zeros(0, np.uint8)  # For eviction, see :class:`kvstore.backends.disk.index.Ages`.
        self.digest = np.zeros(0, np.uint64)
        self.key_length = np.zeros(0, np.uint8)
        self.keys = np.zeros((0, self.width), np.uint8)
        self._room = 0
        self._bind()

    def key(self, slot: int) -> BlockKey:
        """Return the key of the record in a slot."""
        start = slot * self.width
        return bytes(self._key_view[start : start + self._length_view[slot]])

    def holds(self, slot: int, key: BlockKey) -> bool:
        """Return whether the current or last record of a slot has this key."""
        start = slot * self.width
        return self._length_view[slot] == len(key) and self._key_view[start : start + len(key)] == key

    def set(self, slot: int, size_bytes: int, digest: int, key: BlockKey) -> None:
        """Enter a record into a slot."""
        if len(key) > self.width:
            self._widen(len(key))
        start = slot * self.width
        self._key_view[start : start + len(key)] = key
        self._length_view[slot] = len(key)
        self.digest_view[slot] = digest
        self.size_view[slot] = size_bytes

    def held(self, first: int = 0, end: int | None = None) -> npt.NDArray[np.int64]:
        """Return the slots of a range that hold records."""
        size = self.size[first:end]
        return np.flatnonzero((size != 0) & (size != OUT_OF_USE)) + first

    def free_slots(self, segment: int) -> list[int]:
        """Return the free slots of a segment, last first."""
        start = segment * self.segment_slots
        free: list[int] = (start + np.flatnonzero(self.size[start : start + self.segment_slots] == 0)[::-1]).tolist()
        return free

    def keys_in(self, slots: npt.NDArray[np.int64]) -> list[BlockKey]:
        """Return the keys in slots."""
        lengths = self.key_length[slots]
        rows: list[bytes] = np.ascontiguousarray(self.keys[slots]).view(f"V{self.width}").ravel().tolist()
        if len(rows) and not (lengths == self.width).all():
            rows = [key[:length] for key, length in zip(rows, lengths.tolist(), strict=True)]
        return rows

    def removals(self, slots: npt.NDArray[np.int64]) -> list[Row]:
        """Return journal records that remove the blocks in slots."""
        digests, keys = self.digest[slots].tolist(), self.keys_in(slots)
        return [(Kind.REMOVE, slot, 0, *block) for slot, *block in zip(slots.tolist(), digests, keys, strict=True)]

    def segment_removals(self, segment: int) -> list[Row]:
        """Return journal records that remove a segment and its blocks."""
        first = segment * self.segment_slots
        return [*self.removals(self.held(first, first + self.segment_slots)), (Kind.DROP, first, 0, 0, b"")]

    def open_segment(self, segment: int, path: int) -> None:
        """Add a segment, with all of its slots free."""
        self._reserve(segment + 1)
        self.segments[segment] = path + 1
        self._clear_segment(segment)

    def drop_segment(self, segment: int) -> None:
        """Remove a segment, with all of its records."""
        if segment < len(self.segments):
            self.segments[segment] = 0
            self._clear_segment(segment)

    def apply(self, records: npt.NDArray[Any]) -> None:
        """Apply journal records in order; records of slots that don't exist are skipped."""
        kinds = records["kind"]
        # Once for all segments, because each growth copies all columns.
        made = records["slot"][kinds == Kind.SEGMENT] // self.segment_slots
        self._reserve(int(made.max()) + 1 if len(made) else 0)
        start = 0
        for at in [*np.flatnonzero(kinds >= Kind.SEGMENT).tolist(), len(records)]:
            self._apply_slots(records[start:at])
            if at < len(records):
                segment = int(records["slot"][at]) // self.segment_slots
                if kinds[at] == Kind.SEGMENT:
                    self.open_segment(segment, int(records["size"][at]))
                elif kinds[at] == Kind.DROP:
                    self.drop_segment(segment)
            start = at + 1

    def records(self, first: int, end: int) -> bytes:
        """Return journal records of the slots of a range: the current or last record of each slot."""
        slots = first + np.flatnonzero(self.key_length[first:end] | (self.size[first:end] != 0))
        rows = np.zeros(len(slots), RECORD)
        size = self.size[slots]
        rows["kind"] = np.where(size == 0, Kind.REMOVE, np.where(size == OUT_OF_USE, Kind.BAD, Kind.ADD))
        rows["slot"], rows["size"], rows["digest"] = slots, size, self.digest[slots]
        rows["key_length"], rows["age"] = self.key_length[slots], self.age[slots] + np.uint8(1)
        content = rows.view(np.uint8).reshape(-1, RECORD.itemsize)
        at = RECORD.itemsize - KEY_BYTES_MAX
        content[:, at : at + self.width] = self.keys[slots]
        return rows.tobytes()

    def _apply_slots(self, records: npt.NDArray[Any]) -> None:
        records = records[records["slot"] < len(self.size)]
        if not len(records):
            return
        width = int(records["key_length"].max())
        if width > self.width:
            self._widen(width)
        slots, kinds = records["slot"], records["kind"]
        # If a slot is repeated, the assignment keeps its last record, which is the valid one.
        self.size[slots] = np.where(
            kinds == Kind.ADD, records["size"], np.where(kinds == Kind.BAD, np.uint32(OUT_OF_USE), np.uint32(0))
        )
        self.digest[slots] = records["digest"]
        self.key_length[slots] = records["key_length"]
        # Journal records have no age and count as new.
        self.age[slots] = np.minimum(records["age"] - np.uint8(1), EMPTY - 1)
        keys = np.ascontiguousarray(records["key"]).view(np.uint8).reshape(len(records), -1)
        self.keys[slots] = keys[:, : self.width]

    def make_room(self, slots_max: int) -> None:
        """Allocate memory for so many slots, so that no growth up to them copies the columns; for any thread."""
        self._room = max(slots_max, len(self.size))
        self._grow(len(self.segments))

    def _reserve(self, segments: int) -> None:
        if segments > len(self.segments):
            self._room = max(self._room, segments * self.segment_slots)
            self._grow(segments)

    def _grow(self, segments: int) -> None:
        """Extend the columns to so many segments, within the memory allocated for ``_room`` slots."""
        slots = segments * self.segment_slots
        self.segments = np.concatenate([self.segments, np.zeros(segments - len(self.segments), np.uint8)])
        for name, fill in (("size", 0), ("digest", 0), ("key_length", 0), ("age", EMPTY), ("keys", 0)):
            old = getattr(self, name)
            memory = old if old.base is None else old.base
            if len(memory) < self._room:
                memory = np.zeros((self._room, *old.shape[1:]), old.dtype)
                memory[: len(old)] = old
            if fill:
                memory[len(old) : slots] = fill
            setattr(self, name, memory[:slots])
        self._bind()

    def _clear_segment(self, segment: int) -> None:
        start = segment * self.segment_slots
        self.size[start : start + self.segment_slots] = 0

    def _widen(self, key_bytes: int) -> None:
        wider = np.zeros((self._room, key_bytes), np.uint8)
        wider[: len(self.keys), : self.width] = self.keys
        self.keys, self.width = wider[: len(self.keys)], key_bytes
        self._bind()

    def _bind(self) -> None:
        # Access to single elements is three times as fast through a memoryview as through an array.
        self.size_view, self.age_view = self.size.data, self.age.data
        self.digest_view, self._length_view = self.digest.data, self.key_length.data
        self._key_view: memoryview = self.keys.reshape(-1).data
