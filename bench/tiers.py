"""Tiers under a benchmark, kvstore's and vLLM's, behind one face: submit a job, collect what has ended."""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from kvstore import Namespace, TransferJob, open_tier

__all__ = ["FsSystem", "KVStoreSystem", "Region", "System", "key_of"]

Op = Literal["store", "load"]


def key_of(number: int) -> bytes:
    """Return a key as vLLM makes them: a hash of 32 bytes and the group's number in 4."""
    return hashlib.sha256(b"%d" % number).digest() + b"\0\0\0\0"


class Region:
    """A primary tier in shared memory, with different bytes in every slot."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots, self.slot_bytes = slots, slot_bytes
        self._fd = os.memfd_create("bench-region")
        os.ftruncate(self._fd, slots * slot_bytes)
        self._map = mmap.mmap(self._fd, slots * slot_bytes)
        self.view = memoryview(self._map)
        self.array = np.frombuffer(self._map, np.uint64).reshape(slots, slot_bytes // 8)
        tile = np.random.default_rng(1).integers(0, 1 << 63, slot_bytes // 8, dtype=np.uint64)
        for slot in range(slots):
            self.array[slot] = tile + np.uint64(slot)

    def checksum(self, slots: Sequence[int]) -> list[int]:
        """Return a number per slot that any changed byte changes."""
        return [int(np.bitwise_xor.reduce(self.array[slot] * np.uint64(0x9E3779B97F4A7C15))) for slot in slots]


class System(ABC):
    """One tier over an empty directory."""

    name: str
    host = "thread"
    verified = True

    def __init__(self, directory: Path, region: Region, capacity_bytes: int) -> None:
        self.directory, self.region, self.capacity_bytes = directory, region, capacity_bytes
        shutil.rmtree(directory, ignore_errors=True)

    @abstractmethod
    def submit(self, op: Op, job_id: int, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Hand over a job."""

    @abstractmethod
    def finished(self) -> list[tuple[int, bool]]:
        """Return the jobs that ended, and whether all of each succeeded."""

    def cpu_seconds(self) -> float:
        """Return the CPU time of all threads and processes that work for this system."""
        return time.process_time()

    def forget(self) -> None:  # noqa: B027 - most evict.
        """Make room after a run, where the system does not evict by itself."""

    def close(self) -> None:
        """End it and remove its directory."""
        shutil.rmtree(self.directory, ignore_errors=True)


class KVStoreSystem(System):
    """A tier of kvstore."""

    def __init__(
        self, directory: Path, region: Region, capacity_bytes: int, *, backend: str, io: str = "thread", **more: Any
    ) -> None:
        super().__init__(directory, region, capacity_bytes)
        self.name, self.host = f"kvstore-{backend}", io
        limits = {"file": {"reserve": 0}}.get(backend, {})
        self.tier = open_tier(
            {
                "backend": backend, "path": str(directory), "capacity": capacity_bytes, "io": io,
                "load_timeout": 60, "store_timeout": 60, "store_backlog_bytes": "16GiB", "inflight_bytes": "2GiB",
                **limits, **more,
            },
            primary=region.view, slot_bytes=region.slot_bytes, namespace=Namespace({"bench": "tiers"}),
        )  # fmt: skip

    def submit(self, op: Op, job_id: int, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Hand over a job."""
        job = TransferJob(job_id, keys, slots)
        (self.tier.submit_store if op == "store" else self.tier.submit_load)(job)
        self.tier.flush()

    def finished(self) -> list[tuple[int, bool]]:
        """Return the jobs that ended."""
        done = [(result.job_id, result.success) for result in self.tier.get_finished()]
        self.tier.take_events()
        return done

    def cpu_seconds(self) -> float:
        """Return the CPU time of this process and of the I/O process."""
        pid = getattr(self.tier._channel, "pid", None)
        return time.process_time() + (_cpu_seconds_of(pid) if pid else 0.0)

    def close(self) -> None:
        """End it."""
        self.tier.close()
        super().close()


class FsSystem(System):
    """vLLM's own ``fs`` tier, by its class, as its manager would make it."""

    name = "vllm-fs"
    verified = False

    def __init__(self, directory: Path, region: Region, capacity_bytes: int) -> None:
        super().__init__(directory, region, capacity_bytes)
        # Imported here: it takes seconds, and who measures without it need not have it.
        from vllm.v1.kv_offload.tiering.base import TransferJob as VllmJob
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        self._job_type = VllmJob
        parallel = SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True)
        config = SimpleNamespace(
            groups=[SimpleNamespace(tokens_per_block=16, layer_names=["layer"])],
            parallel=parallel, canonical_layout=False, kv_cache_layout=None, replicated_layout=False,
            model=SimpleNamespace(name="bench", dtype="bfloat16"), cache=SimpleNamespace(tokens_per_hash=16),
        )  # fmt: skip
        spec = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=None)
        rows = region.view.cast("B", (region.slots, region.slot_bytes))
        self.tier = FileSystemTierManager(spec, rows, "fs", str(directory))

    def submit(self, op: Op, job_id: int, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Hand over a job."""
        job = self._job_type(
            job_id=job_id, keys=keys, chunk_ids=np.array(slots), is_promotion=op == "load", req_context=None
        )
        (self.tier.submit_store if op == "store" else self.tier.submit_load)(job)

    def finished(self) -> list[tuple[int, bool]]:
        """Return the jobs that ended."""
        return [(result.job_id, result.success) for result in self.tier.get_finished_jobs()]

    def forget(self) -> None:
        """Remove the files: it never does so itself."""
        for path in self.directory.rglob("*.bin"):
            path.unlink()

    def close(self) -> None:
        """End it."""
        self.tier.shutdown()
        super().close()


def _cpu_seconds_of(pid: int) -> float:
    """Return the CPU time of all threads of a process, also those of the kernel that work for it."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except OSError:
            continue
    return total / 1e9
