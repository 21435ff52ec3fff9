"""Opening and closing: unusable paths and options are refused by name, and no file or lock stays held."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvstore.backends.base import RecordGeometry
from kvstore.backends.disk import DiskBackend, DiskConfig
from kvstore.config import Capacity, decode_config
from kvstore.diskio import OsDisk
from kvstore.errors import BackendClosedError, BackendUnavailableError, ConfigError, KVStoreError
from tests.disk.rig import GEOMETRY, NAMESPACE, filled, opened
from tests.diskio.faulty_disk import FaultyDisk


async def refused(path: Path, match: str, capacity: int | str = 64, **options: Any) -> None:
    """Check that a directory is refused."""
    with pytest.raises(ConfigError, match=match):
        async with opened(path, capacity, **options):
            pass


async def test_missing_directory_is_private_under_any_umask(tmp_path: Path) -> None:
    """A missing directory is created if its parent exists; only this user has access to it and its content."""
    for mask in (0, 0o022, 0o077):
        before = os.umask(mask)
        try:
            async with opened(tmp_path / f"kv-{mask}", 64) as rig:
                await rig.put_new(4)
        finally:
            os.umask(before)
        for path in [tmp_path / f"kv-{mask}", *(tmp_path / f"kv-{mask}").rglob("*")]:
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), (mask, path)


async def test_paths_that_can_not_be_used(tmp_path: Path) -> None:
    """A missing parent, and a file in place of a directory, are named in the error, and no file is created."""
    await refused(tmp_path / "no" / "kv", "there is no directory")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    await refused(tmp_path / "file", "is not a directory")
    await refused(tmp_path / "file" / "kv", "directory")


async def test_a_path_below_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``~`` is the user's home directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    async with opened(Path("~/kv"), 64) as rig:
        await rig.put_new(1)
    assert (tmp_path / "kv" / ".kvstore").is_dir()


@pytest.mark.parametrize("error", [errno.EACCES, errno.EROFS, errno.EPERM])
async def test_a_directory_that_can_not_be_written(tmp_path: Path, error: int) -> None:
    """Missing permissions and read-only mounts are refused with a remedy."""
    disk = FaultyDisk()
    disk.fail("mkdir", error, forever=True)
    await refused(tmp_path, "may not use", disk=disk)
    assert disk.open_fds == {}


async def test_a_sticky_directory_is_fine_and_a_group_gets_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A world-writable root is accepted if it is sticky; a group-writable one causes a warning."""
    for mode, warned in ((0o1777, 0), (0o770, 1)):
        root = tmp_path / f"root-{mode}"
        root.mkdir()
        root.chmod(mode)
        caplog.clear()
        async with opened(root, 64):
            pass
        assert len([record for record in caplog.records if "group" in record.message]) == warned


async def test_capacities_that_can_not_be_used(tmp_path: Path) -> None:
    """A capacity below one block is refused with both sizes; a percentage refers to the filesystem."""
    await refused(tmp_path / "a", "one block takes 12288", "12287B")
    total = os.statvfs(tmp_path)
    async with opened(tmp_path / "b", "1%") as rig:
        wanted = total.f_blocks * total.f_frsize // 100
        assert abs(rig.backend.stats().capacity_bytes - wanted) <= 1


