"""Strided copies between a KV cache in host memory and the slots, by numpy, within the call."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.primary import RankPlan, Region
from kvstore.runtime.messages import JobKind
from kvstore.transfer.base import BlockCopies, Transfer, TransferResult, runs_of

_CALL_BYTES_MAX: Final = 2 << 20
"""Maximum bytes per numpy call. Its temporary fits in a CPU cache, and it holds the GIL for 0.2 ms."""


class HostTransfer(Transfer):
    """Copies between a KV cache in host memory and the slots, as :class:`Transfer` describes.

    ``tensors``: pass types unknown to numpy (bfloat16) as a byte view.
    """

    def __init__(self, plan: RankPlan, tensors: Mapping[str, npt.NDArray[Any]], region: Region) -> None:
        super().__init__(plan, tensors, region, lambda array: array.strides)
        for name, array in tensors.items():
            if not array.flags.writeable:
                raise ConfigError(f"Layer {name!r}: the array can't be written. Expected the KV cache itself.")
        self._runs = runs_of(plan, tensors, region.rows(), _fragments)

    def submit(self, copies: Sequence[BlockCopies], kind: JobKind) -> int:
        batch = self._checked(copies, kind)
        begun = time.perf_counter()
        size = sum(self.copy(one, kind) for one in batch)
        self._next_handle += 1
        self._ended.append(TransferResult(self._next_handle, kind, True, size, time.perf_counter() - begun))
        return self._next_handle

    def copy(self, copies: BlockCopies, kind: JobKind) -> int:
        """Copy blocks without validating their numbers, for an engine that has; return the bytes copied."""
        size, places_per_slot = 0, self._plan.blocks_per_slot
        for turn, local, remote in self._runs[copies.group]:
            mine = copies.share_of(turn, places_per_slot) if kind is JobKind.STORE else copies
            run_bytes = local[:1].nbytes
            step = max(1, _CALL_BYTES_MAX // max(1, run_bytes))
            for at in range(0, len(mine.blocks), step):
                part = slice(at, at + step)
                blocks, slots, places = mine.blocks[part], mine.slots[part], mine.places[part]
                if kind is JobKind.STORE:
                    remote[slots, places] = local[blocks]
                else:
                    local[blocks] = remote[slots, places]
            size += len(mine.blocks) * run_bytes
        return size

    def wait(self, timeout_s: float | None = None) -> bool:
        return True

    def close(self) -> None:
        self._closed = True
        self._runs = []


class _Memory:
    """An array's memory under another shape. numpy reads the interface, and keeps the array alive."""

    def __init__(self, array: npt.NDArray[Any], interface: dict[str, Any]) -> None:
        self._array = array
        self.__array_interface__ = interface


def _fragments(array: npt.NDArray[Any], offset: int, axes: Sequence[tuple[int, int]], length: int) -> npt.NDArray[Any]:
    """View an array's memory with fragments as items; :class:`Transfer` has checked that they are within it."""
    items = f"|V{length}"
    if axes[-1][0] == 1:
        # numpy copies a single fragment faster as an axis of bytes.
        axes, items = [*axes[:-1], (length, 1)], "|u1"
    interface = {
        "version": 3,
        "data": (array.ctypes.data + offset, False),
        "shape": (len(array), *(count for count, _ in axes)),
        "strides": (array.strides[0], *(step for _, step in axes)),
        "typestr": items,
    }
    return np.asarray(_Memory(array, interface))
