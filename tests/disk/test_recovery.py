"""Recovery after a crash, a power cut or foreign files: only proven content is used."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.backends.disk.layout import FRAME_BYTES, JOURNAL_HEADER_BYTES, Kind
from kvstore.backends.disk.session import Session
from kvstore.diskio import OsDisk
from kvstore.errors import BackendUnavailableError, ConfigError
from kvstore.testing.seeds import fresh_seed
from kvstore.testing.waiting import eventually_async
from kvstore.types import BlockKey, Outcome
from tests.disk.filled_root import FRAME, filled, frame_ends, home, journal, proved
from tests.disk.rig import NAMESPACE, SLOT, clone, opened, room_for
from tests.diskio.faulty_disk import FaultyDisk
from tests.sizes import sized


def hold_scans(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Block scans of slots until the returned event is set."""
    goes_on = asyncio.Event()
    read_headers = Session._read_headers

    async def late(self: Session, *args: Any) -> Any:
        await goes_on.wait()
        return await read_headers(self, *args)

    monkeypatch.setattr(Session, "_read_headers", late)
    return goes_on


async def test_a_cut_journal(tmp_path: Path) -> None:
    """Of a journal cut inside a frame, the remaining records are known at once; other blocks are found in the slots."""
    values = await filled(tmp_path / "a")
    content = journal(tmp_path / "a").read_bytes()
    # A journal that ends with a frame counts as whole.
    places = sorted(set(range(len(content))) - set(frame_ends(content)))
    for number, at in enumerate(random.Random(seed := fresh_seed()).sample(places, sized(8, full=40))):
        copy = clone(tmp_path / "a", tmp_path / f"b{number}")
        os.truncate(journal(copy), at)
        async with opened(copy, "64MiB") as rig:
            assert await proved(rig, values) == 20, (seed, at)
            await rig.put_new(3)


async def test_a_damaged_frame_ends_a_journal(tmp_path: Path) -> None:
    """Frames behind one that a power cut left unwritten do not count, even if intact; a scan finds their blocks."""
    values = await filled(tmp_path / "a")
    path = journal(tmp_path / "a")
    content = bytearray(path.read_bytes())
    at = JOURNAL_HEADER_BYTES + 10 * FRAME
    content[at : at + FRAME] = bytes(FRAME)
    path.write_bytes(content)
    async with opened(tmp_path / "a", "64MiB") as rig:
        assert await proved(rig, values) == 20
        # New frames overwrite those behind the damage, which the next start must not mistake for new ones.
        values |= await rig.put_new(2)
        copy = clone(tmp_path / "a", tmp_path / "b")
    async with opened(copy, "64MiB") as rig:
        assert await proved(rig, values) == 22


async def test_nothing_is_left_behind_the_end_of_a_damaged_journal(tmp_path: Path) -> None:
    """The first start truncates the journal at the damage: a second one finds it intact, and does not scan."""
    values = await filled(tmp_path / "a", 60)
    path = journal(tmp_path / "a")
    content = bytearray(path.read_bytes())
    at = JOURNAL_HEADER_BYTES + 50 * FRAME
    content[at : at + FRAME] = bytes(FRAME)
    # The damage is followed by many bytes that are never overwritten.
    path.write_bytes(content + bytes(100 * FRAME))
    async with opened(tmp_path / "a", "64MiB") as rig:
        assert await proved(rig, values) == 60
        copy = clone(tmp_path / "a", tmp_path / "b")
    async with opened(copy, "64MiB") as rig:
        assert rig.session.owner.intact
        assert await proved(rig, values) == 60


