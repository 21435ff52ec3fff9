"""Reads what all engines under a prefix used, and when."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Final

from kvstore.backends.s3.client import ObjectClient
from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.uses import USES_BYTES_MAX, read_uses

__all__ = ["all_uses", "uses_folder"]

_USED_MAX: Final = 1_000_000
"""Objects of which the last use is remembered; more would take more memory than their worth."""


def uses_folder(prefix: str) -> str:
    """Return where engines tell what they used; one object each."""
    return f"{prefix}_keeper/uses/"


async def all_uses(client: ObjectClient, config: S3Config) -> dict[int, int]:
    """Return when objects were used last (seconds since the epoch), by digest of their name, as any engine told it.

    Raises:
        S3Error: The service failed.
    """
    found: dict[int, int] = {}
    now = time.time()
    pages = client.list_pages(uses_folder(config.prefix), timeout_s=config.lookup_timeout)
    async with aclosing(pages):
        async for objects in pages:
            for info in objects:
                size_bytes = min(info.size_bytes, USES_BYTES_MAX)
                data = await client.get_start(info.key, size_bytes, timeout_s=config.load_timeout)
                for name, used_at in read_uses(data or b"", now).items():
                    if used_at > found.get(name, 0) and (name in found or len(found) < _USED_MAX):
                        found[name] = used_at
    return found
