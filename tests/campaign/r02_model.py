"""R2: random operations agree with a model, with and without faults, across restarts.

Method: eight workers put, get, ask and delete in batches on the memory and disk backends, each answer compared; then
the same with one call in twenty failing, damaged, misdirected or lost. Redis and S3: R17.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvstore.backends.base import Backend, RecordGeometry
from kvstore.backends.disk import DiskBackend, DiskConfig
from kvstore.backends.memory import MemoryBackend, MemoryConfig
from kvstore.config import Capacity
from kvstore.testing import Fault, FaultKind, FaultPlan, FaultyBackend
from tests.campaign.program import failed, passed, rounds
from tests.redis.clients import NAMESPACE
from tests.redis.mix import PAYLOAD_BYTES, Mix

OPERATIONS = 10_000
"""Of each leg."""

BATCHES = 4
"""Times that a leg closes and opens its backend."""

FAULTS = [
    *(Fault(op, FaultKind.ERROR, times=None, probability=0.02) for op in ("put", "get", "exists", "delete")),
    *(Fault("get", kind, times=None, probability=0.01) for kind in (FaultKind.FLIP_HEADER, FaultKind.FLIP_PAYLOAD)),
    *(Fault("get", kind, times=None, probability=0.01) for kind in (FaultKind.SHORT, FaultKind.MISDIRECT)),
    Fault("put", FaultKind.DROP, times=None, probability=0.01),
]


def memory(shelf: str) -> Backend:
    """Return a memory backend whose blocks survive a restart."""
    return MemoryBackend(MemoryConfig(shelf=shelf))


async def leg(make: Callable[[], Backend], seed: int, *, calm: bool) -> int:
    """Run one backend against the model, which knows its blocks across restarts; return how many operations agreed."""
    mix: Mix | None = None
    for number in range(BATCHES):
        backend: Any = make()
        if not calm:
            backend = FaultyBackend(backend, FaultPlan(FAULTS, seed=seed))
        unit = backend.alignment
        await backend.open(NAMESPACE, RecordGeometry(-(-256 // unit) * unit, PAYLOAD_BYTES))
        try:
            mix = mix or Mix(backend, seed, calm=calm)
            mix.backend, mix.flips = backend, not calm
            await mix.run(OPERATIONS // BATCHES, goes_on=number > 0)
        finally:
            await backend.close()
    assert mix is not None and mix.counts["get OK"] > OPERATIONS // 20, f"too few blocks were found: {mix}"
    return mix.operations


if __name__ == "__main__":
    total = 0
    for seed in rounds():
        rng = random.Random(seed)
        with tempfile.TemporaryDirectory() as directory:
            disk = DiskConfig(path=str(Path(directory) / "kv"), capacity=Capacity("256MiB"), reserve=Capacity(0))
            for calm in (True, False):
                for make in (partial(memory, f"{seed} {calm}"), partial(DiskBackend, disk)):
                    try:
                        total += asyncio.run(leg(make, rng.randrange(1 << 30), calm=calm))
                    except AssertionError as error:
                        failed(f"seed {seed}: {error}")
    passed(f"{total:,} operations agree with the model")
