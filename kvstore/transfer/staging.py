"""Planning copies that go through a staging buffer, which looks like the slots: what goes where. Numbers only, no copy.

The bytes of a row of staging lie where they lie in the slot. So only the bytes that a rank has are copied between the
two, in pieces that are as long as they can be. Pieces of one length at one distance, such as a rank's heads in every
layer, are one strided copy: what costs time is launching copies, not pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.primary import LayerPlan, RankPlan
from kvstore.runtime.messages import JobKind
from kvstore.transfer.base import Ids
from kvstore.transfer.plan import GroupBatch

__all__ = ["Pieces", "StagedPart", "StagingPlan", "StridedPiece", "Turn", "turn_of", "word_bytes_of"]

Turn: TypeAlias = tuple[int, int]
"""Ranks that take turns, and this rank's place among them."""

Pieces: TypeAlias = tuple[tuple[int, int], ...]
"""Begin and end of each piece of a slot, in words."""

_LAUNCH_BYTES = 100_000
"""Bytes that cross to the GPU in the time that one copy takes to launch, some 4 us."""

_ROW_BYTES = 512
"""The same for one row of a strided copy. Estimated (50 million rows a second), not measured."""

_KNOWN_PIECES_MAX = 4096
"""Patterns of filled places whose pieces are remembered; requests fill whole slots, but for the first and the last."""


@dataclass(frozen=True, slots=True)
class StridedPiece:
    """Pieces of one length at one distance; all in words.

    Attributes:
        begin: Begin of the first.
        length: Length of each.
        count: How many there are.
        step: From the begin of one to that of the next; at least ``length``.
    """

    begin: int
    length: int
    count: int
    step: int


@dataclass(frozen=True, slots=True, eq=False)
class StagedPart:
    """As much of a batch as staging holds at once.

    Attributes:
        slots: The slot of each row of staging in use.
        pieces: What is copied between each of these slots and its row.
        copies: The same as strided copies, the fewest that there can be.
        turns: For each turn the blocks that the rank copies: three rows of numbers, of blocks, rows of staging, places.
    """

    slots: Sequence[int]
    pieces: Sequence[Pieces]
    copies: Sequence[tuple[StridedPiece, ...]]
    turns: Sequence[tuple[Turn, Ids]]


