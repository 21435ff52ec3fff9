"""Hits of a tenant beside a neighbour with ten times its traffic, and of a neighbour beside an idle tenant.

The victim's trace is generated, or a file in Mooncake's format; the neighbour's consists of ten such traces with other
blocks. They share CPU memory: without tenants (``one cache``), as tenants without guarantees (``equal``), and with a
guaranteed share for the victim (``guaranteed``). ``of_alone`` is the ratio of a tenant's hits to its hits alone in the
whole memory, and ``of_share`` to its hits alone in its share.

    python bench/tenants.py [--quick] [--requests N] [--trace FILE] [--json FILE]

This is a simulation with the real manager, sizes and keys only, so the result does not depend on the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

# Add the repository, so that this file runs as a program.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import Row, arguments, reporting
from kvstore.cli.bench.simulation import ReplayCase, ReplaySettings, replay
from kvstore.cli.bench.traces import Trace, TraceRequest, TraceShape, generate_trace, read_trace
from kvstore.tenants import Tenant, Tenants

NEIGHBOURS = 10
GUARANTEED = 0.5
SHARES = (0.25, 0.5, 1.0, 2.0)
"""Guaranteed memory, as shares of the victim's blocks."""
COLUMNS = ("guaranteed_of_blocks", "system", "tenant", "hit_rate", "of_alone", "of_share")


def traces(requests: int, file: str | None) -> Iterator[Trace]:
    """Yield the victim's trace, then the parts of the neighbour's."""
    for seed in range(1 + NEIGHBOURS):
        if file is None:
            yield generate_trace(TraceShape(requests, seed))
        else:
            yield read_trace(file, limit=requests)


def together(parts: Sequence[tuple[str, Trace]], *, until_ms: float = float("inf")) -> Trace:
    """Return the requests of several traces in one, each with its tenant and with blocks of its own.

    Args:
        parts: Name of the tenant, and trace.
        until_ms: End of the victim's requests.
    """
    found: list[TraceRequest] = []
    for number, (name, trace) in enumerate(parts):
        # Copies of one trace must not make the same request at the same time.
        shift = number * 997
        for request in trace:
            if name == "victim" and request.timestamp > until_ms:
                continue
            found.append(
                replace(
                    request,
                    timestamp=request.timestamp + shift,
                    hash_ids=tuple(block * (1 + NEIGHBOURS) + number for block in request.hash_ids),
                    kvstore={"tenant": name},
                )
            )
    found.sort(key=lambda request: request.timestamp)
    return Trace(found, block_tokens=parts[0][1].block_tokens, name="tenants")


def measure(requests: int, file: str | None) -> Iterator[Row]:
    """Replay all cases; yield a row for each tenant."""
    victim, *others = traces(requests, file)
    neighbours = [("neighbour", other) for other in others]
    both = together([("victim", victim), *neighbours])
    idle = together([("victim", victim), *neighbours], until_ms=max(each.timestamp for each in victim) / 10)
    alone = {"victim": together([("victim", victim)]), "neighbour": together(neighbours)}
    equal = Tenants(by="parameter", named={"victim": Tenant(), "neighbour": Tenant()})
    guaranteed = Tenants(by="parameter", named={"victim": Tenant(guaranteed=GUARANTEED), "neighbour": Tenant()})

    def hits(trace: Trace, slots: int, tenants: Tenants | None = None) -> dict[str, tuple[int, int]]:
        """Return hits and blocks by tenant."""
        size = slots * ReplaySettings().block_bytes(trace)
        row = replay(trace, ReplayCase("lru", size), ReplaySettings(tenants=tenants))
        return {name: (found["hit_blocks"], found["blocks"]) for name, found in row["tenants"].items()}

    for share in SHARES:
        slots = round(victim.distinct_blocks * share / GUARANTEED)
        whole = {name: hits(trace, slots)[name][0] for name, trace in alone.items()}
        part = {
            "victim": hits(alone["victim"], round(slots * GUARANTEED))["victim"][0],
            "neighbour": hits(alone["neighbour"], round(slots * (1 - GUARANTEED)))["neighbour"][0],
        }
        cases = {
            "one cache": hits(both, slots),
            "equal": hits(both, slots, equal),
            "guaranteed": hits(both, slots, guaranteed),
            "guaranteed, idle": {"neighbour": hits(idle, slots, guaranteed)["neighbour"]},
        }
        for system, found in cases.items():
            for name, (count, blocks) in sorted(found.items(), reverse=True):
                yield {
                    "bench": "tenants",
                    "op": "replay",
                    "system": system,
                    "tenant": name,
                    "guaranteed_of_blocks": share,
                    "hit_rate": count / blocks,
                    "of_alone": count / whole[name],
                    "of_share": count / part[name],
                }


def main() -> None:
    """Replay and print."""
    parser = arguments(__doc__)
    parser.add_argument("--trace", metavar="FILE", help="the victim's trace, in Mooncake's format")
    parser.add_argument("--requests", type=int, help="requests of each trace (default: 1000, with --quick 200)")
    options = parser.parse_args()
    with reporting(options, COLUMNS) as rows:
        rows.extend(measure(options.requests or (200 if options.quick else 1000), options.trace))


if __name__ == "__main__":
    main()
