"""Bounds of the disk backend that are no options; tests pass smaller ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a session, and of how engines share space."""

    # Time limit for opening. It is below the tier's own limit, so that an optional tier starts without its medium.
    open_s: float = 45.0
    # Time limit for each step of closing, so that a frozen disk cannot block the shutdown of an engine.
    close_s: float = 5.0
    # Pause between two rounds of upkeep.
    upkeep_s: float = 1.0
    # Time without an answer after which a root counts as frozen, if there are others.
    frozen_s: float = 2.0
    # Time for which making a segment may fail, or wait for other engines, before stores evict instead. Allocating a
    # segment takes up to half a second on a busy drive, and engines take turns.
    transient_s: float = 5.0
    # Time between two attempts to make a segment while there is no room for one.
    ask_again_s: float = 1.0
    # Time after a store for which an engine without room asks for some: its breaker may stop stores for up to 30 s.
    asking_s: float = 10.0
    # Time for the engine that holds most to give up a segment. It may be stopped, so then the others do it, too.
    largest_s: float = 5.0
    # Blocks removed from the index in one iteration of the loop, in some milliseconds.
    turn_slots: int = 1 << 11


LIMITS: Final = Limits()
