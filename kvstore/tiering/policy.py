"""Offload policy: the tiers that a request may store to and load from, with limits and hints."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from kvstore.config import did_you_mean, nearest_name
from kvstore.errors import ConfigError
from kvstore.quantity import Seconds
from kvstore.tiering.events import ALL_TIERS_NAME, PRIMARY_NAME

logger = logging.getLogger("kvstore.tiering")

PRIORITY_MAX: Final = 100
"""Highest priority of blocks in the primary tier, as in TensorRT-LLM's retention configuration."""

HAND_OVER: Final = "remote_decoder"
"""Name in ``allow`` of hand-overs, which engines request beside the policy (:attr:`RequestContext.hand_over_s`)."""

OWN_PARAMETERS: Final = ("store", "tiers", "cpu", "load", "min_uses", "explain")
"""Parameters whose effect is limited to the request itself. A ``ttl`` also ends the life of blocks that others stored,
and unwritten ``lazy`` blocks can't be evicted while a tier hangs."""

_RETAIN_PARTS_MAX: Final = 8
"""Maximum parts of a prompt with different priorities."""

_PARAMETERS_MAX: Final = 32
"""Maximum parameters of a request. The nearest known name of each unknown one takes 30 us to find."""

_WARNINGS_MAX = 256
"""Maximum distinct warnings logged, so that a client with many different mistakes cannot fill the log."""


class Retain(NamedTuple):
    """Retention of the blocks that end after a number of tokens of a request."""

    after: int  # The number of tokens.
    priority: int  # Priority in the primary tier; 0 ends an existing priority.
    seconds: float | None
    """Duration from the last use by the request, at most the configured maximum; None: that maximum."""


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """Rules for the blocks of a request. The defaults store all blocks in all tiers immediately.

    Attributes:
        store: False stores nothing.
        store_fraction: Share of the prompt, from its start, whose full blocks are stored; None for the whole prompt and
            the generated tokens.
        store_tokens: Number of tokens, from the start, whose full blocks are stored; None for all.
        tiers: Names of the tiers to store to; None for all.
        cpu: Whether the blocks may stay in the primary tier. If not, they leave it once stored in the tiers.
        load: False loads nothing, not even from the primary tier.
        load_tiers: Names of the tiers to load from, besides the primary tier; None for all.
        min_uses: Sighting at which a block is stored in the tiers: n - 1 earlier requests had the same block; 0: each
            tier chooses between 1 and 2.
        ttl_s: Seconds after which the blocks expire in every tier; None for never.
        lazy: Whether blocks are written to the tiers only when the primary tier is about to evict them.
        retain: Retention of the blocks in the primary tier, ordered by starting token.
        demote_tokens: When the request ends, its blocks after this number of tokens are the next to be evicted from the
            primary tier; None: disabled.
        forget_tokens: When the request ends, its blocks after this number of tokens are removed from every tier; None:
            disabled.
        forget_tenant: When the request ends, all blocks of its tenant are removed from every tier.
        tenant: The request's tenant, for tenant rules that read it from the policy; empty: none.
        explain: Whether the engine's answer says where the blocks came from, and why others were computed.
    """

    store: bool = True
    store_fraction: float | None = None
    store_tokens: int | None = None
    tiers: tuple[str, ...] | None = None
    cpu: bool = True
    load: bool = True
    load_tiers: tuple[str, ...] | None = None
    min_uses: int = 1
    ttl_s: float | None = None
    lazy: bool = False
    retain: tuple[Retain, ...] = ()
    demote_tokens: int | None = None
    forget_tokens: int | None = None
    forget_tenant: bool = False
    tenant: str = ""
    explain: bool = False

    @property
    def acts_at_end(self) -> bool:
        """Whether the policy acts on the request's blocks when the request ends."""
        return bool(self.retain) or (self.demote_tokens, self.forget_tokens) != (None, None)

    @property
    def stores_all(self) -> bool:
        """Whether blocks are stored regardless of their position."""
        return self.store and self.store_fraction is None and self.store_tokens is None

    def tokens_max(self, prompt_tokens: int) -> int:
        """Return the end of the storable part, in tokens from the start, for a policy that does not store all blocks.

        A block may be stored if it ends at or before this position.
        """
        if not self.store:
            return 0
        if self.store_tokens is not None:
            return self.store_tokens
        # Rounded first: 0.29 * 100 is 28.999… in binary, but 29 is intended.
        return math.floor(round((self.store_fraction or 0.0) * prompt_tokens, 6))


