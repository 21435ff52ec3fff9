"""Python work beside a measurement, like that of a busy scheduler, and its speed relative to running alone."""

from __future__ import annotations

import functools
import threading
import time
from types import TracebackType
from typing import Final

_LOOPS: Final = 1000
_ALONE_S: Final = 0.3
"""Time for measuring the rate alone; a longer time changes only its third digit."""


class Spinner:
    """Context in which a thread runs Python code without a pause."""

    def __init__(self) -> None:
        self.steps = 0  # Steps done so far.
        alone, started = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < _ALONE_S:
            _step()
            alone += 1
        self._alone = alone / elapsed
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
        return steps / seconds / self._alone

    def _run(self) -> None:
        while not self._stop.is_set():
            _step()
            self.steps += 1


@functools.cache
def the_spinner() -> Spinner:
    """Return the spinner of this process; its rate alone is measured once."""
    return Spinner()


def _step() -> None:
    total = 0
    for i in range(_LOOPS):
        total += i & 3
