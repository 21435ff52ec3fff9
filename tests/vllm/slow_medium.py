"""A medium in memory whose loads take so long that computing is always faster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvstore.backends.base import RecordRead
from kvstore.backends.memory import MemoryBackend
from kvstore.types import Outcome

LOAD_S = 20.0


class SlowMemory(MemoryBackend):
    """Answers lookups and stores immediately."""

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        """Read after a long time."""
        await asyncio.sleep(LOAD_S)
        return await super().get_into(reads)
