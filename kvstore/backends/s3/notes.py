"""What engines write for each other: when objects were used last, and which were removed."""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Final

import msgspec
import numpy as np

from kvstore.backends.s3.client import DELETES_MAX, ObjectClient, ObjectInfo
from kvstore.backends.s3.names import KeeperNames, new_stamp
from kvstore.bounded import BoundedDict
from kvstore.codec.checksum import header_checksum
from kvstore.types import RemovalCause

__all__ = ["NOTES_AGE_S", "Uses", "all_uses", "name_digest", "outdated", "read_note", "read_uses", "remove"]

NOTES_AGE_S: Final = 86400.0
"""Notes of removals older than this are deleted. An engine that missed one finds out by a 404."""

_USES_AGE_S: Final = 30 * 86400.0
"""Uses and snapshots that were not renewed for this long are deleted: the engine is gone, or the blocks are."""

_USES_MAX: Final = 65536
"""Names that one engine remembers: the last it used. Objects used before them are as cold as when they were written."""

_MAGIC: Final = b"\x89kvuses\n"
_ENTRY: Final = np.dtype([("name", "<u8"), ("used_at", "<u4")])
_USES_BYTES_MAX: Final = len(_MAGIC) + 8 + _USES_MAX * _ENTRY.itemsize

_USED_MAX: Final = 1_000_000
"""Objects of which the last use is remembered; more would take more memory than their worth."""

_READ_MAX: Final = 10_000
"""Engines of which the uses are read: those that wrote them last."""


class Uses:
    """The names that this engine used last, with the time by ``wall_clock``, in seconds since the epoch."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._used: BoundedDict[int, int] = BoundedDict(_USES_MAX)
        self.changed = False

    def note(self, names: Iterable[str]) -> None:
        """Note that objects were used just now."""
        now = int(self._wall_clock())
        for name in names:
            self._used[name_digest(name)] = now
            self.changed = True

    def encode(self) -> bytes:
        """Return the bytes of the object that publishes them."""
        self.changed = False
        body = np.array(list(self._used.items()), _ENTRY).tobytes()
        return _MAGIC + header_checksum(body).to_bytes(8, "little") + body


def read_uses(data: bytes, now: float) -> dict[int, int]:
    """Return when names (by digest) were used last, none later than ``now``; nothing if no engine wrote these bytes."""
    start = len(_MAGIC) + 8
    body = data[start:]
    if not data.startswith(_MAGIC) or len(body) % _ENTRY.itemsize:
        return {}
    if int.from_bytes(data[len(_MAGIC) : start], "little") != header_checksum(body):
        return {}
    entries = np.frombuffer(body, _ENTRY)
    used = np.minimum(entries["used_at"], int(now))
    return dict(zip(entries["name"].tolist(), used.tolist(), strict=True))


def name_digest(name: str) -> int:
    """Return the 64 bits that stand for a name among uses."""
    return header_checksum(name.encode())


async def all_uses(client: ObjectClient, prefix: str, *, used_max: int = _USED_MAX) -> dict[int, int]:
    """Return when objects were used last (seconds since the epoch), by digest of their name, by any engine.

    Of more than ``used_max`` objects those stay that engines published last.
    """
    newest: list[tuple[float, str, int]] = []
    async for info in client.listed(KeeperNames(prefix).uses):
        heapq.heappush(newest, (info.modified_at, info.key, info.size_bytes))
        if len(newest) > _READ_MAX:
            heapq.heappop(newest)
    found: dict[int, int] = {}
    now = time.time()
    # The newest first, so that engines at work count before those that are gone.
    for _, key, size_bytes in sorted(newest, reverse=True):
        data = await client.get_start(key, min(size_bytes, _USES_BYTES_MAX))
        for name, used_at in read_uses(data or b"", now).items():
            if used_at > found.get(name, 0) and (name in found or len(found) < used_max):
                found[name] = used_at
    return found


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
    on_gone: Callable[[Sequence[str], str], None] = lambda names, note: None,
) -> None:
    """Delete objects, and write notes for the engines that use them, one for each ``DELETES_MAX``.

    ``on_gone`` is called with names that have just been deleted, and the name of the note on them, which is written
    next. If the service fails, objects may be gone without a note, and those behind them are still there.
    """
    for start in range(0, len(names), DELETES_MAX):
        some = names[start : start + DELETES_MAX]
        await client.delete_all(some)
        note = KeeperNames(prefix).notes + new_stamp()
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
    """Yield expired housekeeping objects, each with a description.

    Objects of unknown age stay, and so do names that engines do not give.
    """
    names, now = KeeperNames(prefix), time.time()
    for folder, hex_digits, age_s, what in (
        (names.notes, 28, NOTES_AGE_S, "expired note of removals"),
        (names.uses, 16, _USES_AGE_S, "uses of an engine that is gone"),
        (names.snapshots, 64, _USES_AGE_S, "snapshot of a namespace that is gone"),
    ):
        ours = re.compile(f"[0-9a-f]{{{hex_digits}}}")
        async for info in client.listed(folder):
            if 0 < info.modified_at < now - age_s and ours.fullmatch(info.key[len(folder) :]):
                yield info, what
