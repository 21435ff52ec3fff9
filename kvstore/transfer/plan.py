"""Validation of copy batches, and selection of each rank's blocks. Pure computation; no copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.errors import ConfigError
from kvstore.primary import LayerPlan, RankPlan
from kvstore.runtime.messages import JobKind
from kvstore.transfer.base import BlockCopies, Ids


@dataclass(frozen=True, slots=True, eq=False)
class GroupBatch:
    """The validated blocks of one group in a batch."""

    copies: BlockCopies  # Blocks, slots and places.
    numbers: Ids  # ``slot * blocks_per_slot + place`` of each block; determines the rank that stores it.
    kind: JobKind  # STORE or LOAD.
    _turns: dict[tuple[int, int], BlockCopies] = field(default_factory=dict)

    def of_rank(self, writers: int, writer_index: int) -> BlockCopies:
        """Return the blocks that a rank copies: all of a load, its share of a store."""
        if writers == 1 or self.kind is JobKind.LOAD:
            return self.copies
        turn = (writers, writer_index)
        if turn not in self._turns:
            mine = self.numbers % writers == writer_index
            all_ = self.copies
            self._turns[turn] = BlockCopies(all_.group, all_.blocks[mine], all_.slots[mine], all_.places[mine])
        return self._turns[turn]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A validated batch."""

    kind: JobKind  # STORE or LOAD.
    groups: tuple[GroupBatch, ...]  # Its blocks by group, without empty groups.
    size_bytes: int  # Bytes that this rank copies.


def check_batch(
    plan: RankPlan, block_counts: Sequence[int], slot_count: int, copies: Sequence[BlockCopies], kind: JobKind
) -> Batch:
    """Validate a batch before copying. Unchecked, numpy would interpret -1 as the last row and copy wrong bytes.

    Raises:
        ValueError: A number is out of range, arrays differ in length, or a target occurs twice.
    """
    groups: list[GroupBatch] = []
    size = 0
    for one in copies:
        if not 0 <= one.group < len(plan.groups):
            raise ValueError(f"Group {one.group} of {len(plan.groups)}.")
        if not len(one.blocks) == len(one.slots) == len(one.places):
            raise ValueError(
                f"{len(one.blocks)} blocks, {len(one.slots)} slots, {len(one.places)} places: not one each."
            )
        if not len(one.blocks):
            continue
        _check_range("Block", one.blocks, block_counts[one.group])
        _check_range("Slot", one.slots, slot_count)
        _check_range("Place", one.places, plan.blocks_per_slot)
        group = GroupBatch(one, one.slots * plan.blocks_per_slot + one.places, kind)
        groups.append(group)
        for layer in plan.groups[one.group]:
            size += len(group.of_rank(layer.writers, layer.writer_index).blocks) * layer.local_bytes
    if kind is JobKind.STORE:
        # A slot holds blocks of one group, so its places must be unique across groups.
        _check_unique("Place of a slot", [group.numbers for group in groups])
    else:
        for index in {group.copies.group for group in groups}:
            _check_unique("Block", [group.copies.blocks for group in groups if group.copies.group == index])
    return Batch(kind, tuple(groups), size)


def page_bytes_of(layer: LayerPlan, shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> int:
    """Return the bytes of a block in a KV cache tensor, for any order of its inner axes in memory.

    Args:
        shape: Shape of the tensor; blocks are the first axis.
        strides: Its strides in bytes. Blocks may be padded.

    Raises:
        ConfigError: A block is not contiguous, or shorter than the layer's page.
    """
    extent = item_bytes
    for stride, length in sorted((stride, length) for length, stride in zip(shape[1:], strides[1:], strict=True)):
        if length == 1:
            continue
        if stride != extent:
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
    return extent


def _check_range(what: str, ids: Ids, count: int) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= count:
        raise ValueError(f"{what} {low if low < 0 else high} is out of range: there are {count}.")


def _check_unique(what: str, ids: list[Ids]) -> None:
    if not ids:
        return
    ordered = np.sort(np.concatenate(ids))
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise ValueError(f"{what} {int(ordered[twice[0]])} is a target twice in one batch.")
