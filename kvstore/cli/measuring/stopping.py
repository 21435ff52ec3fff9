"""Ctrl-C: the first one ends a measurement, whose results are reported; the second one ends it immediately."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Stopping"]


class Stopping:
    """Context that notes SIGINT and SIGTERM; calling it returns whether one arrived."""

    def __init__(self) -> None:
        self._count = 0
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        """Return whether to stop."""
        return self._count > 0

    def __enter__(self) -> Stopping:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            raise KeyboardInterrupt
