"""Eviction policies: the choice of blocks to evict when space is needed.

A policy tracks keys and the order of their use, not sizes or media. Its owner (the primary tier, a backend) reports
blocks that enter, are used or leave, and requests victims. Not thread-safe: a policy has one owner and one thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import ChainMap, OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from heapq import merge
from itertools import chain
from typing import ClassVar, Final, TypeAlias

from xxhash import xxh3_64_intdigest

from kvstore.config import did_you_mean
from kvstore.errors import ConfigError
from kvstore.secret import shown
from kvstore.tenants import Account, Accounts, Tenants
from kvstore.types import BlockKey

_Queue: TypeAlias = "OrderedDict[BlockKey, int]"
"""Oldest first. Values: the number of all uses up to the last one for ARC, otherwise 0."""


_SAMPLED_MIN: Final = 8
"""At most one of so many keys is simulated."""

ROOM_MAX: Final = 1024
"""Largest simulated cache in blocks. Larger ones chose no better, and took memory and time."""

ROOM_MIN: Final = 8
"""Smallest simulated cache in blocks. Below, there are too few hits to choose by, and LRU stays."""

_LEAD_MIN: Final = 0.002
"""Lead, as a share of the accesses, from which the other rule is chosen."""

_KEPT: Final = 2 ** (-1 / 16)
"""Weight of former hits after each choice, which is made after accesses of a quarter of the capacity."""


class EvictionPolicy(ABC):
    """The blocks of one owner in the order of eviction.

    Every call is O(1) amortised; :meth:`victims` is O(blocks chosen + pinned blocks passed over).

    ``capacity_blocks_hint``: approximate number of blocks in a full owner; 0 if unknown. Policies that need a capacity
    use the larger of this and the present number of blocks.
    """

    name: ClassVar[str]  # Name in configurations.

    def __init__(self, capacity_blocks_hint: int = 0) -> None:
        self._capacity_hint = max(0, capacity_blocks_hint)

    @abstractmethod
    def insert(self, key: BlockKey) -> None:
        """Note a block that entered; for a known block, the same as :meth:`touch`."""

    @abstractmethod
    def touch(self, key: BlockKey) -> None:
        """Note a use; unknown keys are ignored."""

    def settle(self, key: BlockKey) -> None:  # noqa: B027 - not every policy orders blocks by their last use
        """Make a block the most recently used among its like, without counting a use; unknown keys are ignored."""

    @abstractmethod
    def remove(self, key: BlockKey) -> bool:
        """Forget a block that left without eviction; return whether it was known."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all blocks, including evicted ones."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of blocks."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Return whether the block is known; evicted ones are not."""

    @abstractmethod
    def __iter__(self) -> Iterator[BlockKey]:
        """Yield all blocks, coldest first. Inserted in this order, they give a new policy about the same state."""

    def victims(
        self,
        need: int,
        *,
        pinned: Callable[[BlockKey], bool] | None = None,
        weight: Callable[[BlockKey], int] | None = None,
    ) -> list[BlockKey]:
        """Choose blocks to evict and forget them.

        After a failed eviction, the owner inserts the block again. Pinned blocks keep their places.

        Args:
            need: Number of blocks; with ``weight``, their total weight (such as bytes).
            pinned: Returns True for blocks that must not be chosen.
            weight: Weight of a block; None means 1 each.

        Returns:
            The chosen blocks, coldest first; fewer than needed if the others are pinned.
        """
        chosen: list[BlockKey] = []
        with closing(self._evict(pinned or (lambda key: False))) as evicted:
            while need > 0 and (key := next(evicted, None)) is not None:
                chosen.append(key)
                need -= 1 if weight is None else weight(key)
        return chosen

    @property
    def _capacity(self) -> int:
        # If the hint is too low, the present number counts: owners request victims only when full.
        return max(1, self._capacity_hint, len(self))

    @abstractmethod
    def _evict(self, pinned: Callable[[BlockKey], bool]) -> Generator[BlockKey, None, None]:
        """Remove and yield one victim at a time until closed."""


