"""A tier on a command line: its JSON, a URL, or a file with either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvstore.cli.command_line import parsed_json, text_of
from kvstore.config import TierConfig, decode_config, encode_config
from kvstore.errors import ConfigError
from kvstore.registry import BACKENDS
from kvstore.secret import shown
from kvstore.tiers.preflight import paths_of
from kvstore.tiers.url import tier_of_url

_OF_VLLM = frozenset({"type", "module_path", "backpressure", "locality"})
"""vLLM's keys in an object of ``secondary_tiers``; they are accepted, so that the object can be pasted unchanged."""

_VLLM_TYPE = "KVStoreTier"

_EXPECTED = (
    'Expected a JSON object such as \'{"type": "file", "path": "/mnt/kv", "capacity": "10GiB"}\', a URL such as '
    "'file:///mnt/kv?capacity=10GiB' or 'redis://host:6379/0', or '@FILE' with the JSON in it."
)


@dataclass(frozen=True, slots=True)
class TierArgument:
    """One tier, checked."""

    backend: str  # Name of the backend, as in a configuration.
    options: Mapping[str, Any] = field(repr=False)
    """The backend's options as given. May hold secrets: show :meth:`shown` instead."""
    config: TierConfig  # The options decoded, with all defaults.

    @property
    def name(self) -> str:
        """Name of the tier in tables: its label, or its backend without one."""
        return self.config.label or self.backend

    @property
    def paths(self) -> list[Path]:
        """The directories that the tier makes and fills alone; empty without them."""
        return paths_of(self.backend, self.config)

    def as_config(self, **more: Any) -> dict[str, Any]:
        """Return the configuration for :func:`kvstore.open_tier`, with changed options. May contain secrets."""
        return {"backend": self.backend, **self.options, **more}

    def with_options(self, **more: Any) -> TierArgument:
        """Return the tier with options added or replaced, checked again."""
        return make_tier(self.backend, {**self.options, **more})

    def moved(self, paths: Sequence[Path]) -> TierArgument:
        """Return the tier with other directories."""
        option = BACKENDS.find(self.backend).path_option
        kept = {name: value for name, value in self.options.items() if self.config.aliases.get(name, name) != option}
        named = [str(path) for path in paths]
        return make_tier(self.backend, {**kept, option: named if len(named) > 1 else named[0]})

    def shown(self) -> dict[str, Any]:
        """Return the configuration for display: with all defaults, without secrets."""
        return {"backend": self.backend, **_masked(encode_config(self.config))}


def parse_tier(text: str, **defaults: Any) -> TierArgument:
    """Parse a tier as given on a command line: a JSON object (with or without vLLM's own keys), a URL, or ``@FILE``.

    The bare name of a backend suffices if it needs no options.

    Args:
        defaults: Values of options that the backend requires, for those that are not given.
    """
    backend, options = split_tier(text)
    config_type = BACKENDS.find(backend).config_type
    given = {config_type.aliases.get(name, name) for name in options}
    required = {field.name for field in msgspec.structs.fields(config_type) if field.required} - given
    return make_tier(backend, {**options, **{name: value for name, value in defaults.items() if name in required}})


def split_tier(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name of a tier's backend and its options, unchecked."""
    text = text_of(text.strip(), "tier").strip()
    if "://" in text.partition("{")[0]:
        options = tier_of_url(text)
        return options.pop("backend"), options
    if text in BACKENDS.names():
        return text, {}
    value = parsed_json(text, "--tier is not a URL, and", f" {_EXPECTED}")
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, dict):
        raise ConfigError(f"--tier is {shown(value)}. {_EXPECTED}")
    backend = value.get("backend")
    if backend is None and value.get("type") != _VLLM_TYPE:
        backend = value.get("type")
    if not isinstance(backend, str):
        raise ConfigError(f'--tier names no backend. Add "type": one of {", ".join(BACKENDS.names())}.')
    return backend, {key: item for key, item in value.items() if key not in _OF_VLLM | {"backend"}}


def parse_medium(text: str) -> TierArgument:
    """Parse a tier whose medium is only looked at or maintained, so that it needs no capacity."""
    return parse_tier(text, capacity="100%")


def make_tier(backend: str, options: Mapping[str, Any]) -> TierArgument:
    config = decode_config(BACKENDS.find(backend).config_type, options, where=f"{backend} tier")
    return TierArgument(backend, dict(options), config)


def _masked(value: Any, name: str = "") -> Any:
    """Mask values whose names suggest secrets, for third-party backends that did not mark them; return plain JSON."""
    if isinstance(value, dict):
        return {key: _masked(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_masked(item, name) for item in value]
    if isinstance(value, str) and value:
        return "***" if shown(value, name) == "(not shown)" else _without_user(value)
    return value


def _without_user(text: str) -> str:
    """Return a URL without user name and password; any other text unchanged."""
    scheme, separator, rest = text.partition("://")
    if not separator or "@" not in rest.partition("/")[0]:
        return text
    authority, slash, path = rest.partition("/")
    return f"{scheme}://***@{authority.rpartition('@')[2]}{slash}{path}"
