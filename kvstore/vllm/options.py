"""Validation of ``kv_connector_extra_config``: the choice of the manager, its options, and the options of each tier."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvstore.config import ByteSize, decode_config, did_you_mean
from kvstore.errors import ConfigError
from kvstore.eviction import DEFAULT_POLICY, make_policy
from kvstore.registry import BACKENDS
from kvstore.secret import shown
from kvstore.tiering.config import TieringConfig, engine_tiering
from kvstore.types import Locality

TIER_TYPE = "KVStoreTier"
"""The tier's ``type`` in vLLM's factory; its class name."""

_OF_VLLM = frozenset({"type", "module_path", "backpressure", "locality"})
"""Keys read by vLLM's factory or manager."""

_OPTIONS: Final = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "manager",
        "tiering",
        "eviction_policy",
        "canonical_layout",
        "cpu_bytes_to_use",
        "huge_pages",
        "numerics",
        "weights",
        "secondary_tiers",
    }
)
"""Keys of ``kv_connector_extra_config`` that kvstore reads."""

_VLLM_COUNTS: Final = frozenset({"block_size", "blocks_per_chunk"})
_VLLM_FLAGS: Final = frozenset({"offload_prompt_only", "self_describing_kv_events", "canonical_layout"})
_VLLM_NUMBERS: Final = frozenset(
    {"store_threshold", "max_tracker_size", "sync_load_budget_bytes", "tier_poll_interval_s"}
)
_VLLM_OTHERS: Final = frozenset({"cache_policy_module_path", "backpressure"})
"""Keys that only vLLM reads (0.31 to 0.33), by kind of their values."""

_OF_VLLMS_SPEC: Final = _VLLM_COUNTS | _VLLM_FLAGS | _VLLM_NUMBERS | _VLLM_OTHERS

_MISSPELT: Final = 0.8
"""Similarity (of difflib) from which an unknown key is a misspelt one: "teiring" has 0.86, "tier_manager" has 0.74."""

_NAME_CHARS_MAX: Final = 64
"""Longest declared name; a longer text is a mistake."""

_SLOT_BYTES_LEAST: Final = 4096
"""Smallest row of the primary tier; a smaller primary tier probably lacks its unit."""

FOREIGN_OPTIONS = frozenset({"label", "reset"})
"""Keys of another package's tier that kvstore's manager reads and does not pass on to the tier."""


def is_own_manager(extra_config: Mapping[str, Any]) -> bool:
    """Return whether to use kvstore's manager.

    True unless ``"manager": "vllm"`` is set, or a ``CachePolicy`` (supported only by vLLM's manager) without
    ``"tiering"`` or ``"manager"``.

    ``extra_config``: ``kv_connector_extra_config``, with full type names.
    """
    needs_vllm = "cache_policy_module_path" in extra_config
    default = "kvstore" if "tiering" in extra_config or not needs_vllm else "vllm"
    return bool(extra_config.get("manager", default) != "vllm")


def tier_types() -> frozenset[str]:
    """Return the values of a tier's ``type`` that name a tier of kvstore, other than ``"module:Class"``."""
    return frozenset({TIER_TYPE, *BACKENDS.names()})


def uses_huge_pages(extra_config: Mapping[str, Any]) -> bool:
    """Return whether to allocate the primary tier in huge pages; true by default."""
    return bool(extra_config.get("huge_pages", True))


def eviction_policy(extra_config: Mapping[str, Any]) -> Any:
    """Return the eviction policy of the primary tier of kvstore's manager, unchecked. Without it, vLLM's is LRU."""
    return extra_config.get("eviction_policy", DEFAULT_POLICY)


