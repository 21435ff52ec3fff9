"""Systems to measure, behind one interface: submit jobs, collect results.

Used by ``kvstore-bench`` and by the programs in ``bench/``. The memory of the slots belongs to the caller.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from kvstore.cli.report import Row, probe_direct
from kvstore.errors import BackendError, ConfigError
from kvstore.namespace import Namespace
from kvstore.runtime.host import SWITCH_S
from kvstore.tiers import open_tier
from kvstore.tiers.base import TierStats
from kvstore.types import BlockKey, LookupResult, Outcome, TransferJob

Op = Literal["store", "load"]


PYTHON_SWITCH_S: Final = 0.005
"""The interpreter's switch interval by default; the loop of a tier shortens it."""


POLL_S: Final = 0.0002
"""Pause between two polls without results; a shorter one would take CPU time and the GIL from the system."""


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
    switch_s = PYTHON_SWITCH_S  # Switch interval of the interpreter in programs that use it.
    capacity_bytes = 0  # Most payload that may be stored, for a system without eviction; 0: no limit.

    @abstractmethod
    def submit(self, op: Op, job_id: int, keys: Sequence[BlockKey], slots: Sequence[int]) -> None:
        """Submit a job."""

    @abstractmethod
    def finished(self) -> Sequence[Done]:
        """Return the jobs that ended since the last call."""

    def wait(self, timeout_s: float) -> None:
        """Wait for jobs or lookups to end, or until the caller should poll."""
        time.sleep(min(timeout_s, POLL_S))

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
        self.tier = open_tier(
            config, primary=primary, slot_bytes=slot_bytes, namespace=namespace, events=False, io="process"
        )
        self.host = "thread" if self.tier.io_pid is None else "process"
        if self.host == "thread":
            self.switch_s = SWITCH_S

    def submit(self, op: Op, job_id: int, keys: Sequence[BlockKey], slots: Sequence[int]) -> None:
        job = TransferJob(job_id, keys, slots)
        (self.tier.submit_store if op == "store" else self.tier.submit_load)(job)
        self.tier.flush()

    def finished(self) -> Sequence[Done]:
        done = [Done(result.job_id, result.outcomes) for result in self.tier.get_finished()]
        self.tier.take_samples()
        return done

    def wait(self, timeout_s: float) -> None:
        self.tier.wait(timeout_s)

    def lookup(self, key: BlockKey, job_id: int) -> LookupResult:
        return self.tier.lookup(key)

    def flush(self) -> None:
        self.tier.flush()

    def last_error(self) -> str:
        return self.tier.stats().last_error

    def stats(self) -> TierStats | None:
        """Includes work in progress."""
        self.tier.drain(60.0)
        return self.tier.stats()

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self.tier.remove(keys)
        self.tier.drain(60.0)

    def close(self) -> None:
        self.tier.drain(60.0)
        self.tier.close()


def cpu_seconds() -> dict[str, float]:
    """Return the CPU time of this process and its children by part: ``caller``, ``loop``, ``workers``, ``kernel``.

    Threads that have ended don't count. The first thread of a child is its loop; those of io_uring are the kernel's.
    """
    found = dict.fromkeys(("caller", "loop", "workers", "kernel"), 0.0)
    for pid in (os.getpid(), *_children()):
        for thread, name, seconds in _threads_of(pid):
            if name.startswith("iou-"):
                found["kernel"] += seconds
            elif name == "kvstore-io" or (thread == pid != os.getpid()):
                found["loop"] += seconds
            else:
                found["caller" if thread == pid else "workers"] += seconds
    return found


def cpu_seconds_of(pid: int) -> float:
    """Return the CPU time of all threads of a process."""
    return sum(seconds for _, _, seconds in _threads_of(pid))


def _children() -> Iterator[int]:
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            yield from map(int, (task / "children").read_text().split())


def _threads_of(pid: int) -> Iterator[tuple[int, str, float]]:
    """Yield id, name and CPU time of each thread of a process."""
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
            yield int(task.name), (task / "comm").read_text().strip(), seconds


_FIO_DEPTH: Final = 32
"""Queue depth; fills the queue of any drive with blocks of 128 KiB."""

_FIO_FILE_BYTES: Final = 1 << 30
"""Larger than the cache of most controllers, and written in a second or two."""

_FIO_PERCENTILES: Final = {"p50": "50.000000", "p90": "90.000000", "p99": "99.000000", "p99_9": "99.900000"}
_RAW_THREADS: Final = 16
"""As many as the file backend has; enough for the queue of an NVMe drive."""

_FIO_GRACE_S: Final = 120.0
"""Time in addition to the runtime, because fio first writes the whole file."""


