"""Idle namespaces: those in the root that no running engine uses. Their blocks go before anybody else's."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import logging
import stat
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvstore.backends.file.counters import Counters
from kvstore.backends.file.layout import (
    NAMESPACE_DOCUMENT,
    is_namespace,
    is_shard,
    key_of,
    lock_name,
    snapshot_name,
)
from kvstore.backends.file.ledger import Ledger, Removal
from kvstore.backends.file.locks import FileLock
from kvstore.backends.file.root import Root
from kvstore.backends.file.space import Goal, charge
from kvstore.diskio import OsDisk

__all__ = ["IdleNamespaces"]

_log = logging.getLogger("kvstore.backends.file")


_Victim: TypeAlias = tuple[float, int, str, str, int]
"""Negated last use, a number that makes it unique, shard, name, charge."""

_SLICE_BLOCKS: Final = 256
"""Blocks removed while a namespace is locked: some milliseconds, for which an engine that starts would have to wait."""

_PAUSE_S: Final = 0.01
"""Time between two slices, so that the engine gets its turn."""

_EVERYTHING: Final = Goal(1 << 62, 1 << 62)
"""More than any namespace has."""


@dataclass(slots=True)
class _Freed:
    size_bytes: int = 0
    files: int = 0

    def covers(self, goal: Goal) -> bool:
        return self.size_bytes >= goal.size_bytes and self.files >= goal.files


class IdleNamespaces:
    """Evicts from namespaces that nobody holds.

    Each is locked while its files go, so that it does not come to life under it.

    Args:
        disk: What to call the system with.
        root: The root directory.
        ledger: Where what goes is struck out.
        counters: Where to count.
        own: Our namespace, which is not idle.
    """

    def __init__(self, disk: OsDisk, root: Root, ledger: Ledger, counters: Counters, own: str) -> None:
        self._disk = disk
        self._root = root
        self._ledger = ledger
        self._counters = counters
        self._own = own

    def evict(self, goal: Goal) -> int:
        """Remove blocks, of the namespace first that was unused for longest, coldest first; return how many.

        Blocking. Raises nothing: what can't be removed stays.
        """
        freed = _Freed()
        with contextlib.suppress(OSError):
            for name in self._names():
                if freed.covers(goal):
                    break
                # What can't be removed is tried again by the next eviction.
                with contextlib.suppress(OSError):
                    self._evict_namespace(name, goal, freed)
        return freed.files

    def drop(self, name: str, only: Collection[tuple[str, str]] | None = None) -> int:
        """Remove a namespace that nobody holds, or some of its blocks; return how many blocks went.

        Blocking. Goes no further when somebody opens the namespace meanwhile.

        Args:
            name: Its directory.
            only: Shards and names of the files to remove; None: all blocks, and the namespace with them.

        Raises:
            OSError: Something can't be removed.
        """
        freed = _Freed()
        self._evict_namespace(name, _EVERYTHING, freed, only)
        return freed.files

    def _names(self) -> list[str]:
        names = [name for name in self._listed(self._root.fd, is_namespace) if name != self._own]
        return sorted(names, key=self._last_used)

    def _last_used(self, name: str) -> float:
        """Return when a namespace was last opened or closed."""
        times = [0.0]
        for state_name in (lock_name(name), snapshot_name(name)):
            with contextlib.suppress(OSError):
                times.append(self._disk.stat(state_name, self._root.state_fd).st_mtime)
        return max(times)

    def _evict_namespace(
        self, name: str, goal: Goal, freed: _Freed, only: Collection[tuple[str, str]] | None = None
    ) -> None:
        if not self._while_idle(name, lambda: False):
            return
        fd = self._disk.open_dir(name, self._root.fd)
        try:
            if self._disk.fstat(fd).st_uid != self._root.owner_uid:
                return
            victims = self._coldest(fd, goal, freed)
            if only is not None:
                victims = [victim for victim in victims if victim[2:4] in only]
            for start in range(0, len(victims), _SLICE_BLOCKS):
                if start:
                    time.sleep(_PAUSE_S)
                part = victims[start : start + _SLICE_BLOCKS]
                if not self._while_idle(name, lambda part=part: self._unlink(fd, part, freed)):  # type: ignore[misc]
                    return
            if only is None and not freed.covers(goal):
                self._while_idle(name, lambda: self._clear(name, fd))
        finally:
            self._disk.close(fd)

    def _while_idle(self, name: str, work: Callable[[], bool]) -> bool:
        """Do something while nobody can open the namespace; return whether that was possible.

        The lock is held for moments only, as an engine that starts waits for it. ``work`` returns whether the
        namespace, and so its lock, is to be no more.
        """
        lock = FileLock(self._disk, self._root.state_fd, lock_name(name))
        if not lock.try_acquire(exclusive=True):
            return False
        ended = False
        try:
            ended = work()
        finally:
            lock.release(remove=ended)
        return True

    def _unlink(self, namespace_fd: int, victims: Sequence[_Victim], freed: _Freed) -> bool:
        removal = Removal(sum(victim[4] for victim in victims), len(victims))
        before = dataclasses.astuple(freed)
        self._ledger.begin(removal)
        try:
            for _, _, shard, name, size_bytes in victims:
                with contextlib.suppress(FileNotFoundError):
                    self._unlink_one(namespace_fd, shard, name)
                    freed.size_bytes += size_bytes
                    freed.files += 1
        finally:
            removed = freed.size_bytes - before[0], freed.files - before[1]
            self._ledger.end(removal, removed)
            self._counters.add("evicted_idle_blocks", removed[1])
        return False

    def _unlink_one(self, namespace_fd: int, shard: str, name: str) -> None:
        fd = self._disk.open_dir(shard, namespace_fd)
        try:
            self._disk.unlink(name, fd)
        finally:
            self._disk.close(fd)

    def _coldest(self, namespace_fd: int, goal: Goal, freed: _Freed) -> list[_Victim]:
        """Return the blocks to go, coldest first; holds no more of them in memory than have to go."""
        need_bytes, need_files = goal.size_bytes - freed.size_bytes, goal.files - freed.files
        heap: list[_Victim] = []
        total = 0
        numbers = itertools.count()
        for used_at, shard, name, size_bytes in self._blocks(namespace_fd):
            heapq.heappush(heap, (-used_at, next(numbers), shard, name, size_bytes))
            total += size_bytes
            while total - heap[0][4] >= need_bytes and len(heap) > max(need_files, 1):
                total -= heapq.heappop(heap)[4]
        return sorted(heap, reverse=True)

    def _blocks(self, namespace_fd: int) -> Iterator[tuple[float, str, str, int]]:
        for shard in self._listed(namespace_fd, is_shard):
            fd = self._disk.open_dir(shard, namespace_fd)
            try:
                for name in self._listed(fd, _is_block):
                    status = self._disk.stat(name, fd)
                    if stat.S_ISREG(status.st_mode) and status.st_uid == self._root.owner_uid:
                        yield status.st_mtime, shard, name, charge(status.st_size)
            finally:
                self._disk.close(fd)

    def _clear(self, name: str, namespace_fd: int) -> bool:
        """Remove a namespace without blocks; whatever else lies in it keeps it."""
        try:
            for shard in self._listed(namespace_fd, is_shard):
                self._disk.rmdir(shard, namespace_fd)
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(NAMESPACE_DOCUMENT, namespace_fd)
            self._disk.rmdir(name, self._root.fd)
        except OSError:
            return False
        with contextlib.suppress(FileNotFoundError):
            self._disk.unlink(snapshot_name(name), self._root.state_fd)
        _log.info("removed the last block of idle namespace %s…", name[:16])
        return True

    def _listed(self, fd: int, wanted: Callable[[str], bool]) -> list[str]:
        own_fd = self._disk.open_dir(".", fd)
        try:
            with self._disk.scandir(own_fd) as entries:
                return [entry.name for entry in entries if wanted(entry.name)]
        finally:
            self._disk.close(own_fd)


def _is_block(name: str) -> bool:
    return key_of(name) is not None
