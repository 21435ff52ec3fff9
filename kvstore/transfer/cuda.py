"""Copies between a KV cache on a GPU and the slots, on separate streams.

One kernel per run and layer gathers the blocks of a batch into a staging buffer on the GPU (or scatters them from it).
Staging has the layout of the slots, and long pieces are copied between them. A slot used by a single rank is one piece
(2 MiB, for example) for any number of layers. Copying page by page would need one call per page.

Ranks that share a slot have several pieces in it: one per layer if heads precede tokens (HND), otherwise one per token.
The pieces are equally spaced, so a slot is still one strided copy.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvstore.errors import ConfigError
from kvstore.primary import LayerPlan, RankPlan, Region
from kvstore.runtime.messages import JobKind
from kvstore.transfer.base import BlockCopies, Transfer, TransferResult
from kvstore.transfer.pinning import PinnedRegion, loaded_cudart
from kvstore.transfer.plan import Batch, GroupBatch, check_batch, page_bytes_of
from kvstore.transfer.staging import StagedPart, StagingPlan, StridedPiece, Turn, turn_of, word_bytes_of

STAGING_BYTES = 64 << 20
"""Staging buffer of each direction. Copying it at 25 GB/s takes 2.5 ms, many times the launch time."""

_CLOSE_TIMEOUT_S = 30.0
"""Limit of close() for the GPU. Copies take milliseconds, so after this time the device is lost."""

_POLL_PAUSE_S = 0.0002

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

logger = logging.getLogger("kvstore.transfer.cuda")


class CudaStreams:
    """The streams of a CUDA device, by torch. Tests without a GPU replace them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.init()
        self._library = loaded_cudart()

    @property
    def strided(self) -> bool:
        """Whether the runtime's strided copy is available."""
        return self._library is not None

    def current(self) -> Any:
        """Return the calling thread's current stream."""
        return torch.cuda.current_stream(self._device)

    def new_stream(self) -> Any:
        """Return a stream of the lowest priority, so that gathering does not delay the model."""
        return torch.cuda.Stream(self._device)

    def new_event(self) -> Any:
        """Return an event with a timestamp."""
        return torch.cuda.Event(enable_timing=True)

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Launch the work of the context on a stream."""
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def activate(self) -> AbstractContextManager[Any]:
        """Make this device current within the context."""
        context: AbstractContextManager[Any] = torch.cuda.device(self._device)
        return context

    def copy_rows(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Launch the copy of a matrix, whose rows may be apart, between host and device.

        Calls CUDA directly, because torch would copy through a host temporary and wait for it.

        Raises:
            RuntimeError: The call failed.
        """
        if self._library is None:
            raise RuntimeError("torch has loaded no libcudart")
        code = self._library.copy_rows(target, source, stream.cuda_stream)
        if code:
            self._library.cudaGetLastError()
            raise RuntimeError(f"cudaMemcpy2DAsync failed with code {code}")


