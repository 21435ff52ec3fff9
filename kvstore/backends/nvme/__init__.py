"""Blocks in preallocated files of equal slots on local NVMe: see ``docs/nvme.md``."""

from __future__ import annotations

from kvstore.backends.nvme.backend import NvmeBackend
from kvstore.backends.nvme.config import NvmeConfig

__all__ = ["NvmeBackend", "NvmeConfig"]
