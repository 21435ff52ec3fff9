"""Jobs that the tiers have not reported yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.tiering.deadlines import Deadlines
from kvstore.tiering.link import RAISED, TierLink
from kvstore.tiering.requests import RequestState
from kvstore.types import JobResult, TransferJob


@dataclass(slots=True, eq=False)
class OpenJob:
    """A job, its tier and its request."""

    transfer: TransferJob  # The submitted job.
    link: TierLink  # The tier.
    is_load: bool  # False for a store.
    state: RequestState | None  # The request.
    since: float = 0.0  # Time of submission, on the owner's clock (loads only).
    deadline: float = 0.0  # Time at which the manager abandons it, or its report counts as lost (loads only).
    write_back: bool = False  # Whether it is a store that frees slots of the primary tier.
    abandoned: bool = False  # Whether the manager abandoned it: its slots are ABANDONED until the tier reports it.
    gated: bool = False  # Whether it resulted from a decision of the gate (loads only).
    guessed: bool = False  # Whether the gate had no measurement of the tier at that time.
    late: bool = False  # Whether it was abandoned because it exceeded the gate's prediction.
    lost: bool = False  # Whether its report is so late that it no longer counts as load on the tier.
    measures: bool = False  # Whether it only measures the tier: its blocks are dropped.
    under_way: int = 0  # Blocks in progress in the tier when it was submitted, including its own.
    first: OpenJob | None = None  # The load that it hedges (:mod:`kvstore.tiering.hedges`).
    outrun: bool = False  # Whether it was abandoned because its hedge was faster.

    @property
    def is_void(self) -> bool:
        """Whether it was abandoned for a reason other than hedging."""
        return self.abandoned and not self.outrun and self.first is None


class JobTable:
    """Jobs by id. Ids are unique across all tiers."""

    def __init__(self) -> None:
        self.by_id: dict[int, OpenJob] = {}  # The jobs.
        self._deadlines: Deadlines[int] = Deadlines()
        self._last_id = 0

    def __repr__(self) -> str:
        """Show the number of jobs, and how much memory the deadlines of loads take."""
        return f"JobTable({len(self.by_id)} jobs, {self._deadlines})"

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[OpenJob]:
        return iter(list(self.by_id.values()))

    def new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def add(self, job: OpenJob) -> None:
        """Add a job, and count its blocks."""
        self.by_id[job.transfer.job_id] = job
        if job.is_load:
            job.link.loading += len(job.transfer.keys)
            job.link.load_jobs += 1
            self.set_deadline(job, job.deadline)
        else:
            job.link.storing += len(job.transfer.keys)
            job.link.store_jobs += 1

    def submit(self, job: OpenJob) -> bool:
        """Add a job and submit it to its tier. Return false if the tier raised: it may still have accepted the job."""
        self.add(job)
        submit = job.link.tier.submit_load if job.is_load else job.link.tier.submit_store
        return job.link.call(submit, job.transfer, otherwise=RAISED) is not RAISED

    def set_deadline(self, job: OpenJob, deadline: float) -> None:
        """Change the deadline of a load."""
        job.deadline = deadline
        self._deadlines.set(job.transfer.job_id, deadline)

    def is_open(self, job: OpenJob) -> bool:
        """Whether a job is not reported yet."""
        return self.by_id.get(job.transfer.job_id) is job

    def report(self, link: TierLink, result: JobResult) -> OpenJob | None:
        """Remove and return the job of a result. For an unknown job, count an error of the tier and return None."""
        job = self.by_id.get(result.job_id)
        if job is None or job.link is not link:
            link.note_invalid(f"a result for job {result.job_id}, which it does not have")
            return None
        if not job.is_load:
            link.storing -= len(job.transfer.keys)
            link.store_jobs -= 1
        else:
            self._deadlines.remove(result.job_id)
            link.loading -= 0 if job.lost else len(job.transfer.keys)
            link.load_jobs -= 1
        return self.by_id.pop(result.job_id)

    def lose(self, job: OpenJob) -> None:
        """Stop counting a load whose report may never arrive. Its slots stay reserved until the report."""
        job.lost = True
        job.link.loading -= len(job.transfer.keys)

    def take_overdue_loads(self, now: float) -> list[OpenJob]:
        """Return the loads past their deadline, each once; they stay in the table until reported."""
        due = self._deadlines.take_due(now)
        return [self.by_id[job_id] for job_id in due] if due else []
