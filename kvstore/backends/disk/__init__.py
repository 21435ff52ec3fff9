"""Blocks on drives: shared segments of equal slots, one writer per directory, everyone reads everything."""

from __future__ import annotations

from kvstore.backends.disk.backend import DiskBackend
from kvstore.backends.disk.config import DiskConfig

__all__ = ["DiskBackend", "DiskConfig"]
