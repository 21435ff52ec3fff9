"""Starts beside foreign objects, files of other users and full disks: only proven content is used."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
from pathlib import Path

import pytest

from kvstore.backends.disk.layout import SLOTS_MAX, encode_head
from kvstore.errors import BackendUnavailableError, ConfigError
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome
from tests.disk.rig import (
    NAMESPACE,
    OTHER_NAMESPACE,
    SLOT,
    Rig,
    clone,
    filled,
    head_of,
    opened,
    proved,
    segment_bytes,
    stores,
    tables,
)
from tests.diskio.faulty_disk import FaultyDisk


def plant(kind: str, target: Path, secret: Path) -> None:
    """Put a foreign object in the place of a file."""
    target.unlink(missing_ok=True)
    if kind == "link":
        target.symlink_to(secret)
    elif kind == "hardlink":
        os.link(secret, target)
    elif kind == "fifo":
        os.mkfifo(target)
    elif kind == "directory":
        target.mkdir()
    else:
        # Socket paths have a short maximum length.
        here = os.open(target.parent, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{here}/{target.name}")
        os.close(here)


@pytest.mark.parametrize("kind", ["link", "hardlink", "fifo", "directory", "socket"])
async def test_planted_objects(tmp_path: Path, kind: str) -> None:
    """Objects in place of our files are never followed, read or waited for, and cost two segments at most."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"not yours" * 1000)
    values = await filled(tmp_path / "a", 5)
    for name in ("000000.tab", "000000.seg", "000000.use", "000000.notes", "000003.seg", "000003.tab.tmp"):
        copy = clone(tmp_path / "a", tmp_path / "b")
        plant(kind, copy / NAMESPACE.hex / name, secret)
        async with opened(copy, 64) as rig:
            assert await proved(rig, values) == (1 if name in ("000000.tab", "000000.seg") else 5), name
            rig.backend.note([(key, b"note") for key in values])
            for _ in range(16):
                await rig.put_new(4)
            assert rig.backend.stats().gauges["segments"] >= 14, name
        shutil.rmtree(copy)
    assert secret.read_bytes() == b"not yours" * 1000


async def test_a_planted_table_is_not_read_into_memory(tmp_path: Path) -> None:
    """A sparse table with an intact head that names millions of slots is refused, for its segment is too short."""
    values = await filled(tmp_path, 5)
    head = head_of(tables(tmp_path)[0])._replace(slots=SLOTS_MAX)
    with tables(tmp_path)[0].open("r+b") as file:
        file.write(encode_head(head))
        file.truncate(head.table_bytes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with opened(tmp_path, 64) as rig:
        assert await proved(rig, values) == 1
        for _ in range(16):
            await rig.put_new(4)
    # In KiB; the table has more than a GiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (64 << 10)


@pytest.mark.parametrize("mode", [0o777, 0o757])
async def test_world_writable_root_is_refused(tmp_path: Path, mode: int) -> None:
    """Blocks contain users' prompts: a directory that everybody may write to is refused."""
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(ConfigError, match="every user"):
        async with opened(root, 64):
            pass


async def test_directories_of_other_users_are_left_alone(tmp_path: Path) -> None:
    """Another user's directory that looks like a namespace neither counts nor causes a failure."""
    theirs = tmp_path / OTHER_NAMESPACE.hex
    theirs.mkdir(parents=True)
    (theirs / "000000.seg").write_bytes(bytes(50 * SLOT))
    os.chown(theirs, 1000, 1000)
    async with opened(tmp_path, 64) as rig:
        for _ in range(20):
            await rig.put_new(4)
        assert segment_bytes(tmp_path / NAMESPACE.hex) == 64 * SLOT
    assert (theirs / "000000.seg").stat().st_size == 50 * SLOT
    with pytest.raises(ConfigError, match=f"{OTHER_NAMESPACE.hex}.*not a directory of this user"):
        async with opened(tmp_path, 64, namespace=OTHER_NAMESPACE):
            pass


async def test_a_full_disk_at_start(tmp_path: Path) -> None:
    """On a full disk an engine reports it or continues in an existing directory; with room it stores again."""
    disk = FaultyDisk()
    for op in ("mkdir", "fallocate", "pwritev"):
        disk.fail(op, errno.ENOSPC, forever=True)
    with pytest.raises(BackendUnavailableError, match="No space left"):
        async with opened(tmp_path / "new", 64, disk=disk):
            pass
    values = await filled(tmp_path / "a", 4)
    async with opened(tmp_path / "a", 64, disk=disk, engine="threads") as rig:
        await rig.has_all(values)
        assert set(await rig.put(rig.new(2))) == {Outcome.NO_SPACE}
        disk.heal()
        await eventually_async(lambda: has_stored(rig), what="a segment is made")


async def has_stored(rig: Rig) -> bool:
    """Return whether a new block is stored."""
    return (await stores(rig, 1))[Outcome.OK] == 1
