"""Options of one tier in the configuration: vLLM's keys, the backend's keys, and their validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.config import decode_config, did_you_mean
from kvstore.errors import ConfigError
from kvstore.registry import BACKENDS
from kvstore.types import Locality

__all__ = ["FOREIGN_OPTIONS", "TIER_TYPE", "check_options", "tier_name"]

TIER_TYPE = "KVStoreTier"
"""The tier's ``type`` in vLLM's factory; its class name."""

_OF_VLLM = frozenset({"type", "module_path", "backpressure", "locality"})
"""Keys read by vLLM's factory or manager."""

FOREIGN_OPTIONS = frozenset({"label", "reset"})
"""Keys of a tier of another package that kvstore's manager reads; the tier does not get them."""


def check_options(options: Mapping[str, Any], *, tier_type: str) -> dict[str, Any]:
    """Check the JSON object of a tier and return the options for ``open_tier``.

    Args:
        options: The object, with or without vLLM's own keys.
        tier_type: Its configured ``type``: ``"KVStoreTier"``, or the name of a backend.

    Returns:
        ``backend`` and the backend's options.

    Raises:
        ConfigError: No or an unknown backend, an unknown key, a wrong type or a value out of range.
    """
    named = options.get("backend")
    if named is None and tier_type != TIER_TYPE:
        named = tier_type
    if not isinstance(named, str) or not named:
        known = ", ".join(BACKENDS.names())
        raise ConfigError(f'The backend of a {TIER_TYPE} is {named!r}. Give "backend": one of {known}.')
    _check_locality(options.get("locality"))
    of_backend = {key: value for key, value in options.items() if key not in _OF_VLLM and key != "backend"}
    config_type = BACKENDS.find(named).config_type
    decode_config(config_type, of_backend, where=f"{named} tier")
    return {"backend": named, **of_backend}


def tier_name(options: Mapping[str, Any]) -> str:
    """Return the name of a tier: its label, or the name of its backend, or its type if another package has it."""
    if options.get("type", TIER_TYPE) != TIER_TYPE and "backend" not in options:
        return str(options.get("label") or options["type"])
    return str(options.get("label") or BACKENDS.find(str(options.get("backend"))).name)


def _check_locality(value: object) -> None:
    known = [place.value for place in Locality]
    if value is None or value in known:
        return
    hint = did_you_mean(value, known)
    raise ConfigError(f"locality is {value!r}. Expected {' or '.join(map(repr, known))}.{hint}")
