"""Housekeeping objects: notes of what was removed, and which objects that engines wrote for each other are outdated."""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Final

import msgspec

from kvstore.backends.s3.client import DELETES_MAX, ObjectClient, ObjectInfo
from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.presence import snapshot_folder
from kvstore.backends.s3.uses import USES_AGE_S, uses_folder
from kvstore.types import RemovalCause

__all__ = ["NOTES_AGE_S", "REMOVALS_MAX", "notes_folder", "outdated", "read_note", "remove"]

REMOVALS_MAX: Final = DELETES_MAX
"""Objects that a note names: those of one request."""

NOTES_AGE_S: Final = 86400.0
"""Notes older than this are deleted. An engine that missed one finds out by a 404."""


class _Note(msgspec.Struct, frozen=True):
    """A note of removals; its names are without the prefix."""

    version: int
    cause: RemovalCause
    names: list[str]


def notes_folder(prefix: str) -> str:
    """Return where notes lie; their names begin with the time, in milliseconds."""
    return f"{prefix}_keeper/removed/"


async def remove(
    client: ObjectClient,
    config: S3Config,
    names: Sequence[str],
    cause: RemovalCause,
    *,
    on_gone: Callable[[Sequence[str], str], None] | None = None,
) -> None:
    """Delete objects, and tell the engines that use them: a note for each ``REMOVALS_MAX``.

    Args:
        client: Sends requests, with retries.
        config: Prefix and times.
        names: Of the objects.
        cause: Why they leave.
        on_gone: Told which have just been deleted, and the name of the note on them, which is written next.

    Raises:
        S3Error: The service failed; objects may be gone of which nobody was told, and those behind them are there.
    """
    for start in range(0, len(names), REMOVALS_MAX):
        some = names[start : start + REMOVALS_MAX]
        await client.delete_all(some, timeout_s=config.store_timeout)
        note = f"{notes_folder(config.prefix)}{int(time.time() * 1000):012x}{os.urandom(8).hex()}"
        if on_gone is not None:
            on_gone(some, note)
        body = msgspec.json.encode(_Note(1, cause, [name.removeprefix(config.prefix) for name in some]))
        await client.put(note, [body], timeout_s=config.store_timeout)


def read_note(prefix: str, data: bytes) -> tuple[list[str], RemovalCause] | None:
    """Return the names of the objects that left, and why; None if it is no note."""
    try:
        note = msgspec.json.decode(data, type=_Note)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return [prefix + name for name in note.names], note.cause


async def outdated(client: ObjectClient, config: S3Config) -> AsyncGenerator[tuple[ObjectInfo, str], None]:
    """Yield housekeeping objects that are of no use any more, each with what it was.

    Objects of unknown age stay, and so does whatever has no name that engines give.

    Raises:
        S3Error: The service failed.
    """
    now = time.time()
    for folder, hex_digits, age_s, what in (
        (notes_folder(config.prefix), 28, NOTES_AGE_S, "note of removals that all engines have heard"),
        (uses_folder(config.prefix), 16, USES_AGE_S, "uses of an engine that is gone"),
        (snapshot_folder(config.prefix), 64, USES_AGE_S, "snapshot of a namespace that is gone"),
    ):
        ours = re.compile(f"[0-9a-f]{{{hex_digits}}}")
        async with aclosing(client.list_pages(folder, timeout_s=config.lookup_timeout)) as pages:
            async for objects in pages:
                for info in objects:
                    if 0 < info.modified_at < now - age_s and ours.fullmatch(info.key[len(folder) :]):
                        yield info, what
