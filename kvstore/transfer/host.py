"""Copies for a KV cache in host memory, within the call."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.primary import CopyRun, LayerPlan, RankPlan, Region, Rows
from kvstore.runtime.messages import JobKind
from kvstore.transfer.base import BlockCopies, Transfer, TransferResult
from kvstore.transfer.plan import check_batch, page_bytes_of
from kvstore.transfer.runs import Run


class HostTransfer(Transfer):
    """Copies between a KV cache in host memory and the slots. Guarantees are those of :class:`Transfer`.

    Args:
        tensors: KV cache by layer name: arrays of any item type with blocks on the first axis. The bytes of a block
            must be contiguous; arrays and blocks need not be. Pass types unknown to numpy (bfloat16) as a byte view.
            Layers may share an array.
        region: Slots, of ``plan.slot_bytes`` or longer.

    Raises:
        ConfigError: An array is missing or too short, or the slots are too short.
    """

    def __init__(self, plan: RankPlan, tensors: Mapping[str, npt.NDArray[Any]], region: Region) -> None:
        if region.slot_bytes < plan.slot_bytes:
            raise ConfigError(f"Slots of {region.slot_bytes} bytes are too short for a layout of {plan.slot_bytes}.")
        self._plan, self._slots, rows = plan, region.slots, region.rows()
        arrays = [[_array_of(tensors, layer) for layer in layers] for layers in plan.groups]
        self._block_counts = [min(map(len, group), default=0) for group in arrays]
        self._runs = [
            [run for layer, array in zip(layers, group, strict=True) for run in _runs_of(layer, array, rows, plan)]
            for layers, group in zip(plan.groups, arrays, strict=True)
        ]
        self._handles = 0
        self._ended: list[TransferResult] = []
        self._closed = False

    def submit(self, copies: Sequence[BlockCopies], kind: JobKind) -> int:
        if self._closed:
            raise ValueError("The transfer is closed.")
        batch = check_batch(self._plan, self._block_counts, self._slots, copies, kind)
        begun = time.perf_counter()
        for group in batch.groups:
            one = group.copies
            for run in self._runs[one.group]:
                run.copy(one.blocks, one.slots, one.places, store=kind is JobKind.STORE)
        self._handles += 1
        seconds = time.perf_counter() - begun
        self._ended.append(TransferResult(self._handles, kind, True, batch.size_bytes, seconds))
        return self._handles

    def poll(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, handles: Collection[int] | None = None, timeout_s: float | None = None) -> bool:
        return True

    def close(self) -> None:
        self._closed = True
        self._runs = []


def _array_of(tensors: Mapping[str, npt.NDArray[Any]], layer: LayerPlan) -> npt.NDArray[Any]:
    if layer.layer not in tensors:
        raise ConfigError(f"No tensor for layer {layer.layer!r}. Known: {', '.join(sorted(tensors)) or 'none'}.")
    return tensors[layer.layer]


def _runs_of(layer: LayerPlan, array: npt.NDArray[Any], rows: Rows, plan: RankPlan) -> list[Run]:
    """Return the runs of a layer over its array and the slots."""
    page_bytes_of(layer, array.shape, array.strides, array.itemsize)
    if not array.flags.writeable:
        raise ConfigError(f"Layer {layer.layer!r}: the array can't be written. Expected the KV cache itself.")
    slot_axes = [(len(rows), rows.strides[0]), (plan.blocks_per_slot, layer.block_bytes)]
    return [
        Run(
            local=_fragments(array, run.local_offset, run, [(len(array), array.strides[0])], run.local_stride),
            remote=_fragments(rows, layer.slot_offset + run.canonical_offset, run, slot_axes, run.canonical_stride),
            block_bytes=run.size_bytes,
            writers=layer.writers,
            writer_index=layer.writer_index,
        )
        for run in layer.runs
    ]


def _fragments(
    array: npt.NDArray[Any], offset: int, run: CopyRun, axes: Sequence[tuple[int, int]], stride: int
) -> npt.NDArray[np.void]:
    """View an array's memory from an offset, with a last axis whose items are whole fragments.

    The checks in ``page_bytes_of`` and of the slot length ensure that the view is within the array.
    """
    shape = (*(length for length, _ in axes), run.count)
    strides = (*(step for _, step in axes), stride)
    return np.asarray(_Memory(array, offset, shape, strides, f"|V{run.length}"))


class _Memory:
    """An array's memory under another shape. numpy reads this interface, and keeps the array alive."""

    def __init__(
        self, array: npt.NDArray[Any], offset: int, shape: tuple[int, ...], strides: tuple[int, ...], items: str
    ) -> None:
        self._array = array
        self.__array_interface__ = {
            "version": 3,
            "data": (array.ctypes.data + offset, False),
            "shape": shape,
            "strides": strides,
            "typestr": items,
        }
