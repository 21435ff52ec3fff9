"""The files of an owner that say what its segments hold: snapshot and journals, read and written whole. All block."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.backends.disk.columns import Columns
from kvstore.backends.disk.layout import (
    FORMAT,
    INDEX_NAME,
    JOURNAL_HEADER_BYTES,
    PAGE,
    Geometry,
    decode_journal_header,
    journal_name,
    journal_number,
    read_frames,
)
from kvstore.diskio import OsDisk, read_into

__all__ = [
    "JournalEnd",
    "OwnerState",
    "load_owner",
    "names_in",
    "open_own_directory",
    "open_regular",
    "read_json",
    "remove_segment",
    "write_json",
    "write_snapshot",
]

_MAGIC: Final = b"\x89kvindx\n"
_HEADER: Final = struct.Struct("<8sIIQQIIQI4x32s")
"""Magic, format, key width, owner, slot length, slots per segment, paths, number of segments, journal to go on with,
namespace."""
_CHECKSUM_BYTES: Final = 16
_TMP_NAME: Final = INDEX_NAME + ".tmp"
_PIECE_BYTES: Final = 8 << 20
"""What is copied, summed and written at a time."""
_JOURNAL_BYTES_MAX: Final = 1 << 32
_SLOTS_MAX: Final = 1 << 32
_JSON_BYTES_MAX: Final = 4096
_TRIES: Final = 5
"""How often a running owner may replace its files under whoever reads them."""


@dataclass(slots=True)
class JournalEnd:
    """Where the last journal of an owner ends.

    Attributes:
        number: Of the journal.
        offset: Where the next frame begins.
        sequence: Its number.
        fd: The journal, open for reading.
        whole: Whether the file ends there too; otherwise something torn or damaged follows.
    """

    number: int
    offset: int
    sequence: int
    fd: int
    whole: bool = True


@dataclass(slots=True)
class OwnerState:
    """What an owner's files say.

    Attributes:
        geometry: Of its segments.
        columns: Its slots.
        end: Where its journal goes on.
        intact: Whether nothing was missing or damaged in between; otherwise blocks may have been lost.
    """

    geometry: Geometry
    columns: Columns
    end: JournalEnd
    intact: bool = True


def open_regular(disk: OsDisk, name: str, flags: int, dir_fd: int) -> tuple[int, int]:
    """Open a file that has to be a regular one of ours with one name; return it and its length.

    Raises:
        OSError: It can't be opened; EPERM if it is something else.
    """
    fd = disk.open_file(name, flags, dir_fd)
    try:
        status = disk.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink > 1:
            raise PermissionError(errno.EPERM, "not a regular file of this user alone", name)
    except BaseException:
        disk.close(fd)
        raise
    return fd, status.st_size


def names_in(disk: OsDisk, dir_fd: int) -> list[str]:
    """Return what names a directory holds; on a descriptor of its own, as the position is shared."""
    fd = disk.open_dir(".", dir_fd)
    try:
        with disk.scandir(fd) as entries:
            return [entry.name for entry in entries]
    finally:
        disk.close(fd)


def open_own_directory(disk: OsDisk, name: str, dir_fd: int) -> int:
    """Open a directory that has to be this user's.

    Raises:
        OSError: It can't be opened; EPERM if it is another user's.
    """
    fd = disk.open_dir(name, dir_fd)
    if disk.fstat(fd).st_uid != os.geteuid():
        disk.close(fd)
        raise PermissionError(errno.EPERM, "a directory of another user", name)
    return fd


def remove_segment(disk: OsDisk, dir_fd: int, name: str) -> None:
    """Remove a segment, and give its room back at once also where others have it open."""
    with contextlib.suppress(FileNotFoundError):
        with contextlib.suppress(PermissionError):
            fd, _ = open_regular(disk, name, os.O_WRONLY, dir_fd)
            try:
                disk.ftruncate(fd, 0)
            finally:
                disk.close(fd)
        disk.unlink(name, dir_fd)


def read_json(disk: OsDisk, name: str, dir_fd: int) -> dict[str, Any] | None:
    """Return a small JSON object; None if there is no such file, empty if it is none."""
    try:
        fd, size = open_regular(disk, name, os.O_RDONLY, dir_fd)
    except FileNotFoundError:
        return None
    try:
        content = bytearray(min(size, _JSON_BYTES_MAX) or 1)
        length = disk.preadv(fd, [memoryview(content)], 0)
    finally:
        disk.close(fd)
    try:
        found = json.loads(content[:length])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def write_json(disk: OsDisk, name: str, dir_fd: int, value: dict[str, Any]) -> None:
    """Replace a small file by the text of an object, and wait until it would survive a power cut."""
    tmp = f"{name}.{secrets.token_hex(4)}.tmp"
    fd, _ = open_regular(disk, tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, dir_fd)
    try:
        text = json.dumps(value).encode()
        if disk.pwritev(fd, [memoryview(text)], 0) != len(text):
            raise OSError(errno.EIO, f"{name} was written in part")
        disk.fsync(fd)
    finally:
        disk.close(fd)
    disk.rename(tmp, name, dir_fd, dir_fd)


def load_owner(disk: OsDisk, dir_fd: int, owner: int, digest: bytes) -> OwnerState | None:
    """Read snapshot and journals of an owner; None if there is nothing usable.

    The journal that goes on is left open in ``end.fd``, for whoever follows it.

    Raises:
        OSError: The disk fails.
    """
    for _ in range(_TRIES):
        with suppress(FileNotFoundError):
            return _load(disk, dir_fd, owner, digest)
    return None


def write_snapshot(
    disk: OsDisk, dir_fd: int, owner: int, geometry: Geometry, digest: bytes, columns: Columns, journal: int
) -> None:
    """Replace the snapshot; on any thread, while the columns change.

    What is torn by that is in slots that the journals from ``journal`` on tell of, and is put right by them.

    Raises:
        OSError: It could not be written; the last one is still there.
    """
    header = _HEADER.pack(
        _MAGIC, FORMAT, columns.width, owner, geometry.slot_bytes, geometry.segment_slots, geometry.paths,
        len(columns.segments), journal, digest,
    )  # fmt: skip
    slots = len(columns.segments) * columns.segment_slots
    arrays = columns.arrays()
    total = xxhash.xxh3_128()
    fd, _ = open_regular(disk, _TMP_NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, dir_fd)
    try:
        offset = _append(disk, fd, 0, header, total)
        offset = _append(disk, fd, offset, columns.segments.tobytes(), total)
        for array in arrays:
            rows = max(1, _PIECE_BYTES // max(1, array[:1].nbytes))
            for start in range(0, slots, rows):
                offset = _append(disk, fd, offset, array[start : min(slots, start + rows)].tobytes(), total)
        _append(disk, fd, offset, total.digest(), None)
        disk.fdatasync(fd)
    finally:
        disk.close(fd)
    disk.rename(_TMP_NAME, INDEX_NAME, dir_fd, dir_fd)


def _append(disk: OsDisk, fd: int, offset: int, content: bytes, total: Any) -> int:
    if total is not None:
        total.update(content)
    with memoryview(content) as view:
        _write_at(disk, fd, view, offset)
    return offset + len(content)


def _load(disk: OsDisk, dir_fd: int, owner: int, digest: bytes) -> OwnerState | None:
    numbers = sorted(n for name in names_in(disk, dir_fd) if (n := journal_number(name)) is not None)
    if not numbers:
        return None
    snapshot = _read_snapshot(disk, dir_fd, owner, digest)
    geometry, columns, first = snapshot if snapshot is not None else (None, None, numbers[0])
    intact = snapshot is not None or numbers[0] == 1
    end: JournalEnd | None = None
    number = first
    tick = 1 + int(columns.used.max(initial=0)) if columns is not None else 1
    while number in numbers:
        fd, size = open_regular(disk, journal_name(number), os.O_RDONLY, dir_fd)
        try:
            content = _read_file(disk, fd, min(size, _JOURNAL_BYTES_MAX))
            header = decode_journal_header(bytes(content[:JOURNAL_HEADER_BYTES]), number, owner, digest)
            if header is None or geometry not in (None, header):
                disk.close(fd)
                intact = False
                break
            geometry = header
            columns = columns if columns is not None else Columns(geometry.segment_slots)
            frames = read_frames(content[JOURNAL_HEADER_BYTES:], owner, number, 1)
        except BaseException:
            disk.close(fd)
            raise
        if end is not None:
            disk.close(end.fd)
        offset = JOURNAL_HEADER_BYTES + frames.size_bytes
        end = JournalEnd(number, offset, frames.sequence, fd, whole=offset == len(content))
        ticks = np.repeat(np.arange(tick, tick + len(frames.counts), dtype=np.uint32), frames.counts)
        columns.apply(frames.records, ticks)
        tick += len(frames.counts)
        if not frames.next_journal and number + 1 in numbers:
            # Cut off in the middle by a power failure: what the next one says of slots holds all the same.
            intact = False
        number += 1
    if geometry is None or columns is None or end is None:
        if end is not None:
            disk.close(end.fd)
        return None
    return OwnerState(geometry, columns, end, intact and end.whole)


def _read_snapshot(disk: OsDisk, dir_fd: int, owner: int, digest: bytes) -> tuple[Geometry, Columns, int] | None:
    """Return what the snapshot says, and with which journal it goes on; None if there is no good one."""
    with suppress(OSError, ValueError, MemoryError):
        fd, size = open_regular(disk, INDEX_NAME, os.O_RDONLY, dir_fd)
        try:
            return _decode_snapshot(disk, fd, size, owner, digest)
        finally:
            disk.close(fd)
    return None


def _decode_snapshot(
    disk: OsDisk, fd: int, size: int, owner: int, digest: bytes
) -> tuple[Geometry, Columns, int] | None:
    header = bytearray(_HEADER.size)
    if size < len(header) or read_into(disk, fd, [memoryview(header)], len(header)) != len(header):
        return None
    magic, version, width, by, slot_bytes, slots, paths, segments, journal, namespace = _HEADER.unpack(header)
    if (magic, version, by, namespace) != (_MAGIC, FORMAT, owner, digest) or not 0 < width <= 64:
        return None
    if slot_bytes <= PAGE or slot_bytes % PAGE or not slots or not paths or segments * slots >= _SLOTS_MAX:
        return None
    count = segments * slots
    # Before anything is allocated: the length of the file has to be what the header says.
    if size != _HEADER.size + segments + count * (4 + 4 + 8 + 1 + width) + _CHECKSUM_BYTES:
        return None
    columns = Columns(slots, segments, width)
    total = xxhash.xxh3_128(bytes(header))
    offset = _HEADER.size
    for array in (columns.segments, *columns.arrays()):
        flat = array.reshape(-1).view(np.uint8)
        for start in range(0, len(flat), _PIECE_BYTES):
            piece = flat[start : start + _PIECE_BYTES]
            if not _read_at(disk, fd, piece, offset):
                return None
            total.update(piece.data)
            offset += len(piece)
    told = bytearray(_CHECKSUM_BYTES)
    if not _read_at(disk, fd, np.frombuffer(told, np.uint8), offset) or total.digest() != bytes(told):
        return None
    return Geometry(slot_bytes, slots, paths), columns, journal


def _read_file(disk: OsDisk, fd: int, size: int) -> memoryview:
    content = np.empty(size, np.uint8)
    return content.data[: read_into(disk, fd, [content.data], size)] if size else memoryview(b"")


def _read_at(disk: OsDisk, fd: int, target: npt.NDArray[np.uint8], offset: int) -> bool:
    done = 0
    while done < len(target):
        got = disk.preadv(fd, [target[done:].data], offset + done)
        if got <= 0:
            return False
        done += got
    return True


def _write_at(disk: OsDisk, fd: int, content: memoryview, offset: int) -> None:
    done = 0
    while done < len(content):
        written = disk.pwritev(fd, [content[done:]], offset + done)
        if written <= 0:
            raise OSError(errno.EIO, "a write of nothing")
        done += written
