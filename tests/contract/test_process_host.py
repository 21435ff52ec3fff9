"""Tiers with an I/O process keep the contract of tiers, over each local backend, including faults."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvstore.runtime.process import ProcessChannel
from kvstore.testing import TierRig, TierTests
from kvstore.testing.tier_tests import TierHarness, TierValueTests


class ProcessRig(TierHarness):
    """Tiers with a process each; the faulty backend runs in the child, and the plan of its faults in the test."""

    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _scratch(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path

    def make_config(self) -> dict[str, Any]:
        """Return the configuration of a tier over an empty medium."""
        return self.small_config(64 << 20)

    def small_config(self, capacity_bytes: int) -> dict[str, Any]:
        """Return the same configuration with a capacity."""
        where = {} if self.options["backend"] == "memory" else {"path": tempfile.mkdtemp(dir=self.tmp_path)}
        return {"capacity": capacity_bytes, "io": "process", **where, **self.options}

    def rig(self, *args: Any, **kwargs: Any) -> TierRig:
        """Open a tier, and check that it has a process."""
        rig = super().rig(*args, **kwargs)
        assert isinstance(rig.tier._channel, ProcessChannel)
        return rig


class TestFileProcess(ProcessRig, TierTests):
    """A directory, by io_uring."""

    options: ClassVar[dict[str, Any]] = {"backend": "file"}


class TestFileThreadsProcess(ProcessRig, TierValueTests):
    """A directory, by threads: its fault handling is the same as by io_uring."""

    options: ClassVar[dict[str, Any]] = {"backend": "file", "engine": "threads"}


class TestNvmeProcess(ProcessRig, TierValueTests):
    """A directory used by a single engine."""

    options: ClassVar[dict[str, Any]] = {"backend": "nvme"}


class TestMemoryProcess(ProcessRig, TierTests):
    """Memory of the process, lost with the process."""

    options: ClassVar[dict[str, Any]] = {"backend": "memory"}
    persistent = False
