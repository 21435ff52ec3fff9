"""The engine's steps: durations, pauses while all requests wait for others, and steps that an idle engine needs."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from vllm.v1.engine import EngineCoreRequestType

from kvstore.tiers import AsyncTier
from kvstore.vllm.compat import engine_queue, scheduled_tokens


class StepTimes:
    """Measures steps from the end of their scheduling, :meth:`begin`, to :meth:`end`.

    Steps end in the order of scheduling. With asynchronous scheduling, a step is scheduled while the previous one runs,
    and begins when that one ends.

    Args:
        note: Receives the tokens and preceding tokens of each request, and the seconds.
        depth: Maximum concurrent steps. If there seem to be more, the end of a step was missed.
    """

    def __init__(self, note: Callable[[Sequence[tuple[int, int]], float], object], depth: int) -> None:
        self._note = note
        self._depth = depth
        self._running: deque[tuple[list[tuple[int, int]] | None, float]] = deque()
        self._ended_at = 0.0

    def begin(self, scheduler_output: Any, now: float) -> None:
        if len(self._running) >= self._depth:
            # The oldest step ended at an unknown time, so the others began at an unknown time.
            self._running = deque([(None, now)] * (self._depth - 1))
        self._running.append((scheduled_tokens(scheduler_output), now))

    def end(self, now: float) -> None:
        if not self._running:
            return
        prefills, begun_at = self._running.popleft()
        if prefills is not None:
            self._note(prefills, now - max(begun_at, self._ended_at))
        self._ended_at = now


_PAUSE_SHARE: Final = 0.05
"""Length of a pause, as a share of the wait so far, so that a pause delays a request by no more than that."""

_PAUSE_S_MAX: Final = 0.05
"""Longest pause. A new request ends it."""


class Pauses:
    """Pauses between the steps of an engine that computes nothing, because all of its requests wait for other engines.

    vLLM would make a thousand steps per second and wake its workers in each, which takes CPU time from other engines on
    the machine. Create it during the construction of vLLM's connector, because it finds the engine's queue of
    requests in the call stack.

    ``enabled``: False for engines of a data-parallel group, which make their steps together.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._inputs = engine_queue() if enabled else None
        self._since: float | None = None
        self._awaits = self._is_busy = False

    def note_waiting(self, *, for_engine: bool) -> None:
        """Note that a request of this step waits for another engine, or for a tier."""
        self._awaits |= for_engine
        self._is_busy |= not for_engine

    def end_step(self, *, is_busy: bool) -> None:
        """End the scheduling of a step, with a pause if all requests wait for other engines.

        If an earlier step is still computing, its end is noticed only after the pause.

        ``is_busy``: whether this step computes, or moves of blocks are running, whose end a later step must notice.
        """
        awaits, self._awaits = self._awaits and not (is_busy or self._is_busy), False
        self._is_busy = False
        inputs = self._inputs
        if not (awaits and isinstance(inputs, queue.Queue)):
            self._since = None
            return
        now = time.monotonic()
        self._since = self._since or now
        with inputs.not_empty:
            if not inputs.queue:
                inputs.not_empty.wait(min(_PAUSE_S_MAX, _PAUSE_SHARE * (now - self._since)))


_INTERVAL_S: Final = 1.0
"""Interval of the tiers' statistics, and minimum time between two steps of an idle engine."""


class IdleWaker:
    """Requests a step of an idle engine when a tier has a message for it.

    vLLM reports metrics only in steps, and an engine without requests makes none. But a tier's statistics and the state
    of its medium still change: the last stores end, a medium fails or returns, other engines store and evict.

    Create it during the construction of vLLM's connector, because it finds the engine in the call stack. It does
    nothing in a program that makes the steps itself.
    """

    def __init__(self, tiers: Sequence[AsyncTier]) -> None:
        self.due = False  # Whether a requested step has not been made yet.
        self._tiers = tuple(tiers)
        self._stepped_at = time.monotonic()
        self._stopping = threading.Event()
        self._queue = engine_queue()
        if self._queue is not None and tiers:
            threading.Thread(target=self._run, name="kvstore-idle", daemon=True).start()

    def note_step(self) -> None:
        self._stepped_at, self.due = time.monotonic(), False

    def close(self) -> None:
        """Request no more steps."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(_INTERVAL_S):
            is_idle = not self.due and time.monotonic() - self._stepped_at >= _INTERVAL_S
            if is_idle and any(tier.has_answers for tier in self._tiers):
                self.due = True
                self._queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
