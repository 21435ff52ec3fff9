"""The index of an owner: slots by block, free and pinned slots, and the eviction order, also among tenants. No I/O.

Used from the loop thread. The same table has the blocks of other owners: their places contain the number of the owner,
and only their digests are known.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.backends.disk.columns import EMPTY, OUT_OF_USE, Columns
from kvstore.backends.disk.layout import SLOT_MASK, Kind, Row, digest_of
from kvstore.backends.disk.table import NOWHERE, DigestTable
from kvstore.tenants import TAG_BYTES, Account, Accounts, Tenants
from kvstore.types import BlockKey

_AGES: Final = 64
"""Number of ages that pass while every slot is used once."""

_REST_S: Final = 300.0
"""Pause of a slot that could not be written; its medium may be replaced or mounted again meanwhile."""

_REST_SHARE: Final = 8
"""Until a write succeeds, at most an eighth of all slots comes to rest: two of the 16 segments of a small tier."""

_CANDIDATES: Final = 1 << 13
"""Maximum slots found by one search; a list of all slots of an age takes long to create."""


class Ages:
    """Age of the last use of each slot, one byte per slot (``columns.age``).

    A new age begins once a 64th of the slots have been used in the current one.
    """

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        held = columns.held()
        kept = np.minimum(columns.age[held], EMPTY - 1)
        columns.age[:] = EMPTY
        columns.age[held] = kept
        self.now = int(kept.max(initial=0))  # The current age.
        self._used = 0
        self._lines: list[Line] = []
        self._kept: frozenset[int] = frozenset()
        """Directories whose blocks are not evicted."""

    def keep(self, paths: Iterable[int]) -> None:
        """Evict no blocks in these directories, until the next call."""
        self._kept = frozenset(paths)
        self._forget_candidates()

    def evictable(self) -> npt.NDArray[np.uint8]:
        """Return the age of each slot, or ``EMPTY`` if it holds no block that may be evicted."""
        if not self._kept:
            return self.columns.age
        is_kept = np.isin(self.columns.segments, [path + 1 for path in self._kept])
        return np.where(np.repeat(is_kept, self.columns.segment_slots), np.uint8(EMPTY), self.columns.age)

    def use(self, slot: int) -> None:
        """Record a use of a block, or its arrival."""
        if self.columns.age_view[slot] == self.now:
            return
        self.columns.age_view[slot] = self.now
        self._used += 1
        if self._used > len(self.columns.age) // _AGES:
            self._begin_age()

    def line(self, ages: Callable[[], npt.NDArray[np.uint8]] | None = None) -> Line:
        """Return an eviction queue.

        Args:
            ages: Returns the ages of the slots to consider, and ``EMPTY`` for all others. Default: all slots.
        """
        line = Line(self, ages or self.evictable)
        self._lines.append(line)
        return line

    def _begin_age(self) -> None:
        self._used = 0
        self.now += 1
        if self.now == EMPTY:
            # Halving merges each pair of neighbouring ages.
            self.columns.age[self.columns.age != EMPTY] >>= 1
            self.now >>= 1
            self._forget_candidates()

    def _forget_candidates(self) -> None:
        for line in self._lines:
            line.candidates = []


class Line:
    """An eviction queue: blocks ordered by the age of their last use, and within one age by slot."""

    def __init__(self, ages: Ages, ages_of: Callable[[], npt.NDArray[np.uint8]]) -> None:
        self._ages = ages
        self._ages_of = ages_of
        self._oldest = 0
        # Slots of the oldest age, or the first of them; the next victim is the last entry.
        self.candidates: list[int] = []

    def victim(self, is_pinned: Callable[[int], bool]) -> int | None:
        """Return the slot of the next block to evict, or None. The caller marks the slot ``EMPTY``.

        A pinned slot counts as used now.
        """
        tried = -1
        columns = self._ages.columns
        while True:
            while self.candidates:
                slot = self.candidates.pop()
                if columns.age_view[slot] != self._oldest:
                    continue
                if not is_pinned(slot):
                    return slot
                columns.age_view[slot] = self._ages.now
            ages = self._ages_of()
            self._oldest = int(ages.min(initial=EMPTY))
            if self._oldest in (EMPTY, tried):
                return None
            tried = self._oldest
            found = np.flatnonzero(ages == self._oldest)
            self.candidates = found[:_CANDIDATES][::-1].tolist()
            start = 0
            while self._oldest == self._ages.now and start < len(found) and all(map(is_pinned, self.candidates)):
                # Pinned slots keep the current age, and would be found again.
                start += _CANDIDATES
                self.candidates = found[start : start + _CANDIDATES][::-1].tolist()


class Shares:
    """Eviction among tenants that share the slots: accounts choose the tenant, the last use chooses the block."""

    def __init__(self, tenants: Tenants, columns: Columns, ages: Ages) -> None:
        self._columns = columns
        self._ages = ages
        self._accounts = Accounts(tenants)
        self._numbers: dict[Account, int] = {}
        self._known: list[tuple[Account, Line]] = []
        """Accounts by number, each with its eviction queue."""
        self._number = np.zeros(0, np.uint16)
        """Account number of each slot; a free slot keeps its last one."""
        held = columns.held()
        self._reserve()
        tags = np.ascontiguousarray(columns.keys[held, :TAG_BYTES]).view("<u8").ravel()
        different, which, counts = np.unique(tags, return_inverse=True, return_counts=True)
        numbers = [self._number_of(int(tag).to_bytes(TAG_BYTES, "little")) for tag in different]
        for number, count in zip(numbers, counts.tolist(), strict=True):
            self._known[number][0].blocks += count
        self._number[held] = np.array(numbers, np.uint16)[which]

    def enter(self, slot: int, key: BlockKey) -> None:
        """Count the block in a slot for its account."""
        if slot >= len(self._number):
            self._reserve()
        number = self._number[slot] = self._number_of(key)
        self._known[number][0].blocks += 1

    def leave(self, slot: int) -> None:
        """Remove the block in a slot from its account."""
        self._known[self._number[slot]][0].blocks -= 1

    def collect(self, count: int, take: Callable[[Line, int], int]) -> None:
        """Call ``take`` for the accounts that must give up blocks, at most ``count`` in total."""
        self._accounts.capacity = len(self._columns.age)
        self._accounts.collect(count, lambda account, size: take(self._known[self._numbers[account]][1], size))

    def _number_of(self, key: BlockKey) -> int:
        account = self._accounts.of(key)
        number = self._numbers.get(account)
        if number is None:
            number = self._numbers[account] = len(self._known)
            self._known.append((account, self._ages.line(lambda: self._ages_of(number))))
        return number

    def _ages_of(self, number: int) -> npt.NDArray[np.uint8]:
        self._reserve()
        return np.where(self._number == number, self._ages.evictable(), np.uint8(EMPTY))

    def _reserve(self) -> None:
        more = len(self._columns.age) - len(self._number)
        if more > 0:
            self._number = np.concatenate([self._number, np.zeros(more, np.uint16)])


@dataclass(slots=True)
class _Streak:
    """Failures of writes in one directory, without a success there."""

    segments: set[int] = field(default_factory=set)
    others_work: bool = False  # Whether a write to another directory has succeeded meanwhile.
    until: float = 0.0  # Time until which the directory is not used; 0 if it is.


class Index:
    """Blocks by key. ``expected`` is the likely number of blocks, ours and others'; ``tenants`` share our slots."""

    def __init__(self, columns: Columns, expected: int, tenants: Tenants | None = None) -> None:
        self.columns = columns
        columns.make_room(expected)
        self.table = DigestTable(expected)
        self._free: list[int] = []
        self._resting: OrderedDict[int, float] = OrderedDict()
        """Free slots that are not given out before a time, because a write failed there."""
        self._rested = 0  # Slots that came to rest since the last successful write.
        self._streaks: dict[int, _Streak] = {}
        """Directories, by number, where writes fail."""
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
                    self._free_slot(slot)

    def take(self, count: int) -> list[int]:
        """Take and pin at most ``count`` free slots; in order, so that neighbours are written together."""
        if self._resting or self._streaks:
            self._end_rests(time.monotonic())
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

    def rest(self, slots: Iterable[int]) -> None:
        """Free and unpin slots that could not be written, but give them out only after a pause.

        At a segment's second such slot, all of its free slots rest, so that a bad part of the medium fails no more
        stores. If a second segment of a directory fails, and writes succeed in other directories only, the whole
        directory rests, and its blocks stay. If the whole medium fails, at most a share of all slots rests, so that no
        blocks are evicted for stores that would fail too.
        """
        until, size = time.monotonic() + _REST_S, self.columns.segment_slots
        for slot in slots:
            self.give_back([slot])
            segment, path = slot // size, self._path_of(slot)
            streak = self._streaks.setdefault(path, _Streak())
            streak.segments.add(segment)
            if len(streak.segments) > 1 and streak.others_work:
                if not streak.until:
                    streak.until = until
                    self._keep_resting()
                    self._rest([other for other in self._free if self._path_of(other) == path], until)
                continue
            is_bad = any(other // size == segment for other in self._resting)
            same = [other for other in self._free if other == slot or (is_bad and other // size == segment)]
            if self._rested + len(same) <= len(self.columns.segments) * size // _REST_SHARE:
                self._rested += len(same)
                self._rest(same, until)

    def _end_rests(self, now: float) -> None:
        for streak in self._streaks.values():
            if 0 < streak.until <= now:
                # The next failure there begins another rest.
                streak.until = 0.0
                self._keep_resting()
        rested = list(itertools.takewhile(lambda slot: self._resting[slot] <= now, self._resting))
        for slot in rested:
            del self._resting[slot]
        self._free[:0] = rested

    def _keep_resting(self) -> None:
        """Evict no blocks in directories that rest, because their slots can't be written."""
        self._ages.keep(path for path, streak in self._streaks.items() if streak.until)

    def _rest(self, slots: Sequence[int], until: float) -> None:
        gone = set(slots)
        self._free = [slot for slot in self._free if slot not in gone]
        self._resting.update(dict.fromkeys(slots, until))

    def release(self, slots: Iterable[int]) -> None:
        """Free slots, immediately or when their last reader has ended."""
        for slot in slots:
            if slot // self.columns.segment_slots in self._closed:
                continue
            if slot in self._readers:
                self._left_behind.add(slot)
            else:
                self._free_slot(slot)

    def _free_slot(self, slot: int) -> None:
        streak = self._streaks.get(self._path_of(slot)) if self._streaks else None
        if streak is not None and streak.until:
            self._resting[slot] = streak.until
        else:
            self._free.append(slot)

    def _path_of(self, slot: int) -> int:
        """Return the number of a slot's directory."""
        return int(self.columns.segments[slot // self.columns.segment_slots]) - 1

    def add(self, rows: Sequence[Row]) -> None:
        """Add blocks in taken slots, from their journal records."""
        for _, slot, size_bytes, digest, key in rows:
            self.columns.set(slot, size_bytes, digest, key)
            self.table.set(digest, slot)
            self._ages.use(slot)
            if self._shares is not None:
                self._shares.enter(slot, key)
        self._blocks += len(rows)
        self._rested = 0
        if self._streaks:
            self._note_success({self._path_of(slot) for _, slot, *_ in rows})

    def _note_success(self, paths: set[int]) -> None:
        """End the streaks of directories where a write has succeeded."""
        for path, streak in list(self._streaks.items()):
            if path not in paths:
                streak.others_work = True
            elif not streak.until:
                del self._streaks[path]

    def hide(self, key: BlockKey) -> int:
        """Hide a block from lookups; return its place, or ``NOWHERE``. The caller must let a block of ours depart."""
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
        """Sort segments for removal: empty ones first, then by the mean age of their blocks.

        For any thread.
        """
        heats = []
        for segment in segments:
            age = self.columns.age[self.columns.held(*self._slots_of(segment))]
            heats.append((float(age.mean()) if len(age) else -1.0, segment))
        return [segment for _, segment in sorted(heats)]

    def close_segment(self, among: Sequence[int]) -> int | None:
        """Close the first open segment without pinned slots among these; return it. Its slots are not given out."""
        pinned = {slot // self.columns.segment_slots for slot in self._readers}
        segment = next((each for each in among if each not in pinned and each not in self._closed), None)
        if segment is not None:
            first, end = self._slots_of(segment)
            self._closed.add(segment)
            self._free = [slot for slot in self._free if not first <= slot < end]
            for slot in [slot for slot in self._resting if first <= slot < end]:
                del self._resting[slot]
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
