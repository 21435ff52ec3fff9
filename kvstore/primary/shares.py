"""Eviction from a primary tier that several tenants share."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from kvstore.primary.order import EvictionOrder, Marks, Rank
from kvstore.tenants import Account, Accounts
from kvstore.types import BlockKey

__all__ = ["SharedOrder"]


class SharedOrder:
    """An :class:`EvictionOrder` for each tenant; the accounts say from which of them blocks are chosen.

    It has the methods of an eviction order, and is told which blocks have slots (:meth:`admit`, :meth:`gone`). What
    requests ask for (pins, priorities, demotion) thus only changes the order within their tenant's share.

    Args:
        accounts: The accounts of all tenants.
        policy: Name of the eviction policy of each.
        is_pinned: Whether a block is pinned now.

    Attributes:
        accounts: The same.
        marks: Marks of the blocks of all tenants.
        evictions: Blocks evicted, by name of the tenant.
    """

    has_set_aside = True
    """Whether pins need a call: they do if any tenant's order has set blocks aside, and looking is no faster."""

    def __init__(self, accounts: Accounts, policy: str, is_pinned: Callable[[BlockKey], bool]) -> None:
        self.accounts = accounts
        self.marks = Marks()
        self.evictions: Counter[str] = Counter()
        self._orders: defaultdict[Account, EvictionOrder] = defaultdict(
            lambda: EvictionOrder(policy, 0, is_pinned, self.marks)
        )

    def __len__(self) -> int:
        return sum(map(len, self._orders.values()))

    def admit(self, keys: Iterable[BlockKey]) -> None:
        """Count blocks that got slots."""
        for account, theirs in groupby(keys, self.accounts.of):
            account.blocks += sum(1 for _ in theirs)
            self.accounts.use(account)

    def gone(self, key: BlockKey) -> None:
        """Count a block that lost its slot."""
        self.accounts.of(key).blocks -= 1

    def entries(self, keys: Sequence[BlockKey]) -> Iterable[tuple[Callable[[BlockKey], None], Iterable[BlockKey]]]:
        """See :meth:`EvictionOrder.entries`."""
        return ((self._orders[account].enter, theirs) for account, theirs in groupby(keys, self.accounts.of))

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """See :meth:`EvictionOrder.touch`."""
        for account, theirs in groupby(keys, self.accounts.of):
            self.accounts.use(account)
            self._orders[account].touch(theirs)

    def settle(self, keys: Iterable[BlockKey]) -> None:
        """See :meth:`EvictionOrder.settle`."""
        for account, theirs in groupby(keys, self.accounts.of):
            self._orders[account].settle(theirs)

    def spare(self, key: BlockKey) -> None:
        """See :meth:`EvictionOrder.spare`."""
        self._of(key).spare(key)

    def let_go(self, key: BlockKey) -> None:
        """See :meth:`EvictionOrder.let_go`."""
        self._of(key).let_go(key)

    def retain(self, key: BlockKey, rank: Rank) -> None:
        """See :meth:`EvictionOrder.retain`."""
        self._of(key).retain(key, rank)

    def end_retention(self, key: BlockKey) -> None:
        """See :meth:`EvictionOrder.end_retention`."""
        self._of(key).end_retention(key)

    def demote(self, key: BlockKey) -> None:
        """See :meth:`EvictionOrder.demote`."""
        self._of(key).demote(key)

    def leave(self, key: BlockKey) -> None:
        """See :meth:`EvictionOrder.leave`."""
        self._of(key).leave(key)

    def choose(self, need: int, wanted: Sequence[BlockKey] = ()) -> list[BlockKey]:
        """See :meth:`EvictionOrder.choose`; blocks of one tenant are wanted."""
        chosen: list[BlockKey] = []

        def take(account: Account, size: int) -> int:
            found = self._orders[account].choose(size)
            chosen.extend(found)
            return len(found)

        self.accounts.collect(need, take, self.accounts.of(wanted[0]) if wanted else None, len(wanted))
        return chosen

    def put_back(self, chosen: Iterable[BlockKey]) -> None:
        """See :meth:`EvictionOrder.put_back`."""
        for key in chosen:
            self._of(key).put_back((key,))

    def evicted(self, chosen: Iterable[BlockKey]) -> None:
        """See :meth:`EvictionOrder.evicted`."""
        for account, theirs in groupby(chosen, self.accounts.of):
            gone = list(theirs)
            self._orders[account].evicted(gone)
            self.evictions[account.name] += len(gone)

    def look_ahead(self, count: int) -> None:
        """See :meth:`EvictionOrder.look_ahead`."""
        sizes: Counter[Account] = Counter()

        def take(account: Account, size: int) -> int:
            sizes[account] += size
            return size

        self.accounts.collect(count, take)
        for account, size in sizes.items():
            self._orders[account].look_ahead(size)

    def take_wanted(self) -> list[BlockKey]:
        """See :meth:`EvictionOrder.take_wanted`."""
        return [key for order in self._orders.values() for key in order.take_wanted()]

    def clear(self) -> None:
        """See :meth:`EvictionOrder.clear`."""
        for order in self._orders.values():
            order.clear()
        for account in self.accounts:
            account.blocks = 0

    def _of(self, key: BlockKey) -> EvictionOrder:
        return self._orders[self.accounts.of(key)]
