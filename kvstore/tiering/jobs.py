"""The jobs that the tiers have not reported yet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.tiering.link import TierLink
from kvstore.tiering.request import RequestState
from kvstore.types import JobResult, TransferJob

__all__ = ["JobTable", "OpenJob"]


@dataclass(slots=True, eq=False)
class OpenJob:
    """A job and whose it is.

    Attributes:
        transfer: What was submitted.
        link: The tier it was submitted to.
        is_load: Direction.
        state: The request it is for.
        since: When it was submitted, on the owner's clock (loads only).
        deadline: When the manager gives it up, on the owner's clock.
        write_back: Whether it is a store that makes room in the primary tier.
        abandoned: Whether it was given up: its slots are ABANDONED, and free when it is reported.
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
        """Note a job that is submitted. Loads are to be added in the order of their deadlines."""
        self._jobs[job.transfer.job_id] = job
        if job.is_load:
            self._waited_for[job.transfer.job_id] = job

    def report(self, link: TierLink, result: JobResult) -> OpenJob | None:
        """Take out the job that a result is about; None (and the tier's fault) if there is none of this tier."""
        job = self._jobs.get(result.job_id)
        if job is None or job.link is not link:
            link.note_nonsense(f"a result for job {result.job_id}, which it does not have")
            return None
        del self._jobs[result.job_id]
        self._waited_for.pop(result.job_id, None)
        return job

    def take_overdue_loads(self, now: float) -> list[OpenJob]:
        """Return the loads whose deadline is over, each once; they stay open until they are reported."""
        overdue = []
        while self._waited_for:
            job_id, job = next(iter(self._waited_for.items()))
            if job.deadline > now:
                break
            del self._waited_for[job_id]
            if not job.abandoned:
                overdue.append(job)
        return overdue
