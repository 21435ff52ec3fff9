"""Space of segments: full filesystems, capacity over all engines, unfinished segments."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import subprocess
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from kvstore.backends.disk.limits import Limits
from kvstore.config import Capacity
from kvstore.diskio import OsDisk
from kvstore.errors import BackendUnavailableError
from kvstore.namespace import Namespace
from kvstore.testing.waiting import eventually_async
from kvstore.types import BlockKey, Outcome
from tests.disk.rig import NAMESPACE, SLOT, BadDisk, Rig, filled, segment_bytes, tables
from tests.disk.rig import opened as opened_at
from tests.diskio.faulty_disk import FaultyDisk

_T = TypeVar("_T")


OFTEN = Limits(upkeep_s=0.05, ask_again_s=0.05)
"""Engines look after their space twenty times as often."""

opened = partial(opened_at, limits=OFTEN)


class SizedDisk(OsDisk):
    """A disk that reports a fixed length and number of free bytes, or those that segments in ``root`` leave of it."""

    free = 1 << 40
    total = 1 << 40
    root: Path | None = None

    def statvfs(self, fd: int) -> Any:
        free = self.free - (segment_bytes(self.root) if self.root is not None else 0)
        return SimpleNamespace(f_bavail=max(0, free), f_frsize=1, f_blocks=self.total)


async def test_full_filesystem_refuses_stores_and_leaves_no_file(tmp_path: Path) -> None:
    """Without room for a segment, stores are NO_SPACE; with some segments, they evict."""
    disk = FaultyDisk()
    async with opened(tmp_path / "a", 16, disk=disk) as rig:
        disk.fail("fallocate", errno.ENOSPC, forever=True)
        assert await rig.put({rig.maker.key(): rig.maker.payload()}) == [Outcome.NO_SPACE]
        assert list(tmp_path.rglob("*.seg")) == list(tmp_path.rglob("*.tab*")) == []
        disk.heal()
        values = {rig.maker.key(): rig.maker.payload() for _ in range(4)}

        async def is_stored() -> bool:
            return all(outcome.ok for outcome in await rig.put(values))

        await eventually_async(is_stored)
        disk.fail("fallocate", errno.ENOSPC, forever=True)
        for _ in range(8):
            await rig.put_new(1)
        assert len(tables(tmp_path)) == 4
        assert len(rig.removed) >= 8
        assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("op", ["fallocate", "pwritev", "fdatasync", "rename"])
async def test_failed_segment_leaves_no_file(tmp_path: Path, op: str) -> None:
    """Whichever call fails, the store fails, no file is left, and the next store succeeds."""
    disk = FaultyDisk()
    async with opened(tmp_path / "a", 16, disk=disk, engine="threads") as rig:
        disk.fail(op, errno.EIO)
        assert await rig.put({rig.maker.key(): rig.maker.payload()}) == [Outcome.IO_ERROR]
        assert list(tmp_path.rglob("*.seg")) == list(tmp_path.rglob("*.tab*")) == []
        await rig.has_all(await rig.put_new(4))


async def test_unfinished_segment_is_removed(tmp_path: Path) -> None:
    """A segment without a table, a table without one and an unfinished table are removed when the next is made."""
    async with opened(tmp_path / "a", 16) as rig:
        await rig.put_new(1)
        namespace = tables(tmp_path)[0].parent
        (namespace / "000007.seg").write_bytes(bytes(SLOT))
        (namespace / "000007.tab.tmp").write_bytes(b"half of a head")
        # Tables are not counted towards the capacity, so one whose segment was deleted by hand would stay for ever.
        (namespace / "000008.tab").write_bytes(bytes(4096))
        (namespace / "000008.notes").write_bytes(b"")
        await rig.put_new(1)
        assert {path.name[:6] for path in namespace.glob("0*")} == {"000000", "000001"}


async def test_temporary_files_of_older_versions_are_removed(tmp_path: Path) -> None:
    """A start that was killed left them under random names: one goes at the next start, one with the next segment."""
    await filled(tmp_path, 1)
    left = [tmp_path / ".kvstore/disk.json.1a2b3c4d.tmp", tables(tmp_path)[0].with_name("namespace.json.1a2b3c4d.tmp")]
    for path in left:
        path.write_bytes(b"{")
    async with opened(tmp_path, 64) as rig:
        assert [path.exists() for path in left] == [False, True]
        await rig.put_new(8)
        assert not any(path.exists() for path in left)


async def test_segment_is_made_in_a_root_that_is_not_at_work(tmp_path: Path) -> None:
    """While one root's files are looked at, and the disk does not answer, further segments are made in the other."""
    disk, roots = BadDisk(), [tmp_path / "a", tmp_path / "b"]
    async with opened(roots, 64, disk=disk, limits=replace(OFTEN, frozen_s=3600)) as rig:
        for task in rig.session._tasks:
            task.cancel()
        space = rig.session.space
        await rig.put_new(4)
        await space.close()
        before = [tables(root) for root in roots]
        disk.ops, disk.bad, disk.gate = ("fstat",), str(before[0][0].with_suffix("")), threading.Event()
        looking = asyncio.create_task(space.drop_lost(rig.session.roots[0]))
        try:
            await eventually_async(lambda: disk.waiting, what="a look at the files")
            async with asyncio.timeout(20):
                await rig.put_new(16)
        finally:
            disk.gate.set()
        await looking
        assert tables(roots[0]) == before[0]
        assert len(tables(roots[1])) >= len(before[1]) + 7


