"""Copies between the KV cache of vLLM's CPU platform and the shared region that is the primary tier.

vLLM's own worker needs CUDA or XPU. This worker does the same for a KV cache in host memory: it copies each block's
pages to the block's row of the region and back. A copy completes within the submit call, because a thread would only
compete with the model for the cores.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvstore.transfer.runs import Run

logger = logging.getLogger("kvstore.vllm.worker")


class HostOffloadingWorker(OffloadingWorker):
    """Worker side of the offloading connector for a KV cache in host memory.

    Args:
        region: Shared region; this worker takes ownership.
        canonical_layout: Whether rows hold canonical pages, the same under every tensor parallel size.

    Raises:
        ValueError: The tensors are not in host memory, or a layer can't be mapped to the canonical layout.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        region: SharedOffloadRegion,
        *,
        canonical_layout: bool = False,
    ) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._finished: list[TransferResult] = []
        self._region: SharedOffloadRegion | None = region
        # The worker created the region's file and must remove it even without a shutdown() call, for instance if the
        # scheduler fails to start. A finalizer also runs at interpreter exit.
        self._finalizer = weakref.finalize(self, _release_region, region)
        plan = _plan_canonical if canonical_layout else _plan_direct
        self._runs: list[list[Run]] = plan(kv_caches, blocks_per_chunk, region)

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Copy KV blocks into rows of the region; done when this returns."""
        self._copy(job_id, src_spec, dst_spec, store=True)
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Copy rows of the region into KV blocks; done when this returns (vLLM 0.33 passes ``expedited``)."""
        self._copy(job_id, dst_spec, src_spec, store=False)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the copies finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return immediately, because submitted copies are already done."""

    def shutdown(self) -> None:
        """Unmap the region and remove its file."""
        self._runs.clear()
        self._region = None
        self._finalizer()

    def _copy(self, job_id: int, kv: GPULoadStoreSpec, rows: LoadStoreSpec, *, store: bool) -> None:
        if not isinstance(rows, BlockIDsLoadStoreSpec):
            raise TypeError(f"expected the ids of rows of the primary tier, got {type(rows).__name__}")
        started = time.perf_counter()
        size_bytes = 0
        block_ids, row_ids = kv.block_ids.astype(np.int64), rows.block_ids.astype(np.int64)
        block_at = row_at = 0
        for group, (blocks, first) in enumerate(zip(kv.group_sizes, kv.block_indices, strict=True)):
            if blocks == 0:
                continue
            # The group's first block may be in the middle of its row of blocks_per_chunk blocks.
            skip = first % self._blocks_per_chunk
            row_count = -(-(skip + blocks) // self._blocks_per_chunk)
            place = np.arange(skip, skip + blocks, dtype=np.int64)
            group_rows = row_ids[row_at : row_at + row_count][place // self._blocks_per_chunk]
            group_blocks = block_ids[block_at : block_at + blocks]
            for run in self._runs[group]:
                size_bytes += run.copy(group_blocks, group_rows, place % self._blocks_per_chunk, store=store)
            block_at += blocks
            row_at += row_count
        seconds = time.perf_counter() - started
        self._finished.append(
            TransferResult(job_id=job_id, success=True, transfer_size=size_bytes, transfer_time=seconds)
        )


def _plan_direct(kv_caches: CanonicalKVCaches, per_row: int, region: SharedOffloadRegion) -> list[list[Run]]:
    """Plan whole-page copies into this worker's own part of each row."""
    tensors = [_bytes_of(t.tensor) for t in kv_caches.tensors]
    pages = [t.page_size_bytes for t in kv_caches.tensors]
    views = [region.create_next_worker_view(page * per_row) for page in pages]
    return [
        [
            Run(
                local=_strided(tensors[ref.tensor_idx], 0, (1, ref.page_size_bytes), (0, 1)),
                remote=_strided(
                    views[ref.tensor_idx],
                    0,
                    (per_row, 1, ref.page_size_bytes),
                    (pages[ref.tensor_idx], 0, 1),
                ),
                block_bytes=ref.page_size_bytes,
            )
            for ref in refs
        ]
        for refs in kv_caches.group_data_refs
    ]


def _plan_canonical(kv_caches: CanonicalKVCaches, per_row: int, region: SharedOffloadRegion) -> list[list[Run]]:
    """Plan the copies between each page and its canonical page, run by run."""
    tensors = [_bytes_of(t.tensor) for t in kv_caches.tensors]
    sizes = [0] * len(tensors)
    for ref in (ref for refs in kv_caches.group_data_refs for ref in refs):
        if ref.mapping is None:
            raise ValueError("canonical_layout: a layer has no canonical mapping; remove canonical_layout")
        sizes[ref.tensor_idx] = max(sizes[ref.tensor_idx], ref.mapping.canonical_page_size_bytes)
    views = [region.create_next_canonical_view(size * per_row) for size in sizes]
    plans: list[list[Run]] = []
    for refs in kv_caches.group_data_refs:
        runs: list[Run] = []
        for ref in refs:
            mapping: Any = ref.mapping
            for piece in mapping.runs:
                shape = (piece.num_fragments, piece.fragment_size)
                runs.append(
                    Run(
                        local=_strided(tensors[ref.tensor_idx], piece.local_offset, shape, (piece.local_stride, 1)),
                        remote=_strided(
                            views[ref.tensor_idx],
                            piece.canonical_offset,
                            (per_row, *shape),
                            (sizes[ref.tensor_idx], piece.canonical_stride, 1),
                        ),
                        block_bytes=piece.num_fragments * piece.fragment_size,
                        writers=mapping.num_writers,
                        writer_index=mapping.writer_index,
                    )
                )
        plans.append(runs)
    return plans


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a KV cache tensor as bytes, one row per block."""
    if tensor.device.type != "cpu":
        raise ValueError(f"expected a KV cache in host memory, got device {tensor.device}")
    flat = tensor.view(torch.int8)
    return flat if flat.ndim == 2 else flat.view(flat.shape[0], -1)


def _strided(tensor: torch.Tensor, offset: int, shape: Sequence[int], strides: Sequence[int]) -> npt.NDArray[np.int8]:
    """Return a numpy view of every row of a byte tensor, from an offset, with the given strides (in bytes)."""
    view = torch.as_strided(
        tensor,
        size=(tensor.shape[0], *shape),
        stride=(tensor.stride(0), *strides),
        storage_offset=tensor.storage_offset() + offset,
    )
    array: npt.NDArray[np.int8] = view.numpy()
    return array


def _release_region(region: SharedOffloadRegion) -> None:
    """Unmap the region, and remove its file unless the scheduler already has."""
    path = getattr(region, "mmap_path", "")
    if path and not os.path.exists(path):
        # A second unlink would log a traceback.
        region._creator = False
    region.cleanup()
