"""Copies in host memory: the same bytes as one-by-one copies, each batch reported once."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.primary import PAGE_BYTES, GroupLayout, KVLayout, Region, attention_layer, latent_layer
from kvstore.runtime.messages import JobKind
from kvstore.transfer import BlockCopies, HostTransfer
from tests.transfer.caches import check_batches, expected, layouts, make_cache, random_bytes, random_copies, run

TP_SIZES = (1, 2, 4, 8)
STORE, LOAD = JobKind.STORE, JobKind.LOAD

PLAIN = KVLayout((GroupLayout((attention_layer("l", kv_heads=2, key_bytes=8, block_tokens=4),), 4),))


@settings(max_examples=300)
@given(layout=layouts(), tp_size=st.sampled_from(TP_SIZES), seed=st.integers(0, 2**32), data=st.data())
def test_bytes_are_those_of_copying_one_by_one(layout: KVLayout, tp_size: int, seed: int, data: st.DataObject) -> None:
    """The same bytes are copied and left alone as one by one, for any layout, rank, padding and blocks, both ways."""
    rng = np.random.default_rng(seed)
    plan = layout.plan(tp_size, data.draw(st.integers(0, tp_size - 1), label="rank"))
    cache = make_cache(plan, 7, rng, padding=(0, 1, 24))
    with Region.create(9, plan.slot_bytes) as region:
        region.rows()[:] = random_bytes(rng, 9, plan.slot_bytes)
        transfer = HostTransfer(plan, cache, region)
        check_batches(transfer, plan, lambda: cache, region, rng)
        transfer.close()
        del transfer


@pytest.mark.parametrize("order", ["nhd", "hnd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_of_torch(order: str, dtype: torch.dtype) -> None:
    """A bfloat16 tensor with heads before or after its tokens is copied in its memory order."""
    blocks, tokens, heads, size = 6, 4, 2, 8
    memory = torch.randn(blocks, *((tokens, heads) if order == "nhd" else (heads, tokens)), 2 * size).to(dtype)
    # As engines show it: tokens before heads, in any memory order.
    shown = memory if order == "nhd" else memory.transpose(1, 2)
    before = shown.clone()
    item = dtype.itemsize
    layer = attention_layer("l", kv_heads=heads, key_bytes=size * item, block_tokens=tokens, order=order)
    plan = KVLayout((GroupLayout((layer,), tokens),)).plan(1, 0)
    view = shown.view(torch.uint8).numpy() if order == "nhd" else shown.transpose(1, 2).view(torch.uint8).numpy()
    with Region.create(6, plan.slot_bytes) as region:
        transfer = HostTransfer(plan, {"l": view if order == "nhd" else view.transpose(0, 2, 1, 3)}, region)
        run(transfer, [BlockCopies.of(range(6), range(6))], STORE)
        memory.zero_()
        run(transfer, [BlockCopies.of([5, 0, 3], [3, 0, 5])], LOAD)
        transfer.close()
        del transfer
    assert torch.equal(shown[5], before[3])
    assert torch.equal(shown[3], before[5])
    assert torch.equal(shown[0], before[0])
    assert not shown[1].any()


def test_batches_have_effect_in_order(region: Region) -> None:
    """Batches submitted at once have the effect of sequential ones, and are reported once, in order."""
    plan = PLAIN.plan(2, 1)
    rng = np.random.default_rng(3)
    cache, rows = make_cache(plan, 8, rng), region.rows()
    want_cache, want_rows = {name: pages.copy() for name, pages in cache.items()}, rows.copy()
    transfer = HostTransfer(plan, cache, region)
    handles = []
    for _ in range(200):
        kind = STORE if rng.random() < 0.5 else LOAD
        copies = random_copies(plan, 8, 8, rng)
        handles.append(transfer.submit(copies, kind))
        want_cache, want_rows, _ = expected(plan, want_cache, want_rows, copies, kind)
    assert transfer.wait(timeout_s=60)
    assert [r.handle for r in transfer.poll()] == handles
    assert transfer.poll() == []
    assert (rows == want_rows).all()
    assert (cache["l"] == want_cache["l"]).all()
    transfer.close()


def test_a_closed_transfer_refuses_batches(region: Region) -> None:
    """Results stay, and the memory is released."""
    plan = PLAIN.plan(1, 0)
    transfer = HostTransfer(plan, make_cache(plan, 8, np.random.default_rng(5)), region)
    handle = transfer.submit([BlockCopies.of([1], [1])], STORE)
    transfer.close()
    assert [result.handle for result in transfer.poll()] == [handle]
    with pytest.raises(ValueError, match="closed"):
        transfer.submit([], STORE)


def test_calls_do_not_grow_with_blocks() -> None:
    """Eight times the blocks need as many calls of Python and C functions."""
    layers = tuple(attention_layer(f"l{i}", kv_heads=2, key_bytes=1024, block_tokens=8) for i in range(4))
    plan = KVLayout((GroupLayout(layers, 8),)).plan(1, 0)

    def calls(transfer: HostTransfer, count: int) -> Counter[str]:
        counted: Counter[str] = Counter()

        def profile(_frame: Any, event: str, _argument: Any) -> None:
            counted[event] += 1

        copies = [BlockCopies.of(range(count), range(count))]
        gc.disable()  # Its callbacks would be counted, too.
        sys.setprofile(profile)
        try:
            transfer.submit(copies, STORE)
        finally:
            sys.setprofile(None)
            gc.enable()
        assert transfer.poll()[0].size_bytes == count * 4 * 32768
        return counted

    with Region.create(64, plan.slot_bytes) as region:
        cache = make_cache(plan, 64, np.random.default_rng(7))
        transfer = HostTransfer(plan, cache, region)
        calls(transfer, 8)
        assert calls(transfer, 64) == calls(transfer, 8)
        transfer.close()
        del transfer


def test_ranks_that_hold_the_same_bytes_take_turns() -> None:
    """Each of eight ranks with one latent vector stores an eighth of the slots; together they store all."""
    layout = KVLayout((GroupLayout((latent_layer("l", token_bytes=16, block_tokens=4),), 4),))
    pages = random_bytes(np.random.default_rng(8), 16, 64)
    with Region.create(16, layout.slot_bytes()) as region:
        for rank in range(8):
            transfer = HostTransfer(layout.plan(8, rank), {"l": pages.copy()}, region)
            assert run(transfer, [BlockCopies.of(range(16), range(16))], STORE) == 2 * 64
            transfer.close()
            del transfer
        assert (region.rows()[:, :64] == pages).all()


@pytest.mark.parametrize(
    ("copies", "kind", "match"),
    [
        (BlockCopies.of([8], [0]), STORE, "Block 8 is out of range: there are 8"),
        (BlockCopies.of([-1], [0]), LOAD, "Block -1"),
        (BlockCopies.of([0], [8]), STORE, "Slot 8"),
        (BlockCopies.of([0], [-8]), LOAD, "Slot -8"),
        (BlockCopies.of([0], [0], group=1), STORE, "Group 1 of 1"),
        (BlockCopies.of([0, 1], [2, 2]), STORE, "A place of slot 2 is a target twice"),
        (BlockCopies.of([3, 3], [0, 1]), LOAD, "Block 3 is a target twice"),
        (BlockCopies(0, np.array([1, 2]), np.array([0]), np.array([0])), LOAD, "not one each"),
        (BlockCopies(0, np.array([0]), np.array([0]), np.array([1])), STORE, "Place 1"),
    ],
)
def test_wrong_numbers_are_refused_before_anything_is_copied(
    region: Region, copies: BlockCopies, kind: JobKind, match: str
) -> None:
    """Numbers out of range (numpy would take -1 as the last row) and duplicate targets are caller errors."""
    plan = PLAIN.plan(1, 0)
    cache = make_cache(plan, 8, np.random.default_rng(9))
    before, rows = cache["l"].copy(), region.rows().copy()
    transfer = HostTransfer(plan, cache, region)
    with pytest.raises(ValueError, match=match):
        transfer.submit([copies], kind)
    assert transfer.wait(timeout_s=10)
    assert transfer.poll() == []
    assert (cache["l"] == before).all()
    assert (region.rows() == rows).all()
    transfer.close()


def test_one_block_may_be_stored_twice_and_one_slot_loaded_twice(region: Region) -> None:
    """Sources may repeat; targets must not."""
    plan = PLAIN.plan(1, 0)
    cache = make_cache(plan, 8, np.random.default_rng(10))
    transfer = HostTransfer(plan, cache, region)
    run(transfer, [BlockCopies.of([3, 3], [0, 1])], STORE)
    run(transfer, [BlockCopies.of([4, 5], [1, 1])], LOAD)
    assert (cache["l"][4] == cache["l"][3]).all()
    assert (cache["l"][5] == cache["l"][3]).all()
    transfer.close()


def test_consecutive_blocks_fill_slots_from_a_place_on() -> None:
    """Blocks 5 to 9 of a request, four per slot: the first is at place 1 of its slot."""
    copies = BlockCopies.of([10, 11, 12, 13, 14], [7, 3], blocks_per_slot=4, first=5)
    assert copies.slots.tolist() == [7, 7, 7, 3, 3]
    assert copies.places.tolist() == [1, 2, 3, 0, 1]
    assert BlockCopies.of([], [], blocks_per_slot=4).blocks.tolist() == []
    with pytest.raises(ValueError, match="fill 2 slots, not 1"):
        BlockCopies.of([1, 2], [0], blocks_per_slot=2, first=1)


def test_caches_that_do_not_fit_are_refused(region: Region) -> None:
    """Missing, short, scattered or read-only arrays and short slots are errors at startup."""
    plan = PLAIN.plan(1, 0)
    read_only = np.zeros((8, 128), np.uint8)
    read_only.flags.writeable = False
    for tensors, match in (
        ({}, "No tensor for layer 'l'"),
        ({"l": np.zeros((8, 127), np.uint8)}, "blocks of 127 bytes"),
        ({"l": np.zeros((8, 256), np.uint8)[:, ::2]}, "are not contiguous"),
        ({"l": np.zeros((8, 2, 128), np.uint8)[:, :, :64]}, "are not contiguous"),
        ({"l": read_only}, "can't be written"),
    ):
        with pytest.raises(ConfigError, match=match):
            HostTransfer(plan, tensors, region)
    wide = KVLayout((GroupLayout((latent_layer("l", token_bytes=PAGE_BYTES, block_tokens=2),), 2),)).plan(1, 0)
    with pytest.raises(ConfigError, match="too short"):
        HostTransfer(wide, {"l": np.zeros((8, 2 * PAGE_BYTES), np.uint8)}, region)
