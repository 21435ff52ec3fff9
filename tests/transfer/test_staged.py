"""Copies through a staging buffer and the order of streams, on the CPU: all of ``cuda`` except the GPU."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.primary import GroupLayout, KVLayout, Region, attention_layer
from kvstore.runtime.messages import JobKind
from kvstore.transfer import BlockCopies, cuda
from kvstore.transfer.cuda import CudaTransfer, StagingPlan, word_bytes_of
from tests.transfer.caches import check_batches, layouts, make_cache, random_bytes, run
from tests.transfer.streams import FakeCuda

STORE, LOAD = JobKind.STORE, JobKind.LOAD
PLAIN = KVLayout((GroupLayout((attention_layer("l", kv_heads=2, key_bytes=8, block_tokens=4),), 4),))


def plain(region: Region, streams: FakeCuda) -> CudaTransfer:
    """A transfer of one layer of zeros."""
    cache = torch.zeros(8, 128, dtype=torch.uint8)
    return CudaTransfer(PLAIN.plan(1, 0), {"l": cache}, region, pin=False, cuda=streams)


@settings(max_examples=200)
@given(
    layout=layouts(),
    tp_size=st.sampled_from((1, 2, 4, 8)),
    depth=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_bytes_are_those_of_copying_one_by_one(
    layout: KVLayout, tp_size: int, depth: int, seed: int, data: st.DataObject
) -> None:
    """The same bytes are copied and left alone as one by one, for any layout, rank, padding, blocks and staging."""
    rng = np.random.default_rng(seed)
    plan = layout.plan(tp_size, data.draw(st.integers(0, tp_size - 1), label="rank"))
    cache = make_cache(plan, 7, rng, padding=(0, 1, 24))
    tensors = {name: torch.from_numpy(pages) for name, pages in cache.items()}
    with Region.create(9, plan.slot_bytes) as region:
        region.rows()[:] = random_bytes(rng, 9, plan.slot_bytes)
        fake = FakeCuda()
        runtime = fake if data.draw(st.booleans(), label="strided") else None
        transfer = CudaTransfer(
            plan, tensors, region, pin=False, staging_bytes=depth * plan.slot_bytes, cuda=fake, runtime=runtime
        )
        check_batches(transfer, plan, lambda: cache, region, rng)
        transfer.close()
        del transfer


@pytest.mark.parametrize("order", ["nhd", "hnd"])
def test_tensors_in_the_order_that_engines_show_them(region: Region, order: str) -> None:
    """A bfloat16 tensor shown with tokens before heads is copied in its memory order, in both orders."""
    memory = torch.randn(8, *((4, 2) if order == "nhd" else (2, 4)), 16).to(torch.bfloat16)
    shown = memory if order == "nhd" else memory.transpose(1, 2)
    before = shown.clone()
    layer = attention_layer("l", kv_heads=2, key_bytes=16, block_tokens=4, order=order)
    plan = KVLayout((GroupLayout((layer,), 4),)).plan(1, 0)
    transfer = CudaTransfer(plan, {"l": shown}, region, pin=False, cuda=FakeCuda())
    run(transfer, [BlockCopies.of(range(8), range(8))], STORE)
    assert (region.rows()[2, :256] == memory[2].reshape(-1).view(torch.uint8).numpy()).all()
    memory.zero_()
    run(transfer, [BlockCopies.of([5], [3])], LOAD)
    assert torch.equal(shown[5], before[3])
    assert not shown[3].any()
    transfer.close()


def test_copies_wait_for_the_engines_stream(region: Region) -> None:
    """Each batch first waits for the compute stream, and its events enclose it on its own stream."""
    streams = FakeCuda()
    transfer = plain(region, streams)
    streams.log.clear()
    transfer.submit([BlockCopies.of([0], [0])], STORE)
    transfer.submit([BlockCopies.of([1], [1])], LOAD)
    assert [(what, on) for what, on, _ in streams.log] == [
        ("wait_stream", "own1"),
        ("record", "own1"),
        ("record", "own1"),
        ("wait_stream", "own2"),
        ("record", "own2"),
        ("record", "own2"),
    ]
    assert streams.log[0][2] == streams.log[3][2] == "compute"
    assert [r.seconds for r in transfer.poll()] == [0.002, 0.002]
    transfer.close()


@pytest.mark.parametrize(
    ("blocks", "slots", "waits"),
    [([1], [1], False), ([0], [1], True), ([1], [0], True)],
    ids=["apart", "block", "slot"],
)
@pytest.mark.parametrize("first", [STORE, LOAD])
def test_directions_wait_only_for_shared_blocks_or_slots(
    region: Region, first: JobKind, blocks: list[int], slots: list[int], waits: bool
) -> None:
    """A batch waits for an unfinished one of the other direction only if they share a block or a slot."""
    streams = FakeCuda(held=True)
    transfer = plain(region, streams)
    transfer.submit([BlockCopies.of([0], [0])], first)
    end = streams.log[-1][2]
    transfer.submit([BlockCopies.of(blocks, slots)], LOAD if first is STORE else STORE)
    assert [event for what, _, event in streams.log if what == "wait_event"] == ([end] if waits else [])
    streams.held = False
    assert transfer.wait(timeout_s=10)
    transfer.poll()
    transfer.submit([BlockCopies.of([0], [0])], first)
    assert sum(what == "wait_event" for what, _, _ in streams.log) == waits
    transfer.close()


def test_nothing_is_reported_before_its_event(region: Region) -> None:
    """While the device works there are no results, and wait times out; then each batch is reported once."""
    streams = FakeCuda(held=True)
    transfer = plain(region, streams)
    handles = [transfer.submit([BlockCopies.of([i], [i])], STORE) for i in range(3)]
    assert transfer.poll() == []
    assert not transfer.wait(0.01)
    streams.held = False
    assert transfer.wait(10)
    assert [r.handle for r in transfer.poll()] == handles
    assert transfer.poll() == []
    transfer.close()
    transfer.close()
    with pytest.raises(ValueError, match="closed"):
        transfer.submit([], STORE)


def test_device_error_fails_running_batches(region: Region) -> None:
    """After a device error no running batch counts as copied."""
    streams = FakeCuda()
    transfer = plain(region, streams)
    transfer.submit([BlockCopies.of([0], [0])], STORE)
    streams.broken = True
    (result,) = transfer.poll()
    assert (result.success, result.size_bytes) == (False, 0)
    assert "illegal memory access" in result.error
    transfer.close()


def test_a_failed_launch_is_reported_when_the_stream_has_ended(
    region: Region, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After running out of memory halfway the batch fails, but only once its launched copies have ended."""
    streams = FakeCuda(held=True)
    transfer = plain(region, streams)

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(transfer, "_move", no_memory)
    transfer.submit([BlockCopies.of([0], [0])], STORE)
    assert transfer.poll() == []
    streams.held = False
    (result,) = transfer.poll()
    assert (result.success, result.error) == (False, "CUDA out of memory")
    assert "failed" in caplog.text
    transfer.close()


