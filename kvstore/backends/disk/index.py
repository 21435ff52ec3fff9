"""The index of an owner: slots by block, free slots, pinned slots, and the eviction order. No I/O.

Used from the loop thread. The same table has the blocks of other owners: their places contain the number of the owner,
and only their digests are known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from kvstore.backends.disk.ages import Ages, Line, Shares
from kvstore.backends.disk.columns import EMPTY, OUT_OF_USE, Columns
from kvstore.backends.disk.layout import SLOT_MASK, Kind, Row, digest_of
from kvstore.backends.disk.table import NOWHERE, DigestTable
from kvstore.tenants import Tenants
from kvstore.types import BlockKey

__all__ = ["Index"]


class Index:
    """Blocks by key. ``expected`` is the likely number of blocks, ours and others'; ``tenants`` share our slots."""

    def __init__(self, columns: Columns, expected: int, tenants: Tenants | None = None) -> None:
        self.columns = columns
        columns.make_room(expected)
        self.table = DigestTable(expected)
        self._free: list[int] = []
        self._readers: Counter[int] = Counter()
        self._left_behind: set[int] = set()
        self._closed: set[int] = set()
        """Segments that are being given up; their slots are not freed."""
        held = columns.held()
        noted = self.table.add_all(columns.digest[held], held)
        # An earlier engine stored these blocks twice; one copy is enough.
        columns.size[held[~noted]] = 0
        self._blocks = len(self.table)
        for segment in np.flatnonzero(columns.segments)[::-1].tolist():
            self._free.extend(columns.free_slots(segment))
        self._ages = Ages(columns)
        self._line = self._ages.line()
        self._shares = None if tenants is None else Shares(tenants, columns, self._ages)

    def __len__(self) -> int:
        return self._blocks

    @property
    def free_slots(self) -> int:
        """Number of slots that can be written immediately."""
        return len(self._free)

    def place(self, key: BlockKey, digest: int | None = None) -> int:
        """Return the place of a block, or ``NOWHERE``; ``digest`` is computed if it is not given."""
        place = self.table.find(digest_of(key) if digest is None else digest)
        if 0 <= place <= SLOT_MASK and not self.columns.holds(place, key):
            return NOWHERE
        return place

    def slot(self, key: BlockKey) -> int | None:
        """Return the slot of a block of ours; None for any other block."""
        place = self.place(key)
        return place if 0 <= place <= SLOT_MASK else None

    def touch(self, slots: Iterable[int]) -> None:
        """Record a use of our own slots."""
        for slot in slots:
            # The block may be gone: other engines mark slots long after reading them.
            if self.columns.age_view[slot] != EMPTY:
                self._ages.use(slot)

    def pin(self, slots: Iterable[int]) -> None:
        """Keep slots from being given to other blocks while they are read."""
        self._readers.update(slots)

    def unpin(self, slots: Iterable[int]) -> None:
        """Undo one :meth:`pin`."""
        for slot in slots:
            readers = self._readers[slot] - 1
            if readers:
                self._readers[slot] = readers
            else:
                del self._readers[slot]
                if slot in self._left_behind:
                    self._left_behind.discard(slot)
                    self._free.append(slot)

    def take(self, count: int) -> list[int]:
        """Take and pin at most ``count`` free slots; in order, so that neighbours are written together."""
        taken = self._free[-count:] if count else []
        del self._free[len(self._free) - len(taken) :]
        taken.sort()
        self.pin(taken)
        return taken

    def withhold(self) -> list[int]:
        """Remove all free slots from the free list until they are released; return them."""
        withheld, self._free = sorted(self._free), []
        return withheld

    def give_back(self, slots: Sequence[int]) -> None:
        """Free and unpin slots that hold no block."""
        self.release(slots)
        self.unpin(slots)

    def release(self, slots: Iterable[int]) -> None:
        """Free slots, immediately or when their last reader has ended."""
        for slot in slots:
            if slot // self.columns.segment_slots in self._closed:
                continue
            if slot in self._readers:
                self._left_behind.add(slot)
            else:
                self._free.append(slot)

    def add(self, rows: Sequence[Row]) -> None:
        """Add blocks in taken slots, from their journal records."""
        for _, slot, size_bytes, digest, key in rows:
            self.columns.set(slot, size_bytes, digest, key)
            self.table.set(digest, slot)
            self._ages.use(slot)
            if self._shares is not None:
                self._shares.enter(slot, key)
        self._blocks += len(rows)

    def hide(self, key: BlockKey) -> int:
        """Let a block no longer be found; return its place, or ``NOWHERE``. A block of ours must then depart."""
        place = self.place(key)
        if place != NOWHERE:
            self._remove_place(digest_of(key), place)
        return place

    def evict(self, count: int) -> list[Row]:
        """Let at most ``count`` blocks of ours depart; return the journal records."""
        rows: list[Row] = []

        def take(line: Line, size: int) -> int:
            before = len(rows)
            while len(rows) < before + size and (slot := line.victim(self._readers.__contains__)) is not None:
                rows.extend(self.depart((slot,)))
            return len(rows) - before

        if self._shares is None:
            take(self._line, count)
        else:
            self._shares.collect(count, take)
        return rows

    def depart(self, slots: Iterable[int], kind: int = Kind.REMOVE) -> list[Row]:
        """Pin blocks that are to leave, and end their aging; return the journal records.

        The blocks can be found, unless they are hidden, until :meth:`leave`. Blocks that have already departed are
        skipped, except to retire their slots.
        """
        rows: list[Row] = []
        for slot in slots:
            is_new = self.columns.age_view[slot] != EMPTY
            if is_new:
                self.columns.age_view[slot] = EMPTY
                if self._shares is not None:
                    self._shares.leave(slot)
            if is_new or kind == Kind.BAD:
                self.pin((slot,))
                rows.append((kind, slot, 0, self.columns.digest_view[slot], self.columns.key(slot)))
        return rows

    def leave(self, rows: Sequence[Row]) -> None:
        """Remove departed blocks after the journal has recorded it, and free their slots, unless they are bad."""
        for kind, slot, _, digest, _ in rows:
            if kind == Kind.DROP:
                segment = slot // self.columns.segment_slots
                self.columns.drop_segment(segment)
                self._closed.discard(segment)
                continue
            self._remove_place(digest, slot)
            if kind == Kind.BAD:
                self.columns.size_view[slot] = OUT_OF_USE
                # An eviction that was journalled before may have freed it.
                self._left_behind.discard(slot)
            else:
                self.columns.size_view[slot] = 0
                self.release((slot,))
            self.unpin((slot,))

    def by_use(self, segments: Sequence[int]) -> list[int]:
        """Return segments in the order of giving them up: empty ones, then by the mean age of their blocks.

        For any thread.
        """
        heats = []
        for segment in segments:
            age = self.columns.age[self.columns.held(*self._slots_of(segment))]
            heats.append((float(age.mean()) if len(age) else -1.0, segment))
        return [segment for _, segment in sorted(heats)]

    def close_segment(self, among: Sequence[int]) -> int | None:
        """Give out no slots of the first of these segments that has none pinned and is not closed; return it."""
        pinned = {slot // self.columns.segment_slots for slot in self._readers}
        segment = next((each for each in among if each not in pinned and each not in self._closed), None)
        if segment is not None:
            first, end = self._slots_of(segment)
            self._closed.add(segment)
            self._free = [slot for slot in self._free if not first <= slot < end]
        return segment

    def open_segment(self, segment: int, path: int) -> None:
        """Add a new segment, with all of its slots free."""
        self.columns.open_segment(segment, path)
        self._free[:0] = self.columns.free_slots(segment)

    def _slots_of(self, segment: int) -> tuple[int, int]:
        first = segment * self.columns.segment_slots
        return first, first + self.columns.segment_slots

    def _remove_place(self, digest: int, place: int) -> None:
        if self.table.remove(digest, place) and place <= SLOT_MASK:
            self._blocks -= 1