async def test_segment_that_can_not_be_let_go_holds_up_no_other_root(tmp_path: Path) -> None:
    """Each root gives up a segment at a time: one that is still read does not keep another root from giving one."""
    roots = [tmp_path / "a", tmp_path / "b"]
    async with opened(roots, 64) as rig:
        for task in rig.session._tasks:
            task.cancel()
        await rig.put_new(64)
        session = rig.session
        index, of_first = session.index, session.index.segments_in(0)
        index.pin([segment.first for segment in of_first])
        for root in session.roots:
            root.capacity = Capacity(0)
            await session.space.share(root)
        assert {segment.root: remove for segment, remove in session.space._leaving.items()} == {0: True}
        assert [len(tables(root)) for root in roots] == [16, 15]
        index.unpin([segment.first for segment in of_first])


async def test_engines_together_keep_the_capacity(tmp_path: Path) -> None:
    """Segments of three engines that store at once never exceed the capacity."""
    async with (
        opened(tmp_path / "a", 32) as first,
        opened(tmp_path / "a", 32) as second,
        opened(tmp_path / "a", 32) as third,
    ):
        for _ in range(8):
            batches = [
                rig.put({rig.maker.key(): rig.maker.payload() for _ in range(3)}) for rig in (first, second, third)
            ]
            outcomes = {outcome for batch in await asyncio.gather(*batches) for outcome in batch}
            assert outcomes <= {Outcome.OK, Outcome.NO_SPACE}
            assert sum(path.stat().st_size for path in tmp_path.rglob("*.seg")) <= 32 * SLOT


async def test_reserve_stays_free(tmp_path: Path) -> None:
    """No segment is made that would leave less free space than the reserve; with room again, stores succeed."""
    disk = SizedDisk()
    async with opened(tmp_path, 64, disk=disk, reserve="1MiB") as rig:
        disk.free = (1 << 20) + 4 * SLOT - 1
        assert set(await rig.put({rig.maker.key(): rig.maker.payload()})) == {Outcome.NO_SPACE}
        assert segment_bytes(tmp_path) == 0
        disk.free += 1
        await eventually_async(lambda: stores(rig))
        assert segment_bytes(tmp_path) == 4 * SLOT


async def stores(rig: Rig) -> bool:
    """Return whether a new block is stored."""
    return (await rig.put({rig.maker.key(): rig.maker.payload()}))[0].ok


