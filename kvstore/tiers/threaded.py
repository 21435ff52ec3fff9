"""A tier for callers with threads of their own, which wait for each call: other frameworks' storage backends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kvstore.errors import ConfigError
from kvstore.namespace import Namespace
from kvstore.runtime.forks import leave_at_fork
from kvstore.runtime.messages import JobKind
from kvstore.tiers.async_tier import AsyncTier
from kvstore.tiers.base import TierStats
from kvstore.tiers.opening import check_tier, open_tier
from kvstore.types import BlockKey, LookupResult, TransferJob

logger = logging.getLogger("kvstore.tiers")

_STEP_S = 0.1
"""Longest pause between two steps of the tier. An answer of the I/O half ends it, so it delays only deadlines."""

Answers = list[bool]
"""One value per key: whether the block is there, was stored, or was loaded."""


def check_threaded_tier(config: Mapping[str, Any]) -> None:
    """Check a :class:`ThreadedTier` that is opened later; see :func:`kvstore.tiers.opening.check_tier`."""
    _refuse_process(config)
    check_tier(config)


@dataclass(slots=True)
class _Lookup:
    keys: Sequence[BlockKey]
    found: list[LookupResult]
    answers: Future[Answers]
    deadline: float  # Monotonic seconds; a block without an answer by then is a miss.


class ThreadedTier:
    """A tier for any number of threads; a thread of its own makes the calls that an engine's scheduler would make.

    No call raises because of the medium: a failure is a miss, or a block that was not stored. A load returns only when
    nothing writes to its slots any more. In a forked process the tier is closed.

    Args:
        config: As for :func:`kvstore.open_tier`; ``"io"`` can't be ``"process"``.
        primary: As for :func:`kvstore.open_tier`.
        slot_bytes: As for :func:`kvstore.open_tier`.
        namespace: As for :func:`kvstore.open_tier`.

    Raises:
        ConfigError: The configuration can't be used.
        BackendError: The medium refuses, and the tier is ``required``.
    """

    def __init__(self, config: Mapping[str, Any], *, primary: Any, slot_bytes: int, namespace: Namespace) -> None:
        _refuse_process(config)
        self.slot_bytes = slot_bytes
        self._tier: AsyncTier = open_tier(
            config, primary=primary, slot_bytes=slot_bytes, namespace=namespace, events=False
        )
        self._lock = threading.Lock()  # Held for each use of the tier, never while waiting.
        self._jobs: dict[int, tuple[Sequence[BlockKey], Future[Answers]]] = {}
        self._lookups: list[_Lookup] = []
        self._last_job = 0
        self._clearing: Future[bool] | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"kvstore-{self._tier.name}", daemon=True)
        self._thread.start()
        leave_at_fork(self)

    def lookup(self, keys: Sequence[BlockKey]) -> Answers:
        """Return which blocks are there, after at most the tier's ``lookup_timeout``."""
        deadline = time.monotonic() + self._tier.lookup_timeout_s

        def start(answers: Future[Answers]) -> None:
            lookup = _Lookup(keys, [LookupResult.RETRY] * len(keys), answers, deadline)
            if not self._look_up(lookup):
                self._lookups.append(lookup)

        return self._wait(len(keys), start)

    def store(self, keys: Sequence[BlockKey], slots: Sequence[int]) -> Answers:
        """Store blocks from slots; return which ones the medium now holds. Keys must differ."""
        return self._wait(len(keys), lambda answers: self._submit(JobKind.STORE, keys, slots, answers))

    def load(self, keys: Sequence[BlockKey], slots: Sequence[int]) -> Answers:
        """Load blocks into slots; return which slots now hold their verified block. The others may be overwritten."""
        return self._wait(len(keys), lambda answers: self._submit(JobKind.LOAD, keys, slots, answers))

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Remove blocks; absent ones are ignored."""
        with self._lock:
            if not self._closing:
                self._tier.remove(keys)
                self._tier.flush()

    def clear(self, timeout_s: float) -> bool:
        """Remove all blocks of the namespace; return whether that ended in time. Until it ends, the tier is empty."""
        with self._lock:
            if self._closing:
                return False
            if self._clearing is None:
                self._clearing = Future()
            cleared = self._clearing
        try:
            return cleared.result(timeout_s)
        except TimeoutError:
            return False

    def stats(self) -> TierStats:
        """Return statistics of the tier."""
        with self._lock:
            return self._tier.stats()

    def close(self) -> None:
        """Close the tier; unfinished calls return misses. Idempotent.

        End the other threads' loads first: if the medium does not answer within five seconds, which is logged, it may
        still write to their slots.
        """
        with self._lock:
            self._closing = True
        self._thread.join()
        with self._lock:
            self._tier.close()
            self._report()
            self._fail_all()

    def leave_to_parent(self) -> None:
        """Close this copy in a forked process, which lacks the thread; the parent's tier goes on."""
        # Another thread may have held the lock during the fork.
        self._lock, self._closing = threading.Lock(), True
        self._jobs, self._lookups, self._clearing = {}, [], None

    def _wait(self, count: int, start: Callable[[Future[Answers]], None]) -> Answers:
        answers: Future[Answers] = Future()
        with self._lock:
            if self._closing or self._clearing is not None:
                return [False] * count
            start(answers)
            self._tier.flush()
        return answers.result()

    def _look_up(self, lookup: _Lookup) -> bool:
        """Look up the blocks without an answer; return whether the caller now has its result."""
        # Answers are kept, because the tier may have dropped the first one before the last one arrives.
        for i, result in enumerate(lookup.found):
            if result is LookupResult.RETRY:
                lookup.found[i] = self._tier.lookup(lookup.keys[i])
        if LookupResult.RETRY in lookup.found and time.monotonic() < lookup.deadline:
            return False
        lookup.answers.set_result([result is LookupResult.HIT for result in lookup.found])
        return True

    def _submit(self, kind: JobKind, keys: Sequence[BlockKey], slots: Sequence[int], answers: Future[Answers]) -> None:
        self._last_job += 1
        self._jobs[self._last_job] = (keys, answers)
        job = TransferJob(self._last_job, keys, slots)
        (self._tier.submit_store if kind is JobKind.STORE else self._tier.submit_load)(job)
        if self._tier.has_unreported:
            self._report()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._tier.wait(_STEP_S)
                with self._lock:
                    self._step()
        # An unknown defect must not leave the framework's threads waiting.
        except Exception:
            logger.exception("Tier %s ended: an unexpected error. All later lookups are misses.", self._tier.name)
            with self._lock:
                self._closing = True
                try:
                    self._tier.close()
                finally:
                    self._fail_all()

    def _step(self) -> None:
        self._report()
        # Replaced only at the end, so that after an exception every waiting call is still in the list.
        self._lookups = [lookup for lookup in self._lookups if not self._look_up(lookup)]
        if self._clearing is not None and not self._jobs and self._tier.forget(b""):
            cleared, self._clearing = self._clearing, None
            cleared.set_result(True)
        self._tier.flush()

    def _report(self) -> None:
        for result in self._tier.get_finished():
            keys, answers = self._jobs.pop(result.job_id)
            good = set(result.successful_keys)
            answers.set_result([key in good for key in keys])

    def _fail_all(self) -> None:
        waiting = [*self._jobs.values(), *((lookup.keys, lookup.answers) for lookup in self._lookups)]
        for keys, answers in waiting:
            if not answers.done():
                answers.set_result([False] * len(keys))
        self._jobs.clear()
        self._lookups.clear()
        if self._clearing is not None:
            self._clearing.set_result(False)
            self._clearing = None


def _refuse_process(config: Mapping[str, Any]) -> None:
    if config.get("io") == "process":
        raise ConfigError(
            '"io" is "process". Expected "thread": the memory belongs to another framework, and an I/O process '
            "can't map it. Leave the option out."
        )
