"""Systems to measure, behind one interface: submit jobs, collect results.

Used by ``kvstore-bench`` and by the programs in ``bench/``. The memory of the slots belongs to the caller.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvstore.namespace import Namespace
from kvstore.tiers import open_tier
from kvstore.tiers.base import TierStats
from kvstore.types import BlockKey, LookupResult, Outcome, TransferJob

Op = Literal["store", "load"]


class Done(NamedTuple):
    """A job that ended, with the outcome of each of its blocks."""

    job_id: int
    outcomes: Sequence[Outcome]


class System(ABC):
    """One system that stores and loads blocks."""

    name: str  # Name in tables: ``"kvstore-file"``, ``"vllm-fs"``, ``"raw"``.
    host = "thread"  # Host of its I/O: ``"thread"`` or ``"process"``.
    direct: bool | None = None  # Whether its reads bypass the page cache; None without one (memory, network).
    looks_up = False  # Whether :meth:`lookup` queries it; otherwise the caller tracks its stored blocks.
    capacity_bytes = 0  # Most payload that may be stored, for a system without eviction; 0: no limit.

    @abstractmethod
    def submit(self, op: Op, job_id: int, keys: Sequence[BlockKey], slots: Sequence[int]) -> None:
        """Submit a job."""

    @abstractmethod
    def finished(self) -> Sequence[Done]:
        """Return the jobs that ended since the last call."""

    def lookup(self, key: BlockKey, job_id: int) -> LookupResult:
        """Look up a block; after RETRY, repeat the call after :meth:`flush`."""
        return LookupResult.HIT

    def flush(self) -> None:  # noqa: B027 - most systems have no lookups.
        """Submit the lookups of this step."""

    def last_error(self) -> str:
        """Return the text of the latest failure; empty if there was none."""
        return ""

    def stats(self) -> TierStats | None:
        """Return its statistics; None if it is not a tier."""
        return None

    def remove(self, keys: Sequence[BlockKey]) -> None:  # noqa: B027 - the data of most systems is removed as a whole.
        """Remove blocks."""

    @abstractmethod
    def close(self) -> None:
        """End all work; the medium keeps its contents."""


class TierSystem(System):
    """A tier of kvstore, opened with a configuration for ``open_tier``."""

    looks_up = True

    def __init__(
        self, config: Mapping[str, Any], primary: memoryview, slot_bytes: int, namespace: Namespace, *, name: str,
        direct: bool | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.direct = direct
        self.host = str(config.get("io", "thread"))
        self.tier = open_tier(config, primary=primary, slot_bytes=slot_bytes, namespace=namespace, events=False)

    def submit(self, op: Op, job_id: int, keys: Sequence[BlockKey], slots: Sequence[int]) -> None:
        job = TransferJob(job_id, keys, slots)
        (self.tier.submit_store if op == "store" else self.tier.submit_load)(job)
        self.tier.flush()

    def finished(self) -> Sequence[Done]:
        done = [Done(result.job_id, result.outcomes) for result in self.tier.get_finished()]
        self.tier.take_samples()
        return done

    def lookup(self, key: BlockKey, job_id: int) -> LookupResult:
        return self.tier.lookup(key)

    def flush(self) -> None:
        self.tier.flush()

    def last_error(self) -> str:
        return self.tier.stats().last_error

    def stats(self) -> TierStats | None:
        """See :meth:`System.stats`; includes work in progress."""
        self.tier.drain(60.0)
        return self.tier.stats()

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self.tier.remove(keys)
        self.tier.drain(60.0)

    def close(self) -> None:
        self.tier.drain(60.0)
        self.tier.close()


def cpu_seconds() -> float:
    """Return the CPU time of this process and its living children, including their kernel threads."""
    total = time.process_time()
    for task in Path("/proc/self/task").iterdir():
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        total += sum(_cpu_seconds_of(int(pid)) for pid in children)
    return total


def probe_direct(directory: Path) -> bool:
    """Return whether files in a directory can be opened for direct I/O."""
    path = directory / f".kvstore-bench-probe-{os.getpid()}"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def _cpu_seconds_of(pid: int) -> float:
    """Return the CPU time of all threads of a process."""
    total = 0
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except OSError:
            continue
    return total / 1e9
