"""Sizes and durations of the command line: parsed from options, and rounded for tables.

Texts for tables have a few digits and a unit; :mod:`kvstore.quantity` is exact.
"""

from __future__ import annotations

from kvstore.errors import ConfigError
from kvstore.quantity import ByteSize, Seconds

__all__ = ["age_text", "duration_option", "rounded_size", "size_option"]


def size_option(text: str, option: str) -> ByteSize:
    """Return the size that an option was given.

    Raises:
        ConfigError: It is not a valid size; the text names the option.
    """
    try:
        return ByteSize(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def duration_option(text: str, option: str) -> Seconds:
    """Return the duration that an option was given.

    Raises:
        ConfigError: It is not a valid duration; the text names the option.
    """
    try:
        return Seconds(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def rounded_size(size_bytes: int) -> str:
    """Return a size with three digits and a unit."""
    power = next((power for power in range(5) if size_bytes < 1000 * 1024**power), 5)
    return f"{size_bytes / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}"


def age_text(seconds: float | None) -> str | None:
    """Return an age as text, in its largest whole unit."""
    if seconds is None:
        return None
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)}{unit}"
    return f"{int(seconds)}s"
