"""Durations of the engine's steps, and the prompt tokens computed in each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.vllm.compat import (
    current_connector_config,
    current_connector_scheduler,
    scheduled_tokens,
    steps_under_way_max,
)


class StepTimes:
    """Measures steps from ``build_connector_meta``, which ends their scheduling, to :meth:`end`.

    Steps end in the order of scheduling. With asynchronous scheduling, a step is scheduled while the previous one runs,
    and begins when that one ends.

    Create it during the construction of vLLM's connector, because it finds the scheduler's half in the call stack.
    Elsewhere it measures nothing.

    Args:
        note: Receives the tokens and preceding tokens of each request, and the seconds.
        depth: Maximum concurrent steps; None: the maximum of the connector's configuration. If there seem to be more,
            the end of a step was missed.
    """

    def __init__(self, note: Callable[[Sequence[tuple[int, int]], float], object], depth: int | None = None) -> None:
        self._note = note
        self._depth = depth or steps_under_way_max(current_connector_config()[0])
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
        if len(self._running) >= self._depth:
            # The oldest step ended at an unknown time, so the others began at an unknown time.
            self._running = deque([(None, now)] * (self._depth - 1))
        self._running.append((scheduled_tokens(scheduler_output), now))

    def end(self, now: float) -> None:
        """Note that the oldest step has ended."""
        if not self._running:
            return
        prefills, begun_at = self._running.popleft()
        if prefills is not None:
            self._note(prefills, now - max(begun_at, self._ended_at))
        self._ended_at = now
