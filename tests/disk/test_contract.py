"""The backend of slots and tables keeps the contract of backends."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from kvstore.backends.base import Backend
from kvstore.backends.disk import DiskBackend, DiskConfig
from kvstore.config import Capacity
from kvstore.testing import BackendTests, HoldingsTests
from kvstore.testing.backend_harness import BackendHarness
from kvstore.testing.backend_tests import BackendValueTests
from tests.diskio.faulty_disk import FaultyDisk


class SlotsHarness(BackendHarness):
    settings: ClassVar[dict[str, Any]] = {}
    drives: ClassVar[int] = 1

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def backend(self, capacity: int | str) -> DiskBackend:
        """Return a backend over fresh directories."""
        paths = [tempfile.mkdtemp(dir=self.directory) for _ in range(self.drives)]
        config = DiskConfig(path=paths, capacity=Capacity(capacity), reserve=Capacity(0), **self.settings)
        return DiskBackend(config, disk=FaultyDisk())

    async def make_backend(self) -> Backend:
        """Return a backend over an empty directory."""
        return self.backend("48MiB")

    async def reopen(self, backend: Backend) -> Backend:
        """Return a backend over the same directory."""
        return DiskBackend(cast(DiskConfig, backend.config))

    async def make_small_backend(self, capacity_bytes: int) -> Backend:
        """Return a backend that evicts."""
        return self.backend(capacity_bytes)


class TestUring(SlotsHarness, BackendTests):
    settings: ClassVar[dict[str, Any]] = {"engine": "io_uring"}


@pytest.mark.matrix
class TestThreads(SlotsHarness, BackendTests):
    settings: ClassVar[dict[str, Any]] = {"engine": "threads"}


@pytest.mark.matrix
class TestBuffered(SlotsHarness, BackendValueTests):
    settings: ClassVar[dict[str, Any]] = {"direct": "off"}


@pytest.mark.matrix
class TestDurable(SlotsHarness, BackendValueTests):
    settings: ClassVar[dict[str, Any]] = {"durability": "data"}


@pytest.mark.matrix
class TestDrives(SlotsHarness, BackendTests):
    drives = 3


class TestHoldings(HoldingsTests):
    """Segments of engines, read by another process."""

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    async def make_backend(self) -> Backend:
        """Return a backend over an empty directory."""
        path = tempfile.mkdtemp(dir=self.directory)
        return DiskBackend(DiskConfig(path=[path], capacity=Capacity("48MiB"), reserve=Capacity(0)))

    reopen = SlotsHarness.reopen
