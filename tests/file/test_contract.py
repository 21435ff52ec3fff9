"""The contract of backends, kept by the file backend in each of its forms."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest

from kvstore.backends.base import Backend
from kvstore.backends.file import FileBackend, FileConfig
from kvstore.config import Capacity
from kvstore.testing import BackendTests
from kvstore.testing.faulty_disk import FaultyDisk


class FileTests(BackendTests):
    settings: ClassVar[dict[str, object]] = {}

    @pytest.fixture(autouse=True)
    def _scratch(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path

    async def make_backend(self) -> Backend:
        return self._make("1GiB")

    async def make_small_backend(self, capacity_bytes: int) -> Backend | None:
        return self._make(capacity_bytes)

    async def reopen(self, backend: Backend) -> Backend | None:
        return FileBackend(backend.config)

    async def break_medium(self, backend: Backend) -> bool:
        self.disk.fail("any", errno.EIO, forever=True)
        return True

    async def mend_medium(self, backend: Backend) -> None:
        self.disk.heal()

    def _make(self, capacity: int | str) -> FileBackend:
        path = tempfile.mkdtemp(dir=self.tmp_path)
        self.disk = FaultyDisk()
        config = FileConfig(path=path, capacity=Capacity(capacity), threads=4, **self.settings)
        return FileBackend(config, disk=self.disk)


class TestExclusiveLru(FileTests):
    settings: ClassVar[dict[str, object]] = {"engine": "io_uring"}


class TestExclusiveS3Fifo(FileTests):
    settings: ClassVar[dict[str, object]] = {"engine": "threads", "eviction": "s3fifo"}


class TestSharedLru(FileTests):
    settings: ClassVar[dict[str, object]] = {"engine": "threads", "shared": True}


class TestSharedS3Fifo(FileTests):
    settings: ClassVar[dict[str, object]] = {"engine": "io_uring", "shared": True, "eviction": "s3fifo"}
