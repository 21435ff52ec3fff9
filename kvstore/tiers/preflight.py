"""Checks of a tier's configuration without opening the tier."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvstore.codec.base import CodecContext
from kvstore.codec.chain import AUTO, build_chain, parse_chain
from kvstore.config import ByteSize, Capacity, TierConfig
from kvstore.errors import AbsentError, BackendError, ConfigError
from kvstore.namespace import Namespace
from kvstore.registry import BACKENDS, CODECS

_CAPACITY_LEAST: Final = 4096
"""The smallest slot of a disk tier; a smaller capacity probably lacks a unit."""

_CAPACITY_LITTLE: Final = 64 << 20
"""A smaller capacity holds some dozens of blocks: a block of a large model takes megabytes."""

_EMPTY_DIR: Final = "/kubernetes.io~empty-dir/"
"""Part of the path of every emptyDir on its node."""

_QUOTA_SHARE: Final = 0.75
"""Share of the device below which a filesystem's size is that of a quota; its own structures take a few percent."""


def check_before_opening(backend: str, config: TierConfig) -> None:
    """Check codecs, capacity, directories and the backend's own conditions; opens and changes nothing."""
    for spec in parse_chain(config.codec):
        if spec.name != AUTO:
            item = {spec.name: spec.options} if spec.argument is None else f"{spec.name}:{spec.argument}"
            build_chain([item], CodecContext(Namespace({})), CODECS.find)
    for path in paths_of(backend, config):
        capacity = getattr(config, "capacity", None)
        if isinstance(capacity, Capacity) and capacity.percent is None and capacity.resolve(0) < _CAPACITY_LEAST:
            found, advice = f"'capacity' is {capacity}, less than a block", "Give it a unit, such as '500GiB'."
            raise ConfigError(f"{backend} tier: {found}. {advice}")
        for found, advice in _exposures(path):
            raise ConfigError(f"{backend} tier: {found}. {advice}")
        for found, advice in _absences(path) if config.required else ():
            raise AbsentError(f"{backend} tier: {found}. {advice}")
    try:
        BACKENDS.find(backend)(config).check()
    except AbsentError as error:
        if config.required:
            raise AbsentError(f"{backend} tier: {error}") from error
    except (BackendError, OSError) as error:
        if config.required:
            raise ConfigError(f"{backend} tier: {error}. Check its paths and files.") from error


def doubts_before_opening(backend: str, config: TierConfig) -> Iterator[str]:
    """Yield warnings about a tier that an engine can open, each with its remedy."""
    capacity = getattr(config, "capacity", None)
    size = capacity.size_bytes if isinstance(capacity, Capacity) else capacity
    if isinstance(size, int) and size < _CAPACITY_LITTLE:
        yield f"'capacity' is {ByteSize(size).text}, room for few blocks. Give some GiB, such as '500GiB'."
    for path in paths_of(backend, config):
        for found, advice in () if config.required else _absences(path):
            yield f"{found}, so an engine starts without the tier ('required' is false). {advice}"
        if not path.is_absolute():
            yield (
                f"the path {str(path)!r} is relative to the directory in which the engine starts, here {os.getcwd()}. "
                f"Give an absolute path, such as {str(path.absolute())!r}."
            )
        if isinstance(capacity, Capacity) and size is None and _is_unlimited_empty_dir(path):
            yield (
                f"'capacity' is {capacity}, and {str(path)!r} is on an emptyDir: that is a share of the node's "
                "filesystem, and the kubelet evicts a pod above the volume's sizeLimit. Give bytes below that, such as "
                "'500GiB'."
            )
        filesystem = os.statvfs(nearest_existing(path))
        total = filesystem.f_blocks * filesystem.f_frsize
        if isinstance(size, int) and 0 < total < size:
            yield (
                f"'capacity' is {ByteSize(size).text}, and the filesystem of {str(path)!r} has "
                f"{total / 2**30:.0f} GiB. The tier fills it up to 'reserve'. Give a smaller size, or a share such as "
                "'80%'."
            )


def paths_of(backend: str, config: TierConfig) -> list[Path]:
    """Return the directories that a tier makes and fills alone; empty for a tier without them.

    See :attr:`kvstore.backends.base.Backend.path_option`.
    """
    option = BACKENDS.find(backend).path_option
    found = getattr(config, option) if option else []
    return [Path(path).expanduser() for path in ([found] if isinstance(found, str | Path) else found)]


def claim_paths(used: dict[Path, str], place: str, paths: list[Path]) -> None:
    """Add the directories of the tier at ``place`` to those in use.

    Raises:
        ConfigError: One is another tier's, or is inside another one, or contains one.
    """
    for path in paths:
        real = path.resolve()
        for other, owner in used.items():
            if real == other and owner != place:
                raise ConfigError(f"{owner} uses {str(path)!r} too. Give each tier a directory of its own.")
            if real != other and (real.is_relative_to(other) or other.is_relative_to(real)):
                raise ConfigError(
                    f"{str(path)!r} and {str(other)!r} of {owner} lie within each other. Give each tier a directory "
                    "of its own, side by side."
                )
        used[real] = place


def path_faults(path: Path, *, is_tier: bool = True) -> Iterator[tuple[str, str]]:
    """Yield the faults of a directory (for a tier), each with advice; changes nothing."""
    yield from [*_absences(path), *(_exposures(path) if is_tier else ())]


def _absences(path: Path) -> Iterator[tuple[str, str]]:
    """Yield what this machine lacks for a directory, perhaps only now."""
    there = nearest_existing(path)
    if path != there and path.parent != there:
        yield f"{path.parent} does not exist", "Create it: kvstore creates only the last component of a tier's path."
    elif not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield f"{there} is not a writable directory", "Give one that is this user's."


def _exposures(path: Path) -> Iterator[tuple[str, str]]:
    if os.path.isdir(path) and path.stat().st_mode & stat.S_IWOTH:
        yield (
            f"every user of the machine may write to {path}",
            f"Use a directory below it, such as {path / 'kv'}; kvstore makes it for this user alone.",
        )


def _is_unlimited_empty_dir(path: Path) -> bool:
    """Return whether a path is on an emptyDir of Kubernetes whose size limit the filesystem does not show.

    The filesystem shows the limit of one in memory, and of one with a project quota: it is smaller than its device.
    """
    real = nearest_existing(path).resolve()
    device, root, kind, deepest = "", "", "", -1
    # https://docs.kernel.org/filesystems/proc.html: id, parent, device, root, mount point, ..., "-", type, ...
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        point = Path(fields.split()[4])
        # The last of several mounts on one point is on top.
        if real.is_relative_to(point) and len(point.parts) >= deepest:
            deepest = len(point.parts)
            device, root, kind = fields.split()[2], fields.split()[3], rest.split()[0]
    if _EMPTY_DIR not in root or kind == "tmpfs":
        return False
    try:
        sectors = int(Path(f"/sys/dev/block/{device}/size").read_text())
    except (OSError, ValueError):
        return True  # Such as btrfs, whose device has no file here.
    filesystem = os.statvfs(real)
    return filesystem.f_blocks * filesystem.f_frsize > _QUOTA_SHARE * sectors * 512


def nearest_existing(path: Path) -> Path:
    """Return the nearest ancestor that this user sees, or the path itself."""
    # Path.exists raises where a directory may not be entered.
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    return path
