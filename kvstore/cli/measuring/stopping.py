"""Ctrl-C: the first ends a measurement in good order, and what was measured is reported; the second, at once."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Stopping"]


class Stopping:
    """Context in which SIGINT and SIGTERM are noted; called, it tells whether one came."""

    def __init__(self) -> None:
        self._count = 0
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        """Tell whether to stop."""
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
