"""The expected answers: those of an engine without offloading and prefix cache, as far as they are certain."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from vllm import SamplingParams

from tests.vllm.near_ties import before_tie
from tests.vllm.walk.engine import Weights, adapter_of, inputs_of, started
from tests.vllm.walk.plan import TOKENS_MAX, Prompt

Answers = list[list[list[int]]]
"""By version of the weights, and prompt."""


def right_answers(model: str, prompts: list[Prompt], versions: int, **options: Any) -> Answers:
    """Return the tokens of each prompt under each version of the weights, up to the first near tie."""
    answers = []
    # The batches differ from those of the walk and are larger, because a step of few tokens costs as much as one of
    # many.
    with started(model, None, enable_prefix_caching=False, max_num_seqs=len(prompts), **options) as llm:
        weights = Weights(llm)
        for version in range(versions):
            weights.change(version)
            answers.append(_answers_of(llm, model, prompts))
        # The comparison is meaningful only if answers don't depend on the other prompts of the batch.
        again = _answers_of(llm, model, prompts[::-3])[::-1]
    for first, second in zip(answers[-1][(len(prompts) - 1) % 3 :: 3], again, strict=True):
        certain = min(len(first), len(second))
        assert first[:certain] == second[:certain], "the engine without offloading contradicts itself"
    for first, second in pairwise(answers):
        same = sum(a == b for a, b in zip(first, second, strict=True))
        assert same < len(prompts) / 4, f"{same} answers don't depend on the weights"
    return answers


def _answers_of(llm: Any, model: str, prompts: list[Prompt]) -> list[list[int]]:
    adapters = [adapter_of(model, prompt) for prompt in prompts]
    return certain_answers(llm, list(map(inputs_of, prompts)), TOKENS_MAX, adapters if any(adapters) else None)


def certain_answers(llm: Any, inputs: list[dict[str, Any]], tokens: int, adapters: Any = None) -> list[list[int]]:
    """Return an engine's tokens for each prompt, with its adapter, up to the first near tie."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=2)
    outputs = llm.generate(inputs, params, use_tqdm=False, lora_request=adapters)
    completions = [output.outputs[0] for output in outputs]
    return [
        before_tie(each.token_ids, ([choice.logprob for choice in likeliest.values()] for likeliest in each.logprobs))
        for each in completions
    ]
