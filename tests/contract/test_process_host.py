"""Tiers whose I/O half is a process of its own keep the contract of tiers, over each local backend."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvstore.runtime.process import ProcessChannel
from kvstore.testing import TierRig
from kvstore.testing.tier_values import TierValueTests


class ProcessTierSuite(TierValueTests):
    """What needs no faults inside the I/O half: those are a test's own objects, and stay in its process."""

    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _scratch(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path

    def make_config(self) -> dict[str, Any]:
        """Return the configuration of a tier over an empty medium."""
        return self.small_config(64 << 20)

    def small_config(self, capacity_bytes: int) -> dict[str, Any]:
        """Return the same with a capacity."""
        where = {} if self.options["backend"] == "memory" else {"path": tempfile.mkdtemp(dir=self.tmp_path)}
        return {"capacity": capacity_bytes, "io": "process", **where, **self.options}

    def rig(self, *args: Any, **kwargs: Any) -> TierRig:
        """Open a tier, and insist that it has a process."""
        rig = super().rig(*args, **kwargs)
        assert isinstance(rig.tier._channel, ProcessChannel)
        return rig


class TestFileProcess(ProcessTierSuite):
    """Files, one for each block."""

    options: ClassVar[dict[str, Any]] = {"backend": "file", "threads": 4}


class TestNvmeUringProcess(ProcessTierSuite):
    """A slab, by io_uring."""

    options: ClassVar[dict[str, Any]] = {"backend": "nvme", "engine": "io_uring"}


class TestNvmeThreadsProcess(ProcessTierSuite):
    """A slab, by threads."""

    options: ClassVar[dict[str, Any]] = {"backend": "nvme", "engine": "threads"}


class TestMemoryProcess(ProcessTierSuite):
    """Memory of the process, which is gone with it."""

    options: ClassVar[dict[str, Any]] = {"backend": "memory"}
    persistent = False
