"""The scheduler half of a tier: answers lookups from memory, submits jobs, reports each once."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvstore.bounded import BoundedDict
from kvstore.codec.record import RecordFault
from kvstore.config import TierConfig
from kvstore.errors import HostClosedError
from kvstore.primary.lending import Lender
from kvstore.runtime.messages import (
    Channel,
    Delete,
    Drain,
    Drained,
    EpochBegun,
    ExistsDone,
    Forget,
    Forgotten,
    FromIO,
    HostDown,
    HostUp,
    JobDone,
    JobKind,
    KeepLineage,
    LineageFound,
    PresenceAdded,
    PresenceComplete,
    PresenceRemoved,
    ProbeDone,
    StatsReport,
    SubmitJob,
    ToIO,
    Touch,
)
from kvstore.tiers.base import JobSample, SecondaryTierManager, TierStats
from kvstore.tiers.epochs import Epoch
from kvstore.tiers.health import TierHealth
from kvstore.tiers.inventory import Inventory
from kvstore.tiers.presence import Existence, FailedLoads, Presence
from kvstore.types import (
    KEY_BYTES_MAX,
    SUCCESSES,
    BlockKey,
    JobResult,
    Locality,
    LookupResult,
    Medium,
    MissCause,
    Outcome,
    RemovalCause,
    RequestContext,
    TierEvent,
    TransferJob,
    is_key,
)

logger = logging.getLogger("kvstore.tiers")

_REPORT_GRACE_S = 0.1
"""Time after its deadline at which an unanswered job is late."""

_ABOUT_BLOCKS = (
    PresenceAdded,
    PresenceRemoved,
    LineageFound,
    PresenceComplete,
    ExistsDone,
    ProbeDone,
)
"""Messages that are ignored while an epoch changes: their blocks belong to the previous one."""

_RECOVERED_PER_STEP = 32768
"""Recovered keys processed per step: some milliseconds of the scheduler's thread."""

_VERIFIED_PER_STEP = 128
"""Reported blocks looked up per step. Redis answers within 1 ms."""

_FAULTS_INTERVAL_S = 60.0
"""Shortest interval of lines in the log about damaged records."""

_VERIFICATION_INTERVAL_S = 300.0
"""Time between two lookups of all reported blocks on a medium that evicts silently."""

_RECOVERY_AWAITED_S = 60.0
"""Longest time that an engine without requests keeps stepping to report recovered blocks. A healthy disk recovers far
sooner, and a medium that does not answer must not keep the engine busy forever."""

_CLOSE_TIMEOUT_S = 5.0

_GONE_MAX = 1 << 16
"""Removed blocks whose cause is remembered (some 10 MB), for the causes of misses."""

_CAUSES = {cause: MissCause(cause.value) for cause in RemovalCause}


