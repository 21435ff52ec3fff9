"""The journals of an owner: written in frames shared by many callers, read from the start, and followed.

A snapshot (``index``) is a journal, too: it lists all slots, and ends with the number of the journal that continues it.
One :class:`JournalReader` therefore reads the whole state of an owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.backends.disk import layout
from kvstore.backends.disk.columns import Columns
from kvstore.backends.disk.files import close_all, names_in, open_regular, opened, read_at, segments_in, write_at
from kvstore.backends.disk.layout import Geometry, Kind, Row
from kvstore.diskio import OsDisk, Transfer, TransferEngine, bare
from kvstore.runtime.limits import Precedence
from kvstore.runtime.workers import to_the_end

_FRAME_ROWS_MAX: Final = 1 << 14
"""Most records of a frame; further ones wait for the next frame, so that no frame takes long to write."""

_TURN_ROWS: Final = 1 << 11
"""Records applied in one turn of the loop, rounded up to whole entries: some milliseconds."""

_SNAPSHOT_FRAME_SLOTS: Final = 1 << 13
"""Slots of one frame of a snapshot; the frame fits into one read."""

_READ_BYTES: Final = 1 << 20
"""Bytes read at a time: about 12,000 records."""

_READ_BYTES_MAX: Final = 128 << 20
"""Largest read; longer than the longest possible frame."""

_SLOTS_UNPROVEN_MAX: Final = 1 << 20
"""Slots that a journal alone can make an index allocate: 50 MB. More slots require existing segment files, so that a
forged record cannot exhaust memory."""

_LAST_BYTES: Final = 512
"""Bytes by which a journal is recognized that was closed and is read again: the last records, and mostly a checksum."""

_TRIES: Final = 5
"""Attempts to load an owner that replaces its files during the load."""

_INVERSE: Final = {Kind.ADD: Kind.REMOVE, Kind.SEGMENT: Kind.DROP}


def _nothing() -> None:
    """Do nothing: the default of ``apply`` and ``undo``."""


@dataclass(slots=True)
class JournalEnd:
    """The end of the last journal of an owner: its number, and offset and sequence number of the next frame."""

    number: int
    offset: int
    sequence: int
    fd: int


@dataclass(slots=True)
class _Entry:
    """Records to write, the change that follows them, and a future that ends with their frame."""

    rows: Sequence[Row]
    apply: Callable[[], None]
    undo: Callable[[], None]
    lasting: bool
    written: asyncio.Future[None]

    @property
    def inverse(self) -> list[Row]:
        """Records that revert these."""
        return [(_INVERSE[kind], *rest) for kind, *rest in self.rows if kind in _INVERSE]  # type: ignore[misc]

    def end(self, error: OSError | None) -> None:
        """Report the result of writing the frame."""
        if self.written.done():
            return
        if error is None:
            self.written.set_result(None)
        else:
            self.written.set_exception(OSError(error.errno, error.strerror or "the journal could not be written"))
            # Marks the exception as retrieved: a cancelled caller must not cause a warning.
            self.written.exception()


class Journal:
    """Appends frames, one after the other; used from the loop.

    Args:
        end: Position to continue from. Its descriptor is open for writing; the journal closes it.
        durable: Whether a frame counts as written only when it survives a power cut.
    """

    def __init__(self, engine: TransferEngine, owner: int, end: JournalEnd, *, durable: bool) -> None:
        self.end = end
        self.frames = 0  # Number of frames with records written so far.
        self._engine = engine
        self._owner = owner
        self._durable = durable
        self._queue: deque[_Entry] = deque()
        self._unwritten: deque[_Entry] = deque()
        """Lasting entries whose frame failed, and inverses of failed frames that followers may have read; they precede
        all others in the next frame."""
        self._doubtful = b""
        """Frame whose write failed. Followers may have read it all the same, and continue after it. So the same bytes
        are written again before any other frame."""
        self._next: JournalEnd | None = None
        self._doubtful_next: JournalEnd | None = None
        """Journal that the doubtful frame names as the next one."""
        self._writer: asyncio.Task[None] | None = None

    @property
    def is_behind(self) -> bool:
        """Whether records could not be written so far; the next frame repeats them."""
        return bool(self._unwritten or self._doubtful)

    async def append(
        self,
        rows: Sequence[Row],
        apply: Callable[[], None] = _nothing,
        *,
        undo: Callable[[], None] = _nothing,
        lasting: bool = False,
    ) -> None:
        """Write records, then call ``apply`` before the next frame is written.

        Memory and journal therefore differ by at most one frame. If this call is cancelled, the records are still
        written and applied. ``lasting`` records, which must be removals, are repeated before all others until they
        are written and applied.

        Raises:
            OSError: They could not be written. Instead of ``apply``, ``undo`` is called, once no reader of the journal
                finds the records.
        """
        starts = range(0, len(rows), _FRAME_ROWS_MAX) if lasting else ()
        *parts, rest = [rows[start : start + _FRAME_ROWS_MAX] for start in starts] or [rows]
        self._queue.extend(self._entry(part, lasting=True) for part in parts)
        last = self._entry(rest, apply, undo, lasting=lasting)
        self._queue.append(last)
        self._start()
        await asyncio.shield(last.written)

    async def switch(self, create: Callable[[int], JournalEnd]) -> int:
        """Create the next journal, by its number, and continue in it; return the number, or 0 if this one doesn't end.

        If this call is cancelled, the switch is still made.

        Raises:
            OSError: The journal could not be created, or an earlier frame can't be written.
        """
        switching = asyncio.get_running_loop().create_task(self._switch(create))
        await to_the_end(switching)
        return switching.result()

    async def _switch(self, create: Callable[[int], JournalEnd]) -> int:
        if self._doubtful:
            # It may end this journal, so that another one is the next.
            await self.append([])
        number = self.end.number + 1
        self._next = await self._engine.call(partial(create, number))
        while self._next is not None:
            await asyncio.wait({self._start()})
        return number if self.end.number == number else 0

    def close(self) -> None:
        """Close the files; only when nothing is being written. Idempotent."""
        for end in (self.end, self._doubtful_next):
            if end is not None:
                fd, end.fd = end.fd, -1
                close_all(self._engine.disk, fd)

    @staticmethod
    def _entry(
        rows: Sequence[Row],
        apply: Callable[[], None] = _nothing,
        undo: Callable[[], None] = _nothing,
        *,
        lasting: bool,
    ) -> _Entry:
        return _Entry(rows, apply, undo, lasting, asyncio.get_running_loop().create_future())

    def _start(self) -> asyncio.Task[None]:
        if self._writer is None or self._writer.done():
            self._writer = asyncio.get_running_loop().create_task(self._write_all())
        return self._writer

    async def _write_all(self) -> None:
        while self._queue or self._next is not None:
            if self._next is not None:
                await self._continue_in(self._next)
                continue
            taken = self._take_frame()
            error, is_visible = await self._write([row for entry in taken for row in entry.rows])
            if error is None:
                await self._apply(taken)
            else:
                self._fail(taken, error, is_visible)

    @staticmethod
    async def _apply(taken: Sequence[_Entry]) -> None:
        count = 0
        for entry in taken:
            entry.apply()
            entry.end(None)
            count += len(entry.rows)
            if count >= _TURN_ROWS:
                count = 0
                await asyncio.sleep(0)

    def _fail(self, taken: Sequence[_Entry], error: OSError, is_visible: bool) -> None:
        """End the entries of a failed frame, and all waiting ones, which would fail as well."""
        failed = [*taken, *self._unwritten, *self._queue]
        self._queue.clear()
        self._unwritten = deque(entry for entry in failed if entry.lasting)
        for place, entry in enumerate(failed):
            if is_visible and place < len(taken) and (inverse := entry.inverse):
                self._unwritten.append(self._entry(inverse, entry.undo, lasting=True))
            elif not entry.lasting:
                entry.undo()
            entry.end(error)

    def _take_frame(self) -> list[_Entry]:
        """Take the entries of the next frame off the queues."""
        taken: list[_Entry] = []
        count = 0
        for queue in (self._unwritten, self._queue):
            while queue and (not taken or count + len(queue[0].rows) <= _FRAME_ROWS_MAX):
                taken.append(queue.popleft())
                count += len(taken[-1].rows)
            if queue:
                break
        return taken

    async def _write(self, rows: Sequence[Row]) -> tuple[OSError | None, bool]:
        """Write a frame; return the error, if any, and whether followers may have read the frame."""
        if self._doubtful:
            if (error := await self._put(self._doubtful)) is not None:
                return error, False
            if (to := self._doubtful_next) is not None:
                self._doubtful_next = None
                await self._enter(to)
        end = self.end
        error = await self._put(layout.encode_frame(layout.records_of(rows), end.sequence, self._owner, end.number))
        if error is None:
            self.frames += bool(rows)
            if self._durable:
                try:
                    await self._engine.call(partial(self._engine.disk.fdatasync, end.fd), precedence=Precedence.LOAD)
                except OSError as failure:
                    error = bare(failure)
        return error, True

    async def _put(self, frame: bytes) -> OSError | None:
        """Write a frame at the end of the journal; until that succeeds, it is the doubtful one. Return the error."""
        end, self._doubtful = self.end, frame
        transfer = Transfer(end.fd, end.offset, [memoryview(frame)], len(frame))
        try:
            await self._engine.write([transfer], Precedence.LOAD)
        except OSError as error:
            return bare(error)
        if transfer.error is not None:
            return transfer.error
        if transfer.done_bytes != len(frame):
            return OSError(f"{transfer.done_bytes} of {len(frame)} bytes of a frame were written")
        self._doubtful = b""
        end.offset += len(frame)
        end.sequence += 1
        return None

    async def _continue_in(self, to: JournalEnd) -> None:
        """Write the last frame of this journal and continue in the next one, as followers do after that frame."""
        _, is_visible = await self._write([(Kind.NEXT, to.number, 0, 0, b"")])
        self._next = None
        if not self._doubtful:
            await self._enter(to)
        elif is_visible and self.end.fd >= 0:
            self._doubtful_next = to
        else:
            # Followers did not read of it, or this journal was closed meanwhile.
            await self._close(to)

    async def _enter(self, to: JournalEnd) -> None:
        """Continue in a journal, after the last frame of this one."""
        ended, self.end = self.end, to
        if ended.fd < 0:
            # The journal was closed meanwhile.
            self.close()
        await self._close(ended)

    async def _close(self, end: JournalEnd) -> None:
        fd, end.fd = end.fd, -1
        try:
            await self._engine.call(partial(close_all, self._engine.disk, fd))
        except OSError:
            close_all(self._engine.disk, fd)


class JournalReader:
    """Reads the journals of an owner, one after the other, as far as they are written. All methods block."""

    def __init__(self, disk: OsDisk, fds: Sequence[int], owner: int, digest: bytes) -> None:
        self.geometry: Geometry | None = None  # Geometry of the owner's segments; None before the first journal.
        self.end = JournalEnd(0, 0, 1, -1)  # Position reached, in a journal open for reading.
        self.next = 0  # Number of the next journal if this one has ended; otherwise 0.
        self._last = b""  # The last bytes read from this journal.
        self._disk = disk
        self.fds = fds  # The owner's directories; open during all calls but :meth:`close`.
        self._owner = owner
        self._digest = digest

    def open(self, name: str, number: int) -> bool:
        """Continue in a journal; False if its header is damaged or has another number, owner, namespace or geometry."""
        fd, _ = open_regular(self._disk, name, os.O_RDONLY, self.fds[0])
        try:
            header = read_at(self._disk, fd, 0, layout.JOURNAL_HEADER_BYTES)
            geometry = layout.decode_journal_header(bytes(header), number, self._owner, self._digest)
            if geometry is None or self.geometry not in (None, geometry):
                return False
            self.close()
            self.geometry, self.next, self._last = geometry, 0, b""
            self.end, fd = JournalEnd(number, layout.JOURNAL_HEADER_BYTES, 1, fd), -1
            return True
        finally:
            close_all(self._disk, fd)

    def reopen(self) -> None:
        """Open the journal again at the position reached.

        Raises:
            OSError: It is gone, or was replaced.
        """
        end, last = self.end, self._last
        name = layout.journal_name(end.number)
        is_header_right = self.open(name, end.number)
        if not is_header_right or read_at(self._disk, self.end.fd, end.offset - len(last), len(last)) != last:
            raise FileNotFoundError(f"{name} is another journal")
        self.end.offset, self.end.sequence, self._last = end.offset, end.sequence, last

    def read(self, *, follow: bool = True) -> Iterator[npt.NDArray[Any]]:
        """Yield the records not read yet; with ``follow``, continue in the next journal at the end of each.

        Raises:
            OSError: A journal can't be read, or is gone.
        """
        size_bytes = _READ_BYTES
        while True:
            if self.next and not self.open(layout.journal_name(self.next), self.next):
                raise FileNotFoundError(f"{layout.journal_name(self.next)} is not the next journal")
            end = self.end
            content = read_at(self._disk, end.fd, end.offset, size_bytes)
            frames = layout.read_frames(content, self._owner, end.number, end.sequence)
            end.offset += frames.size_bytes
            end.sequence = frames.sequence
            self.next = frames.next_journal
            if frames.size_bytes:
                self._last = bytes(content[: frames.size_bytes][-_LAST_BYTES:])
            if len(frames.records):
                yield self._proven(frames.records)
            if self.next:
                if not follow:
                    return
            elif not frames.size_bytes:
                if len(content) < size_bytes or size_bytes >= _READ_BYTES_MAX:
                    return
                # The frame is longer, as when a segment of small blocks was given up.
                size_bytes *= 2

    @property
    def is_whole(self) -> bool:
        """Whether the file ends with its last whole frame."""
        return self._disk.fstat(self.end.fd).st_size == self.end.offset

    def close(self) -> None:
        """Close the journal; idempotent."""
        close_all(self._disk, self.end.fd)
        self.end.fd = -1

    def _proven(self, records: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Leave out segments beyond both the first ``_SLOTS_UNPROVEN_MAX`` slots and the last segment file."""
        if self.geometry is None:
            return records
        slots = self.geometry.segment_slots
        made = records["kind"] == Kind.SEGMENT
        ends = records["slot"].astype(np.int64) + slots
        if not made.any() or ends[made].max() <= _SLOTS_UNPROVEN_MAX:
            return records
        proven = _SLOTS_UNPROVEN_MAX
        for fd in set(self.fds):
            for number, status in segments_in(self._disk, fd).items():
                if status.st_size == self.geometry.segment_bytes:
                    proven = max(proven, (number + 1) * slots)
        kept: npt.NDArray[Any] = records[~made | (ends <= proven)]
        return kept


