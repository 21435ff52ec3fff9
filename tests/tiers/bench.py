"""The scheduler half of a tier with a channel and a clock controlled by the test."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, cast

from kvstore.config import TierConfig, decode_config
from kvstore.errors import HostClosedError
from kvstore.runtime.messages import (
    Drain,
    Drained,
    FromIO,
    JobDone,
    PresenceAdded,
    PresenceComplete,
    ToIO,
)
from kvstore.tiers import AsyncTier
from kvstore.types import (
    Locality,
    Medium,
    Outcome,
    RequestContext,
    TransferJob,
)

SLOT = 4096


class FakeChannel:
    """Keeps sent messages, and returns the test's answers."""

    def __init__(self) -> None:
        self.sent: list[ToIO] = []
        self.sends = 0
        self.answers: deque[FromIO] = deque()
        self.hurries = 0
        self.closed = False

    def send(self, messages: Sequence[ToIO]) -> None:
        """Keep messages; refuse after close."""
        if self.closed:
            raise HostClosedError("closed")
        self.sends += 1
        self.sent.extend(messages)
        self.answers.extend(Drained(m.drain_id) for m in messages if isinstance(m, Drain))

    def receive(self) -> FromIO | None:
        """Return the next answer."""
        return self.answers.popleft() if self.answers else None

    def hurry(self) -> None:
        """Count the call."""
        self.hurries += 1

    def wait(self, timeout_s: float) -> bool:
        """Return immediately whether there is an answer."""
        return bool(self.answers)

    def close(self, timeout_s: float) -> bool:
        self.closed = True
        return True

    def of(self, kind: type[Any]) -> list[Any]:
        """Return the messages of one kind that were sent."""
        return [message for message in self.sent if isinstance(message, kind)]


class Bench:
    """A tier whose surroundings the test controls."""

    def __init__(
        self,
        *,
        authoritative: bool = True,
        recovered: bool = True,
        events: bool = True,
        verifies_events: bool = False,
        access_events: bool = False,
        channel: FakeChannel | None = None,
        **options: Any,
    ) -> None:
        self.now = 1000.0
        self.numbers: dict[int, int] = {}
        self.channel = channel or FakeChannel()
        config = decode_config(TierConfig, options, where="test tier")
        self.tier = AsyncTier(
            cast(Any, self.channel),
            config,
            name="t",
            medium=Medium.STORAGE,
            locality=Locality.LOCAL,
            authoritative=authoritative,
            slot_bytes=SLOT,
            slot_count=64,
            clock=lambda: self.now,
            events=events,
            verifies_events=verifies_events,
            access_events=access_events,
        )
        if recovered:
            self.answer(PresenceComplete(authoritative, 0, 0.0))

    def answer(self, *messages: FromIO) -> list[Any]:
        """Deliver messages from the I/O half; return the results that the tier then reports."""
        self.number_of(0)
        self.channel.answers.extend(messages)
        return list(self.tier.get_finished())

    def number_of(self, job_id: int) -> int:
        """Return the I/O half's number of the last job submitted with an id."""
        self.numbers |= {running.job.job_id: running.message.job_id for running in self.tier._jobs}
        return self.numbers.get(job_id, 0)

    def finish(self, job_id: int, *outcomes: Outcome, error: str = "") -> list[Any]:
        """Answer a job."""
        return self.finish_number(self.number_of(job_id), *outcomes, error=error)

    def finish_number(self, number: int, *outcomes: Outcome, error: str = "") -> list[Any]:
        """Answer a job by the I/O half's number."""
        return self.answer(JobDone(number, bytes(outcomes), 0, 0.0, {}, error))

    def hold(self, *keys: bytes) -> None:
        """Mark blocks as present in the tier."""
        self.answer(PresenceAdded(keys, recovered=False))

    def fail_loads(self, count: int, first_id: int = 100) -> None:
        """Run failing loads."""
        for i in range(first_id, first_id + count):
            self.tier.submit_load(job(i, [b"x%d" % i]))
            self.finish(i, Outcome.IO_ERROR, error="disk on fire")


def job(job_id: int, keys: Sequence[bytes], ctx: RequestContext | None = None) -> TransferJob:
    """Make a job whose slots are the positions of its keys."""
    return TransferJob(job_id, keys, range(len(keys)), ctx)