def check_tiering(extra_config: Mapping[str, Any]) -> TieringConfig | None:
    """Return the configuration of kvstore's manager, or None to use vLLM's (see :func:`is_own_manager`).

    ``extra_config``: ``kv_connector_extra_config``, with full type names (:func:`with_short_types`).
    """
    choice = extra_config.get("manager")
    if choice not in ("kvstore", "vllm", None):
        raise ConfigError(f"manager is {choice!r}. Expected 'kvstore' (the default) or 'vllm'.")
    if not is_own_manager(extra_config):
        if "tiering" in extra_config:
            raise ConfigError("tiering configures kvstore's manager, and manager is 'vllm'. Remove one of them.")
        return None
    for tier in extra_config["secondary_tiers"]:
        if tier["type"] != TIER_TYPE and tier.get("reset", "forget") not in ("forget", "keep"):
            raise ConfigError(f"reset of the tier {tier['type']} is {tier['reset']!r}. Expected 'forget' or 'keep'.")
    try:
        make_policy(eviction_policy(extra_config))
    except ConfigError as error:
        raise ConfigError(f"'eviction_policy': {error}") from None
    threshold = extra_config.get("store_threshold", 0)
    if _is_number(threshold, int) and int(threshold) > 1:
        raise ConfigError(
            f"store_threshold is {threshold}, which vLLM's tiering does not have either. Give "
            "'tiering': {'policy': {'min_uses': n}} for blocks to be stored at their n-th use."
        )
    names = [tier_name(tier) for tier in extra_config["secondary_tiers"]]
    return engine_tiering(extra_config.get("tiering", {}), names)


