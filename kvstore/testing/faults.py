"""Fault injection around any backend: faults of media, at a place that the test chooses.

A plan is a list of faults and a seed; the same plan injects the same faults into the same calls. It counts injected
faults, so that a test can detect that a fault never happened.
"""

from __future__ import annotations

import asyncio
import enum
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore.types import Outcome

__all__ = ["Fault", "FaultKind", "FaultPlan"]


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
    """``get``: only a part of the record is read. ``put``: only a part is published."""
    FLIP_HEADER = "flip_header"
    """One bit of the header is flipped: in the read bytes (``get``), or in the record on the medium (``put``)."""
    FLIP_PAYLOAD = "flip_payload"
    """The same for the payload."""
    MISDIRECT = "misdirect"
    """``get``: another key's record is read. ``put``: another record of the batch is published under the key."""
    DROP = "drop"
    """``put``: returns OK and stores nothing. ``delete``: returns True and removes nothing."""


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
                self._faults.append(
                    Fault(fault.op, fault.kind, at, fault.times, fault.probability, fault.seconds, fault.outcome)
                )

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
        """Note that a fault was injected."""
        with self._lock:
            self.injected[kind] += 1

    async def stall(self) -> None:
        """Wait until :meth:`release`."""
        loop, released = asyncio.get_running_loop(), asyncio.Event()

        def let_go() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(released.set)

        with self.stalling(let_go):
            await released.wait()

    @contextmanager
    def stalling(self, let_go: Callable[[], None]) -> Iterator[None]:
        """Count as a stalled call inside the ``with``.

        Args:
            let_go: Called once by :meth:`release`, on its thread.
        """
        me = object()
        with self._lock:
            self._stalled[me] = let_go
        try:
            yield
        finally:
            with self._lock:
                self._stalled.pop(me, None)

    def __repr__(self) -> str:
        injected = {kind.value: count for kind, count in self.injected.items()}
        return f"FaultPlan({len(self._faults)} faults, seed={self.seed}, injected={injected})"