class AsyncTier(SecondaryTierManager):
    """Implements :class:`SecondaryTierManager` over an I/O half behind a channel.

    Used by one thread at a time. Every method except ``drain`` and ``close`` returns in microseconds, and no failure
    of a medium or a peer raises.

    Attributes:
        may_encrypt: Whether payloads pass through a codec chain, which may encrypt.
        lookup_timeout_s: Time after which an unanswered lookup is a miss.
    """

    def __init__(
        self,
        channel: Channel,
        config: TierConfig,
        *,
        name: str,
        medium: Medium,
        locality: Locality,
        authoritative: bool,
        slot_bytes: int,
        slot_count: int,
        clock: Callable[[], float] = time.monotonic,
        takes_stores: bool = True,
        verifies_events: bool = False,
        lender: Lender | None = None,
        events: bool = True,
        access_events: bool = False,
    ) -> None:
        self.name, self.takes_stores = name, takes_stores
        self.medium, self.locality = medium, locality
        self.may_encrypt = config.codec != "raw"
        self.store_blocks_max = config.store_backlog_bytes // slot_bytes
        self.lookup_timeout_s = float(config.lookup_timeout)
        self._channel = channel
        self._config = config
        self._slot_bytes, self._slot_count = slot_bytes, slot_count
        self._clock = clock
        self._authoritative = authoritative
        self._down = False
        self._forgets: dict[bytes, float] = {}
        """Earliest time of the next attempt to forget each prefix; infinity during an attempt."""
        self._forgotten: set[bytes] = set()
        self._inventory, self._events = Inventory(enabled=events, accesses=events and access_events), events
        self._verifies_events = verifies_events
        self._unverified: list[BlockKey] = []
        """Blocks that may have left, still to be looked up on the medium."""
        self._verification_due = clock() + _VERIFICATION_INTERVAL_S
        self._epoch = Epoch(name, named=config.epoch is not None, lender=lender)
        self._forget_medium()
        self._failed_loads = FailedLoads(retry_after_s=config.negative_ttl)
        self._health = TierHealth(name, config)
        self._outbox: list[ToIO] = []
        self._jobs = Jobs()
        self._lookups: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._faults_logged = -math.inf
        self._removals: Counter[str] = Counter()
        self._gone: BoundedDict[BlockKey, MissCause] = BoundedDict(_GONE_MAX)
        """Causes of removed blocks."""
        self._shed_blocks = 0
        self._last_error = ""
        self._report: StatsReport | None = None
        self._drained = self._drains = 0

    def lookup(self, key: BlockKey, ctx: RequestContext | None = None) -> LookupResult:
        """HIT is a strong hint, not a promise: a load may still miss."""
        result = self._lookup(key, ctx, self._clock())
        self._lookups[result.value] += 1
        return result

    def submit_store(self, job: TransferJob) -> None:
        """Present blocks are not written again."""
        if fault := fault_of(job, JobKind.STORE, self._slot_count):
            self._refuse(job, JobKind.STORE, fault)
            return
        now = self._clock()
        asked = self._presence.unknown_among(job.keys, now) if self.takes_stores else []
        if not asked:
            self._jobs.finish(job, JobKind.STORE, [Outcome.EXISTS] * len(job.keys))
            return
        size_bytes = len(asked) * self._slot_bytes
        if not self._admits_store(size_bytes, now):
            self._shed_blocks += len(asked)
            shed = set(asked)
            outcomes = [Outcome.SHED if i in shed else Outcome.EXISTS for i in range(len(job.keys))]
            self._jobs.finish(job, JobKind.STORE, outcomes)
            return
        deadline = deadline_of(JobKind.STORE, size_bytes, self._config, now)
        self._outbox.append(self._jobs.start(job, JobKind.STORE, asked, size_bytes, deadline))

    def submit_load(self, job: TransferJob) -> None:
        """Loads are never shed; an open breaker makes them fail."""
        if fault := fault_of(job, JobKind.LOAD, self._slot_count):
            self._refuse(job, JobKind.LOAD, fault)
            return
        if not job.keys or not (self._is_up and self._health.loads_pass):
            self._jobs.finish(job, JobKind.LOAD, [Outcome.IO_ERROR] * len(job.keys))
            return
        size_bytes = len(job.keys) * self._slot_bytes
        deadline = deadline_of(JobKind.LOAD, size_bytes, self._config, self._clock())
        self._outbox.append(self._jobs.start(job, JobKind.LOAD, range(len(job.keys)), size_bytes, deadline))

    def _refuse(self, job: TransferJob, kind: JobKind, fault: str) -> None:
        """End a job that its caller made wrongly."""
        text = f"a {kind.value} was refused: {fault}"
        if text != self._last_error:
            logger.warning("Tier %s: %s", self.name, text)
        self._last_error = text
        self._jobs.finish(job, kind, [Outcome.REFUSED] * len(job.keys))

    def flush(self) -> None:
        if self._verifies_events and self._is_up:
            self._verify_reported()
        if self._existence.unasked:
            self._outbox += self._existence.take_questions(self._clock())
        if not self._outbox:
            return
        messages, self._outbox = self._outbox, []
        try:
            self._channel.send(messages)
        except HostClosedError as error:
            self._last_error = str(error)
            self._jobs.give_up_all(Outcome.CANCELLED)

    def get_finished(self) -> Sequence[JobResult]:
        """Flushes first."""
        self.flush()
        self._receive()
        if self._jobs.running:
            self._give_up_late_jobs(self._clock())
        return self._jobs.take_finished()

    def touch(self, keys: Sequence[BlockKey]) -> None:
        held = tuple(key for key in keys if key in self._presence)
        if held:
            self._outbox.append(Touch(held))

    def remove(self, keys: Sequence[BlockKey], cause: RemovalCause = RemovalCause.REMOVED) -> None:
        """The medium deletes them asynchronously."""
        sound = tuple(filter(is_key, keys))
        if sound and not self._epoch.is_changing:
            self._blocks_gone(self._presence.note_absent(sound, self._clock()), cause)
            self._outbox.append(Delete(sound))

    def forget(self, prefix: bytes) -> bool:
        """Retries a failed attempt after ``breaker_cooldown``.

        Never true, and logged once, if the medium can't list its blocks: it may still hold some.
        """
        if prefix in self._forgotten:
            self._forgotten.discard(prefix)
            return True
        if self._is_up and self._forgets.get(prefix, 0.0) <= self._clock():
            self._forgets[prefix] = math.inf
            self._outbox.append(Forget(prefix))
        return False

    def begin_epoch(self) -> bool:
        """Until the epoch has begun, loads fail and stores are shed."""
        if self._config.reset == "forget":
            self._blocks_gone(self._presence.keys(), RemovalCause.REMOVED)
            self._forget_medium()
            self._outbox.append(self._epoch.ask())
            self.flush()
        return True

    def on_request_finished(self, ctx: RequestContext) -> None:
        self._failed_loads.forget_request(ctx.request_id)

    def take_events(self) -> Sequence[TierEvent]:
        """Always empty if the tier was opened without events."""
        return self._inventory.take()

    def restate_events(self) -> None:
        self._inventory.restate()

    def keep_lineage(self, keys: Sequence[BlockKey], lineage: Sequence[bytes], secrets: Sequence[bytes]) -> None:
        """Store the lineage of present blocks for a later engine, if the medium supports it; it may be lost.

        ``lineage`` and ``secrets`` have one item per block; ``secrets`` are stored only if the tier encrypts.
        """
        if keys and not self._epoch.is_changing:
            self._outbox.append(KeepLineage(tuple(keys), tuple(lineage), tuple(secrets)))
            # Immediately, because an engine without requests takes no further step.
            self.flush()

    def take_lineage(self, key: BlockKey) -> tuple[bytes, bytes] | None:
        """Return and drop the lineage and secrets that an earlier engine stored for a recovered block."""
        return self._lineage.pop(key, None)

    def take_samples(self) -> Sequence[JobSample]:
        """Return the jobs that ended since the last call (at most the last 1,024), for latency histograms."""
        return self._jobs.take_samples()

    @property
    def has_unreported(self) -> bool:
        """Whether ``get_finished`` or ``take_events`` has results, or recovered blocks are expected soon."""
        return self._jobs.has_finished or bool(self._inventory) or self._awaits_recovered

    @property
    def io_pid(self) -> int | None:
        """Process id of the I/O half; None if it is a thread of this process, or between two processes."""
        return self._channel.pid

    @property
    def has_answers(self) -> bool:
        """Whether the I/O half has sent something that ``get_finished`` will receive; may be called on any thread."""
        return not self._channel.closed and self._channel.has_answers

    def stats(self) -> TierStats:
        jobs, health, presence = self._jobs, self._health, self._presence
        report = self._report or StatsReport(len(presence), 0, 0, {}, {})
        return TierStats(
            name=self.name,
            epoch=self._epoch.present,
            ready=self._is_up and health.loads_pass and report.ready,
            recovering=not presence.complete,
            blocks=report.blocks,
            used_bytes=report.used_bytes,
            capacity_bytes=report.capacity_bytes,
            lookups=dict(self._lookups),
            outcomes=dict(jobs.outcomes),
            faults=dict(self._faults),
            removals=dict(self._removals),
            bytes_stored=jobs.moved_bytes[JobKind.STORE],
            bytes_loaded=jobs.moved_bytes[JobKind.LOAD],
            jobs_in_flight=len(jobs),
            bytes_in_flight=jobs.running_bytes,
            shed_blocks=self._shed_blocks,
            load_breaker=health.state(JobKind.LOAD),
            store_breaker=health.state(JobKind.STORE),
            last_error=self._last_error,
            backend_counters=dict(report.counters),
            backend_gauges=dict(report.gauges),
            codec=dict(report.codec),
        )

    def wait(self, timeout_s: float) -> None:
        """Block until the I/O half has sent something or the timeout expires.

        If the I/O half is a thread (``"io": "thread"``), other threads may use the tier meanwhile.
        """
        if not self._channel.closed:
            self._channel.wait(timeout_s)

    def wait_recovered(self, timeout_s: float) -> bool:
        """Block until recovery has ended or the timeout expires; return whether it has. For the start of an engine."""
        deadline = self._clock() + timeout_s
        while not self._presence.complete and (left := deadline - self._clock()) > 0:
            if not self._absorb(self._clock()):
                self._channel.wait(left)
            self._receive()
        return self._presence.complete

    def drain(self, timeout_s: float | None = None) -> bool:
        # Without an I/O process, all jobs have failed, and the drain would not be answered.
        if self._channel.closed or self._down:
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
            self._receive()
        return not self._jobs

    def close(self, timeout_s: float | None = None) -> None:
        """Jobs unanswered after ``timeout_s`` (5 s by default) are reported as failed."""
        if self._channel.closed:
            return
        if not self._channel.close(_CLOSE_TIMEOUT_S if timeout_s is None else timeout_s):
            logger.warning(
                "Tier %s did not close in time: %d jobs still run on its medium. Their slots must not be reused.",
                self.name,
                len(self._jobs),
            )
        self._receive(math.inf)
        self._jobs.give_up_all(Outcome.CANCELLED)

    def _lookup(self, key: BlockKey, ctx: RequestContext | None, now: float) -> LookupResult:
        if not (self._is_up and self._health.loads_pass):
            unable = MissCause.DOWN if self._down else MissCause.RESETTING
            return self._miss(MissCause.BREAKER if self._is_up else unable)
        if self._failed_loads.blocks(key, ctx, now):
            return self._miss(self._gone.get(key) or MissCause.FAILED)
        source, since = (None, 0.0) if ctx is None else (ctx.source, ctx.since)
        held = self._presence.holds(key, now, since)
        answer = self._presence.take_answer(key, now, since)
        if held is None:
            held = answer
        if held:
            return LookupResult.HIT
        is_known = held is False or self._existence.has_failed(key, now, source)
        if is_known and not self._existence.is_open(key, now, ctx):
            if held is not False:
                return self._miss(MissCause.FAILED)
            return self._miss(self._gone.get(key) or (MissCause.ABSENT if self._is_open else MissCause.DOWN))
        if is_key(key) and self._existence.ask(key, now, source):
            return LookupResult.RETRY
        if not self._is_open:
            return self._miss(MissCause.DOWN)
        if self._existence.pauses(now):
            return self._miss(MissCause.FAILED)
        return self._miss(MissCause.TIMEOUT if self._presence.complete else MissCause.RECOVERING)

    def _miss(self, cause: MissCause) -> LookupResult:
        self.miss_cause = cause
        return LookupResult.MISS

    @property
    def _is_open(self) -> bool:
        """Whether the medium can serve something, as last reported."""
        return self._report is None or self._report.ready

    @property
    def _awaits_recovered(self) -> bool:
        """Whether recovery may soon find blocks to report; an engine must take steps to report them."""
        may_find = self._events and self._is_up and not self._presence.complete
        return may_find and self._clock() < self._recovery_awaited_until

    @property
    def _is_up(self) -> bool:
        return not self._down and not self._epoch.is_changing

    def _verify_reported(self) -> None:
        """Look up some reported blocks of a medium that evicts silently; missing ones are then reported as removed."""
        now = self._clock()
        if not self._unverified and now >= self._verification_due:
            self._verification_due = now + _VERIFICATION_INTERVAL_S
            self._unverified = self._inventory.known
        for key in self._unverified[-_VERIFIED_PER_STEP:]:
            self._existence.ask(key, now)
        del self._unverified[-_VERIFIED_PER_STEP:]

    def _admits_store(self, size_bytes: int, now: float) -> bool:
        backlog = self._jobs.store_bytes
        if not self._is_up or (backlog and backlog + size_bytes > self._config.store_backlog_bytes):
            return False
        return self._health.admits_store(now)

    def _receive(self, recovered_max: float = _RECOVERED_PER_STEP) -> None:
        """Handle the messages of the I/O half, up to about ``recovered_max`` recovered keys."""
        now = self._clock()
        while recovered_max > 0 and (message := self._channel.receive()) is not None:
            if not (isinstance(message, _ABOUT_BLOCKS) and self._epoch.is_changing):
                self._handle(message, now)
            if isinstance(message, PresenceAdded) and message.recovered:
                recovered_max -= len(message.keys)
        if not self._presence.complete:
            self._absorb(now)

    def _absorb(self, now: float) -> bool:
        """Absorb one message of recovered blocks, if present; return whether it had any."""
        keys, own = self._presence.absorb(now)
        if own:
            self._inventory.found(keys)
        return bool(keys)

    def _handle(self, message: FromIO, now: float) -> None:
        match message:
            case JobDone():
                self._job_done(message, now)
            case PresenceAdded(recovered=True):
                self._presence.recover(message.keys, own=message.own)
            case PresenceAdded():
                if message.own:
                    self._inventory.stored(message.keys)
                self._presence.add(message.keys, now)
            case PresenceRemoved():
                self._blocks_gone(self._presence.remove(message.keys), message.cause)
            case LineageFound() if self._events:
                pairs = zip(message.lineage, message.secrets, strict=True)
                self._lineage.update(zip(message.keys, pairs, strict=True))
            case PresenceComplete():
                self._presence.end_recovery(authoritative=message.authoritative)
                logger.info("Tier %s recovered %d blocks in %.2f s", self.name, message.blocks, message.seconds)
            case ExistsDone():
                self._existence_answered(message, now)
            case ProbeDone():
                self._health.note_probed(message.tries)
            case Drained():
                self._drained = message.drain_id
            case EpochBegun() if self._epoch.note_begun(message):
                self._health.reset()
            case StatsReport():
                self._report = message
            case Forgotten():
                self._note_forgotten(message, now)
            case HostDown():
                self._host_down(message)
            case HostUp():
                self._down = False
                self._outbox.extend(self._epoch.ask_again())
                logger.warning("Tier %s: a new I/O process is running", self.name)

    def _note_forgotten(self, answer: Forgotten, now: float) -> None:
        if answer.error:
            if answer.error != self._last_error:
                logger.warning("Tier %s could not forget a tenant and will try again: %s", self.name, answer.error)
            self._last_error = answer.error
            self._forgets[answer.prefix] = now + float(self._config.breaker_cooldown)
        elif self._forgets.pop(answer.prefix, None) is not None:
            self._forgotten.add(answer.prefix)

    def _job_done(self, done: JobDone, now: float) -> None:
        if done.faults:
            self._note_faults(done.faults, now)
        if done.error:
            self._last_error = done.error
        completed = self._jobs.complete(done)
        if completed is None:
            return  # An abandoned store; PresenceAdded reports its blocks.
        job, outcomes = completed
        if self._epoch.is_changing:
            return  # Its blocks belong to the previous epoch.
        if probe := self._health.judge(job.message.kind, outcomes, done.error, now):
            self._outbox.append(probe)
        if job.message.kind is JobKind.LOAD:
            pairs = zip(job.job.keys, outcomes, strict=True)
            self._inventory.accessed(key for key, outcome in pairs if outcome.ok)
            self._note_failed_loads(job.job, outcomes, now)

    def _note_faults(self, faults: Mapping[str, int], now: float) -> None:
        """Count records that failed verification, with a line in the log now and then if any were damaged."""
        self._faults.update(faults)
        if any(RecordFault(cause).is_damage for cause in faults) and now >= self._faults_logged + _FAULTS_INTERVAL_S:
            self._faults_logged = now
            found = ", ".join(f"{cause}: {count}" for cause, count in sorted(self._faults.items()))
            logger.warning(
                "Tier %s: records failed verification and are computed again (since the start: %s). The medium, its "
                "cables or memory may be bad, or another program writes there.",
                self.name,
                found,
            )

    def _note_failed_loads(self, job: TransferJob, outcomes: Sequence[Outcome], now: float) -> None:
        failed = {key: outcome for key, outcome in zip(job.keys, outcomes, strict=True) if not outcome.ok}
        if not failed:
            return
        self._failed_loads.note(list(failed), job.ctx, now)
        missing = [key for key, outcome in failed.items() if outcome is Outcome.MISS]
        self._blocks_gone(self._presence.note_absent(missing, now), RemovalCause.LOST)
        corrupt = [key for key, outcome in failed.items() if outcome is Outcome.CORRUPT]
        self._blocks_gone(self._presence.remove(corrupt), RemovalCause.CORRUPT)
        self._forget_gone([key for key, outcome in failed.items() if outcome not in (Outcome.MISS, Outcome.CORRUPT)])

    def _existence_answered(self, done: ExistsDone, now: float) -> None:
        present, absent, unknown = self._existence.answered(done.question_id, done.found, now, done.sources)
        if done.error:
            self._last_error = done.error
            if probe := self._health.note_failure(JobKind.LOAD, done.error, now):
                self._outbox.append(probe)
            return
        self._health.note_lookup()
        self._presence.add(present, now)
        # Unknown keys may be present; they are not queried again during a pause.
        self._failed_loads.note(unknown, None, now)
        self._forget_gone(unknown)
        self._blocks_gone(self._presence.note_absent(absent, now), RemovalCause.LOST)
        self._presence.await_reading(present, True, now)
        self._presence.await_reading(absent, False, now)

    def _blocks_gone(self, keys: Sequence[BlockKey], cause: RemovalCause) -> None:
        if keys:
            self._removals[cause.value] += len(keys)
            self._gone.update(dict.fromkeys(keys[-_GONE_MAX:], _CAUSES[cause]))
            self._inventory.removed(keys, cause)

    def _forget_gone(self, keys: Iterable[BlockKey]) -> None:
        """Forget why blocks left: they may be on the medium again."""
        for key in keys:
            self._gone.pop(key, None)

    def _forget_medium(self) -> None:
        """Discard all knowledge of the medium: at start, before a new epoch, and with a new I/O half."""
        config = self._config
        self._inventory.clear(RemovalCause.LOST)
        self._unverified.clear()
        self._lineage: dict[BlockKey, tuple[bytes, bytes]] = {}
        self._presence = Presence(
            authoritative=self._authoritative,
            positive_ttl_s=config.positive_ttl,
            negative_ttl_s=config.negative_ttl,
            # A later removal of forgotten blocks would go unnoticed.
            on_forgotten=partial(self._inventory.removed, cause=RemovalCause.LOST),
        )
        self._existence = Existence(config.lookup_timeout, error_pause_s=config.breaker_cooldown)
        self._recovery_awaited_until = self._clock() + _RECOVERY_AWAITED_S

    def _host_down(self, message: HostDown) -> None:
        """Fail the unanswered jobs: the I/O process has ended and no longer touches slots."""
        logger.warning("Tier %s is down: %s", self.name, message.reason)
        self._down = True
        self._last_error = message.reason
        self._jobs.give_up_all(Outcome.IO_ERROR)
        self._outbox.clear()
        self._forgets.clear()
        self._drained = self._drains
        self._forget_medium()
        self._health.reset()

    def _give_up_late_jobs(self, now: float) -> None:
        """Report late stores as failed; if a slot changes before a late write, the record's checksum will not match."""
        for job in self._jobs.late(now):
            if job.message.kind is JobKind.LOAD:
                self._channel.hurry()  # Its slots may still be written to.
            else:
                self._jobs.give_up(job, Outcome.TIMEOUT)
                self._health.note_failure(JobKind.STORE, "the medium did not answer by the deadline", now)


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


