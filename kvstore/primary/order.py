"""Eviction order of the primary tier, including blocks protected from eviction, also among tenants."""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvstore.eviction import make_policy
from kvstore.tenants import Account, Accounts
from kvstore.types import BlockKey

Rank: TypeAlias = "tuple[int, int]"
"""Importance of a retained block, above (0, 0). Blocks of the lowest rank are evicted first."""

_NEXT: Rank = (-1, 0)
"""Rank of shelved blocks that are evicted next."""


@dataclass(slots=True)
class Marks:
    """Marks that protect blocks from eviction."""

    dirty: set[BlockKey] = field(default_factory=set)  # Blocks that must be written to a tier before eviction.
    ranks: dict[BlockKey, Rank] = field(default_factory=dict)  # Ranks of the retained blocks.
    retained_max: int = sys.maxsize
    """Retained blocks evicted after blocks without rank; of more, those of the lowest rank go first."""


class EvictionOrder:
    """An eviction policy, and the blocks that are exempt from it for now.

    A block is *exempt* while it is pinned or dirty. Each block is in exactly one of three places: in the
    policy; *parked* (chosen by the policy while exempt); or *shelved* by its rank (chosen while it had one; blocks
    without a rank that were chosen or demoted before, and not used since, are evicted next). Those next are evicted
    first, then shelved blocks above ``retained_max``, then the policy's victims, then the other shelved blocks by
    rank. Eviction examines an exempt block once instead of at each allocation, so it stays O(1) per block.

    Args:
        capacity: Maximum number of blocks.
        slot_of: Slot of each block, kept by the owner.
        pins: Pins of each slot, kept by the owner.
        marks: Marks of blocks, which may include blocks of other orders; by default a new, empty set of marks.
    """

    def __init__(
        self,
        policy: str,
        capacity: int,
        slot_of: Mapping[BlockKey, int],
        pins: Sequence[int],
        marks: Marks | None = None,
    ) -> None:
        self._policy = make_policy(policy, capacity)
        self._slot_of = slot_of
        self._pins = pins
        self._parked: set[BlockKey] = set()
        self._shelves: dict[Rank, OrderedDict[BlockKey, None]] = {}
        """Shelved blocks by rank; no shelf is empty."""
        self._ascending: list[Rank] = []
        """The ranks of all shelves, ascending."""
        self._shelved = 0
        """Number of shelved blocks."""
        self._wanted: list[BlockKey] = []
        self.marks = marks or Marks()  # Marks of blocks.
        self._dirty, self._ranks = self.marks.dirty, self.marks.ranks
        self.enter = self._policy.insert
        """Add a block."""

    def __len__(self) -> int:
        return len(self._policy) + len(self._parked) + self._shelved

    def of(self, key: BlockKey) -> EvictionOrder:
        """Return the order of a block, as :meth:`SharedOrder.of`."""
        return self

    def split(self, keys: Iterable[BlockKey]) -> Iterable[tuple[EvictionOrder, Iterable[BlockKey]]]:
        """Return blocks with their order, as :meth:`SharedOrder.split`."""
        return ((self, keys),)

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Record uses, the most important last."""
        self._reorder(keys, self._policy.touch)

    def settle(self, keys: Iterable[BlockKey]) -> None:
        """Reorder blocks as :meth:`touch` without counting another use."""
        self._reorder(keys, self._policy.settle)

    def _reorder(self, keys: Iterable[BlockKey], touch: Callable[[BlockKey], None]) -> None:
        if not self._parked and not self._shelves:
            for key in keys:
                touch(key)
            return
        for key in keys:
            if self._take_back(key):
                self._policy.insert(key)
            else:
                touch(key)

    def exempt(self, keys: Iterable[BlockKey]) -> None:
        """Note that blocks are now exempt."""
        for key in keys if self._shelves else ():
            if self._unshelve(key):
                self._park(key)

    def end_exemption(self, keys: Iterable[BlockKey]) -> None:
        """Note that a reason for an exemption ended. Parked blocks without another reason can be chosen again."""
        for key in keys if self._parked else ():
            if key in self._parked and not self._is_exempt(key):
                self._parked.discard(key)
                self._shelve(key)

    def retain(self, key: BlockKey, rank: Rank) -> None:
        """Give a block a rank: blocks of lower rank or without rank are chosen before it."""
        if self._ranks.get(key) == rank:
            return
        was_shelved = self._unshelve(key)
        self._ranks[key] = rank
        if was_shelved:
            self._shelve(key)

    def end_retention(self, key: BlockKey) -> None:
        """Remove a block's rank. A shelved block is evicted next."""
        if key in self._ranks:
            was_shelved = self._unshelve(key)
            del self._ranks[key]
            if was_shelved:
                self._shelve(key)

    def demote(self, key: BlockKey) -> None:
        """Remove a block's rank and make the block the next to be evicted, or park it if it is exempt."""
        self.end_retention(key)
        if self._policy.remove(key):
            self._set_aside(key)

    def leave(self, key: BlockKey) -> None:
        """Remove a block from the order without eviction."""
        self._dirty.discard(key)
        if not self._take_back(key):
            self._policy.remove(key)
        self._ranks.pop(key, None)

    def choose(self, need: int, wanted: Sequence[BlockKey] = ()) -> list[BlockKey]:
        """Choose blocks to evict, coldest first; fewer than ``need`` if no more can be evicted.

        Pass each chosen block to :meth:`evicted` or :meth:`put_back`. Only orders with shares use ``wanted``, the
        blocks that need the room.
        """
        chosen: list[BlockKey] = []
        left = need
        while left > 0:
            some = self._take_lowest(min(left, self._next or self._shelved - self.marks.retained_max))
            if not some:
                # One at a time if the blocks that the policy skips may be too many for the shelves.
                some = self._victims(left if len(self._ranks) <= self.marks.retained_max else 1, self._dirty)
            if not some:
                break
            chosen += some
            left -= len(some)
        return chosen + self._take_lowest(left)

    def put_back(self, chosen: Iterable[BlockKey]) -> None:
        """Undo :meth:`choose`."""
        for key in chosen:
            self._shelve(key)

    def evicted(self, chosen: Iterable[BlockKey]) -> None:
        """Confirm the eviction of chosen blocks."""
        for key in chosen if self._ranks else ():
            self._ranks.pop(key, None)

    def look_ahead(self, count: int) -> None:
        """Choose the coldest blocks before their slots are needed: dirty ones become wanted, others are evicted next.

        ``count``: blocks that should be next or newly wanted; blocks already wanted are not counted.
        """
        for key in self._victims(count - self._next, ()):
            self._set_aside(key)

    def take_wanted(self) -> list[BlockKey]:
        """Return the dirty blocks that the policy chose since the last call."""
        wanted, self._wanted = self._wanted, []
        return [key for key in dict.fromkeys(wanted) if key in self._dirty]

    def clear(self) -> None:
        """Remove all blocks."""
        self._policy.clear()
        for group in (self._parked, self._shelves, self._ascending, self._wanted):
            group.clear()
        self._shelved = 0
        self._dirty.clear()
        self._ranks.clear()

    @property
    def _next(self) -> int:
        """Number of blocks that are evicted next."""
        return len(self._shelves.get(_NEXT, ()))

    def _is_exempt(self, key: BlockKey) -> bool:
        return key in self._dirty or self._pins[self._slot_of[key]] > 0

    def _set_aside(self, key: BlockKey) -> None:
        """Park or shelve a block that is no longer in the policy."""
        if self._is_exempt(key):
            self._park(key)
        else:
            self._shelve(key)

    def _park(self, key: BlockKey) -> None:
        self._parked.add(key)
        if key in self._dirty:
            self._wanted.append(key)

    def _shelve(self, key: BlockKey) -> None:
        rank = self._ranks.get(key, _NEXT)
        if rank not in self._shelves:
            self._shelves[rank] = OrderedDict()
            insort(self._ascending, rank)
        self._shelves[rank][key] = None
        self._shelved += 1

    def _unshelve(self, key: BlockKey) -> bool:
        rank = self._ranks.get(key, _NEXT)
        shelf = self._shelves.get(rank)
        if shelf is None or key not in shelf:
            return False
        del shelf[key]
        self._shelved -= 1
        if not shelf:
            del self._shelves[rank]
            del self._ascending[bisect_left(self._ascending, rank)]
        return True

    def _take_back(self, key: BlockKey) -> bool:
        """Remove a parked or shelved block; return false if it is in the policy."""
        if key in self._parked:
            self._parked.discard(key)
            return True
        return self._unshelve(key)

    def _take_lowest(self, need: int) -> list[BlockKey]:
        """Take up to ``need`` shelved blocks of the lowest ranks."""
        taken: list[BlockKey] = []
        while self._shelves and len(taken) < need:
            taken.append(next(iter(self._shelves[self._ascending[0]])))
            self._unshelve(taken[-1])
        return taken

    def _victims(self, need: int, dirty: Collection[BlockKey]) -> list[BlockKey]:
        """Return victims of the policy, and set aside the blocks that it skipped."""
        slot_of, pins, ranks = self._slot_of, self._pins, self._ranks
        passed: list[BlockKey] = []

        def passes(key: BlockKey) -> bool:
            if pins[slot_of[key]] > 0 or key in dirty or key in ranks:
                passed.append(key)
                return True
            return False

        chosen = self._policy.victims(need, pinned=passes)
        for key in passed:
            self._policy.remove(key)
            self._set_aside(key)
        return chosen


