"""The spec of a walk: kvstore's, with a worker whose copies end some time after submission, as on a GPU."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import OffloadingWorker

from tests.vllm.walk.blocks import WatchedSpec

DELAY_S_MEAN = 0.03
"""Several steps of a tiny model: a copy seldom ends before its blocks are needed again."""

_Queue = deque[tuple[float, int, Callable[[], bool]]]
"""Due time of each copy, its job, and the function that makes it."""


class SlowCopies(OffloadingWorker):
    """Makes another worker's copies at their due time instead of at submission.

    Copies of one direction end in the order of their submission, as on a GPU stream. Copies are made only within calls
    of the engine, so a run with one seed is as repeatable as the engine.
    """

    def __init__(self, inner: OffloadingWorker, seed: int) -> None:
        self._inner = inner
        self._rng = random.Random(seed)
        self._stores: _Queue = deque()
        self._loads: _Queue = deque()

    def submit_store(self, job_id: int, *specs: Any) -> bool:
        """Queue the copy."""
        return self._submit(self._stores, job_id, lambda: self._inner.submit_store(job_id, *specs))

    def submit_load(self, job_id: int, *specs: Any, **options: Any) -> bool:
        """Queue the copy."""
        return self._submit(self._loads, job_id, lambda: self._inner.submit_load(job_id, *specs, **options))

    def get_finished(self) -> Any:
        """Make the copies that are due, and report them."""
        now = time.monotonic()
        for queue in (self._stores, self._loads):
            while queue and queue[0][0] <= now:
                queue.popleft()[2]()
        return self._inner.get_finished()

    def wait(self, job_ids: set[int]) -> None:
        """Make all copies up to the requested ones."""
        for queue in (self._stores, self._loads):
            while any(job_id in job_ids for _, job_id, _ in queue):
                queue.popleft()[2]()
        self._inner.wait(job_ids)

    def shutdown(self) -> None:
        """Drop the pending copies."""
        self._stores.clear()
        self._loads.clear()
        self._inner.shutdown()

    @property
    def pending(self) -> int:
        """Copies submitted and not yet made."""
        return len(self._stores) + len(self._loads)

    def _submit(self, queue: _Queue, job_id: int, copy: Callable[[], bool]) -> bool:
        delay = self._rng.choice((0, self._rng.expovariate(1 / DELAY_S_MEAN)))
        due = max([time.monotonic() + delay, *(entry[0] for entry in queue)])
        queue.append((due, job_id, copy))
        return True


class SlowSpec(WatchedSpec):
    """kvstore's spec with slow copies."""

    seed: ClassVar[int] = 0
    workers: ClassVar[list[SlowCopies]] = []
    """The workers created so far; a walk's scheduler and worker live in one process."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Return the worker with slow copies."""
        worker = SlowCopies(super().get_worker(kv_caches), self.seed)
        self.workers.append(worker)
        return worker
