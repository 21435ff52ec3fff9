"""Python work beside a measurement, as a busy scheduler does it, and the share of its speed that it keeps."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Final

__all__ = ["PythonWork", "Spinner"]

_LOOPS: Final = 1000
_ALONE_S: Final = 0.3
"""Time in which the rate alone is measured; longer changes its third digit."""


class PythonWork:
    """Pure Python work in steps of ``loops`` turns.

    Attributes:
        alone: Steps per second without other work.
    """

    def __init__(self, loops: int = _LOOPS) -> None:
        self.loops = loops
        steps, started = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < _ALONE_S:
            self.step()
            steps += 1
        self.alone = steps / elapsed

    def step(self) -> None:
        """Do one step."""
        total = 0
        for i in range(self.loops):
            total += i & 3

    def share_of(self, steps: int, seconds: float) -> float:
        """Return the rate of ``steps`` in ``seconds``, relative to the rate alone."""
        return steps / seconds / self.alone


class Spinner:
    """Context in which a thread does Python work without a pause.

    Attributes:
        steps: Steps done so far.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._work = PythonWork()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

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
        """Return the rate of ``steps`` in ``seconds``, relative to the rate alone."""
        return self._work.share_of(steps, seconds)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._work.step()
            self.steps += 1
