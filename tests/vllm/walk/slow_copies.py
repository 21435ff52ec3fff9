"""The spec of a walk: kvstore's, with a worker whose copies end later than they are submitted, as on a GPU."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import OffloadingWorker

from kvstore.vllm import KVStoreOffloadingSpec

DELAY_S_MEAN = 0.03
"""Several steps of a tiny model: a copy is seldom over before its blocks are wanted for something else."""

_Queue = deque[tuple[float, int, Callable[[], bool]]]
"""When each copy is due, its job, and what makes it."""


class SlowCopies(OffloadingWorker):
    """Makes the copies of another worker when they are due, not when they are submitted.

    Copies of one direction end in the order of their submission, as they do on a stream of a GPU. Nothing is copied
    but within calls of the engine, so that a run with one seed is as repeatable as the engine is.

    Args:
        inner: The worker that copies.
        seed: Of the delays.
    """

    def __init__(self, inner: OffloadingWorker, seed: int) -> None:
        self._inner = inner
        self._rng = random.Random(seed)
        self._stores: _Queue = deque()
        self._loads: _Queue = deque()

    def submit_store(self, job_id: int, *specs: Any) -> bool:
        """Copy some time later."""
        return self._submit(self._stores, job_id, lambda: self._inner.submit_store(job_id, *specs))

    def submit_load(self, job_id: int, *specs: Any, **options: Any) -> bool:
        """Copy some time later."""
        return self._submit(self._loads, job_id, lambda: self._inner.submit_load(job_id, *specs, **options))

    def get_finished(self) -> Any:
        """Make the copies that are due, and report them."""
        now = time.monotonic()
        for queue in (self._stores, self._loads):
            while queue and queue[0][0] <= now:
                queue.popleft()[2]()
        return self._inner.get_finished()

    def wait(self, job_ids: set[int]) -> None:
        """Make all copies up to the ones asked for."""
        for queue in (self._stores, self._loads):
            while any(job_id in job_ids for _, job_id, _ in queue):
                queue.popleft()[2]()
        self._inner.wait(job_ids)

    def shutdown(self) -> None:
        """Forget what is not copied yet."""
        self._stores.clear()
        self._loads.clear()
        self._inner.shutdown()

    @property
    def pending(self) -> int:
        """Copies that are submitted and not made."""
        return len(self._stores) + len(self._loads)

    def _submit(self, queue: _Queue, job_id: int, copy: Callable[[], bool]) -> bool:
        delay = self._rng.choice((0, self._rng.expovariate(1 / DELAY_S_MEAN)))
        due = max([time.monotonic() + delay, *(entry[0] for entry in queue)])
        queue.append((due, job_id, copy))
        return True


class SlowSpec(KVStoreOffloadingSpec):
    """kvstore's spec with slow copies."""

    seed: ClassVar[int] = 0
    workers: ClassVar[list[SlowCopies]] = []
    """The workers made so far; scheduler and worker of a walk live in one process."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Return the worker, slowed down."""
        worker = SlowCopies(super().get_worker(kv_caches), self.seed)
        self.workers.append(worker)
        return worker