async def test_shares_follow_the_size_of_the_volume(tmp_path: Path) -> None:
    """An engine uses its share of a volume that grew while it ran, and keeps the larger reserve free."""
    disk = SizedDisk()
    disk.total = 16 * SLOT
    async with opened(tmp_path, "100%", disk=disk, reserve="25%") as rig:
        for _ in range(32):
            await rig.put_new(1)
        assert segment_bytes(tmp_path) <= 16 * SLOT
        disk.total, disk.free = 64 * SLOT, 32 * SLOT

        async def has_grown() -> bool:
            await rig.put_new(1)
            return segment_bytes(tmp_path) >= 60 * SLOT

        await eventually_async(has_grown)
        assert rig.backend.stats().capacity_bytes == 64 * SLOT
        disk.free = 16 * SLOT - 1
        before = segment_bytes(tmp_path)
        await eventually_async(lambda: segment_bytes(tmp_path) < before)
        disk.free = 32 * SLOT


@pytest.mark.parametrize("engines", [1, 3])
async def test_segments_are_removed_to_restore_the_reserve(tmp_path: Path, engines: int) -> None:
    """When other programs fill the disk beyond the reserve, engines remove as many segments as needed, in all."""
    disk = SizedDisk()
    disk.root, disk.free = tmp_path, (1 << 20) + 96 * SLOT
    async with contextlib.AsyncExitStack() as stack:
        rigs = [
            await stack.enter_async_context(opened(tmp_path, 64, disk=disk, reserve="1MiB")) for _ in range(engines)
        ]
        values: dict[BlockKey, bytes] = {}
        for number in range(14):
            # The first one holds most.
            rig = rigs[number % engines if number < 12 else 0]
            new = await rig.put_new(4)
            values |= new if rig is rigs[0] else {}
        assert segment_bytes(tmp_path) == 56 * SLOT
        disk.free -= 41 * SLOT
        await eventually_async(lambda: segment_bytes(tmp_path) == 52 * SLOT)
        await asyncio.sleep(0.5)
        assert segment_bytes(tmp_path) == 52 * SLOT
        gone = {key for key, _ in rigs[0].removed}
        assert len(gone) == 4
        assert gone <= set(values)
        assert all({key for key, _ in rig.removed} <= gone for rig in rigs)
        await rigs[0].has_all({key: values[key] for key in values if key not in gone})


async def test_segments_without_a_holder_go_before_those_in_use(tmp_path: Path) -> None:
    """To restore the reserve, segments that no engine holds are removed, and no block in use."""
    disk = SizedDisk()
    disk.root, disk.free = tmp_path, (1 << 20) + 64 * SLOT
    async with opened(tmp_path, 64) as rig:
        for _ in range(10):
            await rig.put_new(4)
    async with (
        opened(tmp_path, 64, namespace=Namespace({"test": "another model"})),
        opened(tmp_path, 64, disk=disk, reserve="1MiB") as rig,
    ):
        assert rig.backend.stats().gauges["segments"] == 8
        keys = [info.key async for info in rig.backend.scan()]
        ours = list(itertools.compress(keys, rig.backend.own(keys)))
        assert len(ours) == 32
        disk.free -= 25 * SLOT
        await eventually_async(lambda: segment_bytes(tmp_path) == 36 * SLOT)
        disk.free -= 4 * SLOT
        await eventually_async(lambda: segment_bytes(tmp_path) == 32 * SLOT)
        assert not {key for key, _ in rig.removed}.intersection(ours)
        assert rig.backend.stats().gauges["segments"] == 8


