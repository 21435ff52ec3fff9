"""Eviction order of the primary tier, with blocks that must not be evicted now."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

from kvstore.eviction import LRU, make_policy
from kvstore.types import BlockKey

__all__ = ["EvictionOrder"]


class EvictionOrder:
    """An eviction policy, and the blocks that it must not choose now.

    Each block is in exactly one of three places: with the policy; *parked*, chosen by the policy while it was spared
    (pinned, held or dirty); or *first in line*, parked before, no longer spared, and not used since. Eviction examines
    a spared block once instead of at each allocation, so it stays O(1) per block.

    Args:
        policy: Name of the eviction policy.
        capacity: Most blocks there can be.
        is_pinned: Whether a block is pinned now.

    Attributes:
        held: Blocks kept on request.
        dirty: Blocks that must be written to a tier before they are evicted.
    """

    def __init__(self, policy: str, capacity: int, is_pinned: Callable[[BlockKey], bool]) -> None:
        self._policy = make_policy(policy, capacity)
        self._orders_by_use_alone = isinstance(self._policy, LRU)
        self._is_pinned = is_pinned
        self._parked: set[BlockKey] = set()
        self._first_out: OrderedDict[BlockKey, None] = OrderedDict()
        self._wanted: list[BlockKey] = []
        self.held: set[BlockKey] = set()
        self.dirty: set[BlockKey] = set()
        self.enter = self._policy.insert
        """Add a block."""

    def __len__(self) -> int:
        return len(self._policy) + len(self._parked) + len(self._first_out)

    @property
    def has_set_aside(self) -> bool:
        """Whether any block is parked or first in line; if not, pins need no call."""
        return bool(self._parked or self._first_out)

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Note uses, the most important last."""
        touch = self._policy.touch
        if not self.has_set_aside:
            for key in keys:
                touch(key)
            return
        for key in keys:
            if key in self._parked or key in self._first_out:
                self._parked.discard(key)
                self._first_out.pop(key, None)
                self._policy.insert(key)
            else:
                touch(key)

    def settle(self, keys: Iterable[BlockKey]) -> None:
        """Reorder blocks if the policy is LRU; other policies would count a further use."""
        if self._orders_by_use_alone:
            self.touch(keys)

    def spare(self, key: BlockKey) -> None:
        """Note that a block became spared."""
        if key in self._first_out:
            del self._first_out[key]
            self._parked.add(key)
            if key in self.dirty:
                self._wanted.append(key)

    def let_go(self, key: BlockKey) -> None:
        """Note that a reason to spare a block ended; if parked and without another reason, it becomes first in line."""
        if key in self._parked and key not in self.held and key not in self.dirty and not self._is_pinned(key):
            self._parked.discard(key)
            self._first_out[key] = None

    def leave(self, key: BlockKey) -> None:
        """Forget a block that was removed rather than evicted."""
        self.held.discard(key)
        self.dirty.discard(key)
        if key in self._parked:
            self._parked.discard(key)
        elif key in self._first_out:
            del self._first_out[key]
        else:
            self._policy.remove(key)

    def choose(self, need: int) -> list[BlockKey] | None:
        """Choose and forget blocks to evict, coldest first; None, with nothing forgotten, if too few can be evicted."""
        chosen: list[BlockKey] = []
        while self._first_out and len(chosen) < need:
            chosen.append(self._first_out.popitem(last=False)[0])
        chosen += self._victims(need - len(chosen), self.dirty)
        if len(chosen) >= need:
            return chosen
        self._first_out.update(dict.fromkeys(chosen))
        return None

    def look_ahead(self, count: int) -> None:
        """Choose the coldest blocks before their slots are needed: dirty ones become wanted, others first in line.

        Args:
            count: Blocks to have first in line or newly wanted; blocks already wanted are not counted.
        """
        for key in self._victims(count - len(self._first_out), ()):
            if key in self.dirty:
                self._parked.add(key)
                self._wanted.append(key)
            else:
                self._first_out[key] = None

    def take_wanted(self) -> list[BlockKey]:
        """Return the dirty blocks that the policy chose since the last call."""
        wanted, self._wanted = self._wanted, []
        return [key for key in dict.fromkeys(wanted) if key in self.dirty]

    def clear(self) -> None:
        """Forget everything."""
        self._policy.clear()
        for group in (self._parked, self._first_out, self._wanted, self.held, self.dirty):
            group.clear()

    def _victims(self, need: int, dirty: Collection[BlockKey]) -> list[BlockKey]:
        """Take victims from the policy, and park the spared blocks that it passed over."""
        if need <= 0:
            return []
        is_pinned, held = self._is_pinned, self.held
        passed: list[BlockKey] = []

        def spared(key: BlockKey) -> bool:
            if is_pinned(key) or key in held or key in dirty:
                passed.append(key)
                return True
            return False

        chosen = self._policy.victims(need, pinned=spared)
        for key in passed:
            self._policy.remove(key)
            self._parked.add(key)
            if key in dirty:
                self._wanted.append(key)
        return chosen
