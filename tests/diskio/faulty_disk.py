"""A disk that fails on request: the Nth call, once or for ever."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from kvstore.diskio import OsDisk

_T = TypeVar("_T")

_OPENING = frozenset({"open"})
_TRANSFERS = frozenset({"preadv", "pwritev"})
_STALL_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class DiskCall:
    """One call that was made."""

    number: int  # Its number among all calls, from 1.
    op: str  # Its kind, such as ``"pwritev"``.
    name: str  # The name it refers to, if its first argument is one.


@dataclass(slots=True, eq=False)
class DiskFault:
    """An injected failure and its trigger."""

    op: str = "any"  # Kind of call, or ``"any"``.
    nth: int = 1  # Which of these calls, from 1, counted from when the fault was added.
    error: int | None = None  # Error number to fail with.
    short: bool = False  # Transfer half of what was asked for instead (at least a byte); other calls are left alone.
    stall: threading.Event | None = None  # Wait for this event before the call is made.
    after: bool = False  # Make the call, then report a failure.
    forever: bool = False  # Also fail every later call.
    hits: int = 0  # Number of times that it has struck.
    _seen: int = 0

    def strikes(self, op: str) -> bool:
        """Count a call; return whether the fault applies to it."""
        if self.op not in ("any", op) or (self.short and op not in _TRANSFERS):
            return False
        self._seen += 1
        if self._seen == self.nth or (self.forever and self._seen > self.nth):
            self.hits += 1
            return True
        return False


class FaultyDisk(OsDisk):
    """The real disk with faults; records every call. Thread-safe."""

    def __init__(self) -> None:
        self.calls: list[DiskCall] = []  # All calls, in the order in which they began.
        self.open_fds: dict[int, str] = {}  # Descriptors opened and not closed, by the name that was opened.
        self.stalled = 0  # Calls that wait for the event of a fault.
        self._faults: list[DiskFault] = []
        self._lock = threading.Lock()

    def add(self, fault: DiskFault) -> DiskFault:
        """Activate a fault."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def fail(self, op: str, error: int, *, nth: int = 1, forever: bool = False, after: bool = False) -> DiskFault:
        """Let calls of a kind fail with an error number."""
        return self.add(DiskFault(op, nth, error, forever=forever, after=after))

    def heal(self) -> None:
        """Remove all faults."""
        with self._lock:
            self._faults.clear()

    def count(self, op: str | Literal["any"] = "any") -> int:
        """Return how many calls of a kind were made."""
        with self._lock:
            return sum(op in ("any", call.op) for call in self.calls)

    def syscall(self, op: str, function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T:
        """Record a call, and make it unless a fault strikes."""
        fault = self._record(op, args)
        if fault is not None:
            if fault.stall is not None:
                self._wait(fault.stall)
            if fault.short:
                args = (args[0], _halved(args[1]), *args[2:])
            if fault.error is not None and not fault.after and op != "close":
                raise OSError(fault.error, os.strerror(fault.error), *args[:1])
        # A closed descriptor's number may be given to another thread at once.
        if op == "close":
            self._untrack(args[0])
        result = function(*args, **kwargs)
        self._track(op, args, result)
        # A descriptor is closed even when closing it fails.
        if fault is not None and fault.error is not None:
            if op in _OPENING:
                os.close(self._untrack(result))
            raise OSError(fault.error, os.strerror(fault.error))
        return result

    async def awaited_syscalls(
        self, op: str, subjects: Sequence[Any], function: Callable[[Sequence[int]], Awaitable[list[int]]]
    ) -> list[int]:
        """Record a batch of calls, and make those without a fault; a short one reports less than it did.

        A stalled call does not end by being cancelled.
        """
        faults = [self._record(op, (subject,)) for subject in subjects]
        for fault in faults:
            if fault is not None and fault.stall is not None:
                await self._wait_on_loop(fault.stall)
        made = _to_be_made(op, faults)
        for i in made if op == "close" else ():
            self._untrack(subjects[i])
        return self._all_reported(op, subjects, faults, made, await function(made))

    def _all_reported(
        self,
        op: str,
        subjects: Sequence[Any],
        faults: Sequence[DiskFault | None],
        made: Sequence[int],
        results: Sequence[int],
    ) -> list[int]:
        """Return the results reported for a batch, given the results of the calls that were made."""
        reported = [-(fault.error or 0) if fault is not None else 0 for fault in faults]
        for i, result in zip(made, results, strict=True):
            reported[i] = self._reported(op, subjects[i], result, faults[i])
        return reported

    def _reported(self, op: str, subject: Any, result: int, fault: DiskFault | None) -> int:
        """Return the result reported for a call in a batch."""
        if result < 0:
            return result
        self._track(op, (subject,), result)
        if fault is None:
            return result
        if fault.error is not None:
            if op in _OPENING:
                os.close(self._untrack(result))
            return -fault.error
        return max(1, result // 2) if fault.short else result

    def _record(self, op: str, args: tuple[Any, ...]) -> DiskFault | None:
        name = args[0] if args and isinstance(args[0], str) else ""
        with self._lock:
            self.calls.append(DiskCall(len(self.calls) + 1, op, name))
            # All of them count, including those behind a fault that strikes.
            struck = [fault for fault in self._faults if fault.strikes(op)]
            return struck[0] if struck else None

    def _wait(self, event: threading.Event) -> None:
        with self._lock:
            self.stalled += 1
        event.wait()
        with self._lock:
            self.stalled -= 1

    async def _wait_on_loop(self, event: threading.Event) -> None:
        cancelled: asyncio.CancelledError | None = None
        with self._lock:
            self.stalled += 1
        while not event.is_set():
            try:
                await asyncio.sleep(_STALL_POLL_S)
            except asyncio.CancelledError as error:
                cancelled = error
        with self._lock:
            self.stalled -= 1
        if cancelled is not None:
            raise cancelled

    def _track(self, op: str, args: tuple[Any, ...], result: Any) -> None:
        if op in _OPENING:
            with self._lock:
                self.open_fds[result] = str(args[0])

    def _untrack(self, result: Any) -> int:
        with self._lock:
            self.open_fds.pop(result, None)
        return int(result)


def _to_be_made(op: str, faults: Sequence[DiskFault | None]) -> list[int]:
    """Return the indexes of the calls that are made, whatever result is reported."""
    return [i for i, fault in enumerate(faults) if not (fault and fault.error and not fault.after and op != "close")]


def _halved(buffers: Any) -> list[memoryview]:
    """Return the first half of the bytes of some buffers."""
    views = [memoryview(buffer) for buffer in buffers]
    left = max(1, sum(view.nbytes for view in views) // 2)
    kept = []
    for view in views:
        if left:
            kept.append(view[:left])
            left -= kept[-1].nbytes
    return kept
