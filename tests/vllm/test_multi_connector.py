"""A real engine whose MultiConnector has kvstore's connector and another one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import BLOCK_TOKENS, WATCHED, Engine, Start, full_blocks, managed, prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_the_other_connector_serves_blocks_that_kvstore_has_lost(start: Start, tmp_path: Path) -> None:
    """Both store; either serves a prompt without the other, with the same tokens."""
    ours: dict[str, Any] = {
        "kv_connector": "KVStoreConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": managed(tmp_path / "kv"),
    }
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "other")},
    }
    text = prompt(1, 640)
    answers = []
    for lost in (None, "other", "kv"):
        if lost:
            shutil.rmtree(tmp_path / lost)
            (tmp_path / lost).mkdir()
        engine = start(offloading={"connectors": [ours, other]})
        answers += engine.ask(text)
        engine.call("settle")
        engine.close()
    assert [answer["cached"] for answer in answers] == [
        0,
        full_blocks(640),
        640 - BLOCK_TOKENS,
    ]  # vLLM's example leaves the last block.
    assert len({tuple(answer["tokens"]) for answer in answers}) == 1


def test_two_connectors_of_kvstore_share_no_memory(start: Start, plain: Engine, tmp_path: Path) -> None:
    """Both have few rows, and other ones free: their blocks stay apart."""

    def ours(name: str, rows: int, policy: str) -> dict[str, Any]:
        extra = managed(tmp_path / name, cpu_bytes_to_use=rows * 32768, eviction_policy=policy, **WATCHED)
        return {"kv_connector": "KVStoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}

    prompts = [prompt(number, 300 + 17 * number) for number in range(8)]
    expected = [answer["tokens"] for answer in plain.ask(*prompts)]
    engine = start(
        offloading={"connectors": [ours("first", 30, "lru"), ours("second", 22, "arc")]},
        llm={"num_gpu_blocks_override": 60, "max_model_len": 1024},
    )
    engine.call("watch")
    for turn in range(6):
        chosen = [(turn * 3 + number) % len(prompts) for number in range(4)]
        answers = engine.ask(*(prompts[number] for number in chosen))
        assert [answer["tokens"] for answer in answers] == [expected[number] for number in chosen]
        engine.call("settle")
        engine.call("forget_device")
    assert any(answer["cached"] for answer in answers)
    judged = engine.call("judge", prompts)
    assert judged["wrong"] == [] and judged["stored blocks"] and judged["loaded blocks"]
    engine.close()


LATE_LLM: dict[str, Any] = {"num_gpu_blocks_override": 42, "max_model_len": 1200, "max_num_batched_tokens": 1024}
"""The device has room for one of the prompts."""


@pytest.mark.parametrize("early", [False, True], ids=["in the step", "before the step"])
@pytest.mark.parametrize("manager", ["kvstore", "vllm"])
def test_no_store_reads_blocks_that_another_connector_fills(
    start: Start, plain: Engine, manager: str, early: bool, tmp_path: Path
) -> None:
    """Stores that end late, as on a GPU, are flushed before another connector's load overwrites their blocks."""
    ours = {
        "kv_connector": "KVStoreConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": managed(
            tmp_path / "kv",
            manager=manager,
            spec_name="SlowSpec",
            spec_module_path="tests.vllm.walk.slow_copies",
        ),
    }
    other = {
        "kv_connector": "LateConnector",
        "kv_connector_module_path": "tests.vllm.late_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"early": early},
    }
    prompts = [prompt(8000 + number, 801 + 3 * number) for number in range(6)]
    engine = start(offloading={"connectors": [other, ours]}, llm=LATE_LLM)
    assert engine.call("ask_beside_late_loads", prompts, prompt(7, 641)) == len(prompts)
    engine.kill()
    restarted = start(offloading=managed(tmp_path / "kv", manager=manager))
    for text in prompts:
        (expected,), (answer,) = plain.ask(text), restarted.ask(text)
        assert answer["tokens"] == expected["tokens"]
        assert answer["cached"] >= full_blocks(800)
