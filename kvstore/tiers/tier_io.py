"""The I/O half of a tier: runs its jobs on a backend and reports to the scheduler half.

Runs on the loop of a host (:mod:`kvstore.runtime.host`); the halves share only messages and slots.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec

from kvstore.backends.base import Backend, PeerMedium, RecordGeometry, SharedMedium
from kvstore.backends.holdings import Holdings, open_holdings
from kvstore.bounded import BoundedDict
from kvstore.codec.base import KeyNames
from kvstore.config import TierConfig
from kvstore.errors import AbsentError, BackendError, ConfigError
from kvstore.namespace import Namespace
from kvstore.runtime.buffers import SlotBuffers
from kvstore.runtime.messages import (
    AskExistence,
    BeginEpoch,
    Delete,
    Drain,
    Drained,
    EpochBegun,
    ExistsDone,
    Forget,
    Forgotten,
    FromIO,
    JobDone,
    JobKind,
    KeepLineage,
    PresenceAdded,
    PresenceComplete,
    PresenceRemoved,
    Probe,
    ProbeDone,
    StatsReport,
    SubmitJob,
    ToIO,
    Touch,
)
from kvstore.runtime.workers import to_the_end
from kvstore.tiers.block_mover import BlockMover, RunningJob
from kvstore.tiers.codecs import TierCodecs
from kvstore.tiers.epochs import EpochNames
from kvstore.tiers.lineage import LineageNotes
from kvstore.tiers.presence import RefusedRecords
from kvstore.types import BlockKey, Found, NamespaceInfo, Outcome, RemovalCause

logger = logging.getLogger("kvstore.tiers")

_STATS_INTERVAL_S = 1.0

_OPEN_TIMEOUT_S = 60.0
"""Time limit for one attempt to open a medium later, as for the first attempt."""

_RECOVERED_MAX = 4096
"""Recovered keys per message."""

_GONE_MAX = 1 << 16
"""Removals remembered while stores are running: more than a medium makes during one store."""

_FAILURES = (Exception,)
"""Exceptions of a backend. It may be third-party code, and every message must be answered: without an answer its keys
would stay unknown, its slots pinned or its breaker open."""

_M = TypeVar("_M", bound=SubmitJob | AskExistence | Delete | Touch | KeepLineage | PresenceAdded | PresenceRemoved)


@dataclass(frozen=True, slots=True)
class TierIOSpec:
    """Parameters of an I/O half.

    ``backend`` is not open yet and belongs to the loop thread; ``kind`` is its name in configurations.
    ``primary`` is the memory of the primary tier. With ``lineage``, the lineage of recovered blocks is reported.
    """

    backend: Backend
    config: TierConfig
    namespace: Namespace
    primary: memoryview
    slot_bytes: int
    lineage: bool = False
    kind: str = ""


class _EpochParts:
    """The parts of an I/O half that depend on the namespace: created when an epoch begins, closed when it ends."""

    def __init__(
        self,
        spec: TierIOSpec,
        on_put: Callable[[Sequence[BlockKey]], None],
        on_found: Callable[[Sequence[BlockKey]], None],
        epoch: str,
        primary: memoryview,
    ) -> None:
        self.epoch = epoch
        self.namespace = spec.namespace.of_epoch(epoch)
        # Codecs first: they may raise, and SlotBuffers holds a view of the primary tier.
        codecs = TierCodecs(spec.config.codec, self.namespace)
        slots = SlotBuffers(primary, spec.slot_bytes)
        self._names: KeyNames | None = codecs.chain.seal.names if codecs.chain.seal else None
        self.lineage = LineageNotes(self.namespace, codecs.chain.seal)
        self.refused = RefusedRecords()
        inflight_bytes = int(spec.config.inflight_bytes)
        self.mover = BlockMover(
            spec.backend, self.namespace, slots, inflight_bytes, on_put, codecs, self.refused, on_found
        )

    def inward(self, message: ToIO) -> ToIO:
        """Replace the keys of a message from the scheduler half by keyed names, if the tier uses them.

        The scheduler half uses only keys; backends and records, including headers, contain only names.
        """
        if self._names is not None and isinstance(message, SubmitJob | AskExistence | Delete | Touch | KeepLineage):
            return _mapped(message, self._names.name_of)
        return message

    def outward(self, message: FromIO) -> FromIO:
        """Replace the keyed names of a message to the scheduler half by keys; drop names made with other secrets."""
        if self._names is not None and isinstance(message, PresenceAdded | PresenceRemoved):
            return _mapped(message, self._names.key_of)
        return message

    def key_of(self, name: BlockKey) -> BlockKey | None:
        """Return the key of a name on the medium; None if the name was made with another secret."""
        return name if self._names is None else self._names.key_of(name)

    def close(self) -> None:
        """Release every buffer; only while nothing moves. Idempotent."""
        self.mover.close()


class TierIO:
    """Runs the jobs of one tier on one backend; called by a host, see :class:`kvstore.runtime.host.IOSide`.

    ``room`` waits until the channel has room for more recovered keys.
    """

    def __init__(
        self, spec: TierIOSpec, post: Callable[[FromIO], None], room: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self._spec = spec
        self._config = spec.config
        self._backend = spec.backend
        self._backend.set_removal_listener(self._on_removal)
        self._backend.set_arrival_listener(self._on_found)
        self._send = post
        self._room = room
        self._new_parts = partial(_EpochParts, spec, self._on_put, self._on_exists)
        self._parts = self._new_parts("", spec.primary)
        # After everything that may raise, because the view holds the primary tier; the caller releases its own view.
        self._primary = memoryview(spec.primary)
        self._names = EpochNames(self._config.epoch)
        self._tasks: set[asyncio.Task[None]] = set()
        self._questions: set[asyncio.Task[None]] = set()
        self._jobs: set[asyncio.Task[None]] = set()
        self._stores: dict[int, RunningJob] = {}
        """Unfinished stores by job id."""
        self._gone: BoundedDict[BlockKey, None] = BoundedDict(_GONE_MAX)
        """Blocks that left while stores were running."""
        self._wanted_epoch: BeginEpoch | None = None
        self._opened = False
        self._open_error = ""  # Reason for which the medium is not open, after a failed attempt.
        self._closed = False
        self._last_stats: StatsReport | None = None

    async def open(self) -> None:
        """Open the backend; recovery continues in the background.

        An unreachable or absent medium is an error only if the tier is ``required``; otherwise the tier starts without
        it and tries again at growing intervals.

        Raises:
            ConfigError: The configuration can't be used.
            BackendError: The medium refuses, and the tier is required.
        """
        if name := await self._names.first():
            self._enter(name)
        if self._config.epoch is not None:
            self._post(EpochBegun(0, name))
        try:
            await self._open_backend()
        except (AbsentError, BackendError) as error:
            if self._config.required:
                raise
            logger.warning("The %s tier starts without its medium and will try again: %s", self._backend.name, error)
            self._open_error = str(error)
            self._spawn(self._open_until_ok(), self._questions)
            self._post_stats()
        self._spawn(self._report_stats_for_ever())

    def deliver(self, messages: Sequence[ToIO]) -> None:
        """Start the work of each message, stores last."""
        # Noted in the original order: a removal applies only to the stores before it.
        ordered = []
        for message in messages:
            inward = self._parts.inward(message)
            ordered.append((inward, self._note_order(inward)))
        if len(ordered) > 1:
            ordered.sort(key=_is_store)
        for message, before in ordered:
            match message:
                case SubmitJob():
                    if message.kind is JobKind.STORE:
                        self._names.note_stored()
                    self._spawn(self._run_job(message), self._jobs)
                case AskExistence():
                    self._spawn(self._run_exists(message), self._questions)
                case Touch():
                    self._touch(message)
                case KeepLineage():
                    self._keep_lineage(message)
                case Delete():
                    # Among the jobs, so that a drain waits for it.
                    self._spawn(self._run_delete(message, before), self._jobs)
                case Forget():
                    self._spawn(self._run_forget(message, before))
                case Probe():
                    self._spawn(self._probe_until_ok(message), self._questions)
                case BeginEpoch():
                    if self._wanted_epoch is None:
                        self._spawn(self._change_epoch())
                    self._wanted_epoch = message
                case Drain():
                    self._spawn(self._run_drain(message))

    def _note_order(self, message: ToIO) -> Sequence[RunningJob]:
        """Note a store before it starts; return the unfinished stores of blocks that a message removes."""
        if isinstance(message, SubmitJob) and message.kind is JobKind.STORE:
            if not self._stores:
                self._gone.clear()
            self._stores[message.job_id] = RunningJob(message)
        if isinstance(message, Forget):
            return [store for store in self._stores.values() if self._with_prefix(store.job.keys, message.prefix)]
        if not isinstance(message, Delete) or not self._stores:
            return ()
        keys = set(message.keys)
        before = [store for store in self._stores.values() if not keys.isdisjoint(store.job.keys)]
        for store in before:
            store.removed |= keys
        return before

    def _touch(self, message: Touch) -> None:
        try:
            self._backend.touch(message.keys)
        except _FAILURES as error:
            # Not raised, because the remaining messages must be processed.
            logger.warning("The %s tier could not note a use of blocks: %s", self._backend.name, error)

    def _keep_lineage(self, message: KeepLineage) -> None:
        if not isinstance(self._backend, SharedMedium):
            return
        try:
            self._backend.note(self._parts.lineage.notes_of(message))
        except _FAILURES as error:
            logger.warning("The %s tier could not keep the lineage of blocks: %s", self._backend.name, error)

    async def _report_lineage(self) -> None:
        """Report the lineage that the last engine stored."""
        if not isinstance(self._backend, SharedMedium):
            return
        try:
            notes = iter((await self._backend.notes()).items())
        except _FAILURES as error:
            logger.warning("The lineage of blocks of the %s tier could not be read: %s", self._backend.name, error)
            return
        # A list of millions of notes would take long.
        while some := list(itertools.islice(notes, _RECOVERED_MAX)):
            self._post(self._parts.lineage.found(some, self._parts.key_of))
            await asyncio.sleep(0)
            if self._room is not None:
                await self._room()

    async def close(self) -> None:
        """Cancel all work (each job is answered), close the backend, release every buffer. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            await _cancel([*self._jobs, *self._questions, *self._tasks])
        finally:
            try:
                # Even if cancelled, because a medium does not answer: the backend then closes its files later.
                await self._backend.close()
            finally:
                self._parts.close()
                self._primary.release()

    async def _open_backend(self) -> None:
        await asyncio.gather(*[secret.renew() for secret in self._config.secrets.values()])
        self._config.check_secrets()
        geometry = RecordGeometry(self._backend.alignment, self._spec.slot_bytes)
        try:
            await self._backend.open(self._parts.namespace, geometry)
        except BaseException:
            await self._backend.close()
            raise
        self._opened, self._open_error = True, ""
        if self._wanted_epoch is None:
            self._spawn(self._report_presence(), self._questions)

    async def _open_until_ok(self) -> None:
        """Open the backend, at growing intervals until it is open; a new epoch does it instead."""
        pause_s = float(self._config.breaker_cooldown)
        while not self._opened and self._wanted_epoch is None:
            await asyncio.sleep(pause_s)
            pause_s = min(float(self._config.breaker_cooldown_max), 2 * pause_s)
            try:
                async with asyncio.timeout(_OPEN_TIMEOUT_S):
                    await self._open_backend()
                logger.warning("The %s tier has opened its medium", self._backend.name)
            except _FAILURES as error:
                self._open_error = str(error) or type(error).__name__

    async def _reopen(self) -> None:
        """Leave a medium that is gone for good, with all of its blocks."""
        self._opened = False
        with suppress(*_FAILURES):
            async for keys in self._backend.scan_keys():
                self._on_removal(keys, RemovalCause.LOST)
        await to_the_end(asyncio.ensure_future(self._backend.close()))
        await self._open_until_ok()

    async def _change_epoch(self) -> None:
        """Leave the present epoch and enter the one requested last."""
        named: BeginEpoch | None = None
        name, pause_s = "", float(self._config.breaker_cooldown)
        while (wanted := self._wanted_epoch) is not None:
            if self._jobs:
                await asyncio.wait(set(self._jobs))
            # Answers about the ending epoch would be ignored.
            await _cancel([*self._questions])
            if wanted is not named:
                named, name = wanted, await self._names.after(self._parts.epoch, wanted.name)
            try:
                await self._move_to(name)
            except _FAILURES as error:
                logger.warning(
                    "The %s tier can't begin a new epoch and will try again in %.0f s; until then it misses: %s",
                    self._backend.name,
                    pause_s,
                    error,
                )
                await asyncio.sleep(pause_s)
                pause_s = min(float(self._config.breaker_cooldown_max), 2 * pause_s)
                continue
            if wanted is self._wanted_epoch:
                self._wanted_epoch = None
                self._post(EpochBegun(wanted.number, name))
                self._spawn(self._report_presence(), self._questions)

    async def _move_to(self, name: str) -> None:
        if name == self._parts.epoch and self._opened:
            return
        self._opened = False
        # Completed even if cancelled, because an incomplete close would leave the medium locked.
        await to_the_end(asyncio.ensure_future(self._backend.close()))
        if name != self._parts.epoch:
            self._enter(name)
        await self._open_backend()

    def _enter(self, name: str) -> None:
        parts, self._parts = self._parts, self._new_parts(name, self._primary)
        parts.close()

    async def _report_presence(self) -> None:
        """Report the blocks from earlier runs, then the end of recovery."""
        started = time.monotonic()
        blocks, authoritative = 0, self._backend.authoritative
        if self._spec.lineage:
            await self._report_lineage()
        try:
            async for keys in self._backend.scan_keys():
                for start in range(0, len(keys), _RECOVERED_MAX):
                    self._on_found(keys[start : start + _RECOVERED_MAX], recovered=True)
                    if self._room is not None:
                        await self._room()  # Otherwise answers to jobs would wait behind millions of keys.
                blocks += len(keys)
        except _FAILURES as error:
            logger.warning(
                "Recovery of the %s tier ended early; it asks the medium from now on: %s", self._backend.name, error
            )
            authoritative = False
        # The statistics first, because the start of an engine waits for the end of recovery and logs them.
        self._post_stats()
        self._post(PresenceComplete(authoritative, blocks, time.monotonic() - started))

    async def _run_job(self, job: SubmitJob) -> None:
        running = self._stores.get(job.job_id) or RunningJob(job)
        try:
            await self._move_job(running)
        finally:
            self._stores.pop(job.job_id, None)
            running.ended.set()

    async def _move_job(self, running: RunningJob) -> None:
        job, started = running.job, time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, job.deadline - started)), asyncio.TaskGroup() as group:
                for part in self._parts.mover.cut(running):
                    group.create_task(self._parts.mover.move(part))
        except TimeoutError:
            running.note_error(f"{job.kind.value} of {len(job.keys)} blocks did not end by its deadline")
        except asyncio.CancelledError:
            # Only close() cancels jobs. Finished blocks keep their outcomes.
            running.settle_rest(Outcome.CANCELLED)
        except BaseExceptionGroup as group_error:
            # A defect here or in a backend: without an answer the job's slots would stay pinned.
            logger.exception("A %s job of the %s tier failed unexpectedly", job.kind.value, self._backend.name)
            running.settle_rest(Outcome.IO_ERROR)
            running.note_error(repr(group_error.exceptions[0]))
        seconds = time.monotonic() - started
        if running.suspects and not self._closed:
            # Before the report: a block stored again after the report must not be mistaken for the damaged one. If the
            # medium takes longer than the deadline, the quarantine continues in the background.
            quarantine = self._spawn(self._quarantine(running.suspects), self._questions)
            with suppress(asyncio.CancelledError):
                await asyncio.wait({quarantine}, timeout=max(0.0, job.deadline - time.monotonic()))
        if job.kind is JobKind.LOAD:
            refused = self._parts.refused
            if refused:
                read = zip(job.keys, running.outcomes, strict=True)
                refused.forget([key for key, outcome in read if outcome == Outcome.OK])
            refused.note(running.refused, time.monotonic() - started)
        outcomes, faults = bytes(running.outcomes), dict(running.faults)
        error = running.error and (self._open_error or running.error)
        self._post(JobDone(job.job_id, outcomes, running.size_bytes, seconds, faults, error))
        if Outcome.MISS in outcomes and self._backend.authoritative and not self._closed:
            # A store may have ended since the load.
            missed = [key for key, outcome in zip(job.keys, outcomes, strict=True) if outcome == Outcome.MISS]
            self._spawn(self._report_if_there(missed, self._on_found), self._questions)

    async def _quarantine(self, keys: Sequence[BlockKey]) -> None:
        try:
            if not self._backend.authoritative:
                keys = await self._parts.mover.reread_damaged(keys)
                if not keys:
                    return
            await self._backend.quarantine(keys)
        except _FAILURES as error:
            logger.warning("Damaged records of the %s tier could not be quarantined: %s", self._backend.name, error)
        self._on_removal(keys, RemovalCause.CORRUPT)

    async def _run_exists(self, question: AskExistence) -> None:
        found, sources, error = b"", b"", ""
        try:
            async with asyncio.timeout(max(0.0, question.deadline - time.monotonic())):
                answers, states = await self._find(question)
            hidden = self._parts.refused.hidden_among(question.keys)
            pairs = zip(question.keys, answers, strict=True)
            found = bytes(Found.ABSENT if hidden and key in hidden else answer for key, answer in pairs)
            sources = bytes(states)
        except TimeoutError:
            error = f"existence of {len(question.keys)} blocks was not known by the deadline"
        except _FAILURES as failure:
            error = self._open_error or f"{type(failure).__name__}: {failure}"
        self._post(ExistsDone(question.question_id, found, error, sources))

    async def _find(self, question: AskExistence) -> tuple[Sequence[Found], Sequence[Found]]:
        """Return the answer for each key and each source of a question; see :meth:`PeerMedium.exists_at`."""
        if isinstance(self._backend, PeerMedium):
            return await self._backend.exists_at(question.keys, question.sources)
        there = await self._backend.exists(question.keys)
        found = [Found.UNKNOWN if each is None else Found.THERE if each else Found.ABSENT for each in there]
        return found, [Found.ABSENT] * len(question.sources)

    async def _run_delete(self, message: Delete, before: Sequence[RunningJob]) -> None:
        """Delete blocks, and delete them again after earlier stores of them have ended."""
        await self._delete(message.keys)
        if before:
            for store in before:
                await store.ended.wait()
            put = {key for store in before for key in store.job.keys}
            await self._delete([key for key in message.keys if key in put])

    async def _run_forget(self, message: Forget, before: Sequence[RunningJob]) -> None:
        """Delete all blocks with a prefix after earlier stores have ended; unanswered if the medium can't do it."""
        for store in before:
            await store.ended.wait()
        error = ""
        try:
            await self._forget(message.prefix)
        except ConfigError as failure:
            logger.error(
                "The %s tier can't forget a tenant, which finds and stores nothing until this engine ends. Remove its "
                "blocks from the medium. %s",
                self._backend.name,
                failure,
            )
            return
        except _FAILURES as failure:
            error = f"{type(failure).__name__}: {failure}"
        self._post(Forgotten(message.prefix, error))

    async def _forget(self, prefix: bytes) -> None:
        """Remove all blocks with a prefix from the medium. A shared medium is listed through its holdings.

        Raises:
            ConfigError: The medium can't be listed.
            BackendError: A block stays, or the medium fails.
        """
        if not self._backend.takes_stores:
            return
        if self._backend.authoritative and self._backend.scans:
            async for names in self._backend.scan_keys():
                left = await self._delete_or_raise(self._with_prefix(names, prefix))
                if left and any(answer is not False for answer in await self._backend.exists(left)):
                    raise BackendError("not all blocks could be removed", backend=self._backend.name)
            return
        holdings = open_holdings(self._spec.kind or self._backend.name, self._config)
        if not self._backend.scans and type(holdings).scan is Holdings.scan:
            raise ConfigError(f"{self._backend.name} can't list its blocks: it has no scan().")
        namespace = NamespaceInfo(self._parts.namespace.hex)
        try:
            await holdings.open()
            async with aclosing(holdings.scan(namespace)) as pages:
                async for page in pages:
                    # The backend's own view may lack blocks that another engine has just stored.
                    names = self._with_prefix([block.key for block in page], prefix)
                    unknown = set(await self._delete_or_raise(names))
                    blocks = [block for block in page if block.key in unknown]
                    if blocks and await holdings.remove(namespace, blocks, RemovalCause.REMOVED) < len(blocks):
                        raise BackendError("not all blocks could be removed", backend=self._backend.name)
        finally:
            await holdings.close()

    def _with_prefix(self, names: Sequence[BlockKey], prefix: bytes) -> list[BlockKey]:
        """Return the names of keys that begin with a prefix."""
        return [name for name in names if (key := self._parts.key_of(name)) is not None and key.startswith(prefix)]

    async def _delete(self, keys: Sequence[BlockKey]) -> None:
        try:
            await self._delete_or_raise(keys)
        except _FAILURES as error:
            logger.warning("Blocks of the %s tier could not be removed: %s", self._backend.name, error)

    async def _delete_or_raise(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Delete blocks; return those that the backend did not find, or can't delete."""
        removed = await self._backend.delete(keys)
        self._parts.refused.forget(keys)
        gone = tuple(key for key, is_gone in zip(keys, removed, strict=True) if is_gone)
        if gone:
            self._on_removal(gone, RemovalCause.REMOVED)
        return [key for key, is_gone in zip(keys, removed, strict=True) if not is_gone]

    async def _probe_until_ok(self, probe: Probe) -> None:
        pause_s, tries = probe.pause_s, 0
        while True:
            await asyncio.sleep(pause_s)
            tries += 1
            with suppress(*_FAILURES):
                async with asyncio.timeout(probe.timeout_s):
                    if self._opened:
                        await self._backend.probe()
                        self._post(ProbeDone(tries))
                        return
            pause_s = min(probe.pause_s_max, 2 * pause_s)

    async def _run_drain(self, message: Drain) -> None:
        if self._jobs:
            await asyncio.wait(set(self._jobs))
        self._post_stats()
        self._post(Drained(message.drain_id))

    async def _report_stats_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_STATS_INTERVAL_S)
            if self._opened and self._backend.stats().is_lost:
                self._spawn(self._reopen(), self._questions)
            self._post_stats()

    def _post_stats(self) -> None:
        stats = self._backend.stats()
        # Plain numbers: a backend may count in ByteSize, which can't cross a process boundary.
        used_bytes, capacity_bytes = int(stats.used_bytes), int(stats.capacity_bytes)
        codec = self._parts.mover.codecs.stats()
        gauges = {**stats.gauges, "unreadable_blocks": float(len(self._parts.refused))}
        ready = self._opened and stats.ready
        report = StatsReport(stats.blocks, used_bytes, capacity_bytes, stats.counters, gauges, codec, ready)
        # Unchanged statistics are not sent: the owner of an idle tier may not receive for hours, and reports would
        # accumulate.
        if report != self._last_stats:
            self._last_stats = report
            self._post(report)

    def _post(self, message: FromIO) -> None:
        self._send(self._parts.outward(message))

    def _on_put(self, keys: Sequence[BlockKey]) -> None:
        self._report_put(keys, lambda here: self._post(PresenceAdded(tuple(here), recovered=False)))

    def _on_exists(self, keys: Sequence[BlockKey]) -> None:
        """Report blocks that stores found on the medium."""
        self._report_put(keys, self._on_found)

    def _report_put(self, keys: Sequence[BlockKey], report: Callable[[Sequence[BlockKey]], None]) -> None:
        """Report the blocks of a finished put; blocks that left meanwhile only if they exist again."""
        doubtful = [key for key in keys if key in self._gone] if self._gone else []
        if doubtful:
            # Among the jobs, so that a drain waits for it.
            self._spawn(self._report_if_there(doubtful, report), self._jobs)
            keys = [key for key in keys if key not in self._gone]
        if keys:
            report(keys)

    async def _report_if_there(self, keys: Sequence[BlockKey], report: Callable[[Sequence[BlockKey]], None]) -> None:
        try:
            found = await self._backend.exists(keys)
        except _FAILURES:
            return
        if here := [key for key, is_there in zip(keys, found, strict=True) if is_there]:
            report(here)

    def _on_found(self, keys: Sequence[BlockKey], *, recovered: bool = False) -> None:
        """Report blocks found on the medium that this engine did not put just now."""
        own = self._backend.own(keys)
        if ours := tuple(key for key, is_ours in zip(keys, own, strict=True) if is_ours):
            self._post(PresenceAdded(ours, recovered))
        if len(ours) < len(keys):
            others = tuple(key for key, is_ours in zip(keys, own, strict=True) if not is_ours)
            self._post(PresenceAdded(others, recovered, own=False))

    def _on_removal(self, keys: Sequence[BlockKey], cause: RemovalCause) -> None:
        if keys:
            if self._stores:
                # A put that found or wrote them may still be running.
                self._gone.update(dict.fromkeys(keys))
            self._post(PresenceRemoved(tuple(keys), cause))

    def _spawn(
        self, work: Coroutine[Any, Any, None], kept_in: set[asyncio.Task[None]] | None = None
    ) -> asyncio.Task[None]:
        kept = self._tasks if kept_in is None else kept_in
        task = asyncio.get_running_loop().create_task(work)
        kept.add(task)
        task.add_done_callback(kept.discard)
        task.add_done_callback(_log_defect)
        return task


def _is_store(ordered: tuple[ToIO, object]) -> bool:
    """Sort key that puts stores last, because requests wait for loads and lookups."""
    message = ordered[0]
    return isinstance(message, SubmitJob) and message.kind is JobKind.STORE


def _log_defect(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("A background task of a tier ended with a defect", exc_info=error)


def _mapped(message: _M, mapping: Callable[[bytes], bytes | None]) -> _M:
    mapped = map(mapping, message.keys)
    return msgspec.structs.replace(message, keys=tuple(key for key in mapped if key is not None))


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
