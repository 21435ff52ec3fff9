"""The memory of the primary tier: one shared, page-aligned mapping, divided into rows of equal length, the slots.

A region made by kvstore is an anonymous file in memory (``memfd``). It has no name in /dev/shm, so the kernel frees it
when the last process that uses it exits or crashes. Other processes of the same user map it by its path below /proc, or
by an inherited descriptor.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import threading
import weakref
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.primary.memory import require_room
from kvstore.primary.pages import populate as populate_file

PAGE_BYTES = mmap.PAGESIZE
"""Alignment of rows, as required by direct I/O and by registration of pages."""

Rows: TypeAlias = npt.NDArray[np.uint8]
"""Slots as an array of shape ``(slots, slot bytes)``."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

logger = logging.getLogger("kvstore.primary.region")


class Region:
    """Slots of equal length in memory that several processes can map.

    Made by :meth:`create`, :meth:`attach` or :meth:`wrap`. Slots are not locked; the owner coordinates access (see
    ``PrimaryTier``). :meth:`close` may be called from any thread.

    Attributes:
        slots: Number of rows.
        slot_bytes: Length of a row in bytes; row ``i`` begins at byte ``i * slot_bytes``.
        size_bytes: Total length.
        huge_bytes: Bytes that were allocated in huge pages, as far as known.
    """

    def __init__(self, buffer: mmap.mmap | memoryview, slots: int, slot_bytes: int, fd: int = -1) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.size_bytes = slots * slot_bytes
        self.huge_bytes = 0
        self._owned = buffer if isinstance(buffer, mmap.mmap) else None
        with memoryview(buffer) as whole:
            self._flat = whole.cast("B")[: self.size_bytes] if whole.nbytes else memoryview(bytearray())
        self._fd = fd
        self._views: list[weakref.ref[memoryview]] = []
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def create(
        cls, slots: int, slot_bytes: int, *, name: str = "kvstore", populate: bool = False, huge_pages: bool = True
    ) -> Region:
        """Make a region of zeros that has no name in the file system.

        Args:
            slots: Number of rows, at least 1.
            slot_bytes: Length of a row, a multiple of ``PAGE_BYTES`` (see :func:`rounded_up`).
            name: Label in /proc/PID/maps; neither a key nor a path.
            populate: Allocate the memory now, with a log line every few seconds. A shortage then fails at start, and no
                later access waits for a page. Otherwise each page is allocated at its first write.
            huge_pages: Whether to allocate huge pages, where the kernel makes them; only with ``populate``.

        Raises:
            ConfigError: A size is invalid, or too little memory is available.
        """
        _check_shape(slots, slot_bytes, aligned=True)
        size = slots * slot_bytes
        require_room(size)
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            # Sealed against truncation by another process, because an access beyond the end would kill this one.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            huge_bytes = populate_file(fd, size, huge_pages=huge_pages) if populate else 0
            region = cls(_mapped(fd, size), slots, slot_bytes, fd)
            region.huge_bytes = huge_bytes
            return region
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, where: str | os.PathLike[str] | int, slot_bytes: int, slots: int | None = None) -> Region:
        """Map an existing region, by its path or by a descriptor.

        Args:
            where: :attr:`path` of a region in another process of the same user, a file in /dev/shm, or an open
                descriptor (which is duplicated and stays the caller's).
            slot_bytes: Length of a row.
            slots: Number of rows; by default all rows of the file.

        Raises:
            ConfigError: The region does not exist, or has another shape.
        """
        try:
            fd = os.dup(where) if isinstance(where, int) else os.open(where, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"No region at {where!r}: {error.strerror}. Its owner must be alive and of the same user."
            ) from error
        try:
            size = os.fstat(fd).st_size
            count = size // slot_bytes if slots is None and slot_bytes > 0 else (slots or 0)
            _check_shape(count, slot_bytes, aligned=False)
            if size < count * slot_bytes or (slots is None and size % slot_bytes):
                raise ConfigError(
                    f"The region at {where!r} has {size} bytes. Expected {count} slots of {slot_bytes} bytes. Give the "
                    "slot_bytes that it was made with."
                )
            return cls(_mapped(fd, count * slot_bytes), count, slot_bytes, fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def wrap(cls, buffer: Any, slot_bytes: int) -> Region:
        """Use memory with another owner, such as the shared region of vLLM, without a copy.

        Args:
            buffer: Any object with the buffer protocol: writable, C-contiguous, of any shape and format. It must stay
                valid until :meth:`close`, which releases it.
            slot_bytes: Length of a row.

        Raises:
            ConfigError: The memory is read-only, not contiguous, or not a multiple of ``slot_bytes`` long.
        """
        with memoryview(buffer) as view:
            if view.readonly or not view.c_contiguous:
                raise ConfigError("The memory of a region must be writable and C-contiguous.")
            size = view.nbytes
            if slot_bytes < 1 or not size or size % slot_bytes:
                raise ConfigError(f"Memory of {size} bytes does not divide into slots of {slot_bytes} bytes.")
            return cls(view, size // slot_bytes, slot_bytes)

    @property
    def path(self) -> str:
        """Path for other processes of the same user to attach, while this one has the region open; "" if wrapped."""
        return f"/proc/{os.getpid()}/fd/{self._fd}" if self._fd >= 0 else ""

    @property
    def fd(self) -> int:
        """Descriptor to pass to another process, owned by the region; -1 if the memory is wrapped."""
        return self._fd

    @property
    def address(self) -> int:
        """Address of the first row in this process."""
        return int(np.frombuffer(self._open_flat, np.uint8).ctypes.data)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def view(self) -> memoryview:
        """Return a flat view of all rows. The caller or :meth:`close` releases it."""
        view = self._open_flat[:]
        self._views = [old for old in self._views if old() is not None]
        self._views.append(weakref.ref(view))
        return view

    def rows(self) -> Rows:
        """Return the slots as an array of shape ``(slots, slot_bytes)``, without a copy.

        The region cannot invalidate the array, so drop it before :meth:`close`.
        """
        return np.frombuffer(self._open_flat, np.uint8).reshape(self.slots, self.slot_bytes)

    def close(self) -> None:
        """Release the views, the mapping and the descriptor. Idempotent.

        An array or a view of a view that is still in use keeps the memory mapped until it is dropped, with a warning.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        in_use = 0
        for view in (*(old() for old in reversed(self._views)), self._flat):
            if view is None:
                continue
            try:
                view.release()
            except BufferError:
                in_use += 1
        self._views.clear()
        if self._owned is not None:
            try:
                self._owned.close()
            except BufferError:
                in_use += 1
            self._owned = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if in_use:
            logger.warning(
                "A region of %d bytes was closed while arrays or views of it are in use; they keep its memory. "
                "Close tiers and transfers before the region.",
                self.size_bytes,
            )

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else self.path or "wrapped"
        return f"Region({self.slots} x {self.slot_bytes} bytes, {state})"

    @property
    def _open_flat(self) -> memoryview:
        if self._closed:
            raise ValueError(f"{self!r} was used after close().")
        return self._flat


def rounded_up(size_bytes: int, multiple: int = PAGE_BYTES) -> int:
    """Return the least multiple of ``multiple`` that is at least ``size_bytes``."""
    return -(-size_bytes // multiple) * multiple


def _check_shape(slots: int, slot_bytes: int, *, aligned: bool) -> None:
    if slots < 1 or slot_bytes < 1:
        raise ConfigError(f"A region of {slots} slots of {slot_bytes} bytes: both must be at least 1.")
    if aligned and slot_bytes % PAGE_BYTES:
        raise ConfigError(
            f"Slots of {slot_bytes} bytes are not page-aligned. Expected a multiple of {PAGE_BYTES}, such as "
            f"{rounded_up(slot_bytes)}."
        )


def _mapped(fd: int, size: int) -> mmap.mmap:
    mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    # Core dumps must not contain users' prompts, and a dump of the whole cache would fill a disk.
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping
