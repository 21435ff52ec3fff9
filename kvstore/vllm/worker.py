"""Copies between the KV cache of vLLM's CPU platform and the shared region that is the primary tier.

vLLM's own worker needs CUDA or XPU. This worker does the same for a KV cache in host memory: it copies each block's
pages to the block's row of the region and back. A copy completes within the submit call, because a thread would only
compete with the model for the cores.
"""

from __future__ import annotations

import os
import time
import weakref
from typing import Any

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

from kvstore.primary import CopyRun, LayerPlan, RankPlan, Region
from kvstore.runtime.messages import JobKind
from kvstore.transfer import BlockCopies, HostTransfer


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
        self.region = region
        rows = Region.wrap(region.create_kv_memoryview(), region.total_size_bytes // region.num_chunks)
        plan = _plan_of(kv_caches, blocks_per_chunk, region, rows.slot_bytes, canonical=canonical_layout)
        tensors = {str(index): _bytes_of(one.tensor).numpy() for index, one in enumerate(kv_caches.tensors)}
        self._transfer = HostTransfer(plan, tensors, rows)
        # The worker created the region's file and must remove it even without a shutdown() call, for instance if the
        # scheduler fails to start. A finalizer also runs at interpreter exit.
        self._finalizer = weakref.finalize(self, _release, region, rows, self._transfer)

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Copy KV blocks into rows of the region; done when this returns."""
        self._copy(job_id, src_spec, dst_spec, JobKind.STORE)
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Copy rows of the region into KV blocks; done when this returns (vLLM 0.33 passes ``expedited``)."""
        self._copy(job_id, dst_spec, src_spec, JobKind.LOAD)
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return immediately, because submitted copies are already done."""

    def shutdown(self) -> None:
        """Unmap the region and remove its file."""
        self._finalizer()

    def _copy(self, job_id: int, kv: GPULoadStoreSpec, rows: LoadStoreSpec, kind: JobKind) -> None:
        if not isinstance(rows, BlockIDsLoadStoreSpec):
            raise TypeError(f"expected the ids of rows of the primary tier, got {type(rows).__name__}")
        started = time.perf_counter()
        size_bytes = block_at = row_at = 0
        for group, (blocks, first) in enumerate(zip(kv.group_sizes, kv.block_indices, strict=True)):
            if blocks == 0:
                continue
            # The group's first block may be in the middle of its row of blocks_per_chunk blocks.
            row_count = -(-(first % self._blocks_per_chunk + blocks) // self._blocks_per_chunk)
            copies = BlockCopies.of(
                kv.block_ids[block_at : block_at + blocks],
                rows.block_ids[row_at : row_at + row_count],
                blocks_per_slot=self._blocks_per_chunk,
                first=first,
                group=group,
            )
            size_bytes += self._transfer.copy(copies, kind)
            block_at += blocks
            row_at += row_count
        seconds = time.perf_counter() - started
        self._finished.append(
            TransferResult(job_id=job_id, success=True, transfer_size=size_bytes, transfer_time=seconds)
        )


def _plan_of(
    kv_caches: CanonicalKVCaches, per_row: int, region: SharedOffloadRegion, row_bytes: int, *, canonical: bool
) -> RankPlan:
    """Plan the copies between each page and its canonical page, or whole pages into this worker's part of each row."""
    sizes = [0 if canonical else tensor.page_size_bytes for tensor in kv_caches.tensors]
    if canonical:
        for ref in (ref for refs in kv_caches.group_data_refs for ref in refs):
            if ref.mapping is None:
                raise ValueError("canonical_layout: a layer has no canonical mapping; remove canonical_layout")
            sizes[ref.tensor_idx] = max(sizes[ref.tensor_idx], ref.mapping.canonical_page_size_bytes)
    view = region.create_next_canonical_view if canonical else region.create_next_worker_view
    offsets = [int(view(size * per_row).storage_offset()) for size in sizes]

    def plan_of(ref: Any) -> LayerPlan:
        mapping = ref.mapping if canonical else None
        return LayerPlan(
            layer=str(ref.tensor_idx),
            runs=_runs_of(mapping) if mapping else (CopyRun(0, 0, ref.page_size_bytes),),
            local_bytes=ref.page_size_bytes,
            block_bytes=sizes[ref.tensor_idx],
            slot_offset=offsets[ref.tensor_idx],
            writers=mapping.num_writers if mapping else 1,
            writer_index=mapping.writer_index if mapping else 0,
        )

    return RankPlan(tuple(tuple(map(plan_of, refs)) for refs in kv_caches.group_data_refs), per_row, row_bytes)


def _runs_of(mapping: Any) -> tuple[CopyRun, ...]:
    return tuple(
        CopyRun(
            local_offset=run.local_offset,
            canonical_offset=run.canonical_offset,
            length=run.fragment_size,
            count=run.num_fragments,
            local_stride=run.local_stride,
            canonical_stride=run.canonical_stride,
        )
        for run in mapping.runs
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a KV cache tensor as bytes, one row per block."""
    if tensor.device.type != "cpu":
        raise ValueError(f"expected a KV cache in host memory, got device {tensor.device}")
    flat = tensor.view(torch.int8)
    return flat if flat.ndim == 2 else flat.view(flat.shape[0], -1)


def _release(region: SharedOffloadRegion, rows: Region, transfer: HostTransfer) -> None:
    """Unmap the region, and remove its file unless the scheduler already has."""
    transfer.close()
    rows.close()
    path = getattr(region, "mmap_path", "")
    if path and not os.path.exists(path):
        # A second unlink would log a traceback.
        region._creator = False
    region.cleanup()
