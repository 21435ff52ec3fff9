"""Blocks stored under one tensor parallel size load under every other, through the file tier and a restart.

The ranks are simulated, their tensors are real: each rank has its heads, cut out of the model's tensors by torch's own
indexing, so nothing here depends on the computations of ``kvstore.primary``.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvstore import AsyncTier, LookupResult, Namespace, TransferJob, open_tier
from kvstore.primary import GroupLayout, KVLayout, Region, attention_layer, latent_layer
from kvstore.runtime.messages import JobKind
from kvstore.testing.waiting import eventually
from kvstore.transfer import BlockCopies, HostTransfer
from tests.transfer.caches import run

TP_SIZES = (1, 2, 4, 8)
TOKENS, HEAD_SIZE, BLOCKS, BLOCKS_PER_SLOT = 4, 8, 8, 2
LATENT = 24
SLOTS_PER_SIZE = BLOCKS  # Two groups, two blocks per slot.
ITEM = torch.bfloat16.itemsize


def layout_of(heads: int) -> KVLayout:
    """A hybrid model: full attention in both orders of axes, a sliding window, and a latent layer."""

    def attention(name: str, order: str, split: bool) -> object:
        key_bytes = HEAD_SIZE * ITEM
        return attention_layer(name, kv_heads=heads, key_bytes=key_bytes, block_tokens=TOKENS, order=order, split=split)

    full = (attention("full.nhd", "nhd", True), attention("full.hnd", "hnd", False))
    window = (
        attention("window.nhd", "nhd", False),
        attention("window.hnd", "hnd", True),
        latent_layer("window.latent", token_bytes=LATENT * ITEM, block_tokens=TOKENS),
    )
    return KVLayout((GroupLayout(full, TOKENS), GroupLayout(window, TOKENS, window_tokens=6)), BLOCKS_PER_SLOT)


def model_tensors(heads: int, seed: int) -> dict[str, torch.Tensor]:
    """The model's output, whatever the parallel size: axes block, head, token, key and value, element."""
    generator = torch.Generator().manual_seed(seed)
    shape = (BLOCKS, heads, TOKENS, 2, HEAD_SIZE)
    names = [layer.name for group in layout_of(heads).groups for layer in group.layers]
    tensors = {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name in names}
    tensors["window.latent"] = torch.randn((BLOCKS, TOKENS, LATENT), generator=generator).to(torch.bfloat16)
    return tensors


