"""``kvstore size`` counts the same blocks as vLLM, for models with all kinds of layers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

from kvstore.cli.bench.size import layers_of, pages_of
from kvstore.errors import ConfigError
from tests.cli.cli import report_of
from tests.cli.in_process import run_here

_MEMORY = 40 << 30

_DENSE = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "torch_dtype": "float16"}
_GQA = {**_DENSE, "num_key_value_heads": 8, "dtype": "bfloat16"}
_MLA = {**_GQA, "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
_WINDOW = {**_GQA, "num_hidden_layers": 26, "head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6}
_ALTERNATING = {**_GQA, "num_hidden_layers": 36, "head_dim": 64, "sliding_window": 128}
_ALTERNATING["layer_types"] = ["sliding_attention", "full_attention"] * 18
_MAMBA = {
    **_GQA,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    "hidden_size": 4096,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
}


def _full(heads: int, size: int = 128, dtype: Any = torch.bfloat16, block: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=size, dtype=dtype)


def _window(heads: int, size: int, window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=16, num_kv_heads=heads, head_size=size, dtype=torch.bfloat16, sliding_window=window
    )


def _mla() -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


def _hybrid() -> list[Any]:
    # As in vLLM, a page of attention is at least as long as a state, and the state's page is padded to it.
    shapes = ((3, 128 * 64 + 2 * 128), (128, 64, 128))
    state = sum(2 * torch.Size(shape).numel() for shape in shapes)
    block = -(-state // (16 * 4096)) * 16
    page = _full(8, block=block).page_size_bytes
    types = (torch.bfloat16, torch.bfloat16)
    mamba = MambaSpec(block_size=block, shapes=shapes, dtypes=types, page_size_padded=page)
    return [mamba if kind == "mamba" else _full(8, block=block) for kind in _MAMBA["layer_types"]]


_CASES: dict[str, tuple[dict[str, Any], str, list[Any]]] = {
    "dense": (_DENSE, "auto", [_full(32, dtype=torch.float16)] * 32),
    "grouped queries": (_GQA, "auto", [_full(8)] * 32),
    "fp8": (_GQA, "fp8", [_full(8, dtype=torch.uint8)] * 32),
    "latent attention": (_MLA, "auto", [_mla()] * 61),
    "one full layer in six": (
        _WINDOW, "auto",
        [_full(8, 256) if (layer + 1) % 6 == 0 else _window(8, 256, 512) for layer in range(26)],
    ),
    "alternating windows": (
        _ALTERNATING, "auto", [_window(8, 64, 128), _full(8, 64)] * 18,
    ),
    "mamba hybrid": (_MAMBA, "auto", _hybrid()),
}  # fmt: skip


@pytest.mark.parametrize("name", _CASES)
def test_blocks_are_as_many_as_vllm_counts(name: str) -> None:
    """Within 1 % of the blocks that vLLM allocates in the same memory; groups of hybrids also match vLLM's."""
    config, kv_dtype, specs = _CASES[name]
    pages = pages_of(layers_of(config, kv_dtype=kv_dtype))
    with mock.patch.dict(os.environ):  # vLLM changes variables.
        engine = VllmConfig()
    engine.cache_config.kv_cache_layout = "NHD"
    groups = kv_cache_utils.get_kv_cache_groups(engine, {f"layer.{at}": spec for at, spec in enumerate(specs)})
    theirs = kv_cache_utils.get_kv_cache_config_from_groups(engine, groups, _MEMORY)
    assert _MEMORY // pages.block_bytes == pytest.approx(theirs.num_blocks, rel=0.01)
    assert (pages.groups, pages.block_tokens) == (len(groups), specs[0].block_size)
    filled = [
        sum(specs[int(layer.rpartition(".")[2])].page_size_bytes for layer in group.layer_names) for group in groups
    ]
    if name != "mamba hybrid":  # vLLM counts a state with its padding.
        assert sorted(pages.useful_bytes) == sorted(filled)


def test_heads_are_repeated_where_there_are_more_ranks() -> None:
    """Eight KV heads on sixteen ranks take as much as sixteen; a latent is stored once."""
    assert [e.token_bytes for e in layers_of(_GQA, ranks=16)] == [2 * 16 * 128 * 2]
    assert layers_of(_MLA, ranks=16) == layers_of(_MLA)


