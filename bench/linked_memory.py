"""A medium in memory behind a simulated link, whose speed can be changed while an engine uses it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path

from kvstore.backends.base import RecordRead
from kvstore.backends.memory import MemoryBackend, MemoryConfig
from kvstore.types import Outcome


class LinkedConfig(MemoryConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Options of :class:`LinkedMemory`."""

    link: str = ""  # File with the speed of the link, from :func:`set_link`.


class LinkedMemory(MemoryBackend):
    """Records in memory behind a link: reads share its bandwidth in order of arrival, and each adds its latency."""

    config_type = LinkedConfig

    def __init__(self, config: LinkedConfig) -> None:
        super().__init__(config)
        self._link = Path(config.link)
        self._free_at = 0.0

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        """Read at the link's current speed."""
        speed = json.loads(self._link.read_bytes())
        size = sum(read.capacity_bytes for read in reads)
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + size / speed["bytes_per_s"]
        await asyncio.sleep(max(self._free_at + speed["latency_s"], speed["stalled_until"]) - now)
        return await super().get_into(reads)


def set_link(path: Path, bytes_per_s: float, latency_s: float, stall_s: float = 0.0) -> None:
    """Set the speed of a link; reads that begin within ``stall_s`` seconds do not end before that time."""
    speed = {"bytes_per_s": bytes_per_s, "latency_s": latency_s, "stalled_until": time.monotonic() + stall_s}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(speed))
    new.replace(path)