def pages_of_rank(name: str, tensor: torch.Tensor, tp_size: int, rank: int) -> torch.Tensor:
    """The KV cache tensor of a rank in its attention backend's memory layout: blocks, then bytes of the page."""
    if name != "window.latent":
        heads = tensor.shape[1]
        mine = max(1, heads // tp_size)
        tensor = tensor[:, rank * heads // tp_size :][:, :mine]
        axes = {
            "full.nhd": (0, 3, 2, 1, 4),  # block, K or V, token, head, element
            "full.hnd": (0, 1, 2, 3, 4),  # block, head, token, K and V, element
            "window.nhd": (0, 2, 1, 3, 4),  # block, token, head, K and V, element
            "window.hnd": (0, 3, 1, 2, 4),  # block, K or V, head, token, element
        }
        tensor = tensor.permute(axes[name])
    return tensor.contiguous().reshape(BLOCKS, -1).view(torch.uint8)


@contextmanager
def rank_of(
    layout: KVLayout, region: Region, tp_size: int, rank: int, caches: dict[str, torch.Tensor]
) -> Iterator[HostTransfer]:
    """A simulated worker: its own mapping of the region, its own tensors."""
    with Region.attach(region.path, region.slot_bytes) as mine:
        transfer = HostTransfer(layout.plan(tp_size, rank), {n: t.numpy() for n, t in caches.items()}, mine)
        yield transfer
        transfer.close()
        del transfer


def copies_from(first_slot: int) -> list[BlockCopies]:
    """All blocks of both groups in slots from a number on, one group after the other, blocks in shuffled order."""
    order = [3, 0, 7, 1, 6, 2, 5, 4]
    slots = range(first_slot, first_slot + SLOTS_PER_SIZE)
    half = SLOTS_PER_SIZE // 2
    return [
        BlockCopies.of(order, slots[:half], blocks_per_slot=BLOCKS_PER_SLOT, group=0),
        BlockCopies.of(order, slots[half:], blocks_per_slot=BLOCKS_PER_SLOT, group=1),
    ]


def keys_of(tp_size: int) -> list[bytes]:
    """Keys of the slots that ranks of a size store, in slot order."""
    return [f"stored by {tp_size}, slot {i}".encode() for i in range(SLOTS_PER_SIZE)]


@contextmanager
def opened(path: Path, heads: int, tp_size: int) -> Iterator[tuple[Region, AsyncTier]]:
    """A fresh region and a file tier, as an engine of a tensor parallel size opens them."""
    layout = layout_of(heads)
    namespace = Namespace({"model": "tiny", **layout.fields(tp_size)})
    with Region.create(len(TP_SIZES) * SLOTS_PER_SIZE, layout.slot_bytes(tp_size)) as region:
        tier = open_tier(
            {"backend": "file", "path": str(path), "capacity": "64MiB"},
            primary=region.view(),
            slot_bytes=region.slot_bytes,
            namespace=namespace,
        )
        try:
            yield region, tier
        finally:
            tier.close(30)


def finish(tier: AsyncTier, job_id: int) -> None:
    """Wait for a job of the tier, which must succeed."""
    tier.flush()
    results = []
    eventually(lambda: results.extend(tier.get_finished()) or results, 30, f"job {job_id}")
    (result,) = results
    assert (result.job_id, result.success) == (job_id, True), result


def store_all(path: Path, heads: int, *, die: bool = False) -> None:
    """For each size, copy the model's tensors to slots by its ranks, and store them in the tier.

    With ``die`` the process ends once the last job was reported, without closing anything.
    """
    for tp_size in TP_SIZES:
        with opened(path, heads, tp_size) as (region, tier):
            tensors = model_tensors(heads, seed=tp_size)
            for rank in range(tp_size):
                caches = {n: pages_of_rank(n, t, tp_size, rank) for n, t in tensors.items()}
                with rank_of(layout_of(heads), region, tp_size, rank, caches) as transfer:
                    run(transfer, copies_from(0), JobKind.STORE)
            tier.submit_store(TransferJob(tp_size, keys_of(tp_size), range(SLOTS_PER_SIZE)))
            finish(tier, tp_size)
            if die and tp_size == TP_SIZES[-1]:
                os._exit(17)


def load_all_and_compare(path: Path, heads: int, tp_size: int) -> None:
    """Load in an engine of one size the blocks stored by each size; every rank finds its heads of the tensors."""
    with opened(path, heads, tp_size) as (region, tier):
        keys = list(itertools.chain.from_iterable(keys_of(stored_by) for stored_by in TP_SIZES))
        eventually(lambda: all(tier.lookup(key) is LookupResult.HIT for key in keys), 30, "keys of all sizes")
        tier.submit_load(TransferJob(1, keys, range(len(keys))))
        finish(tier, 1)
        for rank in range(tp_size):
            for index, stored_by in enumerate(TP_SIZES):
                tensors = model_tensors(heads, seed=stored_by)
                wanted = {n: pages_of_rank(n, t, tp_size, rank) for n, t in tensors.items()}
                caches = {n: torch.zeros_like(t) for n, t in wanted.items()}
                with rank_of(layout_of(heads), region, tp_size, rank, caches) as transfer:
                    run(transfer, copies_from(index * SLOTS_PER_SIZE), JobKind.LOAD)
                for name, pages in wanted.items():
                    where = f"{name} of {heads} heads, stored by {stored_by}, rank {rank} of {tp_size}"
                    assert torch.equal(caches[name], pages), where


@pytest.mark.parametrize("heads", [8, 4, 2])
def test_each_size_loads_blocks_of_each_size(tmp_path: Path, heads: int) -> None:
    """Stored by ranks of sizes 1, 2, 4 and 8, loaded after a restart of region and tier by each of these sizes."""
    store_all(tmp_path, heads)
    for tp_size in TP_SIZES:
        load_all_and_compare(tmp_path, heads, tp_size)


def test_blocks_of_a_dead_process_are_loaded(tmp_path: Path) -> None:
    """The storing process has ended without a shutdown, and this one loads the blocks left on the disk."""
    code = (
        "import sys, pathlib; from tests.transfer.test_cross_tp import store_all; "
        "store_all(pathlib.Path(sys.argv[1]), 2, die=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 17, done.stderr
    load_all_and_compare(tmp_path, 2, 4)


def test_slots_are_equal_for_every_size() -> None:
    """The same tensors leave the same bytes in the slots under every size."""
    heads = 4
    layout = layout_of(heads)
    tensors = model_tensors(heads, seed=0)
    found = []
    for tp_size in TP_SIZES:
        with Region.create(SLOTS_PER_SIZE, layout.slot_bytes(tp_size)) as region:
            for rank in range(tp_size):
                caches = {n: pages_of_rank(n, t, tp_size, rank) for n, t in tensors.items()}
                with rank_of(layout, region, tp_size, rank, caches) as transfer:
                    run(transfer, copies_from(0), JobKind.STORE)
            found.append(bytes(region.view()))
    assert len(set(found)) == 1
