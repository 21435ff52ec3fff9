"""Durations of the engine's steps, and the prompt tokens that each computed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvstore.vllm.compat import current_connector_scheduler, scheduled_tokens

__all__ = ["StepTimes"]

_RUNNING_MAX: Final = 64
"""More steps are never under way (one per stage of a pipeline). If there seem to be, ends were missed."""


class StepTimes:
    """Measures steps from ``build_connector_meta``, which ends their scheduling, to :meth:`end`.

    Steps end in the order in which they were scheduled. With asynchronous scheduling a step is scheduled while the one
    before it runs; it begins when that one ends.

    Made under construction of vLLM's connector, in whose frames it finds the scheduler's half. Elsewhere it measures
    nothing.

    Args:
        note: Receives the tokens and preceding tokens of each request, and the seconds.
    """

    def __init__(self, note: Callable[[Sequence[tuple[int, int]], float], object]) -> None:
        self._note = note
        self._running: deque[tuple[list[tuple[int, int]] | None, float]] = deque()
        self._ended_at = 0.0
        scheduler: Any = current_connector_scheduler()
        build = getattr(scheduler, "build_connector_meta", None)
        if build is None:
            return

        def build_connector_meta(scheduler_output: Any) -> Any:
            meta = build(scheduler_output)
            self.begin(scheduler_output, time.monotonic())
            return meta

        scheduler.build_connector_meta = build_connector_meta

    def begin(self, scheduler_output: Any, now: float) -> None:
        """Note that a step was scheduled."""
        if len(self._running) >= _RUNNING_MAX:
            self._running.clear()
        self._running.append((scheduled_tokens(scheduler_output), now))

    def end(self, now: float) -> None:
        """Note that the oldest step has ended."""
        if not self._running:
            return
        prefills, begun_at = self._running.popleft()
        if prefills is not None:
            self._note(prefills, now - max(begun_at, self._ended_at))
        self._ended_at = now
