"""Configuration: msgspec structs, sizes and durations as people write them, and errors that say what to do."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["ByteSize", "Capacity", "Seconds", "SecretStr", "TierConfig", "decode_config"]


class ByteSize(int):
    """A number of bytes, written ``1048576``, ``"512MiB"``, ``"2TB"`` (powers of 1000) or ``"2TiB"`` (of 1024)."""


class Seconds(float):
    """A duration, written ``1.5`` (seconds), ``"250ms"``, ``"5s"``, ``"10m"``, ``"2h"``, ``"7d"``."""


class TierConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What every tier understands; each backend's config extends it."""

    namespace: str = ""


def decode_config(cls: type[Any], value: Any, *, where: str) -> Any:
    """Decode a JSON object into a config struct."""
    raise NotImplementedError