class PolicyParser:
    """Reads the policy of a request: its parameters override the defaults.

    An invalid value is logged once as a warning and never fails a request. A value that may be a restriction fails
    closed: the strictest restriction of its kind applies (see ``_STRICTEST``).

    Args:
        defaults: The configured defaults, in the same form as a request's parameters.
        allowed: Parameters that requests may set, of :data:`PARAMETERS`; others are ignored.

    Raises:
        ConfigError: A default is wrong, or the names of the tiers are ambiguous in policies or metrics.
    """

    def __init__(
        self,
        tier_names: Sequence[str],
        defaults: Mapping[str, Any] | None = None,
        allowed: Sequence[str] = OWN_PARAMETERS,
    ) -> None:
        if len({*tier_names, PRIMARY_NAME, ALL_TIERS_NAME}) < len(tier_names) + 2:
            raise ConfigError(
                f"The tiers are named {', '.join(map(repr, tier_names))}. Expected different names, none of them "
                f"{PRIMARY_NAME!r} or {ALL_TIERS_NAME!r}: give each its own label."
            )
        self._tier_names = tuple(tier_names)
        self._warned: set[str] = set()
        self._allowed = frozenset(allowed)
        for name in allowed:
            if name not in PARAMETERS:
                raise ConfigError(f"allow contains {_unknown(name, PARAMETERS)}")
        self.mistakes = 0  # Invalid values in requests.
        self.refused = 0  # Parameters of requests that were ignored because they are not allowed.
        self.default = self._parse(defaults or {}, OffloadPolicy(), _refuse)  # Policy of requests without parameters.

    def parse(self, params: object) -> OffloadPolicy:
        """Return the policy of a request.

        ``params``: its parameters for kvstore (``kv_transfer_params["kvstore"]``), or None.
        """
        if params is None or params == {}:
            return self.default
        if isinstance(params, Mapping) and len(params) <= _PARAMETERS_MAX:
            # Unknown parameters stay, because they may be misspelt restrictions.
            params = {name: value for name, value in params.items() if name not in _READERS or self.allows(name)}
        return self._parse(params, self.default, self._note_mistake)

    def allows(self, name: str) -> bool:
        """Return whether requests may set a parameter; if not, count the refusal."""
        if name in self._allowed:
            return True
        self.refused += 1
        self._warn(f"A request has {name!r}, which 'allow' does not contain. It is ignored.")
        return False

    def _parse(self, params: object, policy: OffloadPolicy, complain: Callable[[str], None]) -> OffloadPolicy:
        if not isinstance(params, Mapping) or len(params) > _PARAMETERS_MAX:
            found = f"has {len(params)} parameters" if isinstance(params, Mapping) else f"is {_shown(params)}"
            complain(
                f"The offload policy {found}. Expected a JSON object of at most {_PARAMETERS_MAX} parameters, such as "
                "{'store': 0.5}."
            )
            return replace(policy, **_STRICTEST["store"], **_STRICTEST["load"])
        strictest: dict[str, Any] = {}
        for name, value in params.items():
            read = _READERS.get(name) if isinstance(name, str) else None
            if read is None:
                complain(f"The offload policy has {_unknown(name, _READERS)}")
                # Possibly a misspelled restriction, most likely the one with the nearest name.
                near = nearest_name(name, _READERS) if isinstance(name, str) else None
                strictest |= _STRICTEST["tiers"] | (_STRICTEST.get(near or "", {}) if near in self._allowed else {})
                continue
            try:
                policy = replace(policy, **read(value, self._tier_names))
            except ConfigError as error:
                complain(f"Offload policy, {name!r}: {error}")
                strictest |= _STRICTEST.get(name, {})
        # Applied last, so that no other parameter overrides it.
        return replace(policy, **strictest)

    def _note_mistake(self, text: str) -> None:
        self.mistakes += 1
        self._warn(f"{text} An invalid restriction counts as the strictest one; other invalid values are ignored.")

    def _warn(self, text: str) -> None:
        if text not in self._warned and len(self._warned) < _WARNINGS_MAX:
            self._warned.add(text)
            logger.warning("%s", text)


def _refuse(text: str) -> None:
    raise ConfigError(text)


def _unknown(name: object, known: Collection[str]) -> str:
    """Return the message about an unknown parameter, with the nearest known one."""
    return f"the unknown parameter {_shown(name)}. Known: {', '.join(known)}.{did_you_mean(name, known)}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _store(value: object, tier_names: Sequence[str]) -> dict[str, Any]:
    whole = {"store": True, "store_fraction": None, "store_tokens": None}
    if isinstance(value, bool):
        return {**whole, "store": value}
    if isinstance(value, int | float) and 0 <= value <= 1:
        return {**whole, "store_fraction": float(value)}
    if isinstance(value, Mapping) and set(value) == {"tokens"}:
        return {**whole, "store_tokens": _count(value["tokens"], at_least=0)}
    raise ConfigError(f"{_shown(value)}. Expected true, false, a fraction from 0 to 1, or {{'tokens': n}}.")


