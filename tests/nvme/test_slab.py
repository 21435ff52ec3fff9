"""The files of the nvme backend: lock, modes, space, lengths, formats, several drives."""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path

import pytest

from kvstore.backends.nvme import NvmeBackend, NvmeConfig
from kvstore.backends.nvme.layout import SLAB_NAME
from kvstore.config import Capacity, decode_config
from kvstore.errors import BackendUnavailableError, ConfigError, LockedError, NoSpaceError
from kvstore.namespace import Namespace
from kvstore.testing.faulty_disk import FaultyDisk
from kvstore.types import Outcome
from tests.nvme.rig import GEOMETRY, NAMESPACE, SLOT, opened, room_for


async def test_a_second_engine_is_refused(tmp_path: Path) -> None:
    """While one engine has a slab another is told so and what to do; after its close the slab can be had."""
    async with opened(tmp_path, room_for(4)):
        with pytest.raises(LockedError, match="in use by another engine"):
            async with opened(tmp_path, room_for(4)):
                pass
    async with opened(tmp_path, room_for(4)) as rig:
        await rig.put_new(1)


async def test_modes_and_space(tmp_path: Path) -> None:
    """Files are 0600 and directories 0700 whatever the umask, and the space is there before it is used."""
    before = os.umask(0)
    try:
        async with opened(tmp_path / "kv", room_for(100)) as rig:
            await rig.put_new(3)
            slab = (tmp_path / "kv" / SLAB_NAME).stat()
            assert slab.st_size == room_for(100)
            assert slab.st_blocks * 512 >= room_for(100)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "kv").iterdir()} == {0o600}


async def test_no_room_for_the_slab(tmp_path: Path) -> None:
    """A filesystem that can't reserve the capacity is a clear error, and nothing stays behind."""
    disk = FaultyDisk()
    disk.fail("fallocate", errno.ENOSPC)
    with pytest.raises(NoSpaceError, match="Lower 'capacity'"):
        async with opened(tmp_path, room_for(4), disk=disk):
            pass
    assert list(tmp_path.iterdir()) == []
    assert disk.open_fds == {}


async def test_no_room_to_grow_keeps_what_there_is(tmp_path: Path) -> None:
    """When a slab can't grow, its blocks are still there with the old capacity."""
    async with opened(tmp_path, room_for(4)) as rig:
        values = await rig.put_new(4)
    disk = FaultyDisk()
    disk.fail("fallocate", errno.ENOSPC)
    with pytest.raises(NoSpaceError):
        async with opened(tmp_path, room_for(400), disk=disk):
            pass
    async with opened(tmp_path, room_for(4)) as rig:
        assert await rig.get(list(values)) == list(values.values())


async def test_a_slab_grows_and_shrinks(tmp_path: Path) -> None:
    """A changed capacity takes effect at the next start; a shrunk slab keeps the blocks that still have a place."""
    async with opened(tmp_path, room_for(10)) as rig:
        first = await rig.put_new(10)
    async with opened(tmp_path, room_for(30), seed=2) as rig:
        more = await rig.put_new(20)
        assert rig.removed == []
        everything = first | more
        assert await rig.get(list(everything)) == list(everything.values())
    async with opened(tmp_path, room_for(12), seed=3) as rig:
        assert (tmp_path / SLAB_NAME).stat().st_size == room_for(12)
        found = await rig.scanned()
        assert len(found) == 12
        assert await rig.get(sorted(found)) == [everything[key] for key in sorted(found)]
        await rig.put_new(12)
        assert set(rig.removed) == found


async def test_other_slots_begin_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Blocks of another length make the slab begin anew, which is said; nothing old is ever found again."""
    async with opened(tmp_path, room_for(10)) as rig:
        old = await rig.put_new(10)
    backend = NvmeBackend(NvmeConfig(paths=str(tmp_path), capacity=Capacity(room_for(10))))
    await backend.open(NAMESPACE, type(GEOMETRY)(GEOMETRY.header_bytes, 4096))
    await backend.close()
    assert "begins anew" in caplog.text
    async with opened(tmp_path, room_for(10)) as rig:
        assert await rig.scanned() == set()
        assert await rig.get(list(old)) == [None] * 10


async def test_an_unknown_version_is_refused_or_begins_anew(tmp_path: Path) -> None:
    """A slab of a later format is refused, left alone, and thrown away only on request."""
    async with opened(tmp_path, room_for(4)) as rig:
        await rig.put_new(4)
    path = tmp_path / SLAB_NAME
    content = bytearray(path.read_bytes())
    for copy in (0, 4096):
        content[copy + 8] = 99
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="format version 99"):
        async with opened(tmp_path, room_for(4)):
            pass
    assert path.read_bytes() == content
    async with opened(tmp_path, room_for(4), unknown_format="fresh") as rig:
        assert await rig.scanned() == set()
        await rig.put_new(4)


async def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    """A file in the slab's place that is none is never overwritten unasked."""
    (tmp_path / SLAB_NAME).write_bytes(b"precious" * 10_000)
    with pytest.raises(ConfigError, match="not a slab"):
        async with opened(tmp_path, room_for(4)):
            pass
    assert (tmp_path / SLAB_NAME).read_bytes() == b"precious" * 10_000


