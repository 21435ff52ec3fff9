"""Sizes, durations and capacities, parsed from text with units."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Final, NoReturn

from kvstore.errors import ConfigError
from kvstore.secret import shown

_BYTES_PER_UNIT: Final = {
    **{unit: 1024**power for power, unit in enumerate(("b", "kib", "mib", "gib", "tib", "pib"))},
    **{unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb", "pb"))},
}
_SECONDS_PER_UNIT: Final = {
    "us": Fraction(1, 1_000_000),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
_QUANTITY: Final = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z%]*)\s*", re.ASCII)
_BYTES_MAX: Final = 2**63 - 1
"""Largest size: the maximum of a signed 64-bit file offset."""
_DURATION_MAX: Final = 10 * 365 * 86400.0
"""Longest duration in seconds (ten years): longer ones are mistakes, and overflow clocks and timers."""


class ByteSize(int):
    """A number of bytes, written ``1048576``, ``"512MiB"``, ``"2TB"`` (powers of 1000) or ``"2TiB"`` (of 1024).

    Units are case-insensitive; a fraction (``"1.5GiB"``) is rounded down to whole bytes.
    """

    __slots__ = ()

    def __new__(cls, value: int | float | str) -> ByteSize:
        return super().__new__(cls, _parse_size(value))

    @property
    def text(self) -> str:
        """The exact size with the largest unit that divides it: ``"512MiB"``, or plain bytes."""
        for unit, scale in (("PiB", 1024**5), ("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
            if self and self % scale == 0:
                return f"{int(self) // scale}{unit}"
        return str(int(self))


class Seconds(float):
    """A duration, written ``1.5`` (seconds), ``"250ms"``, ``"5s"``, ``"10m"``, ``"2h"``, ``"7d"``."""

    __slots__ = ()

    def __new__(cls, value: float | str) -> Seconds:
        return super().__new__(cls, _parse_duration(value))


class Capacity:
    """A limit in bytes, absolute or as a share of the filesystem: ``1048576``, ``"500GiB"``, ``"80%"``.

    Immutable. Exactly one of the attributes is set.
    """

    __slots__ = ("percent", "size_bytes")
    size_bytes: ByteSize | None  # The absolute limit, or None.
    percent: Fraction | None  # The share, above 0 and at most 100, or None.

    def __init__(self, value: int | float | str | Capacity) -> None:
        size, percent = _parse_capacity(value)
        object.__setattr__(self, "size_bytes", size)
        object.__setattr__(self, "percent", percent)

    def resolve(self, total_bytes: int) -> int:
        """Return the limit in bytes, for a filesystem of ``total_bytes`` (which an absolute limit ignores)."""
        if self.percent is None:
            return int(self.size_bytes or 0)
        return int(total_bytes * self.percent / 100)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"Capacity is immutable; make a new one instead of setting {name!r}.")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Capacity):
            return NotImplemented
        return (self.size_bytes, self.percent) == (other.size_bytes, other.percent)

    def __hash__(self) -> int:
        return hash((self.size_bytes, self.percent))

    def __reduce__(self) -> tuple[type[Capacity], tuple[str]]:
        return Capacity, (str(self),)

    def __str__(self) -> str:
        if self.percent is None:
            return ByteSize(self.size_bytes or 0).text
        # Exact: a percentage has at most 23 decimal digits, and Decimal divides with 28.
        return f"{Decimal(self.percent.numerator) / Decimal(self.percent.denominator):f}%"

    def __repr__(self) -> str:
        return f"Capacity({str(self)!r})"


def _parse_quantity(value: str, units: Mapping[str, int | Fraction], default: str) -> Fraction | None:
    """Return number times unit, or None if ``value`` does not have this form."""
    match = _QUANTITY.fullmatch(value)
    if match is None:
        return None
    scale = units.get((match[2] or default).lower())
    return None if scale is None else Fraction(match[1]) * scale


def _parse_size(value: object) -> int:
    size: int | Fraction | None = None
    if isinstance(value, str):
        size = _parse_quantity(value, _BYTES_PER_UNIT, "b")
    elif (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer()):
        size = int(value)
    if size is None or not 0 <= size <= _BYTES_MAX:
        raise ConfigError(
            f"{shown(value)} is not a valid size. Expected a number of bytes from 0 to 2**63 - 1, such as 1048576, "
            "'512MiB' (1024 based) or '2TB' (1000 based). "
            "Write it with one of B, KiB, MiB, GiB, TiB, PiB, KB, MB, GB, TB, PB."
            f"{_suggestion(value)}"
        )
    return int(size)


def _suggestion(value: object) -> str:
    """Return a suggestion for an ambiguous or abbreviated unit used by other programs (5G, 5Gi); empty if none."""
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or not re.fullmatch("[kmgtp]i?", match[2], re.IGNORECASE):
        return ""
    letter = match[2][0].upper()
    binary = f"'{match[1]}{letter}iB'"
    return f" Did you mean {binary}?" if len(match[2]) == 2 else f" Did you mean {binary} or '{match[1]}{letter}B'?"


def _parse_duration(value: object) -> float:
    seconds: float | Fraction | None = None
    if isinstance(value, str):
        seconds = _parse_quantity(value, _SECONDS_PER_UNIT, "s")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value
    # NaN fails this form of the comparison.
    if seconds is None or not 0 <= seconds <= _DURATION_MAX:
        raise ConfigError(
            f"{shown(value)} is not a valid duration. Expected seconds from 0 to ten years, such as 1.5, '250ms', '5s' "
            "or '10m'. Write it with one of us, ms, s, m, h, d."
        )
    return float(seconds)


def _parse_capacity(value: object) -> tuple[ByteSize | None, Fraction | None]:
    if isinstance(value, Capacity):
        return value.size_bytes, value.percent
    if isinstance(value, str) and value.strip().endswith("%"):
        percent = _parse_quantity(value, {"%": 1}, "%")
        if percent is None or not 0 < percent <= 100:
            raise ConfigError(
                f"{shown(value)} is not a valid share. Expected above 0% and at most 100%, such as '80%'."
            )
        return None, percent
    try:
        return ByteSize(value), None  # type: ignore[arg-type]  # ByteSize refuses an invalid size
    except ConfigError as error:
        raise ConfigError(f"{error} Or give a share of the filesystem, such as '80%'.") from None
