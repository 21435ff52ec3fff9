"""The disk: every system call of disk backends, one plain method each.

No code above this module calls the operating system on a path or descriptor of the medium, so tests can replace it
with a failing disk. Names are relative to an open directory. No method follows a symbolic link unless documented.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

_T = TypeVar("_T")

_FILE_MODE: Final = 0o600
_DIRECTORY_MODE: Final = 0o700
"""Modes of new files and directories."""


class OsDisk:
    """System calls. Stateless and thread-safe; every method may block.

    All methods raise the system call's ``OSError``. Python repeats interrupted calls; short transfers are not completed
    (see :mod:`kvstore.diskio.transfers`). New files have mode 0600, new directories 0700.
    """

    def syscall(self, op: str, function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T:
        """Make one system call of kind ``op``, such as ``"preadv"``. Fault injection overrides this method."""
        return function(*args, **kwargs)

    def awaited_syscalls(
        self, op: str, subjects: Sequence[Any], function: Callable[[Sequence[int]], Awaitable[list[int]]]
    ) -> Awaitable[list[int]]:
        """Make a batch of system calls of one kind from the event loop, for io_uring. Fault injection overrides this.

        ``function``: makes the calls at the given positions; returns the result of each, or minus its errno.
        """
        return function(range(len(subjects)))

    def open_root(self, path: str) -> int:
        """Open a directory by its path, following links, because the configured path is trusted."""
        return self.syscall("open", os.open, path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def open_dir(self, name: str, dir_fd: int) -> int:
        """Open a directory in a directory; ``NotADirectoryError`` or ELOOP if it is not a directory."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        return self.syscall("open", os.open, name, flags, dir_fd=dir_fd)

    def open_file(self, name: str, flags: int, dir_fd: int) -> int:
        """Open a file in a directory. Does not wait for the other end of a FIFO, and does not follow links."""
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return self.syscall("open", os.open, name, flags, _FILE_MODE, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        """Close a descriptor. Never retry: the descriptor is closed even if the call fails."""
        self.syscall("close", os.close, fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read into buffers, in order; return the number of bytes read, which may be fewer than requested."""
        return self.syscall("preadv", os.preadv, fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        """Write buffers, in order; return the number of bytes written, which may be fewer than given."""
        return self.syscall("pwritev", os.pwritev, fd, buffers, offset)

    def supports_nowait(self, fd: int) -> bool:
        """Return whether a read can report that it would block. Also makes the file blocking for all other calls."""
        # Files are opened non-blocking because of FIFOs; io_uring would not wait for I/O on such files.
        os.set_blocking(fd, True)
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            try:
                os.preadv(fd, [page], 0, os.RWF_NOWAIT)
            except OSError as error:
                return error.errno != errno.EOPNOTSUPP
        return True

    def is_direct(self, fd: int) -> bool:
        """Return whether a file is read and written with direct I/O."""
        return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)

    def ftruncate(self, fd: int, size_bytes: int) -> None:
        """Set the length of a file."""
        self.syscall("ftruncate", os.ftruncate, fd, size_bytes)

    def fdatasync(self, fd: int) -> None:
        """Flush the content of a file to the device, so that it survives a power cut."""
        self.syscall("fdatasync", os.fdatasync, fd)

    def rename(self, name: str, new_name: str, dir_fd: int) -> None:
        """Rename a file within a directory, replacing any file that has the new name."""
        self.syscall("rename", os.rename, name, new_name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def unlink(self, name: str, dir_fd: int) -> None:
        """Remove a file's name."""
        self.syscall("unlink", os.unlink, name, dir_fd=dir_fd)

    def mkdir(self, name: str, dir_fd: int | None = None) -> None:
        """Create a directory in a directory, or by its path."""
        self.syscall("mkdir", os.mkdir, name, _DIRECTORY_MODE, dir_fd=dir_fd)

    def rmdir(self, name: str, dir_fd: int) -> None:
        """Remove an empty directory."""
        self.syscall("rmdir", os.rmdir, name, dir_fd=dir_fd)

    def fstat(self, fd: int) -> os.stat_result:
        """Return the status of an open file."""
        return self.syscall("fstat", os.fstat, fd)

    def stat(self, name: str, dir_fd: int) -> os.stat_result:
        """Return the status of a name in a directory, without following a link."""
        return self.syscall("stat", os.stat, name, dir_fd=dir_fd, follow_symlinks=False)

    def statvfs(self, fd: int) -> os.statvfs_result:
        """Return the status of an open file's filesystem."""
        return self.syscall("statvfs", os.fstatvfs, fd)

    def scandir(self, dir_fd: int) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
        """Iterate over a directory. It moves the descriptor's position, so open a new descriptor for each scan."""
        return self.syscall("scandir", os.scandir, dir_fd)

    def flock(self, fd: int, operation: int) -> None:
        """Lock or unlock; ``BlockingIOError`` if another holds it and ``operation`` has ``LOCK_NB``."""
        self.syscall("flock", fcntl.flock, fd, operation)


def bare(error: OSError) -> OSError:
    """Return an error without its traceback, whose frames would keep buffers alive."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)
