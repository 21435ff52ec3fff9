"""Housekeeping objects: notes of removed objects, and objects between engines that have expired."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final

import msgspec

from kvstore.backends.s3.client import DELETES_MAX, ObjectClient, ObjectInfo
from kvstore.backends.s3.names import KeeperNames
from kvstore.backends.s3.uses import USES_AGE_S
from kvstore.types import RemovalCause

__all__ = ["NOTES_AGE_S", "REMOVALS_MAX", "outdated", "read_note", "remove"]

REMOVALS_MAX: Final = DELETES_MAX
"""Objects that a note names: those of one request."""

NOTES_AGE_S: Final = 86400.0
"""Notes older than this are deleted. An engine that missed one finds out by a 404."""


class _Note(msgspec.Struct, frozen=True):
    """A note of removals; its names are without the prefix."""

    version: int
    cause: RemovalCause
    names: list[str]


async def remove(
    client: ObjectClient,
    prefix: str,
    names: Sequence[str],
    cause: RemovalCause,
    *,
    on_gone: Callable[[Sequence[str], str], None] | None = None,
) -> None:
    """Delete objects, and write notes for the engines that use them, one for each ``REMOVALS_MAX``.

    Args:
        client: Of the bucket.
        prefix: Of the tier.
        names: Of the objects.
        cause: Why they leave.
        on_gone: Called with those that have just been deleted, and the name of the note on them, which is written next.

    Raises:
        S3Error: The service failed; objects may be gone without a note, and those behind them are there.
    """
    for start in range(0, len(names), REMOVALS_MAX):
        some = names[start : start + REMOVALS_MAX]
        await client.delete_all(some)
        note = KeeperNames(prefix).new_note()
        if on_gone is not None:
            on_gone(some, note)
        await client.put(note, [msgspec.json.encode(_Note(1, cause, [name.removeprefix(prefix) for name in some]))])


def read_note(prefix: str, data: bytes) -> tuple[list[str], RemovalCause] | None:
    """Return the names of the objects that left, and why; None if it is no note."""
    try:
        note = msgspec.json.decode(data, type=_Note)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return [prefix + name for name in note.names], note.cause


async def outdated(client: ObjectClient, prefix: str) -> AsyncGenerator[tuple[ObjectInfo, str], None]:
    """Yield housekeeping objects that are of no use any more, each with what it was.

    Objects of unknown age stay, and so does whatever has no name that engines give.

    Raises:
        S3Error: The service failed.
    """
    names, now = KeeperNames(prefix), time.time()
    for folder, hex_digits, age_s, what in (
        (names.notes, 28, NOTES_AGE_S, "expired note of removals"),
        (names.uses, 16, USES_AGE_S, "uses of an engine that is gone"),
        (names.snapshots, 64, USES_AGE_S, "snapshot of a namespace that is gone"),
    ):
        ours = re.compile(f"[0-9a-f]{{{hex_digits}}}")
        async for info in client.listed(folder):
            if 0 < info.modified_at < now - age_s and ours.fullmatch(info.key[len(folder) :]):
                yield info, what
