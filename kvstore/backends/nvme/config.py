"""Configuration of the nvme backend."""

from __future__ import annotations

from typing import ClassVar, Literal

from kvstore.config import Capacity, Seconds, TierConfig, check_field
from kvstore.diskio.rings import EngineChoice

__all__ = ["NvmeConfig"]

_PATHS_MAX = 64


class NvmeConfig(TierConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Blocks in one preallocated file per drive, for one engine alone.

    Attributes:
        paths: Directory of each drive, one or several; blocks are spread over them. A directory is made (mode 0700) if
            only its last component is missing.
        capacity: Bytes that are reserved, on all paths together, when the files are made; a share such as ``"80%"`` is
            of each filesystem. Changing it grows or shrinks the files at the next start.
        engine: What does the I/O: ``"io_uring"``, ``"threads"``, or ``"auto"``: io_uring where it is allowed.
        threads: Threads that do the I/O where there is no io_uring.
        eviction: Policy that chooses what makes room.
        durability: What a stored block survives: ``"none"``: a crash of the process (a power cut may lose it, and it is
            then a miss); ``"data"``: a power cut.
        snapshot_interval: Time between two snapshots of the index; 0 writes one at close only.
        lock_timeout: How long to wait at start for an engine that still holds a path.
        unknown_format: What to do with a file of a format that this release does not know: ``"refuse"`` to start, or
            begin ``"fresh"``, which throws away the blocks in it.

    Raises:
        ConfigError: A value is out of range.
    """

    aliases: ClassVar[dict[str, str]] = {"path": "paths", "root_dir": "paths", "max_bytes": "capacity"}

    paths: str | list[str]
    capacity: Capacity
    engine: EngineChoice = "auto"
    # Fills the queue of an NVMe drive with large blocks; more threads fight for the GIL and win nothing.
    threads: int = 16
    eviction: Literal["lru", "s3fifo"] = "lru"
    # A lost block costs one prefill; fdatasync costs every batch the latency of the device.
    durability: Literal["none", "data"] = "none"
    # What a crash leaves stale is found by the scan at start, which the snapshot only has to make pleasant.
    snapshot_interval: Seconds = Seconds(300)
    # A killed engine needs a moment to die, its I/O to end and its lock to go.
    lock_timeout: Seconds = Seconds(5)
    unknown_format: Literal["refuse", "fresh"] = "refuse"

    def __post_init__(self) -> None:
        """Turn text into values and check ranges."""
        super().__post_init__()
        named = self.path_list
        check_field(0 < len(named) <= _PATHS_MAX, "paths", self.paths, f"1 to {_PATHS_MAX} directories")
        check_field(all(path and "\0" not in path for path in named), "paths", self.paths, "names of directories")
        check_field(len(set(named)) == len(named), "paths", self.paths, "each directory once")
        check_field(1 <= self.threads <= 256, "threads", self.threads, "1 to 256")

    @property
    def path_list(self) -> list[str]:
        """The directories, also if only one was given."""
        return [self.paths] if isinstance(self.paths, str) else list(self.paths)
