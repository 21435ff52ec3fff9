"""A segment that this engine holds: its two locked files, and its rows as arrays.

A segment belongs to the engine that has both files locked. The locks are on the descriptors that the writes use, and
the kernel keeps a descriptor's file open until its last operation has ended. So a segment of a killed engine can be
taken only once no write of that engine is left in the kernel.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.backends.disk.files import FileLock
from kvstore.backends.slots.layout import Head, Rows, RowValues, State
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


class Segment:
    """Rows by slot, in 50 bytes per slot with vLLM's keys; used from the loop thread.

    Attributes:
        id: Number in this process, the upper part of its places.
        root: Position of its root.
        number: Number in its files' names.
    """

    def __init__(
        self, root: int, number: int, table: FileLock, file: FileLock, head: Head, rows: Rows, intact: npt.NDArray[Any]
    ) -> None:
        """Take over the rows of its table. Those that are not intact are free."""
        self.id = 0
        self.first = 0  # Place of its slot 0.
        self.rows_at = head.rows_at
        self.root = root
        self.number = number
        self.head = head
        self.table = table
        self.file = file
        self.account: npt.NDArray[np.uint16] = np.zeros(0, np.uint16)  # Account of each slot, among tenants.
        self.state = np.where(intact, rows["state"], np.uint8(State.FREE))
        self.free: list[int] = np.flatnonzero(self.state == State.FREE)[::-1].tolist()
        """Slots that can be written; the next one last."""
        used = self.state == State.USED
        self.age = np.where(used, np.uint8(0), np.uint8(EMPTY))
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
    def use(self) -> int:
        """Sum of the ages of its blocks; the least used segment has the lowest."""
        return int((self.age[self.age != EMPTY].astype(np.int64) + 1).sum())

    def close(self) -> None:
        """Close its files and release the locks; idempotent."""
        self.file.release()
        self.table.release()

    def _widen(self, key_bytes: int) -> None:
        wider = np.zeros((self.head.slots, key_bytes), np.uint8)
        wider[:, : self._width] = self._keys
        self._keys, self._width = wider, key_bytes
        self._key_view = wider.reshape(-1).data
