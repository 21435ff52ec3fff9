"""Tiers with an I/O process keep the contract of tiers.

The value part runs over each local backend, with one tier for all tests of a class, because the start of a process
costs more than a test. The rest runs over a directory, by io_uring: it concerns the host, whatever the backend.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvstore.testing import TierRig
from kvstore.testing.tier_tests import TierEpochTests, TierFaultTests, TierHarness, TierLifecycleTests, TierValueTests
from kvstore.types import BlockKey


class ProcessRig(TierHarness):
    """Tiers with a process each; the faulty backend runs in the child, and the plan of its faults in the test."""

    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _scratch(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path

    def make_config(self) -> dict[str, Any]:
        return self.small_config(64 << 20)

    def small_config(self, capacity_bytes: int) -> dict[str, Any]:
        where = {} if self.options["backend"] == "memory" else {"path": tempfile.mkdtemp(dir=self.tmp_path)}
        return {"capacity": capacity_bytes, "io": "process", **where, **self.options}

    def rig(self, *args: Any, **kwargs: Any) -> TierRig:
        """Open a tier, and check that it has a process."""
        rig = super().rig(*args, **kwargs)
        assert rig.tier.io_pid is not None
        return rig


class KeptRig(TierRig):
    """A rig that one test after the other enters; its tier and process stay."""

    def __enter__(self) -> KeptRig:
        self.results.clear()
        for slot in range(self.slots):
            self.fill(slot)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is None:
            self.until(lambda: not self.tier.stats().jobs_in_flight, "the end of all jobs")
            assert set(self.reports.values()) <= {1}, "jobs reported more than once"
            assert len(self.reports) == self._next_job_id - 1, "jobs that were never reported"

    def close(self) -> None:
        """Close the tier with the checks of every rig."""
        super().__exit__(None)


@pytest.fixture(scope="class")
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptRig]:
    """The rig of a class."""
    suite: OneProcess = request.cls()
    suite.tmp_path = tmp_path_factory.mktemp("kept")
    rig = KeptRig(suite.make_config(), namespace=suite.namespace, slot_bytes=suite.slot_bytes, slots=suite.slots)
    assert rig.tier.io_pid is not None
    yield rig
    rig.close()


class OneProcess(ProcessRig, TierValueTests):
    """The value part of the suite, over one tier for all of its tests."""

    @pytest.fixture(autouse=True)
    def _rig(self, kept: KeptRig, request: pytest.FixtureRequest) -> None:
        self.kept = kept
        self.prefix = request.node.name.encode()[-32:]

    def keys(self, count: int) -> list[BlockKey]:
        """Return keys that no other test of the class has, even if all have the same seed."""
        return [self.prefix + key for key in super().keys(count)]

    def rig(self, *args: Any, **kwargs: Any) -> TierRig:
        """Return the rig of the class; the value part opens none with options of its own."""
        assert not args and not kwargs
        return self.kept


class TestFileProcess(OneProcess):
    """A directory, by io_uring."""

    options: ClassVar[dict[str, Any]] = {"backend": "file"}


@pytest.mark.matrix
class TestFileProcesses(ProcessRig, TierLifecycleTests, TierEpochTests, TierFaultTests):
    """A directory, by io_uring: the rest of the suite, with a process for each tier."""

    options: ClassVar[dict[str, Any]] = {"backend": "file"}


@pytest.mark.matrix
class TestFileThreadsProcess(OneProcess):
    """A directory, by threads."""

    options: ClassVar[dict[str, Any]] = {"backend": "file", "engine": "threads"}


@pytest.mark.matrix
class TestFileProcessRestart(ProcessRig):
    """The process of a closed tier leaves its directory to the next one."""

    options: ClassVar[dict[str, Any]] = {"backend": "file"}
    test_blocks_outlive_a_restart = TierLifecycleTests.test_blocks_outlive_a_restart


@pytest.mark.matrix
class TestMemoryProcess(OneProcess):
    """Memory of the process, lost with the process."""

    options: ClassVar[dict[str, Any]] = {"backend": "memory"}
    persistent = False
