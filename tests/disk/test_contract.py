"""The backend of slots and tables keeps the contract of backends."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from kvstore.backends.base import Backend
from kvstore.backends.disk import DiskBackend, DiskConfig
from kvstore.backends.disk.holdings import DiskHoldings
from kvstore.backends.disk.layout import PAGE
from kvstore.config import Capacity
from kvstore.testing import BackendTests, HoldingsTests
from kvstore.testing.backend_harness import BackendHarness
from kvstore.testing.backend_tests import BackendValueTests
from kvstore.types import RemovalCause
from tests.disk.rig import NAMESPACE, SLOT, opened, tables
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


@contextlib.asynccontextmanager
async def inspected(config: DiskConfig) -> AsyncIterator[DiskHoldings]:
    """Open the holdings of a tier while the context lasts."""
    holdings = DiskHoldings(DiskBackend, config)
    await holdings.open()
    try:
        yield holdings
    finally:
        await holdings.close()


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

    async def test_file_with_another_name_is_no_segment(self) -> None:
        """A file of somebody else that ends like a segment is neither listed nor removed for room."""
        backend = await self.make_backend()
        config = cast(DiskConfig, backend.config)
        async with opened(Path(config.paths[0]), 64) as rig:
            values = await rig.put_new(4)
            alien = Path(config.paths[0]) / NAMESPACE.hex / "notes of mine.seg"
            alien.write_bytes(bytes(SLOT))
            async with inspected(config) as holdings:
                (namespace,) = await holdings.namespaces()
                assert namespace.holder == "engines hold 1 of 1 segments"
            await rig.has_all(values)
        async with opened(Path(config.paths[0]), 16) as rig:
            await rig.put_new(16)
            await rig.put_new(16)
        assert alien.exists()

    async def test_removal_after_four_billion_changes(self) -> None:
        """The number of changes of a table begins again at 0, without a warning."""
        backend = await self.make_backend()
        config = cast(DiskConfig, backend.config)
        async with opened(Path(config.paths[0]), 64) as rig:
            values = await rig.put_new(4)
        (table,) = tables(Path(config.paths[0]))
        with table.open("r+b") as file:
            file.seek(PAGE)
            file.write(b"\xff" * 4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            async with inspected(config) as holdings:
                (namespace,) = await holdings.namespaces()
                blocks = [block async for some in holdings.scan(namespace) for block in some]
                assert await holdings.remove(namespace, blocks[:1], RemovalCause.EVICTED) == 1
        async with opened(Path(config.paths[0]), 64) as rig:
            assert await rig.backend.exists(list(values)) == [key != blocks[0].key for key in values]
