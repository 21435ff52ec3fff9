"""Adopted directories: segments removed by others, torn journals, and a start that hangs."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from kvstore.backends.disk import DiskBackend, DiskConfig
from kvstore.backends.disk import backend as backend_module
from kvstore.backends.disk import space as space_module
from kvstore.backends.disk.files import FileLock
from kvstore.backends.disk.holdings import DiskHoldings
from kvstore.backends.disk.layout import JOURNAL_HEADER_BYTES, LOCK_NAME, Kind
from kvstore.config import Capacity
from kvstore.diskio import OsDisk
from kvstore.errors import BackendUnavailableError
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome, RemovalCause
from tests.disk.filled_root import filled, journal
from tests.disk.rig import GEOMETRY, NAMESPACE, clone, opened, room_for
from tests.diskio.faulty_disk import FaultyDisk


async def test_removed_segments_are_recorded_once_by_the_next_owner(tmp_path: Path) -> None:
    """Segments that were removed while the directory had no owner are recorded in the journal by the next owner."""
    async with opened(tmp_path / "a", room_for(64)) as rig:
        await rig.put_new(64)
    # The first segment may have lost blocks ahead of need.
    for path in sorted((tmp_path / "a").rglob("*.seg"))[-4:]:
        path.unlink()
    async with opened(tmp_path / "a", room_for(64)) as rig:
        kinds = [kind for kind, *_ in rig.session.owner.corrections]
        assert kinds == ([Kind.REMOVE] * 4 + [Kind.DROP]) * 4
        clone(tmp_path / "a", tmp_path / "b")
    async with opened(tmp_path / "b", room_for(64)) as rig:
        assert rig.session.owner.corrections == []
        assert rig.backend.stats().gauges["segments"] == 12


async def test_blocks_that_others_took_are_not_promised_after_an_adoption(tmp_path: Path) -> None:
    """Engines that follow a directory no longer find the blocks of segments that its next owner misses."""
    async with opened(tmp_path, room_for(64)) as two:
        async with opened(tmp_path, room_for(64)) as one:
            values = await one.put_new(4)
            (segment,) = tmp_path.rglob("*.seg")
        await two.session.followers.refresh()
        assert await two.backend.exists(list(values)) == [True] * 4
        segment.unlink()
        async with opened(tmp_path, room_for(64)):
            await two.session.followers.refresh()
            assert await two.backend.exists(list(values)) == [False] * 4


async def test_a_segment_that_a_torn_journal_hid_is_noted(tmp_path: Path) -> None:
    """Blocks recovered from slots after a torn journal survive the next kill too, without a snapshot."""
    values = await filled(tmp_path / "a")
    os.truncate(journal(tmp_path / "a"), JOURNAL_HEADER_BYTES + 5)
    async with opened(tmp_path / "a", "64MiB") as rig:
        await rig.session.recovered.wait()
        await rig.has_all(values)
        clone(tmp_path / "a", tmp_path / "b")
    async with opened(tmp_path / "b", "64MiB") as rig:
        assert rig.session.owner.intact
        await rig.has_all(values)


async def test_a_journal_that_was_torn_since_a_listing_is_left_as_it_is(tmp_path: Path) -> None:
    """Tools that remove a block then wipe its slot only: an engine with the block in its index finds no bytes."""
    values = await filled(tmp_path / "a", 5)
    holdings = DiskHoldings(DiskBackend, DiskConfig(path=str(tmp_path / "a"), capacity=Capacity("64MiB")))
    await holdings.open()
    try:
        (namespace,) = await holdings.namespaces()
        blocks = [block async for page in holdings.scan(namespace) for block in page]
        with journal(tmp_path / "a").open("ab") as file:
            file.write(b"torn" * 200)
        before = journal(tmp_path / "a").read_bytes()
        assert await holdings.remove(namespace, blocks[:1], RemovalCause.REMOVED) == 1
        assert journal(tmp_path / "a").read_bytes() == before
    finally:
        await holdings.close()
    async with opened(tmp_path / "a", "64MiB") as rig:
        assert await rig.get(list(values)) == [None if key == blocks[0].key else values[key] for key in values]


async def test_frames_longer_than_one_read_are_followed(tmp_path: Path) -> None:
    """A follower reads a frame of 100,000 records, written when a segment of small blocks is removed, without delay."""
    async with opened(tmp_path, "64MiB") as one, opened(tmp_path, "64MiB") as two:
        await one.put_new(1)
        free = one.session.geometry.segment_slots - 1
        rows = [(int(Kind.REMOVE), free, 0, 1, b"x" * 36)] * 100_000
        await one.session.journal.append(rows, lambda: None)
        values = await one.put_new(3)
        await eventually_async(lambda: set(values) <= set(two.arrived), what="the other engine is told")


async def test_frames_of_nothing_are_followed(tmp_path: Path) -> None:
    """A frame without records, as a probe writes it, stops neither the follower nor a later start."""
    async with opened(tmp_path / "a", "64MiB") as one, opened(tmp_path / "a", "64MiB") as two:
        await one.put_new(1)
        await one.backend.probe()
        await eventually_async(lambda: len(two.arrived) == 1, what="the other engine is told")
        await one.backend.probe()
        values = await one.put_new(2)
        await one.backend.probe()
        await eventually_async(lambda: len(two.arrived) == 3, what="the other engine is told")
        clone(tmp_path / "a", tmp_path / "b")
    async with opened(tmp_path / "b", "64MiB") as rig:
        await rig.session.followers.refresh()
        await rig.has_all(values)


async def test_uses_are_counted_when_they_happen(tmp_path: Path) -> None:
    """Reads by another engine count as older than later stores, even if the owner evicts much later."""
    async with opened(tmp_path, room_for(32)) as one, opened(tmp_path, room_for(32)) as two:
        early = await one.put_new(8)
        await eventually_async(lambda: len(two.arrived) == 8, what="the other engine is told")
        await two.has_all(early)
        await two.session.followers.refresh()
        (marks,) = [path for path in tmp_path.rglob("uses") if path.parent.name == one.session.owner.name]
        await eventually_async(lambda: not any(marks.read_bytes()), what="the owner has counted them")
        late = await one.put_new(16)
        while len(one.removed) < 8:
            await one.put_new(1)
        assert not {key for key, _ in one.removed[:8]} & set(late)


class HangingDisk(OsDisk):
    """A disk whose first call hangs until released, as on a frozen filesystem or a dead server."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def open_root(self, path: str) -> int:
        self.goes_on.wait(60)
        return super().open_root(path)


