"""Copies by the workers: proof of their end, and failure reports for loads that lack a block.

vLLM resets the scheduler's cache while workers still copy, or have not begun to: they defer stores to the next step. Up
to 0.32, it does not report the end of these copies. Therefore every copy carries the manager's lane in which it was
prepared, and each worker counts its finished copies by lane and direction. The counters are in the last row of the
shared region, which holds no block. They need no file of their own, and disappear with the engine.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Mapping, Sequence, Set
from typing import Any

from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

logger = logging.getLogger("kvstore.vllm.copies")

LANES = 8
"""Number of resets whose copies are counted separately; few are unfinished at the same time."""

_WORDS = 1 + 2 * LANES
"""64-bit words per worker: its mode, then its finished loads and stores in each lane."""
_COUNTS_LOADS, _COUNTS_ALL = 1, 2
"""Modes. A worker that never stores, because another rank stores the same bytes, counts only loads. 0: not counting."""


class Slots(CPULoadStoreSpec):
    """Slots of a copy, and the lane in which it was prepared."""

    def __init__(self, slots: Sequence[int], lane: int, *, is_void: bool = False) -> None:
        super().__init__(list(slots))
        self.lane = lane
        # Whether a block of this load is missing. Then the load has failed, and nothing may be copied.
        self.is_void = is_void


class WorkerReports:
    """The counters of all workers, read by the scheduler (see :class:`kvstore.tiering.copies.CopyReports`).

    ``row``: the last row of the region; released by its owner.
    """

    lanes = LANES

    def __init__(self, row: memoryview, workers: int) -> None:
        self._counters = row
        # A row too short for the counters of all workers has none. Then nothing proves the end of copies.
        self._workers = workers if workers * _WORDS * 8 <= row.nbytes else 0

    def ended(self, lane: int, loads: int, stores: int) -> bool:
        """Return whether every worker has finished this many loads and stores of a lane."""
        for at in range(0, self._workers * _WORDS, _WORDS):
            mode, ended_loads, ended_stores = map(self._word, (at, at + 1 + 2 * lane, at + 2 + 2 * lane))
            if not mode or ended_loads != loads or (mode == _COUNTS_ALL and ended_stores != stores):
                return False
        return self._workers > 0

    def _word(self, at: int) -> int:
        return int.from_bytes(self._counters[8 * at : 8 * at + 8], "little")


class CountingWorker(OffloadingWorker):
    """Counts the finished copies of another worker.

    Args:
        worker: vLLM's worker or ours; :meth:`shutdown` shuts it down.
        counters: From :func:`counters_of`; closed by :meth:`shutdown`. None: nothing is counted.
        stores: Whether this worker stores. If all ranks hold the same bytes, only one of them does.
        failures: Receives the loads that lack a block.
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
        """Count and return the copies that have ended since the last call."""
        finished = self.inner.get_finished()
        for result in finished:
            copy = self._copies.pop(result.job_id, None)
            if copy is not None:
                lane, is_store = copy
                self._count(1 + 2 * lane + is_store)
        void, self._void = self._void, []
        return [*finished, *void]

    def wait(self, job_ids: set[int]) -> None:
        self.inner.wait(job_ids)

    def shutdown(self) -> None:
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


class LoadFailures:
    """Reports loads that lack a block as failed, through vLLM's connector in the worker.

    A block that a lookup answered HIT stays until the step ends, and vLLM loads in the same step, so no load should
    ever lack a block. If one does, an exception would end the engine, and a copy would give wrong tokens. Instead, the
    worker copies nothing and reports the load as failed. vLLM then ends the request with an error or recomputes it
    (``kv_load_failure_policy``).

    vLLM accepts failed blocks if there is a single group of layers, otherwise failed requests.

    Args:
        request_of: Request of each load; None if it computes in the same step.
        by_block: Whether the model has a single group of layers.
    """

    def __init__(self, request_of: Mapping[int, str | None], *, by_block: bool) -> None:
        self._requests: set[str] = set()
        self._blocks: set[int] = set()
        self._request_of = request_of
        self._by_block = by_block

    def note(self, job_id: int, destination: GPULoadStoreSpec) -> bool:
        """Record that a load was not made.

        Returns:
            Whether to report the load as ended, because vLLM accepts the failure. If false, it must never be reported:
            the request would compute with the old contents of its blocks. The request then waits until it is aborted.

        Raises:
            RuntimeError: The request computes in this step, and this version of vLLM accepts no failure report.
        """
        request = self._request_of.get(job_id)
        logger.error(
            "A load of %d blocks of request %s was not made: a block is missing.", len(destination.block_ids), request
        )
        if self._by_block:
            self._blocks.update(int(block) for block in destination.block_ids)
            return True
        if request is None and job_id in self._request_of:
            raise RuntimeError(f"Load {job_id} lacks a block, and its request would compute with wrong ones.")
        if request is None:
            return False
        self._requests.add(request)
        return True

    def take_blocks(self) -> set[int]:
        """Return the device's blocks of failed loads since the last call."""
        blocks, self._blocks = self._blocks, set()
        return blocks

    def take_requests(self, ended: Set[str]) -> set[str]:
        """Return the failed requests among those whose loads have ended."""
        failed = self._requests & ended
        self._requests -= failed
        return failed


def counters_of(region: Any, rows: int, row_bytes: int, workers: int) -> mmap.mmap | None:
    """Map the counters in the last row of a region, for a worker; None if that is impossible.

    Args:
        region: vLLM's ``SharedOffloadRegion``.
        row_bytes: Length of a row, a multiple of the page size.
    """
    descriptor, size = getattr(region, "fd", None), 8 * _WORDS * workers
    if descriptor is None or size > row_bytes or row_bytes % mmap.PAGESIZE:
        logger.warning(
            "Finished copies are not counted: vLLM's region has no room for the counters, or an unknown form. Slots "
            "that are being copied when the cache is reset stay out of use."
        )
        return None
    return mmap.mmap(descriptor, size, offset=(rows - 1) * row_bytes)