async def test_full_filesystem_gives_the_room_of_unused_segments(tmp_path: Path) -> None:
    """Where a quota leaves no room although the filesystem reports some, segments without a holder are removed."""
    disk = FaultyDisk()
    (tmp_path / "kv" / ("0" * 64)).mkdir(parents=True, mode=0o700)
    for number in range(4):
        (tmp_path / "kv" / ("0" * 64) / f"{number:06}.seg").write_bytes(bytes(SLOT))
    async with opened(tmp_path / "kv", 64, disk=disk) as rig:
        disk.fail("fallocate", errno.EDQUOT)
        await rig.put_new(1)
        assert len(list((tmp_path / "kv" / ("0" * 64)).iterdir())) == 3


@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS, errno.ENOSPC])
async def test_root_that_takes_no_segments_costs_its_room_only(tmp_path: Path, error: int) -> None:
    """Segments are made in the other root; once it is full, blocks are evicted; a root that works again is used."""
    disk, roots = BadDisk(), [tmp_path / "a", tmp_path / "b"]
    async with opened(roots, 64, disk=disk, engine="threads") as rig:
        disk.ops, disk.bad, disk.error = ("open", "fallocate"), str(roots[1]), error
        for _ in range(32):
            await rig.put_new(2)
        assert (segment_bytes(roots[0]), segment_bytes(roots[1])) == (32 * SLOT, 0)
        disk.ops = ()

        async def is_used() -> bool:
            await rig.put_new(2)
            return segment_bytes(roots[1]) > 0

        await eventually_async(is_used)


@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS])
async def test_root_where_nothing_can_be_removed_loses_one_segment(tmp_path: Path, error: int) -> None:
    """Where the reserve can't be restored, one segment is given up, all other blocks stay, and stores go on."""
    disk, sizes, roots = BadDisk(), SizedDisk(), [tmp_path / "a", tmp_path / "b"]
    disk.statvfs = sizes.statvfs  # type: ignore[method-assign]
    async with opened(roots, 64, disk=disk, engine="threads", reserve="1MiB") as rig:
        values: dict[BlockKey, bytes] = {}
        for _ in range(12):
            values |= await rig.put_new(4)
        disk.ops, disk.bad, disk.error = ("unlink", "ftruncate"), str(tmp_path), error
        sizes.free = 0
        await eventually_async(lambda: rig.backend.stats().counters.get("upkeep_shares_errors", 0) > 3)
        gone = {key for key, _ in rig.removed}
        assert len(gone) <= 2 * 4
        await rig.has_all({key: values[key] for key in values if key not in gone})
        disk.ops = ()
        sizes.free = 1 << 40
        await eventually_async(lambda: rig.backend.stats().gauges["segment_bytes"] == segment_bytes(tmp_path))
        await rig.put_new(4)


async def test_deleted_segments_are_closed(tmp_path: Path) -> None:
    """Segments deleted under an engine keep no space: their files are closed, and others are made."""
    async with opened(tmp_path, 64) as rig:
        for _ in range(15):
            await rig.put_new(4)
        for path in list(tmp_path.rglob("*.seg"))[:8]:
            path.unlink()
        await eventually_async(lambda: rig.backend.stats().gauges["segments"] == 7)
        await eventually_async(lambda: not deleted_files(tmp_path))
        await rig.put_new(20)
        assert segment_bytes(tmp_path) == rig.backend.stats().gauges["segment_bytes"]


async def test_files_under_the_names_of_deleted_ones_stay(tmp_path: Path) -> None:
    """An engine whose segment was deleted does not remove the files that have its names since."""
    async with opened(tmp_path, 64) as rig:
        await rig.put_new(4)
        paths = [tables(tmp_path)[0].with_suffix(ending) for ending in (".seg", ".tab")]
        for path in paths:
            path.unlink()
            path.write_bytes(b"another engine's")
        await eventually_async(lambda: rig.backend.stats().counters["segments_given_up"] == 1)
        assert [path.read_bytes() for path in paths] == [b"another engine's"] * 2


