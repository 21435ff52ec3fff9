"""Limits on what is in flight, with an order of precedence."""

from __future__ import annotations

import asyncio
import enum
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvstore.errors import ConfigError

__all__ = ["Limiter", "Precedence"]


class Precedence(enum.IntEnum):
    """Who goes first when a limit is reached: somebody waits for a load, nobody for a store."""

    LOAD = 0
    STORE = 1


class Limiter:
    """Hands out a fixed amount (bytes, buffers) and makes the rest wait.

    Guarantees: never more than ``total`` out; loads before stores, else first come, first served; a cancelled waiter
    holds nothing; a request for more than ``total`` waits for all of it instead of for ever. Belongs to one event loop.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ConfigError(f"A limit of {total}: it must be at least 1, or nothing would ever pass.")
        self.total = total
        self._free = total
        self._sequence = 0
        self._waiters: list[tuple[int, int, int, asyncio.Future[None]]] = []

    @property
    def in_use(self) -> int:
        """What is handed out now."""
        return self.total - self._free

    @asynccontextmanager
    async def hold(self, amount: int, precedence: Precedence = Precedence.LOAD) -> AsyncIterator[None]:
        """Wait for ``amount``, hold it inside the ``async with``."""
        amount = min(amount, self.total)
        await self._acquire(amount, precedence)
        try:
            yield
        finally:
            self._free += amount
            self._grant()

    async def _acquire(self, amount: int, precedence: Precedence) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sequence += 1
        heapq.heappush(self._waiters, (precedence, self._sequence, amount, waiter))
        self._grant()
        try:
            await waiter
        except BaseException:
            # Cancelled after the grant: give it back. Cancelled before: _grant drops the cancelled waiter.
            if waiter.done() and not waiter.cancelled():
                self._free += amount
            self._grant()
            raise

    def _grant(self) -> None:
        while self._waiters:
            _, _, amount, waiter = self._waiters[0]
            if waiter.cancelled():
                heapq.heappop(self._waiters)
                continue
            if amount > self._free:
                return
            heapq.heappop(self._waiters)
            self._free -= amount
            waiter.set_result(None)
