"""Blocks moved between slots and a backend as the I/O side of a tier does it: headers, checksums, verification."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

from kvstore.backends.base import Backend, RecordGeometry
from kvstore.namespace import Namespace
from kvstore.runtime.buffers import SlotBuffers
from kvstore.runtime.messages import JobKind, SubmitJob
from kvstore.tiers.block_mover import BlockMover, RunningJob
from kvstore.types import Outcome

__all__ = ["MovedSlots"]

_PATIENCE_S = 60
"""Deadline of a job: a loaded machine must not fail a benchmark."""


class MovedSlots:
    """A backend under the mover of a tier, with slots that jobs take and give back.

    Attributes:
        memory: The slots, filled with random bytes.
    """

    def __init__(self, backend: Backend, namespace: Namespace, slot_bytes: int, slots: int) -> None:
        self.memory = bytearray(random.Random(1).randbytes(slot_bytes)) * slots
        self._backend, self._namespace, self._slot_bytes = backend, namespace, slot_bytes
        self._free = list(range(slots))

    async def open(self) -> None:
        """Open the backend."""
        await self._backend.open(self._namespace, RecordGeometry(256, self._slot_bytes))
        slots = SlotBuffers(memoryview(self.memory), self._slot_bytes)
        self._mover = BlockMover(self._backend, self._namespace, slots, 1 << 30, lambda keys: None)

    async def close(self) -> None:
        """Close the backend."""
        await self._backend.close()
        self._mover.close()

    async def move(self, kind: JobKind, keys: Sequence[bytes]) -> None:
        """Store or load blocks in one job.

        Raises:
            RuntimeError: A block was not stored or loaded.
        """
        slots = [self._free.pop() for _ in keys]
        job = RunningJob(SubmitJob(1, kind, tuple(keys), tuple(slots), time.monotonic() + _PATIENCE_S))
        await asyncio.gather(*(self._mover.move(part) for part in self._mover.cut(job)))
        self._free += slots
        if not all(Outcome(outcome).ok for outcome in job.outcomes):
            raise RuntimeError(f"{kind}: {job.outcomes!r} {job.error}")
