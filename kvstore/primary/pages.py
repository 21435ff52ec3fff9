"""Allocation of shared memory at start, in huge pages where the kernel makes them.

A drive or a device transfers physically contiguous memory in one piece, and a huge page of 2 MiB is contiguous. Shared
memory gets huge pages, whatever the settings of its mount, by ``madvise(MADV_COLLAPSE)`` (Linux 6.1): one page of each
2 MiB is allocated, and the call replaces it by a huge page. That takes less time than to allocate 512 small pages. It
must precede everything that pins the memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Event
from typing import Final

from kvstore.errors import ConfigError
from kvstore.primary.memory import shortage, size_text

HUGE_BYTES: Final = 2 << 20
"""Length of a huge page on x86-64, and on ARM with small pages of 4 KiB."""

_MADV_COLLAPSE: Final = 25
_MAP_NORESERVE: Final = 0x4000
_MAP_FIXED: Final = 0x10
_STEP_BYTES: Final = 64 << 20
"""Memory allocated between two looks at the room that is left; about 10 ms."""

_THREADS_MAX: Final = 16
"""Threads beyond this number gain little, because they clear memory at the rate of its bus."""

_HUGE_SECONDS_MAX: Final = 10.0
_HUGE_SECONDS_PER_GIB_MAX: Final = 4.0
"""Time of all threads for huge pages, so that a start takes a known time. Where memory is fragmented, the kernel moves
other pages away: 1 to 3 s of CPU time a GiB were measured. Small pages take 0.3 s."""

_TRIES: Final = 3
"""Attempts to collapse a page that another CPU uses at the moment (EAGAIN)."""

_PROGRESS_S: Final = 5.0
_SECONDS_PER_GIB: Final = 0.12
"""CPU time, measured (Linux 6.18): see docs/disk.md. Several threads share it."""

logger = logging.getLogger("kvstore.primary.pages")

_libc = ctypes.CDLL(None, use_errno=True)  # Its calls release the GIL; those of the module mmap don't.
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def populate(fd: int, size_bytes: int, *, huge_pages: bool = True) -> int:
    """Allocate the memory of a file in memory, by several threads; contents are kept.

    Blocks until it is done, with a log line every few seconds.

    Args:
        fd: A memfd, or a file on a tmpfs.
        size_bytes: Length to allocate, at most that of the file.
        huge_pages: Whether to try huge pages. Small pages are allocated where the kernel refuses one.

    Returns:
        Bytes in huge pages.

    Raises:
        ConfigError: The memory of the machine, the container or the file system does not suffice.
    """
    missing_bytes = size_bytes - min(size_bytes, os.fstat(fd).st_blocks * 512)
    if text := shortage(missing_bytes, fd, tier_bytes=size_bytes):
        raise ConfigError(text)
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(_aligned(fd, size_bytes)) if huge_pages and size_bytes >= HUGE_BYTES else None
        work = _Population(fd, size_bytes, address)
        threads = min(_THREADS_MAX, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(threads, "kvstore-populate") as pool:
            futures = {pool.submit(work.step, at) for at in range(0, size_bytes, _STEP_BYTES)}
            try:
                while pending := wait(futures, _PROGRESS_S, FIRST_EXCEPTION).not_done:
                    done = [future.result() for future in futures - pending]
                    logger.info(
                        "Allocating the primary tier: %s of %s, %s of them in huge pages",
                        size_text(sum(each.done_bytes for each in done)),
                        size_text(size_bytes),
                        size_text(sum(each.huge_bytes for each in done)),
                    )
                huge_bytes = sum(future.result().huge_bytes for future in futures)
            finally:
                work.stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
    if huge_pages and huge_bytes < size_bytes:
        logger.warning(
            "%s of the primary tier of %s are in small pages: the kernel made %s. Loads and stores take more CPU time.",
            size_text(size_bytes - huge_bytes),
            size_text(size_bytes),
            work.refusal,
        )
    return huge_bytes


def described_allocation(size_bytes: int) -> str:
    """Return how long the allocation of a primary tier takes, as a sentence."""
    seconds = size_bytes / (1 << 30) * _SECONDS_PER_GIB
    return (
        f"Allocating a primary tier of {size_text(size_bytes)} takes about {seconds:.1f} s of CPU time at the start, "
        f"in huge pages ({_SECONDS_PER_GIB} s a GiB, by up to {_THREADS_MAX} threads)."
    )


@dataclass(frozen=True, slots=True)
class _Step:
    done_bytes: int
    huge_bytes: int


class _Population:
    """One allocation, made in steps by several threads. ``address``: of the aligned mapping; None for small pages."""

    def __init__(self, fd: int, size_bytes: int, address: int | None) -> None:
        self._fd = fd
        self._size_bytes = size_bytes
        self._address = address
        self._done_bytes = 0  # About, as threads add to it without a lock.
        self._huge_s = _HUGE_SECONDS_MAX + _HUGE_SECONDS_PER_GIB_MAX * size_bytes / (1 << 30)
        """Time left for huge pages, likewise."""
        self.refusal = "no huge ones"  # With the error of the last huge page that the kernel did not make.
        self.stopped = Event()

    def step(self, start: int) -> _Step:
        stop = min(start + _STEP_BYTES, self._size_bytes)
        # Beyond a container's limit, the kernel would kill the process instead of failing the call.
        missing_bytes = min(stop - start, self._size_bytes - self._done_bytes)
        if text := shortage(missing_bytes, self._fd, tier_bytes=self._size_bytes):
            raise ConfigError(text)
        huge_bytes = 0
        for at in range(start, stop, HUGE_BYTES):
            if self.stopped.is_set():
                break
            size = min(HUGE_BYTES, stop - at)
            try:
                if self._collapse(at):
                    huge_bytes += size
                else:
                    os.posix_fallocate(self._fd, at, size)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                    raise
                text = shortage(size, self._fd, tier_bytes=self._size_bytes) or (
                    f"A primary tier of {size_text(self._size_bytes)}: {error.strerror}. Make it smaller."
                )
                raise ConfigError(text) from error
        self._done_bytes += stop - start
        return _Step(stop - start, huge_bytes)

    def _collapse(self, at: int) -> bool:
        """Put 2 MiB into a huge page; False if the kernel refuses."""
        if (address := self._address) is None:
            return False
        began = time.monotonic()
        for _ in range(_TRIES):
            os.posix_fallocate(self._fd, at, mmap.PAGESIZE)  # Fails where an access would end the process by SIGBUS.
            is_made = bool(_libc.madvise(address + at, HUGE_BYTES, _MADV_COLLAPSE) == 0)
            error = 0 if is_made else ctypes.get_errno()
            if error != errno.EAGAIN:
                break
        if not is_made:
            self.refusal = f"no huge ones ({os.strerror(error)})"
        self._huge_s -= time.monotonic() - began
        if error == errno.EINVAL:
            self._address = None  # This kernel never makes one.
        elif self._huge_s < 0:
            self._address = None
            self.refusal = "the huge ones too slowly, because memory is fragmented or the processors are busy"
        return is_made


@contextlib.contextmanager
def _aligned(fd: int, size_bytes: int) -> Iterator[int | None]:
    """Map a file at a multiple of 2 MiB; yields its address, or None if that is impossible."""
    length = -(-size_bytes // HUGE_BYTES) * HUGE_BYTES
    reserved = _libc.mmap(None, length + HUGE_BYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    if reserved is None or reserved == ctypes.c_void_p(-1).value:
        yield None
        return
    try:
        address = -(-reserved // HUGE_BYTES) * HUGE_BYTES
        readable = mmap.PROT_READ | mmap.PROT_WRITE
        mapped = _libc.mmap(address, length, readable, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
        yield address if mapped == address else None
    finally:
        _libc.munmap(reserved, length + HUGE_BYTES)
