"""Eviction policies: which block goes when space is needed.

A policy knows keys and the order of their use, nothing of sizes, media or locks: it counts blocks. Its owner (the
primary tier, a backend) tells it what entered, was used and left, and asks it for victims. Not thread-safe: one owner,
one thread.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import chain
from typing import ClassVar, TypeAlias

from kvstore.errors import ConfigError
from kvstore.tenants import Account, Accounts, Tenants
from kvstore.types import BlockKey

__all__ = ["ARC", "LRU", "POLICY_NAMES", "S3FIFO", "EvictionPolicy", "SharedPolicy", "make_policy"]

_Queue: TypeAlias = "OrderedDict[BlockKey, int]"  # oldest first; the value is S3-FIFO's count of uses, else 0


class EvictionPolicy(ABC):
    """Order of the blocks of one owner, and the choice among them.

    Every call is O(1) amortised; :meth:`victims` is O(blocks chosen + pinned blocks passed over).

    Args:
        capacity_blocks_hint: About how many blocks the owner holds when it is full; 0 if it doesn't know. Policies that
            need a capacity take the larger of this and what they hold now.

    Attributes:
        name: Name in configurations.
    """

    name: ClassVar[str]

    def __init__(self, capacity_blocks_hint: int = 0) -> None:
        self._capacity_hint = max(0, capacity_blocks_hint)

    @abstractmethod
    def insert(self, key: BlockKey) -> None:
        """Note a block that entered; for a block that is known already it is a :meth:`touch`."""

    @abstractmethod
    def touch(self, key: BlockKey) -> None:
        """Note a use; unknown keys are ignored."""

    @abstractmethod
    def remove(self, key: BlockKey) -> bool:
        """Forget a block that left for another reason than eviction; return whether it was known."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything, also what is remembered of evicted blocks."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of blocks."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Tell whether the block is known (evicted ones are not)."""

    @abstractmethod
    def __iter__(self) -> Iterator[BlockKey]:
        """Yield all blocks, coldest first: inserted in this order, a new policy starts about where this one is."""

    def victims(
        self,
        need: int,
        *,
        pinned: Callable[[BlockKey], bool] | None = None,
        weight: Callable[[BlockKey], int] | None = None,
    ) -> list[BlockKey]:
        """Choose blocks to evict and forget them.

        Whoever then fails to evict one inserts it again. Pinned blocks keep their places.

        Args:
            need: How many blocks; with ``weight``, how much weight they have to sum up to (such as bytes).
            pinned: Tells which blocks may not be chosen.
            weight: Weight of a block; None means 1 each.

        Returns:
            The chosen, coldest first; fewer than needed if no more may be chosen.
        """
        chosen: list[BlockKey] = []
        if need <= 0:
            return chosen
        with closing(self._evict(pinned or _never)) as evicted:
            for key in evicted:
                chosen.append(key)
                need -= 1 if weight is None else weight(key)
                if need <= 0:
                    break
        return chosen

    @property
    def _capacity(self) -> int:
        # Victims are asked for when the owner is full, so what is held now is a capacity when the hint was too low.
        return max(1, self._capacity_hint, len(self))

    @abstractmethod
    def _evict(self, pinned: Callable[[BlockKey], bool]) -> Generator[BlockKey, None, None]:
        """Take out one victim after the other, until it is closed."""


class LRU(EvictionPolicy):
    """Least recently used first."""

    name = "lru"

    def __init__(self, capacity_blocks_hint: int = 0) -> None:
        super().__init__(capacity_blocks_hint)
        self._queue: _Queue = OrderedDict()

    def insert(self, key: BlockKey) -> None:
        """See :meth:`EvictionPolicy.insert`."""
        self._queue[key] = 0
        self._queue.move_to_end(key)

    def touch(self, key: BlockKey) -> None:
        """See :meth:`EvictionPolicy.touch`."""
        if key in self._queue:
            self._queue.move_to_end(key)

    def remove(self, key: BlockKey) -> bool:
        """See :meth:`EvictionPolicy.remove`."""
        return self._queue.pop(key, None) is not None

    def clear(self) -> None:
        """See :meth:`EvictionPolicy.clear`."""
        self._queue.clear()

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, key: object) -> bool:
        return key in self._queue

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._queue)

    def _evict(self, pinned: Callable[[BlockKey], bool]) -> Generator[BlockKey, None, None]:
        with _Pass(self._queue, pinned) as queue:
            while (key := queue.oldest()) is not None:
                del self._queue[key]
                yield key


