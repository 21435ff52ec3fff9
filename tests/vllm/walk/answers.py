"""The expected answers: those of an engine without offloading and prefix cache, as far as they are certain."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from vllm import SamplingParams

from tests.vllm.near_ties import before_tie
from tests.vllm.walk.engine import Weights, started
from tests.vllm.walk.plan import TOKENS_MAX

Answers = list[list[list[int]]]
"""By version of the weights, and prompt."""


def right_answers(model: str, prompts: list[list[int]], versions: int) -> Answers:
    """Return the tokens of each prompt under each version of the weights, up to the first near tie."""
    answers = []
    # The batches differ from those of the walk and are larger, because a step of few tokens costs as much as one of
    # many.
    with started(model, None, enable_prefix_caching=False, max_num_seqs=len(prompts)) as llm:
        weights = Weights(llm)
        for version in range(versions):
            weights.change(version)
            answers.append(certain_answers(llm, prompts, TOKENS_MAX))
        # The comparison is meaningful only if answers don't depend on the other prompts of the batch.
        again = certain_answers(llm, prompts[::-3], TOKENS_MAX)[::-1]
    for first, second in zip(answers[-1][(len(prompts) - 1) % 3 :: 3], again, strict=True):
        certain = min(len(first), len(second))
        assert first[:certain] == second[:certain], "the engine without offloading contradicts itself"
    for first, second in pairwise(answers):
        same = sum(a == b for a, b in zip(first, second, strict=True))
        assert same < len(prompts) / 4, f"{same} answers don't depend on the weights"
    return answers


def certain_answers(llm: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Return an engine's tokens for each prompt, up to the first near tie."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=2)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    return [
        before_tie(each.token_ids, ([choice.logprob for choice in likeliest.values()] for likeliest in each.logprobs))
        for each in completions
    ]
