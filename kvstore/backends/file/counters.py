"""Counts by name, from many threads."""

from __future__ import annotations

import threading

__all__ = ["Counters"]


class Counters:
    """Monotonic counts; each starts at zero, and all of them are shown from the start. Thread-safe.

    Args:
        *names: The counts there are.
    """

    def __init__(self, *names: str) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(names, 0)

    def add(self, name: str, count: int = 1) -> None:
        """Add to a count."""
        if count:
            with self._lock:
                self._counts[name] += count

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def snapshot(self) -> dict[str, int]:
        """Return all counts."""
        with self._lock:
            return dict(self._counts)