class CudaTransfer(Transfer):
    """Copies between a KV cache on a GPU and the slots. Guarantees are those of :class:`Transfer`.

    Stores and loads have a stream each. Both wait for all earlier work of the stream that is current at :meth:`submit`,
    and for unfinished batches of the other direction with common blocks or slots. Work submitted after the result may
    use the loaded blocks.

    Args:
        tensors: KV cache by layer name, on one device: blocks on the first axis, any element type. The bytes of a block
            must be contiguous, in any order of axes; tensors and blocks need not be. Layers may share a tensor.
        region: Slots, of ``plan.slot_bytes`` or longer.
        pin: Whether to pin the region, see :class:`PinnedRegion`; false if it is pinned already.
        staging_bytes: Length of each of the two staging buffers on the device; at least one slot is used.
        streams: Streams of the device; by default torch's.

    Raises:
        ConfigError: A tensor is missing, too short, or on another device than the first, or the slots are too short.
    """

    def __init__(
        self,
        plan: RankPlan,
        tensors: Mapping[str, torch.Tensor],
        region: Region,
        *,
        pin: bool = True,
        staging_bytes: int = STAGING_BYTES,
        streams: CudaStreams | None = None,
    ) -> None:
        if region.slot_bytes < plan.slot_bytes:
            raise ConfigError(f"Slots of {region.slot_bytes} bytes are too short for a layout of {plan.slot_bytes}.")
        caches = {layer.layer: _tensor_of(tensors, layer) for layers in plan.groups for layer in layers}
        if len({tensor.device for tensor in caches.values()}) != 1:
            raise ConfigError("The KV cache must lie on one device, which has at least one layer.")
        self._device = next(iter(caches.values())).device
        self._plan = plan
        self._region = region
        self._block_counts = [min((len(caches[one.layer]) for one in group), default=0) for group in plan.groups]
        steps = [int(t.stride(0)) * t.element_size() for t in caches.values()]
        starts = [int(t.data_ptr()) for t in caches.values()]
        word_bytes = word_bytes_of(plan, [region.slot_bytes, region.address, *steps, *starts])
        word = _WORDS[word_bytes]
        self._streams = streams or CudaStreams(self._device)
        # The pinned region; None if ``pin`` is false.
        self.pinned = PinnedRegion(region, activate=self._streams.activate) if pin else None
        self._rows: torch.Tensor | None = torch.from_numpy(region.rows()).view(word)
        depth = min(region.slots, max(1, staging_bytes // plan.slot_bytes))
        self._lanes = {
            kind: _Lane(
                self._streams.new_stream(),
                torch.empty((depth, plan.slot_bytes // word_bytes), dtype=word, device=self._device),
            )
            for kind in JobKind
        }
        self._runs = {
            kind: [_staged_runs(layers, caches, lane.staging, plan.blocks_per_slot) for layers in plan.groups]
            for kind, lane in self._lanes.items()
        }
        for lane in self._lanes.values():
            # Earlier work of the engine's stream may still use the memory of staging.
            lane.stream.wait_stream(self._streams.current())
        self._staging_plan = StagingPlan(plan, word_bytes, strided=self._streams.strided)
        self._next_handle = 0
        self._ended: deque[TransferResult] = deque()
        self._closed = False

    def submit(self, copies: Sequence[BlockCopies], kind: JobKind) -> int:
        if self._closed:
            raise ValueError("The transfer is closed.")
        batch = check_batch(self._plan, self._block_counts, self._region.slots, copies, kind)
        lane = self._lanes[kind]
        launched = _Launched(self._next_handle, batch, self._streams.new_event(), self._streams.new_event())
        self._next_handle += 1
        lane.stream.wait_stream(self._streams.current())
        for other in (one for opposite in self._lanes.values() if opposite is not lane for one in opposite.launched):
            if _have_common(batch, other.batch):
                lane.stream.wait_event(other.end)
        with self._streams.use(lane.stream):
            launched.start.record(lane.stream)
            try:
                for group in batch.groups:
                    self._copy(group, lane)
            except RuntimeError as error:
                # Launch and memory errors of torch. Copies launched before it must still end.
                logger.exception("A batch of copies failed; its blocks are not used")
                launched.error = str(error)
            launched.end.record(lane.stream)
        lane.launched.append(launched)
        return launched.handle

    def poll(self) -> list[TransferResult]:
        self._collect()
        results = list(self._ended)
        self._ended.clear()
        return results

    def wait(self, handles: Collection[int] | None = None, timeout_s: float | None = None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._collect()
            pending = {one.handle for lane in self._lanes.values() for one in lane.launched}
            if not (pending if handles is None else pending.intersection(handles)):
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_PAUSE_S)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self.wait(timeout_s=_CLOSE_TIMEOUT_S):
            # The device may still access these pages, so they must stay pinned and mapped.
            logger.error("The GPU did not end its copies within %.0f s; the region stays pinned", _CLOSE_TIMEOUT_S)
            for lane in self._lanes.values():
                while lane.launched:
                    one = lane.launched.popleft()
                    self._ended.append(TransferResult(one.handle, one.batch.kind, False, 0, 0.0, "the GPU hangs"))
            return
        if self.pinned is not None:
            self.pinned.close()
        self._rows = None
        self._runs.clear()
        self._lanes.clear()

    def _collect(self) -> None:
        for lane in self._lanes.values():
            while lane.launched:
                one = lane.launched[0]
                seconds = 0.0
                try:
                    if not one.end.query():
                        break
                    seconds = one.start.elapsed_time(one.end) * 1e-3
                except RuntimeError as error:
                    # A device error invalidates the whole batch.
                    one.error = one.error or str(error)
                lane.launched.popleft()
                size = 0 if one.error else one.batch.size_bytes
                self._ended.append(TransferResult(one.handle, one.batch.kind, not one.error, size, seconds, one.error))

    def _copy(self, group: GroupBatch, lane: _Lane) -> None:
        """Launch the copies of one group's blocks, in parts that fit in staging."""
        runs_of = self._runs[group.kind][group.copies.group]
        for part in self._staging_plan.parts(group, len(lane.staging)):
            if group.kind is JobKind.LOAD:
                self._move(part, lane, group.kind)
            for turn, numbers in part.turns:
                # Staging, these numbers and the gathered blocks belong to this stream, so the allocator can reuse their
                # memory only for later work of the same stream.
                blocks, rows, places = torch.from_numpy(numbers).to(self._device, non_blocking=True).unbind()
                for run in runs_of[turn]:
                    if group.kind is JobKind.STORE:
                        run.staged.index_put_((rows, places), run.local.index_select(0, blocks))
                    else:
                        run.local.index_copy_(0, blocks, run.staged[rows, places])
            if group.kind is JobKind.STORE:
                self._move(part, lane, group.kind)

    def _move(self, part: StagedPart, lane: _Lane, kind: JobKind) -> None:
        """Launch the copies between staging and slots, with contiguous rows on both sides for DMA."""
        if self._rows is None:
            return
        for row, (slot, copies) in enumerate(zip(part.slots, part.copies, strict=True)):
            for one in copies:
                ends = [_rows_of(memory, at, one) for memory, at in ((self._rows, slot), (lane.staging, row))]
                target, source = ends if kind is JobKind.STORE else reversed(ends)
                if one.count > 1 and self._streams.strided:
                    self._streams.copy_rows(target, source, lane.stream)
                    continue
                for to, from_ in zip(target, source, strict=True):
                    to.copy_(from_, non_blocking=True)


@dataclass(slots=True, eq=False)
class _Launched:
    """A launched batch; it ends with its last event."""

    handle: int
    batch: Batch
    start: Any
    end: Any
    error: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class _Lane:
    """One direction: stream, staging buffer of shape (slots, words), unfinished batches from the oldest."""

    stream: Any
    staging: torch.Tensor
    launched: deque[_Launched] = field(default_factory=deque)


@dataclass(frozen=True, slots=True, eq=False)
class _StagedRun:
    """One run of one layer: ``(blocks, fragments, words)``, and ``(rows of staging, places, fragments, words)``."""

    local: torch.Tensor
    staged: torch.Tensor


def _staged_runs(
    layers: Sequence[LayerPlan], caches: Mapping[str, torch.Tensor], staging: torch.Tensor, places: int
) -> dict[Turn, list[_StagedRun]]:
    """Return the runs of a group over its tensors and staging, by turn."""
    word = staging.element_size()
    found: dict[Turn, list[_StagedRun]] = {}
    for layer in layers:
        cache = caches[layer.layer]
        block_step = cache.stride(0) * cache.element_size()
        cache_begin = cache.storage_offset() * cache.element_size()
        for run in layer.runs:
            local = _in_words(
                cache,
                staging.dtype,
                cache_begin + run.local_offset,
                [(len(cache), block_step), (run.count, run.local_stride), (run.length // word, word)],
            )
            staged = _in_words(
                staging,
                staging.dtype,
                layer.slot_offset + run.canonical_offset,
                [
                    (len(staging), staging.stride(0) * word),
                    (places, layer.block_bytes),
                    (run.count, run.canonical_stride),
                    (run.length // word, word),
                ],
            )
            found.setdefault(turn_of(layer), []).append(_StagedRun(local, staged))
    return found


def _rows_of(memory: torch.Tensor, row: int, piece: StridedPiece) -> torch.Tensor:
    """View the pieces of a strided copy in a row of the slots or of staging as a matrix, one row per piece."""
    begin = memory.storage_offset() + row * memory.stride(0) + piece.begin
    return memory.as_strided((piece.count, piece.length), (piece.step, 1), begin)


def _in_words(tensor: torch.Tensor, dtype: torch.dtype, offset: int, axes: Sequence[tuple[int, int]]) -> torch.Tensor:
    """View a tensor's memory as words from a byte offset, with axes of given lengths and byte steps."""
    view = torch.empty(0, dtype=dtype, device=tensor.device)
    return view.set_(
        tensor.untyped_storage(),
        offset // dtype.itemsize,
        [length for length, _ in axes],
        [step // dtype.itemsize for _, step in axes],
    )


def _tensor_of(tensors: Mapping[str, torch.Tensor], layer: LayerPlan) -> torch.Tensor:
    if layer.layer not in tensors:
        raise ConfigError(f"No tensor for layer {layer.layer!r}. Known: {', '.join(sorted(tensors)) or 'none'}.")
    tensor = tensors[layer.layer]
    item = tensor.element_size()
    page_bytes_of(layer, tensor.shape, [step * item for step in tensor.stride()], item)
    return tensor


def _have_common(one: Batch, other: Batch) -> bool:
    """Return whether two batches of different directions share a slot or a block (of any group)."""
    pairs = [(a.copies, b.copies) for a in one.groups for b in other.groups]
    return any(np.isin(a.slots, b.slots).any() or np.isin(a.blocks, b.blocks).any() for a, b in pairs)
