"""Engines that enforce the capacity of a bucket, and their objects."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

from kvstore.backends.s3 import S3Backend
from kvstore.backends.s3.client import ObjectClient, make_client
from kvstore.backends.s3.keeper import Keeper
from kvstore.types import RemovalCause
from tests.s3.clients import fresh_prefix, opened

SLOW: dict[str, Any] = {"keeper_interval": 3600}
"""The test starts the rounds, not a timer."""


def housekeeper_of(backend: S3Backend) -> Keeper:
    """Return the housekeeper of a backend."""
    keeper = backend._keeper
    assert keeper is not None
    return keeper


def is_elected(backend: S3Backend) -> bool:
    """Return whether a backend's housekeeper took or renewed the lease last."""
    return bool(housekeeper_of(backend)._lease._etag)


def removals_reported_by(backend: S3Backend) -> list[tuple[frozenset[bytes], RemovalCause]]:
    """Return a list to which a backend's removals are added."""
    found: list[tuple[frozenset[bytes], RemovalCause]] = []
    backend.set_removal_listener(lambda keys, cause: found.append((frozenset(keys), cause)))
    return found


@contextlib.asynccontextmanager
async def engines(server: Any, count: int, **more: Any) -> AsyncIterator[list[S3Backend]]:
    """Open backends over the same prefix, with rounds started by the test; always close them."""
    options = {**SLOW, "store_timeout": 60, "prefix": fresh_prefix(), **more}
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for _ in range(count):
            found.append(await opened(server, **options))
            stack.push_async_callback(found[-1].close)
        yield found


@contextlib.asynccontextmanager
async def client_of(backend: S3Backend) -> AsyncIterator[ObjectClient]:
    """Open a client with the options of a backend."""
    client = make_client(backend.config)
    await client.open()
    try:
        yield client
    finally:
        await client.close()


async def names_under(backend: S3Backend, folder: str) -> list[str]:
    """Return the names of all objects under a folder of the prefix, without the prefix."""
    prefix, found = backend.config.prefix, list[str]()
    async with client_of(backend) as client:
        page = await client.list_page(prefix + folder, timeout_s=30)
        found += [info.key for info in page.objects]
        while page.more:
            page = await client.list_page(prefix + folder, start_after=found[-1], timeout_s=30)
            found += [info.key for info in page.objects]
    return [name.removeprefix(prefix) for name in found]


async def put_empty(backend: S3Backend, names: Iterable[str], body: bytes = b"x") -> None:
    """Write objects for which only the names matter."""
    async with client_of(backend) as client:
        for name in names:
            await client.put(backend.config.prefix + name, [body], timeout_s=30)