@dataclass(slots=True)
class OwnerState:
    """The state of an owner, read from its files; the reader is at the end of its journals."""

    geometry: Geometry
    columns: Columns
    reader: JournalReader
    intact: bool  # Whether the files were complete and undamaged; otherwise blocks may have been lost.


def journals_in(disk: OsDisk, dir_fd: int) -> list[int]:
    """Return the numbers of the journals in a directory, in their order; blocks."""
    return sorted(n for name in names_in(disk, dir_fd) if (n := layout.journal_number(name)) is not None)


def create_journal(disk: OsDisk, dir_fd: int, number: int, owner: int, geometry: Geometry, digest: bytes) -> JournalEnd:
    """Create a journal and return its end; blocks."""
    name = layout.journal_name(number)
    # Left by a crash; nothing refers to it.
    with contextlib.suppress(FileNotFoundError):
        disk.unlink(name, dir_fd)
    fd, _ = open_regular(disk, name, os.O_RDWR | os.O_CREAT | os.O_EXCL, dir_fd)
    try:
        write_at(disk, fd, layout.encode_journal_header(number, owner, geometry, digest), 0)
        disk.fdatasync(fd)
    except BaseException:
        close_all(disk, fd)
        with contextlib.suppress(OSError):
            disk.unlink(name, dir_fd)
        raise
    return JournalEnd(number, layout.JOURNAL_HEADER_BYTES, 1, fd)


