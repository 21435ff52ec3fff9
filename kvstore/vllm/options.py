"""The JSON object of one tier: which keys are vLLM's, which are the backend's, and whether they are right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.config import decode_config, nearest_name
from kvstore.errors import ConfigError
from kvstore.registry import BACKENDS
from kvstore.types import Locality

__all__ = ["TIER_TYPE", "check_options", "tier_name"]

TIER_TYPE = "KVStoreTier"
"""The ``type`` by which vLLM's factory finds the tier; the name of its class."""

_OF_VLLM = frozenset({"type", "module_path", "backpressure", "locality"})
"""Keys that vLLM's factory or manager reads itself."""


def check_options(options: Mapping[str, Any], *, tier_type: str) -> dict[str, Any]:
    """Check the JSON object of a tier and return what ``open_tier`` is to be given.

    Args:
        options: The object, with or without vLLM's own keys.
        tier_type: The ``type`` it was configured under: ``"KVStoreTier"``, or the name of a backend.

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
    """Return the name that a tier will have: its label, or its backend's name."""
    return str(options.get("label") or BACKENDS.find(str(options.get("backend"))).name)


def _check_locality(value: object) -> None:
    known = [place.value for place in Locality]
    if value is None or value in known:
        return
    near = nearest_name(value, known) if isinstance(value, str) else None
    hint = f" Did you mean {near!r}?" if near else ""
    raise ConfigError(f"locality is {value!r}. Expected {' or '.join(map(repr, known))}.{hint}")
