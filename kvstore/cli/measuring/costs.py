"""Cost of a measurement at a service that charges for requests, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore.cli.reporting.report import Row
from kvstore.cli.reporting.terminal import Column, print_line, print_table
from kvstore.tiers.base import TierStats

__all__ = ["cost_rows", "print_costs"]

_COST: Final = "cost_usd_"
_BYTES: Final = {"put": "sent_bytes", "get": "received_bytes"}
_COLUMNS: Final = (
    Column("system", "system", left=True, style="bold"),
    Column("block_bytes", "block bytes"),
    Column("what", "what", left=True),
    Column("requests", "requests"),
    Column("size_bytes", "bytes"),
    Column("dollars", "dollars", style="bold"),
)


def cost_rows(system: str, block_bytes: int, stats: TierStats) -> list[Row]:
    """Return one row per kind of request, and the total; none for a tier without costs per request.

    Args:
        system: Name of the tier in tables.
        block_bytes: Length of the measured blocks.
        stats: The tier's statistics; gauges ``cost_usd_<kind>`` are the costs since it was opened.
    """
    counters = stats.backend_counters
    costs = {name[len(_COST) :]: value for name, value in stats.backend_gauges.items() if name.startswith(_COST)}
    requests = {what: counters.get(f"requests_{what}") for what in costs}
    sizes = {what: counters.get(_BYTES.get(what, "")) for what in costs}
    if "total" in costs:
        requests["total"] = sum(count or 0 for count in requests.values())
        sizes["total"] = sum(size or 0 for size in sizes.values())
    return [
        {
            "system": system,
            "block_bytes": block_bytes,
            "what": what,
            "requests": requests[what],
            "size_bytes": sizes[what],
            "dollars": dollars,
        }
        for what, dollars in costs.items()
    ]


def print_costs(rows: Sequence[Row]) -> None:
    """Print the table, if there is anything to pay."""
    if rows:
        print_line("Costs, of filling and clearing as well:")
        print_table([{**row, "dollars": f"{row['dollars']:.6f}"} for row in rows], _COLUMNS)
