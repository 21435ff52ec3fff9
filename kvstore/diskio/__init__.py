"""Disk I/O for backends that lie on one: the system calls, whole transfers, and threads for batches of them."""

from __future__ import annotations

from kvstore.diskio.disk import OsDisk, bare
from kvstore.diskio.rings import EngineChoice
from kvstore.diskio.threads import Batch, BatchFunction, CancelFlag, Priority, ThreadEngine
from kvstore.diskio.transfer import ALIGNMENT, flat, is_aligned, read_into

__all__ = [
    "ALIGNMENT",
    "Batch",
    "BatchFunction",
    "CancelFlag",
    "EngineChoice",
    "OsDisk",
    "Priority",
    "ThreadEngine",
    "bare",
    "flat",
    "is_aligned",
    "read_into",
]
