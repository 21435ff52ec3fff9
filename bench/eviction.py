"""Hits of eviction policies, compared with Belady's optimum, on generated and recorded traces of different kinds.

``of_gap`` is the share of the hits between LRU and the optimum that a policy gains; negative if LRU has more.

    python bench/eviction.py [--quick] [--admission] [--seed N] [--kinds KIND ...] [--trace FILE ... [--block-tokens N]]

With ``--admission``, the policies are offload policies that write to a disk tier, below CPU memory for a fifth of its
blocks, and ``saved`` is the share of the writes of the default that they save.

This is a simulation with the real manager, sizes and keys only, so the result does not depend on the machine.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path

# Add the repository, so that this file runs as a program.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import Row, arguments, reporting
from kvstore.cli.bench.simulation import OPTIMUM, ReplayCase, ReplaySettings, replay
from kvstore.cli.bench.traces import BLOCK_TOKENS, Trace, TraceRequest, TraceShape, generate_trace, read_trace
from kvstore.cli.tier_argument import parse_tier
from kvstore.eviction import POLICY_NAMES

SHARES = (0.05, 0.1, 0.2)
"""Capacities, as shares of the blocks of the trace."""
COLUMNS = ("trace", "capacity_share", "system", "hit_rate", "of_gap", "saved")
ADMISSIONS: dict[str, dict[str, object]] = {
    "all": {}, "min_uses 2": {"min_uses": 2}, "lazy": {"lazy": True}, "auto": {"min_uses": "auto"}
}  # fmt: skip


class Blocks:
    """Numbers of new blocks, from chance."""

    def __init__(self, seed: int, first: int = 0) -> None:
        self.chance = random.Random(seed)
        self._numbers = count(first)

    def new(self, least: int, end: int) -> list[int]:
        """Return at least ``least`` and fewer than ``end`` new blocks."""
        return self.some(self.chance.randrange(least, end))

    def some(self, number: int) -> list[int]:
        """Return so many new blocks."""
        return list(islice(self._numbers, number))


def chats(seed: int, requests: int) -> Trace:
    """Chats of several turns, some about one of several documents, with one of several system prompts."""
    return generate_trace(TraceShape(requests, seed))


def tools(seed: int, requests: int) -> Trace:
    """Sessions of eight turns that wait for tools and people."""
    return generate_trace(
        TraceShape(
            requests, seed, documents=0, turns=8.0, question_tokens=1500, chats_per_s=0.5, think_s=120.0,
            tool_share=0.7, tool_s=20.0,
        )
    )  # fmt: skip


def agents(seed: int, requests: int) -> Trace:
    """120 sessions at a time, which grow with each turn, and single requests, with one of five system prompts."""
    blocks, prompts = Blocks(seed), list[list[int]]()
    chance = blocks.chance
    systems = [blocks.some(8) for _ in range(5)]
    live: list[tuple[list[int], int]] = []
    for _ in range(requests):
        if (len(live) < 120 and chance.random() < 0.08) or not live:
            live.append((chance.choice(systems) + blocks.new(5, 60), chance.randrange(5, 60)))
        number = len(live) - 1 - min(len(live) - 1, int(chance.expovariate(1 / 25)))
        prompt, left = live[number]
        prompts.append(prompt)
        live[number] = (prompt + blocks.new(2, 12), left - 1)
        if left == 1:
            del live[number]
        if chance.random() < 0.3:
            prompts.append(chance.choice(systems) + blocks.new(10, 80))
    return trace_of(prompts)


def documents(seed: int, requests: int, first: int = 0) -> Trace:
    """Questions about 500 documents, whose popularity follows Zipf's law."""
    blocks = Blocks(seed, first)
    known = [blocks.new(20, 150) for _ in range(500)]
    weights = [rank**-0.9 for rank in range(1, 501)]
    return trace_of([document + blocks.new(1, 5) for document in blocks.chance.choices(known, weights, k=requests)])


