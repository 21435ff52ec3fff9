"""The host worker: pages of a KV cache in host memory to rows of the shared region, and back."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvstore.vllm.worker import HostOffloadingWorker

BLOCKS, PAGE, PADDED, ROWS = 12, 768, 1024, 8


class Regions:
    """Regions of one engine, as mapped by its workers; the first one creates the file."""

    def __init__(self, row_bytes: int, cpu_page_size: int) -> None:
        self.row_bytes = row_bytes
        self.engine_id = f"kvstore-test-{os.getpid()}-{uuid.uuid4().hex}"
        self._cpu_page_size = cpu_page_size
        self.path = f"/dev/shm/vllm_offload_{self.engine_id}.mmap"

    def map(self, rank: int) -> SharedOffloadRegion:
        """Map the region as one worker does."""
        return SharedOffloadRegion(
            engine_id=self.engine_id,
            num_chunks=ROWS,
            rank=rank,
            kv_bytes_per_chunk=self.row_bytes,
            cpu_page_size=self._cpu_page_size,
        )


@pytest.fixture
def workers() -> Iterator[list[HostOffloadingWorker]]:
    """Workers that are shut down at the end; the file of their region is gone then."""
    made: list[HostOffloadingWorker] = []
    yield made
    for worker in made:
        worker.shutdown()
    # Only files of this process, because others run tests, too.
    assert not [name for name in os.listdir("/dev/shm") if f"kvstore-test-{os.getpid()}-" in name]


def caches(groups: int = 1, layers: int = 2, *, page: int = PAGE, mapping: Any = None) -> CanonicalKVCaches:
    """Return KV caches of random bytes; all groups share the tensors, as in vLLM."""
    torch.manual_seed(1)
    tensors = [
        CanonicalKVCacheTensor(torch.randint(-128, 127, (BLOCKS, PADDED), dtype=torch.int8), PADDED)
        for _ in range(layers)
    ]
    refs = [[CanonicalKVCacheRef(i, page, mapping) for i in range(layers)] for _ in range(groups)]
    return CanonicalKVCaches(tensors=tensors, group_data_refs=refs)


def specs(blocks: list[int], rows: list[int], sizes: list[int], firsts: list[int]) -> tuple[Any, Any]:
    """Return the two ends of a transfer."""
    return GPULoadStoreSpec(blocks, group_sizes=sizes, block_indices=firsts), CPULoadStoreSpec(rows)


@pytest.mark.parametrize("per_row", [1, 2, 3])
def test_stored_blocks_are_loaded_unchanged(workers: list[HostOffloadingWorker], per_row: int) -> None:
    """Blocks stored to rows and loaded into other blocks are equal, even with several blocks per row."""
    kv = caches()
    region = Regions(-(-2 * PADDED * per_row // 4096) * 4096, 2 * PADDED * per_row).map(0)
    worker = HostOffloadingWorker(kv, per_row, region)
    workers.append(worker)
    blocks, targets = [7, 2, 5, 0, 9], [1, 3, 4, 6, 8]
    count = -(-len(blocks) // per_row)
    before = [tensor.tensor.clone() for tensor in kv.tensors]
    gpu, cpu = specs(blocks, list(range(5, 5 + count))[:count] if per_row > 1 else [7, 0, 3, 1, 5], [5], [0])
    assert worker.submit_store(1, gpu, cpu)
    gpu, cpu = specs(targets, list(cpu.block_ids), [5], [0])
    assert worker.submit_load(2, cpu, gpu)
    for tensor, old in zip(kv.tensors, before, strict=True):
        assert torch.equal(tensor.tensor[targets, :PAGE], old[blocks, :PAGE])
        assert torch.equal(tensor.tensor[targets, PAGE:], old[targets, PAGE:]), "the padding of a page is not touched"
    results = worker.get_finished()
    assert [(r.job_id, r.success, r.transfer_size) for r in results] == [(1, True, 10 * PAGE), (2, True, 10 * PAGE)]
    assert worker.get_finished() == []


def test_a_part_of_a_row_and_several_groups(workers: list[HostOffloadingWorker]) -> None:
    """Each group may begin in the middle of a row; only the group's own blocks of the row are copied."""
    kv = caches(groups=3)
    region = Regions(4096, 4 * PADDED).map(0)
    worker = HostOffloadingWorker(kv, 2, region)
    workers.append(worker)
    # Group 0: blocks 1 to 3 of the request in rows 4 and 6; group 1: none; group 2: block 5 in row 2.
    gpu, cpu = specs([0, 1, 2, 3], [4, 6, 2], [3, 0, 1], [1, 0, 5])
    worker.submit_store(1, gpu, cpu)
    rows = region.base_tensor.view(ROWS, 2, 2, PADDED).numpy()  # Row, layer, place, byte.
    for layer in range(2):
        source = kv.tensors[layer].tensor.numpy()
        for block, row, part in [(0, 4, 1), (1, 6, 0), (2, 6, 1), (3, 2, 1)]:
            assert np.array_equal(rows[row, layer, part, :PAGE], source[block, :PAGE])
        assert not rows[4, layer, 0].any() and not rows[2, layer, 0].any()
    del rows


