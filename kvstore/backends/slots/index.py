"""The index: places by block, free and pinned slots, and the choice of blocks to evict. No I/O.

Used from the loop thread. The table of digests knows a block's place, the segment's rows its key.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.backends.disk.table import NOWHERE, DigestTable
from kvstore.backends.slots.ages import Ages, Line, Shares
from kvstore.backends.slots.layout import State, digest_of
from kvstore.backends.slots.segment import EMPTY, SLOT_BITS, SLOT_MASK, WITHDRAWN, Segment
from kvstore.tenants import Tenants
from kvstore.types import BlockKey


class Index:
    """Blocks by key. ``expected`` is the likely number of blocks; ``tenants`` share the slots."""

    def __init__(self, expected: int, tenants: Tenants | None = None) -> None:
        self.segments: dict[int, Segment] = {}
        self._known: dict[int, Segment] = {}
        """Also segments that are gone: operations on their slots may still run."""
        self._table = DigestTable(expected)
        self._ids = itertools.count()
        self._readers: Counter[int] = Counter()
        self._left_behind: set[int] = set()
        """Places without a block that are free once their last reader has ended."""
        self._ages = Ages(self.segments)
        self._line = self._ages.line(lambda segment: segment.age)
        self._shares = None if tenants is None else Shares(tenants, self._ages)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def free_slots(self) -> int:
        """Number of slots that can be written immediately."""
        # No comprehension: this runs for each store.
        free = 0
        for segment in self.segments.values():
            free += len(segment.free)
        return free

    @property
    def slots(self) -> int:
        """Number of slots in all segments."""
        return self._ages.slots

    @property
    def used_bytes(self) -> int:
        """Length of all slots that hold blocks."""
        return sum([len(segment.held()) * segment.head.slot_bytes for segment in self.segments.values()])

    @property
    def opened(self) -> Collection[Segment]:
        """All segments that were added, also those that are gone."""
        return self._known.values()

    def at(self, place: int) -> tuple[Segment, int]:
        """Return segment and slot of a place."""
        return self._known[place >> SLOT_BITS], place & SLOT_MASK

    def place(self, key: BlockKey, digest: int | None = None) -> int:
        """Return the place of a block, or ``NOWHERE``; ``digest`` is computed if it is not given."""
        place = self._table.find(digest_of(key) if digest is None else digest)
        if place == NOWHERE or self.segments[place >> SLOT_BITS].holds(place & SLOT_MASK, key):
            return place
        return NOWHERE

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

    def take(self, count: int) -> list[int]:
        """Take at most ``count`` free slots; in order, so that neighbours are written together."""
        taken: list[int] = []
        for segment in self.segments.values():
            if len(taken) == count:
                break
            if segment.free:
                slots = segment.free[len(taken) - count :]
                del segment.free[-len(slots) :]
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

    def rest(self, places: Iterable[int]) -> None:
        """Free slots that could not be written, to be given out after all others of their segments."""
        for place in places:
            segment, slot = self.at(place)
            segment.free.insert(0, slot)

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
        return True

    def evict(self, count: int) -> list[int]:
        """Let at most ``count`` blocks depart; return their places."""
        places: list[int] = []

        def take(line: Line, size: int) -> int:
            before = len(places)
            while len(places) < before + size and (place := line.victim(self._readers.__contains__)) is not None:
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
            if self._shares is not None and segment.id in self.segments:
                self._shares.enter(segment, slot, segment.key(slot))

    def hide(self, places: Iterable[int]) -> None:
        """Hide departing blocks from lookups."""
        for place in places:
            segment, slot = self.at(place)
            self._table.remove(digest_of(segment.key(slot)), place)

    def leave(self, places: Sequence[int], state: int = State.FREE) -> None:
        """Remove departed blocks, after their rows were written; free their slots, or retire them."""
        self.hide(places)
        for place in places:
            self.settle(place, state)

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
        segment.id = next(self._ids)
        segment.first = segment.id << SLOT_BITS
        self.segments[segment.id] = self._known[segment.id] = segment
        self._ages.slots += segment.head.slots
        held = segment.held()
        doubled = held[~self._table.add_all(digests[held], held + segment.first)]
        segment.state[doubled], segment.age[doubled] = State.FREE, EMPTY
        if self._shares is not None:
            self._shares.open_segment(segment)
        places: list[int] = (doubled + segment.first).tolist()
        return places

    def withdraw(self, segment: Segment, slots: Iterable[int]) -> list[BlockKey]:
        """Remove blocks of a segment that is given up, whose rows stay; return their keys."""
        places = self.depart([segment.first + slot for slot in slots])
        self.hide(places)
        for place in places:
            segment.state_view[place & SLOT_MASK] = WITHDRAWN
        return [segment.key(place & SLOT_MASK) for place in places]

    def close_segment(self, segment: Segment) -> list[BlockKey]:
        """Remove a segment with its last blocks; return their keys. Operations on its slots may still run."""
        held = segment.held().tolist()
        keys = self.withdraw(segment, held)
        # Also those that depart.
        self.hide([segment.first + slot for slot in held])
        del self.segments[segment.id]
        self._ages.slots -= segment.head.slots
        return keys

    def is_quiet(self, segment: Segment) -> bool:
        """Return whether no operation runs on any slot of a segment, and the state of each row is known."""
        at_rest = (segment.state == State.USED) & (segment.age != EMPTY)
        at_rest |= (segment.state == State.RETIRED) | (segment.state == WITHDRAWN)
        is_read = any(place >> SLOT_BITS == segment.id for place in self._readers)
        return not is_read and len(segment.free) + int(np.count_nonzero(at_rest)) == segment.head.slots

    def forget(self, segment: Segment) -> None:
        """Forget a removed segment that is quiet."""
        del self._known[segment.id]