def fault_of(job: TransferJob, kind: JobKind, slot_count: int) -> str:
    """Return what is wrong with a job; empty for one existing slot per key, valid keys, and no slot loaded twice.

    A caller's defect must not end an engine or its I/O process, or count as a failure of the medium.
    """
    keys: Sequence[object] = job.keys
    slots = job.slots
    if len(keys) != len(slots):
        return f"it has {len(keys)} keys and {len(slots)} slots. Give one slot for each key."
    if not all(map(is_key, keys)):
        key = next(key for key in keys if not is_key(key))
        found = f"of {len(key)} bytes" if isinstance(key, bytes) else f"of type {type(key).__name__}"
        return f"it has a key {found}. Expected bytes, 1 to {KEY_BYTES_MAX} long."
    if slots and not (min(slots) >= 0 and max(slots) < slot_count):
        outside = next(slot for slot in slots if not 0 <= slot < slot_count)
        return f"it has slot {outside}. The primary tier has slots 0 to {slot_count - 1}."
    # Otherwise both blocks would be reported as loaded, one of them with the other's bytes.
    if kind is JobKind.LOAD and len(set(slots)) < len(slots):
        twice = next(slot for slot in slots if slots.count(slot) > 1)
        return f"two blocks are to be loaded into slot {twice}. Give each its own."
    return ""


