"""Real engines with streaming-input sessions, whose blocks a later engine finds under the keys of their tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import BLOCK_TOKENS, Engine, managed, prompt
from tests.vllm.models import make_tiny_hybrid

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LLM: dict[str, Any] = {"num_gpu_blocks_override": 72, "max_model_len": 1024, "max_num_batched_tokens": 128}
"""Prompts are split, and the device's blocks are reused often."""
ANSWER = 4
"""Tokens of the answer to a turn. The next turn replaces the last one."""
ALIGNED = [3 * BLOCK_TOKENS - ANSWER, 4 * BLOCK_TOKENS + 1 - ANSWER, 90]
"""Lengths of turns. The tokens replaced by the second and by the third turn are the last ones of a block."""
SESSIONS: list[dict[str, Any]] = [
    {"turns": ALIGNED},
    {"turns": [100, 200, 150], "others": [500, 300, 400]},
    {"turns": [100, 130, 31], "aborted": True},
    {"turns": [300]},
]


def texts_of(engine: Engine) -> list[list[int]]:
    """Answer all sessions; return the text of each, and that of each turn with the token that the next one replaced."""
    whole, parts = [], []
    for number, plan in enumerate(SESSIONS):
        turns = [prompt(100 * number + i, tokens) for i, tokens in enumerate(plan["turns"])]
        others = [prompt(5000 + 100 * number + i, tokens) for i, tokens in enumerate(plan.get("others", ()))]
        text: list[int] = []
        for turn, answer in zip(
            turns, engine.call("session", turns, others, ANSWER, plan.get("aborted", False)), strict=True
        ):
            text += turn + answer
            parts.append(list(text))
            text.pop()
        whole.append(text)
    return [*whole, *parts]


@pytest.mark.parametrize("manager", ["kvstore", "vllm"])
@pytest.mark.parametrize("make", [None, make_tiny_hybrid], ids=["dense", "windows"])
def test_blocks_of_sessions_hold_the_values_of_their_tokens(
    make: Callable[[Path], Path] | None, manager: str, model: Path, tmp_path: Path
) -> None:
    """After a restart, the texts of sessions give the tokens of an engine without offloading."""
    used = model if make is None else make(tmp_path / "model")
    engines: list[Engine] = []

    def start(**options: Any) -> Engine:
        engines.append(Engine(used, tmp_path / f"{len(engines)}.log", llm=LLM, **options))
        return engines[-1]

    try:
        plain = start()
        texts = texts_of(plain)
        storing = start(offloading=managed(tmp_path / "kv", manager=manager))
        assert texts_of(storing) == texts
        storing.kill()
        prompts = [[*text, *prompt(7, 9)] for text in texts]
        plain.call("forget_device")
        expected = [plain.ask(text)[0]["tokens"] for text in prompts]
        restarted = start(offloading=managed(tmp_path / "kv", manager=manager))
        for text, tokens in zip(prompts, expected, strict=True):
            restarted.call("forget_device")
            (answer,) = restarted.ask(text)
            assert answer["tokens"] == tokens
            assert answer["cached"] >= BLOCK_TOKENS
    finally:
        for engine in engines:
            engine.kill()
