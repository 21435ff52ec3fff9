"""When objects were used last: the service does not know, so that engines tell each other."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from kvstore.codec.checksum import header_checksum

__all__ = ["USES_AGE_S", "USES_BYTES_MAX", "Uses", "read_uses"]

_USES_MAX: Final = 65536
"""Names that one engine remembers: the last it used. What was used before them is as cold as it was written."""

USES_AGE_S: Final = 30 * 86400.0
"""What an engine used, and the snapshot of a namespace, is deleted when it was not renewed for this long: the engine is
gone, or the blocks are."""

_MAGIC: Final = b"\x89kvuses\n"
_ENTRY: Final = np.dtype([("name", "<u8"), ("used_at", "<u4")])

USES_BYTES_MAX: Final = len(_MAGIC) + 8 + _USES_MAX * _ENTRY.itemsize
"""Longest object that an engine writes."""


class Uses:
    """The names that this engine used last, with the time.

    Args:
        wall_clock: Seconds since the epoch.
    """

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._used: OrderedDict[int, int] = OrderedDict()
        self.changed = False

    def note(self, names: Iterable[str]) -> None:
        """Note that objects were used just now."""
        now = int(self._wall_clock())
        for name in names:
            digest = name_digest(name)
            self._used[digest] = now
            self._used.move_to_end(digest)
            self.changed = True
        while len(self._used) > _USES_MAX:
            self._used.popitem(last=False)

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
