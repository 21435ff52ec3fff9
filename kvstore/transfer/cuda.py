"""Copies between a KV cache on a GPU and the slots, on separate streams.

One kernel per run and layer gathers the blocks of a batch into a staging buffer on the GPU (or scatters them from it).
Staging has the layout of the slots, and long pieces are copied between them. A slot used by a single rank is one piece
(2 MiB, for example) for any number of layers. Copying page by page would need one call per page.

Ranks that share a slot have several pieces in it: one per layer if heads precede tokens (HND), otherwise one per token.
The pieces are equally spaced, so a slot is still one strided copy. The cost is per launched copy, not per piece.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
import torch

from kvstore.errors import ConfigError
from kvstore.primary import RankPlan, Region
from kvstore.runtime.messages import JobKind
from kvstore.transfer.base import BlockCopies, Ids, Run, Transfer, TransferResult, Turn, runs_of
from kvstore.transfer.pinning import PinnedRegion, copy_rows, loaded_cudart

STAGING_BYTES = 64 << 20
"""Staging buffer of each direction. Copying it at 25 GB/s takes 2.5 ms, many times the launch time."""

_CLOSE_TIMEOUT_S = 30.0
"""Limit of close() for the GPU. Copies take milliseconds, so after this time the device is lost."""

_POLL_PAUSE_S = 0.0002
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

_KNOWN_PIECES_MAX = 4096
"""Maximum cached patterns of filled places. Requests fill whole slots except the first and the last."""

logger = logging.getLogger("kvstore.transfer.cuda")


@dataclass(frozen=True, slots=True)
class StridedPiece:
    """Pieces of a slot of equal length and spacing; all values in words."""

    begin: int  # Start of the first piece.
    length: int  # Length of each piece.
    count: int  # Number of pieces.
    step: int  # Distance between starts; at least ``length``.


Slots: TypeAlias = list[tuple[int, tuple[StridedPiece, ...]]]
"""Slots, with the fewest strided copies between each and its row of staging."""


class CudaTransfer(Transfer):
    """Copies between a KV cache on a GPU and the slots, as :class:`Transfer` describes.

    Stores and loads have a stream each. Both wait for all earlier work of the stream that is current at :meth:`submit`,
    and for unfinished batches of the other direction with common blocks or slots. Work submitted after the result may
    use the loaded blocks.

    Args:
        tensors: KV cache by layer name, on one device.
        pin: Whether to pin the region, see :class:`PinnedRegion`; false if it is pinned already.
        staging_bytes: Length of each of the two staging buffers on the device; at least one slot is used.
        cuda: The module ``torch.cuda``; tests without a GPU replace it, and pass a ``runtime``.
        runtime: The CUDA runtime; by default torch's. Without one, each piece of a slot is launched separately.
    """

    def __init__(
        self,
        plan: RankPlan,
        tensors: Mapping[str, torch.Tensor],
        region: Region,
        *,
        pin: bool = True,
        staging_bytes: int = STAGING_BYTES,
        cuda: Any = torch.cuda,
        runtime: Any = None,
    ) -> None:
        super().__init__(plan, tensors, region, lambda tensor: [step * tensor.itemsize for step in tensor.stride()])
        caches = [tensors[layer.layer] for layers in plan.groups for layer in layers]
        if len({tensor.device for tensor in caches}) != 1:
            raise ConfigError("The KV cache must lie on one device, which has at least one layer.")
        self._device = caches[0].device
        steps = [int(one.stride(0)) * one.itemsize for one in caches]
        starts = [start for one in caches for start in (int(one.data_ptr()), one.storage_offset() * one.itemsize)]
        word_bytes = word_bytes_of(plan, [region.slot_bytes, region.address, *steps, *starts])
        word = _WORDS[word_bytes]
        cuda.init()
        self._cuda = cuda
        self._runtime = loaded_cudart() if runtime is None and cuda is torch.cuda else runtime
        # The pinned region; None if ``pin`` is false.
        self.pinned = PinnedRegion(region, activate=partial(cuda.device, self._device)) if pin else None
        self._rows: torch.Tensor | None = torch.from_numpy(region.rows()).view(word)
        depth = min(region.slots, max(1, staging_bytes // plan.slot_bytes))
        self._lanes = {
            kind: _Lane(
                cuda.Stream(self._device),  # Of the lowest priority, so that gathering does not delay the model.
                torch.empty((depth, plan.slot_bytes // word_bytes), dtype=word, device=self._device),
            )
            for kind in JobKind
        }
        self._staging_plan = StagingPlan(plan, word_bytes)
        for lane in self._lanes.values():
            lane.runs += runs_of(plan, tensors, lane.staging, partial(_in_words, word))
            # Earlier work of the engine's stream may still use the memory of staging.
            lane.stream.wait_stream(cuda.current_stream(self._device))

    def submit(self, copies: Sequence[BlockCopies], kind: JobKind) -> int:
        batch = self._checked(copies, kind)
        lane = self._lanes[kind]
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        launched = _Launched(self._next_handle, batch, start, end)
        self._next_handle += 1
        lane.stream.wait_stream(self._cuda.current_stream(self._device))
        for other in (one for opposite in self._lanes.values() if opposite is not lane for one in opposite.launched):
            if _have_common(batch, other.batch):
                lane.stream.wait_event(other.end)
        with self._cuda.stream(lane.stream):
            launched.start.record(lane.stream)
            try:
                for group in batch:
                    launched.size_bytes += self._copy(group, kind, lane)
            except RuntimeError as error:
                # Launch and memory errors of torch. Copies launched before it must still end.
                logger.exception("A batch of copies failed; its blocks are not used")
                launched.error = str(error)
            launched.end.record(lane.stream)
        lane.launched.append(launched)
        return launched.handle

    def poll(self) -> list[TransferResult]:
        self._collect()
        return super().poll()

    def wait(self, timeout_s: float | None = None) -> bool:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._collect()
            if not any(lane.launched for lane in self._lanes.values()):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_PAUSE_S)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self.wait(timeout_s=_CLOSE_TIMEOUT_S):
            # The device may still access these pages, so they must stay pinned and mapped.
            logger.error("The GPU did not end its copies within %.0f s; the region stays pinned", _CLOSE_TIMEOUT_S)
            for kind, lane in self._lanes.items():
                self._ended += [
                    TransferResult(one.handle, kind, False, 0, 0.0, "the GPU hangs") for one in lane.launched
                ]
                lane.launched.clear()
            return
        if self.pinned is not None:
            self.pinned.close()
        self._rows = None
        self._lanes.clear()

    def _collect(self) -> None:
        for kind, lane in self._lanes.items():
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
                size = 0 if one.error else one.size_bytes
                self._ended.append(TransferResult(one.handle, kind, not one.error, size, seconds, one.error))

    def _copy(self, copies: BlockCopies, kind: JobKind, lane: _Lane) -> int:
        """Launch the copies of one group's blocks, in parts that fit in staging; return their bytes."""
        size = 0
        for slots, turns in self._staging_plan.parts(copies, kind, len(lane.staging)):
            if kind is JobKind.LOAD:
                self._move(slots, lane, kind)
            # Staging, these numbers and the gathered blocks belong to this stream, so the allocator can reuse their
            # memory only for later work of the same stream.
            numbers = {
                turn: torch.from_numpy(ids).to(self._device, non_blocking=True).unbind() for turn, ids in turns.items()
            }
            for turn, local, staged in lane.runs[copies.group]:
                if turn not in numbers:
                    continue
                blocks, rows, places = numbers[turn]
                if kind is JobKind.STORE:
                    staged.index_put_((rows, places), local.index_select(0, blocks))
                else:
                    local.index_copy_(0, blocks, staged[rows, places])
                size += len(blocks) * local[0].nbytes
            if kind is JobKind.STORE:
                self._move(slots, lane, kind)
        return size

    def _move(self, slots: Slots, lane: _Lane, kind: JobKind) -> None:
        """Launch the copies between staging and slots, with contiguous rows on both sides for DMA."""
        for row, (slot, pieces) in enumerate(slots):
            for piece in pieces:
                ends = [_rows_of(self._rows, slot, piece), _rows_of(lane.staging, row, piece)]
                target, source = ends if kind is JobKind.STORE else reversed(ends)
                if piece.count > 1 and self._runtime is not None:
                    copy_rows(self._runtime, target, source, lane.stream)
                else:
                    for to, from_ in zip(target, source, strict=True):
                        to.copy_(from_, non_blocking=True)


