"""The table of a slab: one row per slot, as whole arrays, so that a snapshot costs no loop over blocks. No I/O."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.types import BlockKey

__all__ = ["OWN_NAMESPACE", "Rows", "SlotTable", "row_type"]

Rows: TypeAlias = npt.NDArray[Any]
"""Array of :func:`row_type`."""

OWN_NAMESPACE: Final = 0
"""Number of the engine's own namespace; others are numbered as they are met."""

_KEY_BYTES_MIN: Final = 36
"""Width of the key column to begin with: what vLLM's keys have."""


def row_type(key_bytes: int) -> np.dtype[Any]:
    """Return the type of rows for keys up to a length.

    ``used`` is a counter: greater is later. ``size`` is the record's length, 0 in a free slot.
    """
    names = ["key", "used", "size", "namespace", "key_length"]
    return np.dtype({"names": names, "formats": [f"V{key_bytes}", "<u8", "<u4", "<u2", "u1"]})


class SlotTable:
    """What lies in each slot of one slab.

    Args:
        slots: How many there are.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._rows: Rows = np.zeros(slots, row_type(_KEY_BYTES_MIN))
        self._bind()

    def set(self, slot: int, key: BlockKey, size_bytes: int, namespace: int, used: int) -> None:
        """Note that a slot holds a record."""
        if len(key) > self._key_bytes:
            self._widen(len(key))
        self._rows[slot] = (key, used, size_bytes, namespace, len(key))

    def set_all(
        self, slots: Sequence[int], keys: Sequence[BlockKey], sizes_bytes: Sequence[int], namespace: int, used: int
    ) -> None:
        """Note that slots hold records, used one after the other from ``used`` on; by whole columns."""
        width = max(map(len, keys))
        if width > self._key_bytes:
            self._widen(width)
        # Packed as the columns lie in a row (they are not padded): a tenth of what an assignment per row costs.
        pack = struct.Struct(f"<{self._key_bytes}sQIHB").pack
        rows = [
            pack(key, used + i, size, namespace, len(key))
            for i, (key, size) in enumerate(zip(keys, sizes_bytes, strict=True))
        ]
        self._rows[np.array(slots)] = np.frombuffer(b"".join(rows), self._rows.dtype)

    def clear(self, slot: int) -> None:
        """Note that a slot is free."""
        self._size[slot] = 0

    def use(self, slot: int, used: int) -> None:
        """Note a use."""
        self._used[slot] = used

    def size_bytes(self, slot: int) -> int:
        """Return the length of the record in a slot; 0 if it is free."""
        return int(self._size[slot])

    def key(self, slot: int) -> BlockKey:
        """Return the key of the record in a slot."""
        row = self._rows[slot]
        key: bytes = row["key"].item()
        return key[: row["key_length"]]

    def namespace(self, slot: int) -> int:
        """Return the number of the namespace of the record in a slot."""
        return int(self._rows["namespace"][slot])

    def free_slots(self) -> npt.NDArray[np.int64]:
        """Return the free slots, last first."""
        return np.flatnonzero(self._size == 0)[::-1]

    def occupied(self) -> tuple[npt.NDArray[np.uint32], Rows]:
        """Return the occupied slots and copies of their rows, least recently used first."""
        slots = np.flatnonzero(self._size).astype(np.uint32)
        slots = slots[np.argsort(self._used[slots], kind="stable")]
        return slots, self._rows[slots]

    def restore(self, slots: npt.NDArray[np.uint32], rows: Rows) -> None:
        """Fill free slots with rows of a snapshot."""
        width = rows.dtype["key"].itemsize
        if width > self._key_bytes:
            self._widen(width)
        self._rows[slots] = rows.astype(self._rows.dtype) if rows.dtype != self._rows.dtype else rows

    def _widen(self, key_bytes: int) -> None:
        wider: Rows = np.zeros(self.slots, row_type(key_bytes))
        for name in ("used", "size", "namespace", "key_length"):
            wider[name] = self._rows[name]
        old = self._rows["key"].itemsize
        # Keys are bytes at the start of their column; the rest stays zero.
        wider.view(np.uint8).reshape(self.slots, -1)[:, :old] = (
            np.ascontiguousarray(self._rows["key"]).view(np.uint8).reshape(self.slots, -1)
        )
        self._rows = wider
        self._bind()

    def _bind(self) -> None:
        self._size = self._rows["size"]
        self._used = self._rows["used"]
        self._key_bytes = self._rows.dtype["key"].itemsize
