"""Proof that workers have ended a copy: counters in the region that they share with the scheduler.

vLLM resets the scheduler's cache while workers still copy, or are yet to begin: they put stores off until the next
step. Up to 0.32 it does not say when these copies have ended. So every copy carries the manager's lane that it was
prepared in, and each worker counts the copies that have ended, by lane and direction. The counters lie in the last row
of the region, which holds no block for that reason: they need no file of their own, and end with the engine.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvstore.vllm.load_failures import LoadFailures

__all__ = ["LANES", "CountingWorker", "Slots", "WorkerReports", "counters_of"]

logger = logging.getLogger("kvstore.vllm.copies")

LANES = 8
"""Resets whose copies are waited for apart from each other; few are ever under way."""

_WORDS = 1 + 2 * LANES
"""Of each worker: what it counts, then its loads and stores of each lane that have ended."""
_COUNTS_LOADS, _COUNTS_ALL = 1, 2
"""A worker that stores nothing, as others hold the same bytes, counts no stores. 0: it counts nothing (yet)."""


class Slots(CPULoadStoreSpec):
    """Slots of a copy, and the lane that it was prepared in.

    Attributes:
        lane: The lane.
        is_void: Whether it is a load of which a block is missing: nothing may be copied, and the load has failed.
    """

    def __init__(self, slots: Sequence[int], lane: int, *, is_void: bool = False) -> None:
        super().__init__(list(slots))
        self.lane = lane
        self.is_void = is_void


class WorkerReports:
    """The counters of all workers, as the scheduler reads them (see :class:`kvstore.tiering.copies.CopyReports`).

    Args:
        row: The last row of the region; released by its owner.
        workers: How many workers there are.
    """

    lanes = LANES

    def __init__(self, row: memoryview, workers: int) -> None:
        self._counters = row
        # Rows too short for the counters of so many workers prove nothing.
        self._workers = workers if workers * _WORDS * 8 <= row.nbytes else 0

    def ended(self, lane: int, loads: int, stores: int) -> bool:
        """Tell whether every worker has ended so many loads and stores of a lane."""
        for at in range(0, self._workers * _WORDS, _WORDS):
            counts, ended_loads, ended_stores = (
                self._word(at),
                self._word(at + 1 + 2 * lane),
                self._word(at + 2 + 2 * lane),
            )
            if not counts or ended_loads != loads or (counts == _COUNTS_ALL and ended_stores != stores):
                return False
        return self._workers > 0

    def _word(self, at: int) -> int:
        return int.from_bytes(self._counters[8 * at : 8 * at + 8], "little")


class CountingWorker(OffloadingWorker):
    """A worker that counts the copies it has ended, around one that makes them.

    Args:
        worker: vLLM's or ours; it is shut down with this one.
        counters: From :func:`counters_of`; closed by :meth:`shutdown`. Without any, nothing is counted.
        rank: Rank of this worker.
        stores: Whether it is asked to store: where all ranks hold the same bytes, vLLM has one of them store.
        failures: Where a load that must not be made is reported.
    """

    def __init__(
        self, worker: OffloadingWorker, counters: mmap.mmap | None, rank: int, *, stores: bool, failures: LoadFailures
    ) -> None:
        self.inner = worker
        self._counters = counters
        self._at = 8 * _WORDS * rank
        self._failures = failures
        self._copies: dict[int, tuple[int, bool]] = {}
        self._void: list[TransferResult] = []
        self._write(0, _COUNTS_ALL if stores else _COUNTS_LOADS)

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Begin a copy into the primary tier."""
        if isinstance(dst_spec, Slots):
            self._copies[job_id] = dst_spec.lane, True
        return self.inner.submit_store(job_id, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, **options: Any) -> bool:
        """Begin a copy out of the primary tier (``expedited`` is an option since 0.33)."""
        if isinstance(src_spec, Slots):
            if src_spec.is_void:
                if self._failures.note(job_id, dst_spec):
                    self._void.append(TransferResult(job_id=job_id, success=True))
                return True
            self._copies[job_id] = src_spec.lane, False
        return self.inner.submit_load(job_id, src_spec, dst_spec, **options)

    def get_finished(self) -> list[TransferResult]:
        """Return the copies that have ended since the last call, after they were counted."""
        finished = self.inner.get_finished()
        for result in finished:
            copy = self._copies.pop(result.job_id, None)
            if copy is not None:
                lane, is_store = copy
                self._count(1 + 2 * lane + is_store)
        void, self._void = self._void, []
        return [*finished, *void]

    def wait(self, job_ids: set[int]) -> None:
        """Wait for copies."""
        self.inner.wait(job_ids)

    def shutdown(self) -> None:
        """End the worker."""
        self.inner.shutdown()
        if self._counters is not None:
            self._counters.close()
            self._counters = None

    def _count(self, word: int) -> None:
        if self._counters is not None:
            at = self._at + 8 * word
            self._write(word, int.from_bytes(self._counters[at : at + 8], "little") + 1)

    def _write(self, word: int, value: int) -> None:
        if self._counters is not None:
            at = self._at + 8 * word
            self._counters[at : at + 8] = value.to_bytes(8, "little")


def counters_of(region: Any, rows: int, row_bytes: int, workers: int) -> mmap.mmap | None:
    """Map the counters in the last row of a region, for a worker; None where they can't be had.

    Args:
        region: vLLM's ``SharedOffloadRegion``.
        rows: Rows of it, that last one included.
        row_bytes: Length of a row, a multiple of the page size.
        workers: How many workers there are.
    """
    descriptor, size = getattr(region, "fd", None), 8 * _WORDS * workers
    if descriptor is None or size > row_bytes or row_bytes % mmap.PAGESIZE:
        logger.warning(
            "The ends of copies are not counted: the region of vLLM has no place for it that is known here. Slots that "
            "are being copied when the cache is reset stay out of use."
        )
        return None
    return mmap.mmap(descriptor, size, offset=(rows - 1) * row_bytes)
