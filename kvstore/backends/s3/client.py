"""The client: requests to an object store, one attempt each. What lies in the objects is no concern of it.

Two implementations stand behind it, :mod:`kvstore.backends.s3.aws` and :mod:`kvstore.backends.s3.rust`. Neither tries
again by itself: that is done in one place (:mod:`kvstore.backends.s3.retry`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["DELETES_MAX", "ListPage", "ObjectClient", "ObjectInfo", "Traffic"]

DELETES_MAX: Final = 1000
"""Objects that one DeleteObjects may name."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What the service says of an object.

    Attributes:
        key: Its whole name in the bucket.
        size_bytes: Of a ranged get, the length of the range; else of the object.
        etag: Its version, with quotes as the service gives it; empty if it gave none.
        modified_at: When it was written, seconds since the epoch; 0.0 if not known.
    """

    key: str
    size_bytes: int
    etag: str = ""
    modified_at: float = 0.0


@dataclass(frozen=True, slots=True)
class ListPage:
    """Some of the objects under a prefix, in order of their names.

    Attributes:
        objects: Up to a thousand of them.
        more: Whether there are others behind the last of these; ask with its name as ``start_after``.
    """

    objects: Sequence[ObjectInfo]
    more: bool


@dataclass(slots=True)
class Traffic:
    """Requests that were sent and bytes that moved, by what they cost; attempts count, not calls.

    Attributes:
        puts: PUT requests.
        gets: GET requests.
        heads: HEAD requests.
        lists: Pages listed.
        deletes: DeleteObjects requests (free of charge at AWS).
        sent_bytes: Bodies sent.
        received_bytes: Bodies of objects received.
    """

    puts: int = 0
    gets: int = 0
    heads: int = 0
    lists: int = 0
    deletes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class ObjectClient(ABC):
    """One bucket of an object store.

    Guarantees of every implementation:

    * One attempt per call. A failure is an :class:`~kvstore.backends.s3.failures.S3Error` with its cause; an object
      that is not there, or is there already, is a value.
    * Every call ends within its ``timeout_s``, or soon after it was cancelled; when it has ended, in whatever way,
      nothing touches its buffers any more.
    * Redirects are not followed.
    * Any number of calls may run at once, on one event loop; how many is for the caller to bound.

    Attributes:
        traffic: What was sent so far.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()

    def counters(self) -> dict[str, int]:
        """Return other counts by name, for statistics."""
        return {}

    @abstractmethod
    async def open(self) -> None:
        """Find credentials and address; nothing is sent to the service.

        Raises:
            ConfigError: Credentials, profile, region or certificates can't be used.
            S3Error: Credentials can't be had at present.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close connections. Idempotent. Calls under way fail with cause CLOSED."""

    @abstractmethod
    async def put(
        self,
        key: str,
        buffers: Sequence[bytes | memoryview],
        *,
        timeout_s: float,
        if_absent: bool = False,
        if_match: str = "",
    ) -> str | None:
        """Write an object.

        Args:
            key: Whole name in the bucket.
            buffers: Its bytes, one after the other.
            timeout_s: For the whole call.
            if_absent: Only if there is no such object (``If-None-Match: *``).
            if_match: Only if the object's version is this etag.

        Returns:
            The new version's etag (empty if the service gave none), or None if the condition did not hold.

        Raises:
            S3Error: It failed; with a reset connection or a time-out the object may have been written.
        """

    @abstractmethod
    async def get_into(
        self,
        key: str,
        buffers: Sequence[memoryview],
        *,
        timeout_s: float,
        offset: int | None = None,
    ) -> ObjectInfo | None:
        """Read an object, or a range of it, into buffers.

        Args:
            key: Whole name in the bucket.
            buffers: Writable targets. They may be longer than the object.
            timeout_s: For the whole call.
            offset: If given, only the range from there is read that is as long as the buffers, or what there is of it.

        Returns:
            What was read, with the length read as ``size_bytes``; None if there is no such object.

        Raises:
            S3Error: It failed; cause LENGTH if the object is longer than the buffers, RANGE if it ends before
                ``offset``. What is in the buffers then is of no meaning.
        """

    @abstractmethod
    async def head(self, key: str, *, timeout_s: float) -> ObjectInfo | None:
        """Return what the service says of an object, None if there is none.

        Raises:
            S3Error: It failed.
        """

    @abstractmethod
    async def delete_many(self, keys: Sequence[str], *, timeout_s: float) -> None:
        """Remove up to ``DELETES_MAX`` objects; one that is not there is no failure.

        Raises:
            S3Error: It failed, for one of them or all.
        """

    async def delete_all(self, keys: Sequence[str], *, timeout_s: float) -> None:
        """Remove any number of objects, as many at once as may be; see :meth:`delete_many`.

        Args:
            keys: Whole names in the bucket.
            timeout_s: For each request.

        Raises:
            S3Error: It failed; those behind it are there still.
        """
        for start in range(0, len(keys), DELETES_MAX):
            await self.delete_many(keys[start : start + DELETES_MAX], timeout_s=timeout_s)

    @abstractmethod
    async def list_page(self, prefix: str, *, timeout_s: float, start_after: str = "") -> ListPage:
        """Return objects whose names begin with ``prefix`` and come after ``start_after``, in order.

        Args:
            prefix: Empty, or whole parts of names with a ``/`` at its end.
            timeout_s: For the whole call.
            start_after: Name of an object that need not be there.

        Raises:
            S3Error: It failed.
        """

    async def list_pages(
        self, prefix: str, *, timeout_s: float, start_after: str = ""
    ) -> AsyncGenerator[Sequence[ObjectInfo], None]:
        """Yield all objects, page after page; see :meth:`list_page`.

        Args:
            prefix: Of their names.
            timeout_s: For each page.
            start_after: Name of an object that need not be there.

        Raises:
            S3Error: A page could not be had.
        """
        while True:
            page = await self.list_page(prefix, timeout_s=timeout_s, start_after=start_after)
            if page.objects:
                yield page.objects
            if not page.more or not page.objects:
                return
            start_after = page.objects[-1].key

    async def get_start(self, key: str, size_bytes: int, *, timeout_s: float) -> bytes | None:
        """Return the first bytes of an object; None if there are none.

        Raises:
            S3Error: It failed.
        """
        if not size_bytes:
            return None
        body = memoryview(bytearray(size_bytes))
        found = await self.get_into(key, [body], offset=0, timeout_s=timeout_s)
        return None if found is None else bytes(body[: found.size_bytes])

    @abstractmethod
    async def probe(self, key: str, *, timeout_s: float) -> None:
        """Ask for an object that need not be there, in a way that makes the service say what is wrong.

        Raises:
            S3Error: Bucket, region, credentials, clock, rights or network are not in order.
        """