async def test_direct_on_requires_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without direct I/O, ``on`` refuses to start and ``auto`` uses the page cache."""

    class NoDirect(FaultyDisk):
        def open_file(self, name: str, flags: int, dir_fd: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no direct I/O")
            return super().open_file(name, flags, dir_fd)

    await refused(tmp_path / "a", "refuses direct I/O", disk=NoDirect(), direct="on")
    async with opened(tmp_path / "b", 64, disk=NoDirect()) as rig:
        await rig.has_all(await rig.put_new(4))


async def test_the_namespace_is_described(tmp_path: Path) -> None:
    """``namespace.json`` describes the directory; a damaged file is ignored."""
    async with opened(tmp_path, 64) as rig:
        values = await rig.put_new(2)
    path = tmp_path / NAMESPACE.hex / "namespace.json"
    assert json.loads(path.read_text()) == NAMESPACE.document()
    for content in ("", "[]", "x" * 100_000):
        path.write_text(content)
        async with opened(tmp_path, 64) as rig:
            await rig.has_all(values)


@pytest.mark.parametrize("plant", ["link", "fifo", "directory"])
async def test_foreign_object_in_place_of_a_description_is_ignored(tmp_path: Path, plant: str) -> None:
    """The description is informational: another object in its place is neither followed nor waited for."""
    async with opened(tmp_path / "kv", 64) as rig:
        values = await rig.put_new(2)
    path = tmp_path / "kv" / NAMESPACE.hex / "namespace.json"
    path.unlink()
    (tmp_path / "secret").write_text("{}")
    match plant:
        case "link":
            path.symlink_to(tmp_path / "secret")
        case "fifo":
            os.mkfifo(path)
        case _:
            path.mkdir()
    async with opened(tmp_path / "kv", 64) as rig:
        await rig.has_all(values)
    assert (tmp_path / "secret").read_text() == "{}"


@pytest.mark.parametrize("content", ["[]", "garbage", "", "[" * 4096])
async def test_a_damaged_layout_costs_nothing(tmp_path: Path, content: str) -> None:
    """Tables state their format themselves, so all blocks are found; the file is written again."""
    values = await filled(tmp_path, 2)
    description = tmp_path / ".kvstore" / "disk.json"
    written = description.read_text()
    description.write_text(content)
    async with opened(tmp_path, 64) as rig:
        await rig.has_all(values)
    assert description.read_text() == written


async def test_a_root_of_another_kvstore(tmp_path: Path) -> None:
    """A layout of a newer or unknown format is refused by name and left unchanged."""
    for content in ('{"format": 99}', '{"format": "new"}'):
        values = await filled(tmp_path / "kv", 2)
        description = tmp_path / "kv" / ".kvstore" / "disk.json"
        description.write_text(content)
        await refused(tmp_path / "kv", f"is of format {json.loads(content)['format']!r}.*or name another 'path'")
        assert description.read_text() == content
        description.unlink()
        async with opened(tmp_path / "kv", 64) as rig:
            await rig.has_all(values)


async def test_opening_and_closing_can_be_repeated(tmp_path: Path) -> None:
    """Closing releases every descriptor; calls before open and after close are errors, except touch and stats."""
    disk = FaultyDisk()
    config = DiskConfig(path=str(tmp_path), capacity=Capacity("64MiB"), reserve=Capacity(0))
    backend = DiskBackend(config, disk=disk)
    for _ in range(3):
        with pytest.raises(BackendClosedError):
            await backend.exists([b"key"])
        backend.touch([b"key"])
        backend.stats()
        await backend.open(NAMESPACE, GEOMETRY)
        with pytest.raises(KVStoreError, match="twice"):
            await backend.open(NAMESPACE, GEOMETRY)
        await backend.close()
        await backend.close()
        assert disk.open_fds == {}


async def test_a_disk_that_fails_at_start(tmp_path: Path) -> None:
    """EIO at start is a BackendUnavailableError that names the directory, with no file left open."""
    for op in ("open", "mkdir", "fstat", "statvfs", "flock", "scandir"):
        disk = FaultyDisk()
        disk.fail(op, errno.EIO, forever=True)
        with pytest.raises(BackendUnavailableError, match=tmp_path.name):
            async with opened(tmp_path / op, 64, disk=disk):
                pass
        assert disk.open_fds == {}, op


async def test_engines_that_start_together_make_the_directory_together(tmp_path: Path) -> None:
    """An engine that loses the race to create an object uses the existing one."""
    contexts = [opened(tmp_path / "kv", 64) for _ in range(6)]
    rigs = await asyncio.gather(*(context.__aenter__() for context in contexts))
    for rig in rigs:
        await rig.put_new(1)
    for context in contexts:
        await context.__aexit__(None, None, None)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"durability": "full"}, "'none', 'data'"),
        ({"path": []}, "1 to 64 directories"),
        ({"path": ["/a", "/a"]}, "'/a' is listed twice in 'path'"),
        ({"path": ""}, "names of directories"),
        ({"threads": 0}, "1 to 256"),
        ({"paths": "/b"}, "mean the same"),
        ({"capacty": 1}, "Did you mean 'capacity'"),
    ],
)
def test_options_that_can_not_be_used(given: dict[str, Any], match: str) -> None:
    """Each bad value is one error that names the option."""
    with pytest.raises(ConfigError, match=match):
        decode_config(DiskConfig, {"path": "/kv", "capacity": "1GiB", **given}, where="file tier")


async def test_blocks_too_long_for_a_slot_are_refused_at_start(tmp_path: Path) -> None:
    """A slot has a maximum length, which the error names."""
    backend = DiskBackend(DiskConfig(path=str(tmp_path), capacity=Capacity("64MiB")))
    with pytest.raises(ConfigError, match="1 GiB at most"):
        await backend.open(NAMESPACE, RecordGeometry(256, 2 << 30))


class NoDirectThere(OsDisk):
    """A disk that refuses direct I/O in one directory."""

    def open_file(self, name: str, flags: int, dir_fd: int) -> int:
        if flags & os.O_DIRECT and "buffered" in os.readlink(f"/proc/self/fd/{dir_fd}"):
            raise OSError(errno.EINVAL, "no direct I/O here")
        return super().open_file(name, flags, dir_fd)


async def test_one_of_two_roots_refuses_direct_io(tmp_path: Path) -> None:
    """Blocks in both roots are stored and loaded."""
    async with opened([tmp_path / "direct", tmp_path / "buffered"], 64, disk=NoDirectThere()) as rig:
        await rig.has_all(await rig.put_new(48))
        assert len(list((tmp_path / "buffered").rglob("*.seg"))) > 1


async def test_temporary_files_of_killed_starts_are_removed(tmp_path: Path) -> None:
    """Unfinished descriptions of a start that was killed are gone after the next one."""
    (tmp_path / "kv" / ".kvstore").mkdir(parents=True, mode=0o700)
    (tmp_path / "kv" / NAMESPACE.hex).mkdir(mode=0o700)
    unfinished = tmp_path / "kv" / NAMESPACE.hex / "namespace.json.tmp", tmp_path / "kv" / ".kvstore" / "disk.json.tmp"
    for path in unfinished:
        path.write_text("{")
    async with opened(tmp_path / "kv", 64):
        assert not list(tmp_path.rglob("*.tmp"))
    assert (tmp_path / "kv" / NAMESPACE.hex / "namespace.json").exists()


async def test_root_of_hard_links_is_refused_with_their_names(tmp_path: Path) -> None:
    """The error for a copy by 'cp -al' names the file and its hard links, not the owner or mode."""
    async with opened(tmp_path / "kv", 64) as rig:
        await rig.put_new(1)
    await asyncio.to_thread(subprocess.run, ["cp", "-al", str(tmp_path / "kv"), str(tmp_path / "copy")], check=True)
    await refused(tmp_path / "copy", r"disk\.json.*one hard link.*without hard links")
