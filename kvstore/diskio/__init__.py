"""Disk I/O: system calls, and batches of transfers by io_uring or by threads."""

from __future__ import annotations

from kvstore.diskio.disk import OsDisk, bare
from kvstore.diskio.transfers import EngineChoice, Transfer, TransferEngine

__all__ = ["EngineChoice", "OsDisk", "Transfer", "TransferEngine", "bare"]