@pytest.mark.parametrize("copies", [[0], [4096], [0, 4096]])
async def test_a_damaged_superblock(tmp_path: Path, copies: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """One damaged copy costs nothing; when both are, the slab begins anew and says so."""
    async with opened(tmp_path, room_for(4)) as rig:
        values = await rig.put_new(4)
    with (tmp_path / SLAB_NAME).open("r+b") as file:
        for copy in copies:
            file.seek(copy + 40)
            file.write(b"\xff\xff")
    async with opened(tmp_path, room_for(4)) as rig:
        assert await rig.scanned() == (set(values) if len(copies) == 1 else set())
    assert ("damaged" in caplog.text) == (len(copies) == 2)


async def test_an_unfinished_slab_is_finished(tmp_path: Path) -> None:
    """A kill while the slab was being made leaves an empty or blank file, which the next start takes."""
    for content in (b"", bytes(100_000)):
        (tmp_path / SLAB_NAME).write_bytes(content)
        async with opened(tmp_path, room_for(4)) as rig:
            await rig.put_new(4)
        (tmp_path / SLAB_NAME).unlink()


async def test_blocks_are_spread_over_drives(tmp_path: Path) -> None:
    """Each of several drives gets its share, and a drive that is away takes only its own blocks with it."""
    drives = [tmp_path / name for name in "abc"]
    async with opened(drives, 3 * room_for(20)) as rig:
        values = await rig.put_new(60)
        sizes = [(drive / SLAB_NAME).stat().st_size for drive in drives]
        assert sizes == [room_for(20)] * 3
    async with opened(drives, 3 * room_for(20)) as rig:
        assert await rig.get(list(values)) == list(values.values())
    async with opened(drives[:2], 2 * room_for(20)) as rig:
        found = await rig.scanned()
        assert len(found) == 40
        again = {key: payload for key, payload in values.items() if key not in found}
        assert await rig.put(dict(list(again.items())[:5])) == [Outcome.OK] * 5
    async with opened(drives, 3 * room_for(20)) as rig:
        stats = rig.backend.stats()
        assert stats.blocks + stats.gauges["free_slots"] == 60
        found = await rig.scanned()
        assert await rig.get(sorted(found)) == [values[key] for key in sorted(found)]


async def test_other_namespaces_make_room(tmp_path: Path) -> None:
    """Blocks of another namespace stay until their room is needed, count as used, and are never told of."""
    async with opened(tmp_path, room_for(10)) as rig:
        old = await rig.put_new(10)
    async with opened(tmp_path, room_for(10), namespace=Namespace({"another": 1}), seed=2) as rig:
        assert await rig.scanned() == set()
        assert rig.backend.stats().blocks == 10
        await rig.put_new(4)
        assert rig.removed == []
    async with opened(tmp_path, room_for(10)) as rig:
        assert await rig.scanned() == set(list(old)[4:])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"paths": [], "capacity": "1GiB"}, "paths"),
        ({"paths": ["/a", "/a"], "capacity": "1GiB"}, "each directory once"),
        ({"paths": "/a", "capacity": "1GiB", "threads": 0}, "threads"),
        ({"paths": "/a", "capacity": "1GiB", "engine": "uring"}, "io_uring"),
        ({"capacity": "1GiB"}, "paths"),
    ],
)
def test_bad_configurations(options: dict[str, object], text: str) -> None:
    """Values that make no sense are refused by name."""
    with pytest.raises(ConfigError, match=text):
        decode_config(NvmeConfig, options, where="nvme tier")


async def test_bad_places(tmp_path: Path) -> None:
    """A path whose parent is missing, or that is a file, and a capacity below one slot are configuration errors."""
    (tmp_path / "file").touch()
    for path, capacity in (("no/such", room_for(4)), ("file", room_for(4)), ("ok", SLOT)):
        with pytest.raises(ConfigError):
            async with opened(tmp_path / path, capacity):
                pass
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / SLAB_NAME).symlink_to(tmp_path / "file")
    with pytest.raises(BackendUnavailableError):
        async with opened(tmp_path / "link", room_for(4)):
            pass


async def test_a_forbidden_io_uring_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where io_uring is not allowed threads do the work, and one line in the log says so."""

    def refuse(entries: int) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("kvstore.diskio.uring.ring.setup", refuse)
    with caplog.at_level(logging.WARNING, "kvstore"):
        async with opened(tmp_path, room_for(4)) as rig:
            values = await rig.put_new(4)
            assert await rig.get(list(values)) == list(values.values())
            assert rig.backend.stats().gauges["io_uring"] == 0
    told = [record.message for record in caplog.records]
    assert len(told) == 1
    assert "io_uring can't be used here" in told[0]
