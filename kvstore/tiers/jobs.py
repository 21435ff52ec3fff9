"""The jobs of a tier: submitted, answered, and each reported exactly once."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore.config import TierConfig
from kvstore.runtime.messages import JobDone, JobKind, SubmitJob
from kvstore.tiers.base import JobSample
from kvstore.types import KEY_BYTES_MAX, SUCCESSES, JobResult, Outcome, TransferJob

_SAMPLES_MAX = 1024

_OUTCOMES = tuple(sorted(Outcome))
"""Outcomes by code; indexing takes a fifth of the time of an enum call."""


@dataclass(frozen=True, slots=True)
class Job:
    """A submitted job, and the message with its blocks for the I/O half."""

    job: TransferJob  # As submitted.
    message: SubmitJob
    """The blocks to move: of a store, those that the medium may lack. The id of the message is never reused, because
    the id of a reported job may be reused before a late answer to it arrives."""
    asked: Sequence[int]  # Positions in ``job`` of the blocks in ``message``.
    size_bytes: int  # Payload bytes of ``message``.

    def outcomes(self, codes: Sequence[int]) -> list[Outcome]:
        """Return the outcome of every block of the job, given the outcomes of the message's blocks."""
        if len(self.asked) == len(self.job.keys):
            return list(map(_OUTCOMES.__getitem__, codes))
        outcomes = [Outcome.EXISTS] * len(self.job.keys)
        for i, code in zip(self.asked, codes, strict=True):
            outcomes[i] = _OUTCOMES[code]
        return outcomes


def deadline_of(kind: JobKind, size_bytes: int, config: TierConfig, now: float) -> float:
    """Return the deadline of a job of ``size_bytes`` payload bytes, by the clock of ``now``."""
    timeout_s = config.load_timeout if kind is JobKind.LOAD else config.store_timeout
    return now + timeout_s + size_bytes / config.bytes_per_second_min


def is_key(key: object) -> bool:
    """Return whether a value is a valid key. An invalid key would end an I/O process."""
    return isinstance(key, bytes) and 0 < len(key) <= KEY_BYTES_MAX


def is_sound(job: TransferJob, kind: JobKind, slot_count: int) -> bool:
    """Return whether a job is valid: one existing slot per key, valid keys, and no two blocks loaded into one slot.

    A caller's defect must not end an engine or count as a failure of the medium.
    """
    keys: Sequence[object] = job.keys
    slots = job.slots
    if len(keys) != len(slots) or not all(map(is_key, keys)):
        return False
    if slots and not (min(slots) >= 0 and max(slots) < slot_count):
        return False
    # Otherwise both blocks would be reported as loaded, one of them with the other's bytes.
    return kind is JobKind.STORE or len(set(slots)) == len(slots)


class Jobs:
    """The unfinished jobs, the results not yet taken, and counts of both."""

    def __init__(self) -> None:
        self._running: dict[int, Job] = {}
        self._submitted = 0
        self._finished: list[JobResult] = []
        self._samples: deque[JobSample] = deque(maxlen=_SAMPLES_MAX)
        self.store_bytes = 0  # Payload bytes of unfinished stores.
        self.outcomes: Counter[str] = Counter()  # Blocks by ``"store.ok"``, ``"load.miss"``, …
        self.moved_bytes: Counter[JobKind] = Counter()  # Payload bytes moved, by direction.

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._running.values()))

    @property
    def has_finished(self) -> bool:
        """Whether ``take_finished`` has results."""
        return bool(self._finished)

    @property
    def running_bytes(self) -> int:
        """Payload bytes of unfinished jobs."""
        return sum(job.size_bytes for job in self._running.values())

    def start(
        self, job: TransferJob, kind: JobKind, asked: Sequence[int], size_bytes: int, deadline: float
    ) -> SubmitJob:
        """Note a job as unfinished; return the message to send."""
        self._submitted += 1
        keys = tuple(map(job.keys.__getitem__, asked))
        slots = tuple(map(int, map(job.slots.__getitem__, asked)))
        message = SubmitJob(self._submitted, kind, keys, slots, deadline)
        self._running[self._submitted] = Job(job, message, asked, size_bytes)
        if kind is JobKind.STORE:
            self.store_bytes += size_bytes
        return message

    def finish(self, job: TransferJob, kind: JobKind, outcomes: Sequence[Outcome], done: JobDone | None = None) -> None:
        """Queue the result of a job that never started or has ended."""
        counts = Counter(outcomes)
        if counts.keys() <= SUCCESSES:
            good = tuple(job.keys)
        else:
            good = tuple([key for key, outcome in zip(job.keys, outcomes, strict=True) if outcome.ok])
        for outcome, count in counts.items():
            self.outcomes[f"{kind.value}.{outcome.name.lower()}"] += count
        size_bytes, seconds = (done.size_bytes, done.seconds) if done else (0, 0.0)
        result = JobResult(job.job_id, len(good) == len(job.keys), good, size_bytes, seconds, tuple(outcomes))
        self._finished.append(result)

    def complete(self, done: JobDone) -> tuple[Job, list[Outcome]] | None:
        """Queue the result of an answered job; None if the job was abandoned before."""
        job = self._running.get(done.job_id)
        if job is None:
            return None
        outcomes = job.outcomes(done.outcomes)
        self._drop(job)
        kind = job.message.kind
        self.moved_bytes[kind] += done.size_bytes
        self._samples.append(JobSample(kind.value, len(job.asked), done.size_bytes, done.seconds))
        self.finish(job.job, kind, outcomes, done)
        return job, outcomes

    def give_up(self, job: Job, outcome: Outcome) -> None:
        """Queue the result of a job without an answer."""
        self._drop(job)
        self.finish(job.job, job.message.kind, job.outcomes([outcome] * len(job.asked)))

    def give_up_all(self, outcome: Outcome) -> None:
        """Queue the results of all unfinished jobs without their answers."""
        for job in self:
            self.give_up(job, outcome)

    def late(self, now: float, grace_s: float) -> list[Job]:
        """Return the jobs whose deadline passed more than ``grace_s`` ago."""
        return [job for job in self._running.values() if now > job.message.deadline + grace_s]

    def take_finished(self) -> list[JobResult]:
        """Return the results since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def take_samples(self) -> list[JobSample]:
        """Return the answered jobs since the last call, at most the last 1,024."""
        samples = list(self._samples)
        self._samples.clear()
        return samples

    def _drop(self, job: Job) -> None:
        del self._running[job.message.job_id]
        if job.message.kind is JobKind.STORE:
            self.store_bytes -= job.size_bytes
