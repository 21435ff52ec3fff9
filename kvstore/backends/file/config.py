"""Configuration of the file backend."""

from __future__ import annotations

from typing import ClassVar, Literal

from kvstore.config import ByteSize, Capacity, Seconds, TierConfig, check_field
from kvstore.diskio import EngineChoice

__all__ = ["FileConfig"]

_MIB = 1024**2


class FileConfig(TierConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Blocks as files in a directory of a local (or well-behaved network) filesystem.

    Attributes:
        path: The root directory. It is made (mode 0700) if only its last component is missing.
        capacity: Most bytes that all blocks of this root may take, whatever their namespace and whichever process
            wrote them; a size, or a share of the filesystem such as ``"80%"``.
        reserve: Bytes of the filesystem that stay free whoever fills the rest; a size or a share.
        high_watermark: Share of the capacity at which eviction starts, in the background.
        low_watermark: Share of the capacity down to which it goes on.
        eviction: Policy that chooses the blocks.
        durability: What a stored block survives: ``"none"``: a crash of the process (a power cut may lose it, and it
            is then a miss); ``"data"``: its bytes are on the device before it gets a name; ``"full"``: its name too.
        shared: Whether several engines of the same namespace use this root at once. All of them have to say so.
        direct: Direct I/O: ``"auto"`` where the filesystem can, ``"on"`` refuses to start where it can't, ``"off"``.
        engine: What does the I/O: ``"auto"`` is io_uring where this kernel and container allow it, else threads.
        threads: Threads that do the I/O, and so without io_uring the most system calls in flight.
        snapshot_interval: Time between two snapshots of the index; 0 writes one at close only.
        rescan_interval: Time between two scans of a shared root for what others stored.
        lock_timeout: How long to wait at start for an engine that still holds the namespace.
        quarantine_blocks: Damaged blocks that are kept for inspection; 0 deletes them at once.
        quarantine_bytes: Bytes that these may take.

    Raises:
        ConfigError: A value is out of range.
    """

    aliases: ClassVar[dict[str, str]] = {"root_dir": "path", "max_bytes": "capacity"}

    path: str
    capacity: Capacity
    # The share that ext4 keeps for root. Above it filesystems slow down and everything else on the disk starts to fail.
    reserve: Capacity = Capacity("5%")
    # Eviction starts while there is still room for what is stored meanwhile, so that stores don't wait for it.
    high_watermark: float = 0.95
    # One round frees a twentieth of the capacity: rare enough to be cheap, small enough to keep what is useful.
    low_watermark: float = 0.90
    eviction: Literal["lru", "s3fifo"] = "lru"
    # A lost block costs one prefill; fdatasync costs every store the latency of the device.
    durability: Literal["none", "data", "full"] = "none"
    shared: bool = False
    direct: Literal["auto", "on", "off"] = "auto"
    engine: EngineChoice = "auto"
    # Fills the queue of an NVMe drive with large blocks; more threads fight for the GIL and win nothing.
    threads: int = 16
    # Only speed depends on it: what a snapshot does not know is found by the scan. Five minutes cost next to nothing.
    snapshot_interval: Seconds = Seconds(300)
    # Foreign blocks are found by lookups at once; the scan is for eviction, which needs them by the hour.
    rescan_interval: Seconds = Seconds(600)
    # A killed engine needs a moment to die and let go of its locks.
    lock_timeout: Seconds = Seconds(5)
    # Enough to see what went wrong, and never a burden.
    quarantine_blocks: int = 16
    quarantine_bytes: ByteSize = ByteSize(256 * _MIB)

    def __post_init__(self) -> None:
        """Turn text into values and check ranges."""
        super().__post_init__()
        check_field(bool(self.path) and "\0" not in self.path, "path", self.path, "the name of a directory")
        check_field(0 < self.high_watermark <= 1, "high_watermark", self.high_watermark, "above 0 and at most 1")
        check_field(
            0 < self.low_watermark <= self.high_watermark,
            "low_watermark",
            self.low_watermark,
            f"above 0 and at most high_watermark ({self.high_watermark})",
        )
        check_field(1 <= self.threads <= 256, "threads", self.threads, "1 to 256")
        check_field(0 <= self.quarantine_blocks <= 10000, "quarantine_blocks", self.quarantine_blocks, "0 to 10000")
        for name in ("snapshot_interval", "rescan_interval"):
            value = getattr(self, name)
            check_field(value == 0 or value >= 1, name, value, "0 or at least 1 second")
        check_field(self.lock_timeout <= 300, "lock_timeout", self.lock_timeout, "at most 5 minutes")
