"""Disk I/O: the system calls, threads that make them, and batches of transfers by io_uring or by these threads."""

from __future__ import annotations

from kvstore.diskio.disk import OsDisk, bare
from kvstore.diskio.threads import Priority
from kvstore.diskio.transfers import EngineChoice, Transfer, TransferEngine

__all__ = ["EngineChoice", "OsDisk", "Priority", "Transfer", "TransferEngine", "bare"]
