"""The canonical layout is vLLM's own: vLLM derives the same runs from tensors as ``kvstore.primary`` computes.

A slot is thus the same whether vLLM's worker or ours filled it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import canonical_mapping
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from kvstore.primary import LayerLayout, LayerPlan, attention_layer, latent_layer

TOKENS, HEAD_SIZE, BLOCKS = 16, 8, 3
TP_SIZES = (1, 2, 4, 8)
DTYPE = torch.float16


def merged(fragments: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return local offset, canonical offset and length of copies, with neighbours merged."""
    found: list[tuple[int, int, int]] = []
    for local, canonical, length in sorted(fragments):
        if found and found[-1][0] + found[-1][2] == local and found[-1][1] + found[-1][2] == canonical:
            local, canonical, length = found[-1][0], found[-1][1], found.pop()[2] + length
        found.append((local, canonical, length))
    return found


def agree(plan: LayerPlan, spec: object, cache: torch.Tensor, tp_size: int, rank: int, heads: int) -> bool:
    """Return whether vLLM's mapping of a rank's page equals our plan."""
    context = canonical_mapping._RankContext(
        tp_size=tp_size, dcp_size=1, pcp_size=1, interleave=1, total_kv_heads=heads, rank=rank
    )
    theirs = canonical_mapping._layer_mapping(spec, cache, BLOCKS, context)
    copies = [
        (run.local_offset + i * run.local_stride, run.canonical_offset + i * run.canonical_stride, run.fragment_size)
        for run in theirs.runs
        for i in range(run.num_fragments)
    ]
    ours = merged(fragment for run in plan.runs for fragment in run.fragments())
    sizes = (theirs.canonical_page_size_bytes, theirs.local_page_size_bytes, theirs.num_writers, theirs.writer_index)
    return merged(copies) == ours and sizes == (plan.block_bytes, plan.local_bytes, plan.writers, plan.writer_index)


@pytest.mark.parametrize("kind", ["full", "window"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("order", ["nhd", "hnd"])
def test_attention(order: str, split: bool, kind: str) -> None:
    """Full and sliding-window attention, one to eight heads on one to eight ranks, every rank."""
    for heads, tp_size in itertools.product((1, 2, 4, 8), TP_SIZES):
        mine = max(1, heads // tp_size)
        more = {"sliding_window": 40} if kind == "window" else {}
        make = SlidingWindowSpec if kind == "window" else FullAttentionSpec
        spec = make(block_size=TOKENS, num_kv_heads=mine, head_size=HEAD_SIZE, dtype=DTYPE, **more)
        # Shapes are those of vLLM's backends; only the order of axes in memory differs.
        if split and order == "nhd":
            cache = torch.zeros(BLOCKS, 2, TOKENS, mine, HEAD_SIZE, dtype=DTYPE)
        elif split:
            cache = torch.zeros(BLOCKS, 2, mine, TOKENS, HEAD_SIZE, dtype=DTYPE).permute(0, 1, 3, 2, 4)
        elif order == "nhd":
            cache = torch.zeros(BLOCKS, TOKENS, mine, 2 * HEAD_SIZE, dtype=DTYPE).permute(0, 2, 1, 3)
        else:
            cache = torch.zeros(BLOCKS, mine, TOKENS, 2 * HEAD_SIZE, dtype=DTYPE)
        layer: LayerLayout = attention_layer(
            "l", kv_heads=heads, key_bytes=HEAD_SIZE * DTYPE.itemsize, block_tokens=TOKENS, order=order, split=split
        )
        for rank in range(tp_size):
            assert agree(layer.plan(tp_size, rank), spec, cache, tp_size, rank, heads), (heads, tp_size, rank)


def test_latent_attention() -> None:
    """Latent attention has one copy, and all ranks take turns."""
    spec = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=576, dtype=DTYPE)
    layer = latent_layer("l", token_bytes=576 * DTYPE.itemsize, block_tokens=TOKENS)
    cache = torch.zeros(BLOCKS, TOKENS, 576, dtype=DTYPE)
    for tp_size in TP_SIZES:
        for rank in range(tp_size):
            assert agree(layer.plan(tp_size, rank), spec, cache, tp_size, rank, 1), (tp_size, rank)