async def test_a_start_does_not_wait_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start on a hung disk fails in time, as does the next one; once the disk responds, a start succeeds."""
    disk = HangingDisk()
    config = DiskConfig(path=str(tmp_path / "a"), capacity=Capacity("64MiB"), reserve=Capacity(0))
    backend = backend_module.DiskBackend(config, disk=disk)
    with monkeypatch.context() as impatient:
        impatient.setattr(backend_module, "_OPEN_TIMEOUT_S", 0.1)
        impatient.setattr(backend_module, "_CLOSE_TIMEOUT_S", 0.1)
        for _ in range(2):
            with pytest.raises(BackendUnavailableError, match="do not answer"):
                await backend.open(NAMESPACE, GEOMETRY)
            await backend.close()
    disk.goes_on.set()
    assert backend._opening is not None
    await eventually_async(backend._opening.done, what="the first start has ended")
    await backend.open(NAMESPACE, GEOMETRY)
    await backend.probe()
    await backend.close()


async def test_an_engine_that_only_reads_is_seen_to_have_used_its_directory(tmp_path: Path) -> None:
    """A directory whose engine only read blocks counts as used: its segments are not the first that others remove."""
    async with opened(tmp_path, "64MiB") as rig:
        values = await rig.put_new(2)
    for path in tmp_path.rglob("*"):
        os.utime(path, (1000, 1000))
    async with opened(tmp_path, "64MiB") as rig:
        assert journal(tmp_path).stat().st_mtime > 1000
        os.utime(journal(tmp_path), (1000, 1000))
        await rig.has_all(values)
    assert journal(tmp_path).stat().st_mtime > 1000


async def test_a_failure_that_passes_evicts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While no segment can be created, stores fail and no block is evicted; if the failure lasts, stores evict."""
    disk = FaultyDisk()
    async with opened(tmp_path, room_for(64), disk=disk) as rig:
        await rig.put_new(4)
        disk.fail("fallocate", errno.EIO, forever=True)
        outcomes: list[Outcome] = []
        while Outcome.IO_ERROR not in outcomes:
            outcomes = await rig.put(rig.new(1))
        assert rig.removed == []
        monkeypatch.setattr(space_module, "_TRANSIENT_S", 0.0)
        await eventually_async(lambda: rig.session.space._full_until < time.monotonic(), what="it is tried again")
        await rig.put_new(2)
        assert len(rig.removed) >= 1


async def test_a_directory_that_is_deleted_is_noticed(tmp_path: Path) -> None:
    """An engine whose directory was deleted reports it, and stops storing into unreachable files."""
    async with opened(tmp_path / "a", "64MiB") as rig:
        await rig.put_new(2)
        shutil.rmtree(tmp_path / "a")
        await eventually_async(lambda: rig.session.removed, what="it is noticed")
        with pytest.raises(BackendUnavailableError, match="deleted"):
            await rig.put(rig.new(1))
        with pytest.raises(BackendUnavailableError, match="deleted"):
            await rig.backend.probe()