def batch(seed: int, requests: int) -> Trace:
    """Chats, and jobs of some hundred prompts, each with the job's prompt and blocks of its own."""
    chat, blocks = chats(seed, requests * 2 // 3), Blocks(seed, 1 << 40)
    end_ms = chat.requests[-1].timestamp
    prompts: list[TraceRequest] = []
    for job in range(5):
        start_ms, prompt = end_ms * (job + blocks.chance.random() / 2) / 5, blocks.new(2, 10)
        own = [prompt + blocks.new(5, 60) for _ in range(requests // 15)]
        prompts += trace_of(own, start_ms, end_ms / 20 / len(own))
    return Trace([*chat, *prompts])


def shift(seed: int, requests: int) -> Trace:
    """Chats for the first half of the requests, then documents."""
    chat = chats(seed, requests // 2)
    return Trace([*chat, *later(documents(seed, requests // 2, 1 << 40), chat.requests[-1].timestamp)])


def later(trace: Trace, start_ms: float) -> Sequence[TraceRequest]:
    """Return the requests of a trace that starts at this time."""
    return trace_of([request.hash_ids for request in trace], start_ms).requests


def trace_of(prompts: Sequence[Sequence[int]], start_ms: float = 0.0, pause_ms: float = 500.0) -> Trace:
    """Return a trace with a request for each prompt, in this order."""
    return Trace(
        TraceRequest(
            timestamp=start_ms + number * pause_ms, input_length=BLOCK_TOKENS * len(prompt), hash_ids=tuple(prompt)
        )
        for number, prompt in enumerate(prompts)
    )


KINDS: dict[str, Callable[[int, int], Trace]] = {
    "chats": chats, "tools": tools, "agents": agents, "documents": documents, "batch": batch, "shift": shift
}  # fmt: skip


def measure(name: str, trace: Trace) -> Iterator[Row]:
    """Replay a trace; yield a row for each capacity and policy."""
    settings = ReplaySettings(gate=False)
    for share in SHARES:
        size = round(trace.distinct_blocks * share) * settings.block_bytes(trace)
        rates = {
            policy: replay(trace, ReplayCase(policy, size), settings)["hit_rate"] for policy in (*POLICY_NAMES, OPTIMUM)
        }
        gap = rates[OPTIMUM] - rates["lru"]
        for policy, rate in rates.items():
            yield {
                "bench": "eviction",
                "op": "replay",
                "trace": name,
                "system": policy,
                "capacity_share": share,
                "hit_rate": rate,
                "of_gap": (rate - rates["lru"]) / gap if gap else 0.0,
            }


def measure_admission(name: str, trace: Trace) -> Iterator[Row]:
    """Replay a trace with a disk tier; yield a row for each capacity and offload policy."""
    tier, block_bytes = parse_tier("file:///unused?capacity=1TiB"), ReplaySettings().block_bytes(trace)
    for share in SHARES:
        size, written = round(trace.distinct_blocks * share) * block_bytes, 0
        for system, offload in ADMISSIONS.items():
            settings = ReplaySettings(tiers=[tier], cpu_bytes=size // 5, gate=False, offload=offload)
            found = replay(trace, ReplayCase(None, size), settings)
            stored = found["tiers"][1]["stored_bytes"]
            written = written or stored
            yield {
                "bench": "eviction",
                "op": "admission",
                "trace": name,
                "system": system,
                "capacity_share": share,
                "hit_rate": found["hit_rate"],
                "saved": 1 - stored / written,
            }


def main() -> None:
    """Replay and print."""
    parser = arguments(__doc__)
    parser.add_argument("--seed", type=int, default=3, help="of the generated traces")
    parser.add_argument("--admission", action="store_true", help="compare offload policies of a disk tier")
    parser.add_argument("--requests", type=int, default=6000, help="of each generated trace")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS, help="generated traces (default: all)")
    parser.add_argument("--trace", metavar="FILE", nargs="*", default=[], help="traces in Mooncake's format")
    parser.add_argument("--block-tokens", type=int, default=BLOCK_TOKENS, help="of a block of these traces")
    options = parser.parse_args()
    requests = 300 if options.quick else options.requests
    rows_of = measure_admission if options.admission else measure
    with reporting(options, COLUMNS) as rows:
        for kind in options.kinds:
            rows.extend(rows_of(kind, KINDS[kind](options.seed, requests)))
        for file in options.trace:
            rows.extend(rows_of(Path(file).stem, read_trace(file, block_tokens=options.block_tokens)))


if __name__ == "__main__":
    main()
