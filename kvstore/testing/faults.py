"""Fault injection around any backend: media faults, at points that the test chooses.

A plan is a list of faults and a seed; the same plan injects the same faults into the same calls of a wrapped backend.
It counts injected faults, so that a test can detect that a fault never happened.
"""

from __future__ import annotations

import asyncio
import enum
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

from kvstore.backends.base import (
    ArrivalListener,
    Backend,
    BackendStats,
    RecordGeometry,
    RecordRead,
    RecordWrite,
    RemovalListener,
)
from kvstore.config import TierConfig
from kvstore.errors import BackendUnavailableError, NoSpaceError
from kvstore.namespace import Namespace
from kvstore.types import BlockInfo, BlockKey, Outcome

_SCRIBBLE = 0xA5
"""Fill byte for the missing rest of a short read."""

_SEEN_MAX = 1024
"""Keys remembered as targets of misdirected reads."""


class FaultKind(enum.StrEnum):
    """Kinds of faults."""

    DELAY = "delay"
    """The call takes ``seconds`` longer."""
    STALL = "stall"
    """The call hangs until it is cancelled or :meth:`FaultPlan.release` is called."""
    ERROR = "error"
    """The block (of ``put``, ``get``) or the call (of the others) fails, with ``outcome``."""
    RAISE = "raise"
    """The whole call raises a ``BackendUnavailableError``."""
    NO_SPACE = "no_space"
    """``put``: the medium is full."""
    SHORT = "short"
    """``get``: only part of the record is read. ``put``: only part of it is published."""
    FLIP_HEADER = "flip_header"
    """One bit of the header is flipped: in the read bytes (``get``), or in the record on the medium (``put``)."""
    FLIP_PAYLOAD = "flip_payload"
    """The same for the payload."""
    MISDIRECT = "misdirect"
    """``get``: another key's record is read. ``put``: another record of the batch is published under the key."""
    DROP = "drop"
    """``put``: returns OK and stores nothing. ``delete``: returns True and removes nothing. ``exists``: the first key's
    answer is None."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault and its occasions.

    Attributes:
        op: ``"put"``, ``"get"``, ``"exists"``, ``"delete"``, ``"scan"``, ``"open"`` or ``"probe"``.
        kind: The kind.
        at: First occasion, counted from 1 over the life of the plan: blocks for ``put`` and ``get``, calls for the
            others.
        times: Number of occasions from then on; None: no limit.
        probability: Probability on each of these occasions.
        seconds: For DELAY.
        outcome: For ERROR.
    """

    op: str
    kind: FaultKind
    at: int = 1
    times: int | None = 1
    probability: float = 1.0
    seconds: float = 0.0
    outcome: Outcome = Outcome.IO_ERROR


class FaultPlan:
    """Faults to inject, with counts of injected ones. May be changed from any thread while it is in use.

    Args:
        faults: The faults; of several faults due at the same time, the first is injected.
        seed: Determines probabilities, bits and lengths.

    Attributes:
        seed: As given.
        injected: Faults injected so far, by kind.
    """

    def __init__(self, faults: Iterable[Fault] = (), *, seed: int = 0) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.injected: Counter[FaultKind] = Counter()
        self._faults = list(faults)
        self._occasions: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._stalled: dict[object, Callable[[], None]] = {}

    def add(self, *faults: Fault, from_now: bool = True) -> None:
        """Add faults; with ``from_now``, their ``at`` counts from the next occasion."""
        with self._lock:
            for fault in faults:
                at = fault.at + (self._occasions[fault.op] if from_now else 0)
                self._faults.append(replace(fault, at=at))

    def clear(self) -> None:
        """Remove all faults, and release stalled calls."""
        with self._lock:
            self._faults.clear()
        self.release()

    def release(self) -> None:
        """Let stalled calls continue."""
        with self._lock:
            stalled, self._stalled = self._stalled, {}
        for let_go in stalled.values():
            let_go()

    @property
    def stalled(self) -> int:
        """Number of stalled calls."""
        with self._lock:
            return len(self._stalled)

    def take(self, op: str) -> Fault | None:
        """Count an occasion; return the fault that is due on it."""
        with self._lock:
            self._occasions[op] += 1
            now = self._occasions[op]
            for fault in self._faults:
                due = fault.op == op and now >= fault.at and (fault.times is None or now < fault.at + fault.times)
                if due and (fault.probability >= 1.0 or self.rng.random() < fault.probability):
                    return fault
        return None

    def count(self, kind: FaultKind) -> None:
        """Count an injected fault."""
        with self._lock:
            self.injected[kind] += 1

    async def stall(self, fault: Fault) -> None:
        """Wait until :meth:`release`, unless :meth:`clear` has removed the fault since it was taken."""
        loop, released = asyncio.get_running_loop(), asyncio.Event()

        def let_go() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(released.set)

        with self.stalling(fault, let_go) as is_planned:
            if is_planned:
                await released.wait()

    @contextmanager
    def stalling(self, fault: Fault | None, let_go: Callable[[], None]) -> Iterator[bool]:
        """Count as a stalled call inside the ``with``, whose value is whether the fault is still planned.

        Args:
            fault: The fault taken.
            let_go: Called once by :meth:`release`, on its thread.
        """
        token = object()
        with self._lock:
            self._stalled[token] = let_go
            is_planned = fault in self._faults
        try:
            yield is_planned
        finally:
            with self._lock:
                self._stalled.pop(token, None)

    def __repr__(self) -> str:
        injected = {kind.value: count for kind, count in self.injected.items()}
        return f"FaultPlan({len(self._faults)} faults, seed={self.seed}, injected={injected})"


