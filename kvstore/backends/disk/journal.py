"""The journal of an owner: what enters and leaves its slots, appended in frames, many callers to a frame."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from kvstore.backends.disk.files import JournalEnd, open_regular
from kvstore.backends.disk.layout import (
    JOURNAL_HEADER_BYTES,
    Geometry,
    Kind,
    Row,
    encode_frame,
    encode_journal_header,
    journal_name,
    records_of,
)
from kvstore.diskio import OsDisk, Priority, bare
from kvstore.diskio.transfers import Transfer, TransferEngine

__all__ = ["Journal", "create_journal"]

_FRAME_ROWS_MAX: Final = 1 << 14
"""Records of one frame: more wait for the next, so that no frame takes long to write."""


def create_journal(disk: OsDisk, dir_fd: int, number: int, owner: int, geometry: Geometry, digest: bytes) -> JournalEnd:
    """Make a journal, and return where it ends; on a thread.

    Raises:
        OSError: It can't be made.
    """
    name = journal_name(number)
    # Of a journal that nothing refers to yet; a crash may have left one.
    with contextlib.suppress(FileNotFoundError):
        disk.unlink(name, dir_fd)
    fd, _ = open_regular(disk, name, os.O_RDWR | os.O_CREAT | os.O_EXCL, dir_fd)
    try:
        header = encode_journal_header(number, owner, geometry, digest)
        if disk.pwritev(fd, [memoryview(header)], 0) != len(header):
            raise OSError(f"{name} could not be begun")
        disk.fdatasync(fd)
    except BaseException:
        disk.close(fd)
        with contextlib.suppress(OSError):
            disk.unlink(name, dir_fd)
        raise
    return JournalEnd(number, JOURNAL_HEADER_BYTES, 1, fd)


class Journal:
    """Appends frames, one after the other; used from the loop.

    Args:
        disk: What to call the system with.
        engine: What writes.
        owner: Number of the owner.
        end: Where to go on; its descriptor is open for writing, and belongs to this from now on.
        durable: Whether a frame counts as written only when it would survive a power cut.

    Attributes:
        end: Where the next frame will begin.
        frames: Frames written that say anything.
    """

    def __init__(self, disk: OsDisk, engine: TransferEngine, owner: int, end: JournalEnd, *, durable: bool) -> None:
        self.end = end
        self.frames = 0
        self._disk = disk
        self._engine = engine
        self._owner = owner
        self._durable = durable
        self._queue: list[tuple[Sequence[Row], Callable[[], None], asyncio.Future[None]]] = []
        self._next: JournalEnd | None = None
        self._writer: asyncio.Task[None] | None = None

    @property
    def size_bytes(self) -> int:
        """Length of the journal that is written to."""
        return self.end.offset

    async def append(self, rows: Sequence[Row], apply: Callable[[], None]) -> None:
        """Write records; when they are written ``apply`` is called, before anything else is written.

        So what the memory says and what the journal says are never apart by more than what is on its way. When this is
        cancelled the records are written and applied all the same.

        Raises:
            OSError: They could not be written; ``apply`` was not called.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((rows, apply, future))
        self._start()
        await asyncio.shield(future)

    async def switch(self, to: JournalEnd) -> None:
        """Go on in another journal, which has been made; if this one can't be ended, it goes on instead."""
        self._next = to
        self._start()
        while self._next is not None:
            await self.settled()

    async def settled(self) -> None:
        """Wait until all that was appended so far is written or has failed."""
        if self._writer is not None:
            await asyncio.wait({self._writer})

    def close(self) -> None:
        """Let go of the file; when nothing is being written."""
        if self.end.fd >= 0:
            with contextlib.suppress(OSError):
                self._disk.close(self.end.fd)
            self.end.fd = -1

    def _start(self) -> None:
        if self._writer is None or self._writer.done():
            self._writer = asyncio.get_running_loop().create_task(self._write_all())

    async def _write_all(self) -> None:
        while self._queue or self._next is not None:
            if self._next is not None:
                await self._go_on_in(self._next)
                continue
            taken, rows = self._take()
            error = await self._write(records_of(rows))
            for _, apply, future in taken:
                if error is None:
                    apply()
                if future.done():
                    continue
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(OSError(error.errno, error.strerror or "the journal could not be written"))
                    # Nobody may wait any more, which is no reason for a warning.
                    future.exception()

    def _take(self) -> tuple[list[tuple[Sequence[Row], Callable[[], None], asyncio.Future[None]]], list[Row]]:
        taken, rows = [], list(self._queue[0][0])
        taken.append(self._queue[0])
        for entry in self._queue[1:]:
            if len(rows) + len(entry[0]) > _FRAME_ROWS_MAX:
                break
            rows.extend(entry[0])
            taken.append(entry)
        del self._queue[: len(taken)]
        return taken, rows

    async def _write(self, records: bytes) -> OSError | None:
        end = self.end
        frame = memoryview(encode_frame(records, end.sequence, self._owner, end.number))
        transfer = Transfer(end.fd, end.offset, [frame], len(frame))
        try:
            await self._engine.write([transfer], Priority.LOAD)
            if transfer.error is None and transfer.done_bytes != len(frame):
                raise OSError(f"{transfer.done_bytes} of {len(frame)} bytes of a frame were written")
            if transfer.error is None and self._durable:
                await self._engine.call(partial(self._disk.fdatasync, end.fd), priority=Priority.LOAD)
        except (OSError, RuntimeError) as error:
            # The engine was closed, or the drive fails: nothing was written as far as anybody may believe.
            return error if isinstance(error, OSError) else OSError(str(error))
        if transfer.error is not None:
            return bare(transfer.error)
        end.offset += len(frame)
        end.sequence += 1
        self.frames += bool(records)
        return None

    async def _go_on_in(self, to: JournalEnd) -> None:
        """Write the last frame of this journal and take the next one."""
        error = await self._write(records_of([(Kind.NEXT, to.number, 0, 0, b"")]))
        self._next = None
        if error is not None:
            # It stays where it is; what was made for nothing is not referred to by anything.
            with contextlib.suppress(OSError):
                await self._engine.call(partial(self._disk.close, to.fd))
            return
        old, self.end = self.end, to
        with contextlib.suppress(OSError):
            await self._engine.call(partial(self._disk.close, old.fd))