class S3FIFO(EvictionPolicy):
    """Three FIFO queues: what is used only once leaves early and can't push out what is used again.

    A new block enters the small queue (a tenth of the capacity); there it is evicted unless it was used more than once,
    and moves to the main queue if it was. Evicted from the small queue, its key is remembered in the ghost queue (as
    many keys as the main queue holds); if it comes back while remembered, it enters the main queue at once. The main
    queue gives a used block one more round per use, three at most.

    Source: Yang, Zhang, Qiu, Yue, Vinayak: "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1.
    """

    name = "s3fifo"
    uses_max: ClassVar[int] = 3
    """Uses counted per block: two bits, as in the paper."""
    small_share: ClassVar[float] = 0.1
    """Share of the small queue, as in the paper."""

    def __init__(self, capacity_blocks_hint: int = 0) -> None:
        super().__init__(capacity_blocks_hint)
        self._small: _Queue = OrderedDict()
        self._main: _Queue = OrderedDict()
        self._ghost: _Queue = OrderedDict()

    def insert(self, key: BlockKey) -> None:
        """See :meth:`EvictionPolicy.insert`."""
        if key in self:
            self.touch(key)
        elif self._ghost.pop(key, None) is not None:
            self._main[key] = 0
        else:
            self._small[key] = 0

    def touch(self, key: BlockKey) -> None:
        """See :meth:`EvictionPolicy.touch`."""
        queue = self._small if key in self._small else self._main
        uses = queue.get(key, self.uses_max)
        if uses < self.uses_max:
            queue[key] = uses + 1

    def remove(self, key: BlockKey) -> bool:
        """See :meth:`EvictionPolicy.remove`."""
        self._ghost.pop(key, None)
        return self._small.pop(key, None) is not None or self._main.pop(key, None) is not None

    def clear(self) -> None:
        """See :meth:`EvictionPolicy.clear`."""
        for queue in (self._small, self._main, self._ghost):
            queue.clear()

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, key: object) -> bool:
        return key in self._small or key in self._main

    def __iter__(self) -> Iterator[BlockKey]:
        yield from self._small
        yield from self._main

    def _evict(self, pinned: Callable[[BlockKey], bool]) -> Generator[BlockKey, None, None]:
        small_target = max(1, int(self._capacity * self.small_share))
        ghost_max = max(1, self._capacity - small_target)
        with _Pass(self._small, pinned) as small, _Pass(self._main, pinned) as main:
            while True:
                # A key is never empty, so "or" falls through only where there was no victim.
                if len(small) >= small_target:
                    key = self._from_small(small, ghost_max) or self._from_main(main)
                else:
                    key = self._from_main(main) or self._from_small(small, ghost_max) or self._from_main(main)
                if key is None:
                    return
                yield key

    def _from_small(self, small: _Pass, ghost_max: int) -> BlockKey | None:
        while (key := small.oldest()) is not None:
            if self._small.pop(key) <= 1:
                self._ghost[key] = 0
                while len(self._ghost) > ghost_max:
                    self._ghost.popitem(last=False)
                return key
            self._main[key] = 0
        return None

    def _from_main(self, main: _Pass) -> BlockKey | None:
        while (key := main.oldest()) is not None:
            uses = self._main.pop(key)
            if uses == 0:
                return key
            self._main[key] = uses - 1
        return None


