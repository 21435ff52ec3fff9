"""The file with the notes of a segment: a few bytes per block, for the engine that holds it next. Append-only.

Notes are hints: a block without its note is still valid, so lost and damaged notes are ignored. Notes of removed blocks
stay until the file is rewritten.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import xxhash

from kvstore.backends.disk.files import opened, read_at, replace_file, write_at
from kvstore.diskio import TransferEngine
from kvstore.types import KEY_BYTES_MAX, BlockKey

_FRAME: Final = struct.Struct("<8sIIQ")
"""Magic, length of the body, zero, xxh3-64 of length and body, seeded with the segment. The body follows."""
_MAGIC: Final = b"\x89kvnote1"
_NOTE: Final = struct.Struct("<BxH")
"""Lengths of key and note; both follow."""

_NOTE_BYTES_MAX: Final = 1 << 13
"""Longest note: parent and tokens of a block of 2,000 tokens. A full frame of such notes is still within its limit."""

_FRAME_NOTES: Final = 4096
"""Maximum notes of a frame, which is written, and lost, as a whole."""

_FRAME_BYTES_MAX: Final = 64 << 20
"""Longest frame that is read, so that a forged length cannot exhaust memory."""

_QUEUED_MAX: Final = 1 << 16
"""Maximum notes that wait for a slow disk; further ones are dropped."""


class Notes:
    """The notes of one segment; used from the loop, reads and writes on the engine's threads.

    Args:
        engine: Makes system calls on its threads.
        dir_fd: Directory of the file.
        segment: Identity of the segment.
        holds: Whether a block is held; a rewrite drops the notes of all other blocks.
        name: Name of the file.
        slack_bytes: The file is rewritten when its length exceeds twice the length after the last rewrite plus this.
    """

    def __init__(
        self,
        engine: TransferEngine,
        dir_fd: int,
        segment: int,
        holds: Callable[[BlockKey], bool],
        name: str,
        slack_bytes: int,
    ) -> None:
        self._disk = engine.disk
        self._engine = engine
        self._dir_fd = dir_fd
        self._name = name
        self._slack_bytes = slack_bytes
        self._segment = segment
        self._holds = holds
        self._queue: list[tuple[BlockKey, bytes]] = []
        self._writer: asyncio.Task[None] | None = None
        self._file_in_use = asyncio.Lock()
        self._size_bytes = -1
        """Length of the file's whole frames; -1 before the first read."""
        self._rewritten_bytes = 0

    def add(self, notes: Sequence[tuple[BlockKey, bytes]]) -> None:
        """Queue notes to be appended."""
        room = _QUEUED_MAX - len(self._queue)
        self._queue += [note for note in notes[:room] if len(note[1]) <= _NOTE_BYTES_MAX]
        if self._queue and (self._writer is None or self._writer.done()):
            self._writer = asyncio.get_running_loop().create_task(self._write_all())

    async def load(self) -> Mapping[BlockKey, bytes]:
        """Return the notes of held blocks from the file."""
        with contextlib.suppress(OSError):
            async with self._file_in_use:
                return await self._read_held()
        return {}

    async def settle(self) -> None:
        """Wait until all notes are written."""
        while self._writer is not None and not self._writer.done():
            await asyncio.wait({self._writer})

    async def _write_all(self) -> None:
        with contextlib.suppress(OSError):  # The notes are lost.
            while self._queue:
                async with self._file_in_use:
                    if self._size_bytes < 0:
                        await self._read_held()
                    if self._size_bytes > 2 * self._rewritten_bytes + self._slack_bytes:
                        await self._rewrite()
                    taken, self._queue = self._queue[:_FRAME_NOTES], self._queue[_FRAME_NOTES:]
                    frame = encode_notes(taken, self._segment)
                    await self._engine.call(partial(self._append, frame, self._size_bytes))
                    self._size_bytes += len(frame)
        self._queue.clear()

    async def _rewrite(self) -> None:
        held = iter((await self._read_held()).items())
        size_bytes = 0

        def frames() -> Iterator[bytes]:
            nonlocal size_bytes
            while notes := list(itertools.islice(held, _FRAME_NOTES)):
                frame = encode_notes(notes, self._segment)
                size_bytes += len(frame)
                yield frame

        # Encoded on the thread, one frame at a time: there may be millions of notes.
        tmp = self._name + ".tmp"
        await self._engine.call(partial(replace_file, self._disk, self._name, tmp, self._dir_fd, frames()))
        self._size_bytes = self._rewritten_bytes = size_bytes

    async def _read_held(self) -> dict[BlockKey, bytes]:
        found, self._size_bytes = await self._engine.call(self._read)
        held: dict[BlockKey, bytes] = {}
        for place, (key, note) in enumerate(found.items()):
            if self._holds(key):
                held[key] = note
            if place % _FRAME_NOTES == 0:
                await asyncio.sleep(0)
        return held

    def _read(self) -> tuple[dict[BlockKey, bytes], int]:
        """Return all notes, and the length of the whole frames."""
        found: dict[BlockKey, bytes] = {}
        end = 0
        with (
            contextlib.suppress(FileNotFoundError),
            opened(self._disk, self._name, os.O_RDONLY, self._dir_fd) as (fd, _),
        ):
            for past, notes in read_notes(partial(read_at, self._disk, fd), self._segment):
                found.update(notes)
                end = past
        return found, end

    def _append(self, frame: bytes, offset: int) -> None:
        with opened(self._disk, self._name, os.O_RDWR | os.O_CREAT, self._dir_fd) as (fd, size_bytes):
            if size_bytes > offset:
                # A crash or a failed write left a partial frame behind the last whole one.
                self._disk.ftruncate(fd, offset)
            write_at(self._disk, fd, frame, offset)


def encode_notes(notes: Sequence[tuple[BlockKey, bytes]], segment: int) -> bytes:
    """Return a frame of notes."""
    body = b"".join(part for key, note in notes for part in (_NOTE.pack(len(key), len(note)), key, note))
    return _FRAME.pack(_MAGIC, len(body), 0, _checksum(body, segment)) + body


def read_notes(read: Callable[[int, int], memoryview], segment: int) -> Iterator[tuple[int, dict[BlockKey, bytes]]]:
    """Yield end and notes of each whole frame, up to the first frame that is damaged or of another segment.

    ``read`` takes an offset and the most bytes to return.
    """
    at = 0
    while len(head := read(at, _FRAME.size)) == _FRAME.size:
        magic, length, zero, checksum = _FRAME.unpack(head)
        if magic != _MAGIC or zero or length > _FRAME_BYTES_MAX:
            return
        body = bytes(read(at + _FRAME.size, length))
        if len(body) != length or checksum != _checksum(body, segment):
            return
        notes: dict[BlockKey, bytes] = {}
        place = 0
        while place + _NOTE.size <= length:
            key_bytes, note_bytes = _NOTE.unpack_from(body, place)
            place += _NOTE.size
            key = body[place : place + key_bytes]
            note = body[place + key_bytes : place + key_bytes + note_bytes]
            place += key_bytes + note_bytes
            if 0 < key_bytes <= KEY_BYTES_MAX and place <= length:
                notes[key] = note
        at += _FRAME.size + length
        yield at, notes


def _checksum(body: bytes, segment: int) -> int:
    state = xxhash.xxh3_64(seed=segment & ((1 << 64) - 1))
    state.update(len(body).to_bytes(8, "little"))
    state.update(body)
    return int(state.intdigest())
