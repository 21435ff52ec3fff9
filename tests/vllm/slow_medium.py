"""A medium in memory whose loads end only when a test permits it, so computing is always faster."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from kvstore.backends.base import RecordRead
from kvstore.backends.memory import MemoryBackend
from kvstore.types import Outcome

LOADS_END = threading.Event()


class SlowMemory(MemoryBackend):
    """Answers lookups and stores immediately."""

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        """Read once it is permitted."""
        while not LOADS_END.is_set():
            await asyncio.sleep(0.02)
        return await super().get_into(reads)
