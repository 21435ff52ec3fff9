"""Backends of a walk: slow media that sometimes fail or return damaged data."""

from __future__ import annotations

from kvstore.backends.disk import DiskBackend, DiskConfig
from kvstore.backends.memory import MemoryBackend, MemoryConfig
from kvstore.testing import Fault, FaultKind, FaultPlan, FaultyBackend

_ALWAYS = 10**9


def _plan() -> FaultPlan:
    # The affected calls depend on thread timing in any case, so the plan needs no seed.
    faults = [
        Fault(op, FaultKind.DELAY, times=None, probability=chance, seconds=seconds)
        for op in ("put", "get", "exists")
        for chance, seconds in ((0.1, 0.002), (0.03, 0.03))
    ]
    broken = [
        Fault("get", FaultKind.ERROR, times=None, probability=0.01),
        Fault("get", FaultKind.FLIP_PAYLOAD, times=None, probability=0.005),
        Fault("get", FaultKind.MISDIRECT, times=None, probability=0.005),
        Fault("put", FaultKind.ERROR, times=None, probability=0.01),
    ]
    return FaultPlan([*faults, *broken])


class SlowMemory(FaultyBackend):
    config_type = MemoryConfig

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__(MemoryBackend(config), _plan())


class SlowFile(FaultyBackend):
    config_type = DiskConfig

    def __init__(self, config: DiskConfig) -> None:
        super().__init__(DiskBackend(config), _plan())