class SharedOrder:
    """An :class:`EvictionOrder` per account; the accounts decide whose blocks are evicted.

    So pins, priorities and demotion only change the order among the blocks of their own tenant.

    Args:
        policy: Name of the eviction policy, used for every account.
        slot_of: Slot of each block, kept by the owner.
        pins: Pins of each slot, kept by the owner.
    """

    def __init__(self, accounts: Accounts, policy: str, slot_of: Mapping[BlockKey, int], pins: Sequence[int]) -> None:
        self.accounts = accounts  # The accounts of all tenants.
        self.marks = Marks()  # Marks of the blocks of all tenants.
        self._orders: defaultdict[Account, EvictionOrder] = defaultdict(
            lambda: EvictionOrder(policy, 0, slot_of, pins, self.marks)
        )

    def __len__(self) -> int:
        return sum(map(len, self._orders.values()))

    def of(self, key: BlockKey) -> EvictionOrder:
        return self._orders[self.accounts.of(key)]

    def split(self, keys: Iterable[BlockKey]) -> Iterable[tuple[EvictionOrder, Iterable[BlockKey]]]:
        """Yield runs of adjacent blocks of the same account, in order, each with its eviction order."""
        return ((self._orders[account], theirs) for account, theirs in self.accounts.groups(keys))

    def admit(self, keys: Sequence[BlockKey]) -> None:
        """Count blocks that received slots."""
        if len(keys) == 1:  # A promotion: cheaper than groups().
            account = self.accounts.of(keys[0])
            account.blocks += 1
            self.accounts.use(account)
            return
        for account, theirs in self.accounts.groups(keys):
            account.blocks += len(list(theirs))
            self.accounts.use(account)

    def gone(self, keys: Iterable[BlockKey]) -> None:
        """Count blocks that lost their slots."""
        for account, theirs in self.accounts.groups(keys):
            account.blocks -= len(list(theirs))

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Also marks the tenants as active."""
        for account, theirs in self.accounts.groups(keys):
            self.accounts.use(account)
            self._orders[account].touch(theirs)

    def evicted(self, chosen: Iterable[BlockKey]) -> None:
        """Also counts the blocks."""
        for account, theirs in self.accounts.groups(chosen):
            gone = list(theirs)
            account.evicted += len(gone)
            self._orders[account].evicted(gone)

    def choose(self, need: int, wanted: Sequence[BlockKey] = ()) -> list[BlockKey]:
        """The ``wanted`` blocks belong to one tenant."""
        chosen: list[BlockKey] = []

        def take(account: Account, size: int) -> int:
            found = self._orders[account].choose(size)
            chosen.extend(found)
            return len(found)

        self.accounts.collect(need, take, self.accounts.of(wanted[0]) if wanted else None, len(wanted))
        return chosen

    def look_ahead(self, count: int) -> None:
        sizes: Counter[Account] = Counter()

        def take(account: Account, size: int) -> int:
            sizes[account] += size
            return size

        self.accounts.collect(count, take)
        for account, size in sizes.items():
            self._orders[account].look_ahead(size)

    def take_wanted(self) -> list[BlockKey]:
        return [key for order in self._orders.values() for key in order.take_wanted()]

    def clear(self) -> None:
        for order in self._orders.values():
            order.clear()
        for account in self.accounts:
            account.blocks = 0