async def test_a_scan_finds_an_older_copy_of_a_known_block(tmp_path: Path) -> None:
    """A block that the journal states, with another copy in a slot that the journal lost, has one slot afterwards."""
    disk = FaultyDisk()
    async with opened(tmp_path / "a", room_for(16), disk=disk, engine="threads") as rig:
        values = await rig.put_new(1)
        (key,) = values
        first = rig.session.index.slot(key)
        # Eviction leaves the slot's bytes unchanged; the next journal records the block in another slot.
        rows = rig.session.index.evict(1)
        rig.session.index.pin((0,))
        await rig.session.space.leave(rows, None)
        disk.fail("rename", errno.EIO)
        await rig.session._write_snapshot()
        assert await rig.put(values) == [Outcome.OK]
        assert rig.session.index.slot(key) != first
        copy = clone(tmp_path / "a", tmp_path / "b")
    # Only the segment's record is left of the first journal.
    os.truncate(min(home(copy).glob("journal.*")), JOURNAL_HEADER_BYTES + FRAME_BYTES + FRAME)
    async with opened(copy, room_for(16)) as rig:
        assert await proved(rig, values) == 1
        assert rig.session.counts["recovery_scanned_slots"] > 0
        assert rig.backend.stats().blocks == 1
        assert len(rig.session.index.columns.held()) == 1


async def test_data_that_a_power_cut_took(tmp_path: Path) -> None:
    """Slots in the journal whose bytes never reached the drive are misses, and their blocks can be stored again."""
    values = await filled(tmp_path / "a")
    for path in home(tmp_path / "a").glob("*.seg"):
        size = path.stat().st_size
        os.truncate(path, 0)
        os.truncate(path, size)
    async with opened(tmp_path / "a", "64MiB") as rig:
        assert await rig.get(list(values)) == [None] * 20
        assert len(rig.removed) == 20
        assert await rig.put(values) == [Outcome.OK] * 20


async def test_swapped_slots_are_misses(tmp_path: Path) -> None:
    """Swapped records are not delivered under each other's keys."""
    values = await filled(tmp_path / "a", 4)
    (path,) = [p for p in home(tmp_path / "a").glob("*.seg")]
    content = bytearray(path.read_bytes())
    content[0:SLOT], content[SLOT : 2 * SLOT] = content[SLOT : 2 * SLOT], content[0:SLOT]
    path.write_bytes(content)
    async with opened(tmp_path / "a", "64MiB") as rig:
        got = await rig.get(list(values))
        assert got.count(None) == 2
        for payload, back in zip(values.values(), got, strict=True):
            assert back in (None, payload)