def test_a_device_that_hangs_keeps_the_memory(
    region: Region, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Close stops waiting at its deadline, reports the batches as failed and leaves the region to the device."""
    monkeypatch.setattr(cuda, "_CLOSE_TIMEOUT_S", 0.01)
    streams = FakeCuda(held=True)
    transfer = plain(region, streams)
    handle = transfer.submit([BlockCopies.of([0], [0])], STORE)
    transfer.close()
    assert [(r.handle, r.success) for r in transfer.poll()] == [(handle, False)]
    assert "stays pinned" in caplog.text


@pytest.mark.parametrize("order", ["hnd", "nhd"])
@pytest.mark.parametrize("kind", [STORE, LOAD])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_a_slot_is_one_copy_of_the_ranks_own_bytes(order: str, kind: JobKind, tp_size: int) -> None:
    """Eighty layers: one launch moves any rank's share, and no bytes of other ranks cross the bus."""
    layers = tuple(attention_layer(f"l{i}", kv_heads=8, key_bytes=256, block_tokens=16, order=order) for i in range(80))
    plan = KVLayout((GroupLayout(layers, 16),)).plan(tp_size, tp_size - 1)
    ((slots, _),) = StagingPlan(plan, 8).parts(BlockCopies.of(range(4), range(4)), kind, 4)
    assert [len(pieces) for _, pieces in slots] == [1] * 4
    own = 4 * sum(layer.local_bytes for layer in plan.groups[0])
    assert sum(one.count * one.length for _, pieces in slots for one in pieces) * 8 == own


def test_pieces_of_a_slot_filled_in_part() -> None:
    """Ten layers, four blocks per slot, three in the last slot: one copy for a full slot, one per layer otherwise."""
    layers = tuple(attention_layer(f"l{i}", kv_heads=2, key_bytes=8, block_tokens=4) for i in range(10))
    layout = KVLayout((GroupLayout(layers, 4),), blocks_per_slot=4)
    copies = BlockCopies.of(range(7), [5, 2], blocks_per_slot=4)

    def counts(tp_size: int) -> list[tuple[int, int]]:
        plan = layout.plan(tp_size, 0)
        ((slots, _),) = StagingPlan(plan, 8).parts(copies, STORE, 8)
        assert [slot for slot, _ in slots] == [2, 5]
        return [(sum(one.count for one in pieces), len(pieces)) for _, pieces in slots]

    assert counts(1) == [(10, 1), (1, 1)]
    assert counts(2) == [(30, 10), (40, 1)]


def test_a_batch_of_a_rank_is_one_launch_a_slot(region: Region) -> None:
    """The transfer launches strided copies as such; piecewise copies are for runtimes without them."""
    streams = FakeCuda()
    cache = torch.zeros(8, 128, dtype=torch.uint8)
    layers = tuple(attention_layer(n, kv_heads=2, key_bytes=8, block_tokens=4) for n in "abcd")
    plan = KVLayout((GroupLayout(layers, 4),)).plan(2, 1)
    transfer = CudaTransfer(plan, dict.fromkeys("abcd", cache), region, pin=False, cuda=streams, runtime=streams)
    run(transfer, [BlockCopies.of(range(3), range(3))], STORE)
    assert streams.matrices == 3
    transfer.close()


def test_words_divide_everything() -> None:
    """The word is the longest that divides every offset, length and address."""
    layout = KVLayout((GroupLayout((attention_layer("l", kv_heads=2, key_bytes=6, block_tokens=2),), 2),))
    assert word_bytes_of(layout.plan(1, 0), [4096]) == 8
    assert word_bytes_of(layout.plan(2, 1), [4096]) == 8
    assert word_bytes_of(layout.plan(2, 1), [4096, 4]) == 4
    assert word_bytes_of(layout.plan(1, 0), [4097]) == 1


def test_caches_that_do_not_fit_are_refused(region: Region) -> None:
    """Missing, short or scattered tensors and tensors on two devices are errors at startup."""
    plan = KVLayout(
        (GroupLayout(tuple(attention_layer(n, kv_heads=2, key_bytes=8, block_tokens=4) for n in "ab"), 4),)
    ).plan(1, 0)
    good = torch.zeros(8, 128, dtype=torch.uint8)
    for other, match in (
        (None, "No tensor for layer 'b'"),
        (good[:, :64], "blocks of 64 bytes"),
        (torch.zeros(8, 256, dtype=torch.uint8)[:, ::2], "are not contiguous"),
        (good.to("meta"), "one device"),
    ):
        tensors = {"a": good} if other is None else {"a": good, "b": other}
        with pytest.raises(ConfigError, match=match):
            CudaTransfer(plan, tensors, region, pin=False, cuda=FakeCuda())
    with pytest.raises(ConfigError, match="too short"):
        CudaTransfer(plan, {"a": good, "b": good}, Region.wrap(bytearray(64), 8), pin=False, cuda=FakeCuda())


def test_without_a_device_the_region_is_not_pinned(region: Region, caplog: pytest.LogCaptureFixture) -> None:
    """Requested or not: copies are still made, and one warning gives the reason."""
    plan = PLAIN.plan(1, 0)
    with caplog.at_level(logging.WARNING):
        transfer = CudaTransfer(plan, {"l": torch.ones(8, 128, dtype=torch.uint8)}, region, cuda=FakeCuda())
    run(transfer, [BlockCopies.of([0], [0])], STORE)
    assert (region.rows()[0, :128] == 1).all()
    assert transfer.pinned is not None
    if not torch.cuda.is_available():
        assert not transfer.pinned.pinned
        assert "no CUDA device" in caplog.text
    transfer.close()
