"""Copies for a KV cache in host memory: on a thread, or within the call.

There are two copy methods, neither with Python code per block. numpy copies all blocks of a run in one call, up to a
byte limit. It is fastest in an idle process, but holds the GIL. One system call per thousand fragments (``vectored``)
reaches a third of numpy's rate, because the kernel looks up every page, but it releases the GIL. So a thread uses the
system call except for short fragments.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.primary import CopyRun, LayerPlan, RankPlan, Region, Rows
from kvstore.runtime.messages import JobKind
from kvstore.transfer.base import BlockCopies, Transfer, TransferResult
from kvstore.transfer.plan import Batch, GroupBatch, check_batch, page_bytes_of
from kvstore.transfer.vectored import PIECES_MAX, copy_pieces, is_available

VECTORED_BYTES_MIN = 8192
"""Shortest fragment for the system call, which costs half a microsecond per fragment, as much as copying 4 KiB."""

_NUMPY_CALL_BYTES_MAX = 2 << 20
"""Maximum bytes per numpy call. Its temporary fits in a CPU cache, and it holds the GIL for 0.2 ms."""

_PIECES_AT_ONCE = 16 * PIECES_MAX
"""Fragments whose addresses are computed at once; half a megabyte."""

logger = logging.getLogger("kvstore.transfer.host")


class HostTransfer(Transfer):
    """Copies between a KV cache in host memory and the slots. Guarantees are those of :class:`Transfer`.

    Args:
        plan: The copies of this rank.
        tensors: KV cache by layer name: arrays of any item type with blocks on the first axis. The bytes of a block
            must be contiguous; arrays and blocks need not be. Pass types unknown to numpy (bfloat16) as a byte view.
            Layers may share an array.
        region: Slots, of ``plan.slot_bytes`` or longer.
        threaded: Whether to copy on a thread. If not, :meth:`submit` copies, which is cheapest for callers that wait.
        vectored: Whether to copy long fragments by the system call; by default if threaded and available.

    Raises:
        ConfigError: An array is missing or too short, or the slots are too short.
    """

    def __init__(
        self,
        plan: RankPlan,
        tensors: Mapping[str, npt.NDArray[Any]],
        region: Region,
        *,
        threaded: bool = True,
        vectored: bool | None = None,
    ) -> None:
        if region.slot_bytes < plan.slot_bytes:
            raise ConfigError(f"Slots of {region.slot_bytes} bytes are too short for a layout of {plan.slot_bytes}.")
        if vectored is None:
            vectored = threaded and is_available()
            if threaded and not vectored:
                logger.warning(
                    "process_vm_readv can't be called here; copies go by numpy, which holds the GIL meanwhile"
                )
        self._plan = plan
        self._slots = region.slots
        rows = region.rows()
        self._groups = [
            _GroupCopier([_layer_runs(layer, _array_of(tensors, layer), rows, plan) for layer in layers], vectored)
            for layers in plan.groups
        ]
        self._block_counts = [
            min((len(_array_of(tensors, layer)) for layer in layers), default=0) for layers in plan.groups
        ]
        self._next_handle = 0
        self._pending: set[int] = set()
        self._ended: deque[TransferResult] = deque()
        self._change = threading.Condition()
        self._closing = False
        self._queue: queue.SimpleQueue[tuple[int, Batch] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="kvstore-transfer", daemon=True)
            self._thread.start()

    def submit(self, copies: Sequence[BlockCopies], kind: JobKind) -> int:
        """Begin to copy a batch; see :meth:`Transfer.submit`."""
        if self._closing:
            raise ValueError("The transfer is closed.")
        batch = check_batch(self._plan, self._block_counts, self._slots, copies, kind)
        handle = self._next_handle
        self._next_handle += 1
        with self._change:
            self._pending.add(handle)
        if self._thread is None:
            self._copy(handle, batch)
        else:
            self._queue.put((handle, batch))
        return handle

    def poll(self) -> list[TransferResult]:
        """Return the results since the last call; see :meth:`Transfer.poll`."""
        results: list[TransferResult] = []
        while self._ended:
            results.append(self._ended.popleft())
        return results

    def wait(self, handles: Collection[int] | None = None, timeout_s: float | None = None) -> bool:
        """Wait until batches have ended; see :meth:`Transfer.wait`."""
        with self._change:
            wanted = set(self._pending if handles is None else handles)
            return self._change.wait_for(lambda: self._pending.isdisjoint(wanted), timeout_s)

    def close(self) -> None:
        """Finish running copies and release all memory; see :meth:`Transfer.close`.

        A running batch fails after its current copy call, within milliseconds.
        """
        self._closing = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        self._groups = []

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._copy(*item)

    def _copy(self, handle: int, batch: Batch) -> None:
        begun, error = time.perf_counter(), ""
        try:
            for group in batch.groups:
                if not self._groups[group.copies.group].copy(group, self._go_on):
                    error = "the transfer was closed"
                    break
        except Exception as failure:
            # The thread must continue and report the batch after any error.
            logger.exception("A batch of copies failed; its blocks are not used")
            error = f"{type(failure).__name__}: {failure}"
        seconds = time.perf_counter() - begun
        self._end(TransferResult(handle, batch.kind, not error, 0 if error else batch.size_bytes, seconds, error))

    def _go_on(self) -> bool:
        return not self._closing

    def _end(self, result: TransferResult) -> None:
        self._ended.append(result)
        with self._change:
            self._pending.discard(result.handle)
            self._change.notify_all()


@dataclass(frozen=True, slots=True, eq=False)
class _LayerRun:
    """One run of one layer, as arrays whose items are whole fragments."""

    local: npt.NDArray[np.void]  # KV cache, shape ``(blocks, fragments)``.
    remote: npt.NDArray[np.void]  # Slots, shape ``(slots, places, fragments)``.
    turn: tuple[int, int]  # Number of alternating ranks, and this rank's index among them.

    def copy(self, copies: BlockCopies, kind: JobKind) -> None:
        """Copy the run for some blocks."""
        if kind is JobKind.STORE:
            self.remote[copies.slots, copies.places] = self.local[copies.blocks]
        else:
            self.local[copies.blocks] = self.remote[copies.slots, copies.places]


class _Fragments:
    """Base addresses and strides of the fragments of a group's long runs, over all layers."""

    def __init__(self, runs: Sequence[_LayerRun]) -> None:
        self._memory = runs  # Keeps the arrays, and so the addresses, alive.
        columns: list[tuple[int, ...]] = []
        for run in runs:
            local, remote = run.local, run.remote
            for i in range(local.shape[1]):
                columns.append(
                    (
                        local.ctypes.data + i * local.strides[1],
                        local.strides[0],
                        remote.ctypes.data + i * remote.strides[2],
                        remote.strides[0],
                        remote.strides[1],
                        local.itemsize,
                    )
                )
        self._columns = np.array(columns, dtype=np.int64).T

    def copy(self, copies: BlockCopies, kind: JobKind, go_on: Callable[[], bool]) -> bool:
        """Copy all runs for some blocks; return false if ``go_on`` stopped it."""
        local_at, block_step, remote_at, slot_step, place_step, length = self._columns
        step = max(1, _PIECES_AT_ONCE // len(length))
        for at in range(0, len(copies.blocks), step):
            part = slice(at, at + step)
            blocks, slots, places = (ids[part, None] for ids in (copies.blocks, copies.slots, copies.places))
            local = np.empty((len(blocks), len(length), 2), np.uint64)
            remote = np.empty_like(local)
            local[..., 0] = local_at + blocks * block_step
            remote[..., 0] = remote_at + slots * slot_step + places * place_step
            local[..., 1] = remote[..., 1] = length
            target, source = (remote, local) if kind is JobKind.STORE else (local, remote)
            if not copy_pieces(target.reshape(-1, 2), source.reshape(-1, 2), go_on):
                return False
        return True


class _GroupCopier:
    """All copies of one group."""

    def __init__(self, layers: Sequence[Sequence[_LayerRun]], vectored: bool) -> None:
        runs = [run for layer in layers for run in layer]
        is_long = [vectored and run.local.itemsize >= VECTORED_BYTES_MIN for run in runs]
        self._short = [run for run, long in zip(runs, is_long, strict=True) if not long]
        self._long: dict[tuple[int, int], _Fragments] = {}
        for turn in {run.turn for run, long in zip(runs, is_long, strict=True) if long}:
            mine = [run for run, long in zip(runs, is_long, strict=True) if long and run.turn == turn]
            self._long[turn] = _Fragments(mine)

    def copy(self, group: GroupBatch, go_on: Callable[[], bool]) -> bool:
        """Copy the blocks of a batch; return false if ``go_on`` stopped it."""
        for turn, fragments in self._long.items():
            if not fragments.copy(group.of_rank(*turn), group.kind, go_on):
                return False
        for run in self._short:
            copies = group.of_rank(*run.turn)
            step = max(1, _NUMPY_CALL_BYTES_MAX // (run.local.itemsize * run.local.shape[1]))
            for at in range(0, len(copies.blocks), step):
                if not go_on():
                    return False
                part = slice(at, at + step)
                run.copy(
                    BlockCopies(copies.group, copies.blocks[part], copies.slots[part], copies.places[part]), group.kind
                )
        return True


def _array_of(tensors: Mapping[str, npt.NDArray[Any]], layer: LayerPlan) -> npt.NDArray[Any]:
    if layer.layer not in tensors:
        raise ConfigError(f"No tensor for layer {layer.layer!r}. Known: {', '.join(sorted(tensors)) or 'none'}.")
    return tensors[layer.layer]


def _layer_runs(layer: LayerPlan, array: npt.NDArray[Any], rows: Rows, plan: RankPlan) -> list[_LayerRun]:
    """Return the runs of a layer over its array and the slots."""
    page_bytes_of(layer, array.shape, array.strides, array.itemsize)
    if not array.flags.writeable:
        raise ConfigError(f"Layer {layer.layer!r}: the array can't be written. Expected the KV cache itself.")
    return [
        _LayerRun(
            local=_fragments(array, run.local_offset, run, [(len(array), array.strides[0])], run.local_stride),
            remote=_fragments(
                rows,
                layer.slot_offset + run.canonical_offset,
                run,
                [(len(rows), rows.strides[0]), (plan.blocks_per_slot, layer.block_bytes)],
                run.canonical_stride,
            ),
            turn=(layer.writers, layer.writer_index),
        )
        for run in layer.runs
    ]


def _fragments(
    array: npt.NDArray[Any], offset: int, run: CopyRun, axes: Sequence[tuple[int, int]], stride: int
) -> npt.NDArray[np.void]:
    """View an array's memory from an offset, with a last axis of fragments.

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
