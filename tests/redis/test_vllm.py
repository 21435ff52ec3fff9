"""A real vLLM over Redis: killed and started again, and two engines that share what either computed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import make_tiny_llama
from tests.redis.clients import options_for
from tests.redis.servers import Server
from tests.vllm.engines import BLOCK_TOKENS, Engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

TOKENS = (330, 320, 65)


def prompts(seed: int) -> list[list[int]]:
    """Return random prompts: with a partial last block, of full blocks, of two blocks and one token."""
    rng = random.Random(seed)
    return [[rng.randrange(2, 512) for _ in range(tokens)] for tokens in TOKENS]


def full_blocks() -> list[int]:
    """Return the tokens of each prompt that a cache can give."""
    return [tokens // BLOCK_TOKENS * BLOCK_TOKENS for tokens in TOKENS]


def tokens_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    """Return the tokens of answers."""
    return [answer["tokens"] for answer in answers]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Start engines on one tiny model; all are gone at the end."""
    model = make_tiny_llama(tmp_path)
    engines: list[Engine] = []

    def start_(offloading: dict[str, Any] | None = None) -> Engine:
        engines.append(Engine(model, tmp_path / f"{len(engines)}.log", offloading=offloading))
        return engines[-1]

    yield start_
    for engine in engines:
        engine.kill()


def test_restart_and_sharing(start: Any, redis_server: Server) -> None:
    """After SIGKILL the prompts come from Redis; then two engines use what either has computed."""
    tier = {"type": "redis", **options_for(redis_server), "negative_ttl": "1ms"}
    spec = {"spec_name": "KVStoreOffloadingSpec", "spec_module_path": "kvstore.vllm"}
    offloading = {**spec, "cpu_bytes_to_use": 64 * 2**20, "secondary_tiers": [tier]}

    first = start(offloading)
    answers = first.ask(*prompts(1))
    expected = tokens_of(answers)
    assert [answer["cached"] for answer in answers] == [0] * len(TOKENS)
    first.call("settle")
    first.kill()

    second = start(offloading)
    answers = second.ask(*prompts(1))
    assert tokens_of(answers) == expected
    assert [answer["cached"] for answer in answers] == full_blocks()

    third = start(offloading)
    for seed, (writer, reader) in ((2, (second, third)), (3, (third, second))):
        computed = tokens_of(writer.ask(*prompts(seed)))
        writer.call("settle")
        answers = reader.ask(*prompts(seed))
        assert tokens_of(answers) == computed
        assert [answer["cached"] for answer in answers] == full_blocks()
    assert second.call("tier_errors") == third.call("tier_errors") == 0
    plain = start()
    assert tokens_of(plain.ask(*prompts(1))) == expected