class ARC(EvictionPolicy):
    """Adaptive replacement: divides the space between recency and frequency by what comes back after eviction.

    Blocks used once lie in ``recent``, blocks used again in ``frequent``, each in LRU order; what was evicted from
    either is remembered in a ghost list. A block that comes back from one shifts the target size of ``recent``.

    Source: Megiddo, Modha: "ARC: a self-tuning, low overhead replacement cache", FAST 2003, figure 4. One difference:
    the owner evicts before it says what enters, so the tie in REPLACE ("x in B2 and |T1| = p") can't look at x.
    """

    name = "arc"

    def __init__(self, capacity_blocks_hint: int = 0) -> None:
        super().__init__(capacity_blocks_hint)
        self._recent: _Queue = OrderedDict()
        self._frequent: _Queue = OrderedDict()
        self._ghost_recent: _Queue = OrderedDict()
        self._ghost_frequent: _Queue = OrderedDict()
        self._recent_target = 0.0

    def insert(self, key: BlockKey) -> None:
        """See :meth:`EvictionPolicy.insert`."""
        if key in self:
            self.touch(key)
        elif key in self._ghost_recent:
            step = max(1.0, len(self._ghost_frequent) / len(self._ghost_recent))
            self._recent_target = min(float(self._capacity), self._recent_target + step)
            del self._ghost_recent[key]
            self._frequent[key] = 0
        elif key in self._ghost_frequent:
            step = max(1.0, len(self._ghost_recent) / len(self._ghost_frequent))
            self._recent_target = max(0.0, self._recent_target - step)
            del self._ghost_frequent[key]
            self._frequent[key] = 0
        else:
            self._recent[key] = 0
        self._trim_ghosts()

    def touch(self, key: BlockKey) -> None:
        """See :meth:`EvictionPolicy.touch`."""
        if self._recent.pop(key, None) is not None:
            self._frequent[key] = 0
        elif key in self._frequent:
            self._frequent.move_to_end(key)

    def remove(self, key: BlockKey) -> bool:
        """See :meth:`EvictionPolicy.remove`."""
        self._ghost_recent.pop(key, None)
        self._ghost_frequent.pop(key, None)
        return self._recent.pop(key, None) is not None or self._frequent.pop(key, None) is not None

    def clear(self) -> None:
        """See :meth:`EvictionPolicy.clear`."""
        for queue in (self._recent, self._frequent, self._ghost_recent, self._ghost_frequent):
            queue.clear()
        self._recent_target = 0.0

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def __contains__(self, key: object) -> bool:
        return key in self._recent or key in self._frequent

    def __iter__(self) -> Iterator[BlockKey]:
        yield from self._recent
        yield from self._frequent

    def _evict(self, pinned: Callable[[BlockKey], bool]) -> Generator[BlockKey, None, None]:
        try:
            with _Pass(self._recent, pinned) as recent, _Pass(self._frequent, pinned) as frequent:
                while True:
                    order = [(recent, self._ghost_recent), (frequent, self._ghost_frequent)]
                    if len(recent) <= self._recent_target:
                        order.reverse()
                    key = None
                    for queue, ghost in order:
                        if (key := queue.oldest()) is not None:
                            del queue.queue[key]
                            ghost[key] = 0
                            break
                    if key is None:
                        return
                    yield key
        finally:
            self._trim_ghosts()

    def _trim_ghosts(self) -> None:
        capacity = self._capacity
        while self._ghost_recent and len(self._recent) + len(self._ghost_recent) > capacity:
            self._ghost_recent.popitem(last=False)
        while self._ghost_frequent and len(self) + len(self._ghost_recent) + len(self._ghost_frequent) > 2 * capacity:
            self._ghost_frequent.popitem(last=False)


