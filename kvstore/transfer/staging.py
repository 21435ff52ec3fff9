"""Plans of copies through a staging buffer laid out like the slots. Pure computation; no copies.

A row of staging has the layout of a slot, so a rank copies only its own bytes between them, in the longest possible
pieces. Pieces of equal length and spacing, such as a rank's heads in every layer, are one strided copy, because the
cost is per launched copy, not per piece.
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

Turn: TypeAlias = tuple[int, int]
"""Number of ranks that take turns, and this rank's index."""

_Pieces: TypeAlias = tuple[tuple[int, int], ...]
"""Begin and end of each piece of a slot, in words."""

_LAUNCH_BYTES = 100_000
"""Bytes transferred to the GPU in the launch time of one copy, about 4 us."""

_ROW_BYTES = 512
"""The same for one row of a strided copy. Estimated (50 million rows per second), not measured."""

_KNOWN_PIECES_MAX = 4096
"""Maximum cached patterns of filled places. Requests fill whole slots except the first and the last."""


@dataclass(frozen=True, slots=True)
class StridedPiece:
    """Pieces of equal length and spacing; all values in words."""

    begin: int  # Start of the first piece.
    length: int  # Length of each piece.
    count: int  # Number of pieces.
    step: int  # Distance between starts; at least ``length``.


@dataclass(frozen=True, slots=True, eq=False)
class StagedPart:
    """Part of a batch that fits in staging."""

    slots: Sequence[int]  # The slot of each used row of staging.
    copies: Sequence[tuple[StridedPiece, ...]]  # The fewest strided copies between each slot and its row.
    turns: Sequence[tuple[Turn, Ids]]
    """The rank's blocks of each turn, as three rows: block numbers, rows of staging, places."""


class StagingPlan:
    """Cuts batches into parts.

    Args:
        word_bytes: Length of a word; see :func:`word_bytes_of`.
        strided: Whether a strided copy is one launch; otherwise each piece is one.
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
        self._known: dict[tuple[JobKind, int, bytes], tuple[StridedPiece, ...]] = {}

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
            yield StagedPart(slots.tolist(), [self._copies(group, row) for row in filled], turns)

    def _copies(self, group: GroupBatch, filled: npt.NDArray[np.bool_]) -> tuple[StridedPiece, ...]:
        """Return the copies of a partly filled slot; the axes of ``filled`` are turn and place."""
        index = group.copies.group
        key = (group.kind, index, filled.tobytes())
        if key not in self._known:
            if len(self._known) >= _KNOWN_PIECES_MAX:
                self._known.clear()
            found = self._find_pieces(index, filled)
            copies = _strided(found)
            if group.kind is JobKind.LOAD and found and self._is_cheaper_whole(found, copies):
                # The bytes in between belong to other ranks and stay in staging. A store must not write them.
                copies = _strided(((found[0][0], found[-1][1]),))
            self._known[key] = copies
        return self._known[key]

    def _is_cheaper_whole(self, pieces: _Pieces, copies: Sequence[StridedPiece]) -> bool:
        """Return whether one copy from the first piece to the last is faster."""
        own = sum(end - begin for begin, end in pieces) * self._word_bytes
        launches = len(copies) if self._strided else len(pieces)
        apart = own + launches * _LAUNCH_BYTES + len(pieces) * _ROW_BYTES
        return (pieces[-1][1] - pieces[0][0]) * self._word_bytes + _LAUNCH_BYTES < apart

    def _find_pieces(self, group: int, filled: npt.NDArray[np.bool_]) -> _Pieces:
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


def _strided(pieces: _Pieces) -> tuple[StridedPiece, ...]:
    """Join consecutive pieces of equal length and spacing."""
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
    """Return the turn of a rank in storing a layer."""
    return layer.writers, layer.writer_index


def word_bytes_of(plan: RankPlan, others: Iterable[int]) -> int:
    """Return the longest word, 1 to 8 bytes, that divides all addresses and lengths, because kernels copy by words."""
    found = math.gcd(8, *others)
    for layer in (one for layers in plan.groups for one in layers):
        found = math.gcd(found, layer.slot_offset, layer.block_bytes)
        for run in layer.runs:
            found = math.gcd(
                found, run.local_offset, run.canonical_offset, run.length, run.local_stride, run.canonical_stride
            )
    return found
