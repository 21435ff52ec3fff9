"""Notes: a few bytes per block, for the engine that holds its segment next. One append-only file per segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from kvstore.backends.disk.drives import Drives
from kvstore.backends.disk.index import Index
from kvstore.backends.disk.layout import NOTES, stem_of
from kvstore.backends.disk.note_file import Notes
from kvstore.backends.disk.root import Root
from kvstore.backends.disk.segment import SLOT_BITS, Segment
from kvstore.types import BlockKey

_SHARE = 128
"""Share of a segment's length by which its notes may outgrow those of the blocks that it holds."""


class SegmentNotes:
    """The notes of our blocks; used from the loop thread."""

    def __init__(self, drives: Drives, roots: Sequence[Root], index: Index) -> None:
        self._drives = drives
        self._roots = roots
        self._index = index
        self._notes: dict[int, Notes] = {}

    def add(self, notes: Sequence[tuple[BlockKey, bytes]]) -> None:
        """Queue notes of our blocks to be appended."""
        segment_of = self._segment_of
        for segment, some in groupby(notes, lambda note: segment_of(note[0])):
            if segment is not None:
                self._of(segment).add(list(some))

    async def load(self) -> Mapping[BlockKey, bytes]:
        """Return the notes of our blocks."""
        found: dict[BlockKey, bytes] = {}
        for segment in list(self._index.segments.values()):
            found.update(await self._of(segment).load())
        return found

    async def settle(self) -> None:
        """Wait until all notes are written."""
        for notes in list(self._notes.values()):
            await notes.settle()

    async def forget(self, segment: Segment) -> None:
        """Write the last notes of a segment that is given up."""
        if (notes := self._notes.pop(segment.id, None)) is not None:
            await notes.settle()

    def _of(self, segment: Segment) -> Notes:
        if segment.id not in self._notes:
            self._notes[segment.id] = Notes(
                self._drives.of(segment.root),
                self._roots[segment.root].namespace_fd,
                segment.head.segment,
                lambda key: self._segment_of(key) is segment,
                stem_of(segment.number) + NOTES,
                segment.head.segment_bytes // _SHARE,
            )
        return self._notes[segment.id]

    def _segment_of(self, key: BlockKey) -> Segment | None:
        """Return our segment that holds a block."""
        place = self._index.place(key)
        return self._index.segments.get(place >> SLOT_BITS)
