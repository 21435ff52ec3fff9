"""Bounds of the Redis backend that are no options; tests pass smaller ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of connections, requests and nodes."""

    # Pause between connection attempts: short enough to notice a restarted server soon, long enough to cost little.
    pause_s_min: float = 0.05
    pause_s_max: float = 3.0
    # Maximum commands with a value in flight per connection: keeps responses in flight while one is processed. Deeper
    # pipelines only make a cancellation more expensive.
    pipeline_depth: int = 4
    # Maximum bytes of values in flight per connection: two parts of a large block. A longer value is sent alone.
    in_flight_bytes: int = 8 << 20
    # Maximum waiting requests of a node; the tier's limit of bytes in flight is reached long before.
    queue_max: int = 65536
    # Pause before a retry during the migration of a slot; a step of the migration takes milliseconds.
    later_pause_s: float = 0.02
    # Maximum nodes of a cluster; Redis recommends at most about a thousand.
    nodes_max: int = 1024


LIMITS: Final = Limits()
