"""Bounds shared by all tiers: amounts in flight with precedence, retries, and running calls."""

from __future__ import annotations

import asyncio
import enum
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvstore.errors import ConfigError


class Precedence(enum.IntEnum):
    """Order of waiters: loads first, because requests wait for loads but not for stores."""

    LOAD = 0
    STORE = 1


class Limiter:
    """Bounds an amount in use (bytes, buffers, requests); further requests wait.

    Guarantees: grants never exceed ``total``; loads precede stores, otherwise first come, first served; a cancelled
    waiter holds nothing; a request for more than ``total`` is reduced to ``total``. Belongs to one event loop.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ConfigError(f"A limit of {total} would block everything. Expected at least 1.")
        self._total = total
        self.in_use = 0
        self._sequence = 0
        self._waiters: list[tuple[int, int, int, asyncio.Future[int]]] = []

    @property
    def total(self) -> int:
        """Maximum amount in use."""
        return self._total

    @total.setter
    def total(self, total: int) -> None:
        """Change the limit; after a reduction, new grants wait until enough has been returned."""
        self._total = total
        self._grant()

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return sum(not waiter.done() for *_, waiter in self._waiters)

    async def enter(self, amount: int = 1, precedence: Precedence = Precedence.LOAD) -> int:
        """Wait for an amount; return the granted amount, to be passed to :meth:`leave`."""
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
        """Return an amount granted by :meth:`enter`."""
        self.in_use -= amount
        if self._waiters:
            self._grant()

    @asynccontextmanager
    async def hold(self, amount: int, precedence: Precedence = Precedence.LOAD) -> AsyncIterator[None]:
        """Hold an amount within the ``async with``."""
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
            # The limit may be lower than at the time of the request.
            amount = min(amount, self._total)
            if self.in_use + amount > self._total:
                return
            heapq.heappop(self._waiters)
            self.in_use += amount
            waiter.set_result(amount)


class RetryBudget:
    """Bounds retries, so that they do not multiply the load on a failing server.

    Args:
        most: Initial and maximum number of tokens, enough for a burst of lost connections but not for an outage.
        share: Tokens earned per request: the maximum ratio of retries to requests.
    """

    def __init__(self, most: float, share: float) -> None:
        self._most = most
        self._share = share
        self.tokens = most

    def earn(self, requests: int = 1) -> None:
        """Add the tokens for requests."""
        self.tokens = min(self._most, self.tokens + self._share * requests)

    def spend(self) -> bool:
        """Take a token for a retry; False if none is left."""
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True

    def give_back(self, tries: int) -> None:
        """Return the tokens of retries that succeeded."""
        self.tokens = min(self._most, self.tokens + tries)


class CallsUnderWay:
    """Counts running calls, each within a ``with``, so that a close can wait for the last one."""

    def __init__(self) -> None:
        self.count = 0  # Number of running calls.
        self._idle = asyncio.Event()
        self._idle.set()

    def __enter__(self) -> None:
        self.count += 1
        self._idle.clear()

    def __exit__(self, *failure: object) -> None:
        self.count -= 1
        if not self.count:
            self._idle.set()

    async def ended(self) -> None:
        """Wait until no call runs."""
        await self._idle.wait()
