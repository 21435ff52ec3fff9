"""A tier over the file backend keeps the contract of tiers, owning its directory and sharing it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvstore.testing import TierTests


class TestFileTier(TierTests):
    """A directory of its own."""

    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _scratch(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path

    def make_config(self) -> dict[str, Any]:
        """Return the configuration of a tier over an empty directory."""
        root = tempfile.mkdtemp(dir=self.tmp_path)
        return {"backend": "file", "path": root, "capacity": "1GiB", "threads": 4, **self.options}

    def small_config(self, capacity_bytes: int) -> dict[str, Any]:
        """Return the same with a capacity."""
        return {**self.make_config(), "capacity": capacity_bytes}


class TestSharedFileTier(TestFileTier):
    """A directory that others may use: what is not known is asked for."""

    exclusive = False
    options: ClassVar[dict[str, Any]] = {"shared": True}


class TestFileTierWithoutDirectIO(TestFileTier):
    """A filesystem that can't do direct I/O."""

    options: ClassVar[dict[str, Any]] = {"direct": "off"}
