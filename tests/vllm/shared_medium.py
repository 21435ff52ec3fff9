"""A real vLLM over a shared medium: killed and restarted, and two engines that use each other's blocks."""

from __future__ import annotations

import random
from typing import Any

from tests.vllm.engines import BLOCK_TOKENS, Engine, Start

TOKENS = (330, 320, 65)


def prompts(seed: int) -> list[list[int]]:
    """Return random prompts: with a partial last block, of full blocks, of two blocks and one token."""
    rng = random.Random(seed)
    return [[rng.randrange(2, 512) for _ in range(tokens)] for tokens in TOKENS]


def full_blocks() -> list[int]:
    """Return the number of each prompt's tokens that a cache can provide."""
    return [tokens // BLOCK_TOKENS * BLOCK_TOKENS for tokens in TOKENS]


def tokens_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    """Return the tokens of answers."""
    return [answer["tokens"] for answer in answers]


def check_restart_and_sharing(start: Start, plain: Engine, tier: dict[str, Any]) -> None:
    """After SIGKILL the prompts' blocks come from the medium; then two engines use each other's blocks."""
    spec = {"spec_name": "KVStoreOffloadingSpec", "spec_module_path": "kvstore.vllm"}
    offloading = {**spec, "cpu_bytes_to_use": 64 * 2**20, "secondary_tiers": [tier]}

    first = start(offloading=offloading)
    answers = first.ask(*prompts(1))
    expected = tokens_of(answers)
    assert [answer["cached"] for answer in answers] == [0] * len(TOKENS)
    first.call("settle")
    first.kill()

    second = start(offloading=offloading)
    answers = second.ask(*prompts(1))
    assert tokens_of(answers) == expected
    assert [answer["cached"] for answer in answers] == full_blocks()

    third = start(offloading=offloading)
    for seed, (writer, reader) in ((2, (second, third)), (3, (third, second))):
        computed = tokens_of(writer.ask(*prompts(seed)))
        writer.call("settle")
        answers = reader.ask(*prompts(seed))
        assert tokens_of(answers) == computed
        assert [answer["cached"] for answer in answers] == full_blocks()
    assert second.call("tier_errors") == third.call("tier_errors") == 0
    assert tokens_of(plain.ask(*prompts(1))) == expected
