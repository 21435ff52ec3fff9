"""Circuit breaker: stops calls to a failing medium until it works again."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class BreakerState(enum.StrEnum):
    """State of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class Breaker:
    """Counts consecutive failures. Has no clock and does no I/O."""

    failures_max: int  # Consecutive failures that open it.
    cooldown_s: float  # First pause after it opened; doubled each time it opens again without a success in between.
    cooldown_s_max: float  # Longest pause.
    trial_s: float = 60.0
    """Time limit for the result of a trial, after which another trial is admitted. Without it, a trial without a result
    (of a cancelled caller, for example) would exclude the medium forever. By default longer than a job's deadline."""
    state: BreakerState = BreakerState.CLOSED
    failures: int = 0
    pause_s: float = 0.0
    retry_at: float = 0.0

    @property
    def closed(self) -> bool:
        """Whether all calls pass."""
        return self.state is BreakerState.CLOSED

    def record_success(self) -> bool:
        """Note a success; return whether it closed the breaker."""
        was_closed = self.closed
        self.state = BreakerState.CLOSED
        self.failures = 0
        self.pause_s = 0.0
        return not was_closed

    def close_on_probation(self) -> None:
        """Close it; unless a success comes first, the next failure opens it again, for twice the pause."""
        self.state = BreakerState.CLOSED
        self.failures = self.failures_max - 1

    def record_failure(self, now: float) -> bool:
        """Note a failure at ``now``; return whether it opened the breaker."""
        self.failures += 1
        if self.closed and self.failures < self.failures_max:
            return False
        was_open = self.state is BreakerState.OPEN
        self.state = BreakerState.OPEN
        if was_open:
            return False  # The call started before the breaker opened.
        self.pause_s = min(self.cooldown_s_max, 2 * self.pause_s or self.cooldown_s)
        self.retry_at = now + self.pause_s
        return True

    def admit_trial(self, now: float) -> bool:
        """Admit one caller after the pause, and another if the first does not report within ``trial_s``."""
        if self.closed or now < self.retry_at:
            return False
        self.state = BreakerState.HALF_OPEN
        self.retry_at = now + self.trial_s
        return True
