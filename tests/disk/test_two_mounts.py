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
from tests.disk.rig import Rig, opened, stores

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
@pytest.mark.parametrize("is_full", [True, False], ids=["full", "read-only"])
async def test_one_drive_takes_no_blocks(drives: list[Path], bad: int, is_full: bool) -> None:
    """Loads go on, stores go to the other drive; a full one is used again once it has room."""
    roots = [drive / "kv" for drive in drives]
    async with opened(roots, BLOCKS) as rig:
        values = await half_full(rig)
        if not is_full:
            await asyncio.to_thread(make_read_only, drives[bad])
        with filled(drives[bad]) if is_full else contextlib.nullcontext():
            await rig.has_all(values)
            found = await stores(rig, BLOCKS)
            assert found[Outcome.OK] >= BLOCKS - (0 if is_full else 8), found
            left = await rig.still_there(values)
            assert is_full or len(left) >= len(values) // 2 - 8
            await rig.has_all(left)
        if is_full:
            await rig.backend.probe()
            rig.session.space._full_until = 0.0
            assert await stores(rig, BLOCKS) == {Outcome.OK: BLOCKS}
            await rig.has_all(await rig.put_new(4))
    if not is_full:
        with pytest.raises((ConfigError, BackendUnavailableError), match=str(roots[bad])):
            async with opened(roots, BLOCKS):
                pass


@pytest.mark.parametrize("bad", [0, 1])
async def test_one_drive_is_unmounted(drives: list[Path], bad: int) -> None:
    """A running engine goes on; the next start reports the drive and changes nothing; then all blocks are there."""
    roots = [drive / "kv" for drive in drives]
    image = drives[bad].parent / "disk.img"
    async with opened(roots, BLOCKS) as rig:
        values = await half_full(rig)
        await asyncio.to_thread(subprocess.run, ["umount", "-l", str(drives[bad])], check=True)
        await rig.has_all(values)
        values |= await rig.put_new(4)
    for _ in range(2):
        with pytest.raises(BackendUnavailableError, match=f"{roots[bad]}.*Mount its drive"):
            async with opened(roots, BLOCKS):
                pass
        assert list(drives[bad].iterdir()) == []
    drives[bad].rmdir()
    with mounted(drives[bad], "-o", "loop", str(image)):
        async with opened(roots, BLOCKS) as rig:
            await rig.has_all(values)
    # The fixture unmounts it.
    await asyncio.to_thread(subprocess.run, ["mount", "-o", "loop", str(image), str(drives[bad])], check=True)