class Jobs:
    """The unfinished jobs, the results not yet taken, and counts of both."""

    def __init__(self) -> None:
        self.running: dict[int, Job] = {}  # The unfinished jobs.
        self._submitted = 0
        self._finished: list[JobResult] = []
        self._samples: deque[JobSample] = deque(maxlen=_SAMPLES_MAX)
        self.store_bytes = 0  # Payload bytes of unfinished stores.
        self.outcomes: Counter[str] = Counter()  # Blocks by ``"store.ok"``, ``"load.miss"``, …
        self.moved_bytes: Counter[JobKind] = Counter()  # Payload bytes moved, by direction.

    def __len__(self) -> int:
        return len(self.running)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self.running.values()))

    @property
    def has_finished(self) -> bool:
        """Whether ``take_finished`` has results."""
        return bool(self._finished)

    @property
    def running_bytes(self) -> int:
        """Payload bytes of unfinished jobs."""
        return sum(job.size_bytes for job in self.running.values())

    def start(
        self, job: TransferJob, kind: JobKind, asked: Sequence[int], size_bytes: int, deadline: float
    ) -> SubmitJob:
        """Note a job as unfinished; return the message to send."""
        self._submitted += 1
        keys = tuple(map(job.keys.__getitem__, asked))
        slots = tuple(map(int, map(job.slots.__getitem__, asked)))
        message = SubmitJob(self._submitted, kind, keys, slots, deadline)
        self.running[self._submitted] = Job(job, message, asked, size_bytes)
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
        job = self.running.get(done.job_id)
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

    def late(self, now: float) -> list[Job]:
        """Return the jobs whose deadline passed more than ``_REPORT_GRACE_S`` ago."""
        return [job for job in self.running.values() if now > job.message.deadline + _REPORT_GRACE_S]

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
        del self.running[job.message.job_id]
        if job.message.kind is JobKind.STORE:
            self.store_bytes -= job.size_bytes
