"""A tier with a primary tier, and a scheduler that makes steps until a condition holds."""

from __future__ import annotations

import mmap
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from kvstore.backends.base import Backend
from kvstore.namespace import Namespace
from kvstore.testing.faults import FaultPlan, FaultyBackend
from kvstore.testing.records import CANARY
from kvstore.testing.served_faults import PlanServer
from kvstore.testing.waiting import eventually
from kvstore.tiers import AsyncTier, open_tier
from kvstore.types import BlockKey, JobResult, LookupResult, RequestContext, TransferJob


class TierRig:
    """Owns a primary tier, acts as the scheduler, and keeps the tier's reports.

    The payload of a block is a function of its key, so that wrong bytes are detected everywhere. Slots without a job
    are filled with a canary. As a context manager it closes the tier, and checks that the tier released the primary
    tier and reported no job twice.

    Args:
        config: The tier's configuration, as for ``open_tier``.
        namespace: Namespace of the blocks.
        slot_bytes: Length of a slot.
        slots: Number of slots.
        plan: Faults around the backend, in this process or in the I/O process.
        timeout_s: Limit of every wait.

    Attributes:
        tier: The tier.
        results: Reported jobs by id.
        reports: Number of reports of each job.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        namespace: Namespace,
        slot_bytes: int,
        slots: int,
        plan: FaultPlan | None = None,
        timeout_s: float = 20.0,
    ) -> None:
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.timeout_s = timeout_s
        self.results: dict[int, JobResult] = {}
        self.reports: Counter[int] = Counter()
        self._next_job_id = 1
        self._memory = _shared_memory(slot_bytes * slots)
        self._memory.write(bytes([CANARY]) * (slot_bytes * slots))
        view = memoryview(self._memory)
        self._server: PlanServer | None = None
        wrap_backend: Callable[[Backend], Backend] | None = None
        if plan is not None and config.get("io") == "process":
            self._server = PlanServer(plan)
            config = self._server.config_around(config)
        elif plan is not None:
            wrap_backend = partial(FaultyBackend, plan=plan)
        try:
            self.tier: AsyncTier = open_tier(
                config, primary=view, slot_bytes=slot_bytes, namespace=namespace, wrap_backend=wrap_backend
            )
        except BaseException:
            view.release()
            self._end_server()
            self._memory.close()  # Raises a BufferError if a tier that could not be opened kept a view of it.
            raise
        view.release()

    def __enter__(self) -> TierRig:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        try:
            self.tier.close(self.timeout_s)
        finally:
            self._end_server()
        self.step()
        try:
            self._memory.close()
        except BufferError:
            # After a failed check, its own error is more informative.
            if kind is None:
                raise AssertionError(
                    "the closed tier still holds views of the primary tier: keep no buffer after a call has returned"
                ) from None
        if kind is None:
            twice = [job_id for job_id, count in self.reports.items() if count > 1]
            assert not twice, f"jobs reported more than once: {twice}"
            unreported = set(range(1, self._next_job_id)) - set(self.reports)
            assert not unreported, f"jobs never reported, not even by close: {sorted(unreported)}"

    def payload(self, key: BlockKey) -> bytes:
        """Return the bytes of a key's block."""
        return random.Random(key).randbytes(self.slot_bytes)

    def fill(self, slot: int, content: bytes | None = None) -> None:
        """Write a slot, by default with the canary."""
        start = slot * self.slot_bytes
        self._memory[start : start + self.slot_bytes] = content or bytes([CANARY]) * self.slot_bytes

    def content(self, slot: int) -> bytes:
        """Read a slot."""
        return self._memory[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def untouched(self, slots: Iterable[int]) -> bool:
        """Whether slots hold nothing but the canary."""
        return all(self.content(slot).count(CANARY) == self.slot_bytes for slot in slots)

    def submit_store(self, keys: Sequence[BlockKey], slots: Sequence[int] | None = None) -> int:
        """Fill slots (by default the first ones) with the blocks of keys and store them; return the job's id."""
        slots = range(len(keys)) if slots is None else slots
        for key, slot in zip(keys, slots, strict=True):
            self.fill(slot, self.payload(key))
        job = self.job(keys, slots)
        self.tier.submit_store(job)
        return job.job_id

    def submit_load(
        self, keys: Sequence[BlockKey], slots: Sequence[int] | None = None, ctx: RequestContext | None = None
    ) -> int:
        """Load keys into slots, which are filled with the canary first; return the job's id."""
        slots = range(len(keys)) if slots is None else slots
        for slot in slots:
            self.fill(slot)
        job = self.job(keys, slots, ctx)
        self.tier.submit_load(job)
        return job.job_id

    def job(self, keys: Sequence[BlockKey], slots: Sequence[int], ctx: RequestContext | None = None) -> TransferJob:
        """Make a job with a new id; the caller submits it."""
        self._next_job_id += 1
        return TransferJob(self._next_job_id - 1, keys, slots, ctx)

    def step(self) -> None:
        """End a step as a scheduler does."""
        self.tier.flush()
        for result in self.tier.get_finished():
            self.reports[result.job_id] += 1
            self.results[result.job_id] = result

    def finish(self, job_id: int) -> JobResult:
        """Step until a job is reported."""
        self.until(lambda: job_id in self.results, f"the report of job {job_id}")
        return self.results[job_id]

    def store(self, keys: Sequence[BlockKey]) -> JobResult:
        """Store blocks and wait for the report; their slots then hold the canary again."""
        result = self.finish(self.submit_store(keys))
        for slot in range(len(keys)):
            self.fill(slot)
        return result

    def load(self, keys: Sequence[BlockKey], ctx: RequestContext | None = None) -> JobResult:
        """Load blocks into the first slots, wait for the report, and compare every block reported as loaded."""
        result = self.finish(self.submit_load(keys, ctx=ctx))
        self.prove(result, keys, range(len(keys)))
        return result

    def prove(self, result: JobResult, keys: Sequence[BlockKey], slots: Sequence[int]) -> None:
        """Check that a finished load is consistent, and that every block reported as loaded is in its slot."""
        good = [key for key, outcome in zip(keys, result.outcomes, strict=True) if outcome.ok]
        assert list(result.successful_keys) == good, f"successful_keys are not those with an OK outcome: {result}"
        assert result.success == (len(good) == len(keys)), f"success contradicts the outcomes: {result}"
        for key, slot, outcome in zip(keys, slots, result.outcomes, strict=True):
            right = not outcome.ok or self.content(slot) == self.payload(key)
            assert right, f"WRONG BYTES: key {key.hex()} was reported as loaded into slot {slot}"

    def lookup(self, key: BlockKey, ctx: RequestContext | None = None) -> LookupResult:
        """Look up a block in each step until the answer is HIT or MISS."""
        answers: list[LookupResult] = []

        def answered() -> bool:
            answers.append(self.tier.lookup(key, ctx))
            return answers[-1] is not LookupResult.RETRY

        self.until(answered, f"an answer to the lookup of {key.hex()}")
        return answers[-1]

    def recovered(self) -> TierRig:
        """Make steps until the tier has recovered; return self."""
        self.until(lambda: not self.tier.stats().recovering, "the end of recovery")
        return self

    def begin_epoch(self) -> str:
        """Reset as an engine does: drain, begin a new epoch, and step until it has begun; return its name."""
        assert self.tier.drain(self.timeout_s), "a drain before a reset did not end"
        self.tier.begin_epoch()
        self.until(lambda: self.tier.stats().epoch is not None, "the new epoch")
        return self.tier.stats().epoch or ""

    def until(self, predicate: Callable[[], object], what: str) -> None:
        """Step until something is true."""

        def stepped() -> object:
            self.step()
            return predicate()

        eventually(stepped, self.timeout_s, what)

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.close()


def _shared_memory(size_bytes: int) -> mmap.mmap:
    """Make memory that an I/O process can also map; it is freed with its last mapping."""
    fd = os.memfd_create("kvstore-testing", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_bytes)
        return mmap.mmap(fd, size_bytes)
    finally:
        os.close(fd)
