"""Sizes and ages as people read them in a table: a few digits and a unit; :mod:`kvstore.quantity` is exact."""

from __future__ import annotations

__all__ = ["age_text", "rounded_size"]


def rounded_size(size_bytes: int) -> str:
    """Return a size with three digits and a unit."""
    power = next((power for power in range(5) if size_bytes < 1000 * 1024**power), 5)
    return f"{size_bytes / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}"


def age_text(seconds: float | None) -> str | None:
    """Return an age as people read it, in its largest whole unit."""
    if seconds is None:
        return None
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)}{unit}"
    return f"{int(seconds)}s"