def load_owner(disk: OsDisk, fds: Sequence[int], owner: int, digest: bytes) -> OwnerState | None:
    """Read snapshot and journals of an owner; None if there is nothing usable. The reader is left open. Blocks."""
    for _ in range(_TRIES):
        reader = JournalReader(disk, fds, owner, digest)
        state = None
        # A running owner may have removed a file.
        with contextlib.suppress(FileNotFoundError):
            try:
                state = _load(disk, fds, reader)
                return state
            finally:
                if state is None:
                    reader.close()
    return None


def append_rows(disk: OsDisk, dir_fd: int, state: OwnerState, owner: int, rows: Sequence[Row]) -> None:
    """Append records to the last journal of an owner without an engine; the caller holds the owner's lock. Blocks.

    A damaged journal is left unchanged: readers stop at the damage, and engines notice the change at a load.
    """
    end = state.reader.end
    if not rows or not state.intact or not state.reader.is_whole:
        return
    parts = [rows[start : start + _FRAME_ROWS_MAX] for start in range(0, len(rows), _FRAME_ROWS_MAX)]
    frames = [
        layout.encode_frame(layout.records_of(part), sequence, owner, end.number)
        for sequence, part in enumerate(parts, end.sequence)
    ]
    with opened(disk, layout.journal_name(end.number), os.O_WRONLY, dir_fd) as (fd, _):
        times = disk.fstat(fd)
        write_at(disk, fd, b"".join(frames), end.offset)
        # Restored, because owners are adopted and reclaimed by the time of their own last change.
        disk.syscall("utime", os.utime, fd, ns=(times.st_atime_ns, times.st_mtime_ns))
        disk.fdatasync(fd)


