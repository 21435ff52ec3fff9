"""The scheduler half of a tier: answers lookups from what it knows, hands jobs over, reports them once."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvstore.config import TierConfig
from kvstore.errors import HostClosedError
from kvstore.runtime.channel import Channel
from kvstore.runtime.messages import (
    Delete,
    Drain,
    Drained,
    EpochBegun,
    ExistsBatch,
    ExistsDone,
    FromIO,
    HostDown,
    HostUp,
    JobDone,
    JobKind,
    PresenceAdded,
    PresenceComplete,
    PresenceRemoved,
    Probe,
    ProbeDone,
    StatsReport,
    ToIO,
    Touch,
)
from kvstore.tiers.base import SecondaryTierManager
from kvstore.tiers.counts import TierCounts
from kvstore.tiers.epoch import Epoch
from kvstore.tiers.existence import Existence
from kvstore.tiers.failures import FailedLoads
from kvstore.tiers.health import TierHealth
from kvstore.tiers.jobs import Job, Jobs, deadline_of, is_key, is_sound
from kvstore.tiers.presence import Known, Presence
from kvstore.tiers.stats import JobSample, TierStats
from kvstore.types import (
    BlockKey,
    JobResult,
    Locality,
    LookupResult,
    Medium,
    Outcome,
    RemovalCause,
    RequestContext,
    TierEvent,
    TransferJob,
)

__all__ = ["AsyncTier"]

logger = logging.getLogger("kvstore.tiers")

_REPORT_GRACE_S = 0.1
"""A store that the I/O half has not answered this long after its deadline is reported as failed without it."""

_ABOUT_BLOCKS = (PresenceAdded, PresenceRemoved, PresenceComplete, ExistsDone, ProbeDone)
"""Messages that are ignored while an epoch changes: their blocks are those of the one that is over."""

_RECOVERED_PER_STEP = 32768
"""Recovered keys that are taken in at once: some milliseconds of the scheduler's thread."""

_EVENTS_MAX = 65536
_CLOSE_TIMEOUT_S = 5.0


