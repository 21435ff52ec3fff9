"""Time to the first word with the gate, with always loading and with always computing, over links of several speeds.

A real `vllm serve` on a CPU receives the same long prompts in turn. Neither the device nor the primary tier has room
for two of them; the tier below holds them all, in memory behind a link of the given speed. The speed changes from point
to point while the servers run, so each point includes the requests in which the gate adapts. ``always-recompute`` sends
``{"load": false}``. ``ratio`` is the p95 divided by the better p95 of always loading and always computing at the same
point. At the last point the link stops for 5 s before each third request.

    python bench/gate.py [--quick] [--requests N] [--json FILE]

The model is a small Llama with random weights. Takes about an hour on two cores; nothing else may run beside it.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

# Add the repository, so that this file runs as a program.
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.common import Row, percentile, reporting
from bench.linked_memory import set_link
from bench.vllm_overhead import BLOCK_TOKENS, VOCABULARY, bench_arguments, bench_setup, make_prompts, say
from examples.serving import Answer, Server

SYSTEMS = ("gate", "always-load", "always-recompute")
POINTS = [(rate, latency) for rate in (10.0, 1.0, 0.1, 0.02) for latency in (0.0, 0.05, 0.5)]
QUICK_POINTS = [(10.0, 0.0), (0.02, 0.5)]
STALL_S = 5.0
PROMPTS = 4
COLUMNS = (
    "link_gb_per_s", "link_latency_s", "stall_s", "system", "ttft_s", "ttft_s_p95", "ratio", "cached_tokens",
    "requests", "outputs_equal",
)  # fmt: skip

_GB = 1e9
_REST_S = 0.3
"""Pause after each answer, in which its blocks are stored."""


def measure(work: Path, model: Path, options: argparse.Namespace) -> Iterator[Row]:
    """Measure all systems at all points; yield a row for each."""
    tokens, row_bytes = (1024, 2**17) if options.quick else (2048, 2**21)
    blocks = tokens // BLOCK_TOKENS
    texts: dict[int, str] = {}
    equal = True
    prompts = make_prompts(random.Random(20261123), PROMPTS, tokens, VOCABULARY)
    points = [(*point, 0.0) for point in (QUICK_POINTS if options.quick else POINTS)]
    if not options.quick:
        points.append((10.0, 0.0, STALL_S))
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        links = {name: work / f"{name}.link" for name in ("gate", "always-load")}
        for name, link in links.items():
            set_link(link, 10 * _GB, 0.0)
            servers[name] = Server(
                name,
                model,
                work,
                offloading={
                    "spec_name": "KVStoreOffloadingSpec",
                    "spec_module_path": "kvstore.vllm",
                    # Room for a prompt, its answer, the row of the workers' counters, and a probe of the gate.
                    "cpu_bytes_to_use": (blocks + blocks // 4) * row_bytes,
                    "tiering": {"gate": name == "gate"},
                    "secondary_tiers": [
                        {"type": "bench.linked_memory:LinkedMemory", "link": str(link), "load_timeout": 60}
                    ],
                },
                block_tokens=BLOCK_TOKENS,
                arguments=(
                    *("--num-gpu-blocks-override", str(blocks + 3)),
                    *("--max-model-len", str(tokens + BLOCK_TOKENS)),
                ),
            )
            stack.callback(servers[name].kill)
        # Two equal servers may differ by a tenth in speed, so the gate is compared on the same server.
        servers["always-recompute"] = servers["gate"]
        for name in links:
            servers[name].wait_ready()
            for prompt in prompts:
                servers[name].complete(prompt, 2)
                time.sleep(_REST_S)
        for rate, latency, stall in points:
            answers: Mapping[str, list[Answer]] = {system: [] for system in SYSTEMS}
            for link in links.values():
                set_link(link, rate * _GB, latency)
            for number in range(options.requests):
                for system in SYSTEMS if number % 2 else reversed(SYSTEMS):
                    if stall and number % 3 == 2:
                        for link in links.values():
                            set_link(link, rate * _GB, latency, stall)
                    body = {"kv_transfer_params": {"kvstore": {"load": False}}} if "recompute" in system else None
                    # The two systems of one server use different prompts, neither of which it holds in memory.
                    place = (number + (PROMPTS // 2 if body else 0)) % PROMPTS
                    answers[system].append(servers[system].complete(prompts[place], 2, body))
                    equal &= texts.setdefault(place, answers[system][-1].text) == answers[system][-1].text
                    time.sleep(_REST_S)
            for row in _rows(rate, latency, stall, answers):
                yield {**row, "outputs_equal": equal}


def _rows(rate: float, latency: float, stall: float, answers: Mapping[str, list[Answer]]) -> Iterator[Row]:
    p95 = {system: percentile([answer.ttft_s for answer in answers[system]], 0.95) for system in SYSTEMS}
    better = min(p95["always-load"], p95["always-recompute"])
    for system in SYSTEMS:
        yield {
            "bench": "gate",
            "op": "ask",
            "system": system,
            "link_gb_per_s": rate,
            "link_latency_s": latency,
            "stall_s": stall,
            "ttft_s": statistics.median(answer.ttft_s for answer in answers[system]),
            "ttft_s_p95": p95[system],
            "ttft_s_max": max(answer.ttft_s for answer in answers[system]),
            "ratio": p95[system] / better,
            "cached_tokens": statistics.median(answer.cached_tokens for answer in answers[system]),
            "requests": len(answers[system]),
        }
    say(f"  {rate} GB/s, {latency} s: " + ", ".join(f"{system} {p95[system]:.3f} s" for system in SYSTEMS))


def main() -> int:
    """Measure and print; returns 0 if all outputs are equal."""
    parser = bench_arguments(__doc__)
    parser.add_argument("--requests", type=int, help="requests of each system at each point (default: 60)")
    options = parser.parse_args()
    options.requests = options.requests or (4 if options.quick else 60)
    # The servers import the medium from the repository.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with reporting(options, COLUMNS) as rows, bench_setup(options) as (work, model):
        for row in measure(work, model, options):
            rows.append(row)
    return 0 if all(row["outputs_equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
