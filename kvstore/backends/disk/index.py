"""The index: places by block, free and pinned slots, and the choice of blocks to evict. No I/O.

Used from the loop thread. The table of digests knows a block's place, the segment's rows its key.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.backends.disk.ages import Ages, Line, Shares
from kvstore.backends.disk.layout import Rows, State, digest_of
from kvstore.backends.disk.segment import EMPTY, SLOT_BITS, SLOT_MASK, WITHDRAWN, Segment
from kvstore.backends.disk.table import NOWHERE, DigestTable
from kvstore.tenants import Tenants
from kvstore.types import BlockKey

_REST_S: Final = 60.0
"""Time for which a segment rests."""

_IN_VAIN_SHARE: Final = 8
"""Share of the blocks that is evicted at most while no store succeeds: an eighth."""


class RowChanges(NamedTuple):
    """Rows of slots that were read from the table of another engine."""

    slots: npt.NDArray[np.int64]
    rows: Rows
    used: npt.NDArray[np.bool_]  # Which of them are intact, and hold a block.


class News(NamedTuple):
    """Keys of blocks that other engines have added and removed."""

    added: list[BlockKey]
    removed: list[BlockKey]

    def net(self) -> News:
        """Return this without the blocks that only moved."""
        moved = set(self.added).intersection(self.removed)
        return self if not moved else News(*([key for key in keys if key not in moved] for keys in self))


class Index:
    """Blocks by key. ``expected`` is the likely number of blocks; ``tenants`` share the slots."""

    def __init__(self, expected: int, tenants: Tenants | None = None) -> None:
        self.segments: dict[int, Segment] = {}
        """Those that this engine holds."""
        self.known: dict[int, Segment] = {}
        """Also those of other engines, and those that are gone while operations on their slots may run."""
        self._free: dict[int, Segment] = {}
        """Those that this engine holds that have free slots."""
        self._table = DigestTable(expected)
        self._ids = itertools.count()
        self._readers: Counter[int] = Counter()
        self._doubled: dict[int, list[int]] = {}
        """Places of blocks of other engines, by digest, that are elsewhere, too, where lookups find them."""
        self._left_behind: set[int] = set()
        """Places without a block that are free once their last reader has ended."""
        self._ages = Ages(self.segments)
        self._line = self._ages.line(lambda segment: segment.age)
        self._shares = None if tenants is None else Shares(tenants, self._ages)
        self._failing: dict[int, set[int]] = {}
        """Roots with a failed write and none that succeeded since; ids of their segments that rest."""
        self._evicted_in_vain = 0
        self._rest_until = 0.0  # End of the last rest; 0 if no segment rests.

    def __len__(self) -> int:
        return len(self._table)

    def free_slots(self, slot_bytes: int = 0) -> int:
        """Return the number of slots of at least this length that can be written immediately."""
        return sum([len(segment.free) for segment in self._free.values() if segment.head.slot_bytes >= slot_bytes])

    @property
    def slots(self) -> int:
        """Number of slots in the segments that this engine holds."""
        return self._ages.slots

    def segments_in(self, root: int) -> list[Segment]:
        """Return the segments that this engine holds in the root at this position."""
        return [each for each in self.segments.values() if each.root == root]

    def used(self) -> tuple[int, int]:
        """Number of our slots that hold blocks, and their length."""
        used = [(len(segment.held()), segment.head.slot_bytes) for segment in self.segments.values()]
        return sum([blocks for blocks, _ in used]), sum([blocks * slot_bytes for blocks, slot_bytes in used])

    def at(self, place: int) -> tuple[Segment, int]:
        """Return segment and slot of a place."""
        return self.known[place >> SLOT_BITS], place & SLOT_MASK

    def place(self, key: BlockKey, digest: int | None = None) -> int:
        """Return the place of a block, or ``NOWHERE``; ``digest`` is computed if it is not given."""
        place = self._table.find(digest_of(key) if digest is None else digest)
        # A forged row may have the digest of another key, whose entry then stays when the segment is gone.
        segment = self.known.get(place >> SLOT_BITS)
        return place if segment is not None and segment.holds(place & SLOT_MASK, key) else NOWHERE

    def found(self, segment: Segment, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return those of some slots whose blocks lookups find there, and that don't depart."""
        if segment.is_ours:
            are_there = (segment.state[slots] == State.USED) & (segment.age[slots] != EMPTY)
        else:
            digests = np.array([digest_of(key) for key in segment.keys(slots)], np.uint64)
            are_there = self._table.find_all(digests) == segment.first + slots
        return np.extract(are_there, slots)

    def touch(self, places: Iterable[int]) -> None:
        """Record a use of blocks."""
        for place in places:
            segment, slot = self.segments.get(place >> SLOT_BITS), place & SLOT_MASK
            # The block may be gone: other engines mark slots long after reading them.
            if segment is not None and segment.age_view[slot] != EMPTY:
                self._ages.use(segment, slot)

    def pin(self, places: Iterable[int]) -> None:
        """Keep slots from being given to other blocks while they are read."""
        self._readers.update(places)

    def unpin(self, places: Iterable[int]) -> None:
        """Undo one :meth:`pin`."""
        for place in places:
            readers = self._readers[place] - 1
            if readers:
                self._readers[place] = readers
            else:
                del self._readers[place]
                if place in self._left_behind:
                    self._left_behind.discard(place)
                    self.release((place,))

    def take(self, count: int, slot_bytes: int, *, longer: bool = False, resting: bool = False) -> list[int]:
        """Take at most ``count`` free slots of a length, or also ``longer`` ones or those of segments that rest.

        In order, so that neighbours are written together.
        """
        taken: list[int] = []
        if self._rest_until:
            self._end_rests()
        for segment in list(self._free.values()):
            if len(taken) == count:
                break
            fits = segment.head.slot_bytes == slot_bytes or (longer and segment.head.slot_bytes > slot_bytes)
            if fits and (resting or not segment.rests_until):
                slots = segment.free[len(taken) - count :]
                del segment.free[-len(slots) :]
                if not segment.free:
                    del self._free[segment.id]
                taken += [segment.first + slot for slot in sorted(slots)]
        return taken

    def release(self, places: Iterable[int]) -> None:
        """Free slots that hold no block, immediately or when their last reader has ended."""
        for place in places:
            if place in self._readers:
                self._left_behind.add(place)
            else:
                segment, slot = self.at(place)
                segment.free.append(slot)
                self._note_free(segment)

    def rest(self, places: Collection[int]) -> None:
        """Free slots that could not be written, to be given out after all others of their segments."""
        for place in places:
            segment, slot = self.at(place)
            segment.free.insert(0, slot)
            self._note_free(segment)
        self.note_failures(places)

    def _note_free(self, segment: Segment) -> None:
        if segment.id in self.segments:
            self._free[segment.id] = segment

    def avoid(self, roots: Collection[int], duration_s: float) -> None:
        """Let the segments of some roots rest at least for some time, unless all others rest already."""
        if all(segment.root in roots or segment.rests_until for segment in self.segments.values()):
            return
        until = time.monotonic() + duration_s
        for segment in self.segments.values():
            if segment.root in roots:
                segment.rests_until = max(segment.rests_until, until)
                self._rest_until = max(self._rest_until, until)

    def note_failures(self, places: Collection[int]) -> bool:
        """Note slots or rows that could not be written.

        At the second failure, their segment rests, so that a bad part of the medium fails no more stores. So does a
        root with two such segments, if there are other roots.

        Returns:
            Whether the whole medium fails. Then no segment rests.
        """
        if not places:
            return False
        until = time.monotonic() + _REST_S
        for place in places:
            if (segment := self.segments.get(place >> SLOT_BITS)) is None:
                continue
            segment.failures += 1
            failing = self._failing.setdefault(segment.root, set())
            if segment.failures > 1:
                segment.rests_until = self._rest_until = until
                failing.add(segment.id)
            of_root = self.segments_in(segment.root)
            if len(failing) > 1 and len(of_root) < len(self.segments):
                for each in of_root:
                    each.rests_until = until
        fails = all(segment.rests_until for segment in self.segments.values())
        if fails:
            for segment in self.segments.values():
                segment.rests_until = 0.0
        return fails

    def _end_rests(self) -> None:
        now = time.monotonic()
        if now >= self._rest_until:
            self._rest_until = 0.0
        for segment in self.segments.values():
            if 0 < segment.rests_until <= now:
                # The next failure begins another rest.
                segment.rests_until = 0.0

    def _note_success(self, segment: Segment) -> None:
        segment.failures, segment.rests_until = 0, 0.0
        self._failing.pop(segment.root, None)
        self._evicted_in_vain = 0

    def add(self, place: int, size_bytes: int, mark: int, digest: int, key: BlockKey) -> bool:
        """Add a block in a taken slot, whose row was written; return whether its segment is still there."""
        segment, slot = self.at(place)
        segment.set(slot, size_bytes, mark, key)
        if segment.id not in self.segments:
            segment.age_view[slot] = self._ages.now
            return False
        self._table.set(digest, place)
        self._ages.use(segment, slot)
        if self._shares is not None:
            self._shares.enter(segment, slot, key)
        if self._failing:
            self._note_success(segment)
        return True

    def evict(self, count: int, slot_bytes: int) -> list[int]:
        """Let at most ``count`` blocks in slots of at least this length depart; return their places.

        While stores fail, at most a share of all blocks departs: the medium may take no block at all.
        """
        places: list[int] = []
        if self._failing:
            count = min(count, self.slots // _IN_VAIN_SHARE - self._evicted_in_vain)

        def take(line: Line, size: int) -> int:
            before = len(places)
            while (
                len(places) < before + size
                and (place := line.victim(self._readers.__contains__, slot_bytes)) is not None
            ):
                places.extend(self.depart((place,)))
            return len(places) - before

        if self._shares is None:
            take(self._line, count)
        else:
            self._shares.collect(count, take)
        return places

    def depart(self, places: Iterable[int]) -> list[int]:
        """Let blocks depart: they are evicted no more, and found until :meth:`leave`. Return those that now depart."""
        departing: list[int] = []
        for place in places:
            segment, slot = self.at(place)
            if segment.age_view[slot] != EMPTY:
                segment.age_view[slot] = EMPTY
                if self._shares is not None:
                    self._shares.leave(segment, slot)
                departing.append(place)
        return departing

    def stay(self, places: Iterable[int]) -> None:
        """Undo :meth:`depart` of blocks whose rows could not be written; other blocks are tried before them."""
        for place in places:
            segment, slot = self.at(place)
            segment.age_view[slot] = self._ages.now
            if segment.id in self.segments and self._shares is not None:
                self._shares.enter(segment, slot, segment.key(slot))

    def hide(self, places: Iterable[int]) -> list[BlockKey]:
        """Hide departing blocks from lookups; return the keys of those that lookups have found."""
        hidden: list[BlockKey] = []
        for place in places:
            segment, slot = self.at(place)
            digest = digest_of(key := segment.key(slot))
            if self._table.remove(digest, place):
                hidden.append(key)
            if self._doubled:
                self._doubled.pop(digest, None)
        return hidden

    def leave(self, places: Sequence[int], state: int = State.FREE) -> list[BlockKey]:
        """Remove departed blocks, after their rows were written; free their slots, or retire them.

        Returns:
            The keys of those that lookups found here, and find nowhere else.
        """
        news = News([], [])
        for place in places:
            segment, slot = self.at(place)
            self._remove(segment.key(slot), place, news)
            self.settle(place, state)
        if self._failing:
            self._evicted_in_vain += len(places)
        return news.removed

    def settle(self, place: int, state: int) -> None:
        """Give a slot without a block the state that its row has now, and free it if that is free."""
        segment, slot = self.at(place)
        segment.state_view[slot] = state
        if state == State.FREE:
            self.release((place,))

    def open_segment(self, segment: Segment, digests: npt.NDArray[np.uint64]) -> list[int]:
        """Add a segment with its blocks, given the digests of all its slots.

        Returns:
            Places of blocks that are elsewhere, too. They hold no block, but their rows say so only once written.
        """
        self.follow(segment)
        held = segment.held()
        self._table.add_all(digests[held], held + segment.first)
        return self._own(segment, digests)

    def follow(self, segment: Segment) -> None:
        """Add a segment without its blocks; those of another engine are added by :meth:`see`."""
        segment.id = next(self._ids)
        segment.first = segment.id << SLOT_BITS
        self.known[segment.id] = segment

    def see(self, segment: Segment, digests: npt.NDArray[np.uint64], start: int, end: int) -> list[BlockKey]:
        """Add the blocks of some slots of another engine; return the keys of those that are nowhere else."""
        held = start + np.flatnonzero(segment.state[start:end] == State.USED)
        return segment.keys(self._add_all(segment, digests, held))

    def update(self, segment: Segment, changes: RowChanges) -> News:
        """Enter what another engine has changed."""
        news = News([], [])
        columns = (
            changes.rows[name].tolist() for name in ("generation", "size", "mark", "digest", "key_length", "key")
        )
        for slot, used, generation, size, mark, digest, length, key in zip(
            changes.slots.tolist(), changes.used.tolist(), *columns, strict=True
        ):
            was_used = segment.state_view[slot] == State.USED
            # A table that was restored has its former generations once more.
            seen = segment.generation_view[slot], segment.mark_view[slot]
            if (was_used or used) and (was_used != used or seen != (generation, mark)):
                place = segment.first + slot
                if was_used:
                    segment.state_view[slot] = State.FREE
                    self._remove(segment.key(slot), place, news)
                if used:
                    segment.set(slot, size, mark, key[:length])
                    if self._table.find(digest) == NOWHERE:
                        self._table.set(digest, place)
                        news.added.append(key[:length])
                    else:
                        self._doubled.setdefault(digest, []).append(place)
            segment.generation_view[slot] = generation
        return news.net()

    def take_over(self, before: Segment, ours: Segment, digests: npt.NDArray[np.uint64]) -> tuple[list[int], News]:
        """Replace a segment of another engine by the same one that we hold now.

        Returns:
            The places of :meth:`open_segment`, and what has changed since the last update.
        """
        news = News([], [])
        ours.id, ours.first = before.id, before.first
        self.known[ours.id] = ours
        was_used, same = before.state == State.USED, ours.state == State.USED
        for seen, now in ((before.generation_view, ours.generation_view), (before.mark_view, ours.mark_view)):
            same &= np.asarray(seen) == np.asarray(now)
        for slot in np.flatnonzero(was_used & ~same).tolist():
            self._remove(before.key(slot), ours.first + slot, news)
        news.added.extend(ours.keys(self._add_all(ours, digests, ours.held())))
        return self._own(ours, digests), news.net()

    def _add_all(
        self, segment: Segment, digests: npt.NDArray[np.uint64], held: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Let lookups find the blocks in some slots; return the slots of those that are nowhere else."""
        is_new = self._table.add_all(digests[held], held + segment.first)
        elsewhere = held[~is_new]
        elsewhere = elsewhere[self._table.find_all(digests[elsewhere]) != elsewhere + segment.first]
        for digest, place in zip(digests[elsewhere].tolist(), (elsewhere + segment.first).tolist(), strict=True):
            self._doubled.setdefault(digest, []).append(place)
        return held[is_new]

    def _remove(self, key: BlockKey, place: int, news: News) -> None:
        """Remove a block, unless it is elsewhere, too; then lookups find it there."""
        digest = digest_of(key)
        doubled = [each for each in self._doubled.pop(digest, ()) if each != place and self._is_there(each, key)]
        if self._table.remove(digest, place):
            if doubled:
                self._table.set(digest, doubled.pop())
            else:
                news.removed.append(key)
        if doubled:
            self._doubled[digest] = doubled

    def _is_there(self, place: int, key: BlockKey) -> bool:
        """Return whether another engine's slot holds a block, as far as is known."""
        segment = self.known.get(place >> SLOT_BITS)
        slot = place & SLOT_MASK
        return (
            segment is not None
            and not segment.is_ours
            and segment.state_view[slot] == State.USED
            and segment.holds(slot, key)
        )

    def _own(self, segment: Segment, digests: npt.NDArray[np.uint64]) -> list[int]:
        """Use the slots of a segment, whose blocks are in the table."""
        self.segments[segment.id] = segment
        if segment.free:
            self._free[segment.id] = segment
        self._ages.slots += segment.head.slots
        held = segment.held()
        doubled = held[self._table.find_all(digests[held]) != held + segment.first]
        segment.state[doubled], segment.age[doubled] = State.FREE, EMPTY
        for digest in digests[doubled].tolist():
            others = [place for place in self._doubled.pop(digest, ()) if place >> SLOT_BITS != segment.id]
            if others:
                self._doubled[digest] = others
        if self._shares is not None:
            self._shares.open_segment(segment)
        places: list[int] = (doubled + segment.first).tolist()
        return places

    def coldest(self, slot_bytes: int, *, is_wasting: bool) -> Segment | None:
        """Return the segment that is of more use with slots of this length; None if none is.

        That is the least used of those with shorter slots, if its average block was used before the next victim among
        the slots of at least this length. If longer slots are wasted, it is the least used of those. None that rests.
        """
        able = [each for each in self.segments.values() if not each.rests_until]
        if is_wasting:
            longer = [each for each in able if each.head.slot_bytes > slot_bytes]
            return min(longer, key=lambda each: each.average_age, default=None)
        long = [each for each in able if each.head.slot_bytes >= slot_bytes]
        oldest = min([int(each.age.min()) for each in long], default=EMPTY)
        shorter = [each for each in able if each.head.slot_bytes < slot_bytes]
        found = min(shorter, key=lambda each: each.average_age, default=None)
        return found if found is not None and found.average_age < oldest else None

    def withdraw(self, segment: Segment, slots: Iterable[int]) -> list[BlockKey]:
        """Remove blocks of a segment that is given up, whose rows stay; return their keys."""
        places = self.depart([segment.first + slot for slot in slots])
        self.hide(places)
        for place in places:
            segment.state_view[place & SLOT_MASK] = WITHDRAWN
        return segment.keys(np.array(places, np.int64) & SLOT_MASK)

    def close_segment(self, segment: Segment) -> list[BlockKey]:
        """Remove a segment with its last blocks; return their keys. Operations on its slots may still run."""
        keys = self.withdraw(segment, segment.held().tolist())
        # Also those that depart, whatever becomes of their rows.
        keys += self.hide((segment.held() + segment.first).tolist())
        del self.segments[segment.id]
        self._free.pop(segment.id, None)
        self._ages.slots -= segment.head.slots
        return keys

    def is_quiet(self, segment: Segment) -> bool:
        """Return whether no operation runs on any slot of a segment, and the state of each row is known."""
        at_rest = (segment.state == State.USED) & (segment.age != EMPTY)
        at_rest |= (segment.state == State.RETIRED) | (segment.state == WITHDRAWN)
        return not self.is_read(segment) and len(segment.free) + int(np.count_nonzero(at_rest)) == segment.head.slots

    def is_read(self, segment: Segment) -> bool:
        """Return whether a slot of a segment is being read."""
        return any(place >> SLOT_BITS == segment.id for place in self._readers)

    def forget(self, segment: Segment) -> None:
        """Forget a segment that is gone and quiet."""
        if self.known.get(segment.id) is segment:
            del self.known[segment.id]
