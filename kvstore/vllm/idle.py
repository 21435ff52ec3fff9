"""Wakes an idle engine, whose metrics would otherwise show the past."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final

from vllm.v1.engine import EngineCoreRequestType

from kvstore.tiers import AsyncTier
from kvstore.vllm.compat import engine_queue

_INTERVAL_S: Final = 1.0
"""The interval of the tiers' statistics. An idle engine makes at most one step in it."""


class IdleWaker:
    """Requests a step when an engine makes none, and a tier has an answer for it.

    vLLM reports metrics only in steps, and an engine without requests makes none. But a tier's statistics and the state
    of its medium still change: the last stores end, a medium fails or returns, other engines store and evict.

    Create it during the construction of vLLM's connector, because it finds the engine in the call stack. In the process
    of a program that makes the steps itself, it does nothing.

    Args:
        tiers: The tiers.
    """

    def __init__(self, tiers: Sequence[AsyncTier]) -> None:
        self.due = False  # Whether a step was requested, and has not been made.
        self._tiers = tuple(tiers)
        self._stepped_at = time.monotonic()
        self._stopping = threading.Event()
        self._queue = engine_queue()
        if self._queue is not None and tiers:
            threading.Thread(target=self._run, name="kvstore-idle", daemon=True).start()

    def note_step(self) -> None:
        """Note a step of the engine."""
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
