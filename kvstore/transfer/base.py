"""Batches of copies between the engine's KV cache and the slots of the primary tier: interface and validation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.primary import CopyRun, LayerPlan, RankPlan, Region
from kvstore.runtime.messages import JobKind

Ids: TypeAlias = npt.NDArray[np.int64]
"""Numbers of blocks, slots or places; one axis."""

Turn: TypeAlias = tuple[int, int]
"""Number of ranks that take turns storing a layer, and this rank's index."""

Run: TypeAlias = tuple[Turn, Any, Any]
"""A layer's turn, and views of the KV cache and of slots with equal axes after the block, or the slot and the place."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopies:
    """Device blocks of one group and their places in the primary tier. All arrays have the same length."""

    group: int  # Number of the group of layers.
    blocks: Ids  # Numbers of blocks in the KV cache.
    slots: Ids  # Slot of each block.
    places: Ids  # Place of each block in its slot, 0 to ``blocks_per_slot - 1``.

    @classmethod
    def of(
        cls,
        blocks: Sequence[int] | Ids,
        slots: Sequence[int] | Ids,
        *,
        blocks_per_slot: int = 1,
        first: int = 0,
        group: int = 0,
    ) -> BlockCopies:
        """Pair consecutive blocks of a request with the slots that they fill, in order; the last may be partly filled.

        ``first``: place of the first block in the first slot, or its number in the request.

        Raises:
            ValueError: The number of slots does not match the blocks.
        """
        ids, rows, first = _ids(blocks), _ids(slots), first % blocks_per_slot
        at = np.arange(first, first + len(ids), dtype=np.int64)
        needed = int(at[-1]) // blocks_per_slot + 1 if len(at) else 0
        if needed != len(rows):
            raise ValueError(f"{len(ids)} blocks from place {first} fill {needed} slots, not {len(rows)}.")
        return cls(group, ids, rows[at // blocks_per_slot], at % blocks_per_slot)

    def share_of(self, turn: Turn, blocks_per_slot: int) -> BlockCopies:
        """Return the blocks that a rank stores."""
        writers, writer_index = turn
        if writers == 1:
            return self
        mine = (self.slots * blocks_per_slot + self.places) % writers == writer_index
        return BlockCopies(self.group, self.blocks[mine], self.slots[mine], self.places[mine])


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Result of a submitted batch; each batch has exactly one."""

    handle: int  # As :meth:`Transfer.submit` returned it.
    kind: JobKind  # STORE (KV cache to slots) or LOAD (slots to KV cache).
    success: bool  # Whether every byte was copied. If not, the contents of the targets are undefined.
    size_bytes: int  # Bytes copied by this rank.
    seconds: float  # Duration of the copies, without queueing.
    error: str = ""  # Cause of a failure; otherwise "".


