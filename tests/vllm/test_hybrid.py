"""Real engines with a sliding-window model: several layer groups, some of which need only a prompt's end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import Engine, Start, full_blocks, managed, prompt
from tests.vllm.models import make_tiny_hybrid

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROW_BYTES = 16384
"""A block of a group of the model: 1 layer, key and value of 2 heads of 32 float32, 32 tokens."""
LLM: dict[str, Any] = {
    "num_gpu_blocks_override": 80,
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
}
"""Prompts are split, and the blocks of all requests don't fit."""
TIGHT_LLM = {**LLM, "num_gpu_blocks_override": 72, "max_num_batched_tokens": 128}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with sliding windows."""
    return make_tiny_hybrid(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(start: Start) -> list[int]:
    """The expected answer: that without any offloading."""
    engine = start(llm=LLM)
    (answer,) = engine.ask(prompt(1, 700))
    tokens: list[int] = answer["tokens"]
    assert len(set(tokens)) > 2, "the model repeats itself, whatever is in its KV cache"
    engine.close()
    return tokens


@pytest.fixture
def no_rank_files() -> Iterator[None]:
    """Remove vLLM's own files that remain in /dev/shm after engines of several ranks; none of them is ours."""
    found = set(_rank_files())
    yield
    for path in set(_rank_files()) - found:
        path.unlink(missing_ok=True)


def _rank_files() -> Iterator[Path]:
    return Path("/dev/shm").glob("vllm_dist_*")


def check(engine: Engine, expected: list[int]) -> None:
    """Answer a prompt twice; the second time its blocks come from the tiers."""
    assert engine.call("groups") == 3
    for _ in range(2):
        engine.call("reset")
        (answer,) = engine.ask(prompt(1, 700))
        assert answer["tokens"] == expected
        engine.call("settle")
    assert answer["cached"] == full_blocks(700)
    assert engine.call("tier_errors") == 0


@pytest.mark.usefixtures("no_rank_files")
def test_two_ranks_load_blocks_of_one(start: Start, tmp_path: Path, expected: list[int]) -> None:
    """A prompt's blocks are loaded with the right tokens by an engine of one rank, and then by one of two.

    By default rows have the canonical layout, so tensor parallel size 2 reads the rows of size 1.
    """
    engine = start(offloading=managed(tmp_path, cpu_bytes_to_use=160 * ROW_BYTES), llm=LLM)
    assert "Canonical KV layout enabled" in engine.text()
    check(engine, expected)
    engine.close()
    two = start(offloading=managed(tmp_path), llm={**LLM, "tensor_parallel_size": 2}, in_process=False)
    (answer,) = two.ask(prompt(1, 700))
    assert answer == {"tokens": expected, "cached": full_blocks(700)}
    two.close()


def test_rows_of_four_blocks_are_not_for_windows(start: Start, tmp_path: Path, expected: list[int]) -> None:
    """With rows of four blocks requested, rows have one block, with a message and equal tokens; direct layout."""
    layout = {"blocks_per_chunk": 4, "canonical_layout": False, "cpu_bytes_to_use": 160 * ROW_BYTES}
    engine = start(offloading=managed(tmp_path, **layout), llm=LLM)
    assert "Canonical KV layout enabled" not in engine.text()
    assert "Rows have one block instead of 4" in engine.text()
    check(engine, expected)
    engine.close()


@pytest.fixture(scope="module")
def computed(start: Start) -> Iterator[tuple[Engine, dict[tuple[int, ...], list[int]]]]:
    """An engine without offloading that has little room, and its answers to prompts so far."""
    engine = start(llm=TIGHT_LLM)
    yield engine, {}
    engine.close()


@pytest.mark.parametrize(("running", "connector"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("manager", ["kvstore", "vllm"])
def test_resets_while_requests_run_spoil_no_block(
    start: Start,
    computed: tuple[Engine, dict[tuple[int, ...], list[int]]],
    manager: str,
    running: bool,
    connector: bool,
    tmp_path: Path,
) -> None:
    """A reset ends no engine, and no block that a window has freed is stored: every prefix gets the right tokens."""
    plain, expected = computed
    plain.call("forget_device")
    engine = start(llm=TIGHT_LLM, offloading=managed(tmp_path, manager=manager))
    prompts = [prompt(seed, tokens) for seed, tokens in ((1, 500), (2, 300), (3, 333))]
    answers = [each.call("ask_with_resets", prompts, 150, running, connector) for each in (plain, engine)]
    assert answers[0] == answers[1]
    engine.call("settle")
    texts = [text[:tokens] + prompt(9, 7) for text in prompts for tokens in range(256, len(text), 32)]
    for text in texts:
        if (key := tuple(text)) not in expected:
            plain.call("forget_device")
            expected[key] = plain.ask(text)[0]["tokens"]
        engine.call("forget_device")
        assert engine.ask(text)[0]["tokens"] == expected[key]
    engine.close()


@pytest.mark.parametrize(("interval", "cached"), [(0, 0), (64, 256)])
def test_a_part_of_a_prompt_is_found_where_windows_are_retained(
    start: Start, interval: int, cached: int, expected: list[int], tmp_path: Path
) -> None:
    """By default vLLM stores no window at the end of the part, so nothing is loaded, and the tokens are right."""
    engine = start(offloading=managed(tmp_path), llm={**LLM, "prefix_cache_retention_interval": interval})
    for params, found in (({"max_offload_tokens": 256}, 0), ({}, cached)):
        (answer,) = engine.call("ask", [prompt(1, 700)], 6, None, params)
        assert answer == {"tokens": expected, "cached": found}
        engine.call("settle")
        engine.call("reset")
    engine.close()
