"""The line in the log when an engine has opened its tiers."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore.vllm import KVStoreOffloadingSpec
from kvstore.vllm.connector import EngineContext
from kvstore.vllm.layout import useful_bytes, warn_of_waste
from tests.vllm.engine_config import engine
from tests.vllm.harness import Driver, key_of, offloading_config, parallel


@pytest.mark.parametrize("spec_class", [KVStoreOffloadingSpec, TieringOffloadingSpec])
def test_one_line_has_all_that_an_operator_compares(
    spec_class: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Path, capacity, blocks found, slots, huge pages and I/O method are in one line, under either manager."""
    tier = {"type": "file", "path": str(tmp_path), "capacity": "64MiB"}
    if spec_class is TieringOffloadingSpec:
        tier |= {"type": "KVStoreTier", "module_path": "kvstore.vllm", "backend": "file"}
    first = Driver([tier], spec_class=spec_class)
    first.store([key_of(number) for number in range(12)])
    first.close()
    with caplog.at_level(logging.INFO, logger="kvstore"):
        Driver([tier], spec_class=spec_class).close()
    lines = [text for text in caplog.messages if "namespace" in text]
    assert len(lines) == 1
    for part in (
        str(tmp_path),
        "capacity 64MiB",
        "12 blocks found",
        "8192 bytes and 16 tokens",
        "I/O by ",
        "MiB in huge pages",
    ):
        assert part in lines[0], lines[0]


def test_default_policy_is_in_the_start_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a restart nothing else names why blocks were not stored before it."""
    tier = {"type": "file", "path": str(tmp_path), "capacity": "64MiB"}
    with caplog.at_level(logging.INFO, logger="kvstore"):
        extra = offloading_config([tier]).extra_config | {"tiering": {"policy": {"min_uses": 2}}}
        Driver([tier], spec_class=KVStoreOffloadingSpec, extra_config=extra).close()
    assert any('with the default policy {"min_uses": 2}; namespace' in text for text in caplog.messages)


def test_rows_that_are_mostly_empty_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The start line has the bytes that each group of layers fills; the warning has a remedy."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float16)
    padded = dataclasses.replace(spec, page_size_padded=2 * spec.page_size_bytes)
    groups = [KVCacheGroupSpec(["l0"], padded), KVCacheGroupSpec(["l1"], spec)]
    known = EngineContext(engine(), SimpleNamespace(kv_cache_groups=groups))
    offloading = SimpleNamespace(
        replicated_layout=False, blocks_per_chunk=1, config=SimpleNamespace(parallel=parallel(world_size=2))
    )
    page = 2 * 16 * 64 * 2
    assert useful_bytes(offloading, known) == [2 * page, 2 * page]
    warn_of_waste([2 * page, 2 * page], 4 * page)
    assert not caplog.messages
    warn_of_waste([2 * page, 2 * page], 4 * page + 1)
    assert "groups of layers 0, 1 fill less than half" in caplog.text and "--disable-hybrid" in caplog.text