def test_size_reports_bytes_capacity_and_times(tmp_path: Path) -> None:
    """The report has bytes per token, tokens in a capacity, and times of tiers."""
    (tmp_path / "config.json").write_text(json.dumps(_GQA))
    more = ("--capacity", "1TiB", "--rates", "disk=3GiB,redis=1GiB", "--prompt", "10000")
    report = report_of(run_here("size", "--model", str(tmp_path), *more, "--json"))
    assert (report["token_bytes"], report["capacity_tokens"]) == (128 << 10, (1 << 40) // (128 << 10))
    assert [tier["load_s"] for tier in report["tiers"]] == pytest.approx([10000 / 3 / 8192, 10000 / 8192])
    shown = run_here("size", "--model", str(tmp_path), *more).stdout
    assert "128 KiB a token" in shown
    assert "8,388,608 tokens" in shown


def test_a_capacity_for_a_hit_rate(tmp_path: Path) -> None:
    """The report has the smallest capacity that reaches the rate in a replay, if any, and the rates of all."""
    (tmp_path / "config.json").write_text(json.dumps(_GQA))
    trace = tmp_path / "trace.jsonl"
    assert run_here("bench", "replay", "--dry", "--requests", "60", "--save-trace", str(trace)).returncode == 0
    command = ("size", "--model", str(tmp_path), "--trace", str(trace), "--json", "--hit-rate")
    low, high = (report_of(run_here(*command, rate)) for rate in ("0.05", "1"))
    assert low["hit_rate"] >= 0.05
    assert low["hit_capacity_bytes"] < high["hit_capacity_bytes"]
    assert high["hit_rate"] < 1
    rates = [(row["hit_rate"], row["lru"], row["optimum"]) for row in low["hit_rates"]]
    assert len(rates) == 7 and len(set(rates[-1])) == 1 and all(most >= max(others) for *others, most in rates)
    assert "no capacity reaches 100%" in run_here(*command[:-2], "--hit-rate", "1").stdout


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"dtype": "int3"}, "data type"),
        ({"layer_types": ["quantum"]}, "quantum"),
        ({"layer_types": ["mamba"]}, "state"),
    ],
)
def test_unknown_property_is_an_error(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    """An unknown property is one line and status 2; no value is guessed."""
    (tmp_path / "config.json").write_text(json.dumps({**_GQA, **change}))
    done = run_here("size", "--model", str(tmp_path))
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    assert run_here("size", "--model", str(tmp_path / "none")).returncode == 2


def test_the_type_of_the_cache_suffices() -> None:
    """With ``--kv-dtype``, the data type of the model may be unknown, because only states depend on it."""
    unknown = {**_GQA, "dtype": "float8_e4m3fn"}
    assert layers_of(unknown, kv_dtype="fp8") == layers_of(_GQA, kv_dtype="fp8")
    with pytest.raises(ConfigError, match="Give --kv-dtype"):
        layers_of(unknown)
    with pytest.raises(ConfigError, match="Run an engine once"):
        layers_of({**_MAMBA, "dtype": "float8_e4m3fn"}, kv_dtype="fp8")


def test_groups_that_leave_half_of_a_block_empty_are_a_warning(tmp_path: Path) -> None:
    """Groups of three layers in blocks of four are reported, and states in blocks of many more tokens are a warning."""
    kinds = ["sliding_attention"] * 9 + ["full_attention"] * 4
    (tmp_path / "config.json").write_text(json.dumps({**_ALTERNATING, "num_hidden_layers": 13, "layer_types": kinds}))
    page = 2 * 8 * 64 * 2 * 16
    report = report_of(run_here("size", "--model", str(tmp_path), "--json"))
    assert sorted(report["useful_bytes"]) == [3 * page, 3 * page, 3 * page, 4 * page]
    assert report["block_bytes"] == 4 * page
    shown = run_here("size", "--model", str(tmp_path)).stdout
    assert "groups of layers fill" in shown and "warning" not in shown
    (tmp_path / "config.json").write_text(json.dumps({**_MAMBA, "num_hidden_layers": 40}))
    assert "warning" not in run_here("size", "--model", str(tmp_path)).stdout
    shown = run_here("size", "--model", str(tmp_path), "--block-tokens", "8192").stdout
    assert "warning: some groups fill less than half" in shown
