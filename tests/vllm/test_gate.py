"""A real engine with a tier slower than computing: the gate learns both speeds from its steps and loads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.engines import Engine, Start, full_blocks, prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPTS = [prompt(7000 + number, tokens) for number, tokens in enumerate((650, 640, 500, 333))]


def offloading(**tiering: Any) -> dict[str, Any]:
    """Return an engine's ``kv_connector_extra_config`` with a medium whose loads end at the test's call."""
    return {
        "spec_name": "KVStoreOffloadingSpec",
        "spec_module_path": "kvstore.vllm",
        "cpu_bytes_to_use": 64 * 2**20,
        "tiering": tiering,
        "secondary_tiers": [
            # The test lets the loads end, so they are in its process.
            {"type": "tests.vllm.slow_medium:SlowMemory", "load_timeout": 600, "reset": "keep", "io": "thread"}
        ],
    }


def ask(engine: Engine, number: int) -> tuple[list[int], int]:
    """Answer a prompt; return the tokens, and the number of prompt tokens from a cache."""
    (answer,) = engine.ask(PROMPTS[number])
    return answer["tokens"], answer["cached"]


def test_a_slow_tier_is_not_waited_for(start: Start) -> None:
    """The first load is abandoned, the next prompt is computed immediately, and blocks in CPU memory are still used."""
    engine = start(offloading=offloading(gate=True))
    expected = [ask(engine, number)[0] for number in range(len(PROMPTS))]
    engine.call("settle")
    engine.call("reset")
    for number in range(2):
        assert ask(engine, number) == (expected[number], 0)
    gate = engine.call("manager_stats")["gate"]
    assert gate["abandoned"] == full_blocks(len(PROMPTS[0])) // 32
    assert gate["recomputed"] == full_blocks(len(PROMPTS[1])) // 32
    assert gate["loaded"] == 0 and gate["lost_s"] > 0
    engine.call("let_loads_end")
    engine.call("settle")
    engine.call("forget_device")
    tokens, cached = ask(engine, 1)
    assert (tokens, cached) == (expected[1], full_blocks(len(PROMPTS[1])))
    stats = engine.call("manager_stats")
    assert (stats["primary"]["abandoned"], stats["promoting"], engine.call("tier_errors")) == (0, 0, 0)
    assert engine.call("metrics")["vllm:kvstore_gate_blocks{recomputed}"] > 0
    # The engine computes 8 requests at once.
    counts = engine.call("waiting_requests", [prompt(7100 + number, 64) for number in range(20)])
    assert (counts[0], counts[1], counts[-1]) == (20, 12, 0) and counts == sorted(counts, reverse=True)
    engine.close()