class StagingPlan:
    """Cuts batches into parts.

    Args:
        plan: What this rank copies.
        word_bytes: Length of a word; see :func:`word_bytes_of`.
        strided: Whether a strided copy can be launched as one; else each of its pieces is one.
    """

    def __init__(self, plan: RankPlan, word_bytes: int, *, strided: bool = True) -> None:
        self._plan = plan
        self._strided = strided
        self._word_bytes = word_bytes
        self._layers: list[dict[Turn, list[LayerPlan]]] = []
        for layers in plan.groups:
            by_turn: dict[Turn, list[LayerPlan]] = {}
            for layer in layers:
                by_turn.setdefault(turn_of(layer), []).append(layer)
            self._layers.append(by_turn)
        self._known: dict[tuple[JobKind, int, bytes], tuple[Pieces, tuple[StridedPiece, ...]]] = {}

    def parts(self, group: GroupBatch, depth: int) -> Iterator[StagedPart]:
        """Yield the parts of a group's blocks, each of ``depth`` slots at most."""
        by_turn = self._layers[group.copies.group]
        mine = {turn: group.of_rank(*turn) for turn in by_turn}
        all_slots = np.unique(np.concatenate([copies.slots for copies in mine.values()])) if mine else np.empty(0)
        for at in range(0, len(all_slots), depth):
            slots = all_slots[at : at + depth]
            filled = np.zeros((len(slots), len(mine), self._plan.blocks_per_slot), np.bool_)
            turns: list[tuple[Turn, Ids]] = []
            for index, (turn, copies) in enumerate(mine.items()):
                here = (copies.slots >= slots[0]) & (copies.slots <= slots[-1])
                if not here.any():
                    continue
                rows = np.searchsorted(slots, copies.slots[here])
                places = copies.places[here]
                filled[rows, index, places] = True
                turns.append((turn, np.stack([copies.blocks[here], rows, places])))
            known = [self._pieces(group, row) for row in filled]
            yield StagedPart(slots.tolist(), [one for one, _ in known], [copies for _, copies in known], turns)

    def _pieces(self, group: GroupBatch, filled: npt.NDArray[np.bool_]) -> tuple[Pieces, tuple[StridedPiece, ...]]:
        """Return the pieces of a slot of which some places are filled: axes turn, place."""
        index = group.copies.group
        key = (group.kind, index, filled.tobytes())
        if key not in self._known:
            if len(self._known) >= _KNOWN_PIECES_MAX:
                self._known.clear()
            found = self._find_pieces(index, filled)
            copies = _strided(found)
            if group.kind is JobKind.LOAD and found and self._is_cheaper_whole(found, copies):
                # What lies between is other ranks' and goes no further than staging. A store must not write it.
                found = ((found[0][0], found[-1][1]),)
                copies = _strided(found)
            self._known[key] = found, copies
        return self._known[key]

    def _is_cheaper_whole(self, pieces: Pieces, copies: Sequence[StridedPiece]) -> bool:
        """Tell whether one copy of all that lies between the first piece and the last takes less time."""
        own = sum(end - begin for begin, end in pieces) * self._word_bytes
        launches = len(copies) if self._strided else len(pieces)
        apart = own + launches * _LAUNCH_BYTES + len(pieces) * _ROW_BYTES
        return (pieces[-1][1] - pieces[0][0]) * self._word_bytes + _LAUNCH_BYTES < apart

    def _find_pieces(self, group: int, filled: npt.NDArray[np.bool_]) -> Pieces:
        fragments = [
            (layer.slot_offset + int(place) * layer.block_bytes + canonical, length)
            for layers, places in zip(self._layers[group].values(), filled, strict=True)
            for layer in layers
            for place in np.flatnonzero(places)
            for run in layer.runs
            for _, canonical, length in run.fragments()
        ]
        pieces: list[tuple[int, int]] = []
        for begin, length in sorted(fragments):
            if pieces and pieces[-1][1] == begin:
                pieces[-1] = (pieces[-1][0], begin + length)
            else:
                pieces.append((begin, begin + length))
        return tuple((begin // self._word_bytes, end // self._word_bytes) for begin, end in pieces)


def _strided(pieces: Pieces) -> tuple[StridedPiece, ...]:
    """Join neighbouring pieces of one length at one distance."""
    found: list[StridedPiece] = []
    for begin, end in pieces:
        length = end - begin
        if found and found[-1].length == length:
            last = found[-1]
            step = begin - (last.begin + (last.count - 1) * last.step)
            if last.count == 1 or step == last.step:
                found[-1] = StridedPiece(last.begin, length, last.count + 1, step)
                continue
        found.append(StridedPiece(begin, length, 1, length))
    return tuple(found)


def turn_of(layer: LayerPlan) -> Turn:
    """Return how a rank takes turns in storing a layer."""
    return layer.writers, layer.writer_index


def word_bytes_of(plan: RankPlan, others: Iterable[int]) -> int:
    """Return the length of the longest word, 1 to 8 bytes, of which everything is a multiple: kernels copy by words.

    Args:
        plan: What this rank copies.
        others: Further addresses, strides and lengths in bytes.
    """
    found = math.gcd(8, *others)
    for layer in (one for layers in plan.groups for one in layers):
        found = math.gcd(found, layer.slot_offset, layer.block_bytes)
        for run in layer.runs:
            found = math.gcd(
                found, run.local_offset, run.canonical_offset, run.length, run.local_stride, run.canonical_stride
            )
    return found
