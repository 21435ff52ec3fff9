"""A thread that is busy in Python beside a measurement, as an engine's scheduler is, and what that costs it."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Final

__all__ = ["Spinner"]

_STEPS: Final = 1000
_ALONE_S: Final = 0.3
"""Time in which the rate of the thread alone is measured; longer changes its third digit."""


class Spinner:
    """Context in which a thread does pure Python without a pause.

    Attributes:
        alone: Its rate when nothing else ran, in steps per second.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._steps = 0
        self._thread: threading.Thread | None = None
        self.alone = self._rate_alone()

    @property
    def steps(self) -> int:
        """Steps done so far."""
        return self._steps

    def __enter__(self) -> Spinner:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="spinner", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def share_of(self, steps: int, seconds: float) -> float:
        """Return the rate of so many steps in so many seconds over the rate alone."""
        return steps / seconds / self.alone

    def _rate_alone(self) -> float:
        started = time.perf_counter()
        timer = threading.Timer(_ALONE_S, self._stop.set)
        timer.start()
        self._run()
        timer.join()
        steps, self._steps = self._steps, 0
        return steps / (time.perf_counter() - started)

    def _run(self) -> None:
        while not self._stop.is_set():
            total = 0
            for i in range(_STEPS):
                total += i & 3
            self._steps += 1
