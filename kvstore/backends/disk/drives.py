"""The transfer engines of all roots: each root has its own, so that a frozen one holds up no transfer of another."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from kvstore.diskio import OsDisk, Transfer, TransferEngine, bare
from kvstore.diskio.transfers import EngineChoice

_WORKERS_MAX: Final = 1024
"""Most kernel threads of io_uring with several roots, because on a frozen one each write keeps a thread. A single root
has the kernel's limit: more threads took 7 to 18 % of the rate of 2 MiB blocks on two processors."""

_Move: TypeAlias = Callable[[int, Sequence[Transfer]], Coroutine[Any, Any, None]]


class Drives:
    """Moves batches of transfers, those of each root with its engine. Used from the loop thread."""

    def __init__(self, disk: OsDisk, choice: EngineChoice, roots: int, *, threads: int, frozen_s: float) -> None:
        self.disk = disk
        self._frozen_s = frozen_s
        workers_max = _WORKERS_MAX if roots > 1 else 0
        self._engines = [TransferEngine(disk, choice, threads=threads, workers_max=workers_max)]
        self.name = self._engines[0].name
        # Only the first one warns that there is no io_uring.
        others: EngineChoice = "io_uring" if self.name == "io_uring" else "threads"
        self._engines += [TransferEngine(disk, others, threads=threads) for _ in range(1, roots)]
        self._root_of: dict[int, int] = {}
        """By descriptor."""
        self._writing = [0] * roots  # Batches under way.
        self._answered_at = [0.0] * roots  # When the last batch of writes ended, or the first one under way began.

    def of(self, root: int) -> TransferEngine:
        """Return the engine of the root at this position."""
        return self._engines[root]

    def admit(self, root: int, fd: int) -> None:
        """Prepare a file of a root for transfers; on any thread."""
        self._root_of[fd] = root
        self._engines[root].admit(fd)

    # Plain functions, because a coroutine that only awaits another one takes part in each of its resumptions.
    def read(self, transfers: Sequence[Transfer]) -> Coroutine[Any, Any, None]:
        """Read; errors and guarantees are those of :meth:`TransferEngine.read`."""
        if len(self._engines) == 1:
            return self._engines[0].read(transfers)
        return self._move(lambda root, some: self._engines[root].read(some), transfers)

    def write(self, transfers: Sequence[Transfer]) -> Coroutine[Any, Any, None]:
        """Write, with the same guarantees."""
        if len(self._engines) == 1:
            return self._engines[0].write(transfers)  # A single root is never reported as frozen.
        return self._move(self._write, transfers)

    async def sync(self, fd: int) -> None:
        """Flush a file to the device.

        Raises:
            OSError: It fails.
        """
        await self._engines[self._root_of.get(fd, 0)].call(partial(self.disk.fdatasync, fd))

    def frozen(self) -> set[int]:
        """Return the positions of roots with writes under way of which none has ended for some seconds; not all."""
        since = time.monotonic() - self._frozen_s
        found = {root for root, count in enumerate(self._writing) if count and self._answered_at[root] <= since}
        return found if len(found) < len(self._engines) else set()

    async def close(self, timeout_s: float) -> bool:
        """Close all engines; return whether everything has ended (:meth:`TransferEngine.close`)."""
        return all(await asyncio.gather(*[each.close(timeout_s) for each in self._engines]))

    def release(self, close_files: Callable[[int], None]) -> None:
        """End without waiting; close the files of each root once its engine uses them no more."""
        for root, each in enumerate(self._engines):
            each.release(partial(close_files, root))

    async def _write(self, root: int, transfers: Sequence[Transfer]) -> None:
        if not self._writing[root]:
            self._answered_at[root] = time.monotonic()
        self._writing[root] += 1
        try:
            await self._engines[root].write(transfers)
        finally:
            self._writing[root] -= 1
            self._answered_at[root] = time.monotonic()

    async def _move(self, move: _Move, transfers: Sequence[Transfer]) -> None:
        groups: dict[int, list[Transfer]] = {}
        for each in transfers:
            # A file that was closed meanwhile fails with any engine.
            groups.setdefault(self._root_of.get(each.fd, 0), []).append(each)
        if len(groups) == 1:
            await move(*groups.popitem())
            return
        # Exceptions are returned, because a cancelled call waits for all of them then.
        found = await asyncio.gather(*itertools.starmap(move, groups.items()), return_exceptions=True)
        for some, error in zip(groups.values(), found, strict=True):
            if isinstance(error, OSError):
                for each in some:
                    each.error = each.error or bare(error)
            elif error is not None:
                raise error
