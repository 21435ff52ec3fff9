"""The I/O half of a tier: jobs become record batches, and records are proved before anybody may read them.

Lives on the loop of a host (:mod:`kvstore.runtime.host`); hears from the scheduler half in messages only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvstore.backends.base import Backend, RecordGeometry
from kvstore.config import TierConfig
from kvstore.errors import BackendError
from kvstore.namespace import Namespace
from kvstore.runtime.messages import (
    BeginEpoch,
    Delete,
    Drain,
    Drained,
    EpochBegun,
    ExistsBatch,
    ExistsDone,
    FromIO,
    JobDone,
    JobKind,
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
from kvstore.tiers.epoch_names import EpochNames
from kvstore.tiers.epoch_parts import EpochParts
from kvstore.tiers.tally import Tally
from kvstore.tiers.tasks import end_all, to_its_end
from kvstore.types import BlockKey, Outcome, RemovalCause

__all__ = ["TierIO", "TierIOSpec"]

logger = logging.getLogger("kvstore.tiers")

_STATS_INTERVAL_S = 1.0

_RECOVERED_MAX = 4096
"""Recovered keys of one message."""

_FAILURES = (Exception,)
"""What a backend may raise. It may be anybody's code, and a question must be answered whatever comes of it: one that
is not would leave its keys unknown, its slots pinned or its breaker open for ever."""


@dataclass(frozen=True, slots=True)
class TierIOSpec:
    """What the I/O half is made from.

    Attributes:
        backend: The backend, not opened yet; from now on it belongs to the loop thread.
        config: The tier's configuration.
        namespace: Namespace of its blocks.
        primary: The primary tier's memory.
        slot_bytes: Length of a slot.
    """

    backend: Backend
    config: TierConfig
    namespace: Namespace
    primary: memoryview
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class _Store:
    """A store that has not ended: what it stores, what becomes of it, and its end."""

    keys: Sequence[BlockKey]
    tally: Tally
    ended: asyncio.Event


class TierIO:
    """Runs the jobs of one tier on one backend; see :class:`kvstore.runtime.host.IOSide` for who calls it."""

    def __init__(
        self, spec: TierIOSpec, post: Callable[[FromIO], None], room: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self._spec = spec
        self._config = spec.config
        self._backend = spec.backend
        self._backend.set_removal_listener(self._on_removal)
        self._backend.set_arrival_listener(self._on_put)
        self._send = post
        self._room = room
        self._new_parts = partial(
            EpochParts, self._backend, self._config, spec.namespace, spec.slot_bytes, self._on_put
        )
        self._parts = self._new_parts("", spec.primary)
        # After what may be refused, as it holds on to the primary tier; the caller lets go of its own view.
        self._primary = memoryview(spec.primary)
        self._names = EpochNames(self._config.epoch)
        self._tasks: set[asyncio.Task[None]] = set()
        self._questions: set[asyncio.Task[None]] = set()
        self._jobs: set[asyncio.Task[None]] = set()
        self._stores: dict[int, _Store] = {}
        """Unfinished stores by the number of the job."""
        self._wanted_epoch: BeginEpoch | None = None
        self._opened = False
        self._closed = False
        self._last_stats: StatsReport | None = None

    async def open(self) -> None:
        """Open the backend; recovery goes on in the background.

        A medium that can't be reached is an error only where the tier is ``required``; otherwise the tier starts down
        and is probed until it is there.

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
        except BackendError as error:
            if self._config.required:
                raise
            logger.warning("The %s tier starts without its medium and will try again: %s", self._backend.name, error)
        self._spawn(self._report_stats_for_ever())

    @property
    def opened(self) -> bool:
        """Whether the medium has been reached since the start."""
        return self._opened

    def deliver(self, messages: Sequence[ToIO]) -> None:
        """Start what the messages ask for; loads first."""
        # In their own order, as a removal concerns the stores before it and none behind it.
        ordered = [(inward, self._note_order(inward)) for inward in map(self._parts.naming.inward, messages)]
        for message, before in sorted(ordered, key=_precedence):
            match message:
                case SubmitJob():
                    if message.kind is JobKind.STORE:
                        self._names.note_stored()
                    self._spawn(self._run_job(message), self._jobs)
                case ExistsBatch():
                    self._spawn(self._run_exists(message), self._questions)
                case Touch():
                    self._touch(message)
                case Delete():
                    # With the jobs: a drain waits for it, so that whoever removes and closes has removed.
                    self._spawn(self._run_delete(message, before), self._jobs)
                case Probe():
                    self._spawn(self._probe_until_ok(message), self._questions)
                case BeginEpoch():
                    if self._wanted_epoch is None:
                        self._spawn(self._change_epoch())
                    self._wanted_epoch = message
                case Drain():
                    self._spawn(self._run_drain(message))

    def _note_order(self, message: ToIO) -> Sequence[_Store]:
        """Note a store before it starts; return the unfinished stores of blocks that a removal is about."""
        if isinstance(message, SubmitJob) and message.kind is JobKind.STORE:
            self._stores[message.job_id] = _Store(message.keys, Tally(len(message.keys)), asyncio.Event())
        if not isinstance(message, Delete) or not self._stores:
            return ()
        keys = set(message.keys)
        before = [store for store in self._stores.values() if not keys.isdisjoint(store.keys)]
        for store in before:
            store.tally.removed |= keys
        return before

    def _touch(self, message: Touch) -> None:
        try:
            self._backend.touch(message.keys)
        except _FAILURES as error:
            # The messages behind this one matter more.
            logger.warning("The %s tier could not note a use of blocks: %s", self._backend.name, error)

    async def close(self) -> None:
        """Give up what runs (each job is answered), close the backend, release every buffer. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await end_all([*self._jobs, *self._questions, *self._tasks])
        try:
            await self._backend.close()
        finally:
            self._parts.close()
            self._primary.release()

    async def _open_backend(self) -> None:
        geometry = RecordGeometry(self._backend.alignment, self._spec.slot_bytes)
        try:
            await self._backend.open(self._parts.namespace, geometry)
        except BaseException:
            await self._backend.close()
            raise
        self._opened = True
        if self._wanted_epoch is None:
            self._spawn(self._report_presence(), self._questions)

    async def _change_epoch(self) -> None:
        """Leave the present epoch and enter the one that was asked for last."""
        named: BeginEpoch | None = None
        name, pause_s = "", float(self._config.breaker_cooldown)
        while (wanted := self._wanted_epoch) is not None:
            if self._jobs:
                await asyncio.wait(set(self._jobs))
            # Questions about the epoch that ends, whose answers are not expected any more.
            await end_all([*self._questions])
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
        await to_its_end(self._backend.close())
        if name != self._parts.epoch:
            self._enter(name)
        await self._open_backend()

    def _enter(self, name: str) -> None:
        parts, self._parts = self._parts, self._new_parts(name, self._primary)
        parts.close()

    async def _report_presence(self) -> None:
        """Tell the scheduler half what earlier runs left, then that this was all."""
        started = time.monotonic()
        blocks, authoritative = 0, self._backend.exclusive
        try:
            async for keys in self._backend.scan_keys():
                for start in range(0, len(keys), _RECOVERED_MAX):
                    self._post(PresenceAdded(tuple(keys[start : start + _RECOVERED_MAX]), recovered=True))
                    if self._room is not None:
                        await self._room()  # Or answers to jobs would stand behind millions of keys.
                blocks += len(keys)
        except _FAILURES as error:
            logger.warning(
                "Recovery of the %s tier ended early; it asks the medium from now on: %s", self._backend.name, error
            )
            authoritative = False
        self._post(PresenceComplete(authoritative, blocks, time.monotonic() - started))
        self._post_stats()

    async def _run_job(self, job: SubmitJob) -> None:
        store = self._stores.get(job.job_id)
        try:
            await self._move_job(job, Tally(len(job.keys)) if store is None else store.tally)
        finally:
            if store is not None:
                del self._stores[job.job_id]
                store.ended.set()

    async def _move_job(self, job: SubmitJob, tally: Tally) -> None:
        started = time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, job.deadline - started)), asyncio.TaskGroup() as group:
                for batch in self._parts.mover.cut(job, tally):
                    group.create_task(self._parts.mover.move(job.kind, batch))
        except TimeoutError:
            tally.note_error(f"{job.kind.value} of {len(job.keys)} blocks did not end by its deadline")
        except asyncio.CancelledError:
            # Only close() cancels jobs. What was done stands; the rest is answered as given up.
            tally.settle_rest(Outcome.CANCELLED)
        except BaseExceptionGroup as group_error:
            # A defect of ours or of a backend: the job must be answered all the same, or its slots stay pinned.
            logger.exception("A %s job of the %s tier failed unexpectedly", job.kind.value, self._backend.name)
            tally.settle_rest(Outcome.IO_ERROR)
            tally.note_error(repr(group_error.exceptions[0]))
        seconds = time.monotonic() - started
        if tally.suspects and not self._closed:
            # Before the job is reported, so that a block stored anew because of the report is not taken for the bad
            # one; a medium that takes too long about it goes on by itself.
            setting = self._spawn(self._set_aside(tally.suspects), self._questions)
            with suppress(asyncio.CancelledError):
                await asyncio.wait({setting}, timeout=max(0.0, job.deadline - time.monotonic()))
        if job.kind is JobKind.LOAD:
            refused = self._parts.refused
            if refused:
                read = zip(job.keys, tally.outcomes, strict=True)
                refused.forget([key for key, outcome in read if outcome == Outcome.OK])
            refused.note(tally.refused, time.monotonic() - started)
        outcomes, faults = bytes(tally.outcomes), dict(tally.faults)
        self._post(JobDone(job.job_id, outcomes, tally.size_bytes, seconds, faults, tally.error))

    async def _set_aside(self, keys: Sequence[BlockKey]) -> None:
        try:
            if not self._backend.exclusive:
                keys = await self._parts.mover.damaged_still(keys)
                if not keys:
                    return
            await self._backend.quarantine(keys)
        except _FAILURES as error:
            logger.warning("Bad blocks of the %s tier could not be set aside: %s", self._backend.name, error)
        self._post(PresenceRemoved(tuple(keys), RemovalCause.CORRUPT))

    async def _run_exists(self, batch: ExistsBatch) -> None:
        found, error = b"", ""
        try:
            async with asyncio.timeout(max(0.0, batch.deadline - time.monotonic())):
                answers = await self._backend.exists(batch.keys)
            hidden = self._parts.refused.hidden_among(batch.keys)
            pairs = zip(batch.keys, answers, strict=True)
            found = bytes(2 if there is None else bool(there) and key not in hidden for key, there in pairs)
        except TimeoutError:
            error = f"existence of {len(batch.keys)} blocks was not known by the deadline"
        except _FAILURES as failure:
            error = f"{type(failure).__name__}: {failure}"
        self._post(ExistsDone(batch.batch_id, found, error))

    async def _run_delete(self, message: Delete, before: Sequence[_Store]) -> None:
        """Delete blocks, and once more what stores that were submitted before have put since."""
        await self._delete(message.keys)
        if before:
            for store in before:
                await store.ended.wait()
            put = {key for store in before for key in store.keys}
            await self._delete([key for key in message.keys if key in put])

    async def _delete(self, keys: Sequence[BlockKey]) -> None:
        try:
            removed = await self._backend.delete(keys)
        except _FAILURES as error:
            logger.warning("Blocks of the %s tier could not be removed: %s", self._backend.name, error)
            return
        self._parts.refused.forget(keys)
        gone = tuple(key for key, is_gone in zip(keys, removed, strict=True) if is_gone)
        if gone:
            self._post(PresenceRemoved(gone, RemovalCause.REMOVED))

    async def _probe_until_ok(self, probe: Probe) -> None:
        pause_s, tries = probe.pause_s, 0
        while True:
            await asyncio.sleep(pause_s)
            tries += 1
            with suppress(*_FAILURES):
                async with asyncio.timeout(probe.timeout_s):
                    if self._opened:
                        await self._backend.probe()
                    else:
                        await self._open_backend()
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
            self._post_stats()

    def _post_stats(self) -> None:
        stats = self._backend.stats()
        # Plain numbers: a backend may well count in ByteSize, which crosses no process boundary.
        used_bytes, capacity_bytes = int(stats.used_bytes), int(stats.capacity_bytes)
        codec = self._parts.mover.codec_counts()
        gauges = {**stats.gauges, "unreadable_blocks": float(len(self._parts.refused))}
        report = StatsReport(stats.blocks, used_bytes, capacity_bytes, stats.counters, gauges, codec)
        # An idle tier is silent, so that its owner, who may not look for hours, has nothing piling up.
        if report != self._last_stats:
            self._last_stats = report
            self._post(report)

    def _post(self, message: FromIO) -> None:
        self._send(self._parts.naming.outward(message))

    def _on_put(self, keys: Sequence[BlockKey]) -> None:
        self._post(PresenceAdded(tuple(keys), recovered=False))

    def _on_removal(self, keys: Sequence[BlockKey], cause: RemovalCause) -> None:
        if keys:
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


def _precedence(ordered: tuple[ToIO, object]) -> int:
    """Loads and lookups before stores, a drain or the end of an epoch after all that was sent before it."""
    message = ordered[0]
    if isinstance(message, SubmitJob):
        return 0 if message.kind is JobKind.LOAD else 1
    return 2 if isinstance(message, Drain | BeginEpoch) else 0


def _log_defect(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("A background task of a tier ended with a defect", exc_info=error)
