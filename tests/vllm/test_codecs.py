"""Codecs under vLLM: the option reaches the tier, and vLLM's type names give the length of an element."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.config import ConfigError
from kvstore.tiers.codecs import element_bytes_of
from kvstore.vllm.connector import EngineContext
from kvstore.vllm.namespace import engine_namespace
from tests.vllm import harness
from tests.vllm.engine_config import engine


def numbers_of(key: bytes) -> Any:
    """Return a block of which a quarter is numbers, so that its record is a page shorter than a raw one."""
    values = np.random.default_rng(int.from_bytes(key[:4], "little")).normal(0, 0.7, harness.BLOCK_BYTES // 2)
    values[harness.BLOCK_BYTES // 8 :] = 0
    return values.astype(np.float16).view(np.uint8)


def test_blocks_are_encoded_under_vllm(tmp_path: Path) -> None:
    """A tier with a codec returns vLLM's blocks unchanged, even to an engine whose tier is set to raw."""
    where = {
        "type": "KVStoreTier",
        "module_path": "kvstore.vllm",
        "backend": "file",
        "path": str(tmp_path),
        "reset": "keep",
    }
    keys = [harness.key_of(i) for i in range(4)]
    for codec in ("byteplane+zstd:1", "raw"):
        driver = harness.Driver([{**where, "capacity": "64MiB", "codec": codec}], content_of=numbers_of)
        try:
            if codec != "raw":
                driver.store(keys)
                driver.forget_primary()
            assert driver.load(keys) == keys
            driver.settle()
            (tier,) = driver.tiers
            assert tier.tier.drain(20.0)
            counts = tier.tier.stats().codec
        finally:
            driver.close()
        assert counts["decoded_blocks"] == 4, counts
        assert counts["encoded_blocks"] == (4 if codec != "raw" else 0)


def test_a_wrong_codec_keeps_the_engine_from_starting(tmp_path: Path) -> None:
    """The error suggests the intended codec."""
    tier = {"type": "KVStoreTier", "module_path": "kvstore.vllm", "backend": "memory", "codec": "bytplane"}
    with pytest.raises(ConfigError, match="Did you mean 'byteplane'"):
        harness.Driver([tier])


@pytest.mark.parametrize(
    ("kv_dtype", "size"), [("auto", 2), ("bfloat16", 2), ("fp8", 1), ("fp8_e5m2", 1), ("fp8_ds_mla", 1), ("float16", 2)]
)
def test_types_of_vllm_are_known(kv_dtype: str, size: int) -> None:
    """The namespace of an engine gives the length of an element of its KV cache."""
    spec = type("Spec", (), {"config": harness.offloading_config([])})()
    namespace = engine_namespace(spec, 4096, EngineContext(engine(**{"cache_config.cache_dtype": kv_dtype})))
    assert element_bytes_of(namespace.document()["fields"]) == size
