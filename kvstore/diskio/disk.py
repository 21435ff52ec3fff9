"""The disk: every system call of disk backends, one plain method each.

Nothing above this module calls the operating system on a path or descriptor of the medium, so that tests
can replace it by a disk that fails. Names are relative to an open directory, and no method follows a symbolic
link unless it says so.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

__all__ = ["OsDisk", "bare"]

_T = TypeVar("_T")

_FILE_MODE: Final = 0o600
_DIRECTORY_MODE: Final = 0o700
"""Of files and directories that are made."""


class OsDisk:
    """System calls. Stateless and thread-safe; every method may block.

    All methods raise ``OSError`` as the system call did. Python repeats interrupted calls; short transfers are not
    completed (see :mod:`kvstore.diskio.transfers`). New files have mode 0600, directories 0700.
    """

    def syscall(self, op: str, function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T:
        """Make one system call of kind ``op``, such as ``"preadv"``: the seam that fault injection overrides."""
        return function(*args, **kwargs)

    async def awaited_syscalls(
        self, op: str, subjects: Sequence[Any], function: Callable[[Sequence[int]], Awaitable[list[int]]]
    ) -> list[int]:
        """Make a batch of system calls of one kind from the event loop: the same seam for io_uring.

        Args:
            op: Name of the kind of call.
            subjects: Name or descriptor of each.
            function: Makes the calls at the given positions; returns the result of each, or minus its errno.
        """
        return await function(range(len(subjects)))

    def open_root(self, path: str) -> int:
        """Open a directory by its path, following links: what an operator configured is trusted."""
        return self.syscall("open", os.open, path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def open_dir(self, name: str, dir_fd: int) -> int:
        """Open a directory in a directory; ``NotADirectoryError`` or ELOOP if the name is something else."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        return self.syscall("open", os.open, name, flags, dir_fd=dir_fd)

    def open_file(self, name: str, flags: int, dir_fd: int) -> int:
        """Open a file in a directory; never waits for the other end of a FIFO, never follows a link."""
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return self.syscall("open", os.open, name, flags, _FILE_MODE, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        """Close a descriptor. Never repeated: it is gone even if the call fails."""
        self.syscall("close", os.close, fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read into buffers, one after the other; return how many bytes, which may be fewer than asked for."""
        return self.syscall("preadv", os.preadv, fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        """Write buffers, one after the other; return how many bytes, which may be fewer than given."""
        return self.syscall("pwritev", os.pwritev, fd, buffers, offset)

    def tells_waiting(self, fd: int) -> bool:
        """Return whether a read can report that it would wait. From now on other calls on the file do wait."""
        # Files are opened non-blocking because of FIFOs; io_uring takes that for "never waits".
        os.set_blocking(fd, True)
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            try:
                os.preadv(fd, [page], 0, os.RWF_NOWAIT)
            except OSError as error:
                return error.errno != errno.EOPNOTSUPP
        return True

    def ftruncate(self, fd: int, size_bytes: int) -> None:
        """Set the length of a file."""
        self.syscall("ftruncate", os.ftruncate, fd, size_bytes)

    def fdatasync(self, fd: int) -> None:
        """Wait until the bytes of a file would survive a power cut."""
        self.syscall("fdatasync", os.fdatasync, fd)

    def rename(self, name: str, new_name: str, dir_fd: int) -> None:
        """Rename within a directory, replacing what has the new name."""
        self.syscall("rename", os.rename, name, new_name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def unlink(self, name: str, dir_fd: int) -> None:
        """Remove a file's name."""
        self.syscall("unlink", os.unlink, name, dir_fd=dir_fd)

    def mkdir(self, name: str, dir_fd: int | None = None) -> None:
        """Make a directory in a directory, or by its path."""
        self.syscall("mkdir", os.mkdir, name, _DIRECTORY_MODE, dir_fd=dir_fd)

    def rmdir(self, name: str, dir_fd: int) -> None:
        """Remove an empty directory."""
        self.syscall("rmdir", os.rmdir, name, dir_fd=dir_fd)

    def fstat(self, fd: int) -> os.stat_result:
        """Describe an open file."""
        return self.syscall("fstat", os.fstat, fd)

    def stat(self, name: str, dir_fd: int) -> os.stat_result:
        """Describe what has a name, not what it links to."""
        return self.syscall("stat", os.stat, name, dir_fd=dir_fd, follow_symlinks=False)

    def statvfs(self, fd: int) -> os.statvfs_result:
        """Describe the filesystem of an open file."""
        return self.syscall("statvfs", os.fstatvfs, fd)

    def scandir(self, dir_fd: int) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
        """Iterate over a directory. The descriptor's position is used: open one for each scan."""
        return self.syscall("scandir", os.scandir, dir_fd)

    def flock(self, fd: int, operation: int) -> None:
        """Lock or unlock; ``BlockingIOError`` if another holds it and ``operation`` has ``LOCK_NB``."""
        self.syscall("flock", fcntl.flock, fd, operation)


def bare(error: OSError) -> OSError:
    """Return an error without its traceback, whose frames would keep buffers in use alive."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)
