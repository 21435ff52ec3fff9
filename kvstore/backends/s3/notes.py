"""Housekeeping objects shared by engines: usage reports and notes of removals."""

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

NOTES_AGE_S: Final = 86400.0
"""Notes of removals older than this are deleted. An engine that missed one gets a 404 for the object."""

_USES_AGE_S: Final = 30 * 86400.0
"""Usage reports not renewed for this long are deleted: the engine has stopped."""

_USES_MAX: Final = 65536
"""Recently used names that one engine remembers. For other objects, only the time of their write counts."""

_MAGIC: Final = b"\x89kvuses\n"
_ENTRY: Final = np.dtype([("name", "<u8"), ("used_at", "<u4")])
_USES_BYTES_MAX: Final = len(_MAGIC) + 8 + _USES_MAX * _ENTRY.itemsize

_USED_MAX: Final = 1_000_000
"""Maximum number of objects with a known last use, to bound the memory."""

_READ_MAX: Final = 10_000
"""Maximum number of usage reports read, the most recently written first."""


class Uses:
    """The names that this engine used most recently, with the time by ``wall_clock`` in seconds since the epoch."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._used: BoundedDict[int, int] = BoundedDict(_USES_MAX)
        self.changed = False

    def note(self, names: Iterable[str]) -> None:
        """Record a use of objects at the current time."""
        now = int(self._wall_clock())
        for name in names:
            self._used[name_digest(name)] = now
            self.changed = True

    def encode(self) -> bytes:
        """Return the content of the usage report, and mark the uses as unchanged."""
        self.changed = False
        body = np.array(list(self._used.items()), _ENTRY).tobytes()
        return _MAGIC + header_checksum(body).to_bytes(8, "little") + body


def read_uses(data: bytes, now: float) -> dict[int, int]:
    """Return the time of the last use by digest of the name, at most ``now``; empty if ``data`` is not valid."""
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
    """Return the 64-bit digest of a name in usage reports."""
    return header_checksum(name.encode())


async def all_uses(client: ObjectClient, prefix: str, *, used_max: int = _USED_MAX) -> dict[int, int]:
    """Return the last use of objects by any engine, in seconds since the epoch, by digest of their name.

    Of more than ``used_max`` objects, the most recently published ones are returned.
    """
    newest: list[tuple[float, str, int]] = []
    async for info in client.listed(KeeperNames(prefix).uses):
        heapq.heappush(newest, (info.modified_at, info.key, info.size_bytes))
        if len(newest) > _READ_MAX:
            heapq.heappop(newest)
    found: dict[int, int] = {}
    now = time.time()
    # The newest first, so that running engines precede stopped ones.
    for _, key, size_bytes in sorted(newest, reverse=True):
        data = await client.get_start(key, min(size_bytes, _USES_BYTES_MAX))
        for name, used_at in read_uses(data or b"", now).items():
            if used_at > found.get(name, 0) and (name in found or len(found) < used_max):
                found[name] = used_at
    return found


class _Note(msgspec.Struct, frozen=True):
    """A note of removals; names are without the prefix."""

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
    """Delete objects, and write a note for the other engines after each ``DELETES_MAX`` objects.

    ``on_gone`` is called with the names just deleted and the name of their note, before the note is written. If the
    service fails, objects may have been deleted without a note, and later objects remain.
    """
    for start in range(0, len(names), DELETES_MAX):
        some = names[start : start + DELETES_MAX]
        await client.delete_all(some)
        note = KeeperNames(prefix).notes + new_stamp()
        on_gone(some, note)
        await client.put(note, [msgspec.json.encode(_Note(1, cause, [name.removeprefix(prefix) for name in some]))])


def read_note(prefix: str, data: bytes) -> tuple[list[str], RemovalCause] | None:
    """Return the names of the removed objects and the cause; None if ``data`` is not a note."""
    try:
        note = msgspec.json.decode(data, type=_Note)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return [prefix + name for name in note.names], note.cause


async def outdated(client: ObjectClient, prefix: str) -> AsyncGenerator[tuple[ObjectInfo, str], None]:
    """Yield expired housekeeping objects, each with a description.

    Objects of unknown age, and objects with names of another form, are not yielded.
    """
    names, now = KeeperNames(prefix), time.time()
    for folder, hex_digits, age_s, what in (
        (names.notes, 28, NOTES_AGE_S, "expired note of removals"),
        (names.uses, 16, _USES_AGE_S, "usage report of a stopped engine"),
    ):
        ours = re.compile(f"[0-9a-f]{{{hex_digits}}}")
        async for info in client.listed(folder):
            if 0 < info.modified_at < now - age_s and ours.fullmatch(info.key[len(folder) :]):
                yield info, what
