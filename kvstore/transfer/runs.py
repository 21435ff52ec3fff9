"""Strided copies between the KV cache and the rows of the primary tier within host memory, by numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_CALL_BYTES_MAX: Final = 2 << 20
"""Maximum bytes per numpy call. Its temporary fits in a CPU cache, and it holds the GIL for 0.2 ms."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One strided copy of every block of a group of layers."""

    local: npt.NDArray[Any]  # KV cache; the first axis is the block.
    remote: npt.NDArray[Any]  # Slots; the first axes are slot and place in the slot, the others as of ``local``.
    block_bytes: int
    writers: int = 1  # Ranks that hold the same bytes and take turns storing them.
    writer_index: int = 0  # This rank's index among them.

    def copy(
        self,
        blocks: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        *,
        store: bool,
    ) -> int:
        """Copy some blocks to their places in slots, or back; return the bytes copied."""
        if store and self.writers > 1:
            mine = (slots * self.remote.shape[1] + places) % self.writers == self.writer_index
            blocks, slots, places = blocks[mine], slots[mine], places[mine]
        step = max(1, _CALL_BYTES_MAX // self.block_bytes)
        for at in range(0, len(blocks), step):
            part = slice(at, at + step)
            if store:
                self.remote[slots[part], places[part]] = self.local[blocks[part]]
            else:
                self.local[blocks[part]] = self.remote[slots[part], places[part]]
        return len(blocks) * self.block_bytes
