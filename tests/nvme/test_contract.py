"""The nvme backend keeps the contract of backends, with either engine."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore.backends.base import Backend
from kvstore.backends.nvme import NvmeBackend, NvmeConfig
from kvstore.config import Capacity
from kvstore.testing import BackendTests

_numbers = itertools.count()


class NvmeBackendSuite(BackendTests):
    engine: Any = "io_uring"
    eviction: Any = "lru"
    drives = 1

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def config(self, capacity: int | str) -> NvmeConfig:
        """Return the configuration of a backend in a fresh directory."""
        paths = [str(self.directory / f"drive-{next(_numbers)}") for _ in range(self.drives)]
        return NvmeConfig(paths=paths, capacity=Capacity(capacity), engine=self.engine, eviction=self.eviction)

    async def make_backend(self) -> Backend:
        """Return a backend over an empty directory."""
        return NvmeBackend(self.config("48MiB"))

    async def reopen(self, backend: Backend) -> Backend:
        """Return a backend over the same directory."""
        return NvmeBackend(cast(NvmeConfig, backend.config))

    async def make_small_backend(self, capacity_bytes: int) -> Backend:
        """Return a backend that evicts."""
        return NvmeBackend(self.config(capacity_bytes))


class TestNvmeUring(NvmeBackendSuite):
    """By io_uring."""


class TestNvmeThreads(NvmeBackendSuite):
    """By threads."""

    engine = "threads"


class TestNvmeDrives(NvmeBackendSuite):
    """Over three drives, with the other eviction policy."""

    drives = 3
    eviction = "s3fifo"
