"""Eviction from a primary tier shared by several tenants."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from kvstore.primary.order import EvictionOrder, Marks
from kvstore.tenants import Account, Accounts
from kvstore.types import BlockKey


class SharedOrder:
    """An :class:`EvictionOrder` per account; the accounts decide whose blocks are evicted.

    So pins, priorities and demotion only change the order among the blocks of their own tenant.

    Args:
        accounts: The accounts of all tenants.
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
        """Return the order of a block."""
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
        """See :meth:`EvictionOrder.touch`; also marks the tenants as active."""
        for account, theirs in self.accounts.groups(keys):
            self.accounts.use(account)
            self._orders[account].touch(theirs)

    def evicted(self, chosen: Iterable[BlockKey]) -> None:
        """See :meth:`EvictionOrder.evicted`; also counts the blocks."""
        for account, theirs in self.accounts.groups(chosen):
            gone = list(theirs)
            account.evicted += len(gone)
            self._orders[account].evicted(gone)

    def choose(self, need: int, wanted: Sequence[BlockKey] = ()) -> list[BlockKey]:
        """See :meth:`EvictionOrder.choose`. The ``wanted`` blocks belong to one tenant."""
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
