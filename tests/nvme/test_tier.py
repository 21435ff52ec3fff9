"""A tier over the nvme backend keeps the contract of tiers, with either engine."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing import TierTests

_numbers = itertools.count()


class NvmeTierSuite(TierTests):
    engine = "io_uring"
    io = "thread"

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def make_config(self) -> dict[str, Any]:
        """Return the configuration of a tier over an empty directory."""
        return self.small_config(64 << 20)

    def small_config(self, capacity_bytes: int) -> dict[str, Any]:
        """Return the same with a capacity."""
        return {
            "backend": "nvme",
            "path": str(self.directory / f"drive-{next(_numbers)}"),
            "capacity": capacity_bytes,
            "engine": self.engine,
            "io": self.io,
        }


class TestNvmeTierUring(NvmeTierSuite):
    """By io_uring, on a thread of this process."""


class TestNvmeTierThreads(NvmeTierSuite):
    """By threads."""

    engine = "threads"
