"""Engines of different vLLM block sizes share no blocks: their keys for the same tokens differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

TOKENS = list(range(256))


def hashes_of(block_size: int) -> list[bytes]:
    """Return vLLM's hashes of a prompt in blocks of a size."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(block_size, sha256)
    return list(Request("r", TOKENS, SamplingParams(max_tokens=1), None, block_hasher=hasher).block_hashes)


def test_hashes_of_different_granularity_never_meet() -> None:
    """A hash covers its parent's hash and its own tokens: the same tokens in other blocks have other hashes."""
    small, large = hashes_of(16), hashes_of(32)
    assert (len(small), len(large)) == (16, 8)
    assert small == hashes_of(16)
    assert not set(small) & set(large)


def test_a_model_of_one_group_is_hashed_by_its_block_size() -> None:
    """VLLM refuses any other granularity, so no setting makes the hashes equal."""
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(10, [], [KVCacheGroupSpec(["layer"], spec)])

    def granularity(unit: int | None) -> Any:
        cache = SimpleNamespace(block_size=32, prefix_match_unit=unit, enable_prefix_caching=True)
        parallel = SimpleNamespace(decode_context_parallel_size=1)
        engine = SimpleNamespace(cache_config=cache, parallel_config=parallel, kv_transfer_config=object())
        return resolve_kv_cache_block_sizes(config, engine)

    assert granularity(None) == granularity(32) == (32, 32)
    with pytest.raises(ValueError, match="Invalid prefix_match_unit"):
        granularity(16)
