"""Rings for threads: whether io_uring is used, and a ring for each thread that uses it."""

from __future__ import annotations

import logging
import threading
from typing import Literal, TypeAlias

from kvstore.diskio.uring import Ring, UringUnavailableError, probe

__all__ = ["EngineChoice", "Rings", "is_usable"]

_log = logging.getLogger("kvstore.diskio")

EngineChoice: TypeAlias = Literal["auto", "io_uring", "threads"]
"""What does the I/O: ``auto`` is io_uring where this kernel and container allow it, else threads."""

_ENTRIES = 128
"""Operations in flight per ring; four times what saturates an NVMe drive with small blocks."""


def is_usable(reason_against: str, name: str) -> bool:
    """Return whether there is nothing against io_uring; what there is goes to the log, with who would have used it."""
    if reason_against:
        _log.warning("io_uring can't be used here (%s); %s uses threads, which cost more CPU", reason_against, name)
    return not reason_against


class Rings:
    """Decides for io_uring or against it, and gives each thread a ring of its own. Thread-safe.

    Args:
        choice: What was asked for. ``io_uring`` that is not to be had is said once in the log.
        name: Who uses it, for the log.

    Attributes:
        used: Whether threads get rings; ends when one is refused.
    """

    def __init__(self, choice: EngineChoice, name: str) -> None:
        self.used = choice != "threads" and is_usable(probe(), name)
        self._local = threading.local()
        self._rings: list[Ring] = []

    def mine(self) -> Ring | None:
        """Return the calling thread's ring, or None if it can't have one (then it makes plain calls)."""
        if not self.used:
            return None
        ring: Ring | None = getattr(self._local, "ring", None)
        if ring is None:
            try:
                ring = Ring(_ENTRIES)
            except UringUnavailableError as error:
                # From now on for all: batches are cut for many threads again.
                self.used = False
                _log.warning("a further ring can't be had (%s); using plain system calls", error)
            else:
                self._local.ring = ring
                self._rings.append(ring)
        return ring

    def close(self) -> None:
        """Give all rings back; only when no thread uses one. Idempotent."""
        for ring in self._rings:
            ring.close()
        self._rings.clear()
