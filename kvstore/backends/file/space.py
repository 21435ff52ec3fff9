"""Space: what may be stored, and what has to go. Plain functions of numbers; no I/O.

Three limits hold at once: the capacity of the root, a floor of free bytes of the filesystem, and one of free inodes.
The capacity counts the files of blocks (of all namespaces, unpublished and quarantined ones included) in whole pages;
directories, snapshots and locks, together less than a thousandth of that, are what the reserve is there for.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.backends.file.config import FileConfig
from kvstore.diskio import ALIGNMENT
from kvstore.errors import ConfigError

__all__ = ["Goal", "Limits", "Usage", "charge", "goal", "granted", "is_over_high", "resolve_limits", "shortage"]

_log = logging.getLogger("kvstore.backends.file")


@dataclass(frozen=True, slots=True)
class Limits:
    """What must hold at any time.

    Attributes:
        capacity_bytes: Most bytes of all blocks in the root.
        high_bytes: Bytes above which eviction starts.
        low_bytes: Bytes down to which it goes on.
        reserve_bytes: Bytes of the filesystem that stay free.
        reserve_files: Inodes of the filesystem that stay free.
    """

    capacity_bytes: int
    high_bytes: int
    low_bytes: int
    reserve_bytes: int
    reserve_files: int


@dataclass(frozen=True, slots=True)
class Usage:
    """A moment's state of the root and its filesystem.

    Attributes:
        used_bytes: Charged to all blocks, those being written included.
        pending_bytes: Of these, charged to blocks being written, by anybody; their bytes may not be taken yet.
        pending_files: Blocks being written.
        free_bytes: Free on the filesystem for this user.
        free_files: Free inodes; None if the filesystem does not count them.
    """

    used_bytes: int
    pending_bytes: int
    pending_files: int
    free_bytes: int
    free_files: int | None

    @property
    def spare_bytes(self) -> int:
        """Free bytes that nobody has laid claim to."""
        return self.free_bytes - self.pending_bytes


@dataclass(frozen=True, slots=True)
class Goal:
    """What an eviction should free; nothing more than zero means that it is done."""

    size_bytes: int
    files: int

    def __bool__(self) -> bool:
        return self.size_bytes > 0 or self.files > 0


def charge(size_bytes: int) -> int:
    """Return what a file of a size is charged: whole pages, as the filesystem gives them."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def granted(charges: Sequence[int], usage: Usage, limits: Limits) -> int:
    """Return how many of the blocks, from the first on, may be written now."""
    room = min(limits.capacity_bytes - usage.used_bytes, usage.spare_bytes - limits.reserve_bytes)
    fit = sum(total <= room for total in itertools.accumulate(charges))
    if usage.free_files is None:
        return fit
    return max(0, min(fit, usage.free_files - usage.pending_files - limits.reserve_files))


def shortage(charges: Sequence[int], usage: Usage, limits: Limits) -> Goal:
    """Return what has to go before all of the blocks may be written."""
    need = sum(charges)
    over_capacity = usage.used_bytes + need - limits.capacity_bytes
    over_reserve = need + limits.reserve_bytes - usage.spare_bytes
    files = 0
    if usage.free_files is not None:
        files = len(charges) + limits.reserve_files + usage.pending_files - usage.free_files
    # Never more than the capacity: a batch that is larger than all of it can't be helped by more eviction.
    return Goal(min(max(over_capacity, over_reserve, 0), limits.capacity_bytes), max(files, 0))


def goal(charges: Sequence[int], usage: Usage, limits: Limits, *, started: bool = False) -> Goal:
    """Return what an eviction should free: what the blocks lack, and what lies above the low watermark.

    Args:
        charges: The blocks that want to be written.
        usage: How things are now.
        limits: What must hold.
        started: Whether the eviction is under way; one starts only above the high watermark.
    """
    lacking = shortage(charges, usage, limits)
    if not started and not lacking and not is_over_high(usage, limits):
        return Goal(0, 0)
    return Goal(max(lacking.size_bytes, usage.used_bytes - limits.low_bytes), lacking.files)


def is_over_high(usage: Usage, limits: Limits) -> bool:
    """Tell whether eviction should start before anything is lacking."""
    return usage.used_bytes > limits.high_bytes


def resolve_limits(config: FileConfig, record_bytes_max: int, filesystem: os.statvfs_result) -> Limits:
    """Return the limits that a configuration means on a filesystem.

    Raises:
        ConfigError: They can't be used.
    """
    total_bytes = filesystem.f_blocks * filesystem.f_frsize
    if total_bytes <= 0 and (config.capacity.percent is not None or config.reserve.percent is not None):
        raise ConfigError(
            f"The filesystem of {config.path!r} does not tell its size, so 'capacity' {str(config.capacity)!r} and "
            f"'reserve' {str(config.reserve)!r} can't be shares of it. Give both as sizes, such as '500GiB'."
        )
    capacity = config.capacity.resolve(total_bytes)
    reserve = config.reserve.resolve(total_bytes)
    if capacity < charge(record_bytes_max):
        raise ConfigError(
            f"'capacity' is {str(config.capacity)!r} ({capacity} bytes), but one block takes "
            f"{charge(record_bytes_max)} bytes. Give room for many blocks, such as '100GiB'."
        )
    if 0 < total_bytes < capacity + reserve:
        _log.warning(
            "capacity %s plus reserve %s of %s is more than its filesystem has (%d bytes); the reserve will win",
            config.capacity,
            config.reserve,
            config.path,
            total_bytes,
        )
    return Limits(
        capacity_bytes=capacity,
        high_bytes=int(capacity * config.high_watermark),
        low_bytes=int(capacity * config.low_watermark),
        reserve_bytes=reserve,
        # A few inodes stay for the state of the cache and for whoever else works there.
        reserve_files=min(64, filesystem.f_files // 50),
    )
