"""Checks of a tier's configuration without opening the tier."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvstore.codec.base import CodecContext, Seal
from kvstore.codec.chain import AUTO, build_chain, parse_chain
from kvstore.config import Capacity, TierConfig
from kvstore.errors import ConfigError
from kvstore.namespace import Namespace
from kvstore.registry import CODECS

__all__ = ["check_before_opening", "nearest_existing", "path_faults", "paths_of"]

_CAPACITY_LEAST: Final = 4096
"""The smallest slot of a disk tier; a smaller capacity probably lacks a unit."""


def check_before_opening(backend: str, config: TierConfig) -> None:
    """Check codecs, capacity and directories; opens and changes nothing.

    Raises:
        ConfigError: An engine could not open this tier.
    """
    where = f"{backend} tier"
    for spec in parse_chain(config.codec):
        # Seals are skipped: they read their keys, which may exist only on the engine's machine.
        if spec.name != AUTO and not issubclass(CODECS.find(spec.name), Seal):
            item = {spec.name: spec.options} if spec.argument is None else f"{spec.name}:{spec.argument}"
            build_chain([item], CodecContext(Namespace({})), CODECS.find)
    capacity = getattr(config, "capacity", None)
    if isinstance(capacity, Capacity) and capacity.percent is None and capacity.resolve(0) < _CAPACITY_LEAST:
        raise ConfigError(f"{where}: 'capacity' is {capacity}, less than a block. Give it a unit, such as '500GiB'.")
    for path in paths_of(config):
        for found, advice in path_faults(path):
            raise ConfigError(f"{where}: {found}. {advice}")


def paths_of(config: TierConfig) -> list[Path]:
    """Return the directories of a tier; empty for a tier without a local path."""
    found = getattr(config, "paths", None) or [getattr(config, "path", None)]
    return [Path(path).expanduser() for path in found if isinstance(path, str | Path)]


def path_faults(path: Path, *, is_tier: bool = True) -> Iterator[tuple[str, str]]:
    """Yield the faults of a directory (for a tier), each with advice; changes nothing."""
    there = nearest_existing(path)
    if path != there and path.parent != there:
        yield f"{path.parent} does not exist", "Make it: only the last component of a tier's path is made by itself."
    elif not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield f"{there} is not a writable directory", "Give one that is this user's."
    elif is_tier and path == there and path.stat().st_mode & stat.S_IWOTH:
        yield (
            f"every user of the machine may write to {path}",
            f"Others could plant files there: chmod 700 {path}",
        )


def nearest_existing(path: Path) -> Path:
    """Return the nearest ancestor that exists, or the path itself."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
