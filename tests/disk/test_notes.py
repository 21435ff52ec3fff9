"""Notes of the disk backend: they survive crashes, are rewritten when most are obsolete, and never block stores."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.backends.disk import notes as notes_module
from kvstore.backends.disk.notes import NOTES_NAME, encode_notes, read_notes
from kvstore.diskio import OsDisk
from kvstore.types import BlockKey
from tests.disk.rig import Rig, opened, room_for


def file_of(root: Path) -> Path:
    """Return the only notes file."""
    [path] = root.rglob(NOTES_NAME)
    return path


async def note(rig: Rig, keys: Sequence[BlockKey], text: bytes = b"note of ") -> None:
    """Add a note for each block, and wait until they are written."""
    rig.backend.note([(key, text + key) for key in keys])
    await rig.session.notes.settle()


async def test_notes_of_held_blocks_come_back(tmp_path: Path) -> None:
    """After a close, the notes of held blocks are found; those of evicted or unknown blocks are not."""
    async with opened(tmp_path, room_for(64)) as rig:
        keys = list(await rig.put_new(20))
        await note(rig, [*keys, b"never there"])
        await note(rig, keys[:5], b"another of ")
        await rig.backend.delete(keys[10:])
    async with opened(tmp_path, room_for(64)) as rig:
        found = await rig.backend.notes()
        assert found == {key: (b"another of " if key in keys[:5] else b"note of ") + key for key in keys[:10]}


async def test_a_close_writes_the_last_notes(tmp_path: Path) -> None:
    """Any number of notes added just before a close is written."""
    async with opened(tmp_path, room_for(64)) as rig:
        keys = list(await rig.put_new(20))
        rig.backend.note([(key, 1000 * b"note of " + key) for key in keys])
    async with opened(tmp_path, room_for(64)) as rig:
        assert (await rig.backend.notes()).keys() == set(keys)


async def test_half_a_frame_is_written_over(tmp_path: Path) -> None:
    """A partial frame, as left by a kill, is overwritten; later notes follow the last complete frame."""
    async with opened(tmp_path, room_for(64)) as rig:
        keys = list(await rig.put_new(6))
        await note(rig, keys[:2])
    path = file_of(tmp_path)
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(encode_notes([(keys[5], b"x" * 1000)], 1)[:-3])
    async with opened(tmp_path, room_for(64)) as rig:
        assert (await rig.backend.notes()).keys() == set(keys[:2])
        await note(rig, keys[2:4])
        assert (await rig.backend.notes()).keys() == set(keys[:4])
    assert file_of(tmp_path).stat().st_size == 2 * whole


async def test_the_file_does_not_grow_without_bound(tmp_path: Path) -> None:
    """The file is rewritten with the notes of the stored blocks."""
    async with opened(tmp_path, room_for(32)) as rig:
        rig.session.notes._slack_bytes = 4096
        for _ in range(40):
            keys = list(await rig.put_new(16))
            await note(rig, keys)
            assert file_of(tmp_path).stat().st_size < 3 * 4096 + 4 * 32 * 64
        found = await rig.backend.notes()
        assert found.keys() >= set(keys)
        assert len(found) <= 32
    assert not list(tmp_path.rglob("*.tmp"))


async def test_a_rewrite_encodes_no_frame_on_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many notes there are, the loop encodes only the frames that are appended, one in a turn."""
    monkeypatch.setattr(notes_module, "_FRAME_NOTES", 4)
    on_loop: list[int] = []
    elsewhere: list[int] = []
    loop_thread = threading.get_ident()

    def encode(notes: Sequence[tuple[BlockKey, bytes]], owner: int) -> bytes:
        (on_loop if threading.get_ident() == loop_thread else elsewhere).append(len(notes))
        return encode_notes(notes, owner)

    async with opened(tmp_path, room_for(64)) as rig:
        rig.session.notes._slack_bytes = 0
        monkeypatch.setattr(notes_module, "encode_notes", encode)
        keys = list(await rig.put_new(48))
        await note(rig, keys)
        assert on_loop == [4] * 12
        # The file is rewritten whenever it has doubled.
        assert set(elsewhere) == {4}
        assert len(elsewhere) >= 6
        assert await rig.backend.notes() == {key: b"note of " + key for key in keys}


class SlowNotes(OsDisk):
    """A disk on which a write of notes ends only when released."""

    def __init__(self) -> None:
        self.wrote, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        written = super().pwritev(fd, buffers, offset)
        if os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) == NOTES_NAME:
            self.wrote.set()
            self.may_end.wait(30)
        return written


async def test_notes_written_during_a_read_are_kept(tmp_path: Path) -> None:
    """The end of the file stays known, so later notes neither overwrite earlier ones nor leave a gap."""
    async with opened(tmp_path, room_for(64), disk=(disk := SlowNotes())) as rig:
        keys = list(await rig.put_new(6))
        await note(rig, keys[:2])
        disk.wrote.clear()
        disk.may_end.clear()
        rig.backend.note([(key, b"note") for key in keys[2:4]])
        await asyncio.to_thread(disk.wrote.wait, 30)
        reading = asyncio.create_task(rig.backend.notes())
        await asyncio.wait({reading}, timeout=0.2)
        disk.may_end.set()
        await reading
        await note(rig, keys[4:])
        assert (await rig.backend.notes()).keys() == set(keys)


class NoNotes(OsDisk):
    """A disk that fails every write of notes."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        if os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) == NOTES_NAME:
            raise OSError(errno.ENOSPC, "no note is written")
        return super().pwritev(fd, buffers, offset)


async def test_a_full_disk_costs_only_the_notes(tmp_path: Path) -> None:
    """Blocks are stored and read as usual."""
    async with opened(tmp_path, room_for(64), disk=NoNotes()) as rig:
        keys = list(await rig.put_new(4))
        await note(rig, keys)
        assert await rig.backend.notes() == {}
        await note(rig, keys)
        assert await rig.backend.exists(keys) == [True] * 4
    async with opened(tmp_path, room_for(64)) as rig:
        assert len(await rig.backend.exists(keys)) == 4
        await note(rig, keys)
        assert (await rig.backend.notes()).keys() == set(keys)


async def test_forged_lengths_take_no_memory(tmp_path: Path) -> None:
    """A frame whose stated length exceeds the file is ignored."""
    async with opened(tmp_path, room_for(64)) as rig:
        keys = list(await rig.put_new(2))
        await note(rig, keys)
    path = file_of(tmp_path)
    content = bytearray(path.read_bytes())
    content[8:12] = b"\xff\xff\xff\xff"
    assert list(read_notes(lambda at, size: memoryview(content)[at : at + size], 0)) == []
    path.write_bytes(content)
    async with opened(tmp_path, room_for(64)) as rig:
        assert await rig.backend.notes() == {}
