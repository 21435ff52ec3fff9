"""Checking a batch of copies, and which of its blocks a rank has to copy. Plain functions of numbers: no copy here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.errors import ConfigError
from kvstore.primary import LayerPlan, RankPlan
from kvstore.runtime.messages import JobKind
from kvstore.transfer.base import BlockCopies, Ids

__all__ = ["Batch", "GroupBatch", "check_batch", "page_bytes_of"]


@dataclass(frozen=True, slots=True, eq=False)
class GroupBatch:
    """The blocks of a batch that belong to one group, checked.

    Attributes:
        copies: Blocks, slots and places.
        numbers: The number ``slot * blocks_per_slot + place`` of each block, by which ranks take turns.
        kind: STORE or LOAD.
    """

    copies: BlockCopies
    numbers: Ids
    kind: JobKind
    _turns: dict[tuple[int, int], BlockCopies] = field(default_factory=dict)

    def of_rank(self, writers: int, writer_index: int) -> BlockCopies:
        """Return the blocks that a rank copies: all in a load, those whose turn it has in a store."""
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
    """A batch that was checked.

    Attributes:
        kind: STORE or LOAD.
        groups: Its blocks by group; no group is empty.
        size_bytes: Bytes that this rank copies.
    """

    kind: JobKind
    groups: tuple[GroupBatch, ...]
    size_bytes: int


def check_batch(
    plan: RankPlan, block_counts: Sequence[int], slot_count: int, copies: Sequence[BlockCopies], kind: JobKind
) -> Batch:
    """Check a batch, once, before anything is copied: numpy takes -1 for the last row, which would be wrong bytes.

    Args:
        plan: What this rank copies.
        block_counts: Blocks that the KV cache has, by group.
        slot_count: Slots that there are.
        copies: What was submitted.
        kind: STORE or LOAD.

    Raises:
        ValueError: A number is out of range, arrays differ in length, or a target is named twice.
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
        # A slot holds blocks of one group, so places are told apart over all groups.
        _check_unique("Place of a slot", [group.numbers for group in groups])
    else:
        for index in {group.copies.group for group in groups}:
            _check_unique("Block", [group.copies.blocks for group in groups if group.copies.group == index])
    return Batch(kind, tuple(groups), size)


def page_bytes_of(layer: LayerPlan, shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> int:
    """Return the bytes of a block in a tensor of the KV cache, whatever the order of its inner axes in memory.

    Args:
        layer: What is copied of it.
        shape: Shape of the tensor; the first axis is that of blocks.
        strides: Its strides in bytes. Blocks may lie further apart than they are long (padded pages).
        item_bytes: Bytes of an element.

    Raises:
        ConfigError: The elements of a block don't lie together, or the block is shorter than the layer's page.
    """
    extent = item_bytes
    for stride, length in sorted((stride, length) for length, stride in zip(shape[1:], strides[1:], strict=True)):
        if length == 1:
            continue
        if stride != extent:
            raise ConfigError(
                f"Layer {layer.layer!r}: the elements of a block don't lie together (shape {tuple(shape)}, strides "
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
