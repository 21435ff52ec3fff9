"""Eviction order of the primary tier, with blocks that must not be evicted now."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvstore.eviction import LRU, make_policy
from kvstore.types import BlockKey

__all__ = ["EvictionOrder", "Marks", "Rank"]

Rank: TypeAlias = "tuple[int, int]"
"""Importance of a retained block, above (0, 0): blocks of the lowest rank are evicted first."""

_NO_RANK: Rank = (0, 0)


@dataclass(slots=True)
class Marks:
    """What keeps blocks from eviction.

    Attributes:
        held: Blocks kept on request.
        dirty: Blocks that must be written to a tier before they are evicted.
        ranks: Rank of each block that has one.
    """

    held: set[BlockKey] = field(default_factory=set)
    dirty: set[BlockKey] = field(default_factory=set)
    ranks: dict[BlockKey, Rank] = field(default_factory=dict)


class EvictionOrder:
    """An eviction policy, and the blocks that it must not choose now.

    Each block is in exactly one of four places: with the policy; *parked*, chosen by the policy while it was spared
    (pinned, held or dirty); *shelved*, chosen while it had a rank; or *first in line*, chosen or demoted before and
    not used since. Victims are those first in line, then the policy's, then the shelved ones, by rank. Eviction
    examines a spared block once instead of at each allocation, so it stays O(1) per block.

    Args:
        policy: Name of the eviction policy.
        capacity: Most blocks there can be.
        is_pinned: Whether a block is pinned now.
        marks: Marks of blocks, of which some may be in another order; by default its own.

    Attributes:
        marks: The same.
    """

    def __init__(
        self, policy: str, capacity: int, is_pinned: Callable[[BlockKey], bool], marks: Marks | None = None
    ) -> None:
        self._policy = make_policy(policy, capacity)
        self._orders_by_use_alone = isinstance(self._policy, LRU)
        self._is_pinned = is_pinned
        self._parked: set[BlockKey] = set()
        self._first_out: OrderedDict[BlockKey, None] = OrderedDict()
        self._shelves: dict[Rank, OrderedDict[BlockKey, None]] = {}
        """Shelved blocks by rank; no shelf is empty."""
        self._lowest: list[Rank] = []
        """A heap of the ranks of all shelves, and of some that are gone."""
        self._wanted: list[BlockKey] = []
        self.marks = marks or Marks()
        self._held, self._dirty, self._ranks = self.marks.held, self.marks.dirty, self.marks.ranks
        self.enter = self._policy.insert
        """Add a block."""

    def __len__(self) -> int:
        return len(self._policy) + len(self._parked) + len(self._first_out) + sum(map(len, self._shelves.values()))

    def entries(self, keys: Sequence[BlockKey]) -> Iterable[tuple[Callable[[BlockKey], None], Iterable[BlockKey]]]:
        """Return the function that adds a block, for some blocks at a time."""
        return ((self.enter, keys),)

    @property
    def has_set_aside(self) -> bool:
        """Whether any block is not with the policy; if not, pins need no call."""
        return bool(self._parked or self._first_out or self._shelves)

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Note uses, the most important last."""
        touch = self._policy.touch
        if not self.has_set_aside:
            for key in keys:
                touch(key)
            return
        for key in keys:
            if self._take_back(key):
                self._policy.insert(key)
            else:
                touch(key)

    def settle(self, keys: Iterable[BlockKey]) -> None:
        """Reorder blocks if the policy is LRU; other policies would count a further use."""
        if self._orders_by_use_alone:
            self.touch(keys)

    def spare(self, key: BlockKey) -> None:
        """Note that a block became spared."""
        if key not in self._parked and self._take_back(key):
            self._park(key)

    def let_go(self, key: BlockKey) -> None:
        """Note that a reason to spare a block ended; if parked and without another reason, it can be chosen again."""
        if key in self._parked and not self._is_spared(key):
            self._parked.discard(key)
            self._set_aside(key)

    def retain(self, key: BlockKey, rank: Rank) -> None:
        """Give a block a rank: blocks of lower rank, or of none, are chosen before it."""
        if self._ranks.get(key) == rank:
            return
        is_aside = key not in self._parked and self._take_back(key)
        self._ranks[key] = rank
        if is_aside:
            self._set_aside(key)

    def end_retention(self, key: BlockKey) -> None:
        """Take a block's rank from it; if shelved, it becomes first in line."""
        if self._unshelve(key):
            self._first_out[key] = None
        self._ranks.pop(key, None)

    def demote(self, key: BlockKey) -> None:
        """Make a block first in line, or park it if it is spared; its rank ends."""
        self.end_retention(key)
        if self._policy.remove(key):
            if self._is_spared(key):
                self._park(key)
            else:
                self._first_out[key] = None

    def leave(self, key: BlockKey) -> None:
        """Forget a block that was removed rather than evicted."""
        self._held.discard(key)
        self._dirty.discard(key)
        if not self._take_back(key):
            self._policy.remove(key)
        self._ranks.pop(key, None)

    def choose(self, need: int, wanted: Sequence[BlockKey] = ()) -> list[BlockKey]:
        """Choose blocks to evict, coldest first; fewer than ``need`` if no more can be evicted.

        Each of them must then be :meth:`evicted` or :meth:`put_back`. Orders with shares need the blocks ``wanted``.
        """
        chosen: list[BlockKey] = []
        while self._first_out and len(chosen) < need:
            chosen.append(self._first_out.popitem(last=False)[0])
        chosen += self._victims(need - len(chosen), self._dirty)
        while self._shelves and len(chosen) < need:
            while self._lowest[0] not in self._shelves:
                heapq.heappop(self._lowest)
            key = next(iter(self._shelves[self._lowest[0]]))
            self._unshelve(key)
            chosen.append(key)
        return chosen

    def put_back(self, chosen: Iterable[BlockKey]) -> None:
        """Undo :meth:`choose`."""
        for key in chosen:
            self._set_aside(key)

    def evicted(self, chosen: Iterable[BlockKey]) -> None:
        """Forget chosen blocks."""
        for key in chosen if self._ranks else ():
            self._ranks.pop(key, None)

    def look_ahead(self, count: int) -> None:
        """Choose the coldest blocks before their slots are needed: dirty ones become wanted, others first in line.

        Args:
            count: Blocks to have first in line or newly wanted; blocks already wanted are not counted.
        """
        for key in self._victims(count - len(self._first_out), ()):
            if key in self._dirty:
                self._park(key)
            else:
                self._first_out[key] = None

    def take_wanted(self) -> list[BlockKey]:
        """Return the dirty blocks that the policy chose since the last call."""
        wanted, self._wanted = self._wanted, []
        return [key for key in dict.fromkeys(wanted) if key in self._dirty]

    def clear(self) -> None:
        """Forget everything."""
        self._policy.clear()
        for group in (self._parked, self._first_out, self._shelves, self._lowest, self._wanted):
            group.clear()
        for marks in (self._held, self._dirty, self._ranks):
            marks.clear()

    def _is_spared(self, key: BlockKey) -> bool:
        return key in self._held or key in self._dirty or self._is_pinned(key)

    def _park(self, key: BlockKey) -> None:
        self._parked.add(key)
        if key in self._dirty:
            self._wanted.append(key)

    def _set_aside(self, key: BlockKey) -> None:
        """Shelve a block that the policy has chosen, or put it first in line if it has no rank."""
        rank = self._ranks.get(key)
        if rank is None:
            self._first_out[key] = None
            return
        if rank not in self._shelves:
            self._shelves[rank] = OrderedDict()
            heapq.heappush(self._lowest, rank)
        self._shelves[rank][key] = None

    def _take_back(self, key: BlockKey) -> bool:
        """Remove a block from where it was set aside; return False if it is with the policy."""
        if key in self._parked:
            self._parked.discard(key)
            return True
        if key in self._first_out:
            del self._first_out[key]
            return True
        return self._unshelve(key)

    def _unshelve(self, key: BlockKey) -> bool:
        rank = self._ranks.get(key, _NO_RANK)
        shelf = self._shelves.get(rank)
        if shelf is None or key not in shelf:
            return False
        del shelf[key]
        if not shelf:
            del self._shelves[rank]
        return True

    def _victims(self, need: int, dirty: Collection[BlockKey]) -> list[BlockKey]:
        """Take victims from the policy, and set aside the blocks that it passed over."""
        is_pinned, held, ranks = self._is_pinned, self._held, self._ranks
        passed: list[BlockKey] = []

        def passes(key: BlockKey) -> bool:
            if is_pinned(key) or key in held or key in dirty or key in ranks:
                passed.append(key)
                return True
            return False

        chosen = self._policy.victims(need, pinned=passes)
        for key in passed:
            self._policy.remove(key)
            if self._is_spared(key):
                self._park(key)
            else:
                self._set_aside(key)
        return chosen
