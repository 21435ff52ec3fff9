"""Blocks after a restart, a kill, a power cut, and changes of the files by hand."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from kvstore.diskio import OsDisk
from kvstore.tenants import Tenants, tag_of
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome, RemovalCause
from tests.disk.rig import NAMESPACE, SLOT, Rig, clone, head_of, opened, tables


class ReadOnly(OsDisk):
    """A disk that opens files of segments only for reading, as one that was remounted after errors."""

    def open_file(self, name: str, flags: int, dir_fd: int) -> int:
        if name[:6].isdigit() and flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, "read-only")
        return super().open_file(name, flags, dir_fd)


async def test_every_reported_block_is_there_after_a_kill(tmp_path: Path) -> None:
    """The state at any moment between calls has all stored blocks and none that was removed."""
    async with opened(tmp_path / "a", 64) as rig:
        values = await rig.put_new(20)
        gone = list(values)[:5]
        await rig.backend.delete(gone)
        copy = clone(tmp_path / "a", tmp_path / "b")
    async with opened(copy, 64) as rig:
        assert rig.backend.stats().blocks == 15
        assert list(await rig.backend.exists(gone)) == [False] * 5
        await rig.has_all({key: value for key, value in values.items() if key not in gone})
        await rig.put_new(40)


async def test_retired_slots_stay_retired(tmp_path: Path) -> None:
    """The slot of a damaged block is not used again, also not by the next engine."""
    async with opened(tmp_path / "a", 16) as rig:
        values = await rig.put_new(4)
        await rig.backend.quarantine(list(values))
        before = rig.backend.stats()
    async with opened(tmp_path / "a", 16) as rig:
        after = rig.backend.stats()
        assert (before.blocks, after.blocks) == (0, 0)
        assert after.gauges["free_slots"] == before.gauges["free_slots"]
        assert after.gauges["segments"] == before.gauges["segments"]


async def test_record_lost_in_a_power_cut_is_a_miss(tmp_path: Path) -> None:
    """A slot without the record of its row is a miss, is reported, and is used again; it is not retired."""
    async with opened(tmp_path / "a", 16) as rig:
        values = await rig.put_new(4)
    (segment,) = [path for path in tmp_path.rglob("*.seg") if b"\x89kvstor" in path.read_bytes()][:1]
    lost = bytes(segment.stat().st_size)
    segment.write_bytes(lost)
    async with opened(tmp_path / "a", 16) as rig:
        found = await rig.get(list(values))
        assert found.count(None) == segment.stat().st_size // SLOT
        assert [key for key, _ in rig.removed] == [key for key, back in zip(values, found, strict=True) if back is None]
        assert {cause for _, cause in rig.removed} == {RemovalCause.LOST}
        assert "quarantined_blocks" not in rig.backend.stats().counters
        assert await rig.put({key: values[key] for key, _ in rig.removed}) == [Outcome.OK] * len(rig.removed)
        await rig.has_all(values)


async def test_record_of_another_block_is_a_miss(tmp_path: Path) -> None:
    """A slot that holds the intact record of another block, as after lost writes, is a miss."""
    async with opened(tmp_path / "a", 32) as rig:
        values = await rig.put_new(2)
    (segment,) = [path for path in tmp_path.rglob("*.seg") if b"\x89kvstor" in path.read_bytes()]
    content = segment.read_bytes()
    segment.write_bytes(content[SLOT : 2 * SLOT] + content[:SLOT])
    async with opened(tmp_path / "a", 32) as rig:
        assert await rig.get(list(values)) == [None, None]


async def test_torn_row_costs_its_block_only(tmp_path: Path) -> None:
    """With one damaged row, all other blocks are there, and the slot can be used."""
    async with opened(tmp_path / "a", 64) as rig:
        values = await rig.put_new(4)
    table = next(path for path in tables(tmp_path) if b"\x01" in path.read_bytes()[head_of(path).rows_at :])
    content = bytearray(table.read_bytes())
    content[head_of(table).row_at(0) + 30] ^= 1
    table.write_bytes(content)
    async with opened(tmp_path / "a", 64) as rig:
        found = await rig.get(list(values))
        assert found.count(None) == 1
        assert all(back in (None, value) for back, value in zip(found, values.values(), strict=True))
        await rig.put_new(20)


@pytest.mark.parametrize("ending", [".tab", ".seg"])
@pytest.mark.parametrize("change", ["truncated", "emptied", "removed", "longer"])
async def test_changed_files_cost_their_segment_only(tmp_path: Path, ending: str, change: str) -> None:
    """An engine starts with files changed by hand, finds the blocks of all other segments, and stores."""
    async with opened(tmp_path / "a", 64) as rig:
        values = await rig.put_new(40)
    path = tables(tmp_path)[1].with_suffix(ending)
    if change == "removed":
        path.unlink()
    else:
        size = path.stat().st_size
        os.truncate(path, {"truncated": size - 1, "emptied": 0, "longer": size + 4096}[change])
    async with opened(tmp_path / "a", 64) as rig:
        found = await rig.get(list(values))
        assert all(back in (None, value) for back, value in zip(found, values.values(), strict=True))
        expected_lost = 0 if (ending, change) == (".tab", "longer") else 4
        assert found.count(None) == expected_lost
        await rig.put_new(8)


async def drops(rig: Rig, values: Mapping[bytes, bytes]) -> None:
    """Look for lost segments, and check that these blocks alone are reported."""
    await rig.session.space.drop_lost(rig.session.roots[0])
    assert {key for key, _ in rig.removed} == set(values)


async def test_segment_deleted_while_in_use_is_reported(tmp_path: Path) -> None:
    """Blocks of a segment whose file is deleted are reported as lost, and later stores go elsewhere."""
    async with opened(tmp_path / "a", 64) as rig:
        values = await rig.put_new(8)
        for path in tmp_path.rglob("*.seg"):
            path.unlink()
        await drops(rig, values)
        assert rig.backend.stats().blocks == 0
        again = await rig.put_new(8)
    async with opened(tmp_path / "a", 64) as rig:
        await rig.has_all(again)


async def test_segment_renamed_while_in_use_is_reported(tmp_path: Path) -> None:
    """A table under another name costs its blocks, and the table that has the name now stays."""
    async with opened(tmp_path / "a", 64) as rig:
        values = await rig.put_new(8)
        first, second = tables(tmp_path)
        first.rename(tmp_path / "kept")
        second.rename(first)
        await drops(rig, values)
        await rig.session.space.share(rig.session.roots[0])
        assert first.exists()
        assert not list(tmp_path.rglob("*.seg"))
        again = await rig.put_new(8)
    async with opened(tmp_path / "a", 64) as rig:
        await rig.has_all(again)


async def test_table_in_use_may_be_longer(tmp_path: Path) -> None:
    """A table that became longer keeps its blocks, as it does at a start."""
    async with opened(tmp_path / "a", 64) as rig:
        values = await rig.put_new(8)
        for path in tables(tmp_path):
            os.truncate(path, path.stat().st_size + 4096)
        await rig.session.space.drop_lost(rig.session.roots[0])
        await rig.has_all(values)


async def test_segments_in_use_are_not_taken(tmp_path: Path) -> None:
    """A second engine makes segments of its own within the capacity, and takes those of the first after its end."""
    async with opened(tmp_path / "a", 64) as second:
        theirs = await second.put_new(3)
        async with opened(tmp_path / "a", 64) as first:
            assert first.backend.stats().blocks == 0
            ours = await first.put_new(3)
        await second.has_all(theirs)
        used = sum(path.stat().st_size for path in tmp_path.rglob("*.seg"))
        assert used <= 64 * SLOT
    async with opened(tmp_path / "a", 64) as rig:
        await rig.has_all(theirs | ours)


async def test_block_in_two_segments_is_found_once(tmp_path: Path) -> None:
    """Of a block that two engines stored, a later engine keeps one copy and frees the other slot."""
    async with opened(tmp_path / "a", 64) as first, opened(tmp_path / "a", 64) as second:
        values = first.new(3)
        assert await asyncio.gather(first.put(values), second.put(values)) == [[Outcome.OK] * 3] * 2
    for _ in range(2):
        async with opened(tmp_path / "a", 64) as rig:
            await rig.backend.probe()
            gauges = rig.backend.stats().gauges
            assert rig.backend.stats().blocks == 3
            assert gauges["free_slots"] + 3 == gauges["segment_bytes"] // SLOT
            await rig.has_all(values)
            assert sorted([info.key async for info in rig.backend.scan()]) == sorted(values)


async def test_roots_in_another_order_have_the_same_blocks(tmp_path: Path) -> None:
    """The order of several roots means nothing, and one that is missing costs its own blocks only."""
    roots = [tmp_path / "a", tmp_path / "b"]
    async with opened(roots, 64) as rig:
        values = await rig.put_new(30)
    async with opened(roots[::-1], 64) as rig:
        await rig.has_all(values)
    async with opened(roots[:1], 32) as rig:
        found = await rig.get(list(values))
        assert 0 < found.count(None) < 30


async def test_root_of_an_older_format_is_emptied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A root of an older version loses its blocks and their space, one line says so, and files of others stay."""
    root = tmp_path / "a"
    owner = root / NAMESPACE.hex / "00ff00ff00ff00ff"
    owner.mkdir(mode=0o700, parents=True)
    (root / ".kvstore").mkdir(mode=0o700)
    (root / ".kvstore" / "disk.json").write_text('{"format": 2, "position": 0}')
    (root / ".kvstore" / "members.lock").touch()
    (root / "notes.txt").write_text("not a block")
    with (owner / "000000.seg").open("wb+") as segment:
        segment.write(b"x" * 8192)
        segment.flush()
        async with opened(root, 16) as rig:
            values = await rig.put_new(5)
        # A running engine of the older version must not keep the space.
        assert os.fstat(segment.fileno()).st_size == 0
    assert len([record for record in caplog.records if "format 2" in record.message]) == 1
    assert not owner.exists()
    assert (root / "notes.txt").exists()
    async with opened(root, 16) as rig:
        await rig.has_all(values)


