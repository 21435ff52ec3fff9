"""The index of an owner: what lies where, what may be read, written and evicted. Plain decisions, no I/O.

Used from the loop thread, except :meth:`Index.coldest` and :meth:`Index.count_uses`. Others' blocks are in the same
table, under places that name them; of these only the digest is known.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.backends.disk.columns import OUT_OF_USE, Columns
from kvstore.backends.disk.layout import Kind, Row, digest_of
from kvstore.backends.disk.table import NOWHERE, DigestTable
from kvstore.types import BlockKey

__all__ = ["OWNER_SHIFT", "Index"]

OWNER_SHIFT: Final = 40
"""A place is a slot, and above it the number of the owner: 0 for ourselves."""

_SLOT_MASK: Final = (1 << OWNER_SHIFT) - 1
_COLDEST_SHARE: Final = 64
_COLDEST_MAX: Final = 1 << 16
"""Candidates for eviction that are chosen at once: a 64th of the blocks, so that choosing costs each of them little."""


class Index:
    """Blocks by key.

    Args:
        columns: What lies in our slots.
        expected: How many blocks there will be, ours and others'.
    """

    def __init__(self, columns: Columns, expected: int) -> None:
        self.columns = columns
        self.table = DigestTable(expected)
        self.blocks = 0
        self._free: list[int] = []
        self._candidates: deque[tuple[int, int]] = deque()
        self._readers: Counter[int] = Counter()
        self._left_behind: set[int] = set()
        held = columns.held()
        self.table.add_all(columns.digest[held], held)
        self.blocks = len(self.table)
        for slot in held[self._doubled(held)].tolist() if self.blocks != len(held) else ():
            # Stored twice in another life: one of them is enough.
            columns.clear(slot)
        for segment in np.flatnonzero(columns.segments)[::-1].tolist():
            self._free.extend(columns.free_slots(segment).tolist())
        self._tick = 1 + int(columns.used.max(initial=0))

    def __len__(self) -> int:
        return self.blocks

    @property
    def free_slots(self) -> int:
        """Slots that can be written at once."""
        return len(self._free)

    def place(self, key: BlockKey) -> int:
        """Return where a block is thought to be, or ``NOWHERE``."""
        place = self.table.find(digest_of(key))
        if 0 <= place <= _SLOT_MASK and not self.columns.holds(place, key):
            return NOWHERE
        return place

    def slot(self, key: BlockKey) -> int | None:
        """Return our own slot of a block."""
        place = self.place(key)
        return place if 0 <= place <= _SLOT_MASK else None

    def touch(self, slots: Iterable[int]) -> None:
        """Note a use of our own slots."""
        self._tick += 1
        for slot in slots:
            self.columns.use(slot, self._tick)

    def pin(self, slot: int) -> None:
        """Keep a slot from being given to another block while it is read."""
        self._readers[slot] += 1

    def unpin(self, slot: int) -> None:
        """Undo one :meth:`pin`."""
        readers = self._readers[slot] - 1
        if readers:
            self._readers[slot] = readers
        else:
            del self._readers[slot]
            if slot in self._left_behind:
                self._left_behind.discard(slot)
                self.release((slot,))

    def is_pinned(self, slot: int) -> bool:
        """Tell whether somebody reads a slot."""
        return slot in self._readers

    def take(self, count: int) -> list[int]:
        """Take free slots, as many of ``count`` as there are, and pin them; neighbours lie side by side."""
        taken = self._free[-count:] if count else []
        del self._free[len(self._free) - len(taken) :]
        taken.sort()
        self._readers.update(taken)
        return taken

    def withhold(self) -> list[int]:
        """Let none of the slots that are free now be taken, until they are released; return them."""
        withheld, self._free = sorted(self._free), []
        return withheld

    def give_back(self, slots: Sequence[int]) -> None:
        """Make slots free that were taken and not written."""
        self.release(slots)
        for slot in slots:
            self.unpin(slot)

    def release(self, slots: Sequence[int]) -> None:
        """Make slots free: at once, or when the last reader has let go."""
        for slot in slots:
            if slot in self._readers:
                self._left_behind.add(slot)
            else:
                self._free.append(slot)

    def add(self, rows: Sequence[Row]) -> None:
        """Note blocks in slots that were taken, as the journal tells of them."""
        self._tick += 1
        for _, slot, size_bytes, digest, key in rows:
            self.columns.set(slot, size_bytes, digest, key, self._tick)
            self.table.set(digest, slot)
        self.blocks += len(rows)

    def remove(self, key: BlockKey) -> int | None:
        """Forget a block of ours; return its slot, which is then whoever's asked to wipe and :meth:`release` it."""
        slot = self.slot(key)
        if slot is not None:
            self._forget(slot)
        return slot

    def retire(self, slot: int) -> None:
        """Take a slot that holds nothing out of use for good."""
        self.columns.clear(slot, OUT_OF_USE)

    def count_uses(self, uses: npt.NDArray[np.uint8]) -> None:
        """Count the bytes that others set for slots that they read as uses now, and clear them; on any thread."""
        used = self.columns.shallow().used
        # A copy: what is searched while others write to it is an error.
        read = np.flatnonzero(uses[: len(used)].copy())
        used[read] = self._tick
        uses[read] = 0

    def coldest(self, count: int) -> list[tuple[int, int]]:
        """Return the slots that were not used for longest, and when that was; whole-array work, on any thread.

        Args:
            count: How many are wanted now; more are returned for later, as choosing looks at all.
        """
        columns = self.columns.shallow()
        held = columns.held()
        wanted = min(len(held), max(2 * count, min(_COLDEST_MAX, len(held) // _COLDEST_SHARE)))
        used = columns.used[held]
        if wanted < len(held):
            chosen = np.argpartition(used, wanted - 1)[:wanted]
            held, used = held[chosen], used[chosen]
        order = np.argsort(used, kind="stable")
        return list(zip(held[order].tolist(), used[order].tolist(), strict=True))

    def suggest(self, candidates: Sequence[tuple[int, int]]) -> None:
        """Take over what :meth:`coldest` returned."""
        self._candidates = deque(candidates)

    def evict(self, count: int) -> list[Row]:
        """Forget blocks of ours that may go, coldest first, as far as candidates reach; return what to tell of them."""
        rows: list[Row] = []
        columns = self.columns
        while self._candidates and len(rows) < count:
            slot, used = self._candidates.popleft()
            unchanged = columns.used_at(slot) == used and columns.size_bytes(slot) not in (0, OUT_OF_USE)
            if unchanged and slot not in self._readers:
                rows.append((Kind.REMOVE, slot, 0, columns.digest_at(slot), columns.key(slot)))
                self._forget(slot)
        return rows

    def least_used_segment(self, among: Sequence[int]) -> int | None:
        """Return the segment to give up first: an empty one, or the one whose blocks were used longest ago."""
        columns = self.columns
        best: tuple[float, int] | None = None
        pinned = {self.segment_of(slot) for slot in self._readers}
        for segment in among:
            if segment in pinned:
                continue
            start = segment * columns.segment_slots
            sizes = columns.size[start : start + columns.segment_slots]
            held = (sizes != 0) & (sizes != OUT_OF_USE)
            used = columns.used[start : start + columns.segment_slots][held]
            heat = float(used.mean()) if len(used) else -1.0
            if best is None or heat < best[0]:
                best = (heat, segment)
        return None if best is None else best[1]

    def close_segment(self, segment: int) -> list[Row]:
        """Forget all blocks of a segment and let none of its slots be taken; return what to tell of them."""
        columns = self.columns
        first = segment * columns.segment_slots
        self._free = [slot for slot in self._free if not first <= slot < first + columns.segment_slots]
        held = columns.held()
        slots = held[(held >= first) & (held < first + columns.segment_slots)]
        digests = columns.digest[slots].tolist()
        for slot in slots.tolist():
            self._forget(slot)
        return [
            (Kind.REMOVE, slot, 0, digest, key)
            for slot, digest, key in zip(slots.tolist(), digests, columns.keys_in(slots), strict=True)
        ]

    def drop_segment(self, segment: int) -> None:
        """Note that a closed segment is gone."""
        self.columns.drop_segment(segment)

    def open_segment(self, segment: int, path: int) -> None:
        """Note a new segment, and make its slots free."""
        self.columns.open_segment(segment, path)
        self._free[:0] = self.columns.free_slots(segment).tolist()

    def free_segment_number(self) -> int:
        """Return the lowest number that no segment has."""
        absent = np.flatnonzero(self.columns.segments == 0)
        return int(absent[0]) if len(absent) else len(self.columns.segments)

    def segment_of(self, slot: int) -> int:
        """Return the number of the segment that a slot lies in."""
        return slot // self.columns.segment_slots

    def _forget(self, slot: int) -> None:
        self.table.remove(self.columns.digest_at(slot), slot)
        self.columns.clear(slot)
        self.blocks -= 1

    def _doubled(self, held: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        return np.array([self.table.find(int(d)) != s for d, s in zip(self.columns.digest[held], held, strict=True)])
