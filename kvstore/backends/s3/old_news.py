"""What engines told each other so long ago that nobody needs it any more."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from kvstore.backends.s3.client import ObjectClient, ObjectInfo
from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.presence import snapshot_folder
from kvstore.backends.s3.removals import NOTES_AGE_S, notes_folder
from kvstore.backends.s3.uses import USES_AGE_S
from kvstore.backends.s3.uses_reader import uses_folder

__all__ = ["old_news"]


async def old_news(client: ObjectClient, config: S3Config) -> AsyncGenerator[tuple[ObjectInfo, str], None]:
    """Yield objects that are of no use any more, each with what it was; one whose age is not known is left alone.

    Args:
        client: Sends requests, with retries.
        config: Prefix and times.

    Raises:
        S3Error: The service failed.
    """
    now = time.time()
    for folder, age_s, what in (
        (notes_folder(config.prefix), NOTES_AGE_S, "note of removals that all engines have heard"),
        (uses_folder(config.prefix), USES_AGE_S, "uses of an engine that is gone"),
        (snapshot_folder(config.prefix), USES_AGE_S, "snapshot of a namespace that is gone"),
    ):
        async with aclosing(client.list_pages(folder, timeout_s=config.lookup_timeout)) as pages:
            async for objects in pages:
                for info in objects:
                    if 0 < info.modified_at < now - age_s:
                        yield info, what