@pytest.mark.parametrize("directory", [NAMESPACE.hex, ".kvstore"])
async def test_renamed_directory_counts_as_deleted(tmp_path: Path, directory: str) -> None:
    """An engine makes no segment where others do not look, keeps none there, and stores in its other root."""
    renamed, other = tmp_path / "renamed", tmp_path / "other"
    async with opened([renamed, other], 128) as rig:
        await rig.put_new(16)
        (renamed / directory).rename(renamed / "kept")
        before = segment_bytes(renamed)
        while rig.backend.stats().gauges["segment_bytes"] < 64 * SLOT:
            await rig.put_new(4)
        assert segment_bytes(renamed) <= before
        assert rig.backend.stats().ready
        if directory == NAMESPACE.hex:
            await eventually_async(lambda: not list(renamed.rglob("*.seg")))
    async with opened(renamed, 64) as rig:
        await rig.put_new(4)
        (renamed / directory).rename(renamed / "kept again")
        await eventually_async(lambda: rig.backend.stats().is_lost)
        assert not rig.backend.stats().ready
        with pytest.raises(BackendUnavailableError, match="renamed"):
            await rig.put_new(1)


def deleted_files(root: Path) -> list[str]:
    """Return the deleted segments and tables that this process has open."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [
        link for link in links if link.startswith(str(root)) and link.endswith((".seg (deleted)", ".tab (deleted)"))
    ]


async def test_engine_starts_without_room_for_its_file(tmp_path: Path) -> None:
    """On a disk without inodes, an engine starts, loads, and stores into the segments that are there."""
    async with opened(tmp_path, 16) as rig:
        values = await rig.put_new(12)
    disk = BadDisk()
    disk.ops, disk.bad, disk.name, disk.error = ("open",), str(tmp_path), "engine.", errno.ENOSPC
    async with opened(tmp_path, 16, disk=disk, engine="threads") as rig:
        await rig.has_all(values)
        for _ in range(8):
            await rig.put_new(4)


@pytest.mark.parametrize("absent", [0, 1])
async def test_absent_drive_is_reported_and_loses_nothing(tmp_path: Path, absent: int) -> None:
    """If a drive is not mounted, its empty mount point stays empty; once it is mounted, all blocks are there."""
    roots = [tmp_path / "a", tmp_path / "b"]
    async with opened(roots, 64) as rig:
        values = await rig.put_new(40)
    roots[absent].rename(tmp_path / "unmounted")
    roots[absent].mkdir(mode=0o700)
    for _ in range(2):
        with pytest.raises(BackendUnavailableError, match=f"{roots[absent]}.*empty now. Mount its drive"):
            async with opened(roots, 64):
                pass
        assert list(roots[absent].iterdir()) == []
    roots[absent].rmdir()
    (tmp_path / "unmounted").rename(roots[absent])
    async with opened(roots[::-1], 64) as rig:
        await rig.has_all(values)


async def test_drive_can_be_replaced_added_and_taken_away(tmp_path: Path) -> None:
    """An empty drive is used after the directory that the error names is made; any number of drives may be added."""
    roots = [tmp_path / name for name in "abc"]
    async with opened(roots[:2], 64) as rig:
        await rig.put_new(40)
    roots[1].rename(tmp_path / "broken")
    with pytest.raises(BackendUnavailableError) as caught:
        async with opened(roots[:2], 64):
            pass
    command = str(caught.value).partition("do '")[2].partition("'")[0]
    await asyncio.to_thread(subprocess.run, command.split(), check=True)
    for some in (roots[:2], roots, roots[:1], [roots[0], tmp_path / "d"]):
        async with opened(some, 64) as rig:
            await rig.has_all(await rig.put_new(4))


async def test_many_blocks_are_few_files(tmp_path: Path) -> None:
    """The number of files depends on the bytes, not on the number of blocks (sglang#28653)."""
    async with opened(tmp_path, "64MiB") as rig:
        values: dict[bytes, bytes] = {}
        for _ in range(20):
            values |= await rig.put_new(200)
        assert sum(path.is_file() for path in tmp_path.rglob("*")) < 60
        await rig.has_all(values)
