"""Counts and samples for an engine's own metrics: first answers to lookups, jobs, and how long both took."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.tiering.jobs import OpenJob
from kvstore.tiering.link import TierLink
from kvstore.tiering.request import RequestState
from kvstore.types import BlockKey, JobResult, LookupResult

__all__ = ["TIMED_EVERY", "Tally", "TierTally"]

TIMED_EVERY = 16
"""Of a tier's answers one in so many is timed, the first included: reading the clock costs as much as a lookup."""

_SAMPLES_MAX = 1024
"""Durations of each kind that are kept until they are taken; a long prompt alone has more lookups than that."""

_PRIMARY_BIT = 1
"""The primary tier in the masks of ``RequestState.asked``; another tier has ``TierLink.bit``, one place higher."""


def _samples() -> deque[float]:
    return deque(maxlen=_SAMPLES_MAX)


@dataclass(slots=True)
class TierTally:
    """Counts of one tier since the start, and samples since they were last taken.

    Attributes:
        queries: Blocks that requests looked up here and got an answer for. A request counts once for each block.
        hits: Those that were here.
        failed_loads: Load jobs that failed, wholly or in part.
        failed_stores: Store jobs that failed, wholly or in part.
        load_seconds: Time of load jobs on the I/O side.
        store_seconds: The same for store jobs.
        last_lookup_s: Seconds that the last timed lookup took which was answered HIT or MISS.
        lookup_samples: The same for each lookup that was answered so: of one that was not timed, those of the last one
            that was, so that number and sum of the samples are right.
        wait_samples: Seconds from the first RETRY to the answer.
        loaded_samples: Seconds from the submission of a successful load to its report.
        failed_samples: The same for failed loads.
    """

    queries: int = 0
    hits: int = 0
    failed_loads: int = 0
    failed_stores: int = 0
    load_seconds: float = 0.0
    store_seconds: float = 0.0
    last_lookup_s: float = 0.0
    lookup_samples: deque[float] = field(default_factory=_samples)
    wait_samples: deque[float] = field(default_factory=_samples)
    loaded_samples: deque[float] = field(default_factory=_samples)
    failed_samples: deque[float] = field(default_factory=_samples)


class Tally:
    """The counts of all tiers.

    Args:
        links: The tiers below the primary one.
        clock: Monotonic seconds.

    Attributes:
        primary: Counts of the primary tier.
        tiers: Counts of the others, in order.
        by_link: The same by tier.
        allocations: Blocks that each store wanted to allocate, since they were last taken.
    """

    def __init__(self, links: Sequence[TierLink], clock: Callable[[], float]) -> None:
        self._clock = clock
        self.primary = TierTally()
        self.tiers = tuple(TierTally() for _ in links)
        self.allocations: deque[int] = deque(maxlen=_SAMPLES_MAX)
        self.by_link = dict(zip(links, self.tiers, strict=True))

    def note_primary(self, state: RequestState, key: BlockKey, hit: bool, started: float) -> None:
        """Count the primary tier's first answer to a request about a block.

        Args:
            state: The request.
            key: The block.
            hit: The answer.
            started: When the lookup began (``time.perf_counter``); 0 if it is not timed.
        """
        if key in state.asked:
            return
        state.asked[key] = _PRIMARY_BIT
        tally = self.primary
        tally.queries += 1
        tally.hits += hit
        if started:
            tally.last_lookup_s = time.perf_counter() - started
        tally.lookup_samples.append(tally.last_lookup_s)

    def note_answer(
        self, state: RequestState, key: BlockKey, link: TierLink, result: LookupResult, started: float
    ) -> None:
        """Count another tier's first answer, as for the primary tier; RETRY is none yet."""
        bit = link.bit << 1
        mask = state.asked.get(key, 0)
        if mask & bit:
            return
        if result is LookupResult.RETRY:
            state.retried.setdefault((key, bit), self._clock())
            return
        state.asked[key] = mask | bit
        tally = self.by_link[link]
        tally.queries += 1
        tally.hits += result is LookupResult.HIT
        if started:
            tally.last_lookup_s = time.perf_counter() - started
        tally.lookup_samples.append(tally.last_lookup_s)
        if state.retried:
            since = state.retried.pop((key, bit), None)
            if since is not None:
                tally.wait_samples.append(self._clock() - since)

    def note_job(self, job: OpenJob, result: JobResult) -> None:
        """Count a job that a tier has reported."""
        tally = self.by_link[job.link]
        success = result.success and not job.abandoned
        if job.is_load:
            tally.failed_loads += not success
            tally.load_seconds += result.seconds
            samples = tally.loaded_samples if success else tally.failed_samples
            samples.append(self._clock() - job.since)
        else:
            tally.failed_stores += not success
            tally.store_seconds += result.seconds