def with_short_types(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``kv_connector_extra_config`` with kvstore's short type names expanded for vLLM's factory.

    A second tier of the same backend without a label gets a label with its position, so that metrics differ. A size
    with a unit becomes a number.

    Raises:
        ConfigError: ``secondary_tiers`` is not a list of objects, or neither kvstore nor vLLM has a type.
    """
    tiers = extra_config.get("secondary_tiers", [])
    if not isinstance(tiers, list) or not all(isinstance(tier, Mapping) for tier in tiers):
        wrong = [tier for tier in tiers if not isinstance(tier, Mapping)] if isinstance(tiers, list) else []
        found = f"a list with {shown(wrong[0])}" if wrong else shown(tiers)
        raise ConfigError(f"secondary_tiers is {found}. Expected a list of JSON objects, one per tier.")
    is_ours = is_own_manager(extra_config)
    seen: set[str] = set()
    spelled: list[dict[str, Any]] = []
    for index, tier in enumerate(tiers):
        full = spelled_out(tier, f"secondary_tiers[{index}]")
        backend = full.get("backend")
        kind = backend if full["type"] == TIER_TYPE else full["type"] if is_ours else None
        if isinstance(kind, str) and not full.get("label"):
            if kind in seen:
                full["label"] = f"{kind.rpartition(':')[2]}-{index}"
            seen.add(kind)
        spelled.append(full)
    size = extra_config.get("cpu_bytes_to_use")
    sized = {"cpu_bytes_to_use": int(ByteSize(size))} if isinstance(size, str) else {}
    return {**extra_config, **sized, "secondary_tiers": spelled}


def option_faults(extra_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the faults of the values that vLLM would report late, or read as something else."""
    size = extra_config.get("cpu_bytes_to_use")
    if not size:
        yield (
            "'cpu_bytes_to_use' is missing. Expected the size of the primary tier, such as '8GiB' or 8589934592. Every "
            "block passes through it. vLLM's --kv-offloading-size gives it, too."
        )
    else:
        try:
            # vLLM computes a fraction of a byte from --kv-offloading-size.
            if ByteSize(int(size) if isinstance(size, float) else size) < _SLOT_BYTES_LEAST:
                yield f"'cpu_bytes_to_use' is {size!r}, less than a block. Give it a unit, such as '8GiB'."
        except (ConfigError, ValueError, OverflowError) as error:
            yield f"'cpu_bytes_to_use': {error}"
    for option, changes in (("numerics", "kernels or layouts"), ("weights", "the weights")):
        name = extra_config.get(option)
        if name is not None and (not isinstance(name, str) or not 0 < len(name) <= _NAME_CHARS_MAX):
            yield (
                f"{option!r} is {shown(name)}. Expected a name of 1 to {_NAME_CHARS_MAX} characters, such as "
                f"'2026-11', which you change with {changes}."
            )
    if extra_config.keys() >= _VLLM_COUNTS:
        yield "'block_size' and 'blocks_per_chunk' both give the size of a block. Remove one."
    for name in sorted(_VLLM_COUNTS & extra_config.keys()):
        if not _is_number(value := extra_config[name], int) or int(value) < 1:
            yield f"{name!r} is {shown(value)}. Expected a whole number, 1 or more, without a unit."
    for name in sorted(({"huge_pages"} | _VLLM_FLAGS) & extra_config.keys()):
        if extra_config[name] not in (True, False):
            yield f"{name!r} is {shown(extra_config[name])}. Expected true or false, without quotes."
    for name in sorted(_VLLM_NUMBERS & extra_config.keys()):
        if not _is_number(value := extra_config[name], float) or float(value) < 0:
            yield f"{name!r} is {shown(value)}. Expected a number, 0 or more, without a unit."


def unknown_options(extra_config: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the faults of unknown keys, and warnings.

    A key that resembles one of kvstore's is a fault: the option would have no effect. All others are warnings, because
    another version of vLLM may read them.
    """
    faults, warnings = [], []
    known = _OPTIONS | _OF_VLLMS_SPEC
    for name in extra_config:
        if name in known:
            continue
        if meant := difflib.get_close_matches(str(name).lower(), _OPTIONS, n=1, cutoff=_MISSPELT):
            faults.append(f"Unknown key {name!r}. Did you mean {meant[0]!r}?")
        else:
            warnings.append(
                f"{name!r} is not an option of kvstore, nor of a vLLM that kvstore knows. It has no effect unless this "
                f"vLLM reads it.{did_you_mean(name, known)}"
            )
    return faults, warnings


def check_options(options: Mapping[str, Any], *, tier_type: str) -> dict[str, Any]:
    """Check the JSON object of a tier and return the options for ``open_tier``.

    Args:
        tier_type: Its configured ``type``: ``"KVStoreTier"``, or the name of a backend.

    Returns:
        ``backend`` and the backend's options.
    """
    named = options.get("backend")
    if named is None and tier_type != TIER_TYPE:
        named = tier_type
    if not isinstance(named, str) or not named:
        known = ", ".join(BACKENDS.names())
        raise ConfigError(f'The backend of a {TIER_TYPE} is {named!r}. Give "backend": one of {known}.')
    locality, known_places = options.get("locality"), [place.value for place in Locality]
    if locality is not None and locality not in known_places:
        expected = " or ".join(map(repr, known_places))
        raise ConfigError(f"locality is {locality!r}. Expected {expected}.{did_you_mean(locality, known_places)}")
    of_backend = {key: value for key, value in options.items() if key not in _OF_VLLM and key != "backend"}
    config_type = BACKENDS.find(named).config_type
    for key in of_backend.keys() & (_OPTIONS | _OF_VLLMS_SPEC) - set(config_type.__struct_fields__):
        raise ConfigError(
            f"{key!r} is not an option of a tier. It belongs one level up, next to 'secondary_tiers'. Move it there."
        )
    decode_config(config_type, of_backend, where=f"{named} tier")
    return {"backend": named, **of_backend}


def tier_name(options: Mapping[str, Any]) -> str:
    """Return the name of a tier: its label, otherwise its backend's name, or its type if it is not kvstore's."""
    if options.get("type", TIER_TYPE) != TIER_TYPE and "backend" not in options:
        return str(options.get("label") or options["type"])
    return str(options.get("label") or BACKENDS.find(str(options.get("backend"))).name)


def spelled_out(tier: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the object of one tier in the form that vLLM's factory expects; ``where`` is its place, for errors.

    Raises:
        ConfigError: Neither kvstore nor vLLM has its type.
    """
    name = tier.get("type")
    if not isinstance(name, str) or not name:
        found = f"has the type {shown(name)}" if "type" in tier else "has no 'type'"
        raise ConfigError(f"{where} {found}. Expected the name of a backend, such as 'file'.")
    if name == TIER_TYPE:
        return {"module_path": "kvstore.vllm", **tier}
    if name in BACKENDS.names() or (":" in name and "module_path" not in tier):
        return {**tier, "type": TIER_TYPE, "module_path": "kvstore.vllm", "backend": name}
    theirs = SecondaryTierFactory._registry  # vLLM's own tiers, and tiers of plugins.
    if "module_path" not in tier and name not in theirs:
        known = sorted({*BACKENDS.names(), *theirs})
        raise ConfigError(
            f"{where} has the unknown type {name!r}. Known: {', '.join(known)}.{BACKENDS.meant(name, known)}"
        )
    return dict(tier)


def _is_number(value: Any, kind: type[int] | type[float]) -> bool:
    """Return whether vLLM, which calls ``kind``, gets a number from a value."""
    try:
        kind(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return not isinstance(value, bool)
