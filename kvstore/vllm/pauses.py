"""Pauses of an engine that only waits for other engines."""

from __future__ import annotations

import queue
import time
import weakref
from typing import Final

from kvstore.vllm.compat import engine_queue, scheduler_under_construction

_SHARE: Final = 0.05
"""Length of a pause, as a share of the wait so far, so that a pause delays a request by no more than that."""

_LONGEST_S: Final = 0.05
"""Longest pause. A new request ends it."""


class Pauses:
    """Pauses between the steps of an engine that computes nothing, because all of its requests wait for other engines.

    vLLM would make a thousand steps per second and wake its workers in each, which takes cores from the engines that
    are waited for. Create it during the construction of vLLM's connector, because it finds vLLM's objects in the call
    stack.

    Args:
        enabled: Whether it pauses at all. Engines of one data-parallel group make their steps together.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        scheduler = scheduler_under_construction()
        self._scheduler = None if scheduler is None else weakref.ref(scheduler)
        self._inputs = engine_queue() if enabled else None
        self._since: float | None = None
        self._awaits = self._is_busy = False

    def note_waiting(self, *, for_engine: bool) -> None:
        """Note that a request of this step waits for another engine, or for a tier."""
        self._awaits |= for_engine
        self._is_busy |= not for_engine

    def end_step(self, *, is_busy: bool) -> None:
        """End a step, with a pause if nothing but waiting for other engines is left to do.

        Args:
            is_busy: Whether blocks are being moved, whose end a step has to notice.
        """
        awaits, self._awaits = self._awaits and not (is_busy or self._is_busy), False
        self._is_busy = False
        scheduler = None if self._scheduler is None else self._scheduler()
        inputs = self._inputs
        if not (awaits and isinstance(inputs, queue.Queue)) or scheduler is None or scheduler.running:
            self._since = None
            return
        now = time.monotonic()
        self._since = self._since or now
        with inputs.not_empty:
            if not inputs.queue:
                inputs.not_empty.wait(min(_LONGEST_S, _SHARE * (now - self._since)))
