"""Requests and bytes, and what they cost at given prices. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from kvstore.errors import ConfigError

__all__ = ["CostRow", "Prices", "Traffic", "cost_table"]

_GB: Final = 1e9
_NAMES: Final = ("put_1000", "get_1000", "list_1000", "delete_1000", "sent_gb", "received_gb", "stored_gb_month")


class Prices(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Prices in dollars. The defaults are those of S3 Standard in us-east-1, within the region, in 2025.

    Source: https://aws.amazon.com/s3/pricing/

    Attributes:
        put_1000: A thousand PUT requests.
        get_1000: A thousand GET or HEAD requests.
        list_1000: A thousand LIST requests.
        delete_1000: A thousand DeleteObjects requests.
        sent_gb: 1e9 bytes from us to the service.
        received_gb: 1e9 bytes from the service to us. Across regions or out of AWS it is not free.
        stored_gb_month: 1e9 bytes, for a month.

    Raises:
        ConfigError: A price is below zero, or no number.
    """

    put_1000: float = 0.005
    get_1000: float = 0.0004
    list_1000: float = 0.005
    delete_1000: float = 0.0
    sent_gb: float = 0.0
    received_gb: float = 0.0
    stored_gb_month: float = 0.023

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in _NAMES:
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"'{name}' is {value!r}. Expected dollars, 0 or more. Correct it.")


@dataclass(slots=True)
class Traffic:
    """Attempts that were sent, by what they cost, and bytes of objects that moved."""

    puts: int = 0
    gets: int = 0
    heads: int = 0
    lists: int = 0
    deletes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CostRow:
    """One line of the table of costs.

    Attributes:
        what: ``put``, ``get``, ``head``, ``list``, ``delete``, ``total`` (of all these), or ``stored_month`` (what is
            there now, for a month; only if that is known).
        requests: Requests so far, failed ones and retries too, as services charge them.
        size_bytes: Bytes that they moved.
        dollars: What it cost.
    """

    what: str
    requests: int
    size_bytes: int
    dollars: float


def cost_table(traffic: Traffic, prices: Prices, stored_bytes: int = 0) -> Sequence[CostRow]:
    """Return what the traffic of a client cost so far, line by line, with its total.

    Args:
        traffic: What was sent.
        prices: At which prices.
        stored_bytes: What lies there now, if that is known.
    """
    table = (
        ("put", traffic.puts, prices.put_1000, traffic.sent_bytes, prices.sent_gb),
        ("get", traffic.gets, prices.get_1000, traffic.received_bytes, prices.received_gb),
        ("head", traffic.heads, prices.get_1000, 0, 0.0),
        ("list", traffic.lists, prices.list_1000, 0, 0.0),
        ("delete", traffic.deletes, prices.delete_1000, 0, 0.0),
    )
    rows = [
        CostRow(what, requests, size, requests / 1000 * per_1000 + size / _GB * per_gb)
        for what, requests, per_1000, size, per_gb in table
    ]
    sums = sum(row.requests for row in rows), sum(row.size_bytes for row in rows), sum(row.dollars for row in rows)
    rows.append(CostRow("total", *sums))
    if stored_bytes:
        rows.append(CostRow("stored_month", 0, stored_bytes, stored_bytes / _GB * prices.stored_gb_month))
    return rows
