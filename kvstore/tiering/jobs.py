"""The jobs not yet reported by the tiers."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvstore.tiering.link import TierLink
from kvstore.tiering.requests import RequestState
from kvstore.types import JobResult, TransferJob

__all__ = ["JobTable", "OpenJob"]

_REPORTED_MAX: Final = 256
"""Deadlines of reported loads that are kept, so that a report need not search for its own."""


@dataclass(slots=True, eq=False)
class OpenJob:
    """A job, its tier and its request.

    Attributes:
        transfer: The submitted job.
        link: The tier.
        is_load: Direction.
        state: The request.
        since: Time of submission, on the owner's clock (loads only).
        deadline: Time at which the manager abandons it, on the owner's clock (loads only).
        write_back: Whether it is a store that frees slots of the primary tier.
        abandoned: Whether the manager abandoned it: its slots are ABANDONED until the tier reports it.
        gated: Whether the gate decided on it (loads only).
        late: Whether it was abandoned because it lagged behind the gate's prediction.
        measures: Whether it only measures the tier: its blocks are dropped.
        under_way: Blocks under way in the tier when it was submitted, its own included.
        first: The load of the same blocks that it hedges (:mod:`kvstore.tiering.hedges`).
        outrun: Whether it was abandoned because its hedge was faster.
    """

    transfer: TransferJob
    link: TierLink
    is_load: bool
    state: RequestState | None
    since: float = 0.0
    deadline: float = 0.0
    write_back: bool = False
    abandoned: bool = False
    gated: bool = False
    late: bool = False
    measures: bool = False
    under_way: int = 0
    first: OpenJob | None = None
    outrun: bool = False

    @property
    def is_void(self) -> bool:
        """Whether it was given up, and not merely the slower one of two."""
        return self.abandoned and not self.outrun and self.first is None


class JobTable:
    """Jobs by id; ids are unique for all tiers together."""

    def __init__(self) -> None:
        self._jobs: dict[int, OpenJob] = {}
        self._deadlines: list[tuple[float, int]] = []
        """Heap of the deadlines of loads, with their ids. Reported loads stay in it for a while."""
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[OpenJob]:
        return iter(list(self._jobs.values()))

    def new_id(self) -> int:
        """Return an id for the next job."""
        self._last_id += 1
        return self._last_id

    def add(self, job: OpenJob) -> None:
        """Add a submitted job."""
        self._jobs[job.transfer.job_id] = job
        if job.is_load:
            if len(self._deadlines) > 2 * len(self._jobs) + _REPORTED_MAX:
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self._jobs]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (job.deadline, job.transfer.job_id))

    def is_open(self, job: OpenJob) -> bool:
        """Whether a job is not reported yet."""
        return self._jobs.get(job.transfer.job_id) is job

    def report(self, link: TierLink, result: JobResult) -> OpenJob | None:
        """Remove and return the job of a result; None, counted as an error of the tier, if the tier has no such job."""
        job = self._jobs.get(result.job_id)
        if job is None or job.link is not link:
            link.note_invalid(f"a result for job {result.job_id}, which it does not have")
            return None
        return self._jobs.pop(result.job_id)

    def take_overdue_loads(self, now: float) -> list[OpenJob]:
        """Return the loads past their deadline, each once; they stay in the table until reported."""
        overdue = []
        while self._deadlines and self._deadlines[0][0] <= now:
            job = self._jobs.get(heapq.heappop(self._deadlines)[1])
            if job is not None and not job.abandoned:
                overdue.append(job)
        return overdue
