"""Blocks on drives: segments of equal slots, each described by a table that is written in place."""

from __future__ import annotations

from kvstore.backends.disk.backend import DiskBackend
from kvstore.backends.disk.config import DiskConfig

__all__ = ["DiskBackend", "DiskConfig"]
