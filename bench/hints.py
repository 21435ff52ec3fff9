"""Hits with hints, beside eviction policies without hints and Belady's optimum, on generated sessions of agents.

After most turns of a session a tool runs, after the others a person thinks; tools take a known time, more or less
(``spread``: standard deviation of its logarithm). Requests say which part of their prompt is shared, about when they
come back, and which turn is the last. ``of_optimum`` is the hits over those of a cache that knows the rest of the
trace.

    python bench/hints.py [--quick] [--json FILE]

A simulation through the real manager, with sizes and keys only: the result does not depend on the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

# The repository, so that this runs as a program.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import Row, arguments, print_table, write_json
from kvstore.cli.replaying.generator import TraceShape, generate_trace
from kvstore.cli.replaying.optimum import OPTIMUM
from kvstore.cli.replaying.replay import ReplayCase, ReplaySettings, replay

SHAPES = [(0.7, 0.3), (0.7, 0.0), (1.0, 0.3), (1.0, 0.0)]
"""Share of turns that a tool ends, and spread of the tools' times."""
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
            for system in ("lru", "s3fifo", "arc", "hints"):
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


def main() -> int:
    """Replay and print; returns 0."""
    options = arguments(__doc__).parse_args()
    rows = list(measure(300 if options.quick else 2000))
    print_table(rows, COLUMNS)
    write_json(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