def test_two_ranks_make_one_canonical_page(workers: list[HostOffloadingWorker]) -> None:
    """Under the canonical layout the heads of two ranks interleave, and a single rank of both heads reads them."""
    runs = [
        # 16 tokens of 48 bytes per rank: token t of rank r is at (2 t + r) * 48 of the canonical page.
        CopyRun(local_offset=0, canonical_offset=rank * 48, fragment_size=48, num_fragments=16, local_stride=48,
                canonical_stride=96)
        for rank in range(2)
    ]  # fmt: skip
    regions = Regions(4096, 2 * PADDED)
    kv = []
    for rank in range(2):
        mapping = CanonicalPageMapping(2 * PAGE, PAGE, (runs[rank],), 1, 0, True)
        kv.append(caches(layers=1, mapping=mapping))
        kv[rank].tensors[0].tensor.copy_(torch.randint(-128, 127, (BLOCKS, PADDED), dtype=torch.int8))
        worker = HostOffloadingWorker(kv[rank], 1, regions.map(rank), canonical_layout=True)
        workers.append(worker)
        worker.submit_store(1, *specs([5, 6], [2, 3], [2], [0]))
    whole = CopyRun(0, 0, 2 * PAGE, 1, 2 * PAGE, 2 * PAGE)
    mapping = CanonicalPageMapping(2 * PAGE, 2 * PAGE, (whole,), 1, 0, True)
    big = CanonicalKVCaches(
        [CanonicalKVCacheTensor(torch.zeros((BLOCKS, 2 * PAGE), dtype=torch.int8), 2 * PAGE)],
        [[CanonicalKVCacheRef(0, 2 * PAGE, mapping)]],
    )
    reader = HostOffloadingWorker(big, 1, regions.map(0), canonical_layout=True)
    workers.append(reader)
    gpu, cpu = specs([0, 1], [2, 3], [2], [0])
    reader.submit_load(2, cpu, gpu)
    for target, source in [(0, 5), (1, 6)]:
        tokens = big.tensors[0].tensor[target].view(16, 2, 48)
        for rank in range(2):
            assert torch.equal(tokens[:, rank], kv[rank].tensors[0].tensor[source, :PAGE].view(16, 48))


def test_ranks_with_the_same_bytes_take_turns(workers: list[HostOffloadingWorker]) -> None:
    """Of two ranks with the same bytes each stores every second page, and both read all pages."""
    regions = Regions(4096, 2 * PADDED)
    mapped = [regions.map(index) for index in range(2)]
    for index, region in enumerate(mapped):
        mapping = CanonicalPageMapping(PAGE, PAGE, (CopyRun(0, 0, PAGE, 1, PAGE, PAGE),), 2, index, True)
        kv = caches(layers=1, mapping=mapping)
        kv.tensors[0].tensor.fill_(index + 1)
        worker = HostOffloadingWorker(kv, 1, region, canonical_layout=True)
        workers.append(worker)
        worker.submit_store(1, *specs([0, 1, 2, 3], [0, 1, 2, 3], [4], [0]))
        assert worker.get_finished()[0].transfer_size == 2 * PAGE
    assert mapped[0].base_tensor.view(ROWS, 4096)[:4, 0].tolist() == [1, 2, 1, 2]


def test_a_layer_without_mapping_is_refused(workers: list[HostOffloadingWorker]) -> None:
    """The canonical layout needs a mapping for every layer; without one no worker starts and no file is left."""
    region = Regions(4096, 2 * PADDED).map(0)
    with pytest.raises(ValueError, match="canonical_layout"):
        HostOffloadingWorker(caches(), 1, region, canonical_layout=True)
    region.cleanup()


def test_a_worker_that_is_dropped_removes_its_file() -> None:
    """Without a call of shutdown the region's file is removed with the worker."""
    regions = Regions(4096, 2 * PADDED)
    worker = HostOffloadingWorker(caches(), 1, regions.map(0))
    assert os.path.exists(regions.path)
    del worker
    assert not os.path.exists(regions.path)
