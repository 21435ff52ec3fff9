"""Bounds that all tiers share: on what is in flight, with an order of precedence; on retries; on calls under way."""

from __future__ import annotations

import asyncio
import enum
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvstore.errors import ConfigError

__all__ = ["CallsUnderWay", "Limiter", "Precedence", "RetryBudget"]


class Precedence(enum.IntEnum):
    """Who goes first when a limit is reached: somebody waits for a load, nobody for a store."""

    LOAD = 0
    STORE = 1


class Limiter:
    """Hands out an amount (bytes, buffers, requests) and makes the rest wait.

    Guarantees: never more than ``total`` handed out anew; loads before stores, else first come, first served; a
    cancelled waiter holds nothing; a request for more than ``total`` waits for all of it instead of for ever. Belongs
    to one event loop.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ConfigError(f"A limit of {total}: it must be at least 1, or nothing would ever pass.")
        self._total = total
        self.in_use = 0
        self._sequence = 0
        self._waiters: list[tuple[int, int, int, asyncio.Future[int]]] = []

    @property
    def total(self) -> int:
        """What may be handed out at most."""
        return self._total

    @total.setter
    def total(self, total: int) -> None:
        """Change it; what is handed out beyond a lower one is waited for."""
        self._total = total
        self._grant()

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return sum(not waiter.done() for *_, waiter in self._waiters)

    async def enter(self, amount: int = 1, precedence: Precedence = Precedence.LOAD) -> int:
        """Wait for an amount; return what was handed out, which whoever got it gives back by :meth:`leave`."""
        amount = min(amount, self._total)
        if not self._waiters and self.in_use + amount <= self._total:
            self.in_use += amount
            return amount
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._sequence += 1
        heapq.heappush(self._waiters, (precedence, self._sequence, amount, waiter))
        self._grant()
        try:
            return await waiter
        except BaseException:
            # Cancelled after the grant: give it back. Cancelled before: _grant drops the cancelled waiter.
            self.leave(waiter.result() if waiter.done() and not waiter.cancelled() else 0)
            raise

    def leave(self, amount: int = 1) -> None:
        """Give back what :meth:`enter` returned."""
        self.in_use -= amount
        self._grant()

    @asynccontextmanager
    async def hold(self, amount: int, precedence: Precedence = Precedence.LOAD) -> AsyncIterator[None]:
        """Wait for ``amount``, hold it inside the ``async with``."""
        taken = await self.enter(amount, precedence)
        try:
            yield
        finally:
            self.leave(taken)

    def _grant(self) -> None:
        while self._waiters:
            _, _, amount, waiter = self._waiters[0]
            if waiter.cancelled():
                heapq.heappop(self._waiters)
                continue
            # The limit may have been lowered since the amount was asked for.
            amount = min(amount, self._total)
            if self.in_use + amount > self._total:
                return
            heapq.heappop(self._waiters)
            self.in_use += amount
            waiter.set_result(amount)


class RetryBudget:
    """Tokens for tries beyond the first, so that a failing server is not burdened with a multiple of the load.

    Args:
        most: Tokens at the start, and at most: a burst of lost connections passes, an outage does not.
        share: Tokens that one request earns, so the share of tries that are not the first.
    """

    def __init__(self, most: float, share: float) -> None:
        self._most = most
        self._share = share
        self.tokens = most

    def earn(self, requests: int = 1) -> None:
        """Note requests."""
        self.tokens = min(self._most, self.tokens + self._share * requests)

    def spend(self) -> bool:
        """Take a token for one more try; False if there is none."""
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True

    def give_back(self, tries: int) -> None:
        """Give tokens back, for tries that turned out to be needed."""
        self.tokens = min(self._most, self.tokens + tries)


class CallsUnderWay:
    """Counts calls that run, each inside a ``with``, so that whoever closes can wait for the last of them."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __enter__(self) -> None:
        self._count += 1
        self._idle.clear()

    def __exit__(self, *failure: object) -> None:
        self._count -= 1
        if not self._count:
            self._idle.set()

    async def ended(self) -> None:
        """Wait until none runs."""
        await self._idle.wait()
