"""Requests and bytes, and what they cost at given prices. Plain arithmetic."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import msgspec

from kvstore.errors import ConfigError

__all__ = ["REQUESTS", "Prices", "Traffic", "costs_usd"]

REQUESTS: Final = ("put", "get", "head", "list", "delete")
_GB: Final = 1e9


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
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"'{name}' is {value!r}. Expected dollars, 0 or more. Correct it.")


@dataclass(slots=True)
class Traffic:
    """Attempts that were sent, by ``REQUESTS``, and bytes of objects that they moved."""

    requests: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0
    received_bytes: int = 0


def costs_usd(traffic: Traffic, prices: Prices, stored_bytes: int = 0) -> dict[str, float]:
    """Return what the traffic of a client cost so far: each kind of request with its bytes, and the total.

    Failed requests and retries count, as services charge them. ``stored_month`` is the price of a month of
    ``stored_bytes``, if that is known.
    """
    per_1000 = {
        "put": prices.put_1000,
        "get": prices.get_1000,
        "head": prices.get_1000,
        "list": prices.list_1000,
        "delete": prices.delete_1000,
    }
    costs = {what: traffic.requests[what] / 1000 * price for what, price in per_1000.items()}
    costs["put"] += traffic.sent_bytes / _GB * prices.sent_gb
    costs["get"] += traffic.received_bytes / _GB * prices.received_gb
    costs["total"] = sum(costs.values())
    if stored_bytes:
        costs["stored_month"] = stored_bytes / _GB * prices.stored_gb_month
    return costs
