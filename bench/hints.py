"""Hits with hints, compared with eviction policies without hints and Belady's optimum, on generated agent sessions.

Most turns of a session are followed by a tool call, the others by a pause of the user. Tools take about a known time
(``spread``: standard deviation of its logarithm). The hints of a request contain the shared part of its prompt, the
approximate time of the next turn, and the end of the session. ``of_optimum`` is the ratio of hits to those of Belady's
optimum.

    python bench/hints.py [--quick] [--requests N] [--json FILE]

This is a simulation with the real manager, sizes and keys only, so the result does not depend on the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

# Add the repository, so that this file runs as a program.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import Row, arguments, reporting
from kvstore.cli.bench.simulation import OPTIMUM, ReplayCase, ReplaySettings, replay
from kvstore.cli.bench.traces import TraceShape, generate_trace

SHAPES = [(0.7, 0.3), (0.7, 0.0), (1.0, 0.3), (1.0, 0.0)]
"""Share of turns followed by a tool call, and spread of the tools' times."""
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)
"""Capacities, as shares of the blocks of the trace."""
COLUMNS = ("tools", "spread", "capacity_share", "system", "hit_rate", "of_optimum")


def measure(requests: int) -> Iterator[Row]:
    """Replay all traces; yield a row for each system."""
    settings = ReplaySettings()
    for tools, spread in SHAPES:
        shape = TraceShape(
            requests, block_tokens=128, systems=10, system_tokens=2000, documents=0, turns=8.0, question_tokens=1500,
            chats_per_s=0.5, think_s=120.0, tool_share=tools, tool_s=20.0, tool_spread=spread,
        )  # fmt: skip
        plain, hinted = generate_trace(shape), generate_trace(replace(shape, hints=True))
        for share in SHARES:
            size = round(plain.distinct_blocks * share) * settings.block_bytes(plain)
            best = replay(plain, ReplayCase(OPTIMUM, size), settings)["hit_blocks"]
            for system in ("lru", "arc", "hints"):
                case = ReplayCase("lru" if system == "hints" else system, size)
                found = replay(hinted if system == "hints" else plain, case, settings)
                yield {
                    "bench": "hints",
                    "op": "replay",
                    "system": system,
                    "tools": tools,
                    "spread": spread,
                    "capacity_share": share,
                    "hit_rate": found["hit_rate"],
                    "of_optimum": found["hit_blocks"] / best,
                }


def main() -> None:
    """Replay and print."""
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, help="requests of each trace (default: 2000, with --quick 300)")
    options = parser.parse_args()
    with reporting(options, COLUMNS) as rows:
        rows.extend(measure(options.requests or (300 if options.quick else 2000)))


if __name__ == "__main__":
    main()
