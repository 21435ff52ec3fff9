"""When objects were used last: the service does not know, so engines publish it for each other."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from kvstore.backends.s3.client import ObjectClient
from kvstore.backends.s3.names import KeeperNames
from kvstore.bounded import BoundedDict
from kvstore.codec.checksum import header_checksum

__all__ = ["USES_AGE_S", "Uses", "all_uses", "name_digest", "read_uses"]

_USES_MAX: Final = 65536
"""Names that one engine remembers: the last it used. What was used before them is as cold as it was written."""

USES_AGE_S: Final = 30 * 86400.0
"""Uses of an engine and the snapshot of a namespace are deleted when they were not renewed for this long: the engine is
gone, or the blocks are."""

_MAGIC: Final = b"\x89kvuses\n"
_ENTRY: Final = np.dtype([("name", "<u8"), ("used_at", "<u4")])

_USES_BYTES_MAX: Final = len(_MAGIC) + 8 + _USES_MAX * _ENTRY.itemsize
"""Longest object that an engine writes."""

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
        entries = np.zeros(len(self._used), _ENTRY)
        entries["name"] = list(self._used.keys())
        entries["used_at"] = list(self._used.values())
        self.changed = False
        body = entries.tobytes()
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

    Args:
        client: Of the bucket.
        prefix: Of the tier.
        used_max: Objects to remember. If there are more, those stay that engines published last.

    Raises:
        S3Error: The service failed.
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