def _load(disk: OsDisk, fds: Sequence[int], reader: JournalReader) -> OwnerState | None:
    numbers = journals_in(disk, fds[0])
    if not numbers:
        return None
    columns = _read_snapshot(reader)
    intact = columns is not None or numbers[0] == 1
    if columns is None:
        reader.geometry = None
        if not reader.open(layout.journal_name(numbers[0]), numbers[0]):
            return None
    geometry = reader.geometry
    if geometry is None:
        return None
    columns = columns or Columns(geometry.segment_slots)
    is_sure = True
    while True:
        for records in reader.read():
            columns.apply(records)
            for kind in records["kind"][records["kind"] >= Kind.UNSURE].tolist():
                is_sure = kind == Kind.SURE
        number = reader.end.number + 1
        name = layout.journal_name(number)
        # A journal without frames was made for a switch that never happened.
        if number not in numbers or disk.stat(name, fds[0]).st_size <= layout.JOURNAL_HEADER_BYTES:
            break
        # A power cut lost the end of this journal; the records of the next one are still valid.
        intact = False
        if not reader.open(name, number):
            break
    return OwnerState(geometry, columns, reader, intact and is_sure and reader.is_whole)


def _read_snapshot(reader: JournalReader) -> Columns | None:
    """Return the slots of the snapshot, and position the reader at its end; None without a complete snapshot."""
    with contextlib.suppress(OSError, MemoryError):
        if reader.open(layout.INDEX_NAME, layout.INDEX_NUMBER) and reader.geometry is not None:
            columns = Columns(reader.geometry.segment_slots)
            for records in reader.read(follow=False):
                columns.apply(records)
            if reader.next:
                return columns
    return None


def snapshot_parts(columns: Columns, journal: int, owner: int, geometry: Geometry, digest: bytes) -> Iterator[bytes]:
    """Yield header and frames of a snapshot that a journal continues; on any thread, while the columns change.

    A change may tear a record, but only of a slot that ``journal`` or a later journal records again.
    """
    slots, paths = columns.segment_slots, columns.segments.tolist()
    made = layout.records_of([(Kind.SEGMENT, n * slots, path - 1, 0, b"") for n, path in enumerate(paths) if path])
    starts = range(0, len(paths) * slots, _SNAPSHOT_FRAME_SLOTS)
    held = (columns.records(start, start + _SNAPSHOT_FRAME_SLOTS) for start in starts)
    end = layout.records_of([(Kind.NEXT, journal, 0, 0, b"")])
    yield layout.encode_journal_header(layout.INDEX_NUMBER, owner, geometry, digest)
    for sequence, records in enumerate(chain([made], held, [end]), 1):
        yield layout.encode_frame(records, sequence, owner, layout.INDEX_NUMBER)
