"""Notes: a few bytes beside each block of an owner, for the engine that finds it. One file, only ever appended to.

They are hints: what is lost or damaged is missing, and a block without its note is a block all the same. Notes of
blocks that left stay until the file is written anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import xxhash

from kvstore.backends.disk.files import opened, read_at, replace_file, write_at
from kvstore.diskio import TransferEngine
from kvstore.types import KEY_BYTES_MAX, BlockKey

__all__ = ["NOTES_NAME", "NOTES_TMP_NAME", "Notes", "encode_notes", "read_notes"]

NOTES_NAME: Final = "notes"
NOTES_TMP_NAME: Final = NOTES_NAME + ".tmp"

_FRAME: Final = struct.Struct("<8sIIQ")
"""Magic, length of what follows, zero, xxh3-64 of the length and what follows, seeded with the owner's number."""
_MAGIC: Final = b"\x89kvnote1"
_NOTE: Final = struct.Struct("<BxH")
"""Lengths of the key and of the note, which follow."""

_NOTE_BYTES_MAX: Final = 1 << 13
"""Longest note: parent and tokens of a block of 2,000 tokens. A frame of the longest ones is still read."""

_FRAME_NOTES: Final = 4096
"""Notes of a frame; a frame is written, and lost, as a whole."""

_FRAME_BYTES_MAX: Final = 64 << 20
"""A longer frame is not read: no forged length takes more memory."""

_QUEUED_MAX: Final = 1 << 16
"""Notes that wait for a slow disk; further ones are dropped."""

_SLACK_BYTES: Final = 4 << 20
"""The file is written anew when it is twice as long as after the last time, and this."""


class Notes:
    """The notes of one owner; used from the loop, reads and writes on the engine's threads.

    Args:
        engine: Makes system calls on its threads.
        dir_fd: Directory of the owner.
        owner: Its number.
        holds: Whether a block is held: notes of others are left out when the file is written anew.
    """

    def __init__(self, engine: TransferEngine, dir_fd: int, owner: int, holds: Callable[[BlockKey], bool]) -> None:
        self._disk = engine.disk
        self._engine = engine
        self._dir_fd = dir_fd
        self._owner = owner
        self._holds = holds
        self._queue: list[tuple[BlockKey, bytes]] = []
        self._writer: asyncio.Task[None] | None = None
        self._reading = asyncio.Lock()
        self._size_bytes = -1
        """Length of the file's whole frames; -1 before it was read."""
        self._rewritten_bytes = 0

    def add(self, notes: Sequence[tuple[BlockKey, bytes]]) -> None:
        """Append notes, soon."""
        room = _QUEUED_MAX - len(self._queue)
        self._queue += [note for note in notes[:room] if len(note[1]) <= _NOTE_BYTES_MAX]
        if self._queue and (self._writer is None or self._writer.done()):
            self._writer = asyncio.get_running_loop().create_task(self._write_all())

    async def load(self) -> Mapping[BlockKey, bytes]:
        """Return the notes of held blocks, and those that were written last."""
        async with self._reading:
            try:
                found, self._size_bytes = await self._engine.call(self._read)
            except FileNotFoundError:
                self._size_bytes = 0
                return {}
            except (OSError, RuntimeError):
                return {}
        held: dict[BlockKey, bytes] = {}
        for place, (key, note) in enumerate(found.items()):
            if self._holds(key):
                held[key] = note
            if place % _FRAME_NOTES == 0:
                await asyncio.sleep(0)
        return held

    async def settle(self) -> None:
        """Wait until all notes are written."""
        while self._writer is not None and not self._writer.done():
            await asyncio.wait({self._writer})

    async def _write_all(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # A full disk, or a closed engine: the notes are lost.
            while self._queue:
                if self._size_bytes < 0:
                    await self.load()
                if self._size_bytes < 0:
                    break
                if self._size_bytes > 2 * self._rewritten_bytes + _SLACK_BYTES:
                    await self._rewrite()
                taken, self._queue = self._queue[:_FRAME_NOTES], self._queue[_FRAME_NOTES:]
                frame = encode_notes(taken, self._owner)
                await self._engine.call(partial(self._append, frame, self._size_bytes))
                self._size_bytes += len(frame)
        self._queue.clear()

    async def _rewrite(self) -> None:
        held = list((await self.load()).items())
        frames = [encode_notes(held[i : i + _FRAME_NOTES], self._owner) for i in range(0, len(held), _FRAME_NOTES)]
        await self._engine.call(partial(replace_file, self._disk, NOTES_NAME, NOTES_TMP_NAME, self._dir_fd, frames))
        self._size_bytes = self._rewritten_bytes = sum(map(len, frames))

    def _read(self) -> tuple[dict[BlockKey, bytes], int]:
        """Return all notes, and the length of the frames that they are in."""
        found: dict[BlockKey, bytes] = {}
        end = 0
        with opened(self._disk, NOTES_NAME, os.O_RDONLY, self._dir_fd) as (fd, _):
            for past, notes in read_notes(partial(read_at, self._disk, fd), self._owner):
                found.update(notes)
                end = past
        return found, end

    def _append(self, frame: bytes, offset: int) -> None:
        with opened(self._disk, NOTES_NAME, os.O_RDWR | os.O_CREAT, self._dir_fd) as (fd, size_bytes):
            if size_bytes > offset:
                # Behind the last whole frame: a crash left half a frame, or a write failed.
                self._disk.ftruncate(fd, offset)
            write_at(self._disk, fd, frame, offset)


def encode_notes(notes: Sequence[tuple[BlockKey, bytes]], owner: int) -> bytes:
    """Return a frame of notes."""
    body = b"".join(part for key, note in notes for part in (_NOTE.pack(len(key), len(note)), key, note))
    return _FRAME.pack(_MAGIC, len(body), 0, _checksum(body, owner)) + body


def read_notes(read: Callable[[int, int], memoryview], owner: int) -> Iterator[tuple[int, dict[BlockKey, bytes]]]:
    """Yield the end and the notes of each whole frame; the first that is damaged or of another owner ends it.

    ``read`` returns the bytes at an offset, at most as many as its second argument.
    """
    at = 0
    while len(head := read(at, _FRAME.size)) == _FRAME.size:
        magic, length, zero, checksum = _FRAME.unpack(head)
        if magic != _MAGIC or zero or length > _FRAME_BYTES_MAX:
            return
        body = bytes(read(at + _FRAME.size, length))
        if len(body) != length or checksum != _checksum(body, owner):
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


def _checksum(body: bytes, owner: int) -> int:
    state = xxhash.xxh3_64(seed=owner & ((1 << 64) - 1))
    state.update(len(body).to_bytes(8, "little"))
    state.update(body)
    return int(state.intdigest())
