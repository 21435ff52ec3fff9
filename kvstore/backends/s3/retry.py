"""Trying again, in the one place where that is done; and how much runs at once, less when asked to slow down."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from kvstore.backends.s3.client import ListPage, ObjectClient, ObjectInfo
from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.failures import Cause, S3Error

__all__ = ["Budget", "Gate", "RetryingClient", "backoff_s"]

_T = TypeVar("_T")

_TOKENS_MAX: Final = 10.0
"""Retries at once, after a long time without failures: a burst of lost connections passes, an outage does not double
the load on a service that is down already."""

_EARNED: Final = 0.1
"""Retries that one success earns: at most one request in ten is a retry."""

_PAUSE_S: Final = 0.05
_PAUSE_S_MAX: Final = 1.0
"""The first pause is about what an answer takes; none is longer than half of what one attempt may take."""

_CUT_INTERVAL_S: Final = 0.2
"""Answers that were under way when the service asked to slow down say nothing new; they come within this time."""


class Budget:
    """Tokens for retries: each costs one, each success earns a tenth."""

    def __init__(self) -> None:
        self.tokens = _TOKENS_MAX

    def earn(self) -> None:
        """Note a success."""
        self.tokens = min(_TOKENS_MAX, self.tokens + _EARNED)

    def spend(self) -> bool:
        """Take a token for a retry; False if there is none."""
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


def backoff_s(tries: int, *, rng: Callable[[], float] = random.random) -> float:
    """Return the pause before the next attempt: anything from nothing to twice as much as before ("full jitter").

    Source: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
    """
    return rng() * min(_PAUSE_S_MAX, _PAUSE_S * 2.0**tries)


class Gate:
    """Bounds what runs at once: reads before writes, and half as much whenever the service asks to slow down.

    Belongs to one event loop.

    Args:
        most: Requests at once when all is well.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.width = float(most)
        self.in_use = 0
        self._cut_at = 0.0
        self._waiters: tuple[deque[asyncio.Future[None]], deque[asyncio.Future[None]]] = (deque(), deque())

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return sum(len(queue) for queue in self._waiters)

    def narrow(self, now: float) -> None:
        """Note that the service asked to slow down."""
        if now - self._cut_at >= _CUT_INTERVAL_S:
            self._cut_at = now
            self.width = max(1.0, self.width / 2)

    def widen(self) -> None:
        """Note a success: one request more for each round of them."""
        if self.width < self._most:
            self.width = min(self._most, self.width + 1 / self.width)
            self._admit()

    async def enter(self, *, writes: bool, timeout_s: float) -> None:
        """Wait for a turn; whoever got one gives it back by :meth:`leave`.

        Raises:
            TimeoutError: It did not come in time, or there was none.
        """
        if timeout_s <= 0:
            raise TimeoutError
        if self.in_use < int(self.width) and not self.waiting:
            self.in_use += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[writes].append(turn)
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                # Cancelled when it was its turn already: somebody else's now.
                self.leave()
            raise

    def leave(self) -> None:
        """Give a turn back, after the request has ended in whatever way."""
        self.in_use -= 1
        self._admit()

    def _admit(self) -> None:
        for queue in self._waiters:
            while queue and self.in_use < int(self.width):
                turn = queue.popleft()
                if not turn.done():
                    self.in_use += 1
                    turn.set_result(None)