class SharedPolicy(EvictionPolicy):
    """A policy for each tenant; their accounts say whose blocks are evicted.

    Args:
        policy: Class of each tenant's policy.
        tenants: The rule and the shares.
        capacity_blocks_hint: See :class:`EvictionPolicy`.
    """

    name = "shared"

    def __init__(self, policy: type[EvictionPolicy], tenants: Tenants, capacity_blocks_hint: int = 0) -> None:
        super().__init__(capacity_blocks_hint)
        self._accounts = Accounts(tenants)
        self._policies: defaultdict[Account, EvictionPolicy] = defaultdict(policy)

    def insert(self, key: BlockKey) -> None:
        """See :meth:`EvictionPolicy.insert`."""
        account = self._accounts.of(key)
        self._policies[account].insert(key)
        account.blocks = len(self._policies[account])

    def touch(self, key: BlockKey) -> None:
        """See :meth:`EvictionPolicy.touch`."""
        self._policies[self._accounts.of(key)].touch(key)

    def remove(self, key: BlockKey) -> bool:
        """See :meth:`EvictionPolicy.remove`."""
        account = self._accounts.of(key)
        removed = self._policies[account].remove(key)
        account.blocks = len(self._policies[account])
        return removed

    def clear(self) -> None:
        """See :meth:`EvictionPolicy.clear`."""
        for account, policy in self._policies.items():
            policy.clear()
            account.blocks = 0

    def __len__(self) -> int:
        return sum(map(len, self._policies.values()))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and key in self._policies[self._accounts.of(key)]

    def __iter__(self) -> Iterator[BlockKey]:
        return chain.from_iterable(self._policies.values())

    def _evict(self, pinned: Callable[[BlockKey], bool]) -> Generator[BlockKey, None, None]:
        chosen: list[BlockKey] = []

        def take(account: Account, size: int) -> int:
            found = self._policies[account].victims(size, pinned=pinned)
            account.blocks = len(self._policies[account])
            chosen.extend(found)
            return len(found)

        self._accounts.capacity = self._capacity
        while self._accounts.collect(1, take):
            yield chosen.pop()


_POLICIES: dict[str, type[EvictionPolicy]] = {policy.name: policy for policy in (ARC, LRU, S3FIFO)}

POLICY_NAMES: tuple[str, ...] = tuple(_POLICIES)
"""Names that :func:`make_policy` knows."""


def make_policy(name: str, capacity_blocks_hint: int = 0, tenants: Tenants | None = None) -> EvictionPolicy:
    """Make an empty policy by its name (``"lru"``, ``"s3fifo"``, ``"arc"``; case and hyphens don't matter).

    With ``tenants`` it chooses among the blocks of those that are to give some (:class:`kvstore.tenants.Accounts`).

    Raises:
        ConfigError: There is no policy of this name.
    """
    policy = _POLICIES.get(name.lower().replace("-", "").replace("_", ""))
    if policy is None:
        near = difflib.get_close_matches(name.lower(), POLICY_NAMES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"Unknown eviction policy {name!r}. Known: {', '.join(POLICY_NAMES)}.{hint}")
    return policy(capacity_blocks_hint) if tenants is None else SharedPolicy(policy, tenants, capacity_blocks_hint)


class _Pass:
    """One pass over a queue from its old end that steps over pinned blocks and leaves them where they were."""

    def __init__(self, queue: _Queue, pinned: Callable[[BlockKey], bool]) -> None:
        self.queue = queue
        self._pinned = pinned
        self._aside: _Queue = OrderedDict()

    def __len__(self) -> int:
        return len(self.queue) + len(self._aside)

    def oldest(self) -> BlockKey | None:
        """Return the oldest block that is not pinned; it stays in the queue."""
        while self.queue:
            key = next(iter(self.queue))
            # Asked before the block is taken out, so that a predicate that raises loses nothing.
            if not self._pinned(key):
                return key
            self._aside[key] = self.queue.pop(key)
        return None

    def __enter__(self) -> _Pass:
        return self

    def __exit__(self, *exc_info: object) -> None:
        while self._aside:
            key, uses = self._aside.popitem()
            self.queue[key] = uses
            self.queue.move_to_end(key, last=False)


def _never(key: BlockKey) -> bool:
    return False
