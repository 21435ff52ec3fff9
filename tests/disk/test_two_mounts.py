"""Two drives, each with a filesystem of its own, one of which fills, becomes read-only or is unmounted."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import BackendUnavailableError, ConfigError
from kvstore.types import BlockKey, Outcome
from tests.disk.mounts import filled, made, mounted
from tests.disk.rig import Rig, opened, room_for, stores

pytestmark = [pytest.mark.torture, pytest.mark.root, pytest.mark.timeout(180)]

BLOCKS = 128


@pytest.fixture
def drives(tmp_path: Path) -> Iterator[list[Path]]:
    """Two mounted ext4 of 32 MiB that an error makes read-only."""
    with contextlib.ExitStack() as stack:
        points = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            point = stack.enter_context(made("ext4", tmp_path / name, 32 << 20, "-F", "-m", "0", "-e", "remount-ro"))
            points.append(point)
        yield points


def make_read_only(point: Path) -> None:
    """Let a filesystem find an error."""
    source = subprocess.run(
        ["findmnt", "-n", "-o", "SOURCE", str(point)], check=True, capture_output=True, text=True
    ).stdout.strip()
    Path("/sys/fs/ext4", Path(source).name, "trigger_fs_error").write_text("for the test")


async def half_full(rig: Rig) -> dict[BlockKey, bytes]:
    """Store blocks into half of the capacity, on both drives."""
    values: dict[BlockKey, bytes] = {}
    for _ in range(BLOCKS // 8):
        values |= await rig.put_new(4)
    return values


@pytest.mark.parametrize("bad", [0, 1])
async def test_one_drive_is_full(drives: list[Path], bad: int) -> None:
    """Loads go on, stores go to the other drive unless the full one has the journals, and both are used afterwards."""
    async with opened([drive / "kv" for drive in drives], room_for(BLOCKS)) as rig:
        values = await half_full(rig)
        with filled(drives[bad]):
            await rig.has_all(values)
            found = await stores(rig, BLOCKS)
            assert set(found) <= {Outcome.OK, Outcome.NO_SPACE}, found
            assert found[Outcome.OK] == BLOCKS or not bad, found
            await rig.has_all(await rig.still_there(values))
        await rig.backend.probe()
        rig.session.space._full_until = 0.0
        assert await stores(rig, BLOCKS) == {Outcome.OK: BLOCKS}
        await rig.has_all(await rig.put_new(4))


@pytest.mark.parametrize("bad", [0, 1])
async def test_one_drive_becomes_read_only(drives: list[Path], bad: int) -> None:
    """Blocks of both are loaded. Without the second drive, few stores fail; without the first, none succeeds."""
    roots = [drive / "kv" for drive in drives]
    async with opened(roots, room_for(BLOCKS)) as rig:
        values = await half_full(rig)
        await asyncio.to_thread(make_read_only, drives[bad])
        await rig.has_all(values)
        found = await stores(rig, BLOCKS)
        if bad:
            assert found[Outcome.OK] >= BLOCKS - 8, found
        else:
            assert not found[Outcome.OK], found
        left = await rig.still_there(values)
        assert len(left) >= len(values) // 2 - 8
        await rig.has_all(left)
    with pytest.raises((ConfigError, BackendUnavailableError), match=str(roots[bad])):
        async with opened(roots, room_for(BLOCKS)):
            pass


@pytest.mark.parametrize("bad", [0, 1])
async def test_one_drive_is_unmounted(drives: list[Path], bad: int) -> None:
    """A running engine goes on; the next start reports the drive and changes nothing; then all blocks are there."""
    roots = [drive / "kv" for drive in drives]
    image = drives[bad].parent / "disk.img"
    async with opened(roots, room_for(BLOCKS)) as rig:
        values = await half_full(rig)
        await asyncio.to_thread(subprocess.run, ["umount", "-l", str(drives[bad])], check=True)
        await rig.has_all(values)
        values |= await rig.put_new(4)
    for _ in range(2):
        with pytest.raises(BackendUnavailableError, match=f"{roots[bad]}.*Mount its drive"):
            async with opened(roots, room_for(BLOCKS)):
                pass
        assert list(drives[bad].iterdir()) == []
    drives[bad].rmdir()
    with mounted(drives[bad], "-o", "loop", str(image)):
        async with opened(roots, room_for(BLOCKS)) as rig:
            await rig.has_all(values)
    # The fixture unmounts it.
    await asyncio.to_thread(subprocess.run, ["mount", "-o", "loop", str(image), str(drives[bad])], check=True)
