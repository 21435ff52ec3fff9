"""Real engines of a model with sliding windows: several groups of layers, some of which need only a prompt's end."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import BLOCK_TOKENS, Start, check_churn, managed, prompt
from tests.vllm.models import make_tiny_hybrid

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ROW_BYTES = 16384
"""A block of a group of the model: 1 layer, key and value of 2 heads of 32 float32, 32 tokens."""
REQUESTS = 150
LLM: dict[str, Any] = {
    "num_gpu_blocks_override": 80,
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
}
"""Prompts come in pieces, and there is no room for the blocks of all requests."""
SEED = random.SystemRandom().randrange(1 << 30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with sliding windows."""
    return make_tiny_hybrid(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(start: Start) -> dict[str, Any]:
    """The right answers: those without any offloading."""
    engine = start(llm=LLM)
    answers: dict[str, Any] = engine.call("churn", SEED, REQUESTS)
    (answers["prompt"],) = (answer["tokens"] for answer in engine.ask(prompt(1, 700)))
    assert len(set(answers["prompt"])) > 2, "the model repeats itself, whatever is in its KV cache"
    engine.close()
    return answers


@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_random_requests_to_a_hybrid_model(
    start: Start, tmp_path: Path, expected: dict[str, Any], blocks_per_chunk: int
) -> None:
    """Random requests, with preemption, aborts and resets, give the tokens that they give without offloading."""
    rows = 160 // blocks_per_chunk
    layout = {"blocks_per_chunk": blocks_per_chunk, "cpu_bytes_to_use": rows * ROW_BYTES * blocks_per_chunk}
    engine = start(offloading=managed(tmp_path, **layout), llm=LLM)
    assert engine.call("groups") == 3
    check_churn(engine, expected, SEED, REQUESTS, label=f"blocks_per_chunk {blocks_per_chunk}")
    for _ in range(2):
        engine.call("reset")
        (answer,) = engine.ask(prompt(1, 700))
        assert answer["tokens"] == expected["prompt"]
        engine.call("settle")
    chunk = BLOCK_TOKENS * blocks_per_chunk
    assert answer["cached"] == 700 // chunk * chunk
    engine.close()
