"""Which notes of removals from packs are of no use any more: a decision from names and ages, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore.backends.s3.client import ObjectInfo
from kvstore.backends.s3.keys import ObjectName

__all__ = ["OldNotes"]

_TIME_BYTES: Final = 6
"""Of the beginning of what names a pack or a note: when it was made, in milliseconds."""

_SKEW_MS: Final = 3_600_000
"""A note speaks of packs that were there when it was made, but the clocks of the engines that named them may differ: by
much less than this."""

_NOTES_MAX: Final = 100_000
"""Notes that are found in one round, about 15 MB of memory; a round later it goes on."""


class OldNotes:
    """Sees every object of a prefix once, in the order of names, and finds notes that are older than all packs.

    Names of packs and notes begin with their time, so the notes of a namespace that come before its first pack speak of
    packs that are gone.

    Args:
        written_before: Notes that were written later stay, in seconds since the epoch.
    """

    def __init__(self, written_before: float) -> None:
        self._written_before = written_before
        self._namespace = ""
        self._found: list[str] = []
        # Of the namespace that is being listed: name and time in milliseconds, until its first pack is seen.
        self._waiting: list[tuple[str, int]] | None = []

    def see(self, info: ObjectInfo, name: ObjectName | None) -> None:
        """Take note of an object, and of what its name says."""
        if name is None or name.kind == "block":
            return
        if name.namespace != self._namespace:
            self._take(None)
            self._namespace, self._waiting = name.namespace, []
        if self._waiting is None:
            return
        made_ms = int.from_bytes(name.key[:_TIME_BYTES], "big")
        if name.kind == "pack":
            self._take(made_ms)
            self._waiting = None
        elif 0 < info.modified_at < self._written_before and len(self._found) + len(self._waiting) < _NOTES_MAX:
            self._waiting.append((info.key, made_ms))

    def names(self) -> Sequence[str]:
        """Return the names of the notes; the list of objects has come to its end."""
        self._take(None)
        self._waiting = None
        return self._found

    def _take(self, first_pack_ms: int | None) -> None:
        for name, made_ms in self._waiting or ():
            if first_pack_ms is None or made_ms + _SKEW_MS < first_pack_ms:
                self._found.append(name)
