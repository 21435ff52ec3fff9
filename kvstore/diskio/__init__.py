"""Disk I/O for backends that lie on one: the system calls, whole transfers, and threads for batches of them."""

from __future__ import annotations

from kvstore.diskio.batch_disk import BatchDisk, FileStatus
from kvstore.diskio.disk import OsDisk, bare
from kvstore.diskio.rings import EngineChoice, Rings
from kvstore.diskio.threads import Batch, BatchFunction, CancelFlag, Priority, ThreadEngine
from kvstore.diskio.transfer import ALIGNMENT, flat, is_aligned, read_into, write_all

__all__ = [
    "ALIGNMENT",
    "Batch",
    "BatchDisk",
    "BatchFunction",
    "CancelFlag",
    "EngineChoice",
    "FileStatus",
    "OsDisk",
    "Priority",
    "Rings",
    "ThreadEngine",
    "bare",
    "flat",
    "is_aligned",
    "read_into",
    "write_all",
]
