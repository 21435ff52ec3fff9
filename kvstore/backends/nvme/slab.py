"""A slab: one preallocated file of equal slots on one drive, held by one engine. All methods block."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, Literal

from kvstore.backends.nvme.layout import (
    DATA_OFFSET,
    PAGE,
    SLAB_NAME,
    SLAB_VERSION,
    Superblock,
    decode_superblock,
    encode_superblock,
)
from kvstore.backends.nvme.pages import aligned_buffer
from kvstore.config import Capacity
from kvstore.diskio import OsDisk
from kvstore.errors import BackendUnavailableError, ConfigError, LockedError, NoSpaceError

__all__ = ["Slab"]

_log = logging.getLogger("kvstore.backends.nvme")

_LOCK_RETRY_S: Final = 0.05
"""Pause between two tries for the lock; the I/O of a killed engine ends within milliseconds."""

_NO_FALLOCATE: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class Slab:
    """The file, its lock and its superblock.

    The lock is on the very file that the I/O goes through: the kernel lets go of it only when the last operation of a
    killed engine has ended, so that nothing of it can land in a slot that has been given to another block.

    Args:
        disk: What to call the system with.
        path: Its directory.

    Attributes:
        path: Its directory.
        fd: The file, open for direct I/O where the filesystem can; -1 while it is closed.
        dir_fd: Its directory, open.
        superblock: What it says of itself; what was said before it was opened is in ``found``.
        found: The superblock as the last engine left it; None if the slab begins anew.
    """

    def __init__(self, disk: OsDisk, path: str) -> None:
        self.path = path
        self.fd = -1
        self.dir_fd = -1
        self.superblock = Superblock(SLAB_VERSION, b"", 0, 0, 0, False)
        self.found: Superblock | None = None
        self._disk = disk

    def open(self, lock_timeout_s: float) -> None:
        """Open or make the file and take its lock, waiting for it if need be.

        Raises:
            ConfigError: The directory can't be used.
            LockedError: Another engine has it.
            BackendUnavailableError: The disk fails.
        """
        with self._explained("opening it"):
            self.dir_fd = self._open_directory()
            self.fd = self._open_file()
            status = self._disk.fstat(self.fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise ConfigError(f"{self._name} is not a file of ours. Move it away, or give another path.")
            deadline = time.monotonic() + lock_timeout_s
            while not self._try_lock():
                if time.monotonic() >= deadline:
                    raise LockedError(
                        f"{self._name} is in use by another engine. A slab belongs to one engine at a time: stop that "
                        "one, or give each engine 'paths' of its own.",
                        backend="nvme",
                    )
                time.sleep(_LOCK_RETRY_S)

    def enter(
        self, slot_bytes: int, capacity: Capacity, shares: int, unknown_format: Literal["refuse", "fresh"]
    ) -> None:
        """Read or make the superblock, bring the file to its length, begin an epoch.

        Args:
            slot_bytes: Length of a slot.
            capacity: As it was configured.
            shares: Number of paths that an absolute capacity is divided by.
            unknown_format: What to do with a format that is not known.

        Raises:
            ConfigError: The capacity is less than one slot, or the file is not ours or of an unknown format.
            NoSpaceError: The filesystem has not got the room.
            BackendUnavailableError: The disk fails.
        """
        with self._explained("making room"):
            slots = self._wanted_slots(slot_bytes, capacity, shares)
            found = self._read_superblock(unknown_format)
            if found is not None and found.slot_bytes != slot_bytes:
                _log.warning(
                    "%s has slots of %d bytes, and blocks need %d now: it begins anew",
                    self._name,
                    found.slot_bytes,
                    slot_bytes,
                )
                found = None
            self.found = found
            slab_id = found.slab_id if found else secrets.token_bytes(16)
            epoch = found.epoch + 1 if found else 1
            self.superblock = Superblock(SLAB_VERSION, slab_id, slot_bytes, slots, epoch, False)
            self._resize()
            self.write_superblock()

    def write_superblock(self, *, clean: bool = False) -> None:
        """Write the superblock, both copies, one after the other, so that one of them is whole at any time."""
        self.superblock = replace(self.superblock, clean=clean)
        page = aligned_buffer(PAGE)
        page[:] = encode_superblock(self.superblock)
        for offset in (0, PAGE):
            if self._disk.pwritev(self.fd, [page], offset) != PAGE:
                raise OSError(errno.EIO, "the superblock was written in part")
            self._disk.fdatasync(self.fd)

    def offset_of(self, slot: int) -> int:
        """Return where a slot begins in the file."""
        return DATA_OFFSET + slot * self.superblock.slot_bytes

    def check(self) -> None:
        """Raise ``OSError`` if the superblock can't be read."""
        if self._disk.preadv(self.fd, [aligned_buffer(PAGE)], 0) != PAGE:
            raise OSError(errno.EIO, "the slab is cut off")

    def close(self) -> None:
        """Let go of the file, its lock and its directory. Idempotent."""
        for name in ("fd", "dir_fd"):
            fd = getattr(self, name)
            if fd >= 0:
                setattr(self, name, -1)
                with contextlib.suppress(OSError):
                    self._disk.close(fd)

    @property
    def _name(self) -> str:
        return f"{self.path.rstrip('/')}/{SLAB_NAME}"

    def _open_directory(self) -> int:
        try:
            return self._disk.open_root(self.path)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                self._disk.make_root(self.path)
            return self._disk.open_root(self.path)

    def _open_file(self) -> int:
        flags = os.O_RDWR | os.O_CREAT
        try:
            return self._disk.open_file(SLAB_NAME, flags | os.O_DIRECT, self.dir_fd)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _log.warning("%s refuses direct I/O; reading and writing through the page cache", self.path)
            return self._disk.open_file(SLAB_NAME, flags, self.dir_fd)

    def _try_lock(self) -> bool:
        try:
            self._disk.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _wanted_slots(self, slot_bytes: int, capacity: Capacity, shares: int) -> int:
        filesystem = self._disk.statvfs(self.fd)
        total_bytes = filesystem.f_blocks * filesystem.f_frsize
        size_bytes = capacity.resolve(total_bytes) // (1 if capacity.percent is not None else shares)
        slots = (size_bytes - DATA_OFFSET) // slot_bytes
        if slots < 1:
            raise ConfigError(
                f"'capacity' is {str(capacity)!r}, which leaves {size_bytes} bytes for {self.path!r}, and one block "
                f"takes {slot_bytes + DATA_OFFSET}. Give room for many blocks, such as '100GiB'."
            )
        return slots

    def _read_superblock(self, unknown_format: str) -> Superblock | None:
        size_bytes = self._disk.fstat(self.fd).st_size
        page = aligned_buffer(2 * PAGE)
        got = self._disk.preadv(self.fd, [page], 0) if size_bytes else 0
        copies = [decode_superblock(bytes(page[at : at + PAGE])) for at in (0, PAGE) if got >= at + PAGE]
        found = max((copy for copy in copies if copy), key=lambda s: (s.epoch, s.clean), default=None)
        if found is None:
            # All zeros: made and not finished. Otherwise damaged, if it begins like a slab, or somebody else's.
            magic = bytes(page[:8])
            if any(page[:got]) and magic != encode_superblock(self.superblock)[:8] and unknown_format == "refuse":
                raise ConfigError(
                    f"{self._name} is there and is not a slab. Move it away, give another path, or set "
                    "'unknown_format': 'fresh' to overwrite it."
                )
            if any(page[:got]):
                _log.warning("the superblock of %s is damaged: it begins anew", self._name)
            return None
        if found.version != SLAB_VERSION:
            if unknown_format == "refuse":
                raise ConfigError(
                    f"{self._name} has format version {found.version}; this release of kvstore knows {SLAB_VERSION}. "
                    "Use the release that made it, give another path, or set 'unknown_format': 'fresh' to throw away "
                    "the blocks in it."
                )
            _log.warning("%s has the unknown format version %d: it begins anew", self._name, found.version)
            return None
        return found

    def _resize(self) -> None:
        size_bytes = self._disk.fstat(self.fd).st_size
        wanted = self.superblock.size_bytes
        if size_bytes > wanted:
            self._disk.ftruncate(self.fd, wanted)
        try:
            # Also where the length is right: what a crash left unreserved is reserved now, the rest costs nothing.
            self._disk.syscall("fallocate", os.posix_fallocate, self.fd, 0, wanted)
        except OSError as error:
            if error.errno in _NO_FALLOCATE:
                _log.warning("%s can't reserve space (%s); stores fail when the disk is full", self.path, error)
                self._disk.ftruncate(self.fd, wanted)
                return
            # A filesystem may keep what it had reserved when it failed: give it back.
            self._give_back(size_bytes)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            filesystem = self._disk.statvfs(self.fd)
            raise NoSpaceError(
                f"{self.path!r} has no room for {wanted - size_bytes} more bytes ({error.strerror}; "
                f"{filesystem.f_bavail * filesystem.f_frsize} are free). Lower 'capacity' or free some space.",
                backend="nvme",
            ) from error

    def _give_back(self, size_bytes: int) -> None:
        with contextlib.suppress(OSError):
            if self.found is None:
                self._disk.ftruncate(self.fd, 0)
                self._disk.unlink(SLAB_NAME, self.dir_fd)
            else:
                self._disk.ftruncate(self.fd, size_bytes)

    @contextlib.contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except NotADirectoryError as error:
            raise ConfigError(f"{self.path!r} is not a directory. Give the directory of a drive.") from error
        except FileNotFoundError as error:
            raise ConfigError(f"{self.path!r} can't be made: its parent is missing. Make it or correct it.") from error
        except OSError as error:
            raise BackendUnavailableError(
                f"{doing} failed for {self._name}: {error.strerror or error}. Check the disk and its permissions.",
                backend="nvme",
            ) from error
