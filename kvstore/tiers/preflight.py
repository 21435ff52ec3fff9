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
from kvstore.registry import BACKENDS, CODECS

_CAPACITY_LEAST: Final = 4096
"""The smallest slot of a disk tier; a smaller capacity probably lacks a unit."""


def check_before_opening(backend: str, config: TierConfig) -> None:
    """Check codecs, capacity and directories; opens and changes nothing.

    Raises:
        ConfigError: An engine could not open this tier.
    """
    for spec in parse_chain(config.codec):
        # Seals are skipped: they read their keys, which may exist only on the engine's machine.
        if spec.name != AUTO and not issubclass(CODECS.find(spec.name), Seal):
            item = {spec.name: spec.options} if spec.argument is None else f"{spec.name}:{spec.argument}"
            build_chain([item], CodecContext(Namespace({})), CODECS.find)
    for path in paths_of(backend, config):
        capacity = getattr(config, "capacity", None)
        if isinstance(capacity, Capacity) and capacity.percent is None and capacity.resolve(0) < _CAPACITY_LEAST:
            found, advice = f"'capacity' is {capacity}, less than a block", "Give it a unit, such as '500GiB'."
            raise ConfigError(f"{backend} tier: {found}. {advice}")
        for found, advice in path_faults(path):
            raise ConfigError(f"{backend} tier: {found}. {advice}")


def paths_of(backend: str, config: TierConfig) -> list[Path]:
    """Return the directories that a tier makes and fills alone; empty for a tier without them.

    See :attr:`kvstore.backends.base.Backend.path_option`.
    """
    option = BACKENDS.find(backend).path_option
    found = getattr(config, option) if option else []
    return [Path(path).expanduser() for path in ([found] if isinstance(found, str | Path) else found)]


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
            f"Use a directory below it, such as {path / 'kv'}; kvstore makes it for this user alone.",
        )


def nearest_existing(path: Path) -> Path:
    """Return the nearest ancestor that exists, or the path itself."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