class _QueuePolicy(EvictionPolicy):
    """A policy whose blocks are in queues, and its evicted blocks in ghost queues."""

    def __init__(self, capacity_blocks_hint: int, queues: Sequence[_Queue], ghosts: Sequence[_Queue] = ()) -> None:
        super().__init__(capacity_blocks_hint)
        self._queues, self._ghosts = queues, ghosts

    def remove(self, key: BlockKey) -> bool:
        for ghost in self._ghosts:
            ghost.pop(key, None)
        return any([queue.pop(key, None) is not None for queue in self._queues])

    def clear(self) -> None:
        for queue in (*self._queues, *self._ghosts):
            queue.clear()

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __contains__(self, key: object) -> bool:
        for queue in self._queues:  # noqa: SIM110 - half the time of any()
            if key in queue:
                return True
        return False

    def __iter__(self) -> Iterator[BlockKey]:
        return chain.from_iterable(self._queues)


class LRU(_QueuePolicy):
    """Least recently used first."""

    name = "lru"

    def __init__(self, capacity_blocks_hint: int = 0) -> None:
        self._queue: _Queue = OrderedDict()
        super().__init__(capacity_blocks_hint, [self._queue])

    def insert(self, key: BlockKey) -> None:
        self._queue[key] = 0
        self._queue.move_to_end(key)

    def touch(self, key: BlockKey) -> None:
        if key in self._queue:
            self._queue.move_to_end(key)

    settle = touch

    def _evict(self, pinned: Callable[[BlockKey], bool]) -> Generator[BlockKey, None, None]:
        with _Pass(self._queue, pinned) as queue:
            while (key := queue.oldest()) is not None:
                del self._queue[key]
                yield key


class ARC(_QueuePolicy):
    """Adaptive replacement: blocks that return after eviction adapt the division between recency and frequency.

    Blocks used once are in ``recent``, blocks used again in ``frequent``, each in LRU order. Each has a ghost queue of
    its evicted blocks. A block that returns from a ghost queue shifts the target size of ``recent``.

    Source: Megiddo, Modha: "ARC: a self-tuning, low overhead replacement cache", FAST 2003, figure 4. One difference:
    the owner evicts before the next block is known, so the tie in REPLACE ("x in B2 and |T1| = p") can't consider x.
    """

    name = "arc"

    def __init__(self, capacity_blocks_hint: int = 0) -> None:
        self._recent: _Queue = OrderedDict()
        self._frequent: _Queue = OrderedDict()
        self._ghost_recent: _Queue = OrderedDict()
        self._ghost_frequent: _Queue = OrderedDict()
        self._recent_target = 0.0
        self._now = 0
        ghosts = [self._ghost_recent, self._ghost_frequent]
        super().__init__(capacity_blocks_hint, [self._recent, self._frequent], ghosts)

    def clear(self) -> None:
        super().clear()
        self._recent_target = 0.0

    def insert(self, key: BlockKey) -> None:
        if key in self._recent or key in self._frequent:
            ARC.touch(self, key)
            return
        self._now += 1
        recent, frequent = self._ghost_recent, self._ghost_frequent
        if key in recent:
            step = max(1.0, len(frequent) / len(recent))
            self._recent_target = min(float(self._capacity), self._recent_target + step)
            del recent[key]
            self._frequent[key] = self._now
        elif key in frequent:
            step = max(1.0, len(recent) / len(frequent))
            self._recent_target = max(0.0, self._recent_target - step)
            del frequent[key]
            self._frequent[key] = self._now
        else:
            self._recent[key] = self._now

    def touch(self, key: BlockKey) -> None:
        self._now += 1
        if key in self._frequent:
            self._frequent[key] = self._now
            self._frequent.move_to_end(key)
        elif self._recent.pop(key, None) is not None:
            self._frequent[key] = self._now

    def settle(self, key: BlockKey) -> None:
        self._now += 1
        for queue in (self._recent, self._frequent):
            if key in queue:
                queue[key] = self._now
                queue.move_to_end(key)

    def _evict(self, pinned: Callable[[BlockKey], bool]) -> Generator[BlockKey, None, None]:
        try:
            with _Pass(self._recent, pinned) as recent, _Pass(self._frequent, pinned) as frequent:
                while True:
                    first, second = (recent, frequent) if len(recent) > self._recent_target else (frequent, recent)
                    key = first.oldest() or second.oldest()  # Keys are never empty.
                    if key is None:
                        return
                    self._note_evicted(key)
                    yield key
        finally:
            self._trim_ghosts()

    def _note_evicted(self, key: BlockKey) -> None:
        if self._recent.pop(key, None) is None:
            del self._frequent[key]
            self._ghost_frequent[key] = 0
        else:
            self._ghost_recent[key] = 0

    def _trim_ghosts(self) -> None:
        capacity = self._capacity
        while self._ghost_recent and len(self._recent) + len(self._ghost_recent) > capacity:
            self._ghost_recent.popitem(last=False)
        while self._ghost_frequent and len(self) + len(self._ghost_recent) + len(self._ghost_frequent) > 2 * capacity:
            self._ghost_frequent.popitem(last=False)


