"""Copies between a real GPU and the slots: ``make test-gpu PYTHON=…`` on a machine with CUDA takes minutes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvstore.primary import GroupLayout, KVLayout, Region, attention_layer, latent_layer
from kvstore.runtime.messages import JobKind
from kvstore.transfer import BlockCopies
from kvstore.transfer.cuda import CudaTransfer
from tests.transfer.caches import Bytes, check_batches, make_cache, random_bytes, run

STORE, LOAD = JobKind.STORE, JobKind.LOAD


def layout_of(order: str, split: bool, blocks_per_slot: int) -> KVLayout:
    """Two groups with attention and latent layers."""

    def attention(name: str) -> object:
        return attention_layer(name, kv_heads=4, key_bytes=64, block_tokens=16, order=order, split=split)

    latent = latent_layer("latent", token_bytes=96, block_tokens=16)
    groups = (GroupLayout((attention("a0"), attention("a1")), 16), GroupLayout((attention("b0"), latent), 16))
    return KVLayout(groups, blocks_per_slot)


def pages_of(on_gpu: dict[str, torch.Tensor]) -> dict[str, Bytes]:
    """Return a cache's bytes."""
    return {name: pages.cpu().numpy() for name, pages in on_gpu.items()}


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize(("order", "split"), [("nhd", False), ("nhd", True), ("hnd", False), ("hnd", True)])
@pytest.mark.parametrize("blocks_per_slot", [1, 4])
@pytest.mark.parametrize("tp_size", [1, 2, 8])
def test_bytes_are_those_of_copying_one_by_one(
    tp_size: int, blocks_per_slot: int, order: str, split: bool, pin: bool
) -> None:
    """Both directions, pinned and not, padded pages, several groups, staging shorter than the batch."""
    rng = np.random.default_rng(tp_size)
    plan = layout_of(order, split, blocks_per_slot).plan(tp_size, tp_size - 1)
    cache = make_cache(plan, 40, rng, padding=(0, 256))
    on_gpu = {}
    for name, pages in cache.items():
        padded = torch.zeros(pages.shape[0], pages.strides[0], dtype=torch.uint8, device="cuda")
        on_gpu[name] = padded[:, : pages.shape[1]]
        on_gpu[name].copy_(torch.from_numpy(pages.copy()))
    with Region.create(48, plan.slot_bytes) as region:
        region.rows()[:] = random_bytes(rng, *region.rows().shape)
        transfer = CudaTransfer(plan, on_gpu, region, pin=pin, staging_bytes=5 * plan.slot_bytes)
        assert (transfer.pinned is not None and transfer.pinned.pinned) is pin
        check_batches(transfer, plan, lambda: pages_of(on_gpu), region, rng, (STORE, LOAD, STORE))
        transfer.close()
        del transfer


@pytest.mark.parametrize("order", ["nhd", "hnd"])
@pytest.mark.parametrize("tp_size", [2, 8])
def test_a_ranks_share_of_large_slots(tp_size: int, order: str) -> None:
    """Strided copies both ways, by torch's loaded CUDA runtime: right bytes, and no others touched."""
    rng = np.random.default_rng(tp_size)
    layers = tuple(attention_layer(f"l{i}", kv_heads=8, key_bytes=256, block_tokens=16, order=order) for i in range(32))
    plan = KVLayout((GroupLayout(layers, 16),)).plan(tp_size, 1)
    cache = make_cache(plan, 8, rng, padding=(0,))
    on_gpu = {name: torch.from_numpy(pages.copy()).cuda() for name, pages in cache.items()}
    with Region.create(10, plan.slot_bytes) as region:
        region.rows()[:] = random_bytes(rng, *region.rows().shape)
        transfer = CudaTransfer(plan, on_gpu, region, staging_bytes=3 * plan.slot_bytes)
        assert transfer._runtime is not None
        check_batches(transfer, plan, lambda: pages_of(on_gpu), region, rng)
        transfer.close()
        del transfer


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_pinning_leaves_other_gpus_alone() -> None:
    """A transfer on the second GPU creates no context on the first, which is the current one."""
    layer = attention_layer("l", kv_heads=8, key_bytes=256, block_tokens=16)
    plan = KVLayout((GroupLayout((layer,), 16),)).plan(1, 0)
    cache = torch.zeros(4, plan.groups[0][0].local_bytes, dtype=torch.uint8, device="cuda:1")
    with Region.create(4, plan.slot_bytes) as region:
        transfer = CudaTransfer(plan, {"l": cache}, region)
        run(transfer, [BlockCopies.of(range(4), range(4))], STORE)
        assert torch.cuda.current_device() == 0
        transfer.close()
        del transfer


def test_store_copies_results_of_earlier_work_on_the_stream() -> None:
    """Work launched on the current stream before submit is in the slot, without an explicit wait."""
    layer = attention_layer("l", kv_heads=8, key_bytes=256, block_tokens=16)
    plan = KVLayout((GroupLayout((layer,), 16),)).plan(1, 0)
    cache = torch.zeros(16, plan.groups[0][0].local_bytes, dtype=torch.uint8, device="cuda")
    big = torch.randn(4096, 4096, device="cuda")
    with Region.create(16, plan.slot_bytes) as region:
        transfer = CudaTransfer(plan, {"l": cache}, region)
        for value in range(1, 20):
            for _ in range(5):
                big = torch.tanh(big @ big)
            cache.fill_(value)
            transfer.submit([BlockCopies.of(range(16), range(16))], STORE)
            assert transfer.wait(timeout_s=30)
            assert all(result.success for result in transfer.poll())
            assert (region.rows() == value).all()
        transfer.close()
        del transfer


def test_a_failed_registration_leaves_no_error_behind() -> None:
    """CUDA refuses to pin the same region twice; the next kernel runs without an error."""
    layer = attention_layer("l", kv_heads=8, key_bytes=256, block_tokens=16)
    plan = KVLayout((GroupLayout((layer,), 16),)).plan(1, 0)
    cache = torch.zeros(4, plan.groups[0][0].local_bytes, dtype=torch.uint8, device="cuda")
    with Region.create(4, plan.slot_bytes) as region:
        first = CudaTransfer(plan, {"l": cache}, region)
        second = CudaTransfer(plan, {"l": cache}, region)
        assert first.pinned.pinned
        assert not second.pinned.pinned
        assert torch.ones(3, device="cuda").sum().item() == 3
        run(second, [BlockCopies.of(range(4), range(4))], STORE)
        second.close()
        first.close()
        del first, second
