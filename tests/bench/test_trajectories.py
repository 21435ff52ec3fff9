"""Recorded conversations as prompts and as a trace."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from bench.trajectories import Call, read_conversations, trace_of


def test_each_prompt_continues_the_previous_one() -> None:
    """The second call of each conversation follows a tool's answer, the third one a user's."""
    for calls in read_conversations(Path(__file__).with_name("conversations.json"), 512):
        assert [call.follows_tool for call in calls] == [False, True, False]
        for before, after in pairwise(calls):
            assert after.prompt[: len(before.prompt)] == before.prompt


def test_prompts_share_the_full_blocks_of_their_equal_tokens() -> None:
    """Blocks of 16 tokens: 40 equal tokens are two blocks; equal tokens after other ones are other blocks."""
    prompts = [tuple(range(40)), (*range(40), *range(100, 108)), (0, *range(40))]
    trace = trace_of([[Call(prompt, follows_tool=False)] for prompt in prompts], seed=1)
    short, other, long = sorted(trace, key=lambda request: request.input_length)
    assert [short.hash_ids, long.hash_ids, len(other.hash_ids)] == [(0, 1), (0, 1, 2), 2]
    assert not {*other.hash_ids} & {*long.hash_ids}
