"""End-to-end results of a real `vllm serve`: workloads without offloading, with vLLM's tiers and with kvstore's.

- restart: long prompts, SIGKILL, a new server on the same directory, the same prompts.
- chat: many users, several turns each; a prompt is the whole conversation so far and a new question. Neither the device
  nor the primary tier has room for all users.
- a-b-a: prompts A, B, A with room for one in the device and one in the primary tier, and no tier below. With
  "selective", B has ``{"store": false}``.
- agents: recorded calls of agents with tools (bench/trajectories.py), eight conversations at a time, each call after
  the previous one. Only with --trajectories.
- overhead: prompts without prefix reuse, as in `bench/vllm_overhead.py`.

The systems run side by side and receive requests in turns, each after the previous one has become idle. ``share`` is
the throughput divided by that without offloading in the same run, ``low`` and ``high`` are the ends of its 95 %
interval. ``ttft_s`` is the median time to the first word (chat: from the second turn on; a-b-a: of the second A).
``cached_tokens`` is the number of prompt tokens of a run that were not computed.

    python bench/vllm_e2e.py [--quick] [--runs N] [--trajectories FILE] [--only chat,agents] [--json FILE]

Takes ten to twenty minutes on two cores. After an interruption it prints the complete workloads.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Add the repository, so that this file runs as a program.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import Row, reporting, runs_of
from bench.trajectories import read_conversations
from bench.vllm_overhead import (
    BLOCK_TOKENS,
    COLUMNS,
    CONCURRENCY,
    CONTROL,
    VOCABULARY,
    Load,
    bench_arguments,
    bench_setup,
    engine,
    in_turns,
    make_prompts,
    overhead,
    row_of,
    say,
    serve,
    serving,
)
from examples.serving import Answer, Server

CHAT_BLOCKS = 8192 // BLOCK_TOKENS + 8
"""Blocks of the device: one context of the greatest length, which vLLM requires, and little more."""
ROW_BYTES_MAX = 2 * 2**20
"""Bytes of a block of the larger model; a block of the smaller model (``--quick``) has a sixteenth."""
_AGENTS = 8
"""Conversations at a time."""
_AGENTS_TOKENS_MAX = 4000
"""Longest prompt of an agent; a sixth of the calls has more."""
_SETTLE_S = 3.0
"""Pause before a kill, because all systems store in the background."""


def restart(work: Path, model: Path, systems: Sequence[str], options: argparse.Namespace) -> Iterator[Row]:
    """Send prompts, kill and restart the servers, send the prompts again."""
    count, tokens = (2, 700) if options.quick else (options.runs, 3000)
    prompts = make_prompts(random.Random(1), count, tokens, VOCABULARY)
    first: dict[str, list[Load]] = {system: [] for system in systems}
    again: dict[str, list[Load]] = {system: [] for system in systems}
    for phase, loads in (("before", first), ("after", again)):
        with serving(work, model, systems) as servers:
            for number, prompt in enumerate(prompts):
                for system in in_turns(systems, number):
                    loads[system].append(serve(servers[system], [prompt], 8))
                times = ", ".join(f"{s} {loads[s][-1].answers[0].ttft_s:.3f} s" for s in systems)
                say(f"  prompt {number + 1} {phase} the restart: {times}")
            time.sleep(_SETTLE_S)
    for system in systems:
        row = row_of("restart", system, again[system], again["none"])
        row["outputs_equal"] &= row_of("", system, first[system], first["none"])["outputs_equal"]
        yield row


def chat(work: Path, model: Path, systems: Sequence[str], options: argparse.Namespace) -> Iterator[Row]:
    """Hold chats with all users, turn by turn."""
    users, turns, opening = (6, 2, 500) if options.quick else (12, 4, 1200)
    runs = 1 if options.quick else 2
    loads: dict[str, list[Load]] = {system: [] for system in systems}
    # The primary tier has as many blocks as the device.
    room = {"cpu_bytes_to_use": CHAT_BLOCKS * ROW_BYTES_MAX // (16 if options.quick else 1)}
    arguments = ("--num-gpu-blocks-override", str(CHAT_BLOCKS))
    with serving(work / "chat", model, systems, arguments=arguments, **room) as servers:
        for run in range(runs):
            for system in in_turns(systems, run):
                loads[system].append(_talk(servers[system], random.Random(100 + run), users, turns, opening))
            say(f"  run {run + 1}: " + ", ".join(f"{s} {loads[s][-1].seconds:.1f} s" for s in systems))
    for system in systems:
        yield row_of("chat", system, loads[system], loads["none"])


def _talk(server: Server, rng: random.Random, users: int, turns: int, opening: int) -> Load:
    """Hold a chat with each user; return the turns from the second on."""
    histories = make_prompts(rng, users, opening, VOCABULARY)
    answers: list[Answer] = []
    seconds, tokens = 0.0, 0
    for turn in range(turns):
        load = serve(server, histories, 16)
        if turn:
            answers += load.answers
            seconds, tokens = seconds + load.seconds, tokens + load.tokens
        for history, answer in zip(histories, load.answers, strict=True):
            history += [int(word) for word in re.findall(r"w(\d+)", answer.text)]
            history += make_prompts(rng, 1, 100, VOCABULARY)[0]
    return Load(answers, seconds, tokens)


def a_b_a(work: Path, model: Path, systems: Sequence[str], options: argparse.Namespace) -> Iterator[Row]:
    """Send A, B and A again, with and without offloading of B."""
    runs, tokens = (2, 700) if options.quick else (options.runs, 2000)
    # The device has room for one prompt and its answer (and a block of vLLM's own), the primary tier for the prompt's
    # full blocks.
    blocks = -(-(tokens + 16) // BLOCK_TOKENS)
    arguments = ("--num-gpu-blocks-override", str(blocks + 1), "--max-model-len", str(blocks * BLOCK_TOKENS))
    cases: Mapping[str, tuple[str, dict[str, object] | None]] = {
        "none": ("none", None),
        "vllm-primary": ("vllm-primary", None),
        "kvstore-primary": ("kvstore-primary", None),
        "kvstore-selective": ("kvstore-primary", {"kv_transfer_params": {"kvstore": {"store": False}}}),
    }
    loads: dict[str, list[Load]] = {case: [] for case in cases}
    row_bytes = ROW_BYTES_MAX // 16 if options.quick else ROW_BYTES_MAX
    # One more row, because kvstore's region begins with a page of its own.
    room = {"cpu_bytes_to_use": (tokens // BLOCK_TOKENS + 1) * row_bytes}
    names = tuple(dict.fromkeys(system for system, _ in cases.values()))
    with serving(work / "aba", model, names, arguments=arguments, **room) as servers:
        for run in range(runs):
            for case in in_turns(tuple(cases), run):
                system, policy = cases[case]
                # The two cases on one server have different prompts; outputs are compared with the first A.
                a, b = make_prompts(random.Random(f"{run} {policy}"), 2, tokens, VOCABULARY)
                before = serve(servers[system], [a], 8)
                serve(servers[system], [b], 8, policy)
                load = serve(servers[system], [a], 8)
                assert load.texts == before.texts, f"{case}: {load.texts} after {before.texts}"
                loads[case].append(load)
            times = ", ".join(f"{case} {loads[case][-1].answers[0].ttft_s:.3f} s" for case in cases)
            say(f"  run {run + 1}: {times}")
    for case in cases:
        row = row_of("a-b-a", case, loads[case], loads["none"])
        yield {**row, "outputs_equal": True}  # Checked above.


def agents(work: Path, model: Path, systems: Sequence[str], options: argparse.Namespace) -> Iterator[Row]:
    """Send the calls of recorded conversations, as far as an engine has room for their prompts."""
    recorded = [
        [call.prompt for call in calls if len(call.prompt) <= _AGENTS_TOKENS_MAX]
        for calls in read_conversations(options.trajectories, VOCABULARY)
    ]
    count = 4 if options.quick else 16
    room = {"cpu_bytes_to_use": CHAT_BLOCKS * ROW_BYTES_MAX // (16 if options.quick else 1)}
    arguments = ("--num-gpu-blocks-override", str(CHAT_BLOCKS))
    loads: dict[str, list[Load]] = {system: [] for system in systems}
    for run in range(options.runs):
        chosen = random.Random(run).sample(recorded, count)
        with serving(work / f"agents-{run}", model, systems, arguments=arguments, **room) as servers:
            for system in in_turns(systems, run):
                loads[system].append(_converse(servers[system], chosen))
        shutil.rmtree(work / f"agents-{run}")
        say(f"  run {run + 1}: " + ", ".join(f"{s} {loads[s][-1].seconds:.1f} s" for s in systems))
    for system in systems:
        yield row_of("agents", system, loads[system], loads["none"])


def _converse(server: Server, conversations: Sequence[Sequence[Sequence[int]]]) -> Load:
    """Send the prompts of each conversation one after the other, eight conversations at a time."""
    started = time.perf_counter()
    with ThreadPoolExecutor(_AGENTS) as pool:
        found = list(pool.map(lambda prompts: [server.complete(prompt, 16) for prompt in prompts], conversations))
    answers = [answer for each in found for answer in each]
    return Load(answers, time.perf_counter() - started, sum(answer.prompt_tokens + 16 for answer in answers))


def unshared(work: Path, model: Path, systems: Sequence[str], options: argparse.Namespace) -> Iterator[Row]:
    """Send prompts without prefix reuse."""
    size = {"count": CONCURRENCY, "tokens": 300} if options.quick else {"count": 3 * CONCURRENCY, "tokens": 1000}
    yield from overhead(work, model, (*systems, CONTROL), random.Random(7), starts=options.runs, runs=1, **size)


Workload = Callable[[Path, Path, Sequence[str], argparse.Namespace], Iterator[Row]]
WORKLOADS: dict[str, Workload] = {
    "restart": restart, "chat": chat, "a-b-a": a_b_a, "agents": agents, "overhead": unshared
}  # fmt: skip


def main() -> int:
    """Measure and print; returns 0 if all outputs are equal."""
    parser = bench_arguments(__doc__)
    parser.add_argument("--only", help="workloads, by comma (default: all for which there is input)")
    parser.add_argument("--trajectories", type=Path, help="conversations of tau-bench, for the workload agents")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [*WORKLOADS]
    if options.trajectories is None and "agents" in names:
        if options.only:
            parser.error("agents needs --trajectories FILE")
        names.remove("agents")
    options.runs = runs_of(options, 3, quick=2)
    systems = ("none", "vllm-fs", "kvstore-file")
    with reporting(options, COLUMNS, engine=engine()) as rows, bench_setup(options) as (work, model):
        for name in names:
            say(f"{name}: starting servers")
            rows += WORKLOADS[name](work, model, systems, options)
    return 0 if all(row["outputs_equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
