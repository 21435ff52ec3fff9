"""Blocks on drives: shared segments of equal slots, one writer per directory, everyone reads everything."""

from __future__ import annotations

from kvstore.backends.disk.backend import DiskBackend, NvmeBackend
from kvstore.backends.disk.config import DiskConfig, NvmeConfig

__all__ = ["DiskBackend", "DiskConfig", "NvmeBackend", "NvmeConfig"]
