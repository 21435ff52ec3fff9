"""Times to the first token of an engine with many concurrent requests: gate, always loading, always computing.

Chats go through the real manager, over a simulated disk tier whose link has a rate and a latency. The engine computes
10,000 prompt tokens per second, of 128 KiB each; ``load`` is the share of time that it would compute without any hit.
``bench/gate.py`` measures a real engine, one request after the other.

    python bench/gate_busy.py [--quick] [--requests N] [--json FILE]

Time is simulated, so the result does not depend on the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

# Add the repository, so that this file runs as a program.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import Row, arguments, reporting
from kvstore.cli.bench.engine import Link
from kvstore.cli.bench.simulation import ReplayCase, ReplaySettings, replay
from kvstore.cli.bench.traces import TraceShape, generate_trace
from kvstore.cli.tier_argument import parse_tier

LOADS = (0.1, 0.5, 0.9, 1.3)
LINKS = ((10e9, 0.001), (2e9, 0.005), (1e9, 0.02), (0.3e9, 0.02), (0.05e9, 0.1))
"""Rate (bytes per second) and latency (seconds); at 1.3 GB/s, loading a token takes as long as computing it."""
SYSTEMS = {"gate": (True, {}), "always-load": (False, {}), "always-recompute": (False, {"load": False})}
TIMES = ("ttft_s_p50", "ttft_s_p95")
COLUMNS = ("load", "link_gb_per_s", "link_latency_s", "system", *TIMES, "of_better_p50", "of_better_p95", "hit_rate")


def measure(requests: int) -> Iterator[Row]:
    """Replay the trace at each load over each link; yield a row for each system."""
    trace = generate_trace(TraceShape(requests, seed=1))
    disk = [parse_tier('{"type": "file", "path": "/nowhere", "capacity": "10TiB"}')]
    settings = ReplaySettings(tiers=disk, cpu_bytes=16 << 30, concurrency=64)
    computing_s = trace.tokens / settings.prefill_tokens_per_s
    for load in LOADS:
        speed = load * trace.requests[-1].timestamp / 1000 / computing_s
        for rate, latency_s in LINKS:
            found = {
                name: replay(
                    trace,
                    ReplayCase(),
                    replace(settings, speed=speed, links=[Link(rate, latency_s)], gate=gate, offload=offload),
                )
                for name, (gate, offload) in SYSTEMS.items()
            }
            better = [min(found[name][time] for name in list(SYSTEMS)[1:]) for time in TIMES]
            for name, row in found.items():
                yield {
                    "bench": "gate-busy",
                    "op": "replay",
                    "system": name,
                    "load": load,
                    "link_gb_per_s": rate / 1e9,
                    "link_latency_s": latency_s,
                    **{time: row[time] for time in TIMES},
                    "of_better_p50": row[TIMES[0]] / better[0],
                    "of_better_p95": row[TIMES[1]] / better[1],
                    "hit_rate": row["hit_rate"],
                }


def main() -> None:
    """Replay and print."""
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, help="requests of the trace (default: 1000, with --quick 300)")
    options = parser.parse_args()
    with reporting(options, COLUMNS) as rows:
        rows.extend(measure(options.requests or (300 if options.quick else 1000)))


if __name__ == "__main__":
    main()
