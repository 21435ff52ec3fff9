"""A tier over the disk backend keeps the contract of tiers, with either engine; see also tests/contract."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvstore.testing import TierTests
from kvstore.testing.tier_tests import TierHarness, TierValueTests


class DiskTierHarness(TierHarness):
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def make_config(self) -> dict[str, Any]:
        """Return the configuration of a tier over an empty directory."""
        return self.small_config(64 << 20)

    def small_config(self, capacity_bytes: int) -> dict[str, Any]:
        """Return the same configuration with a capacity."""
        path = tempfile.mkdtemp(dir=self.directory)
        return {"backend": "file", "path": path, "capacity": capacity_bytes, "reserve": 0, **self.options}


class TestDiskTier(DiskTierHarness, TierTests):
    """By io_uring, on a thread of this process."""


@pytest.mark.matrix
class TestDiskTierThreads(DiskTierHarness, TierValueTests):
    """By threads."""

    options: ClassVar[dict[str, Any]] = {"engine": "threads"}