async def test_damaged_snapshot_loses_no_block_of_journals_or_slots(tmp_path: Path) -> None:
    """Each byte of a snapshot counts: with a wrong one, the slots are scanned instead."""
    async with opened(tmp_path / "a", "64MiB") as rig:
        values = await rig.put_new(10)
        await rig.session._write_snapshot()
        values |= await rig.put_new(10)
        clone(tmp_path / "a", tmp_path / "b")
    size = (home(tmp_path / "b") / "index").stat().st_size
    for number, at in enumerate([0, 9, 17, 40, 90, size // 3, size // 2, size - 1]):
        copy = clone(tmp_path / "b", tmp_path / f"c{number}")
        path = home(copy) / "index"
        content = bytearray(path.read_bytes())
        content[at] ^= 0x10
        path.write_bytes(content)
        async with opened(copy, "64MiB") as rig:
            assert await proved(rig, values) == 20, at
            await rig.put_new(1)


async def test_a_removed_block_stays_removed(tmp_path: Path) -> None:
    """A removed block stays absent even if the journal is lost and slots are scanned: removal wipes the slot."""
    async with opened(tmp_path / "a", "64MiB") as rig:
        values = await rig.put_new(10)
        gone = list(values)[:5]
        await rig.backend.delete(gone)
        copy = clone(tmp_path / "a", tmp_path / "b")
    journal(copy).unlink()
    async with opened(copy, "64MiB") as rig:
        assert await proved(rig, values) == 5
        assert await rig.backend.exists(gone) == [False] * 5


async def test_a_removed_block_has_no_older_copy(tmp_path: Path) -> None:
    """No copy of a removed block is found in a slot that it was evicted from and that was not overwritten since."""

    class NoSlots(OsDisk):
        fails = False

        def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
            if self.fails and os.readlink(f"/proc/self/fd/{fd}").endswith(".seg"):
                raise OSError(errno.EIO, "no slot is written")
            return super().pwritev(fd, buffers, offset)

    disk = NoSlots()
    async with opened(tmp_path / "a", room_for(16), disk=disk, engine="threads") as rig:
        values = await rig.put_new(16)
        disk.fails = True
        # Blocks are evicted for a store that then fails.
        assert await rig.put(rig.new(8)) == [Outcome.IO_ERROR] * 8
        disk.fails = False
        evicted = [key for key, _ in rig.removed]
        assert len(evicted) >= 8
        for key in evicted:
            assert await rig.put({key: values[key]}) == [Outcome.OK]
            assert await rig.backend.delete([key]) == [True]
        copy = clone(tmp_path / "a", tmp_path / "b")
    with journal(copy).open("ab") as file:
        file.write(b"torn")
    async with opened(copy, room_for(16)) as rig:
        await rig.session.recovered.wait()
        assert await rig.scanned() == set(values) - set(evicted)
        assert await rig.backend.exists(evicted) == [False] * len(evicted)
        # These slots stay usable.
        await rig.has_all(await rig.put_new(len(evicted)))


async def test_segment_is_not_removed_before_its_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment that was not scanned yet is not considered empty, and each slot is used once afterwards."""
    async with opened(tmp_path / "a", room_for(64)) as rig:
        values: dict[BlockKey, bytes] = {}
        for _ in range(16):
            values |= await rig.put_new(4)
        root = clone(tmp_path / "a", tmp_path / "b")
    os.truncate(journal(root), JOURNAL_HEADER_BYTES + 5)
    goes_on = hold_scans(monkeypatch)
    async with opened(root, room_for(64)) as one, opened(root, room_for(64)) as two:
        rounds = 0
        count_uses = one.session.space.count_uses

        async def counted() -> None:
            nonlocal rounds
            rounds += 1
            await count_uses()

        monkeypatch.setattr(one.session.space, "count_uses", counted)
        # The second engine needs room; the first one has more than its share.
        assert set(await two.put(two.new(2))) == {Outcome.NO_SPACE}
        await eventually_async(lambda: list((root / ".kvstore").glob("want.*")), what="it says so")
        before = rounds
        await eventually_async(lambda: rounds >= before + 2, what="the other one has seen it")
        goes_on.set()
        await one.session.recovered.wait()
        assert await proved(one, values) == len(values) - len(one.removed)
        for _ in range(20):
            assert set(await one.put(one.new(4))) <= {Outcome.OK, Outcome.NO_SPACE}


async def test_a_quarantined_slot_is_never_used_again(tmp_path: Path) -> None:
    """A slot whose bytes could not be verified is out of use, even after a restart."""
    async with opened(tmp_path / "root", room_for(16)) as rig:
        (bad,) = await rig.put_new(1)
        slot = rig.session.index.slot(bad)
        assert slot is not None
        await rig.backend.quarantine([bad])
        for _ in range(10):
            await rig.put_new(4)
        assert rig.backend.stats().blocks <= 15
        assert rig.session.index.columns.size_view[slot] == 0xFFFFFFFF
        killed = clone(tmp_path / "root", tmp_path / "killed")
    # By the snapshot, and by the journal alone.
    for root in (tmp_path / "root", killed):
        async with opened(root, room_for(16)) as rig:
            await rig.put_new(4)
            assert rig.session.index.columns.size_view[slot] == 0xFFFFFFFF


async def test_planted_objects(tmp_path: Path) -> None:
    """Links, FIFOs, sockets and directories in place of our files are never followed, read or waited for."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"not yours" * 1000)
    for number, plant in enumerate(["link", "hardlink", "fifo", "directory", "socket"]):
        values = await filled(tmp_path / f"a{number}", 5)
        for name in ("index", "lock", "uses", journal(tmp_path / f"a{number}").name, "000000.seg"):
            copy = clone(tmp_path / f"a{number}", tmp_path / f"b{number}-{name}")
            target = home(copy) / name
            target.unlink(missing_ok=True)
            if plant == "link":
                target.symlink_to(secret)
            elif plant == "hardlink":
                os.link(secret, target)
            elif plant == "fifo":
                os.mkfifo(target)
            elif plant == "directory":
                target.mkdir()
            else:
                # Socket paths have a short maximum length.
                here = os.open(target.parent, os.O_RDONLY)
                with socket.socket(socket.AF_UNIX) as made:
                    made.bind(f"/proc/self/fd/{here}/{name}")
                os.close(here)
            async with opened(copy, "64MiB") as rig:
                for payload, back in zip(values.values(), await rig.get(list(values)), strict=True):
                    assert back in (None, payload), (plant, name)
                await rig.put_new(1)
            shutil.rmtree(copy)
    assert secret.read_bytes() == b"not yours" * 1000


async def test_a_planted_snapshot_is_not_read_into_memory(tmp_path: Path) -> None:
    """A sparse file of terabytes in place of the snapshot is refused."""
    values = await filled(tmp_path / "a", 5)
    with (home(tmp_path / "a") / "index").open("wb") as file:
        file.truncate(1 << 40)
    async with opened(tmp_path / "a", "64MiB") as rig:
        assert await proved(rig, values) == 5


@pytest.mark.parametrize("mode", [0o777, 0o757])
async def test_world_writable_root_is_refused(tmp_path: Path, mode: int) -> None:
    """Blocks contain users' prompts: a world-writable directory is refused."""
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(ConfigError, match="every user"):
        async with opened(root, "64MiB"):
            pass


async def test_modes(tmp_path: Path) -> None:
    """No other user may read the stored blocks."""
    await filled(tmp_path / "a", 3)
    for path in (tmp_path / "a").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


async def test_directories_of_other_users_are_left_alone(tmp_path: Path) -> None:
    """Another user's directory that resembles a namespace or an owner neither counts nor causes a failure."""
    root = tmp_path / "root"
    owner = "cd" * 8
    for namespace, theirs in (("ab" * 32, "ab" * 32), (NAMESPACE.hex, f"{NAMESPACE.hex}/{owner}")):
        (root / namespace / owner).mkdir(parents=True)
        (root / namespace / owner / "000000.seg").write_bytes(bytes(5 << 20))
        os.chown(root / theirs, 1000, 1000)
    async with opened(root, room_for(32)) as rig:
        assert rig.session.owner.name != owner
        for _ in range(12):
            await rig.put_new(4)
        assert rig.backend.stats().blocks == 32
    for namespace in ("ab" * 32, NAMESPACE.hex):
        assert os.listdir(root / namespace / owner) == ["000000.seg"]
        assert (root / namespace / owner / "000000.seg").stat().st_size == 5 << 20


async def test_a_full_disk_at_start(tmp_path: Path) -> None:
    """On a full disk an engine reports it or continues in an existing directory; with room it stores again."""
    disk = FaultyDisk()
    for op in ("mkdir", "fallocate", "pwritev"):
        disk.fail(op, 28, forever=True)
    with pytest.raises(BackendUnavailableError):
        async with opened(tmp_path / "new", "64MiB", disk=disk):
            pass
    values = await filled(tmp_path / "a", 5)
    async with opened(tmp_path / "a", "64MiB", disk=disk, engine="threads") as rig:
        await rig.has_all(values)
        assert set(await rig.put(rig.new(2))) == {Outcome.NO_SPACE}
        disk.heal()
        await rig.put_new(2)


async def test_a_record_in_another_slot_or_another_owners_is_no_block(tmp_path: Path) -> None:
    """A scan treats a slot whose page names another slot or owner as empty."""
    values = await filled(tmp_path / "a")
    strange = await filled(tmp_path / "b")
    for root in (tmp_path / "a", tmp_path / "b"):
        os.truncate(journal(root), JOURNAL_HEADER_BYTES + 5)
    (segment,) = home(tmp_path / "a").glob("*.seg")
    (other,) = home(tmp_path / "b").glob("*.seg")
    content, foreign = bytearray(segment.read_bytes()), other.read_bytes()
    # The first ten records one slot further; behind them, another owner's records of the same slots.
    content[SLOT : 11 * SLOT] = content[: 10 * SLOT]
    content[:SLOT] = bytes(SLOT)
    content[11 * SLOT : 20 * SLOT] = foreign[11 * SLOT : 20 * SLOT]
    segment.write_bytes(content)
    async with opened(tmp_path / "a", "64MiB") as rig:
        await rig.session.recovered.wait()
        assert await rig.scanned() == set()
        assert await rig.get([*values, *strange]) == [None] * 40


async def test_stores_during_a_scan_take_no_slot_that_was_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the slots behind a torn journal are scanned, stores use other slots; every block in them is found."""
    values = await filled(tmp_path / "a")
    os.truncate(journal(tmp_path / "a"), JOURNAL_HEADER_BYTES + 5)
    goes_on = hold_scans(monkeypatch)
    async with opened(tmp_path / "a", "64MiB") as rig:
        new = await rig.put_new(8)
        assert not rig.session.recovered.is_set()
        goes_on.set()
        await rig.session.recovered.wait()
        await rig.has_all(values | new)


@pytest.mark.parametrize("first", ["store", "scan"])
async def test_a_store_during_a_scan_that_finds_the_same_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """A block stored again while the scan finds it has one slot, whichever happens first."""
    values = await filled(tmp_path / "a")
    os.truncate(journal(tmp_path / "a"), JOURNAL_HEADER_BYTES + 5)
    scan_goes_on, store_goes_on = hold_scans(monkeypatch), asyncio.Event()
    async with opened(tmp_path / "a", "64MiB") as rig:
        journal_, append = rig.session.journal, rig.session.journal.append
        held = asyncio.Event()

        async def held_up(rows: Any, *args: Any, **options: Any) -> None:
            of_store = store is not None and asyncio.current_task() is not scan
            if any(kind == Kind.ADD for kind, *_ in rows) and of_store == (first == "store"):
                held.set()
                await store_goes_on.wait()
            await append(rows, *args, **options)

        monkeypatch.setattr(journal_, "append", held_up)
        (scan,) = [task for task in rig.session._tasks if "_scan_slots" in repr(task)]
        store = None
        if first == "scan":
            scan_goes_on.set()
            await held.wait()
        store = asyncio.create_task(rig.put(values))
        if first == "store":
            await held.wait()
            scan_goes_on.set()
            await rig.session.recovered.wait()
        store_goes_on.set()
        assert set(await store) <= {Outcome.OK, Outcome.EXISTS}
        await rig.session.recovered.wait()
        assert rig.backend.stats().blocks == 20
        assert len(rig.session.index.columns.held()) == 20
        await rig.has_all(values)
        assert not rig.session.claims


async def test_an_end_before_all_slots_were_looked_at_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that closes before its scan has ended writes no snapshot that omits unscanned blocks."""
    values = await filled(tmp_path / "a")
    os.truncate(journal(tmp_path / "a"), JOURNAL_HEADER_BYTES + 5)
    with monkeypatch.context() as hanging:
        hold_scans(hanging)
        async with opened(tmp_path / "a", "64MiB") as rig:
            values |= await rig.put_new(2)
            await rig.session._write_snapshot()
    async with opened(tmp_path / "a", "64MiB") as rig:
        assert await proved(rig, values) == 22


async def test_a_gap_between_two_journals(tmp_path: Path) -> None:
    """If the end of a journal was lost and the next journal exists, the blocks in between are found in the slots."""
    disk = FaultyDisk()
    async with opened(tmp_path / "a", "64MiB", disk=disk, engine="threads") as rig:
        values: dict[BlockKey, bytes] = {}
        for _ in range(6):
            values |= await rig.put_new(1)
        disk.fail("rename", errno.EIO)
        await rig.session._write_snapshot()
        for _ in range(4):
            values |= await rig.put_new(1)
        copy = clone(tmp_path / "a", tmp_path / "b")
    first, second = sorted(home(copy).glob("journal.*"))
    assert second.stat().st_size == JOURNAL_HEADER_BYTES + 4 * FRAME
    os.truncate(first, first.stat().st_size - 3 * FRAME)
    async with opened(copy, "64MiB") as rig:
        assert await proved(rig, values) == 10