class SampledCaches:
    """Simulated caches for an eighth of the keys, or fewer, in as small a part of a capacity."""

    def __init__(self, *caches: EvictionPolicy) -> None:
        self.mask = _SAMPLED_MIN - 1
        """The keys whose XXH3 has none of these bits are simulated."""
        self._caches = caches

    def _resize(self, capacity_blocks: int) -> int:
        """Return the room of the caches in blocks, 0 if it is too small; simulate fewer keys if it is too large."""
        while capacity_blocks // (self.mask + 1) > ROOM_MAX:
            self.mask = 2 * self.mask + 1
            for cache in self._caches:
                for key in [key for key in cache if xxh3_64_intdigest(key) & self.mask]:
                    cache.remove(key)
        room = capacity_blocks // (self.mask + 1)
        if room < ROOM_MIN:
            # The capacity may have been far larger.
            self.mask, room = _SAMPLED_MIN - 1, 0
        return room


class RuleChoice(SampledCaches):
    """The choice between LRU and ARC for one cache, by the hits that each would have had.

    Both rules are simulated for an eighth of the keys, or fewer, in as small a part of the capacity. The rule with more
    hits is chosen; a hit counts half after accesses of four times the capacity.
    """

    def __init__(self) -> None:
        super().__init__(LRU(), ARC())
        self.is_arc = False  # Whether ARC is chosen, not LRU.
        self._hits = [0.0, 0.0]
        self._accesses = 0.0
        self._uses = 0

    def use(self, key: BlockKey, capacity_blocks: int) -> None:
        """Record a use, or the arrival, of a simulated block in a cache of so many blocks. O(1) amortised."""
        room = self._resize(capacity_blocks)
        if not room:
            self.is_arc = False
            return
        for number, cache in enumerate(self._caches):
            self._hits[number] += key in cache
            cache.insert(key)
        self._accesses += 1
        self._uses += 1
        if self._uses % (1 + room // 64) == 0:
            # Several at a time, which takes half as long.
            for cache in self._caches:
                cache.victims(len(cache) - room)
        if self._uses % (room // 4) == 0:
            self._choose()

    def _choose(self) -> None:
        lead = self._hits[not self.is_arc] - self._hits[self.is_arc]
        if lead > _LEAD_MIN * self._accesses:
            self.is_arc = not self.is_arc
        self._hits = [hits * _KEPT for hits in self._hits]
        self._accesses *= _KEPT


class Adaptive(ARC):
    """The queues of ARC, with victims by LRU while this has more hits (:class:`RuleChoice`)."""

    name = "adaptive"

    def __init__(self, capacity_blocks_hint: int = 0) -> None:
        super().__init__(capacity_blocks_hint)
        self._choice = RuleChoice()

    def clear(self) -> None:
        super().clear()
        self._choice = RuleChoice()

    def insert(self, key: BlockKey) -> None:
        super().insert(key)
        if not xxh3_64_intdigest(key) & self._choice.mask:
            self._choice.use(key, self._capacity)

    def touch(self, key: BlockKey) -> None:
        super().touch(key)
        if not xxh3_64_intdigest(key) & self._choice.mask and key in self._frequent:
            self._choice.use(key, self._capacity)

    def __iter__(self) -> Iterator[BlockKey]:
        if self._choice.is_arc:
            return super().__iter__()
        used_at = ChainMap(self._recent, self._frequent)
        return merge(self._recent, self._frequent, key=used_at.__getitem__)

    def _evict(self, pinned: Callable[[BlockKey], bool]) -> Generator[BlockKey, None, None]:
        return super()._evict(pinned) if self._choice.is_arc else self._evict_least_recent(pinned)

    def _evict_least_recent(self, pinned: Callable[[BlockKey], bool]) -> Generator[BlockKey, None, None]:
        try:
            with _Pass(self._recent, pinned) as recent, _Pass(self._frequent, pinned) as frequent:
                once, again = recent.oldest(), frequent.oldest()
                while key := once if once and not (again and self._frequent[again] < self._recent[once]) else again:
                    self._note_evicted(key)
                    yield key
                    if key is once:
                        once = recent.oldest()
                    else:
                        again = frequent.oldest()
        finally:
            self._trim_ghosts()


class SharedPolicy(EvictionPolicy):
    """One policy per tenant; accounts determine the tenant whose blocks are evicted."""

    name = "shared"

    def __init__(self, policy: type[EvictionPolicy], tenants: Tenants, capacity_blocks_hint: int = 0) -> None:
        super().__init__(capacity_blocks_hint)
        self._accounts = Accounts(tenants)
        self._policies: defaultdict[Account, EvictionPolicy] = defaultdict(policy)

    def insert(self, key: BlockKey) -> None:
        account = self._accounts.of(key)
        self._policies[account].insert(key)
        account.blocks = len(self._policies[account])

    def touch(self, key: BlockKey) -> None:
        self._policies[self._accounts.of(key)].touch(key)

    def settle(self, key: BlockKey) -> None:
        self._policies[self._accounts.of(key)].settle(key)

    def remove(self, key: BlockKey) -> bool:
        account = self._accounts.of(key)
        removed = self._policies[account].remove(key)
        account.blocks = len(self._policies[account])
        return removed

    def clear(self) -> None:
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


_POLICIES: dict[str, type[EvictionPolicy]] = {policy.name: policy for policy in (Adaptive, ARC, LRU)}

POLICY_NAMES: tuple[str, ...] = tuple(_POLICIES)
"""Names accepted by :func:`make_policy`."""


DEFAULT_POLICY: Final = Adaptive.name
"""Policy of the primary tier: in no trace of docs/replay.md far below the better of LRU and ARC."""


def make_policy(name: str, capacity_blocks_hint: int = 0, tenants: Tenants | None = None) -> EvictionPolicy:
    """Create an empty policy by name (:data:`POLICY_NAMES`; case, hyphens and underscores are ignored).

    With ``tenants``, their accounts determine the tenant to evict from (:class:`kvstore.tenants.Accounts`).
    """
    policy = _POLICIES.get(str(name).lower().replace("-", "").replace("_", ""))
    if policy is None:
        hint = did_you_mean(str(name), POLICY_NAMES)
        raise ConfigError(f"Unknown eviction policy {shown(name)}. Known: {', '.join(POLICY_NAMES)}.{hint}")
    return policy(capacity_blocks_hint) if tenants is None else SharedPolicy(policy, tenants, capacity_blocks_hint)


class _Pass:
    """One pass over a queue, oldest first, that skips pinned blocks and restores them to their places at the end."""

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
            # Checked before the removal, so that an exception in the predicate loses no block.
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
