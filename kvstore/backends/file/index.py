"""The index: which blocks of the namespace are there, how large, and in which order they may go. No I/O."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvstore.backends.file.space import Goal
from kvstore.eviction import EvictionPolicy
from kvstore.types import BlockKey

__all__ = ["Entry", "Index"]


class Entry:
    """What is known of one block.

    Attributes:
        size_bytes: What it is charged.
        used_at: Last use, seconds since the epoch.
        generation: Number of the last scan that it was there in, or after.
        marked_at: When its use was last noted in the file's times, in a shared root.
    """

    __slots__ = ("generation", "marked_at", "size_bytes", "used_at")

    def __init__(self, size_bytes: int, used_at: float, generation: int) -> None:
        self.size_bytes = size_bytes
        self.used_at = used_at
        self.generation = generation
        self.marked_at = 0.0


class Index:
    """Blocks by key. Used from the loop thread only.

    The files are the truth. The index is what they were when last looked at: a block may have been taken away by
    somebody else, or (in a shared root) stored by another.

    Args:
        policy: Chooses what goes.
        clock: Seconds since the epoch.
    """

    def __init__(self, policy: EvictionPolicy, clock: Callable[[], float] = time.time) -> None:
        self._policy = policy
        self._clock = clock
        self._entries: dict[BlockKey, Entry] = {}
        self.size_bytes = 0
        """What all blocks are charged."""
        self.leaving: set[BlockKey] = set()
        """Blocks whose files are being removed: not there any more, not gone yet."""
        self._changed = asyncio.Event()
        self._pins: dict[BlockKey, int] = {}
        self.generation = 0
        """Number of the last scan that was begun."""
        self.changes = 0
        """Counts changes, so that a snapshot is only written when there were any."""
        self._gone: set[BlockKey] | None = None
        """Blocks that left since a scan was begun, whose files it may have seen before; None: no scan."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def get(self, key: BlockKey) -> Entry | None:
        """Return what is known of a block, or None."""
        return self._entries.get(key)

    def items(self) -> list[tuple[BlockKey, int, float]]:
        """Return key, size and last use of all blocks, coldest first."""
        entries = self._entries
        return [(key, (e := entries[key]).size_bytes, e.used_at) for key in self._policy if key in entries]

    def ordered(self) -> list[BlockKey]:
        """Return all keys, coldest first."""
        return [key for key in self._policy if key in self._entries]

    def add(self, key: BlockKey, size_bytes: int, used_at: float | None = None) -> None:
        """Note a block that was stored or found; if it is known already, that it is there."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.generation = self.generation
            self.size_bytes += size_bytes - entry.size_bytes
            entry.size_bytes = size_bytes
            return
        used_at = self._clock() if used_at is None else used_at
        self._insert(key, Entry(size_bytes, used_at, self.generation))

    def is_news(self, key: BlockKey) -> bool:
        """Tell whether a block that the scan has found is worth adding: not if it has left since."""
        return key not in self._entries and key not in self.leaving and (self._gone is None or key not in self._gone)

    def restore(self, blocks: Iterable[tuple[BlockKey, int, float]]) -> None:
        """Note blocks that a snapshot names, coldest first; a scan has to confirm them."""
        for key, size_bytes, used_at in blocks:
            if key not in self._entries and key not in self.leaving:
                self._insert(key, Entry(size_bytes, used_at, -1))

    def reheat(self, keys: Iterable[BlockKey]) -> None:
        """Put blocks behind those that were added after them, as if they had been added only now."""
        for key in keys:
            if key in self._entries and self._policy.remove(key):
                self._policy.insert(key)

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Note a use of blocks; unknown ones are ignored."""
        now = self._clock()
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                entry.used_at = now
                self._policy.touch(key)

    def remove(self, key: BlockKey) -> Entry | None:
        """Forget a block; return what was known of it."""
        entry = self._entries.get(key)
        if entry is not None:
            self._policy.remove(key)
            self._forget(key, entry)
        return entry

    def take_victims(self, goal: Goal, blocks_max: int) -> list[tuple[BlockKey, Entry]]:
        """Choose blocks to evict and forget them; they are :attr:`leaving` until :meth:`left` is called.

        Args:
            goal: What they should free.
            blocks_max: How many at most.
        """
        victims: list[tuple[BlockKey, Entry]] = []
        freed = 0
        while len(victims) < blocks_max and (freed < goal.size_bytes or len(victims) < goal.files):
            chosen = self._policy.victims(1, pinned=self._is_held)
            if not chosen:
                break
            entry = self._entries[chosen[0]]
            self._forget(chosen[0], entry)
            freed += entry.size_bytes
            victims.append((chosen[0], entry))
        self.leaving.update(key for key, _ in victims)
        return victims

    def left(self, keys: Iterable[BlockKey], gone: Iterable[BlockKey] = ()) -> None:
        """Note that blocks are not leaving any more: their files are gone, or stay for good.

        Args:
            keys: The blocks.
            gone: Those of them whose files were removed, also unknown ones: a scan may have seen them before.
        """
        if self._gone is not None:
            self._gone.update(gone)
        self.leaving.difference_update(keys)
        self._wake()

    async def wait_left(self, keys: Iterable[BlockKey]) -> None:
        """Wait until none of the blocks is leaving."""
        keys = list(keys)
        while not self.leaving.isdisjoint(keys):
            await self._changed.wait()

    @contextlib.contextmanager
    def pinned(self, keys: Sequence[BlockKey]) -> Iterator[None]:
        """Hold blocks while they are read or written: they are not evicted, and removals wait."""
        pins = self._pins
        for key in keys:
            pins[key] = pins.get(key, 0) + 1
        try:
            yield
        finally:
            for key in keys:
                pins[key] -= 1
                if not pins[key]:
                    del pins[key]
            self._wake()

    async def wait_unpinned(self, keys: Iterable[BlockKey]) -> None:
        """Wait until none of the blocks is pinned. They are to be :attr:`leaving`, so that no new pins are set."""
        keys = list(keys)
        while not self._pins.keys().isdisjoint(keys):
            await self._changed.wait()

    def begin_scan(self) -> None:
        """Begin a scan: blocks that are not seen from now on are lost at its end."""
        self.generation += 1
        self._gone = set()

    def end_scan(self) -> None:
        """End a scan, whether it got through or not."""
        self._gone = None

    def used_since(self, time_s: float) -> Sequence[BlockKey]:
        """Return the blocks that were used (or stored) at or after a time."""
        return [key for key, entry in self._entries.items() if entry.used_at >= time_s]

    def unseen(self) -> Sequence[BlockKey]:
        """Return the blocks that were not seen since the last scan was begun."""
        return [key for key, entry in self._entries.items() if entry.generation < self.generation]

    def _is_held(self, key: BlockKey) -> bool:
        return key in self._pins or key in self.leaving

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _forget(self, key: BlockKey, entry: Entry) -> None:
        del self._entries[key]
        self.size_bytes -= entry.size_bytes
        self.changes += 1
        if self._gone is not None:
            self._gone.add(key)

    def _insert(self, key: BlockKey, entry: Entry) -> None:
        self._entries[key] = entry
        self._policy.insert(key)
        self.size_bytes += entry.size_bytes
        self.changes += 1
