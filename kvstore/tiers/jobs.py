"""The jobs of a tier: what was handed over, what came back, and that each is reported exactly once."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore.config import TierConfig
from kvstore.runtime.messages import JobDone, JobKind, SubmitJob
from kvstore.tiers.stats import JobSample
from kvstore.types import KEY_BYTES_MAX, JobResult, Outcome, TransferJob

__all__ = ["Job", "Jobs", "deadline_of", "is_key", "is_sound"]

_SAMPLES_MAX = 1024

_OUTCOMES = tuple(sorted(Outcome))
"""By code; to look one up takes a fifth of the time that it takes to make one of its code."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job and the part of it that the I/O half works on.

    Attributes:
        number: Its own among all jobs that there ever were: by it the I/O half answers. The id that it was submitted
            with may be used again once it is reported, when an answer to the first may still be on its way.
        job: As submitted.
        kind: Direction.
        asked: Positions of the blocks that were handed over; the others are on the medium already.
        size_bytes: Payload bytes of those.
        deadline: Monotonic time by which it has to be answered.
    """

    number: int
    job: TransferJob
    kind: JobKind
    asked: Sequence[int]
    size_bytes: int
    deadline: float

    def outcomes(self, codes: Sequence[int]) -> list[Outcome]:
        """Return the outcome of every block, given those of the blocks handed over."""
        if len(self.asked) == len(self.job.keys):
            return [_OUTCOMES[code] for code in codes]
        outcomes = [Outcome.EXISTS] * len(self.job.keys)
        for i, code in zip(self.asked, codes, strict=True):
            outcomes[i] = _OUTCOMES[code]
        return outcomes

    def message(self) -> SubmitJob:
        """Return what the I/O half is told."""
        keys = tuple(self.job.keys[i] for i in self.asked)
        slots = tuple(int(self.job.slots[i]) for i in self.asked)
        return SubmitJob(self.number, self.kind, keys, slots, self.deadline)


def deadline_of(kind: JobKind, size_bytes: int, config: TierConfig, now: float) -> float:
    """Return when a job of so many payload bytes has to be answered, by the clock of ``now``."""
    timeout_s = config.load_timeout if kind is JobKind.LOAD else config.store_timeout
    return now + timeout_s + size_bytes / config.bytes_per_second_min


def is_key(key: object) -> bool:
    """Whether something can be the key of a block. What can't must not reach an I/O process, which it would end."""
    return isinstance(key, bytes) and 0 < len(key) <= KEY_BYTES_MAX


def is_sound(job: TransferJob, kind: JobKind, slot_count: int) -> bool:
    """Whether a job is one: a slot that exists for each key, keys that are keys, and no slot that two blocks go to.

    A caller's defect must neither end an engine nor speak against the health of a medium.
    """
    keys: Sequence[object] = job.keys
    slots = job.slots
    if len(keys) != len(slots) or not all(map(is_key, keys)) or not all(0 <= slot < slot_count for slot in slots):
        return False
    # Both blocks would be reported as loaded, and one of them be in another's place.
    return kind is JobKind.STORE or len(set(slots)) == len(slots)


class Jobs:
    """The unfinished jobs, the results nobody has fetched yet, and counts of both.

    Attributes:
        store_bytes: Payload bytes of unfinished stores.
        outcomes: Blocks by ``"store.ok"``, ``"load.miss"``, …
        moved_bytes: Payload bytes moved, by direction.
    """

    def __init__(self) -> None:
        self._running: dict[int, Job] = {}
        self._submitted = 0
        self._finished: list[JobResult] = []
        self._samples: deque[JobSample] = deque(maxlen=_SAMPLES_MAX)
        self.store_bytes = 0
        self.outcomes: Counter[str] = Counter()
        self.moved_bytes: Counter[JobKind] = Counter()

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._running.values()))

    @property
    def has_finished(self) -> bool:
        """Whether ``take_finished`` has something to return."""
        return bool(self._finished)

    @property
    def running_bytes(self) -> int:
        """Payload bytes of unfinished jobs."""
        return sum(job.size_bytes for job in self._running.values())

    def next_number(self) -> int:
        """Return the number of the next job."""
        self._submitted += 1
        return self._submitted

    def start(self, job: Job) -> None:
        """Note a job that is handed over."""
        self._running[job.number] = job
        if job.kind is JobKind.STORE:
            self.store_bytes += job.size_bytes

    def finish(self, job: TransferJob, kind: JobKind, outcomes: Sequence[Outcome], done: JobDone | None = None) -> None:
        """Make the result of a job that is not, or no longer, handed over."""
        counts = Counter(outcomes)
        if all([outcome.ok for outcome in counts]):
            good = tuple(job.keys)
        else:
            good = tuple([key for key, outcome in zip(job.keys, outcomes, strict=True) if outcome.ok])
        for outcome, count in counts.items():
            self.outcomes[f"{kind.value}.{outcome.name.lower()}"] += count
        size_bytes, seconds = (done.size_bytes, done.seconds) if done else (0, 0.0)
        result = JobResult(job.job_id, len(good) == len(job.keys), good, size_bytes, seconds, tuple(outcomes))
        self._finished.append(result)

    def complete(self, done: JobDone) -> tuple[Job, list[Outcome]] | None:
        """Take the I/O half's answer; None if the job was given up before."""
        job = self._running.get(done.job_id)
        if job is None:
            return None
        outcomes = job.outcomes(done.outcomes)
        self._drop(job)
        self.moved_bytes[job.kind] += done.size_bytes
        self._samples.append(JobSample(job.kind.value, len(job.asked), done.size_bytes, done.seconds))
        self.finish(job.job, job.kind, outcomes, done)
        return job, outcomes

    def give_up(self, job: Job, outcome: Outcome) -> None:
        """Report a job without its answer."""
        self._drop(job)
        self.finish(job.job, job.kind, job.outcomes([outcome] * len(job.asked)))

    def give_up_all(self, outcome: Outcome) -> None:
        """Report every unfinished job without its answer."""
        for job in self:
            self.give_up(job, outcome)

    def late_stores(self, now: float, grace_s: float) -> list[Job]:
        """Return the stores whose deadline is over by more than a grace."""
        if not self.store_bytes:
            return []
        return [job for job in self if job.kind is JobKind.STORE and now > job.deadline + grace_s]

    def take_finished(self) -> list[JobResult]:
        """Return the results since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def take_samples(self) -> list[JobSample]:
        """Return the answered jobs since the last call, the last 1,024 at most."""
        samples = list(self._samples)
        self._samples.clear()
        return samples

    def _drop(self, job: Job) -> None:
        del self._running[job.number]
        if job.kind is JobKind.STORE:
            self.store_bytes -= job.size_bytes
