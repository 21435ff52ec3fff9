"""Counts and samples of the tiers, for an engine's own metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

TIMED_EVERY = 16
"""Every 16th answer of a tier is timed, starting with the first: reading the clock costs as much as a lookup."""

_SAMPLES_MAX = 1024
"""Maximum samples of each kind kept until taken; a single long prompt has more lookups."""


def _samples() -> deque[float]:
    return deque(maxlen=_SAMPLES_MAX)


@dataclass(slots=True)
class TierTally:
    """Counts of one tier since the start, and samples since the last time they were taken."""

    queries: int = 0  # Answered lookups of this tier, once per block and request.
    hits: int = 0  # Lookups answered HIT.
    failed_load_jobs: int = 0  # Load jobs that failed, wholly or in part.
    failed_store_jobs: int = 0  # Store jobs that failed, wholly or in part.
    load_seconds: float = 0.0  # Time of load jobs on the I/O side.
    store_seconds: float = 0.0  # The same for store jobs.
    last_lookup_s: float = 0.0  # Seconds of the last timed lookup with the answer HIT or MISS.
    lookup_samples: deque[float] = field(default_factory=_samples)
    """Seconds of each such lookup. An untimed lookup repeats the last timed value, so that the number and sum of the
    samples are right."""
    wait_samples: deque[float] = field(default_factory=_samples)  # Seconds from the first RETRY to the answer.
    loaded_samples: deque[float] = field(default_factory=_samples)
    """Seconds from the submission of a successful load to its report."""
    failed_samples: deque[float] = field(default_factory=_samples)  # The same for failed loads.

    def note_answer(self, hit: bool, started: float) -> None:
        """Count the first answer about a block to a request.

        ``started``: start of the lookup (``time.perf_counter``); 0 if untimed.
        """
        self.queries += 1
        self.hits += hit
        if started:
            self.last_lookup_s = time.perf_counter() - started
        self.lookup_samples.append(self.last_lookup_s)

    def note_job(self, is_load: bool, success: bool, seconds: float, since_s: float) -> None:
        """Count a reported job."""
        if is_load:
            self.failed_load_jobs += not success
            self.load_seconds += seconds
            (self.loaded_samples if success else self.failed_samples).append(since_s)
        else:
            self.failed_store_jobs += not success
            self.store_seconds += seconds


class Tally:
    """The counts of all tiers. ``tiers``: counts of the tiers below the primary one, in order."""

    def __init__(self, tiers: Sequence[TierTally]) -> None:
        self.primary = TierTally()
        self.tiers = tuple(tiers)
        self.allocations: deque[int] = deque(maxlen=_SAMPLES_MAX)  # Blocks allocated by each store, since last taken.
