"""Backend that keeps blocks as files in a directory: local, persistent, bounded, and shared if wanted."""

from __future__ import annotations

from kvstore.backends.file.backend import FileBackend
from kvstore.backends.file.config import FileConfig

__all__ = ["FileBackend", "FileConfig"]
