"""A segment: its two open files, and its rows as arrays.

A segment belongs to the engine that has both files locked. The locks are on the descriptors that the writes use, and
the kernel keeps a descriptor's file open until its last operation has ended. So a segment of a killed engine can be
taken only once no write of that engine is left in the kernel.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.backends.disk import files
from kvstore.backends.disk.layout import Head, Rows, RowValues, State
from kvstore.diskio import OsDisk
from kvstore.types import BlockKey

SLOT_BITS: Final = 24
SLOT_MASK: Final = (1 << SLOT_BITS) - 1
"""A place is a slot in the lower bits, and the id of its segment in this process above them."""

EMPTY: Final = 0xFF
"""Age of a slot that holds no block."""

WITHDRAWN: Final = 0xFF
"""State of a slot, in memory only, whose block left the index while its row stays for the next engine."""

_KEY_BYTES_MIN: Final = 36
"""Initial width of the key column: the length of vLLM's keys."""


class HeldFile(Protocol):
    """An open file of a segment; with a lock if this engine holds the segment."""

    fd: int

    def release(self) -> None:
        """Close it and release its lock; idempotent."""


@dataclass
class OpenFile:
    """An open file without a lock."""

    disk: OsDisk
    fd: int

    def release(self) -> None:
        """Close it; idempotent."""
        files.close_all(self.disk, self.fd)
        self.fd = -1


class Table(NamedTuple):
    """The content of a table. Rows that are not ``intact`` are free."""

    head: Head
    generations: npt.NDArray[np.uint32]  # Of the groups of rows; read before the rows.
    rows: Rows
    intact: npt.NDArray[np.bool_]


class Segment:
    """Rows by slot, in 50 bytes per slot with vLLM's keys; used from the loop thread.

    Attributes:
        id: Number in this process, the upper part of its places.
        root: Position of its root.
        number: Number in its files' names.
        is_ours: Whether this engine holds it. If not, it has no free slots and none to evict.
        generations: Those of its groups of rows, as last written or seen.
    """

    def __init__(
        self, root: int, number: int, table: HeldFile, file: HeldFile, content: Table, *, is_ours: bool = True
    ) -> None:
        head, self.generations, rows, intact = content
        self.id = 0
        self.first = 0  # Place of its slot 0.
        self.rows_at = head.rows_at
        self.root = root
        self.number = number
        self.head = head
        self.table = table
        self.file = file
        self.is_ours = is_ours
        self.failures = 0  # Writes of slots that have failed since the last one that did not.
        self.rests_until = 0.0
        """While this is not 0, its slots are not written: a part of the medium is bad there."""
        self.account: npt.NDArray[np.uint16] = np.zeros(0, np.uint16)  # Account of each slot, among tenants.
        self.state = np.where(intact, rows["state"], np.uint8(State.FREE))
        self.free: list[int] = np.flatnonzero(self.state == State.FREE)[::-1].tolist() if is_ours else []
        """Slots that can be written; the next one last."""
        used = self.state == State.USED
        self.age = np.where(used & is_ours, np.uint8(0), np.uint8(EMPTY))
        lengths = np.where(used, rows["key_length"], np.uint8(0))
        self._width = max(_KEY_BYTES_MIN, int(lengths.max(initial=0)))
        keys = np.ascontiguousarray(rows["key"]).view(np.uint8).reshape(len(rows), -1)
        self._keys = np.ascontiguousarray(keys[:, : self._width])
        # Access to single elements is three times as fast through a memoryview as through an array.
        self.state_view, self.age_view, self._length_view = self.state.data, self.age.data, lengths.data
        self.size_view, self.mark_view = rows["size"].copy().data, rows["mark"].copy().data
        self.generation_view = rows["generation"].copy().data
        self._key_view: memoryview = self._keys.reshape(-1).data

    def key(self, slot: int) -> BlockKey:
        """Return the key of the block that a slot holds or held last."""
        start = slot * self._width
        return bytes(self._key_view[start : start + self._length_view[slot]])

    def keys(self, slots: npt.NDArray[np.int64]) -> list[BlockKey]:
        """Return the :meth:`key` of many slots."""
        content, width = self._keys[slots].tobytes(), self._width
        lengths = np.frombuffer(self._length_view, np.uint8)[slots].tolist()
        return [content[start : start + length] for start, length in zip(itertools.count(0, width), lengths)]

    def holds(self, slot: int, key: BlockKey) -> bool:
        """Return whether the block of a slot has this key."""
        start = slot * self._width
        return self._length_view[slot] == len(key) and self._key_view[start : start + len(key)] == key

    def set(self, slot: int, size_bytes: int, mark: int, key: BlockKey) -> None:
        """Enter a block into a slot, after its row was written."""
        if len(key) > self._width:
            self._widen(len(key))
        start = slot * self._width
        self._key_view[start : start + len(key)] = key
        self._length_view[slot] = len(key)
        self.size_view[slot], self.mark_view[slot] = size_bytes, mark
        self.state_view[slot] = State.USED

    def next_row(self, slot: int, state: int, size_bytes: int, mark: int, key: BlockKey) -> RowValues:
        """Return the next row of a slot, with a generation that it never had, also if the write of the last failed."""
        self.generation_view[slot] = generation = (self.generation_view[slot] + 1) & 0xFFFFFFFF
        return generation, state, size_bytes, mark, key

    def held(self) -> npt.NDArray[np.int64]:
        """Return the slots that hold blocks."""
        return np.flatnonzero(self.state == State.USED)

    @property
    def total_age(self) -> int:
        """Sum of the ages of its blocks; the least used segment has the lowest."""
        return int((self.age[self.age != EMPTY].astype(np.int64) + 1).sum())

    @property
    def average_age(self) -> float:
        """Average of the ages of its blocks; -1 if it has none."""
        held = self.age[self.age != EMPTY]
        return float(held.mean()) if len(held) else -1.0

    def close(self) -> None:
        """Close its files and release their locks; idempotent."""
        self.file.release()
        self.table.release()

    def _widen(self, key_bytes: int) -> None:
        wider = np.zeros((self.head.slots, key_bytes), np.uint8)
        wider[:, : self._width] = self._keys
        self._keys, self._width = wider, key_bytes
        self._key_view = wider.reshape(-1).data