class FaultyBackend(Backend):
    """Wraps any backend; without faults it behaves like that backend.

    It keeps the contract of :class:`~kvstore.backends.base.Backend`: media may have the injected faults, and a stalled
    call releases its buffers when it is cancelled.
    """

    name: ClassVar[str] = "faulty"
    config_type: ClassVar[type[TierConfig]] = TierConfig

    def __init__(self, inner: Backend, plan: FaultPlan) -> None:
        super().__init__(inner.config)
        self.inner = inner
        self.plan = plan
        self.medium = inner.medium
        self.locality = inner.locality
        self.authoritative = inner.authoritative
        self.evicts_silently = inner.evicts_silently
        self.scans = inner.scans
        # Class attributes in other backends; copied from the wrapped backend.
        for attribute in ("name", "config_type", "alignment"):
            setattr(self, attribute, getattr(inner, attribute))
        self._header_bytes = 0
        self._seen: dict[BlockKey, None] = {}

    def set_removal_listener(self, listener: RemovalListener) -> None:
        self.inner.set_removal_listener(listener)

    def set_arrival_listener(self, listener: ArrivalListener) -> None:
        self.inner.set_arrival_listener(listener)

    def own(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        return self.inner.own(keys)

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        await self._inject_in_call("open")
        self._header_bytes = geometry.header_bytes
        await self.inner.open(namespace, geometry)

    async def close(self) -> None:
        self.plan.release()
        await self.inner.close()

    async def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool | None]:
        """A DROP fault replaces the answer for the first key with None."""
        fault = await self._inject_in_call("exists")
        answers = list(await self.inner.exists(keys))
        if answers and fault is not None and fault.kind is FaultKind.DROP:
            self.plan.count(fault.kind)
            answers[0] = None
        return answers

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        faults = [self.plan.take("put") for _ in writes]
        await self._inject_in_batch(faults)
        outcomes: dict[int, Outcome] = {}
        passed: dict[int, RecordWrite] = {}
        for index, (write, fault) in enumerate(zip(writes, faults, strict=True)):
            outcome = self._injected_outcome(fault)
            if outcome is not None:
                outcomes[index] = outcome
            elif fault is not None and fault.kind is FaultKind.DROP:
                self.plan.count(fault.kind)
                outcomes[index] = Outcome.OK
            else:
                passed[index] = self._damaged_write(write, fault, writes)
        for index, outcome in zip(passed, await self.inner.put(list(passed.values())), strict=True):
            outcomes[index] = outcome
            if outcome.ok:
                self._remember(writes[index].key)
        return [outcomes[index] for index in range(len(writes))]

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        faults = [self.plan.take("get") for _ in reads]
        await self._inject_in_batch(faults)
        outcomes: dict[int, Outcome] = {}
        passed: dict[int, RecordRead] = {}
        for index, (read, fault) in enumerate(zip(reads, faults, strict=True)):
            outcome = self._injected_outcome(fault)
            if outcome is not None:
                outcomes[index] = outcome
            else:
                passed[index] = self._misdirected_read(read, fault)
        for index, outcome in zip(passed, await self.inner.get_into(list(passed.values())), strict=True):
            outcomes[index] = outcome
            if outcome is Outcome.OK:
                reads[index].filled_bytes = passed[index].filled_bytes
                self._damage_read(reads[index], faults[index])
        return [outcomes[index] for index in range(len(reads))]

    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        fault = await self._inject_in_call("delete")
        if fault is not None and fault.kind is FaultKind.DROP:
            self.plan.count(fault.kind)
            return [True] * len(keys)
        return await self.inner.delete(keys)

    async def scan(self) -> AsyncIterator[BlockInfo]:
        await self._inject_in_call("scan")
        async for info in self.inner.scan():
            self._remember(info.key)
            yield info

    async def quarantine(self, keys: Sequence[BlockKey]) -> None:
        await self.inner.quarantine(keys)

    async def probe(self) -> None:
        await self._inject_in_call("probe")
        await self.inner.probe()

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self.inner.touch(keys)

    def stats(self) -> BackendStats:
        """Return the wrapped backend's statistics, with injected faults among the counters."""
        stats = self.inner.stats()
        injected = {f"injected_{kind.value}": count for kind, count in self.plan.injected.items()}
        return replace(stats, counters={**stats.counters, **injected})

    async def _inject_in_call(self, op: str) -> Fault | None:
        """Inject faults of a whole call; return the due fault."""
        fault = self.plan.take(op)
        if fault is not None:
            await self._inject_in_batch([fault])
            if fault.kind in (FaultKind.ERROR, FaultKind.NO_SPACE):
                self.plan.count(fault.kind)
                raise self._error(fault)
        return fault

    async def _inject_in_batch(self, faults: Sequence[Fault | None]) -> None:
        """Inject the faults that affect a whole batch, each kind at most once."""
        due = {fault.kind: fault for fault in faults if fault is not None}
        if delay := due.get(FaultKind.DELAY):
            self.plan.count(delay.kind)
            await asyncio.sleep(delay.seconds)
        if stall := due.get(FaultKind.STALL):
            self.plan.count(stall.kind)
            await self.plan.stall(stall)
        if error := due.get(FaultKind.RAISE):
            self.plan.count(error.kind)
            raise self._error(error)

    def _error(self, fault: Fault) -> Exception:
        self.last_error = f"injected {fault.kind.value}"
        if fault.kind is FaultKind.NO_SPACE:
            return NoSpaceError(self.last_error, backend=self.name)
        return BackendUnavailableError(self.last_error, backend=self.name)

    def _injected_outcome(self, fault: Fault | None) -> Outcome | None:
        if fault is None or fault.kind not in (FaultKind.ERROR, FaultKind.NO_SPACE):
            return None
        self.plan.count(fault.kind)
        self.last_error = f"injected {fault.kind.value}"
        return fault.outcome if fault.kind is FaultKind.ERROR else Outcome.NO_SPACE

    def _damaged_write(self, write: RecordWrite, fault: Fault | None, batch: Sequence[RecordWrite]) -> RecordWrite:
        if fault is None:
            return write
        if fault.kind is FaultKind.MISDIRECT:
            others = [other for other in batch if other.key != write.key]
            if not others:
                return write
            self.plan.count(fault.kind)
            return RecordWrite(write.key, self.plan.rng.choice(others).buffers)
        if fault.kind not in (FaultKind.FLIP_HEADER, FaultKind.FLIP_PAYLOAD, FaultKind.SHORT):
            return write
        # A put must not change the caller's buffers, so a copy is damaged.
        record = memoryview(bytearray().join(write.buffers))
        self.plan.count(fault.kind)
        if fault.kind is FaultKind.SHORT:
            return RecordWrite(write.key, [record[: self.plan.rng.randrange(1, record.nbytes)]])
        in_header = fault.kind is FaultKind.FLIP_HEADER
        start, end = (0, self._header_bytes) if in_header else (self._header_bytes, record.nbytes)
        self._flip([record], self.plan.rng.randrange(start, end))
        return RecordWrite(write.key, [record[: self._header_bytes], record[self._header_bytes :]])

    def _misdirected_read(self, read: RecordRead, fault: Fault | None) -> RecordRead:
        if fault is None or fault.kind is not FaultKind.MISDIRECT:
            return read
        others = [key for key in self._seen if key != read.key]
        if not others:
            return read
        self.plan.count(fault.kind)
        return RecordRead(self.plan.rng.choice(others), read.buffers)

    def _damage_read(self, read: RecordRead, fault: Fault | None) -> None:
        if fault is None:
            return
        if fault.kind is FaultKind.SHORT:
            self.plan.count(fault.kind)
            read.filled_bytes = self.plan.rng.randrange(read.filled_bytes)
            self._scribble_from(read.buffers, read.filled_bytes)
            return
        spans = {
            FaultKind.FLIP_HEADER: range(self._header_bytes),
            FaultKind.FLIP_PAYLOAD: range(self._header_bytes, read.filled_bytes),
        }
        if span := spans.get(fault.kind):
            self.plan.count(fault.kind)
            self._flip(read.buffers, self.plan.rng.choice(span))

    def _flip(self, buffers: Sequence[memoryview], position: int) -> None:
        """Flip one bit of the byte at a position in the concatenated buffers."""
        for buffer in buffers:
            if position < buffer.nbytes:
                buffer[position] ^= 1 << self.plan.rng.randrange(8)
                return
            position -= buffer.nbytes

    def _remember(self, key: BlockKey) -> None:
        self._seen[key] = None
        if len(self._seen) > _SEEN_MAX:
            del self._seen[next(iter(self._seen))]

    def _scribble_from(self, buffers: Sequence[memoryview], start: int) -> None:
        at = 0
        for buffer in buffers:
            begin = min(max(start - at, 0), buffer.nbytes)
            buffer[begin:] = bytes([_SCRIBBLE]) * (buffer.nbytes - begin)
            at += buffer.nbytes