def check_fio() -> None:
    """Raise ConfigError if fio is not installed."""
    if shutil.which("fio") is None:
        raise ConfigError("The baseline 'fio' needs fio, which is not installed. Install its package, or use 'raw'.")


def fio_rows(
    directory: Path,
    *,
    block_bytes: int,
    store_share: float,
    runtime_s: float,
    room_bytes: int = _FIO_FILE_BYTES,
) -> list[Row]:
    """Measure with fio: direct I/O at random offsets of one file of at most ``room_bytes``, 32 concurrent operations.

    The file is written before ``runtime_s`` begins, and removed at the end. fio's errors raise BackendError.
    """
    path = directory / "fio.dat"
    size = max(block_bytes * _FIO_DEPTH, min(_FIO_FILE_BYTES, room_bytes) // block_bytes * block_bytes)
    kind = "randwrite" if store_share == 1 else "randread" if store_share == 0 else "randrw"
    direct = probe_direct(directory)
    failure: BackendError
    try:
        for engine in ("io_uring", "libaio", "psync"):
            options = [
                f"--filename={path}", f"--size={size}", f"--bs={block_bytes}", "--thread", f"--rw={kind}",
                f"--rwmixwrite={round(100 * store_share)}", f"--direct={int(direct)}", f"--ioengine={engine}",
                f"--iodepth={_FIO_DEPTH}", "--time_based", f"--runtime={runtime_s:g}", "--norandommap",
                "--randrepeat=1",
            ]  # fmt: skip
            try:
                return _rows_of(_run_fio(options, runtime_s), "fio", block_bytes, engine, direct)
            except BackendError as error:
                failure = error
    finally:
        path.unlink(missing_ok=True)
    raise failure


def _run_fio(options: Sequence[str], runtime_s: float) -> dict[str, Any]:
    """Run one job of fio; return its part of fio's JSON. It has 120 s more than ``runtime_s``, to write its file.

    Raises:
        BackendError: fio failed; the message has the last line of its output.
    """
    try:
        done = subprocess.run(
            ["fio", "--name=ceiling", *options, "--output-format=json"], capture_output=True, text=True, check=False,
            timeout=runtime_s + _FIO_GRACE_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode == 0:
            # fio prints messages about its fallbacks before the JSON.
            job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
            return job
        failure = ((done.stderr or done.stdout).strip().splitlines() or [""])[-1]
    except (subprocess.TimeoutExpired, ValueError, OSError) as error:
        failure = f"{type(error).__name__}: {error}"
    raise BackendError(f"fio failed: {failure}. Run it by hand: fio {' '.join(options)}", backend="fio")


def _cpu_s_per_gb(job: Mapping[str, Any]) -> float:
    """Return the CPU seconds of a job of fio for 1e9 bytes."""
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return float(cpu_s / ((job["read"]["io_bytes"] + job["write"]["io_bytes"]) / 1e9))


class PooledSystem(System):
    """A system that moves each block, or a whole job, by a blocking call on a thread."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="system")
        self._running: dict[int, list[Future[Sequence[Outcome]]]] = {}

    @abstractmethod
    def move(self, op: Op, keys: Sequence[BlockKey], slots: Sequence[int]) -> Sequence[Outcome]:
        """Store or load blocks, on a thread of the pool."""

    def submit(self, op: Op, job_id: int, keys: Sequence[BlockKey], slots: Sequence[int]) -> None:
        """The whole job is one call."""
        self._running[job_id] = [self._pool.submit(self.move, op, keys, slots)]

    def finished(self) -> Sequence[Done]:
        ended = [job_id for job_id, parts in self._running.items() if all(part.done() for part in parts)]
        return [Done(job_id, [one for part in self._running.pop(job_id) for one in part.result()]) for job_id in ended]

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class RawSystem(PooledSystem):
    """The bare drive: one file, with positioned reads and writes of whole blocks by 16 threads.

    It has no index, headers or checksums, and is the upper bound without fio. The file has room for ``blocks`` blocks;
    the oldest are overwritten. :meth:`close` removes it.
    """

    name = "raw"

    def __init__(self, directory: Path, primary: memoryview, slot_bytes: int, blocks: int) -> None:
        super().__init__(_RAW_THREADS)
        self._path = directory / "raw.dat"
        self.direct = probe_direct(directory)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)
        self._fd = os.open(self._path, flags, 0o600)
        self._primary, self._slot_bytes, self._blocks = primary, slot_bytes, blocks
        os.posix_fallocate(self._fd, 0, blocks * slot_bytes)
        self._places: dict[BlockKey, int] = {}
        self._next = 0
        self._error = ""

    def submit(self, op: Op, job_id: int, keys: Sequence[BlockKey], slots: Sequence[int]) -> None:
        if op == "store":
            for key in keys:
                self._places[key] = self._next % self._blocks
                self._next += 1
        pairs = zip(keys, slots, strict=True)
        self._running[job_id] = [self._pool.submit(self.move, op, [key], [slot]) for key, slot in pairs]

    def move(self, op: Op, keys: Sequence[BlockKey], slots: Sequence[int]) -> Sequence[Outcome]:
        """Move one block."""
        place = self._places.get(keys[0])
        if place is None:
            return [Outcome.MISS]
        size = self._slot_bytes
        buffer = self._primary[slots[0] * size : (slots[0] + 1) * size]
        try:
            moved = (os.pwritev if op == "store" else os.preadv)(self._fd, [buffer], place * size)
        except OSError as error:
            self._error = str(error)
            return [Outcome.IO_ERROR]
        return [Outcome.OK if moved == size else Outcome.IO_ERROR]

    def last_error(self) -> str:
        return self._error

    def close(self) -> None:
        super().close()
        os.close(self._fd)
        self._path.unlink(missing_ok=True)


class VllmFsSystem(System):
    """vLLM's ``FileSystemTierManager``, constructed like in vLLM's manager.

    It never removes anything, so a measurement ends after ``capacity_bytes`` of payload.

    Raises:
        ConfigError: vLLM is not installed, or lacks this tier.
    """

    name = "vllm-fs"

    def __init__(self, directory: Path, primary: memoryview, slot_bytes: int, capacity_bytes: int = 0) -> None:
        # vLLM logs to stdout by default, which is reserved for the report.
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        try:
            # Imported by name on request, because vLLM takes seconds to import and may not be installed.
            base = importlib.import_module("vllm.v1.kv_offload.tiering.base")
            fs = importlib.import_module("vllm.v1.kv_offload.tiering.fs.manager")
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"The baseline 'vllm-fs' needs vLLM 0.31 or later: there is no module {error.name!r}. Install it, or "
                "leave this baseline out."
            ) from error
        self.capacity_bytes = capacity_bytes
        self._job_type: Any = base.TransferJob
        self._counts: dict[int, int] = {}
        parallel = SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True)
        config = SimpleNamespace(
            groups=[SimpleNamespace(tokens_per_block=16, layer_names=["layer"])],
            parallel=parallel, canonical_layout=False, kv_cache_layout=None, replicated_layout=False,
            model=SimpleNamespace(name="bench", dtype="bfloat16"), cache=SimpleNamespace(tokens_per_hash=16),
        )  # fmt: skip
        spec = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=None)
        self._rows = primary.cast("B", (primary.nbytes // slot_bytes, slot_bytes))
        self.tier: Any = fs.FileSystemTierManager(spec, self._rows, "fs", str(directory))
        self.direct = bool(getattr(self.tier, "_use_o_direct", False))

    def submit(self, op: Op, job_id: int, keys: Sequence[BlockKey], slots: Sequence[int]) -> None:
        self._counts[job_id] = len(keys)
        job = self._job_type(
            job_id=job_id, keys=keys, chunk_ids=np.array(slots), is_promotion=op == "load", req_context=None
        )
        (self.tier.submit_store if op == "store" else self.tier.submit_load)(job)

    def finished(self) -> Sequence[Done]:
        """The tier reports only whether a whole job succeeded."""
        return [
            Done(result.job_id, [Outcome.OK if result.success else Outcome.IO_ERROR] * self._counts.pop(result.job_id))
            for result in self.tier.get_finished_jobs()
        ]

    def close(self) -> None:
        self.tier.shutdown()
        del self.tier
        self._rows.release()


def _rows_of(job: dict[str, Any], system: str, block_bytes: int, engine: str, direct: bool) -> list[Row]:
    rows = []
    for op, side in (("store", "write"), ("load", "read")):
        found = job[side]
        if not found["io_bytes"]:
            continue
        percentiles = found["clat_ns"].get("percentile", {})
        latencies = {
            f"latency_s_{name}": percentiles[text] / 1e9
            for name, text in _FIO_PERCENTILES.items()
            if text in percentiles
        }
        rows.append(
            {
                "system": system, "host": "process", "op": op, "block_bytes": block_bytes, "blocks_per_job": 1,
                "jobs": _FIO_DEPTH, "spin": False, "engine": engine, "cache": "direct" if direct else "hot",
                "gb_per_s": found["bw_bytes"] / 1e9, "ops_per_s": found["iops"], "cpu_s_per_gb": _cpu_s_per_gb(job),
                **latencies, "latency_s_max": found["clat_ns"]["max"] / 1e9, "errors": {},
            }
        )  # fmt: skip
    return rows
