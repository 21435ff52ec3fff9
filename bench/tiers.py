"""Tiers under a benchmark, kvstore's and vLLM's, behind one face: submit a job, collect what has ended."""

from __future__ import annotations

import hashlib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvstore import Namespace, primary
from kvstore.cli.measuring import systems
from kvstore.cli.measuring.systems import Op
from kvstore.cli.measuring.vllm_fs import VllmFsSystem

__all__ = ["FsSystem", "KVStoreSystem", "Op", "Region", "System", "key_of"]


def key_of(number: int) -> bytes:
    """Return a key as vLLM makes them: a hash of 32 bytes and the group's number in 4."""
    return hashlib.sha256(b"%d" % number).digest() + b"\0\0\0\0"


class Region:
    """A primary tier as kvstore makes them (in huge pages where there are any), with different bytes in every slot."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots, self.slot_bytes = slots, slot_bytes
        self._region = primary.Region.create(slots, slot_bytes, name="kvstore-bench", populate=True)
        self.view = self._region.view()
        self.array = self._region.rows().view(np.uint64)
        tile = np.random.default_rng(1).integers(0, 1 << 63, slot_bytes // 8, dtype=np.uint64)
        for slot in range(slots):
            self.array[slot] = tile + np.uint64(slot)

    def checksum(self, slots: Sequence[int]) -> list[int]:
        """Return a number per slot that any changed byte changes."""
        return [int(np.bitwise_xor.reduce(self.array[slot] * np.uint64(0x9E3779B97F4A7C15))) for slot in slots]


class System(ABC):
    """One tier over a directory, an empty one unless it is not ``fresh``; what it does is that of ``kvstore-bench``."""

    verified = True

    def __init__(self, directory: Path, region: Region, capacity_bytes: int, *, fresh: bool = True) -> None:
        self.directory, self.region, self.capacity_bytes = directory, region, capacity_bytes
        self._fresh = fresh
        if fresh:
            shutil.rmtree(directory, ignore_errors=True)
        self._system = self._open()

    @abstractmethod
    def _open(self) -> systems.System:
        """Open it."""

    @property
    def name(self) -> str:
        """Return its name in tables."""
        return self._system.name

    @property
    def host(self) -> str:
        """Return where its I/O runs."""
        return self._system.host

    def submit(self, op: Op, job_id: int, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Hand over a job."""
        self._system.submit(op, job_id, keys, slots)

    def finished(self) -> list[tuple[int, bool]]:
        """Return the jobs that ended, and whether all of each succeeded."""
        return [(done.job_id, all(outcome.ok for outcome in done.outcomes)) for done in self._system.finished()]

    def cpu_seconds(self) -> float:
        """Return the CPU time of all threads and processes that work for this system."""
        return systems.cpu_seconds()

    def forget(self) -> None:  # noqa: B027 - most evict.
        """Make room after a run, where the system does not evict by itself."""

    def close(self) -> None:
        """End it and remove its directory, if that was its own."""
        self._system.close()
        if self._fresh:
            shutil.rmtree(self.directory, ignore_errors=True)


class KVStoreSystem(System):
    """A tier of kvstore."""

    def __init__(
        self, directory: Path, region: Region, capacity_bytes: int, *, backend: str, io: str = "thread",
        fresh: bool = True, **more: Any,
    ) -> None:  # fmt: skip
        limits = {} if backend == "memory" else {"reserve": 0}
        self._config = {
            "backend": backend, "path": str(directory), "capacity": capacity_bytes, "io": io,
            "load_timeout": 60, "store_timeout": 60, "store_backlog_bytes": "16GiB", "inflight_bytes": "2GiB",
            **limits, **more,
        }  # fmt: skip
        super().__init__(directory, region, capacity_bytes, fresh=fresh)

    def _open(self) -> systems.System:
        region, config = self.region, self._config
        namespace = Namespace({"bench": "tiers"})
        return systems.TierSystem(
            config, region.view, region.slot_bytes, namespace, name=f"kvstore-{config['backend']}"
        )


class FsSystem(System):
    """vLLM's own ``fs`` tier."""

    verified = False

    def _open(self) -> systems.System:
        return VllmFsSystem(self.directory, self.region.view, self.region.slot_bytes)

    def forget(self) -> None:
        """Remove the files: it never does so itself."""
        for path in self.directory.rglob("*.bin"):
            path.unlink()
