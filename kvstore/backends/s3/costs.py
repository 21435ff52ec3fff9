"""What requests and bytes cost at given prices. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from kvstore.backends.s3.client import Traffic
from kvstore.errors import ConfigError

__all__ = ["CostRow", "Prices", "cost_table"]

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
    rows = [
        CostRow(
            "put",
            traffic.puts,
            traffic.sent_bytes,
            traffic.puts / 1000 * prices.put_1000 + traffic.sent_bytes / _GB * prices.sent_gb,
        ),
        CostRow(
            "get",
            traffic.gets,
            traffic.received_bytes,
            traffic.gets / 1000 * prices.get_1000 + traffic.received_bytes / _GB * prices.received_gb,
        ),
        CostRow("head", traffic.heads, 0, traffic.heads / 1000 * prices.get_1000),
        CostRow("list", traffic.lists, 0, traffic.lists / 1000 * prices.list_1000),
        CostRow("delete", traffic.deletes, 0, traffic.deletes / 1000 * prices.delete_1000),
    ]
    total = CostRow(
        "total",
        sum(row.requests for row in rows),
        sum(row.size_bytes for row in rows),
        sum(row.dollars for row in rows),
    )
    stored = CostRow("stored_month", 0, stored_bytes, stored_bytes / _GB * prices.stored_gb_month)
    return [*rows, total, *([stored] if stored_bytes else [])]
