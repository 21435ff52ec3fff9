"""Reads what all engines under a prefix used, and when."""

from __future__ import annotations

import heapq
import time
from contextlib import aclosing
from typing import Final

from kvstore.backends.s3.client import ObjectClient, ObjectInfo
from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.uses import USES_BYTES_MAX, read_uses

__all__ = ["all_uses", "uses_folder"]

_USED_MAX: Final = 1_000_000
"""Objects of which the last use is remembered; more would take more memory than their worth."""

_READ_MAX: Final = 10_000
"""Engines of which the uses are read: those that told them last."""


def uses_folder(prefix: str) -> str:
    """Return where engines tell what they used; one object each."""
    return f"{prefix}_keeper/uses/"


async def all_uses(client: ObjectClient, config: S3Config, *, used_max: int = _USED_MAX) -> dict[int, int]:
    """Return when objects were used last (seconds since the epoch), by digest of their name, as any engine told it.

    Args:
        client: Sends requests, with retries.
        config: Prefix and times.
        used_max: Objects to remember. If there are more, those stay that engines told of last.

    Raises:
        S3Error: The service failed.
    """
    found: dict[int, int] = {}
    now = time.time()
    for info in await _newest_first(client, config):
        size_bytes = min(info.size_bytes, USES_BYTES_MAX)
        data = await client.get_start(info.key, size_bytes, timeout_s=config.load_timeout)
        for name, used_at in read_uses(data or b"", now).items():
            if used_at > found.get(name, 0) and (name in found or len(found) < used_max):
                found[name] = used_at
    return found


async def _newest_first(client: ObjectClient, config: S3Config) -> list[ObjectInfo]:
    """Return what engines wrote last first, so that those at work are heard before those that are gone."""
    found: list[ObjectInfo] = []
    pages = client.list_pages(uses_folder(config.prefix), timeout_s=config.lookup_timeout)
    async with aclosing(pages):
        async for objects in pages:
            found = heapq.nlargest(_READ_MAX, [*found, *objects], key=lambda info: info.modified_at)
    return found
