"""The client: requests to an object store, with their limits, retries and counters.

Two implementations send the attempts: :mod:`kvstore.backends.s3.direct`, the default, and
:mod:`kvstore.backends.s3.boto`.
"""

from __future__ import annotations

import asyncio
import importlib
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from kvstore.backends.s3.config import Prices, S3Config
from kvstore.backends.s3.failures import Cause, S3Error, error_of_response, looks_like_error
from kvstore.backends.stream import check_tls, client_tls
from kvstore.errors import ConfigError
from kvstore.runtime.limits import Limiter, Precedence, RetryBudget

if TYPE_CHECKING:
    # For annotations only: it needs packages that may be missing.
    from kvstore.backends.s3.credentials import Credentials, CurrentCredentials

_T = TypeVar("_T")

DELETES_MAX: Final = 1000
"""Maximum number of objects in one DeleteObjects request."""

_RETRIES_MAX: Final = 10.0
"""Maximum burst of retries: enough for some lost connections, too few to double the load on a failing service."""

_RETRY_SHARE: Final = 0.1
"""Retries earned by one success: in the long run at most one retry for ten successes."""

_PAUSE_S: Final = 0.05
_PAUSE_S_MAX: Final = 1.0
"""The first pause is about one response time; the longest is half of an attempt's default timeout."""

_CUT_INTERVAL_S: Final = 0.2
"""After a reduction, further slow-down responses are ignored for this time: their requests were already in flight."""

_ERROR_BYTES: Final = 4096
_REQUESTS: Final = ("put", "get", "head", "list", "delete")
_CLASSES: Final = {
    "direct": ("kvstore.backends.s3.direct", "DirectClient"),
    "aioboto3": ("kvstore.backends.s3.boto", "BotoClient"),
}


class ObjectInfo(NamedTuple):
    """Metadata of an object."""

    key: str  # Full name in the bucket.
    size_bytes: int  # Length of the object, or of the range that was read.
    etag: str = ""  # Version, with the quotes as sent by the service; empty if the service sent none.
    modified_at: float = 0.0  # Time of the write, seconds since the epoch; 0.0 if unknown.


class ListPage(NamedTuple):
    """Up to a thousand objects, in order of their names; ``more``: whether further objects follow."""

    objects: Sequence[ObjectInfo]
    more: bool


@dataclass(slots=True)
class Traffic:
    """Attempts sent, by kind, and bytes of object data transferred."""

    requests: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(_REQUESTS, 0)))
    sent_bytes: int = 0
    received_bytes: int = 0

    def costs_usd(self, prices: Prices, stored_bytes: int = 0) -> dict[str, float]:
        """Return the costs so far: each kind of request including its bytes, and the total.

        Failed requests and retries count, because services charge for them. ``stored_month`` is the price of storing
        ``stored_bytes`` for a month, if that is known.
        """
        per_1000 = (prices.put_1000, prices.get_1000, prices.get_1000, prices.list_1000, prices.delete_1000)
        pairs = zip(_REQUESTS, per_1000, strict=True)
        costs = {what: self.requests[what] / 1000 * price for what, price in pairs}
        costs["put"] += self.sent_bytes / 1e9 * prices.sent_gb
        costs["get"] += self.received_bytes / 1e9 * prices.received_gb
        costs["total"] = sum(costs.values())
        if stored_bytes:
            costs["stored_month"] = stored_bytes / 1e9 * prices.stored_gb_month
        return costs


