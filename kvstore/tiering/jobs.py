"""The jobs not yet reported by the tiers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.tiering.link import TierLink
from kvstore.tiering.requests import RequestState
from kvstore.types import JobResult, TransferJob

__all__ = ["JobTable", "OpenJob"]


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
    """

    transfer: TransferJob
    link: TierLink
    is_load: bool
    state: RequestState | None
    since: float = 0.0
    deadline: float = 0.0
    write_back: bool = False
    abandoned: bool = False


class JobTable:
    """Jobs by id; ids are unique for all tiers together."""

    def __init__(self) -> None:
        self._jobs: dict[int, OpenJob] = {}
        self._waited_for: OrderedDict[int, OpenJob] = OrderedDict()
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
        """Add a submitted job. Loads must be added in the order of their deadlines."""
        self._jobs[job.transfer.job_id] = job
        if job.is_load:
            self._waited_for[job.transfer.job_id] = job

    def report(self, link: TierLink, result: JobResult) -> OpenJob | None:
        """Remove and return the job of a result; None, counted as an error of the tier, if the tier has no such job."""
        job = self._jobs.get(result.job_id)
        if job is None or job.link is not link:
            link.note_invalid(f"a result for job {result.job_id}, which it does not have")
            return None
        del self._jobs[result.job_id]
        self._waited_for.pop(result.job_id, None)
        return job

    def take_overdue_loads(self, now: float) -> list[OpenJob]:
        """Return the loads past their deadline, each once; they stay in the table until reported."""
        overdue = []
        while self._waited_for:
            job_id, job = next(iter(self._waited_for.items()))
            if job.deadline > now:
                break
            del self._waited_for[job_id]
            if not job.abandoned:
                overdue.append(job)
        return overdue
