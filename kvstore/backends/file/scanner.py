"""Scanning directories: what blocks there are, what they take, and what dead writers left behind."""

from __future__ import annotations

import contextlib
import errno
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.backends.file.counters import Counters
from kvstore.backends.file.layout import (
    QUARANTINE_DIR,
    is_namespace,
    is_quarantined,
    is_shard,
    key_of,
    shard_name,
    shard_of,
    tmp_writer,
    writer_of,
)
from kvstore.backends.file.root import Root
from kvstore.backends.file.space import charge
from kvstore.backends.file.writers import holds_lock, is_alive
from kvstore.diskio import CancelFlag, OsDisk
from kvstore.types import BlockKey

__all__ = ["NamespaceScan", "Scanner", "ShardScan"]


@dataclass(slots=True, eq=False)
class ShardScan:
    """One shard of our namespace, and what was found in it.

    Attributes:
        shard: Which one.
        blocks: Key, charge and last change of each block that can be read.
        size_bytes: Charge of everything that counts, blocks or not.
        files: How many files that is.
        is_complete: Whether the scan got through.
    """

    shard: int
    blocks: list[tuple[BlockKey, int, float]] = field(default_factory=list)
    size_bytes: int = 0
    files: int = 0
    is_complete: bool = False


@dataclass(slots=True, eq=False)
class NamespaceScan:
    """Another namespace (or, with an empty name, the quarantine), and what it takes.

    Attributes:
        name: Its directory.
        size_bytes: Charge of all its files.
        files: How many.
        is_complete: Whether the scan got through.
    """

    name: str
    size_bytes: int = 0
    files: int = 0
    is_complete: bool = False


class Scanner:
    """Scans; its batch functions run in a ``FileEngine``. Made anew for each scan, as it remembers who is alive.

    Names that are not ours are passed over. Of ours it removes unpublished files of dead writers and files too short
    to be a record, which only a power cut leaves.

    Args:
        disk: What to call the system with.
        root: The root directory.
        namespace_fd: Directory of our namespace.
        counters: Where to count.
        record_bytes_min: Shortest record of our namespace.
    """

    def __init__(
        self, disk: OsDisk, root: Root, namespace_fd: int, counters: Counters, *, record_bytes_min: int
    ) -> None:
        self._disk = disk
        self._root = root
        self._namespace_fd = namespace_fd
        self._counters = counters
        self._record_bytes_min = record_bytes_min
        self._alive: dict[str, bool] = {}

    def scan_shards(self, scans: Sequence[ShardScan], cancelled: CancelFlag) -> None:
        """Scan some shards of our namespace."""
        for scan in scans:
            if cancelled.is_set:
                break
            try:
                self._scan_shard(shard_name(scan.shard), self._namespace_fd, scan, scan)
                scan.is_complete = True
            except OSError:
                self._counters.add("scan_errors")

    def scan_namespaces(self, scans: Sequence[NamespaceScan], cancelled: CancelFlag) -> None:
        """Count what some other namespaces take."""
        for scan in scans:
            if cancelled.is_set:
                break
            try:
                if scan.name:
                    self._scan_namespace(scan)
                else:
                    self._scan_quarantine(scan)
                scan.is_complete = True
            except OSError:
                self._counters.add("scan_errors")

    def other_namespaces(self, own: str) -> list[NamespaceScan]:
        """Return the other namespaces of the root."""
        return [NamespaceScan(name) for name in self._names(self._root.fd, is_namespace) if name != own]

    def sweep_state(self) -> list[str]:
        """Remove what dead writers left in the state directory; return the writers found dead."""
        dead = []
        for name in self._names(self._root.state_fd, _has_writer):
            writer = writer_of(name)
            if writer is None:
                self._sweep(name, self._root.state_fd)
            elif not holds_lock(self._disk, self._root.state_fd, writer, bury=True):
                dead.append(writer)
        return dead

    def find_dead(self, writers: Sequence[str]) -> list[str]:
        """Return those of the writers that are no more."""
        return [writer for writer in writers if not holds_lock(self._disk, self._root.state_fd, writer)]

    def _scan_namespace(self, scan: NamespaceScan) -> None:
        try:
            fd = self._disk.open_dir(scan.name, self._root.fd)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            for name in self._names(fd, is_shard):
                self._scan_shard(name, fd, scan, None)
            for name in self._names(fd, _has_writer):
                self._sweep(name, fd)
        finally:
            self._disk.close(fd)

    def _scan_quarantine(self, scan: NamespaceScan) -> None:
        try:
            fd = self._disk.open_dir(QUARANTINE_DIR, self._root.state_fd)
        except FileNotFoundError:
            return
        try:
            for name in self._names(fd, is_quarantined):
                with contextlib.suppress(FileNotFoundError):
                    scan.size_bytes += charge(self._disk.stat(name, fd).st_size)
                    scan.files += 1
        finally:
            self._disk.close(fd)

    def _scan_shard(
        self, name: str, namespace_fd: int, total: ShardScan | NamespaceScan, own: ShardScan | None
    ) -> None:
        try:
            fd = self._disk.open_dir(name, namespace_fd)
        except OSError as error:
            # Not made yet, or something planted in its place.
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return
            raise
        try:
            with self._disk.scandir(fd) as entries:
                for entry in entries:
                    self._look_at(entry.name, fd, total, own)
        finally:
            self._disk.close(fd)

    def _look_at(self, name: str, fd: int, total: ShardScan | NamespaceScan, own: ShardScan | None) -> None:
        key = key_of(name)
        if key is None and not self._is_live_tmp(name, fd):
            return
        try:
            status = self._disk.stat(name, fd)
        except FileNotFoundError:
            return
        if not stat.S_ISREG(status.st_mode) or status.st_uid != self._root.owner_uid:
            self._counters.add("foreign_objects")
            return
        if key is not None and own is not None:
            if status.st_size < self._record_bytes_min:
                self._disk.unlink(name, fd)
                self._counters.add("swept_torn")
                return
            if shard_of(key, self._root.fanout) == own.shard:
                own.blocks.append((key, charge(status.st_size), status.st_mtime))
        total.size_bytes += charge(status.st_size)
        total.files += 1

    def _is_live_tmp(self, name: str, fd: int) -> bool:
        """Tell whether this is an unpublished file of a living writer; remove it if its writer is dead."""
        return tmp_writer(name) is not None and not self._sweep(name, fd)

    def _sweep(self, name: str, fd: int) -> bool:
        writer = tmp_writer(name)
        if writer is None or self._is_alive(writer):
            return False
        with contextlib.suppress(FileNotFoundError):
            self._disk.unlink(name, fd)
            self._counters.add("swept_tmp")
        return True

    def _is_alive(self, writer: str) -> bool:
        alive = self._alive.get(writer)
        if alive is None:
            alive = self._alive[writer] = is_alive(self._disk, self._root.state_fd, writer)
        return alive

    def _names(self, fd: int, wanted: Callable[[str], bool]) -> list[str]:
        """Return the wanted names in a directory; whatever else lies there costs no memory."""
        # The position of a descriptor is shared by all who scan it, so the directory is opened once more.
        own_fd = self._disk.open_dir(".", fd)
        try:
            with self._disk.scandir(own_fd) as entries:
                return [entry.name for entry in entries if wanted(entry.name)]
        finally:
            self._disk.close(own_fd)


def _has_writer(name: str) -> bool:
    return writer_of(name) is not None or tmp_writer(name) is not None
