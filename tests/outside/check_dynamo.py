"""Dynamo's simulated engine and kvstore's replay of one trace find the same share of tokens in the cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from dynamo._core import run_mocker_trace_replay

BLOCK_TOKENS = 512
BLOCK_MIB = 64  # At 128 KiB per token.


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated trace in Mooncake's format."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    replay("--save-trace", str(path), "--requests", "3000", "--seed", "7")
    return path


def replay(*arguments: str) -> list[dict[str, float]]:
    """Return the rows of a dry replay in CPU memory alone."""
    command = [sys.executable, "-m", "kvstore", "bench", "replay", *arguments, "--dry", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    rows: list[dict[str, float]] = json.loads(ended.stdout)["rows"]
    return rows


@pytest.mark.parametrize("blocks", [500, 2000, 8000, 50_000])
def test_the_same_share_of_tokens_is_found(trace: Path, blocks: int) -> None:
    """LRU memory of some blocks saves both the same tokens, within a point; Dynamo also caches generated tokens."""
    engine = {"num_gpu_blocks": blocks, "block_size": BLOCK_TOKENS}
    theirs = run_mocker_trace_replay([str(trace)], extra_engine_args={"engine": engine}, trace_block_size=BLOCK_TOKENS)
    (ours,) = replay(str(trace), "--policy", "lru", "--capacity", f"{blocks * BLOCK_MIB}MiB")
    share = theirs.summary["first_admission_prefix_cache_reused_ratio"]
    assert ours["hit_rate_tokens"] == pytest.approx(share, abs=0.01)
