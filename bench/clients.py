"""Shared parts of bench/redis.py and bench/s3.py: clients of a server and their measurement."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence

from bench.common import Row, percentile
from kvstore.backends.base import Backend, RecordGeometry
from kvstore.cli.bench.driver import the_spinner
from kvstore.cli.bench.systems import PYTHON_SWITCH_S
from kvstore.namespace import Namespace
from kvstore.runtime.buffers import SlotBuffers
from kvstore.runtime.host import SWITCH_S
from kvstore.runtime.messages import JobKind, SubmitJob
from kvstore.tiers.block_mover import BlockMover, RunningJob
from kvstore.types import Outcome

_PATIENCE_S = 60
"""Deadline of a job; long enough for a loaded machine."""


class Client(ABC):
    """One system under test. Its requests are numbered.

    Args:
        size: Bytes of a value.
        inflight: Blocks in flight.

    Attributes:
        name: Its name in rows.
        verified: Whether received values are verified.
        blocks_per_job: Blocks of one request; None: ``inflight``.
        jobs: Concurrent requests, if each has ``inflight`` blocks.
    """

    name: str
    verified = False
    blocks_per_job: int | None = 1
    jobs = 1

    def __init__(self, size: int, inflight: int) -> None:
        self.size, self.inflight = size, inflight
        self.per_job = self.blocks_per_job or inflight
        self.workers = max(1, inflight // self.per_job * self.jobs)

    @functools.cached_property
    def values(self) -> list[bytes]:
        """Values to store: one per block in flight, which takes as much memory as kvstore's slots.

        Fewer values would stay in the processor's cache, unlike blocks.
        """
        value = os.urandom(self.size)
        return [number.to_bytes(8, "big") + value[8:] for number in range(self.inflight)]

    def value(self, number: int) -> bytes:
        return self.values[number % len(self.values)]

    def check(self, value: bytes | None) -> None:
        """Raise if a value is missing or has the wrong length."""
        if value is None or len(value) != self.size:
            raise RuntimeError(f"{self.name}: expected {self.size} bytes, not {None if value is None else len(value)}")

    def numbers_of(self, number: int) -> range:
        return range(number * self.per_job, (number + 1) * self.per_job)

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def get(self, number: int) -> None: ...


async def at_once(
    workers: int, numbers: range, work: Callable[[int], Awaitable[None]]
) -> tuple[float, float, list[float]]:
    """Call ``work`` for all numbers, ``workers`` at a time; return seconds, CPU seconds and the time of each call."""
    latencies: list[float] = []
    waiting = iter(numbers)

    async def worker() -> None:
        for number in waiting:
            begun = time.perf_counter()
            await work(number)
            latencies.append(time.perf_counter() - begun)

    started, cpu = time.perf_counter(), time.process_time()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(worker())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return time.perf_counter() - started, time.process_time() - cpu, latencies


@contextlib.contextmanager
def beside_spinner(wanted: bool) -> Iterator[Row]:
    """Run beside a thread that spins in Python, if ``wanted``; the yielded row then receives ``spin_rate``."""
    row: Row = {}
    if not wanted:
        yield row
        return
    with the_spinner() as spinner:
        steps, started = spinner.steps, time.perf_counter()
        yield row
        row["spin_rate"] = spinner.share_of(spinner.steps - steps, time.perf_counter() - started)


async def measured(
    client: Client, op: str, numbers: range, work: Callable[[int], Awaitable[None]], *, spin: bool
) -> Row:
    """Measure requests of an open client; return the row's fields that are common to all clients."""
    sys.setswitchinterval(SWITCH_S if client.name.startswith("kvstore") else PYTHON_SWITCH_S)
    with beside_spinner(spin) as spun:
        seconds, cpu_s, latencies = await at_once(client.workers, numbers, work)
    blocks = len(numbers) * client.per_job
    row: Row = {
        "system": client.name, "op": op, "jobs": client.workers, "blocks_per_job": client.per_job, "spin": spin,
        "block_bytes": client.size, "gb_per_s": blocks * client.size / 1e9 / seconds, "ops_per_s": blocks / seconds,
        "latency_s_p50": percentile(latencies, 0.5), "latency_s_p99": percentile(latencies, 0.99),
        "verified": client.verified and op == "get",
    }  # fmt: skip
    if not spin:  # The spinning thread's CPU time can't be separated from the client's.
        row |= {"cpu_s_per_gb": cpu_s / (blocks * client.size / 1e9), "cpu_ms_per_op": cpu_s / blocks * 1e3}
    return row | spun


class MovedSlots:
    """Slots, and a backend with the I/O side of a tier: jobs with headers, checksums and verification."""

    def __init__(self, backend: Backend, namespace: Namespace, slot_bytes: int, slots: int) -> None:
        self.memory = bytearray(random.Random(1).randbytes(slot_bytes)) * slots  # The slots, filled with random bytes.
        self._backend, self._namespace, self._slot_bytes = backend, namespace, slot_bytes
        self._free = list(range(slots))

    async def open(self) -> None:
        await self._backend.open(self._namespace, RecordGeometry(256, self._slot_bytes))
        slots = SlotBuffers(memoryview(self.memory), self._slot_bytes)
        self._mover = BlockMover(self._backend, self._namespace, slots, 1 << 30, lambda keys: None)

    async def close(self) -> None:
        await self._backend.close()
        self._mover.close()

    async def move(self, kind: JobKind, keys: Sequence[bytes]) -> None:
        """Store or load blocks in one job.

        Raises:
            RuntimeError: A block was not stored or loaded.
        """
        slots = [self._free.pop() for _ in keys]
        job = RunningJob(SubmitJob(1, kind, tuple(keys), tuple(slots), time.monotonic() + _PATIENCE_S))
        await asyncio.gather(*(self._mover.move(part) for part in self._mover.cut(job)))
        self._free += slots
        if not all(Outcome(outcome).ok for outcome in job.outcomes):
            raise RuntimeError(f"{kind}: {job.outcomes!r} {job.error}")