def kept_by_rings() -> set[str]:
    """Return the names of the files that this process's rings keep open, according to the kernel."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[io_uring]":
                lines = Path(f"/proc/self/fdinfo/{fd}").read_text().partition("UserFiles:")[2].splitlines()[1:]
                # The list follows its heading, one "number: name" line per file, until another section begins.
                for line in lines:
                    number, _, name = line.partition(":")
                    if not number.strip().isdigit():
                        break
                    found.add(name.strip())
    return found


async def test_a_ring_keeps_the_locks_of_its_engine(tmp_path: Path) -> None:
    """A directory that a killed engine's ring still writes to is not adopted: the ring holds the lock too."""
    drives = [tmp_path / "a", tmp_path / "b"]
    before = kept_by_rings()
    async with opened(drives, "64MiB", engine="io_uring") as rig:
        assert rig.session.engine.name == "io_uring"
        assert len([name for name in kept_by_rings() - before if name.endswith("lock")]) == 2
    assert kept_by_rings() == before


@pytest.mark.parametrize("replaced", [False, True])
def test_a_lock_is_on_the_file_that_has_the_name(tmp_path: Path, replaced: bool) -> None:
    """A lock file that is removed or replaced between open and lock does not count as locked."""

    class Changing(OsDisk):
        changes = 3

        def flock(self, fd: int, operation: int) -> None:
            if self.changes:
                self.changes -= 1
                (tmp_path / "lock").unlink()
                if replaced:
                    (tmp_path / "lock").touch(mode=0o600)
            super().flock(fd, operation)

    directory = os.open(tmp_path, os.O_RDONLY)
    first, second = FileLock(Changing(), directory, "lock"), FileLock(OsDisk(), directory, "lock")
    assert first.try_acquire()
    assert os.fstat(first.fd).st_ino == (tmp_path / "lock").stat().st_ino
    assert not second.try_acquire()
    first.release()
    assert second.try_acquire()
    second.release()
    os.close(directory)


async def test_a_directory_with_segments_of_another_size_is_read_and_not_adopted(tmp_path: Path) -> None:
    """After a change of the capacity the blocks can still be read, as those of another owner."""
    async with opened(tmp_path, room_for(64)) as rig:
        values = await rig.put_new(8)
        name = rig.session.owner.name
    async with opened(tmp_path, room_for(256)) as rig:
        assert rig.session.owner.name != name
        await rig.has_all(values)
        await rig.put_new(8)
        await rig.has_all(values)


class FullAndExamined(OsDisk):
    """A disk without room for a directory; another engine holds ``examined`` until one is to be made."""

    examined: FileLock

    def mkdir(self, name: str, dir_fd: int) -> None:
        self.examined.release()
        raise OSError(errno.ENOSPC, "no room", name)


async def test_a_full_disk_leaves_a_second_attempt_to_adopt(tmp_path: Path) -> None:
    """Another engine that checks whether an owner has ended holds its lock for a moment."""
    async with opened(tmp_path, room_for(64)) as rig:
        values = await rig.put_new(8)
        name = rig.session.owner.name
    disk = FullAndExamined()
    fd = os.open(tmp_path / NAMESPACE.hex / name, os.O_RDONLY)
    disk.examined = FileLock(OsDisk(), fd, LOCK_NAME)
    assert disk.examined.try_acquire(exclusive=False, create=False)
    async with opened(tmp_path, room_for(64), disk=disk) as rig:
        assert rig.session.owner.name == name
        await rig.has_all(values)
    os.close(fd)


async def test_a_failed_start_on_a_full_disk_leaves_one_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Further attempts to adopt make no directories, and repeat no warning."""
    disk = FaultyDisk()
    async with opened(tmp_path, room_for(64)):
        disk.fail("pwritev", errno.ENOSPC, forever=True)
        for count in range(1, 4):
            caplog.clear()
            with pytest.raises(BackendUnavailableError):
                async with opened(tmp_path, room_for(64), disk=disk):
                    pass
            assert len(list((tmp_path / NAMESPACE.hex).glob("*/lock"))) == 1 + count
            assert caplog.text.count("can't be adopted") == count - 1


async def test_the_directory_that_was_used_last_is_adopted(tmp_path: Path) -> None:
    """Of several ended owners, the one whose directory was changed last is adopted."""
    async with opened(tmp_path, room_for(64)) as one, opened(tmp_path, room_for(64)) as two:
        names = [one.session.owner.name, two.session.owner.name]
    for name in names:
        for path in tmp_path.rglob("*"):
            os.utime(path, (1000, 1000))
        journal = next((tmp_path / NAMESPACE.hex / name).glob("journal.*"))
        os.utime(journal, (2000, 2000))
        async with opened(tmp_path, room_for(64)) as rig:
            assert rig.session.owner.name == name
