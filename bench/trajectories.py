"""Recorded conversations of agents with tools and users, as prompts and as a trace.

Reads trajectories of tau-bench (github.com/sierra-research/tau-bench, MIT licence), such as
``historical_trajectories/gpt-4o-airline.json``: 200 conversations with 2,454 calls of the model. The prompt of a call
is everything before it. Four bytes of its text stand for a token, a number from their checksum. The files have no
times: a conversation begins every two seconds, and a call follows 4 s after a tool's answer and 16 s after a user's,
on average.

    python bench/trajectories.py FILE TRACE [--seed N]

writes a trace in Mooncake's format, in blocks of 16 tokens, for `kvstore-bench replay --block-tokens 16` and
`bench/eviction.py --block-tokens 16 --trace`. `bench/vllm_e2e.py --trajectories FILE` sends the prompts to engines.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Add the repository, so that this file runs as a program.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvstore.cli.bench.traces import Trace, TraceRequest, write_trace

BLOCK_TOKENS = 16
_TOKEN_BYTES = 4
_START_S, _TOOL_S, _USER_S = 2.0, 4.0, 16.0
"""Mean pauses: between two conversations, and before a call that follows a tool's or a user's message."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the model."""

    prompt: Sequence[int]  # Tokens.
    follows_tool: bool  # Whether a tool's answer is the last message of the prompt.


def read_conversations(path: Path, vocabulary: int) -> list[list[Call]]:
    """Return the calls of each conversation, with tokens from 2 to below ``vocabulary``."""
    return [list(_calls(each["traj"], vocabulary)) for each in json.loads(path.read_text())]


def _calls(messages: Sequence[dict[str, Any]], vocabulary: int) -> Iterator[Call]:
    tokens: list[int] = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            yield Call(tuple(tokens), messages[number - 1]["role"] == "tool")
        said = json.dumps([message.get(name) for name in ("role", "content", "tool_calls")]).encode()
        pieces = [said[at : at + _TOKEN_BYTES] for at in range(0, len(said), _TOKEN_BYTES)]
        tokens += [2 + zlib.crc32(piece) % (vocabulary - 2) for piece in pieces]


def trace_of(conversations: Sequence[Sequence[Call]], seed: int) -> Trace:
    """Return the calls as a trace; the numbers of blocks stand for all tokens up to their end."""
    chance = random.Random(seed)
    numbers: dict[tuple[int, Sequence[int]], int] = {}
    start_s, requests = 0.0, list[TraceRequest]()
    for calls in conversations:
        start_s += chance.expovariate(1 / _START_S)
        now_s = start_s
        for call in calls:
            now_s += chance.expovariate(1 / (_TOOL_S if call.follows_tool else _USER_S))
            blocks = [-1]
            for end in range(BLOCK_TOKENS, len(call.prompt) + 1, BLOCK_TOKENS):
                block = blocks[-1], tuple(call.prompt[end - BLOCK_TOKENS : end])
                blocks.append(numbers.setdefault(block, len(numbers)))
            requests.append(
                TraceRequest(timestamp=now_s * 1e3, input_length=len(call.prompt), hash_ids=tuple(blocks[1:]))
            )
    return Trace(requests, block_tokens=BLOCK_TOKENS)


def main() -> None:
    """Write the trace, and print its size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="trajectories of tau-bench")
    parser.add_argument("trace", type=Path, help="file to write")
    parser.add_argument("--seed", type=int, default=0, help="of the times")
    options = parser.parse_args()
    trace = trace_of(read_conversations(options.file, 1 << 31), options.seed)
    write_trace(options.trace, trace)
    print(f"{len(trace)} requests, {trace.tokens} tokens, {trace.blocks} blocks, {trace.distinct_blocks} distinct")


if __name__ == "__main__":
    main()
