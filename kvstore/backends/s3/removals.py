"""Notes by which whoever deletes objects under a prefix tells the engines that use them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from kvstore.types import RemovalCause

__all__ = ["NOTES_AGE_S", "REMOVALS_MAX", "new_note", "notes_folder", "read_note"]

REMOVALS_MAX: Final = 1000
"""Objects that one DeleteObjects may name; a note of removals names as many."""

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


def new_note(prefix: str, names: Sequence[str], cause: RemovalCause) -> tuple[str, bytes]:
    """Return name and bytes of a note that says which objects left, and why.

    Args:
        prefix: Of the tier.
        names: Of the objects; at most ``REMOVALS_MAX``.
        cause: Why they left.
    """
    name = f"{notes_folder(prefix)}{int(time.time() * 1000):012x}{os.urandom(8).hex()}"
    return name, msgspec.json.encode(_Note(1, cause, [each.removeprefix(prefix) for each in names]))


def read_note(prefix: str, data: bytes) -> tuple[list[str], RemovalCause] | None:
    """Return the names of the objects that left, and why; None if it is no note."""
    try:
        note = msgspec.json.decode(data, type=_Note)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return [prefix + name for name in note.names], note.cause
