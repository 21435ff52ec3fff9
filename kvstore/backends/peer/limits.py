"""Bounds of the peer backend that are no options; tests pass smaller ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvstore.backends.peer.summary import ENGINES_MAX


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of peers, of the directory and of the server."""

    # Pause of a peer after a record that failed verification; it doubles each time.
    distrust_s: float = 30.0
    distrust_s_max: float = 600.0
    # Idle connections are closed after this time, before a firewall silently drops them.
    idle_s: float = 30.0
    # Most remembered peers named by requests, and by the directory.
    named_max: int = 64
    found_max: int = ENGINES_MAX
    # Rate at which summaries are read. The load of the directory therefore grows with the number of engines, not with
    # its square; instead, the age of summaries grows with the number of engines.
    read_bytes_per_s: int = 128 << 10
    # Maximum bytes of summaries read at once after a pause and at the start: 32 summaries of full length.
    read_bytes_max: int = 1 << 20
    # Most unauthenticated connections. Each further one replaces the oldest, so silent ones cannot keep members out: a
    # greeting takes milliseconds.
    greetings_max: int = 64
    # Pause after a failed accept, most likely for lack of descriptors.
    accept_pause_s: float = 0.1


LIMITS: Final = Limits()