class Transfer(ABC):
    """Copies between the KV cache of one rank and the slots, asynchronously.

    Guarantees: batches take effect in the order of submission. A store reads blocks after all engine work submitted
    before it. No memory is accessed before :meth:`submit` or after the result. Between them, blocks and slots belong to
    the batch. Ranks with equal bytes take turns storing blocks, so a slot is complete when *all* ranks have reported.
    Each slot is in at most one batch, which bounds the work in flight.

    Not thread-safe: one call at a time.

    Args:
        tensors: KV cache by layer name: blocks on the first axis, any element type. The bytes of a block must be
            contiguous, in any order of axes; tensors and blocks need not be. Layers may share a tensor.
        region: Slots, of ``plan.slot_bytes`` or longer.

    Raises:
        ConfigError: A tensor is missing or too short, or the slots are too short.
    """

    def __init__(
        self, plan: RankPlan, tensors: Mapping[str, Any], region: Region, strides_of: Callable[[Any], Sequence[int]]
    ) -> None:
        if region.slot_bytes < plan.slot_bytes:
            raise ConfigError(f"Slots of {region.slot_bytes} bytes are too short for a layout of {plan.slot_bytes}.")
        for layer in (one for layers in plan.groups for one in layers):
            if layer.layer not in tensors:
                known = ", ".join(sorted(tensors)) or "none"
                raise ConfigError(f"No tensor for layer {layer.layer!r}. Known: {known}.")
            tensor = tensors[layer.layer]
            _check_page(layer, tensor.shape, strides_of(tensor), tensor.itemsize)
        self._plan = plan
        self._slot_count = region.slots
        self._block_counts = [min((len(tensors[one.layer]) for one in group), default=0) for group in plan.groups]
        self._next_handle = 0
        self._ended: list[TransferResult] = []
        self._closed = False

    @abstractmethod
    def submit(self, copies: Sequence[BlockCopies], kind: JobKind) -> int:
        """Begin to copy a batch; returns immediately.

        Args:
            kind: STORE copies from the KV cache to slots, LOAD from slots to the KV cache.

        Returns:
            A handle that is unique in this transfer.

        Raises:
            ValueError: A number is out of range, or a target occurs twice; nothing was copied.
        """

    def poll(self) -> list[TransferResult]:
        """Return the results since the last call, each once, without waiting."""
        ended, self._ended = self._ended, []
        return ended

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether all batches ended within the time limit (None: no limit). Results stay for :meth:`poll`."""

    @abstractmethod
    def close(self) -> None:
        """Finish running copies, fail queued batches, release all memory. Idempotent.

        Results stay for :meth:`poll`. The region may be closed afterwards.
        """

    def _checked(self, copies: Sequence[BlockCopies], kind: JobKind) -> list[BlockCopies]:
        """Validate a batch; return it without empty groups. Unchecked, numpy would take -1 as the last row."""
        if self._closed:
            raise ValueError("The transfer is closed.")
        for one in copies:
            if not 0 <= one.group < len(self._plan.groups):
                raise ValueError(f"Group {one.group} of {len(self._plan.groups)}.")
            if not len(one.blocks) == len(one.slots) == len(one.places):
                raise ValueError(
                    f"{len(one.blocks)} blocks, {len(one.slots)} slots, {len(one.places)} places: not one each."
                )
            _check_range("Block", one.blocks, self._block_counts[one.group])
            _check_range("Slot", one.slots, self._slot_count)
            _check_range("Place", one.places, self._plan.blocks_per_slot)
        if kind is JobKind.STORE:
            # A slot holds blocks of one group, so its places must be unique across groups.
            numbers = [one.slots * self._plan.blocks_per_slot + one.places for one in copies]
            _check_unique("A place of slot", numbers, self._plan.blocks_per_slot)
        else:
            for group in {one.group for one in copies}:
                _check_unique("Block", [one.blocks for one in copies if one.group == group])
        return [one for one in copies if len(one.blocks)]


def runs_of(plan: RankPlan, tensors: Mapping[str, Any], rows: Any, view: Callable[..., Any]) -> list[list[Run]]:
    """Return the runs of each group between the KV cache and slots, or staging with their layout.

    ``view``: views the memory of a tensor from a byte offset, with its first axis, more axes of given lengths and byte
    steps, and fragments of a given length.
    """

    def run_of(layer: LayerPlan, run: CopyRun) -> Run:
        local = view(tensors[layer.layer], run.local_offset, [(run.count, run.local_stride)], run.length)
        axes = [(plan.blocks_per_slot, layer.block_bytes), (run.count, run.canonical_stride)]
        return layer.turn, local, view(rows, layer.slot_offset + run.canonical_offset, axes, run.length)

    return [[run_of(layer, run) for layer in layers for run in layer.runs] for layers in plan.groups]


def _ids(values: Sequence[int] | Ids) -> Ids:
    # A copy: the caller may reuse its array while the batch runs.
    return np.array(values, dtype=np.int64).reshape(-1)


def _check_page(layer: LayerPlan, shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> None:
    """Check that the blocks of a tensor are contiguous, for any order of its inner axes, and as long as the page.

    ``strides``: in bytes. Blocks may be padded.
    """
    extent = item_bytes
    for stride, length in sorted((stride, length) for length, stride in zip(shape[1:], strides[1:], strict=True)):
        if length > 1 and stride != extent:
            raise ConfigError(
                f"Layer {layer.layer!r}: the elements of a block are not contiguous (shape {tuple(shape)}, strides "
                f"{tuple(strides)} bytes). Expected blocks on the first axis and no gaps within one."
            )
        extent *= length
    if not shape or (shape[0] > 1 and strides[0] < extent) or extent < layer.local_bytes:
        raise ConfigError(
            f"Layer {layer.layer!r}: blocks of {extent} bytes (shape {tuple(shape)}, strides {tuple(strides)} bytes), "
            f"but this rank's page has {layer.local_bytes}. Expected blocks on the first axis, each at least that long."
        )


def _check_range(kind: str, ids: Ids, count: int) -> None:
    wrong = ids[(ids < 0) | (ids >= count)]
    if len(wrong):
        raise ValueError(f"{kind} {wrong[0]} is out of range: there are {count}.")


def _check_unique(kind: str, ids: list[Ids], divisor: int = 1) -> None:
    ordered = np.sort(np.concatenate(ids)) if ids else np.empty(0, np.int64)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        raise ValueError(f"{kind} {twice[0] // divisor} is a target twice in one batch.")
