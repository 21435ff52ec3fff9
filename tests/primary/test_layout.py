"""The canonical layout: the ranks' copies tile the page, and match those derived from the arrays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.namespace import Namespace
from kvstore.primary import (
    PAGE_BYTES,
    GroupLayout,
    KVLayout,
    LayerLayout,
    attention_layer,
    latent_layer,
    opaque_layer,
)

TP_SIZES = (1, 2, 4, 8)
HEADS = (1, 2, 4, 8)
ORDERS = ("nhd", "hnd")
SPLITS = (False, True)


def layers_strategy() -> st.SearchStrategy[LayerLayout]:
    """Layers of every kind, small."""
    attention = st.builds(
        attention_layer,
        st.just("layer"),
        kv_heads=st.sampled_from(HEADS),
        key_bytes=st.integers(1, 6),
        value_bytes=st.none() | st.integers(1, 6),
        block_tokens=st.integers(1, 5),
        order=st.sampled_from(ORDERS),
        split=st.booleans(),
    )
    latent = st.builds(latent_layer, st.just("layer"), token_bytes=st.integers(1, 7), block_tokens=st.integers(1, 5))
    return attention | latent | st.builds(opaque_layer, st.just("layer"), page_bytes=st.integers(1, 9))


def named(layers: list[LayerLayout]) -> tuple[LayerLayout, ...]:
    """Return the same layers with unique names."""
    return tuple(LayerLayout(f"l{i}", one.kind, one.kv_heads, one.parts) for i, one in enumerate(layers))


def tiles(intervals: list[tuple[int, int]], size: int) -> bool:
    """Return whether (begin, length) intervals cover ``size`` bytes, each byte once."""
    at = 0
    for begin, length in sorted(intervals):
        if begin != at or length < 1:
            return False
        at += length
    return at == size


@settings(deadline=None)
@given(layer=layers_strategy(), tp_size=st.sampled_from(TP_SIZES))
def test_runs_tile_both_pages(layer: LayerLayout, tp_size: int) -> None:
    """A rank's runs cover its page exactly, and in any turn the writers cover the canonical page exactly."""
    plans = [layer.plan(tp_size, rank) for rank in range(tp_size)]
    for plan in plans:
        fragments = [f for run in plan.runs for f in run.fragments()]
        assert plan.local_bytes == layer.local_bytes(tp_size)
        assert tiles([(local, length) for local, _, length in fragments], plan.local_bytes)
        assert sum(run.size_bytes for run in plan.runs) == plan.local_bytes
    for turn in range(plans[0].writers):
        written = [
            (canonical, length)
            for plan in plans
            if turn % plan.writers == plan.writer_index
            for run in plan.runs
            for _, canonical, length in run.fragments()
        ]
        assert tiles(written, layer.canonical_bytes(tp_size))