async def test_foreign_objects_in_an_older_root_prevent_no_start(tmp_path: Path) -> None:
    """Links and pipes go with their directory, what a link names stays, and so does all that no kvstore made."""
    root = tmp_path / "a"
    owner = root / NAMESPACE.hex / "00ff00ff00ff00ff"
    owner.mkdir(mode=0o700, parents=True)
    (root / ".kvstore" / "mine").mkdir(mode=0o700, parents=True)
    (root / ".kvstore").chmod(0o700)
    (root / ".kvstore" / "disk.json").write_text('{"format": 2, "position": 0}')
    (root / ".kvstore" / "want.00ff00ff00ff00ff").touch()
    (tmp_path / "secret").write_text("secret")
    (owner / "000000.seg").symlink_to(tmp_path / "secret")
    os.mkfifo(owner / "journal.00000001")
    (root / ("a" * 64)).symlink_to(tmp_path)
    (root / ("b" * 64)).write_text("a file")
    async with opened(root, 16) as rig:
        await rig.has_all(await rig.put_new(5))
    assert not owner.exists() and not (root / ".kvstore" / "want.00ff00ff00ff00ff").exists()
    assert (tmp_path / "secret").read_text() == "secret"
    assert (root / ("a" * 64)).is_symlink() and (root / ("b" * 64)).is_file() and (root / ".kvstore" / "mine").is_dir()