def _names(value: object, tier_names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{_shown(value)}. Expected a list of tier names, of: {', '.join(tier_names) or '(none)'}.")
    for name in value:
        if name not in tier_names:
            hint = did_you_mean(name, tier_names)
            raise ConfigError(f"no tier {_shown(name)}. Known: {', '.join(tier_names) or '(none)'}.{hint}")
    return tuple(value)


def _load(value: object, tier_names: Sequence[str]) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"load": value, "load_tiers": None}
    return {"load": True, "load_tiers": _names(value, tier_names)}


def _count(value: object, *, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(f"{_shown(value)}. Expected a whole number, {at_least} or more.")
    return value


def _min_uses(value: object, tier_names: Sequence[str]) -> dict[str, Any]:
    try:
        return {"min_uses": 0 if value == "auto" else _count(value, at_least=1)}
    except ConfigError as error:
        raise ConfigError(f"{_shown(value)}. Expected a whole number, 1 or more, or 'auto'.") from error


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{_shown(value)}. Expected true or false.")
    return value


def _retain(value: object, tier_names: Sequence[str]) -> dict[str, Any]:
    parts = value if isinstance(value, list | tuple) and len(value) <= _RETAIN_PARTS_MAX else [value]
    return {"retain": tuple(sorted(map(_retain_part, parts)))}


def _retain_part(value: object) -> Retain:
    part = value if isinstance(value, Mapping) else {"priority": value}
    priority, seconds = part.get("priority"), part.get("duration")
    known = set(part) <= {"priority", "duration", "after"}
    if not known or isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= PRIORITY_MAX:
        raise ConfigError(
            f"{_shown(value)}. Expected a priority, a whole number from 0 (none) to {PRIORITY_MAX}, or "
            f"{{'priority': n, 'duration': '30s', 'after': tokens}}, or a list of up to {_RETAIN_PARTS_MAX} of these."
        )
    after = _count(part.get("after", 0), at_least=0)
    return Retain(after, priority, None if seconds is None else _duration(seconds))


def _forget(value: object, tier_names: Sequence[str]) -> dict[str, Any]:
    if value == "tenant":
        return {"forget_tokens": 0, "forget_tenant": True}
    try:
        return {"forget_tokens": _from_tokens(value), "forget_tenant": False}
    except ConfigError as error:
        raise ConfigError(f"{_shown(value)}. Expected true, false, 'tenant', or {{'after': tokens}}.") from error


def _from_tokens(value: object) -> int | None:
    if isinstance(value, bool):
        return 0 if value else None
    if isinstance(value, Mapping) and set(value) == {"after"}:
        return _count(value["after"], at_least=0)
    raise ConfigError(f"{_shown(value)}. Expected true, false, or {{'after': tokens}}.")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{_shown(value)}. Expected a text.")
    return value


def _duration(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str) or (seconds := Seconds(value)) <= 0:
        raise ConfigError(f"{_shown(value)}. Expected a duration above 0, such as 600 or '10m'.")
    return float(seconds)


_READERS: Final[dict[str, Callable[[object, Sequence[str]], dict[str, Any]]]] = {
    "store": _store,
    "tiers": lambda value, names: {"tiers": None if value is None else _names(value, names)},
    "cpu": lambda value, names: {"cpu": _flag(value)},
    "load": _load,
    "min_uses": _min_uses,
    "ttl": lambda value, names: {"ttl_s": None if value is None else _duration(value)},
    "lazy": lambda value, names: {"lazy": _flag(value)},
    "retain": _retain,
    "demote": lambda value, names: {"demote_tokens": _from_tokens(value)},
    "forget": _forget,
    "tenant": lambda value, names: {"tenant": _text(value)},
    "explain": lambda value, names: {"explain": _flag(value)},
}
"""Parameters of a policy; each reader returns the fields of :class:`OffloadPolicy` that a value sets."""

PARAMETERS: Final = (*_READERS, HAND_OVER)
"""Parameters that ``allow`` may contain."""

_STRICTEST: Final[dict[str, dict[str, Any]]] = {
    "store": {"store": False},
    "tiers": {"tiers": ()},
    "cpu": {"cpu": False},
    "load": {"load": False},
    # Without a valid number of uses, a block is stored in no tier. Without a valid lifetime, it is not stored at all.
    "min_uses": {"tiers": ()},
    "ttl": {"store": False},
    "forget": {"forget_tokens": 0},
}
"""Replacements for invalid values of restrictions: a typing error must not move data to an excluded medium. The other
parameters restrict nothing, so an invalid value means the default: ``retain`` grants something, ``lazy`` only delays
stores, and ``demote`` only changes the order of eviction."""