class AsyncTier(SecondaryTierManager):
    """Implements :class:`SecondaryTierManager` over an I/O half behind a channel.

    Made by :func:`kvstore.tiers.open_tier`. Used by one thread at a time; every method but ``drain`` and ``close``
    returns in microseconds, and none raises for anything that a medium or a peer does.
    """

    def __init__(
        self,
        channel: Channel,
        config: TierConfig,
        *,
        name: str,
        medium: Medium,
        locality: Locality,
        exclusive: bool,
        slot_bytes: int,
        slot_count: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.medium = medium
        self.locality = locality
        self._channel = channel
        self._config = config
        self._slot_bytes = slot_bytes
        self._slot_count = slot_count
        self._clock = clock
        self._exclusive = exclusive
        self._down = False
        self._epoch = Epoch(name, named=config.epoch is not None)
        self._forget_medium()
        self._failed_loads = FailedLoads(retry_after_s=config.negative_ttl)
        self._health = TierHealth(name, config)
        self._outbox: list[ToIO] = []
        self._jobs = Jobs()
        self._events: deque[TierEvent] = deque(maxlen=_EVENTS_MAX)
        self._counts = TierCounts()
        self._drained = 0
        self._drains = 0

    def lookup(self, key: BlockKey, ctx: RequestContext | None = None) -> LookupResult:
        """See :meth:`SecondaryTierManager.lookup`. HIT is a strong hint, not a promise: a load may still miss."""
        result = self._lookup(key, ctx, self._clock())
        self._counts.lookups[result.value] += 1
        return result

    def submit_store(self, job: TransferJob) -> None:
        """See :meth:`SecondaryTierManager.submit_store`. Blocks that the tier holds are not written again."""
        if not is_sound(job, JobKind.STORE, self._slot_count):
            self._jobs.finish(job, JobKind.STORE, [Outcome.REFUSED] * len(job.keys))
            return
        now = self._clock()
        asked = self._presence.unknown_among(job.keys, now)
        if not asked:
            self._jobs.finish(job, JobKind.STORE, [Outcome.EXISTS] * len(job.keys))
            return
        size_bytes = len(asked) * self._slot_bytes
        deadline = deadline_of(JobKind.STORE, size_bytes, self._config, now)
        entry = Job(self._jobs.next_number(), job, JobKind.STORE, asked, size_bytes, deadline)
        if not self._admits_store(size_bytes, now):
            self._counts.shed_blocks += len(asked)
            self._jobs.finish(job, JobKind.STORE, entry.outcomes([Outcome.SHED] * len(asked)))
            return
        self._jobs.start(entry)
        self._outbox.append(entry.message())

    def submit_load(self, job: TransferJob) -> None:
        """See :meth:`SecondaryTierManager.submit_load`. Loads are never shed; an open breaker fails them at once."""
        if not is_sound(job, JobKind.LOAD, self._slot_count):
            self._jobs.finish(job, JobKind.LOAD, [Outcome.REFUSED] * len(job.keys))
            return
        if not job.keys or not (self._is_up and self._health.loads_pass):
            self._jobs.finish(job, JobKind.LOAD, [Outcome.IO_ERROR] * len(job.keys))
            return
        size_bytes = len(job.keys) * self._slot_bytes
        deadline = deadline_of(JobKind.LOAD, size_bytes, self._config, self._clock())
        entry = Job(self._jobs.next_number(), job, JobKind.LOAD, range(len(job.keys)), size_bytes, deadline)
        self._jobs.start(entry)
        self._outbox.append(entry.message())

    def flush(self) -> None:
        """See :meth:`SecondaryTierManager.flush`."""
        if self._existence.unasked:
            for batch_id, keys, deadline in self._existence.take_questions(self._clock()):
                self._outbox.append(ExistsBatch(batch_id, keys, deadline))
        if not self._outbox:
            return
        messages, self._outbox = self._outbox, []
        try:
            self._channel.send(messages)
        except HostClosedError as error:
            self._counts.last_error = str(error)
            self._jobs.give_up_all(Outcome.CANCELLED)

    def get_finished(self) -> Sequence[JobResult]:
        """See :meth:`SecondaryTierManager.get_finished`. Also hands over what was not flushed yet."""
        self.flush()
        self._hear()
        self._give_up_late_stores(self._clock())
        return self._jobs.take_finished()

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """See :meth:`SecondaryTierManager.touch`."""
        held = tuple(key for key in keys if key in self._presence)
        if held:
            self._outbox.append(Touch(held))

    def remove(self, keys: Sequence[BlockKey], cause: RemovalCause = RemovalCause.REMOVED) -> None:
        """See :meth:`SecondaryTierManager.remove`. The medium deletes them in its own time."""
        sound = tuple(filter(is_key, keys))
        if sound and not self._epoch.is_changing:
            self._blocks_gone(self._presence.note_absent(sound, self._clock()), cause)
            self._outbox.append(Delete(sound))

    def begin_epoch(self) -> bool:
        """See :meth:`SecondaryTierManager.begin_epoch`. Until it has begun, loads fail and stores are shed."""
        if self._config.reset == "forget":
            self._blocks_gone(self._presence.keys(), RemovalCause.REMOVED)
            self._forget_medium()
            self._outbox.append(self._epoch.ask())
            self.flush()
        return True

    def on_request_finished(self, ctx: RequestContext) -> None:
        """See :meth:`SecondaryTierManager.on_request_finished`."""
        self._failed_loads.forget_request(ctx.request_id)

    def take_events(self) -> Sequence[TierEvent]:
        """See :meth:`SecondaryTierManager.take_events`."""
        events = list(self._events)
        self._events.clear()
        return events

    def take_samples(self) -> Sequence[JobSample]:
        """Return the jobs that ended since the last call (at most the last 1,024), for latency histograms."""
        return self._jobs.take_samples()

    @property
    def has_unreported(self) -> bool:
        """Whether the next ``get_finished`` or ``take_events`` has something to return already."""
        return self._jobs.has_finished or bool(self._events)

    def stats(self) -> TierStats:
        """See :meth:`SecondaryTierManager.stats`."""
        return self._counts.snapshot(self.name, self._jobs, self._health, self._presence, self._epoch.present)

    def wait_recovered(self, timeout_s: float) -> bool:
        """Block until all that earlier runs left is known, or the time is over; for the start of an engine.

        Returns:
            Whether it is. If not, recovery goes on, and lookups ask the medium for what is not known yet.
        """
        deadline = self._clock() + timeout_s
        while not self._presence.complete and (left := deadline - self._clock()) > 0:
            if not self._presence.absorb(self._clock()):
                self._channel.wait(left)
            self._hear()
        return self._presence.complete

    def drain(self, timeout_s: float | None = None) -> bool:
        """See :meth:`SecondaryTierManager.drain`."""
        if self._channel.closed:
            return True
        self._drains += 1
        self._outbox.append(Drain(self._drains))
        self.flush()
        deadline = None if timeout_s is None else self._clock() + timeout_s
        while self._drained < self._drains and not self._channel.closed:
            left = 1.0 if deadline is None else deadline - self._clock()
            if left <= 0:
                return False
            self._channel.wait(min(left, 1.0))
            self._hear()
        return not self._jobs

    def close(self, timeout_s: float | None = None) -> None:
        """See :meth:`SecondaryTierManager.close`. Jobs that had to be given up are reported as failed."""
        if self._channel.closed:
            return
        if not self._channel.close(_CLOSE_TIMEOUT_S if timeout_s is None else timeout_s):
            logger.warning(
                "Tier %s did not close in time: its medium still holds on to %d jobs. Their slots must not be reused.",
                self.name,
                len(self._jobs),
            )
        self._hear(math.inf)
        self._jobs.give_up_all(Outcome.CANCELLED)

    def _lookup(self, key: BlockKey, ctx: RequestContext | None, now: float) -> LookupResult:
        if not (self._is_up and self._health.loads_pass) or self._failed_loads.blocks(key, ctx, now):
            return LookupResult.MISS
        known = self._presence.known(key, now)
        if known is Known.PRESENT:
            return LookupResult.HIT
        if known is Known.ABSENT:
            return LookupResult.MISS
        return LookupResult.RETRY if is_key(key) and self._existence.wants_answer(key, now) else LookupResult.MISS

    @property
    def _is_up(self) -> bool:
        return not self._down and not self._epoch.is_changing

    def _admits_store(self, size_bytes: int, now: float) -> bool:
        backlog = self._jobs.store_bytes
        if not self._is_up or (backlog and backlog + size_bytes > self._config.store_backlog_bytes):
            return False
        return self._health.admits_store(now)

    def _hear(self, recovered_max: float = _RECOVERED_PER_STEP) -> None:
        """Take in what the I/O half has said, but for what comes behind so many recovered keys."""
        now = self._clock()
        while recovered_max > 0 and (message := self._channel.receive()) is not None:
            if not (self._epoch.is_changing and isinstance(message, _ABOUT_BLOCKS)):
                self._hear_one(message, now)
            if isinstance(message, PresenceAdded) and message.recovered:
                recovered_max -= len(message.keys)
        if not self._presence.complete:
            self._presence.absorb(now)

    def _hear_one(self, message: FromIO, now: float) -> None:
        match message:
            case JobDone():
                self._job_done(message, now)
            case PresenceAdded(recovered=True):
                self._presence.recover(message.keys)
            case PresenceAdded():
                self._blocks_put(message.keys, now)
            case PresenceRemoved():
                self._blocks_gone(self._presence.remove(message.keys), message.cause)
            case PresenceComplete():
                self._presence.end_recovery(authoritative=message.exclusive)
                logger.info("Tier %s recovered %d blocks in %.2f s", self.name, message.blocks, message.seconds)
            case ExistsDone():
                self._existence_known(message, now)
            case ProbeDone():
                self._health.note_probed(message.tries)
            case Drained():
                self._drained = message.drain_id
            case EpochBegun() if self._epoch.note_begun(message):
                self._forget_medium()
                self._health.reset()
            case StatsReport():
                self._counts.report = message
            case HostDown():
                self._host_down(message)
            case HostUp():
                self._down = False
                self._outbox.extend(self._epoch.ask_again())
                logger.warning("Tier %s: a new I/O process is at work", self.name)

    def _job_done(self, done: JobDone, now: float) -> None:
        self._counts.faults.update(done.faults)
        if done.error:
            self._counts.last_error = done.error
        completed = self._jobs.complete(done)
        if completed is None:
            return  # A store that was given up; PresenceAdded has told what became of it.
        job, outcomes = completed
        if self._epoch.is_changing:
            return  # It was about blocks of an epoch that is over.
        self._send_probe(self._health.judge(job.kind, outcomes, done.error, now))
        if job.kind is JobKind.LOAD:
            self._note_failed_loads(job.job, outcomes, now)

    def _note_failed_loads(self, job: TransferJob, outcomes: Sequence[Outcome], now: float) -> None:
        failed = [key for key, outcome in zip(job.keys, outcomes, strict=True) if not outcome.ok]
        if not failed:
            return
        self._failed_loads.note(failed, job.ctx, now)
        missing = [key for key, outcome in zip(job.keys, outcomes, strict=True) if outcome is Outcome.MISS]
        self._blocks_gone(self._presence.note_absent(missing, now), RemovalCause.LOST)
        corrupt = [key for key, outcome in zip(job.keys, outcomes, strict=True) if outcome is Outcome.CORRUPT]
        self._blocks_gone(self._presence.remove(corrupt), RemovalCause.CORRUPT)

    def _send_probe(self, probe: Probe | None) -> None:
        if probe is not None:
            self._outbox.append(probe)

    def _existence_known(self, done: ExistsDone, now: float) -> None:
        keys = self._existence.answered(done.batch_id, now, failed=bool(done.error))
        if done.error:
            self._counts.last_error = done.error
            self._send_probe(self._health.note_failure(JobKind.LOAD, done.error, now))
            return
        self._health.note_success(JobKind.LOAD)
        self._presence.add([key for key, there in zip(keys, done.found, strict=True) if there == 1], now)
        # What could not be said of a key is no absence: only for a pause, it is not asked for again.
        self._failed_loads.note([key for key, there in zip(keys, done.found, strict=True) if there == 2], None, now)
        absent = [key for key, there in zip(keys, done.found, strict=True) if not there]
        self._blocks_gone(self._presence.note_absent(absent, now), RemovalCause.LOST)

    def _blocks_put(self, keys: Sequence[BlockKey], now: float) -> None:
        new = [key for key in keys if key not in self._presence]
        self._presence.add(keys, now)
        if new:
            self._events.append(TierEvent(tuple(new)))

    def _blocks_gone(self, keys: Sequence[BlockKey], cause: RemovalCause) -> None:
        if keys:
            self._counts.removals[cause.value] += len(keys)
            self._events.append(TierEvent(tuple(keys), cause))

    def _forget_medium(self) -> None:
        """Begin to know the medium: at start, in a new epoch, and whenever a new I/O half does."""
        config = self._config
        self._presence = Presence(
            exclusive=self._exclusive, positive_ttl_s=config.positive_ttl, negative_ttl_s=config.negative_ttl
        )
        self._existence = Existence(config.lookup_timeout, error_pause_s=config.breaker_cooldown)

    def _host_down(self, message: HostDown) -> None:
        """Fail what the I/O process had not answered; it is gone, and no slot is touched any more."""
        logger.warning("Tier %s is down: %s", self.name, message.reason)
        self._down = True
        self._counts.last_error = message.reason
        self._jobs.give_up_all(Outcome.IO_ERROR)
        self._outbox.clear()
        self._drained = self._drains
        self._forget_medium()
        self._health.reset()

    def _give_up_late_stores(self, now: float) -> None:
        """Report stores that the medium sits on, so that they don't pin their slots.

        A record carries the checksum of what was in the slot, so whatever a late write still publishes is a miss.
        """
        for job in self._jobs.late_stores(now, _REPORT_GRACE_S):
            self._jobs.give_up(job, Outcome.TIMEOUT)
            self._health.note_failure(JobKind.STORE, "the medium did not answer by the deadline", now)