class ObjectClient(ABC):
    """One bucket of an object store.

    ``timeout_s`` of a call covers all of its attempts, and waiting for a slot; the default is the configured timeout of
    a lookup, load or store of that many bytes. One attempt may take the configured ``timeout``, plus the time for its
    bytes at ``bytes_per_second_min``. Any number of calls may run concurrently on one event loop. Failures raise
    :class:`~kvstore.backends.s3.failures.S3Error`; a missing or already existing object is a return value.

    Subclasses send single attempts: ``open``, ``close`` and the abstract methods that begin with an underscore. They
    raise S3Error with the status for every unsuccessful response. An attempt ends within its ``timeout_s``, or soon
    after its cancellation, and does not touch its buffers afterwards. It follows no redirects, and keeps at most
    :data:`~kvstore.backends.s3.http.TEXT_BYTES_MAX` bytes of a response in memory.
    """

    def __init__(self, config: S3Config) -> None:
        self.traffic = Traffic()  # Requests and bytes so far.
        # Bounds concurrent requests. Reads precede writes; a slow-down response halves the limit.
        self.limiter = Limiter(config.concurrency)
        self.failures: Counter[Cause] = Counter()  # Failed attempts, by cause.
        self.retries = 0  # Attempts after the first of a call.
        self.retries_denied = 0  # Retries that the budget did not allow.
        self.given_up = 0  # Cancelled calls, such as by the deadline of their job.
        self._config = config
        self._tls = client_tls(ca=config.tls_ca, with_system_ca=True)
        self._credentials: CurrentCredentials | None = None  # None before ``open``, and for anonymous requests.
        lookup_s, load_s, store_s = config.lookup_timeout, config.load_timeout, config.store_timeout
        self._timeouts = {"head": lookup_s, "list": lookup_s, "get": load_s, "put": store_s, "delete": store_s}
        self._budget = RetryBudget(_RETRIES_MAX, _RETRY_SHARE)
        self._width = float(config.concurrency)
        self._cut_at = 0.0

    def counters(self) -> dict[str, int]:
        """Return counts by name, for statistics."""
        return {
            **{f"requests_{what}": count for what, count in self.traffic.requests.items()},
            "sent_bytes": self.traffic.sent_bytes,
            "received_bytes": self.traffic.received_bytes,
            "retries": self.retries,
            "retries_denied": self.retries_denied,
            "given_up": self.given_up,
            "credentials_refused": self._tls.refusals + (self._credentials.refusals if self._credentials else 0),
            **{f"failed_{cause.value}": count for cause, count in self.failures.items()},
        }

    def check(self) -> None:
        """Check the profile and TLS files, without a search for credentials.

        Raises:
            ConfigError: The profile does not exist, or a file can't be used.
            S3Error: The credentials or configuration files cannot be used.
        """
        if self._config.tls_ca is not None:
            check_tls(self._tls)

    @abstractmethod
    async def open(self) -> None:
        """Find credentials and address, without a request to the service.

        Raises:
            ConfigError: Credentials, profile, region or certificates can't be used.
            S3Error: No credentials are available at present.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close connections. Idempotent. Running calls fail with cause CLOSED."""

    async def put(
        self,
        key: str,
        buffers: Sequence[bytes | memoryview],
        *,
        timeout_s: float | None = None,
        if_absent: bool = False,
        if_match: str = "",
    ) -> str | None:
        """Write an object; with ``if_absent`` only if none exists, with ``if_match`` only over this version (etag).

        Returns:
            The new version's etag (empty if the service sent none), or None if the condition did not hold. A retry of a
            successful conditional write finds its own object and returns None.
        """
        size = sum(len(buffer) for buffer in buffers)
        condition = {"If-None-Match": "*"} if if_absent else {"If-Match": if_match} if if_match else {}
        # MinIO before 2024 answers 304 for an object that exists.
        values = {412: None, 404: None} if if_match else {412: None, 304: None} if if_absent else {}

        def attempt(left_s: float) -> Awaitable[str | None]:
            self.traffic.sent_bytes += size
            return self._put(key, buffers, left_s, condition)

        return await self._run("put", attempt, timeout_s, size, values)

    async def get_into(
        self, key: str, buffers: Sequence[memoryview], *, timeout_s: float | None = None, offset: int | None = None
    ) -> ObjectInfo | None:
        """Read an object into buffers, which may be longer; with ``offset``, read the range that fills the buffers.

        Returns:
            Metadata, with the length read as ``size_bytes``; None if the object does not exist.

        Raises:
            S3Error: Cause LENGTH if the object is longer than the buffers, RANGE if it ends before ``offset``. The
                content of the buffers is then undefined.
        """
        capacity = sum(buffer.nbytes for buffer in buffers)

        async def attempt(left_s: float) -> ObjectInfo | None:
            found = await self._get_into(key, buffers, capacity, left_s, offset)
            self.traffic.received_bytes += found.size_bytes
            # The copy is cheap: an error is a few hundred bytes.
            if found.size_bytes and looks_like_error(bytes(buffers[0][:5])):
                start = bytes(buffers[0][: min(_ERROR_BYTES, found.size_bytes)])
                raise error_of_response(200, start.decode("utf-8", "replace"))
            if not found.etag:
                # A proxy's page must not pass for a damaged object, which would be deleted.
                raise S3Error(Cause.PROTOCOL, "The answer has no ETag, so it is not an object.")
            return found

        return await self._run("get", attempt, timeout_s, capacity, {404: None})

    async def head(self, key: str, *, timeout_s: float | None = None) -> ObjectInfo | None:
        """Return the metadata of an object; None if it does not exist."""
        return await self._run("head", partial(self._head, key), timeout_s, values={404: None})

    async def delete_all(self, keys: Sequence[str], *, timeout_s: float | None = None) -> None:
        """Remove objects, ``DELETES_MAX`` per request of ``timeout_s`` each; missing objects count as removed.

        Raises:
            S3Error: At least one removal failed; later requests were not sent.
        """
        for start in range(0, len(keys), DELETES_MAX):
            some = keys[start : start + DELETES_MAX]
            await self._run("delete", partial(self._delete_many, some), timeout_s)

    async def list_page(self, prefix: str, *, timeout_s: float | None = None, start_after: str = "") -> ListPage:
        """Return objects whose names begin with ``prefix`` and come after ``start_after``, in order."""

        async def attempt(left_s: float) -> ListPage:
            page = await self._list_page(prefix, left_s, start_after)
            if not all([info.key.startswith(prefix) for info in page.objects]):
                # Otherwise objects of other tiers or programs would be evicted.
                raise S3Error(Cause.PROTOCOL, "The service lists objects outside of the prefix that was asked for.")
            if start_after and page.objects and page.objects[0].key <= start_after:
                # Otherwise a listing of all pages would never end, and count objects repeatedly.
                raise S3Error(Cause.PROTOCOL, "The service lists from the beginning again: it ignores start-after.")
            return page

        return await self._run("list", attempt, timeout_s)

    async def listed(self, prefix: str, *, start_after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        """Yield all objects whose names begin with ``prefix`` and come after ``start_after``, in order."""
        more = True
        while more:
            page = await self.list_page(prefix, start_after=start_after)
            for info in page.objects:
                yield info
            more = page.more and bool(page.objects)
            start_after = page.objects[-1].key if page.objects else ""

    async def get_start(self, key: str, size_bytes: int) -> bytes | None:
        """Return the first ``size_bytes`` of an object; None if it does not exist."""
        if not size_bytes:
            # An empty range cannot be requested.
            return b""
        body = memoryview(bytearray(size_bytes))
        found = await self.get_into(key, [body], offset=0)
        return None if found is None else bytes(body[: found.size_bytes])

    async def probe(self, key: str, *, timeout_s: float) -> None:
        """Send one GET for an object that need not exist, without retries.

        Raises:
            S3Error: A problem with bucket, region, credentials, clock, rights or network.
        """
        self.traffic.requests["get"] += 1
        used = self._used_credentials
        try:
            # GET instead of HEAD, whose response has no body with an error code.
            await self._get_into(key, [memoryview(bytearray(1))], 1, timeout_s, 0)
        except S3Error as error:
            if error.is_of_object(404, 416):
                return
            self.failures[error.cause] += 1
            await self._has_others(error, used)  # For the next probe.
            raise

    @property
    def _used_credentials(self) -> Credentials | None:
        return self._credentials.last if self._credentials else None

    async def _has_others(self, error: S3Error, used: Credentials | None) -> bool:
        """Return whether there are other credentials than those that the service may have refused."""
        is_certain = error.cause is Cause.CREDENTIALS
        # The response to a HEAD has no body with an error code.
        may_be = is_certain or (error.status in (400, 403) and error.cause in (Cause.FORBIDDEN, Cause.REJECTED))
        return self._credentials is not None and may_be and await self._credentials.refused(used, is_certain=is_certain)

    @abstractmethod
    async def _put(
        self, key: str, buffers: Sequence[bytes | memoryview], timeout_s: float, condition: Mapping[str, str]
    ) -> str: ...

    @abstractmethod
    async def _get_into(
        self, key: str, buffers: Sequence[memoryview], capacity: int, timeout_s: float, offset: int | None
    ) -> ObjectInfo: ...

    @abstractmethod
    async def _head(self, key: str, timeout_s: float) -> ObjectInfo: ...

    @abstractmethod
    async def _delete_many(self, keys: Sequence[str], timeout_s: float) -> None: ...

    @abstractmethod
    async def _list_page(self, prefix: str, timeout_s: float, start_after: str) -> ListPage: ...

    async def _run(
        self,
        what: str,
        attempt: Callable[[float], Awaitable[_T]],
        timeout_s: float | None,
        size_bytes: int = 0,
        values: Mapping[int, _T] = MappingProxyType({}),
    ) -> _T:
        """Run attempts until one succeeds, and return its result.

        ``values`` maps error statuses to results: an attempt with such a status counts as a success.
        """
        bytes_s = size_bytes / self._config.bytes_per_second_min
        if timeout_s is None:
            timeout_s = self._timeouts[what] + bytes_s
        precedence = Precedence.STORE if what in ("put", "delete") else Precedence.LOAD
        attempt_s = self._config.timeout + bytes_s
        deadline = time.monotonic() + timeout_s
        tries, last = 0, ""
        try:
            # Each await below has its own timeout. One more timer around the loop would cost as much as a signature.
            while True:
                tries += 1
                await self._enter(precedence, deadline - time.monotonic())
                used = self._used_credentials
                try:
                    self.traffic.requests[what] += 1
                    result = await attempt(min(attempt_s, deadline - time.monotonic()))
                    self._note_success()
                    return result
                except S3Error as error:
                    if error.is_of_object(*values):
                        self._note_success()
                        return values[error.status]
                    pause_s = self._pause_after(error, tries, deadline)
                    if pause_s is None:
                        if not await self._has_others(error, used):
                            raise
                        pause_s = 0.0
                    last = f" The last failure: {error.cause.value}."
                finally:
                    self.limiter.leave()
                self.retries += 1
                await asyncio.sleep(pause_s)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        except TimeoutError:
            self.failures[Cause.TIMEOUT] += 1
            text = f"Timed out waiting for a request slot within {timeout_s:.3g} s, after {tries - 1} attempts.{last}"
            raise S3Error(Cause.TIMEOUT, text) from None

    async def _enter(self, precedence: Precedence, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise TimeoutError
        if self.limiter.in_use < self.limiter.total:
            await self.limiter.enter(1, precedence)
            return
        async with asyncio.timeout(timeout_s):
            await self.limiter.enter(1, precedence)

    def _note_success(self) -> None:
        self._budget.earn()
        if self._width < self._config.concurrency:
            # One more concurrent request after each full window of successes.
            self._set_width(self._width + 1 / self._width)

    def _pause_after(self, error: S3Error, tries: int, deadline: float) -> float | None:
        """Count a failure; return the pause in seconds before the next attempt, or None without a further attempt."""
        self.failures[error.cause] += 1
        now = time.monotonic()
        if error.cause is Cause.SLOW_DOWN and now - self._cut_at >= _CUT_INTERVAL_S:
            self._cut_at = now
            self._set_width(self._width / 2)
        if not error.may_pass or tries >= self._config.tries:
            return None
        pause_s = backoff_s(tries)
        if now + pause_s >= deadline:
            return None
        if not self._budget.spend():
            self.retries_denied += 1
            return None
        return pause_s

    def _set_width(self, width: float) -> None:
        self._width = min(float(self._config.concurrency), max(1.0, width))
        if int(self._width) != self.limiter.total:
            self.limiter.total = int(self._width)


def make_client(config: S3Config) -> ObjectClient:
    """Return the configured client, not opened."""
    module, attribute = _CLASSES[config.chosen_client]
    try:
        # Imported here because each client needs packages that may be missing.
        found: type[ObjectClient] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"S3 can't be used: the package {error.name!r} is not installed. Install vllm-kvstore[s3]."
        ) from error
    return found(config)


def backoff_s(tries: int, *, rng: Callable[[], float] = random.random) -> float:
    """Return the pause before the next attempt: random, with an upper limit that doubles per attempt ("full jitter").

    Source: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
    """
    return rng() * min(_PAUSE_S_MAX, _PAUSE_S * 2.0**tries)


def check_range(content_range: str | None, offset: int | None) -> None:
    """Raise S3Error if a response contains another range than the requested one, which would look like damage."""
    if not (content_range or "").startswith(f"bytes {offset}-"):
        raise S3Error(Cause.PROTOCOL, "The service sends another part of the object than was asked for.")