async def test_engines_that_start_together_empty_an_older_root_once(tmp_path: Path) -> None:
    """Engines that start at once in a root of an older version all work there, and lose nothing stored since."""
    root = tmp_path / "a"
    (root / NAMESPACE.hex / "00ff00ff00ff00ff").mkdir(mode=0o700, parents=True)
    (root / ".kvstore").mkdir(mode=0o700)
    (root / ".kvstore" / "disk.json").write_text('{"format": 2}')
    async with contextlib.AsyncExitStack() as stack:
        engines = [stack.enter_async_context(opened(root, 64)) for _ in range(4)]
        stored = [await rig.put_new(4) for rig in await asyncio.gather(*engines)]
    async with opened(root, 64) as rig:
        for values in stored:
            await rig.has_all(values)


async def test_segments_of_an_engine_that_ended_are_taken_while_running(tmp_path: Path) -> None:
    """An engine takes the segments of one that ended, and reports their blocks."""
    async with opened(tmp_path / "a", 64) as rig:
        arrived: list[bytes] = []
        rig.backend.set_arrival_listener(arrived.extend)
        async with opened(tmp_path / "a", 64) as other:
            values = await other.put_new(3)
        await eventually_async(lambda: set(arrived) == set(values))
        await rig.has_all(values)


async def test_read_only_files_are_loaded(tmp_path: Path) -> None:
    """On a disk that refuses to open files for writing, blocks are loaded, and stores fail."""
    async with opened(tmp_path / "a", 16) as rig:
        values = await rig.put_new(16)
    disk = ReadOnly()
    async with opened(tmp_path / "a", 16, disk=disk, engine="threads") as rig:
        await rig.has_all(values)
        assert await rig.put({rig.maker.key(): rig.maker.payload()}) != [Outcome.OK]
        await rig.has_all(values)


@pytest.mark.parametrize("named", [True, False])
async def test_guaranteed_blocks_of_a_tenant_stay(tmp_path: Path, named: bool) -> None:
    """Another tenant's blocks displace only blocks that are not guaranteed, also after a restart."""
    tenants = msgspec.convert({"by": "cache_salt", "named": {"quiet": {"guaranteed": 0.5}}}, Tenants) if named else None
    quiet: dict[bytes, bytes] = {}
    for tenant, count in (("quiet", 24), ("noisy", 192), ("other", 192)):
        async with opened(tmp_path / "a", 64, tenants=tenants) as rig:
            for number in range(0, count, 8):
                tag = tag_of(tenant, named=tenant == "quiet")
                values = {tag + b"%028d" % n: rig.maker.payload() for n in range(number, number + 8)}
                await rig.put(values)
                if tenant == "quiet":
                    quiet |= values
            found = sum(await rig.backend.exists(list(quiet)))
            assert found == (24 if named or tenant == "quiet" else 0)
    async with opened(tmp_path / "a", 64, tenants=tenants) as rig:
        if named:
            await rig.has_all(quiet)
