"""When objects were used last: the service does not know, so that engines tell each other."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import Final

import numpy as np

from kvstore.backends.s3.client import ObjectClient, ObjectInfo
from kvstore.backends.s3.config import S3Config
from kvstore.bounded import BoundedDict
from kvstore.codec.checksum import header_checksum

__all__ = ["USES_AGE_S", "USES_BYTES_MAX", "Uses", "all_uses", "name_digest", "read_uses", "uses_folder"]

_USES_MAX: Final = 65536
"""Names that one engine remembers: the last it used. What was used before them is as cold as it was written."""

USES_AGE_S: Final = 30 * 86400.0
"""What an engine used, and the snapshot of a namespace, is deleted when it was not renewed for this long: the engine is
gone, or the blocks are."""

_MAGIC: Final = b"\x89kvuses\n"
_ENTRY: Final = np.dtype([("name", "<u8"), ("used_at", "<u4")])

USES_BYTES_MAX: Final = len(_MAGIC) + 8 + _USES_MAX * _ENTRY.itemsize
"""Longest object that an engine writes."""


_USED_MAX: Final = 1_000_000
"""Objects of which the last use is remembered; more would take more memory than their worth."""

_READ_MAX: Final = 10_000
"""Engines of which the uses are read: those that told them last."""


class Uses:
    """The names that this engine used last, with the time.

    Args:
        wall_clock: Seconds since the epoch.
    """

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
        """Return the bytes of an object that tells them."""
        entries = np.zeros(len(self._used), _ENTRY)
        entries["name"] = list(self._used.keys())
        entries["used_at"] = list(self._used.values())
        self.changed = False
        body = entries.tobytes()
        return _MAGIC + header_checksum(body).to_bytes(8, "little") + body


def read_uses(data: bytes, now: float) -> dict[int, int]:
    """Return when names (by digest) were used last; nothing, if the bytes are not what an engine wrote.

    Args:
        data: The object.
        now: Seconds since the epoch; nothing was used later than that.
    """
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