class RetryingClient(ObjectClient):
    """A client with retries and a bound on what runs at once, around one that has neither.

    ``timeout_s`` of its calls is for all attempts together, and for waiting; one attempt has ``timeout`` of the
    configuration, and what its bytes need at ``bytes_per_second_min``. That an attempt ends in its time is left to the
    client around which this is.

    Args:
        client: Sends one attempt.
        config: Its numbers.

    Attributes:
        failures: Attempts that failed, by cause.
        retries: Attempts that were not the first.
        retries_denied: Retries that the budget did not allow.
        given_up: Calls that were cancelled, such as by the deadline of their job.
    """

    def __init__(self, client: ObjectClient, config: S3Config) -> None:
        super().__init__()
        self.inner = client
        self.traffic = client.traffic
        self.gate = Gate(config.concurrency)
        self.failures: Counter[Cause] = Counter()
        self.retries = 0
        self.retries_denied = 0
        self.given_up = 0
        self._config = config
        self._budget = Budget()

    def counters(self) -> dict[str, int]:
        """See :meth:`ObjectClient.counters`."""
        failed = {f"failed_{cause.value}": count for cause, count in self.failures.items()}
        own = {"retries": self.retries, "retries_denied": self.retries_denied, "given_up": self.given_up}
        return {**own, **failed, **self.inner.counters()}

    async def open(self) -> None:
        """See :meth:`ObjectClient.open`."""
        await self.inner.open()

    async def close(self) -> None:
        """See :meth:`ObjectClient.close`."""
        await self.inner.close()

    async def put(
        self,
        key: str,
        buffers: Sequence[bytes | memoryview],
        *,
        timeout_s: float,
        if_absent: bool = False,
        if_match: str = "",
    ) -> str | None:
        """See :meth:`ObjectClient.put`. A retry of a write that did succeed finds its own object, and says None."""

        def attempt(left_s: float) -> Awaitable[str | None]:
            return self.inner.put(key, buffers, timeout_s=left_s, if_absent=if_absent, if_match=if_match)

        return await self._run(attempt, timeout_s, sum(len(buffer) for buffer in buffers), writes=True)

    async def get_into(
        self,
        key: str,
        buffers: Sequence[memoryview],
        *,
        timeout_s: float,
        offset: int | None = None,
    ) -> ObjectInfo | None:
        """See :meth:`ObjectClient.get_into`."""

        def attempt(left_s: float) -> Awaitable[ObjectInfo | None]:
            return self.inner.get_into(key, buffers, timeout_s=left_s, offset=offset)

        return await self._run(attempt, timeout_s, sum(buffer.nbytes for buffer in buffers))

    async def head(self, key: str, *, timeout_s: float) -> ObjectInfo | None:
        """See :meth:`ObjectClient.head`."""
        return await self._run(lambda left_s: self.inner.head(key, timeout_s=left_s), timeout_s)

    async def delete_many(self, keys: Sequence[str], *, timeout_s: float) -> None:
        """See :meth:`ObjectClient.delete_many`."""
        await self._run(lambda left_s: self.inner.delete_many(keys, timeout_s=left_s), timeout_s, writes=True)

    async def list_page(self, prefix: str, *, timeout_s: float, start_after: str = "") -> ListPage:
        """See :meth:`ObjectClient.list_page`."""

        def attempt(left_s: float) -> Awaitable[ListPage]:
            return self.inner.list_page(prefix, timeout_s=left_s, start_after=start_after)

        return await self._run(attempt, timeout_s)

    async def probe(self, key: str, *, timeout_s: float) -> None:
        """See :meth:`ObjectClient.probe`. Not tried again: whoever probes does so by himself."""
        try:
            await self.inner.probe(key, timeout_s=timeout_s)
        except S3Error as error:
            self.failures[error.cause] += 1
            raise

    async def _run(
        self,
        attempt: Callable[[float], Awaitable[_T]],
        timeout_s: float,
        size_bytes: int = 0,
        *,
        writes: bool = False,
    ) -> _T:
        allowed_s = self._config.timeout + size_bytes / self._config.bytes_per_second_min
        deadline = time.monotonic() + timeout_s
        tries, last = 0, ""
        try:
            # All that is waited for has a bound of its own: one timer more around them costs as much as a signature.
            while True:
                tries += 1
                try:
                    await self.gate.enter(writes=writes, timeout_s=deadline - time.monotonic())
                    try:
                        result = await attempt(min(allowed_s, deadline - time.monotonic()))
                    finally:
                        self.gate.leave()
                except S3Error as error:
                    pause_s = self._pause_after(error, tries, deadline)
                    if pause_s is None:
                        raise
                    last = f" The last failure: {error.cause.value}."
                else:
                    self._budget.earn()
                    self.gate.widen()
                    return result
                self.retries += 1
                await asyncio.sleep(pause_s)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        except TimeoutError:
            self.failures[Cause.TIMEOUT] += 1
            text = f"Not its turn within {timeout_s:.3g} s, after {tries - 1} attempts.{last}"
            raise S3Error(Cause.TIMEOUT, text) from None

    def _pause_after(self, error: S3Error, tries: int, deadline: float) -> float | None:
        """Count a failure; return how long to pause before the next attempt, None if there is to be none."""
        self.failures[error.cause] += 1
        now = time.monotonic()
        if error.cause is Cause.SLOW_DOWN:
            self.gate.narrow(now)
        if not error.may_pass or tries >= self._config.tries:
            return None
        pause_s = backoff_s(tries)
        if now + pause_s >= deadline:
            return None
        if not self._budget.spend():
            self.retries_denied += 1
            return None
        return pause_s
