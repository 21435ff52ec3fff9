"""Real engines in the states in which public reports found wrong answers of other caches; each answer is compared."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import LlamaShape, make_tiny_llama
from tests.vllm.engines import BLOCK_TOKENS, WATCHED, Engine, Start, full_blocks, managed, prompt
from tests.vllm.models import WINDOW_TOKENS, make_tiny_fine_windows, make_tiny_mamba

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TOKENS = 12
"""Tokens of an answer."""


def answers_of(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Return an engine's tokens for each prompt, asked at once."""
    return [answer["tokens"] for answer in engine.call("ask", prompts, TOKENS)]


def stored(start: Callable[..., Engine], prompts: list[list[int]], **options: Any) -> Engine:
    """Let an engine answer prompts and store their blocks, kill it, and return another one like it."""
    engine = start(**options)
    engine.call("ask", prompts, TOKENS)
    engine.call("settle")
    engine.kill()
    return start(**options)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_block_lost_between_promise_and_load(start: Start, plain: Engine, policy: str, tmp_path: Path) -> None:
    """With "recompute" the answer is right; with "fail" it is that or none, and right when asked again."""
    begins = [prompt(number, 300 + 17 * number) for number in range(8)]
    prompts = [[*begin, *prompt(50 + number, 150)] for number, begin in enumerate(begins)]
    expected = answers_of(plain, prompts)
    engine = stored(
        start,
        begins,
        offloading=managed(tmp_path, sync_load_budget_bytes=1 << 30, **WATCHED),
        transfer={"kv_load_failure_policy": policy},
    )
    engine.call("watch")
    answers = engine.call("ask_losing_loads", prompts, TOKENS)
    assert answers[0]["loads"] >= len(prompts)
    got = [answer["tokens"] for answer in answers]
    failed = [number for number, tokens in enumerate(got) if tokens != expected[number]]
    assert bool(failed) == (policy == "fail") and not any(got[number] for number in failed)
    engine.call("settle")
    for _ in range(2):
        engine.call("forget_device")
        assert answers_of(engine, prompts) == expected
        engine.call("settle")
    judged = engine.call("judge", prompts)
    assert judged["wrong"] == [] and judged["stored blocks"] and judged["loaded blocks"]
    engine.kill()


@pytest.mark.parametrize("unit", [16, 32])
def test_hashes_finer_than_the_blocks_of_states(start: Start, unit: int, tmp_path: Path) -> None:
    """Prompts of a model with states end within a block: after a restart tokens are right, and some cached."""
    model = make_tiny_mamba(tmp_path / "model")
    llm = {"prefix_match_unit": unit, "max_num_batched_tokens": 128, "max_model_len": 1024}
    common = prompt(1, 330)
    prompts = [common + prompt(number, 5 + 31 * number) for number in range(6)]
    engines: list[Engine] = []

    def start_(**options: Any) -> Engine:
        engines.append(Engine(model, tmp_path / f"{len(engines)}.log", **options))
        return engines[-1]

    try:
        expected = answers_of(start_(llm=llm), prompts)
        engine = stored(start_, prompts, offloading=managed(tmp_path / "kv"), llm=llm)
        answers = engine.call("ask", prompts, TOKENS)
        assert [answer["tokens"] for answer in answers] == expected
        assert all(answer["cached"] >= 256 for answer in answers)
    finally:
        for engine in engines:
            engine.kill()


@pytest.mark.parametrize("drafted_by", ["n-grams", "a model"])
def test_speculation_keeps_the_cache(start: Start, plain: Engine, drafted_by: str, tmp_path: Path) -> None:
    """After a restart a speculating engine has the right tokens, and at least 0.8 of each prompt from the disk."""
    speculation: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    if drafted_by != "n-grams":
        draft = tmp_path / "draft"
        make_tiny_llama(draft, LlamaShape(layers=1))
        speculation = {"method": "draft_model", "model": str(draft)}
    prompts = [prompt(number, 400 + 33 * number) for number in range(5)]
    expected = answers_of(plain, prompts)
    llm = {"speculative_config": {"num_speculative_tokens": 3, **speculation}}
    engine = stored(start, prompts, offloading=managed(tmp_path / "kv"), llm=llm)
    answers = engine.call("ask", prompts, TOKENS)
    assert [answer["tokens"] for answer in answers] == expected
    for text, answer in zip(prompts, answers, strict=True):
        assert answer["cached"] >= 0.8 * len(text)
    engine.kill()


def test_draft_model_with_windows_is_doubted(start: Start, tmp_path: Path) -> None:
    """A restarted engine computes what vLLM computes: on a CPU, vLLM's own blocks are wrong with such a draft model."""
    draft = make_tiny_llama(tmp_path / "draft", LlamaShape(layers=1))
    config = json.loads((draft / "config.json").read_text())
    windows = {"sliding_window": WINDOW_TOKENS, "layer_types": ["sliding_attention"]}
    (draft / "config.json").write_text(json.dumps(config | windows))
    llm = {"speculative_config": {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}}
    prompts = [prompt(number, 400 + 33 * number) for number in range(5)]
    base = start(llm=llm)
    expected = answers_of(base, prompts)
    base.kill()
    engine = stored(start, prompts, offloading=managed(tmp_path / "kv"), llm=llm)
    answers = engine.call("ask", prompts, TOKENS)
    assert [answer["tokens"] for answer in answers] == expected
    assert [answer["cached"] for answer in answers] == [0] * len(prompts)
    assert engine.text().count("kvstore stores and loads nothing") == 1
    engine.kill()


