"""Numbers and switches of the manager."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvstore.errors import ConfigError
from kvstore.tiering.recording import SOCKET_PATH_BYTES_MAX

__all__ = ["Backfill", "TieringConfig"]


class Backfill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a block that was found in a slower tier is copied to the faster ones.

    Attributes:
        min_uses: From its n-th use on. The second shows that it is used again, and once more after the faster tiers
            have dropped it; a copy at the first would write all that is read once.

    Raises:
        ConfigError: The number is out of range.
    """

    min_uses: int = 2

    def __post_init__(self) -> None:
        """Check the number."""
        if self.min_uses < 1:
            raise ConfigError(f"backfill, min_uses is {self.min_uses!r}. Expected a whole number, 1 or more.")


@dataclass(frozen=True, slots=True)
class TieringConfig:
    """How the manager behaves; shares are of the slots of the primary tier, times in seconds.

    Attributes:
        policy: Defaults of the offload policy, in the form of a request's parameters.
        allow: Parameters of the offload policy that requests may give; others are ignored. None: all.
        tokens_per_block: Tokens of a block, for policies that count tokens, where the engine does not tell where each
            block ends.
        promotion_share: Most slots that promotions may have: being filled, or filled and not yet loaded by the request
            that waits for them. Half of the tier, so that waiting requests can't push out what running ones need.
        store_share: Most slots that unfinished stores of one tier may pin. A quarter, so that a slow tier can't stop
            the stores to the others; what does not fit waits unpinned, and is stored if it is still there then.
        pin_share: Most slots that blocks of requests with ``pin`` may hold; 0 for none.
        pin_lease_s: Time after its last use at which such a block may be evicted again. An hour: a prompt that nobody
            has sent for so long is not worth its slots, and a forgotten pin does not last.
        backfill: When a block that only a slower tier holds is copied to the faster ones; false: never.
        lazy_share: Slots that are kept free or ready to be evicted while there are blocks with ``lazy``, so that a
            burst of stores need not wait for a tier.
        prefetch: Whether a request's blocks are promoted as soon as its keys are known, before its first lookup.
        wait_s_max: Longest time that a request is asked to wait for a tier's answer or for room for its promotions.
        load_s_max: Time after which a load that no tier has reported is given up. Tiers have deadlines of their own;
            this is for one that fails to keep them.
        sightings_max: Blocks whose sightings are remembered, for ``min_uses``.
        events: Whether events are kept for ``take_events``.
        trace_socket: Path of the Unix socket of ``kvstore-bench record``; each request is sent there while a recorder
            runs. Empty: never.

    Raises:
        ConfigError: A number is out of range.
    """

    policy: Mapping[str, Any] = field(default_factory=dict)
    allow: Sequence[str] | None = None
    tokens_per_block: int = 1
    promotion_share: float = 0.5
    store_share: float = 0.25
    pin_share: float = 0.25
    pin_lease_s: float = 3600.0
    backfill: Backfill | bool = True
    lazy_share: float = 0.125
    prefetch: bool = True
    wait_s_max: float = 2.0
    load_s_max: float = 60.0
    sightings_max: int = 1 << 17
    events: bool = False
    trace_socket: str = ""

    @property
    def backfill_uses(self) -> int | None:
        """Uses from which a block is copied to faster tiers; None: never."""
        if isinstance(self.backfill, bool):
            return Backfill().min_uses if self.backfill else None
        return self.backfill.min_uses

    def __post_init__(self) -> None:
        if len(os.fsencode(self.trace_socket)) > SOCKET_PATH_BYTES_MAX or "\0" in self.trace_socket:
            raise ConfigError(
                f"trace_socket is {self.trace_socket!r}. Expected a path of at most {SOCKET_PATH_BYTES_MAX} bytes."
            )
        if not 0.0 <= self.pin_share <= 1.0:
            raise ConfigError(f"pin_share is {self.pin_share!r}. Expected a share from 0 to 1.")
        for name in ("promotion_share", "store_share", "lazy_share"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}. Expected a share above 0 and at most 1.")
        for name in ("tokens_per_block", "sightings_max"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}. Expected a whole number, 1 or more.")
        for name in ("wait_s_max", "load_s_max", "pin_lease_s"):
            if not getattr(self, name) >= 0.0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}. Expected seconds, 0 or more.")
