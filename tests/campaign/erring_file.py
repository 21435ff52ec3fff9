"""A disk backend with I/O errors and damaged reads for as long as the file named by ``SWITCH`` exists."""

from __future__ import annotations

import os
from typing import Final

from kvstore.backends.disk import DiskBackend, DiskConfig
from kvstore.testing import Fault, FaultKind, FaultPlan, FaultyBackend

SWITCH: Final = "KVSTORE_CHAOS_SWITCH"
"""Environment variable with the path of the file."""

_KINDS: Final = {
    "get": (FaultKind.ERROR, FaultKind.FLIP_PAYLOAD, FaultKind.FLIP_HEADER, FaultKind.MISDIRECT, FaultKind.SHORT),
    "put": (FaultKind.ERROR, FaultKind.NO_SPACE, FaultKind.DROP),
    "exists": (FaultKind.RAISE, FaultKind.DELAY),
}


class _SwitchedPlan(FaultPlan):
    def take(self, op: str) -> Fault | None:
        return super().take(op) if os.path.exists(os.environ[SWITCH]) else None


class ErringFile(FaultyBackend):
    """The backend."""

    config_type = DiskConfig

    def __init__(self, config: DiskConfig) -> None:
        faults = [
            Fault(op, kind, times=None, probability=0.2, seconds=0.3) for op, kinds in _KINDS.items() for kind in kinds
        ]
        super().__init__(DiskBackend(config), _SwitchedPlan(faults, seed=os.getpid()))
