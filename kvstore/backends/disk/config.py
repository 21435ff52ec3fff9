"""Configuration of the disk backend."""

from __future__ import annotations

from typing import ClassVar, Literal

from kvstore.config import Capacity, TierConfig, check_field
from kvstore.diskio import EngineChoice
from kvstore.errors import ConfigError

_PATHS_MAX = 64


class DiskConfig(TierConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Blocks in preallocated segments on one or several drives, shared by all engines that name the same directories.

    Raises:
        ConfigError: A value is out of range.
    """

    aliases: ClassVar[dict[str, str]] = {"paths": "path", "root_dir": "path", "max_bytes": "capacity"}

    path: str | list[str]
    """The root directory, or a list of them, one per drive, over which segments are spread. A directory is made (mode
    0700) if only its last component is missing."""
    capacity: Capacity
    """Maximum total size of all segments in these roots, across all namespaces and engines; a size, or a share of each
    filesystem such as ``"80%"``."""
    # ext4 reserves the same share for root. Fuller filesystems slow down, and other programs on them start to fail.
    reserve: Capacity = Capacity("5%")
    """Space of each filesystem to keep free, whatever else fills the filesystem; a size or a share."""
    # A lost block costs one prefill; fdatasync adds the device's latency to every batch.
    durability: Literal["none", "data"] = "none"
    """Failures that a stored block survives. ``"none"``: a crash of the process (after a power cut the block may be a
    miss); ``"data"``: also a power cut."""
    direct: Literal["auto", "on", "off"] = "auto"
    """Direct I/O. ``"auto"``: if the filesystem supports it; ``"on"``: required at start; ``"off"``: never."""
    engine: EngineChoice = "auto"
    """I/O engine. ``"auto"`` is io_uring where this kernel and container allow it, else threads."""
    # Enough to fill an NVMe drive's queue with large blocks; more threads only contend for the GIL.
    threads: int = 16  # Number of I/O threads without io_uring.

    def __post_init__(self) -> None:
        super().__post_init__()
        named = self.paths
        check_field(0 < len(named) <= _PATHS_MAX, "path", self.path, f"1 to {_PATHS_MAX} directories")
        check_field(all(path and "\0" not in path for path in named), "path", self.path, "names of directories")
        for path in named:
            if named.count(path) > 1:
                raise ConfigError(f"{path!r} is listed twice in 'path'. Remove one.")
        check_field(1 <= self.threads <= 256, "threads", self.threads, "1 to 256")

    @property
    def paths(self) -> list[str]:
        return [self.path] if isinstance(self.path, str) else list(self.path)