@dataclass(slots=True, eq=False)
class _Launched:
    """A launched batch; it ends with its last event."""

    handle: int
    batch: list[BlockCopies]
    start: Any
    end: Any
    size_bytes: int = 0
    error: str = ""


@dataclass(slots=True, eq=False)
class _Lane:
    """One direction."""

    stream: Any
    staging: torch.Tensor  # Shape (slots, words).
    runs: list[list[Run]] = field(default_factory=list)  # Between the KV cache and staging, for each group.
    launched: deque[_Launched] = field(default_factory=deque)  # Unfinished batches from the oldest.


class StagingPlan:
    """Cuts batches into parts, without copying. A rank copies only its own bytes, in the longest possible pieces."""

    def __init__(self, plan: RankPlan, word_bytes: int) -> None:
        self._plan = plan
        self._word_bytes = word_bytes
        self._pieces = lru_cache(_KNOWN_PIECES_MAX)(self._find_pieces)

    def parts(self, copies: BlockCopies, kind: JobKind, depth: int) -> Iterator[tuple[Slots, dict[Turn, Ids]]]:
        """Yield the parts of a group's blocks, each of ``depth`` slots at most.

        A part has the slot of each used row of staging, with the pieces to copy between them; and the rank's blocks of
        each turn, as three rows: block numbers, rows of staging, places.
        """
        per_slot = self._plan.blocks_per_slot
        turns = dict.fromkeys(layer.turn for layer in self._plan.groups[copies.group])
        shares = {turn: copies.share_of(turn, per_slot) if kind is JobKind.STORE else copies for turn in turns}
        all_slots = np.unique(np.concatenate([share.slots for share in shares.values()])) if shares else np.empty(0)
        for at in range(0, len(all_slots), depth):
            slots = all_slots[at : at + depth]
            numbers: dict[Turn, Ids] = {}
            filled = np.zeros((len(slots), len(shares), per_slot), np.bool_)
            for index, (turn, share) in enumerate(shares.items()):
                here = (share.slots >= slots[0]) & (share.slots <= slots[-1])
                if here.any():
                    rows, places = np.searchsorted(slots, share.slots[here]), share.places[here]
                    filled[rows, index, places] = True
                    numbers[turn] = np.stack([share.blocks[here], rows, places])
            pieces = [self._pieces(copies.group, tuple(turns), row.tobytes()) for row in filled]
            yield list(zip(slots.tolist(), pieces, strict=True)), numbers

    def _find_pieces(self, group: int, turns: tuple[Turn, ...], filled: bytes) -> tuple[StridedPiece, ...]:
        """Return the copies of a partly filled slot; ``filled``: whether each place is, for each turn."""
        places_of = dict(zip(turns, np.frombuffer(filled, np.bool_).reshape(len(turns), -1), strict=True))
        fragments = sorted(
            (layer.slot_offset + int(place) * layer.block_bytes + canonical, length)
            for layer in self._plan.groups[group]
            for place in np.flatnonzero(places_of[layer.turn])
            for run in layer.runs
            for _, canonical, length in run.fragments()
        )
        return _joined([(begin // self._word_bytes, length // self._word_bytes) for begin, length in fragments])


def _joined(fragments: list[tuple[int, int]]) -> tuple[StridedPiece, ...]:
    """Join adjacent fragments, given as start and length in order; then pieces of equal length and spacing."""
    pieces: list[tuple[int, int]] = []
    for begin, length in fragments:
        if pieces and sum(pieces[-1]) == begin:
            begin, length = pieces[-1][0], pieces.pop()[1] + length
        pieces.append((begin, length))
    found: list[StridedPiece] = []
    for begin, length in pieces:
        last = found[-1] if found else None
        if last is not None and last.length == length:
            step = begin - (last.begin + (last.count - 1) * last.step)
            if last.count == 1 or step == last.step:
                found[-1] = StridedPiece(last.begin, length, last.count + 1, step)
                continue
        found.append(StridedPiece(begin, length, 1, length))
    return tuple(found)


def word_bytes_of(plan: RankPlan, others: Sequence[int]) -> int:
    """Return the longest word, 1 to 8 bytes, that divides all addresses and lengths, because kernels copy by words."""
    found = math.gcd(8, *others)
    for layer in (one for layers in plan.groups for one in layers):
        found = math.gcd(found, layer.slot_offset, layer.block_bytes)
        for run in layer.runs:
            lengths = run.local_offset, run.canonical_offset, run.length, run.local_stride, run.canonical_stride
            found = math.gcd(found, *lengths)
    return found


def _rows_of(memory: Any, row: int, piece: StridedPiece) -> torch.Tensor:
    """View the pieces of a strided copy in a row of the slots or of staging as a matrix, one row per piece."""
    begin = memory.storage_offset() + row * memory.stride(0) + piece.begin
    return memory.as_strided((piece.count, piece.length), (piece.step, 1), begin)


def _in_words(
    word: torch.dtype, tensor: torch.Tensor, offset: int, axes: Sequence[tuple[int, int]], length: int
) -> torch.Tensor:
    """View a tensor's memory as words, which the last axis counts."""
    axes = [(len(tensor), tensor.stride(0) * tensor.itemsize), *axes, (length // word.itemsize, word.itemsize)]
    return torch.empty(0, dtype=word, device=tensor.device).set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * tensor.itemsize // word.itemsize + offset // word.itemsize,
        [count for count, _ in axes],
        [step // word.itemsize for _, step in axes],
    )


def _have_common(one: list[BlockCopies], other: list[BlockCopies]) -> bool:
    """Return whether two batches of different directions share a slot or a block (of any group)."""
    return any(np.isin(a.slots, b.slots).any() or np.isin(a.blocks, b.blocks).any() for a in one for b in other)
