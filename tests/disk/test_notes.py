"""Notes of blocks survive crashes, go with their segment, are rewritten when most are obsolete, and block no store."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from kvstore.backends.disk.note_file import encode_notes
from kvstore.diskio import OsDisk
from kvstore.testing.waiting import eventually_async
from kvstore.types import BlockKey
from tests.disk.rig import Rig, clone, opened, tables


class NoNotes(OsDisk):
    """A disk that fails every write of notes."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".notes"):
            raise OSError(errno.ENOSPC, "no note is written")
        return super().pwritev(fd, buffers, offset)


async def note(rig: Rig, keys: Sequence[BlockKey], text: bytes = b"note of ") -> None:
    """Add a note for each block, and wait until they are found."""
    rig.backend.note([(key, text + key) for key in keys])

    async def are_there() -> bool:
        found = await rig.backend.notes()
        return all(found.get(key) == text + key for key in keys)

    await eventually_async(are_there, what="the notes are written")


async def test_notes_of_held_blocks_come_back(tmp_path: Path) -> None:
    """After a kill, the last note of each held block is found; those of removed or unknown blocks are not."""
    async with opened(tmp_path / "a", 64) as rig:
        keys = list(await rig.put_new(40))
        await note(rig, keys)
        rig.backend.note([(b"never there", b"note")])
        await note(rig, keys[:5], b"another of ")
        await rig.backend.delete(keys[20:])
        copy = clone(tmp_path / "a", tmp_path / "b")
    async with opened(copy, 64) as rig:
        found = await rig.backend.notes()
        assert found == {key: (b"another of " if key in keys[:5] else b"note of ") + key for key in keys[:20]}


async def test_close_writes_the_last_notes(tmp_path: Path) -> None:
    """Any number of notes added just before a close is written."""
    async with opened(tmp_path, 64) as rig:
        keys = list(await rig.put_new(20))
        rig.backend.note([(key, 1000 * b"note of " + key) for key in keys])
    async with opened(tmp_path, 64) as rig:
        assert (await rig.backend.notes()).keys() == set(keys)


async def test_notes_go_with_their_segment(tmp_path: Path) -> None:
    """An engine that takes the segments of another one has the notes of their blocks."""
    async with opened(tmp_path, 64) as heir:
        async with opened(tmp_path, 64) as rig:
            keys = list(await rig.put_new(4))
            await note(rig, keys)
            assert await heir.backend.notes() == {}
        await eventually_async(lambda: heir.backend.stats().blocks == 4, what="the segment is taken")
        assert (await heir.backend.notes()).keys() == set(keys)


async def test_half_a_frame_is_written_over(tmp_path: Path) -> None:
    """A partial frame, as left by a kill, is overwritten; later notes follow the last complete frame."""
    async with opened(tmp_path, 64) as rig:
        keys = list(await rig.put_new(6))
        await note(rig, keys[:2])
    [path] = tmp_path.rglob("*.notes")
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(encode_notes([(keys[5], b"x" * 1000)], 1)[:-3])
    async with opened(tmp_path, 64) as rig:
        assert (await rig.backend.notes()).keys() == set(keys[:2])
        await note(rig, keys[2:4])
        assert (await rig.backend.notes()).keys() == set(keys[:4])
    assert path.stat().st_size == 2 * whole


async def test_files_of_notes_do_not_grow_without_bound(tmp_path: Path) -> None:
    """A file is rewritten with the notes of the stored blocks, and ends with its segment."""
    async with opened(tmp_path, 32) as rig:
        for _ in range(40):
            keys = list(await rig.put_new(16))
            await note(rig, keys, 16 * b"note of ")
            assert all(path.stat().st_size < 16_000 for path in tmp_path.rglob("*.notes"))
        assert (await rig.backend.notes()).keys() >= set(keys)
    assert not list(tmp_path.rglob("*.tmp"))
    for path in tables(tmp_path):
        path.unlink()
    async with opened(tmp_path, 32) as rig:
        await rig.put_new(1)
        assert not list(tmp_path.rglob("*.notes"))


async def test_full_disk_costs_only_the_notes(tmp_path: Path) -> None:
    """Blocks are stored and loaded as usual."""
    async with opened(tmp_path, 64, disk=NoNotes()) as rig:
        values = await rig.put_new(4)
        rig.backend.note([(key, b"note") for key in values])
        assert await rig.backend.notes() == {}
        await rig.has_all(values)
    async with opened(tmp_path, 64) as rig:
        await note(rig, list(values))
