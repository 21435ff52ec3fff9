"""Compact HDR histograms of latencies: three digits, from 1 ns to an hour; the only module that uses the library."""

from __future__ import annotations

import math
from typing import Any, Final

from hdrh.histogram import HdrHistogram

_HIGHEST_NS: Final = 3600 * 10**9
_DIGITS: Final = 3
_PERCENTILES: Final = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99_9": 99.9}


class Latencies:
    """Latencies of one operation.

    The text form is that of all HdrHistogram libraries (version 2, compressed, base64), in nanoseconds.
    """

    def __init__(self) -> None:
        self._histogram: Any = HdrHistogram(1, _HIGHEST_NS, _DIGITS)

    @classmethod
    def from_text(cls, text: str) -> Latencies:
        """Return the histogram that :meth:`as_text` wrote. ``ValueError``: the text is not a histogram."""
        found = cls()
        try:
            found._histogram.decode_and_add(text)
        # The library does not catch exceptions of base64, zlib and struct.
        except Exception as error:
            raise ValueError(f"no HDR histogram: {type(error).__name__}") from error
        return found

    def add(self, seconds: float, count: int = 1) -> None:
        """Record a latency ``count`` times."""
        self._histogram.record_value(max(1, min(round(seconds * 1e9), _HIGHEST_NS)), count)

    def merge(self, other: Latencies) -> None:
        """Add the values of another histogram."""
        self._histogram.add(other._histogram)

    @property
    def count(self) -> int:
        """Number of recorded latencies."""
        return int(self._histogram.get_total_count())

    def percentile(self, percent: float) -> float:
        """Return a percentile of the latencies, in seconds; NaN without values."""
        if not self.count:
            return math.nan
        return float(self._histogram.get_value_at_percentile(percent)) / 1e9

    def as_row(self) -> dict[str, Any]:
        """Return the fields of a row: ``latency_s_p50`` to ``latency_s_max``, the count, and the whole histogram."""
        if not self.count:
            return {}
        named = {f"latency_s_{name}": self.percentile(percent) for name, percent in _PERCENTILES.items()}
        return {
            **named,
            "latency_s_max": float(self._histogram.get_max_value()) / 1e9,
            "latencies": self.count,
            "latency_hdr": self.as_text(),
        }

    def as_text(self) -> str:
        encoded: bytes = self._histogram.encode()
        return encoded.decode("ascii")

    def points(self) -> list[tuple[float, float]]:
        """Return (share of all, latency in seconds) from 0 to the last share with enough values, for a curve."""
        shares = [0.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95, 99.99, 99.999]
        return [
            (share / 100, self.percentile(share)) for share in shares if share == 0 or self.count * (100 - share) >= 50
        ]
