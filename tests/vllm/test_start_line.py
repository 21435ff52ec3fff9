"""The line in the log when an engine has opened its tiers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore.vllm import KVStoreOffloadingSpec
from tests.vllm.harness import Driver, key_of


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