@pytest.mark.parametrize(("order", "split"), list(itertools.product(ORDERS, SPLITS)))
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tp_size", TP_SIZES)
def test_runs_equal_slices_of_the_page(tp_size: int, heads: int, order: str, split: bool) -> None:
    """A rank's runs copy exactly its page, cut out of a page of all heads by numpy's own indexing."""
    tokens, key, value = 3, 4, 4
    layer = attention_layer("l", kv_heads=heads, key_bytes=key, block_tokens=tokens, order=order, split=split)
    values = np.arange(tokens * heads * (key + value), dtype=np.uint16).reshape(tokens, heads, key + value)

    def page(first: int, count: int) -> np.ndarray:
        """The page of some heads: axes token, head and byte in the page's order."""
        mine = values[:, first : first + count]
        halves = [mine[..., :key], mine[..., key:]] if split else [mine]
        return np.concatenate([(h if order == "nhd" else h.transpose(1, 0, 2)).ravel() for h in halves])

    canonical = page(0, heads)
    local_heads = max(1, heads // tp_size)
    for rank in range(tp_size):
        # Heads are assigned in order; with more ranks than heads, neighbouring ranks have the same one.
        expected = page(rank * heads // tp_size, local_heads)
        found = np.zeros_like(expected)
        for run in layer.plan(tp_size, rank).runs:
            for local, at, length in run.fragments():
                found[local : local + length] = canonical[at : at + length]
        assert (found == expected).all()


def test_one_rank_copies_one_run() -> None:
    """With size 1 a page is copied as a whole, and with heads outermost a rank's part is one run."""
    for order, split in itertools.product(ORDERS, SPLITS):
        layer = attention_layer("l", kv_heads=8, key_bytes=2, block_tokens=4, order=order, split=split)
        assert len(layer.plan(1, 0).runs) == 1
    (run,) = attention_layer("l", kv_heads=8, key_bytes=2, block_tokens=4, order="hnd").plan(4, 1).runs
    assert (run.local_offset, run.canonical_offset, run.length, run.count) == (0, 32, 32, 1)
    (run,) = attention_layer("l", kv_heads=8, key_bytes=2, block_tokens=4, order="nhd").plan(4, 1).runs
    assert (run.canonical_offset, run.length, run.count, run.local_stride, run.canonical_stride) == (8, 8, 4, 8, 32)


def test_replicated_heads_take_turns() -> None:
    """Two heads on eight ranks: four ranks share each, and each of the four has its own turn."""
    plans = [attention_layer("l", kv_heads=2, key_bytes=2, block_tokens=4).plan(8, rank) for rank in range(8)]
    assert [plan.writer_index for plan in plans] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert {plan.writers for plan in plans} == {4}
    assert [plan.runs[0].canonical_offset for plan in plans] == [0] * 4 + [16] * 4


def test_latent_attention_is_kept_once() -> None:
    """An MLA model's slot has the same length for eight ranks as for one, and every rank loads all of it."""
    layout = KVLayout((GroupLayout((latent_layer("l", token_bytes=1152, block_tokens=16),), 16),))
    assert layout.payload_bytes(0, 8) == layout.payload_bytes(0, 1) == 16 * 1152
    for rank in range(8):
        (plan,) = layout.plan(8, rank).groups[0]
        assert (plan.local_bytes, plan.writers, plan.writer_index) == (16 * 1152, 8, rank)


@settings(deadline=None)
@given(
    groups=st.lists(st.lists(layers_strategy(), min_size=1, max_size=4), min_size=1, max_size=3),
    blocks_per_slot=st.integers(1, 4),
    tp_size=st.sampled_from(TP_SIZES),
)
def test_blocks_of_a_slot_do_not_overlap(groups: list[list[LayerLayout]], blocks_per_slot: int, tp_size: int) -> None:
    """The pages of a group's layers and blocks fill the payload exactly, and the slot holds the longest payload."""
    layout = KVLayout(tuple(GroupLayout(named(layers), 16) for layers in groups), blocks_per_slot)
    plan = layout.plan(tp_size, tp_size - 1)
    assert plan.slot_bytes == layout.slot_bytes(tp_size)
    assert plan.slot_bytes % PAGE_BYTES == 0
    for index, layers in enumerate(plan.groups):
        pages = [
            (one.slot_offset + p * one.block_bytes, one.block_bytes) for one in layers for p in range(blocks_per_slot)
        ]
        assert tiles(pages, layout.payload_bytes(index, tp_size))
        assert layout.payload_bytes(index, tp_size) <= plan.slot_bytes
    if layout.portable:
        assert layout.slot_bytes(tp_size) == layout.slot_bytes(1)


def test_pipeline_stages_have_their_layers_where_the_whole_has_them() -> None:
    """A rank with some of the layers copies them to the same places as in a slot of all layers."""
    layers = named([attention_layer("l", kv_heads=4, key_bytes=2, block_tokens=4) for _ in range(4)])
    layout = KVLayout((GroupLayout(layers, 4),), blocks_per_slot=2)
    whole = layout.plan(2, 1).groups[0]
    assert layout.plan(2, 1, ["l0", "l1"]).groups[0] + layout.plan(2, 1, ["l2", "l3"]).groups[0] == whole


@settings(deadline=None)
@given(prefix=st.integers(0, 60), tokens=st.integers(1, 8), window=st.integers(1, 40))
def test_window_needs_the_blocks_attended_by_the_next_token(prefix: int, tokens: int, window: int) -> None:
    """The blocks needed after a prefix are exactly those with a position that the next token attends to."""
    layer = attention_layer("l", kv_heads=1, key_bytes=1, block_tokens=tokens)
    seen = {at // tokens for at in range(prefix) if at > prefix - window}
    assert set(GroupLayout((layer,), tokens, window).needed(prefix)) == seen
    assert list(GroupLayout((layer,), tokens).needed(prefix)) == list(range(-(-prefix // tokens)))


def test_layouts_of_different_bytes_have_different_fields() -> None:
    """Layouts of different bytes have different namespaces; a portable one has the same one for every size."""
    kinds = [
        attention_layer("l", kv_heads=2, key_bytes=4, block_tokens=2, order=order, split=split)
        for order, split in itertools.product(ORDERS, SPLITS)
    ]
    kinds += [latent_layer("l", token_bytes=16, block_tokens=2), opaque_layer("l", page_bytes=32)]
    layouts = [KVLayout((GroupLayout((kind,), 2),), n) for kind in kinds for n in (1, 2)]
    assert len({Namespace(layout.fields()).digest for layout in layouts}) == len(layouts)
    for layout in layouts:
        opaque = layout.groups[0].layers[0].kind == "opaque"
        assert layout.portable is not opaque
        assert (layout.fields(1) == layout.fields(4)) is not opaque


@pytest.mark.parametrize(("heads", "tp_size"), [(8, 3), (6, 4), (4, 6), (2, 0)])
def test_heads_that_do_not_divide_are_refused(heads: int, tp_size: int) -> None:
    """The error for an uneven split has both numbers; an opaque layer supports any number of ranks."""
    layer = attention_layer("layer.7", kv_heads=heads, key_bytes=2, block_tokens=4)
    with pytest.raises(ConfigError, match=r"layer\.7"):
        layer.plan(tp_size, 0)
    assert opaque_layer("l", page_bytes=10).plan(3, 2).runs[0].canonical_offset == 20


def test_shapes_that_mean_nothing_are_refused() -> None:
    """Empty parts, no groups, duplicate names and ranks beyond the size are errors at startup."""
    layer = attention_layer("l", kv_heads=2, key_bytes=2, block_tokens=4)
    for make in (
        lambda: attention_layer("l", kv_heads=0, key_bytes=2, block_tokens=4),
        lambda: attention_layer("l", kv_heads=2, key_bytes=0, block_tokens=4),
        lambda: latent_layer("l", token_bytes=2, block_tokens=0),
        lambda: GroupLayout((), 4),
        lambda: GroupLayout((layer,), 4, 0),
        lambda: KVLayout(()),
        lambda: KVLayout((GroupLayout((layer, layer), 4),)),
        lambda: KVLayout((GroupLayout((layer,), 4),), 0),
        lambda: KVLayout((GroupLayout((layer,), 4),)).plan(2, 2),
    ):
        with pytest.raises(ConfigError):
            make()
