"""Where the file backend does its I/O: threads, each with a ring where io_uring may be used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from kvstore.diskio import BatchFunction, EngineChoice, Priority, Rings, ThreadEngine

__all__ = ["FileEngine"]

_I = TypeVar("_I")

_RING_ITEMS_MAX: Final = 128
"""Longest unit of a thread with a ring: so many files are open at once, which the usual limit of 1,024 allows for
several threads."""


class FileEngine(ThreadEngine):
    """Runs batches of block operations.

    Args:
        threads: How many.
        choice: Whether they use io_uring.

    Attributes:
        rings: Where they get their rings from.
    """

    def __init__(self, threads: int, choice: EngineChoice) -> None:
        super().__init__(threads, "kvstore-file")
        self.rings = Rings(choice, "the file tier")

    async def run_blocks(
        self,
        function: BatchFunction[_I],
        ops: Sequence[_I],
        *,
        priority: Priority = Priority.STORE,
        in_batches: bool = True,
    ) -> None:
        """Run operations on blocks and wait for them (see ``Batch.wait``).

        With rings one thread has all of them under way at once, and more threads would only take turns with the GIL.

        Args:
            function: Does a part of them.
            ops: The operations.
            priority: Which batches they go before.
            in_batches: Whether the function can do them by batches of system calls; one by one, threads share them.
        """
        if in_batches and self.rings.used:
            batch = self.submit(function, ops, priority=priority, unit_items_max=_RING_ITEMS_MAX, threads_max=1)
            await batch.wait()
        else:
            await self.run(function, ops, priority=priority)

    async def close(self, timeout_s: float = 5.0) -> bool:
        """See :meth:`ThreadEngine.close`."""
        ended = await super().close(timeout_s)
        if ended:
            self.rings.close()
        return ended
