"""Options of the manager."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

import msgspec

from kvstore.config import did_you_mean, explained
from kvstore.errors import ConfigError
from kvstore.secret import shown
from kvstore.tenants import Tenants
from kvstore.tiering.policy import OWN_PARAMETERS, PolicyParser
from kvstore.tiering.recording import SOCKET_PATH_BYTES_MAX

_NO_OPTIONS: Final = frozenset({"events", "access_events", "wait_s_max", "load_s_max", "retain_s_max"})
"""Fields that the engine's connector sets, or that only programs with the manager as a library change."""


class Backfill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Copies of promoted blocks to faster tiers.

    Attributes:
        min_uses: Number of uses after which a block of a slower tier is copied to the faster ones. Two by default:
            copying at the first use would also write blocks that are read only once.

    Raises:
        ConfigError: The number is out of range.
    """

    min_uses: int = 2

    def __post_init__(self) -> None:
        if self.min_uses < 1:
            raise ConfigError(f"backfill, min_uses is {self.min_uses!r}. Expected a whole number, 1 or more.")


@dataclass(frozen=True, slots=True)
class TieringConfig:
    """Options of the manager. Shares are fractions of the primary tier's slots, times are seconds.

    Attributes:
        policy: Defaults of the offload policy, in the form of a request's parameters.
        allow: Parameters that requests may set (:data:`kvstore.tiering.policy.PARAMETERS`); others are ignored. By
            default those that concern only the request itself.
        tokens_per_block: Tokens per block, for policies that count tokens, if the engine does not give the ends of
            blocks.
        promotion_share: Maximum slots for promotions: being filled, or filled and not yet loaded by the waiting
            request. Half of the tier by default, so that waiting requests cannot displace the blocks of running ones.
        store_share: Maximum slots that unfinished stores of one tier may pin. A quarter by default, so that a slow tier
            cannot block stores to the others. Excess blocks wait unpinned, and are stored later if still present.
        retain_share: Maximum slots of blocks that ``retain`` and hand-overs keep longer than others; 0 for none. A
            quarter by default, so that most of the tier remains for other requests.
        retain_s_max: Time after its last use at which such a block may be evicted again. Ten minutes by default: the
            slots of a prompt unused for that long are worth more to other requests.
        backfill: Copies of blocks from a slower tier to the faster ones that lack them; false: never.
        gate: Whether blocks are loaded only if loading is estimated to be no slower than computing them. Has no effect
            until the engine reports its steps (:meth:`TieringManager.note_step`).
        hedge: Whether a load that takes unusually long is also started from a second tier. Needs the gate's
            measurements.
        wait_s_max: Longest wait of a request for a tier's answer, or for room for its promotions.
        load_s_max: Age at which an unreported load is abandoned. Tiers have their own deadlines; this covers a tier
            that misses them.
        tenants: Tenants that share the tiers, with their quotas and rates; None: no distinction.
        events: Whether events are kept for ``take_events``.
        access_events: Whether reads of blocks are events, too; tiers have their own option (:func:`open_tier`).
        trace_socket: Path of the Unix socket of ``kvstore-bench record``. Requests are sent there while a recorder
            runs. Empty: never.

    Raises:
        ConfigError: A number is out of range.
    """

    policy: Mapping[str, Any] = field(default_factory=dict)
    allow: Sequence[str] = OWN_PARAMETERS
    tokens_per_block: int = 1
    promotion_share: float = 0.5
    store_share: float = 0.25
    retain_share: float = 0.25
    retain_s_max: float = 600.0
    backfill: Backfill | bool = True
    gate: bool = True
    hedge: bool = True
    wait_s_max: float = 2.0
    load_s_max: float = 60.0
    tenants: Tenants | None = None
    events: bool = False
    access_events: bool = False
    trace_socket: str = ""

    @property
    def backfill_uses(self) -> int | None:
        """Number of uses after which a block is copied to faster tiers; None: never."""
        if isinstance(self.backfill, bool):
            return Backfill().min_uses if self.backfill else None
        return self.backfill.min_uses

    def __post_init__(self) -> None:
        if len(os.fsencode(self.trace_socket)) > SOCKET_PATH_BYTES_MAX or "\0" in self.trace_socket:
            raise ConfigError(
                f"trace_socket is {self.trace_socket!r}. Expected a path of at most {SOCKET_PATH_BYTES_MAX} bytes."
            )
        if not 0.0 <= self.retain_share <= 1.0:
            raise ConfigError(f"retain_share is {self.retain_share!r}. Expected a share from 0 to 1.")
        for name in ("promotion_share", "store_share"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}. Expected a share above 0 and at most 1.")
        if self.tokens_per_block < 1:
            raise ConfigError(f"tokens_per_block is {self.tokens_per_block!r}. Expected a whole number, 1 or more.")
        for name in ("wait_s_max", "load_s_max", "retain_s_max"):
            if not getattr(self, name) >= 0.0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}. Expected seconds, 0 or more.")


def engine_tiering(options: object, tier_names: Sequence[str]) -> TieringConfig:
    """Return the options in an engine's ``tiering`` setting, checked against the names of the tiers."""
    if not isinstance(options, Mapping):
        raise ConfigError(f"tiering is {shown(options)}. Expected a JSON object.")
    known = {option.name for option in fields(TieringConfig)} - _NO_OPTIONS
    for name in options:
        if name in _NO_OPTIONS:
            raise ConfigError(f"tiering has no option {name!r}: it is fixed in engines. Remove it.")
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"tiering has no option {name!r}. Known: {', '.join(sorted(known))}.{hint}")
    try:
        config = msgspec.convert(dict(options), TieringConfig)
    except msgspec.ValidationError as error:
        raise explained(error, TieringConfig, options, "tiering") from error
    PolicyParser(tier_names, config.policy, config.allow)
    if config.tenants is not None and config.tenants.by == "parameter" and "tenant" not in config.allow:
        raise ConfigError(
            "tenants has 'by': 'parameter', and 'allow' does not contain 'tenant', so no request can name its "
            "tenant. Add 'tenant' to 'allow' if a gateway sets it, because clients could choose any tenant."
        )
    return config