def test_preempted_and_aborted_requests_leave_no_wrong_block(start: Start, plain: Engine, tmp_path: Path) -> None:
    """After 500 preempted and aborted requests, and a restart, the answers are right."""
    # Seven of them leave at most four of the 39 usable blocks, so preemptions follow each other closely.
    prompts = [prompt(number, 150 + 8 * number) for number in range(6)]
    expected = answers_of(plain, prompts)
    llm = {"num_gpu_blocks_override": 40, "max_model_len": 1024, "max_num_batched_tokens": 256}
    engine = start(offloading=managed(tmp_path), llm=llm)
    engine.call("preempt_and_abort", prompts, 500)
    assert answers_of(engine, prompts) == expected
    engine.call("settle")
    engine.kill()
    engine = start(offloading=managed(tmp_path), llm=llm)
    assert answers_of(engine, prompts) == expected
    engine.kill()


def test_ends_after_a_preemption_store_no_block_of_another(start: Start, tmp_path: Path) -> None:
    """A producer ends requests preempted with their last token under way, and others take over their blocks."""
    engine = start(
        offloading=managed(tmp_path, offload_prompt_only=False, **WATCHED),
        llm={"num_gpu_blocks_override": 25, "max_model_len": 768},
        transfer={"kv_role": "kv_producer"},
    )
    engine.call("watch")
    ending, others = ([prompt(seed + number, length) for number in range(4)] for seed, length in ((0, 127), (9, 715)))
    texts = engine.call("ask_ending_preempted", ending, others)
    judged = engine.call("judge", texts)
    assert judged["wrong"] == [] and judged["stored blocks"] >= len(others) * (715 // BLOCK_TOKENS)
    assert engine.ask(ending[0])[0]["cached"] == 0
    engine.kill()


def test_released_windows_are_not_stored_at_an_end(start: Start, tmp_path: Path) -> None:
    """Answers go on beyond ``max_offload_tokens``, so that windows have left the last blocks to store."""
    engine = Engine(
        make_tiny_fine_windows(tmp_path / "model"),
        tmp_path / "log",
        offloading=managed(tmp_path / "kv", offload_prompt_only=False, **WATCHED),
        llm={"num_gpu_blocks_override": 100, "max_model_len": 700, "max_num_batched_tokens": 256}
        | {"prefix_cache_retention_interval": None},
    )
    engine.call("watch")
    prompts = [prompt(number, 200) for number in range(3)]
    answers = engine.call("ask", prompts, 400, None, {"max_offload_tokens": 480})
    texts = [text + answer["tokens"] for text, answer in zip(prompts, answers, strict=True)]
    judged = engine.call("judge", [text[: end + 1] for text in texts for end in range(192, 512, 32)])
    assert judged["wrong"] == [] and judged["stored blocks"]
    engine.kill()


def test_requests_that_wait_for_each_others_device_blocks_end(start: Start, plain: Engine, tmp_path: Path) -> None:
    """Of 270 device blocks one request needs 250, one 100 and one 10; all load, none waits for ever."""
    llm = {"num_gpu_blocks_override": 271, "max_model_len": 8192}
    base = start(llm={**llm, "num_gpu_blocks_override": 400})
    texts = [prompt(number, blocks * BLOCK_TOKENS - 40) for number, blocks in enumerate((250, 100, 10))]
    expected = answers_of(base, texts)
    base.kill()
    engine = stored(start, texts, offloading=managed(tmp_path), llm=llm)
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2, 1, 0)):
        answers = engine.call("ask", [texts[number] for number in order], TOKENS)
        assert [answer["tokens"] for answer in answers] == [expected[number] for number in order]
        assert all(answer["cached"] for answer in answers)
        engine.call("settle")
        engine.call("forget_device")
    engine.kill()


def test_embeddings_from_loaded_blocks(start: Start, tmp_path: Path) -> None:
    """A pooling model gives the same embeddings after a restart, with blocks from the disk."""
    llm = {"runner": "pooling", "convert": "embed", "pooler_config": {"seq_pooling_type": "LAST"}}
    prompts = [prompt(number, 300 + 17 * number) for number in range(4)]
    base = start(llm=llm)
    expected = base.call("embed", prompts)
    base.kill()
    for is_restarted in (False, True):
        engine = start(offloading=managed(tmp_path), llm=llm)
        for text, right, answer in zip(prompts, expected, engine.call("embed", prompts), strict=True):
            assert all(map(lambda a, b: math.isclose(a, b, abs_tol=1e-4), answer["numbers"], right["numbers"]))
            assert answer["cached"] == (full_blocks(len(text)) if is_restarted else 0)
        engine.call("settle")
        engine.kill()


def test_beams_from_loaded_blocks(start: Start, plain: Engine, tmp_path: Path) -> None:
    """Beam search finds the same beams after a restart, when the common part of each comes from the disk."""
    prompts = [prompt(number, 320 + 17 * number) for number in range(3)]
    expected = plain.call("beams", prompts, 3, 40)
    for _ in range(2):
        engine = start(offloading=managed(tmp_path))
        assert engine.call("beams", prompts, 3, 40) == expected
        engine.call("settle")
        loaded = engine.call("manager_stats")["tiers"][0]["loaded"]
        engine.kill()
    assert loaded >= sum(len(text) // BLOCK_TOKENS for text in prompts)
