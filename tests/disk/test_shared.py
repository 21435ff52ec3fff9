"""Engines that share a root: each writes only its own directory, all read all blocks."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import threading
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from kvstore.backends.disk import followers as followers_module
from kvstore.backends.disk import journal as journal_module
from kvstore.backends.disk.layout import OWNER_SHIFT
from kvstore.backends.disk.session import Session
from kvstore.errors import ConfigError, LockedError
from kvstore.testing.waiting import eventually_async
from kvstore.types import BlockKey, Outcome, RemovalCause
from tests.disk.rig import NAMESPACE, NoFrames, Rig, clone, opened, room_for, segment_bytes
from tests.diskio.faulty_disk import FaultyDisk


def full(*_: object) -> None:
    """Fail as on a full disk."""
    raise OSError(errno.ENOSPC, "full")


def owners(root: Path) -> set[str]:
    """Return the names of all owners of the namespace."""
    return {path.name for path in (root / NAMESPACE.hex).iterdir() if path.is_dir()}


async def test_another_engines_blocks_are_found_without_asking_the_disk(tmp_path: Path) -> None:
    """A block stored by one engine is announced to the other one, which finds, reads, and does not store it again."""
    async with opened(tmp_path, "64MiB") as one, opened(tmp_path, "64MiB") as two:
        values = await one.put_new(20)
        await eventually_async(lambda: len(two.arrived) == 20, what="the other engine is told")
        assert set(two.arrived) == set(values)
        assert await two.backend.exists(list(values)) == [True] * 20
        await two.has_all(values)
        assert await two.put(values) == [Outcome.EXISTS] * 20
        assert await two.scanned() == set(values)
        assert len(owners(tmp_path)) == 2


async def test_visible_within_the_target(tmp_path: Path) -> None:
    """The journal wakes the other engine, not its poll: twenty rounds take less time than ten polls."""
    async with opened(tmp_path, "64MiB") as one, opened(tmp_path, "64MiB") as two:
        started = asyncio.get_running_loop().time()
        for count in range(1, 21):
            await one.put_new(1)
            await eventually_async(lambda count=count: len(two.arrived) == count, what="the other engine is told")
        assert asyncio.get_running_loop().time() - started < 10


async def test_a_removed_block_leaves_the_other_engines_too(tmp_path: Path) -> None:
    """A block removed by its owner is a miss in other engines, and is reported there as removed."""
    async with opened(tmp_path, "64MiB") as one, opened(tmp_path, "64MiB") as two:
        values = await one.put_new(4)
        await eventually_async(lambda: len(two.arrived) == 4, what="the other engine is told")
        gone = list(values)[:2]
        assert await one.backend.delete(gone) == [True, True]
        await eventually_async(lambda: len(two.removed) == 2, what="the other engine is told")
        assert {key for key, _ in two.removed} == set(gone)
        assert await two.get(list(values)) == [None, None, *list(values.values())[2:]]


async def test_a_follower_goes_on_when_the_journal_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots replace journals during following; no record is missed, and the new journal is watched."""
    monkeypatch.setattr(followers_module, "_POLL_S", 3600.0)
    async with opened(tmp_path, "64MiB") as one, opened(tmp_path, "64MiB") as two:
        count = 0
        for _ in range(5):
            await one.put_new(3)
            await one.session._write_snapshot()
            await one.put_new(3)
            count += 6
            await eventually_async(lambda count=count: len(two.arrived) == count, what="the other engine is told")
        assert one.session.journal.end.number == 6
        assert two.session.counts["upkeep_errors"] == 0


async def test_a_follower_reads_over_two_journals_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals that a full disk keeps, as it has no room for snapshots, are read in one look; no block comes twice."""
    async with opened(tmp_path, "64MiB") as one, opened(tmp_path, "64MiB") as two:
        monkeypatch.setattr(one.session.owner, "write_snapshot", full)
        values = await one.put_new(3)
        await eventually_async(lambda: len(two.arrived) == 3, what="the other engine is told")
        async with two.session.followers._lock:
            for _ in range(2):
                await one.session._write_snapshot()
                values |= await one.put_new(3)
        for _ in range(2):
            await two.session.followers.refresh()
        assert one.session.journal.end.number == 3
        assert Counter(two.arrived) == Counter(list(values))


async def test_a_cancelled_look_at_a_journal_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that were read when a load was cancelled are processed by the next read of the journal."""
    monkeypatch.setattr(followers_module, "_TURN_RECORDS", 1)
    async with opened(tmp_path, "64MiB") as one, opened(tmp_path, "64MiB") as two:
        gone = await one.put_new(4)
        await eventually_async(lambda: len(two.arrived) == 4, what="the other engine is told")
        for task in two.session._tasks:
            task.cancel()
        await asyncio.wait(two.session._tasks)
        values = await one.put_new(4)
        await one.backend.delete(list(gone))
        looking = asyncio.create_task(two.session.followers.refresh({1}))
        two.backend.set_arrival_listener(lambda keys: looking.cancel())
        with pytest.raises(asyncio.CancelledError):
            await looking
        assert sum(await two.backend.exists(list(values))) == 1
        await two.session.followers.refresh({1})
        assert await two.backend.exists([*values, *gone]) == [True] * 4 + [False] * 4


async def test_restarted_follower_keeps_its_known_blocks(tmp_path: Path) -> None:
    """Blocks known before are read at the places that the owner's files now state, and new ones are announced once."""
    async with opened(tmp_path, "64MiB") as one, opened(tmp_path, "64MiB") as two:
        values = await one.put_new(6)
        await eventually_async(lambda: set(two.arrived) == set(values), what="the other engine is told")
        two.arrived.clear()
        async with two.session.followers._lock:
            for _ in range(3):
                values |= await one.put_new(3)
                await one.session._write_snapshot()
        await eventually_async(lambda: set(two.arrived) == set(values), what="the other engine knows all")
        await two.has_all(values)
        assert await two.backend.exists(list(values)) == [True] * 15
        assert sorted(two.arrived) == sorted(values)


class NoSwitch(NoFrames):
    """A disk that refuses frames once the second journal is created."""

    def open_file(self, name: str, flags: int, dir_fd: int) -> int:
        self.fails = self.fails or name == "journal.00000002"
        return super().open_file(name, flags, dir_fd)


async def follows_the_heir(two: Rig, gone: Collection[BlockKey], values: Collection[BlockKey]) -> None:
    """Check that an engine finds the blocks of an adopted directory, and none that was there before."""
    await eventually_async(lambda: set(values) <= set(two.arrived), what="the other engine is told")
    found = await two.backend.exists([*gone, *values])
    assert found == [False] * len(gone) + [True] * len(values)


async def test_a_directory_removed_in_part_and_adopted_is_followed(tmp_path: Path) -> None:
    """An engine may adopt a directory whose files were removed, but not the directory; others follow its new journal.

    So does a kill during a removal leave it, and a filesystem that keeps open files under another name.
    """
    async with opened(tmp_path, "64MiB") as two:
        async with opened(tmp_path, "64MiB") as one:
            gone = await one.put_new(4)
            await eventually_async(lambda: len(two.arrived) == 4, what="the other engine is told")
            name = one.session.owner.name
        await two.session.followers.refresh()
        async with contextlib.AsyncExitStack() as stack:
            # The follower looks again only when the new journal has the number and length of the one that it has read.
            async with two.session.followers._lock:
                for path in (tmp_path / NAMESPACE.hex / name).iterdir():
                    path.unlink()
                three = await stack.enter_async_context(opened(tmp_path, "64MiB"))
                values = await three.put_new(4)
                await three.session._write_snapshot()
            assert three.session.owner.name == name
            await follows_the_heir(two, gone, values)
            await two.has_all(values)


@pytest.fixture
def closes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let followers close the journal of an engine that has ended at their next look."""
    monkeypatch.setattr(followers_module, "_TRY_LOCK_S", 0.0)


async def closed_journal(two: Rig) -> None:
    """Wait until the only journal that an engine follows is closed."""
    (other,) = two.session.followers.others.values()
    await eventually_async(lambda: other._reader.end.fd < 0, what="the journal is closed")


@pytest.mark.usefixtures("closes_at_once")
async def test_a_closed_journal_is_read_again_only_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks at an ended engine's journal open no file; after a change of its mode, one look opens and closes it."""
    opens: list[str] = []
    reopen = journal_module.JournalReader.reopen
    monkeypatch.setattr(journal_module.JournalReader, "reopen", lambda self: (opens.append(""), reopen(self)))
    async with opened(tmp_path, "64MiB") as two:
        async with opened(tmp_path, "64MiB") as one:
            values = await one.put_new(4)
            await eventually_async(lambda: len(two.arrived) == 4, what="the other engine is told")
            directory = tmp_path / NAMESPACE.hex / one.session.owner.name
        await closed_journal(two)
        opens.clear()
        for expected in (0, 1):
            for _ in range(3):
                await two.session.followers.refresh()
            assert len(opens) == expected
            await closed_journal(two)
            for path in directory.glob("journal.*"):
                path.chmod(0o400)
        assert sorted(two.arrived) == sorted(values)
        await two.has_all(values)


@pytest.mark.usefixtures("closes_at_once")
async def test_a_closed_journal_is_not_continued_in_another_one(tmp_path: Path) -> None:
    """A directory of an ended engine is emptied and adopted, and its new journals reach the number of the old one."""
    async with opened(tmp_path, "64MiB") as two:
        async with opened(tmp_path, "64MiB") as one:
            gone = await one.put_new(4)
            await eventually_async(lambda: len(two.arrived) == 4, what="the other engine is told")
            name = one.session.owner.name
        await closed_journal(two)
        async with contextlib.AsyncExitStack() as stack:
            async with two.session.followers._lock:
                for path in (tmp_path / NAMESPACE.hex / name).iterdir():
                    path.unlink()
                three = await stack.enter_async_context(opened(tmp_path, "64MiB"))
                three.session.owner.write_snapshot = full  # type: ignore[method-assign]
                values = await three.put_new(4)
                for _ in range(2):
                    await three.session._write_snapshot()
                    values |= await three.put_new(1)
            await follows_the_heir(two, gone, values)


@pytest.mark.usefixtures("closes_at_once")
@pytest.mark.parametrize("is_killed", [False, True])
async def test_reused_inode_of_a_journal_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """Filesystems give a new file the inode number of a removed one: number and length may be the same, too.

    Engines that are not killed leave a journal without records after their snapshot.
    """

    async def none(_: object) -> None:
        """Write no snapshot, as if the engine was killed."""

    if is_killed:
        monkeypatch.setattr(Session, "_write_snapshot", none)
    directory, kept = tmp_path / NAMESPACE.hex, tmp_path / "kept"
    async with opened(tmp_path, "64MiB") as two:
        async with opened(tmp_path, "64MiB") as one:
            gone = await one.put_new(4)
            await eventually_async(lambda: len(two.arrived) == 4, what="the other engine is told")
            journal = directory / one.session.owner.name / f"journal.0000000{1 if is_killed else 2}"
        await closed_journal(two)
        async with two.session.followers._lock:
            journal.rename(kept)
            for path in journal.parent.iterdir():
                path.unlink()
            async with opened(tmp_path, "64MiB") as three:
                values = await three.put_new(1)
                await three.put_new(3)
            kept.write_bytes(journal.read_bytes()[: kept.stat().st_size])
            kept.replace(journal)
        await follows_the_heir(two, gone, values)


async def test_a_journal_that_nothing_refers_to_is_not_gone_on_with(tmp_path: Path) -> None:
    """After an engine died between creating a journal and switching to it, follower and adopter share one journal."""
    disk = NoSwitch()
    async with opened(tmp_path, "64MiB", disk=disk, engine="threads") as one:
        values = await one.put_new(2)
        name = one.session.owner.name
        async with opened(tmp_path, "64MiB") as two:
            await one.backend.close()
            assert len(list((tmp_path / NAMESPACE.hex / name).glob("journal.*"))) == 2
            async with opened(tmp_path, "64MiB") as heir:
                assert heir.session.owner.name == name
                values |= await heir.put_new(3)
                await eventually_async(lambda: len(two.arrived) == 3, what="the follower is told")
                await two.has_all(values)


async def test_a_slot_reused_under_a_slow_reader_is_a_miss(tmp_path: Path) -> None:
    """A late reader never returns the bytes of a slot's new block for the requested one."""
    async with opened(tmp_path, room_for(16)) as one, opened(tmp_path, room_for(16)) as two:
        values = await one.put_new(16)
        await eventually_async(lambda: len(two.arrived) == 16, what="the other engine is told")
        read, engine = two.session.engine.read, two.session.engine

        async def slow_read(transfers: object, *args: object) -> None:
            # All slots are reused between the decision to read and the read.
            if not one.removed:
                for _ in range(8):
                    await one.put_new(4)
            await read(transfers, *args)  # type: ignore[arg-type]

        engine.read = slow_read  # type: ignore[method-assign]
        got = await two.get(list(values))
        gone = {key for key, _ in one.removed}
        assert gone >= set(values)
        assert got == [None] * 16


async def test_a_reader_looks_at_the_journal_after_each_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader detects the reuse of a slot during its read by reading the journal, not by a timely notification."""
    monkeypatch.setattr(followers_module, "_PAUSE_S", 3600.0)
    async with opened(tmp_path, room_for(16)) as one, opened(tmp_path, room_for(16)) as two:
        values = await one.put_new(16)
        await two.session.followers.refresh()
        read, engine = two.session.engine.read, two.session.engine

        async def read_then_reuse(transfers: object, *args: object) -> None:
            await read(transfers, *args)  # type: ignore[arg-type]
            for _ in range(8):
                await one.put_new(4)

        engine.read = read_then_reuse  # type: ignore[method-assign]
        assert await two.get(list(values)) == [None] * 16


async def test_a_reader_looks_at_the_journals_of_all_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch with blocks of several owners, none is delivered whose owner freed its slot during the read."""
    monkeypatch.setattr(followers_module, "_PAUSE_S", 3600.0)
    async with opened(tmp_path, "64MiB") as one, opened(tmp_path, "64MiB") as two, opened(tmp_path, "64MiB") as reader:
        owned = [(rig, await rig.put_new(2)) for rig in (one, two)]
        keys = [key for _, values in owned for key in values]
        await reader.session.followers.refresh()
        read, engine = reader.session.engine.read, reader.session.engine

        async def read_then_free(transfers: object, *args: object) -> None:
            await read(transfers, *args)  # type: ignore[arg-type]
            for rig, values in owned:
                await rig.backend.delete(list(values)[:1])

        engine.read = read_then_free  # type: ignore[method-assign]
        assert [payload is None for payload in await reader.get(keys)] == [True, False] * 2


async def test_block_without_a_readable_journal_is_not_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the journal, a reuse of the slot during the read cannot be excluded."""
    async with opened(tmp_path, "64MiB") as one, opened(tmp_path, "64MiB") as two:
        values = await one.put_new(3)
        own = await two.put_new(1)
        await eventually_async(lambda: len(two.arrived) >= 3, what="the other engine is told")

        async def fails(*args: object) -> None:
            raise OSError(errno.EIO, "not readable")

        with monkeypatch.context() as broken:
            broken.setattr(two.session.followers, "refresh", fails)
            targets = [two.maker.target(key) for key in [*values, *own]]
            outcomes = await two.backend.get_into([target.read for target in targets])
            assert outcomes == [Outcome.IO_ERROR] * 3 + [Outcome.OK]
        await two.has_all(values | own)


async def test_readers_keep_blocks_alive(tmp_path: Path) -> None:
    """A block that another engine keeps reading is not the first that its owner evicts."""
    async with opened(tmp_path, room_for(32)) as one, opened(tmp_path, room_for(32)) as two:
        hot = await one.put_new(2)
        await eventually_async(lambda: len(two.arrived) == 2, what="the other engine is told")
        for _ in range(60):
            await two.has_all(hot)
            await two.session.followers.refresh()
            await one.session.space.count_uses()
            await one.put_new(1)
        assert len(one.removed) > 20
        assert not {key for key, _ in one.removed} & set(hot)


async def test_adoption_raced_by_four_engines(tmp_path: Path) -> None:
    """Four engines that start at once with two left directories each have one of their own, and all see all blocks."""
    async with opened(tmp_path, "64MiB") as one, opened(tmp_path, "64MiB") as two:
        values = {**await one.put_new(8), **await two.put_new(8)}
    async with opened(tmp_path, "64MiB") as a, opened(tmp_path, "64MiB") as b:
        pass
    contexts = [opened(tmp_path, "64MiB") for _ in range(4)]
    rigs = await asyncio.gather(*(context.__aenter__() for context in contexts))
    try:
        assert len({rig.session.owner.name for rig in rigs}) == 4
        for rig in rigs:
            await rig.session.followers.refresh()
            await rig.has_all(values)
    finally:
        for context in contexts:
            await context.__aexit__(None, None, None)
    del a, b


async def test_killed_engine_is_taken_over_with_all_reported_blocks(tmp_path: Path) -> None:
    """Every block reported OK before a kill is there after it, even if no snapshot was ever written."""
    async with opened(tmp_path / "a", "64MiB") as rig:
        values = await rig.put_new(30)
        removed = list(values)[:5]
        await rig.backend.delete(removed)
        copy = clone(tmp_path / "a", tmp_path / "b")
    async with opened(copy, "64MiB") as rig:
        assert await rig.get(removed) == [None] * 5
        await rig.has_all({key: payload for key, payload in values.items() if key not in removed})
        assert rig.session.counts["recovery_scanned_slots"] == 0


async def test_an_engine_above_its_share_gives_segments_up(tmp_path: Path) -> None:
    """An engine that joins a full root gets room within seconds, from the engine above its share."""
    async with opened(tmp_path, room_for(64)) as one:
        for _ in range(16):
            await one.put_new(4)
        async with opened(tmp_path, room_for(64)) as two:
            outcomes: list[Outcome] = []

            async def gets_room() -> None:
                while Outcome.OK not in outcomes:
                    outcomes.extend(await two.put(two.new(2)))
                    await asyncio.sleep(0.01)

            await asyncio.wait_for(gets_room(), 20)
            assert one.backend.stats().counters["segments_given_up"] >= 1
            assert segment_bytes(tmp_path) <= room_for(64)
            assert {cause for _, cause in one.removed} == {RemovalCause.EVICTED}


@pytest.mark.parametrize("emptied", [False, True])
async def test_a_segment_made_again_is_opened_again(tmp_path: Path, emptied: bool) -> None:
    """If an owner removes a segment and creates one of the same number, all read the new file."""
    async with opened(tmp_path, room_for(64)) as one, opened(tmp_path, room_for(64)) as two:
        first = await one.put_new(4)
        await two.session.followers.refresh()
        await two.has_all(first)
        if emptied:
            await one.backend.delete(list(first))
        await one.session.space._give_up([0])
        assert await two.get(list(first)) == [None] * 4
        again = await one.put_new(4)
        assert one.session.index.columns.segments[0]
        await two.session.followers.refresh()
        await one.has_all(again)
        await two.has_all(again)
        assert two.backend.stats().counters.get("stale_blocks", 0) <= 4


async def test_exclusive_engine_excludes_all_others(tmp_path: Path) -> None:
    """An exclusive engine is refused beside another one, and refuses others."""
    async with opened(tmp_path, "64MiB"):
        with pytest.raises(LockedError, match="exclusive"):
            async with opened(tmp_path, "64MiB", exclusive=True):
                pass
    async with opened(tmp_path, "64MiB", exclusive=True) as rig:
        assert segment_bytes(tmp_path) > 60 << 20
        assert rig.backend.stats().gauges["segments"] == 16
        with pytest.raises(LockedError, match="exclusive"):
            async with opened(tmp_path, "64MiB"):
                pass


async def test_a_forked_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A helper forked from an engine does not hold the lock of the engine's directory after the engine's end."""
    reading, writing = os.pipe()
    pid = 0

    def locks() -> list[str]:
        found = []
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            # The helper is closing the descriptors at this moment.
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(fd))
        return [name for name in found if name.startswith(str(tmp_path)) and name.endswith("lock")]

    try:
        async with opened(tmp_path, "64MiB") as rig:
            name = rig.session.owner.name
            pid = os.fork()
            if not pid:
                os.read(reading, 1)
                os._exit(0)
            # If the engine is killed, only the last close releases the locks.
            await eventually_async(lambda: not locks(), timeout_s=10, what="the helper has no lock open")
        async with opened(tmp_path, "64MiB") as rig:
            assert rig.session.owner.name == name
    finally:
        os.write(writing, b"x")
        if pid:
            await asyncio.to_thread(os.waitpid, pid, 0)
        os.close(reading)
        os.close(writing)


async def test_a_root_of_old_files_is_refused(tmp_path: Path) -> None:
    """A directory of the file tier is refused by this backend."""
    (tmp_path / ".kvstore").mkdir(mode=0o700)
    (tmp_path / ".kvstore" / "layout.json").write_text('{"format": 1}')
    with pytest.raises(ConfigError, match="file tier"):
        async with opened(tmp_path, "64MiB"):
            pass


async def test_a_scan_leaves_no_journal_open(tmp_path: Path) -> None:
    """Other owners' files are closed after a scan, however often it runs."""

    def journals() -> list[str]:
        found = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(f"/proc/self/fd/{fd}"))
        return sorted(name for name in found if name.startswith(f"{tmp_path}{os.sep}") and "/journal." in name)

    async with opened(tmp_path, "64MiB") as one, opened(tmp_path, "64MiB") as two:
        values = await one.put_new(3)
        await eventually_async(lambda: set(two.arrived) == set(values), what="the other engine is told")
        before = journals()
        for _ in range(3):
            assert await two.scanned() == set(values)
        assert before and journals() == before


async def test_an_owner_that_goes_during_a_scan(tmp_path: Path) -> None:
    """A scan during which an owner's directory is removed yields the blocks of the others."""
    async with opened(tmp_path, "64MiB") as one, opened(tmp_path, "64MiB") as two:
        values = await two.put_new(3)
        (other,) = two.session.followers.others.values()
        other.close()
        assert await two.scanned() == set(values)
        await one.put_new(1)


async def test_a_mark_of_a_slot_that_holds_nothing_is_no_use(tmp_path: Path) -> None:
    """Slots that others have marked, and that were freed before the owner reads the marks, are reused only once."""
    async with opened(tmp_path, room_for(128)) as rig:
        stored: dict[bytes, bytes] = {}
        for _ in range(32):
            stored |= await rig.put_new(4)
        (marks,) = tmp_path.rglob("uses")
        for _ in range(40):
            marks.write_bytes(b"\1" * 128)
            await rig.session.space.count_uses()
            stored |= await rig.put_new(4)
        left = await rig.still_there(stored)
        assert 120 < len(left) == rig.backend.stats().blocks <= 128
        await rig.has_all(left)


async def test_a_mark_behind_the_end_of_the_marks_makes_them_no_longer(tmp_path: Path) -> None:
    """Whichever slot another owner's journal names, a reader's mark takes no room on the disk."""
    async with opened(tmp_path, "64MiB") as rig:
        uses, path = rig.session.owner.uses, next(tmp_path.rglob("uses"))
        before = path.stat().st_size
        assert uses is not None
        uses.mark([before, 1 << 30])
        assert path.stat().st_size == before


async def test_an_owner_found_while_the_engine_closes_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory and journal are opened on a thread; the cancelled follower leaves neither open."""
    found, may_go_on = threading.Event(), threading.Event()
    load_owner, disk = followers_module.load_owner, FaultyDisk()

    def slow(*args: Any) -> Any:
        state = load_owner(*args)
        if args[0] is disk:
            found.set()
            may_go_on.wait(30)
        return state

    async with opened(tmp_path, room_for(64), disk=disk) as first:
        monkeypatch.setattr(followers_module, "load_owner", slow)
        async with opened(tmp_path, room_for(64)):
            await asyncio.to_thread(found.wait, 30)
            tasks = first.session._tasks
            closing = asyncio.create_task(first.backend.close())
            await eventually_async(lambda: tasks[0].cancelling(), what="the follower is cancelled")
            may_go_on.set()
            await closing
    assert disk.open_fds == {}


@pytest.mark.parametrize("roots", [1, 2])
async def test_blocks_in_reclaimed_segments_are_no_longer_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roots: int
) -> None:
    """Engines that follow an ended owner notice the removal of its segments: its blocks there can be stored again."""
    # The records of a segment are then longer than a frame.
    monkeypatch.setattr(journal_module, "_FRAME_ROWS_MAX", 3)
    paths = [tmp_path / str(number) for number in range(roots)]
    async with contextlib.AsyncExitStack() as stack:
        rigs = [await stack.enter_async_context(opened(paths, room_for(64))) for _ in range(3)]
        values: dict[BlockKey, bytes] = {}
        for rig in rigs:
            values |= await rig.put_new(20)
    async with opened(paths, room_for(64)) as one, opened(paths, room_for(64)) as two:
        indexes = one.session.index, two.session.index
        theirs = [key for key in values if all(index.slot(key) is None for index in indexes)]
        assert len(theirs) == 20
        (name,) = owners(paths[0]) - {one.session.owner.name, two.session.owner.name}

        def left() -> int:
            return sum(len(list(path.glob(f"*/{name}/*.seg"))) for path in paths)

        journal = max(paths[0].glob(f"*/{name}/journal.*"))
        os.utime(journal, (1e9, 1e9))
        before = left()
        while left() > before - 3:
            await one.put(one.new(4))
        # Owners are adopted and reclaimed in the order of their own last changes.
        assert journal.stat().st_mtime == 1e9
        for rig in (one, two):
            await rig.session.followers.refresh()
            found = [key for key, there in zip(theirs, await rig.backend.exists(theirs), strict=True) if there]
            assert 0 < len(found) <= 4 * left()
            await rig.has_all({key: values[key] for key in found})
            assert {key for key, _ in rig.removed} >= set(theirs) - set(found)
        gone = next(key for key in theirs if key not in found)
        assert await two.put({gone: values[gone]}) == [Outcome.OK]


async def test_a_directory_locked_in_any_root_is_not_adopted(tmp_path: Path) -> None:
    """An engine that still writes to the second root only keeps its directory."""
    roots = [tmp_path / "a", tmp_path / "b"]
    async with opened(roots, room_for(64)) as rig:
        await rig.put_new(8)
        name = rig.session.owner.name
    with (roots[1] / NAMESPACE.hex / name / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        async with opened(roots, room_for(64)) as rig:
            assert rig.session.owner.name != name
    async with opened(roots, room_for(64)):
        pass


async def test_owners_of_other_roots_are_not_adopted(tmp_path: Path) -> None:
    """A directory whose segments are spread over two roots is not adopted for one of them, nor are segments removed."""
    roots = [tmp_path / "a", tmp_path / "b"]
    async with opened(roots, room_for(128)) as rig:
        await rig.put_new(8)
        name = rig.session.owner.name
    before = segment_bytes(roots[0])
    # The same segments as before, in one root.
    async with opened(roots[:1], room_for(64)) as rig:
        assert rig.session.owner.name != name
        assert segment_bytes(roots[0]) == before


async def test_own_block_is_not_replaced_by_another_engines(tmp_path: Path) -> None:
    """If two engines store a block at once, each goes on to read its own."""
    async with opened(tmp_path, "64MiB") as one, opened(tmp_path, "64MiB") as two:
        values = one.new(4)
        # The follower of the second engine reads the first engine's journal after its own store.
        await asyncio.gather(one.put(values), two.put(values))
        for rig in (one, two):
            await rig.session.followers.refresh()
            assert list(rig.backend.own(list(values))) == [True] * 4
            await rig.has_all(values)


async def test_removed_segment_frees_its_space_and_its_records(tmp_path: Path) -> None:
    """Its space is free although another engine has the file open, followers forget its blocks, and so does an heir."""
    async with opened(tmp_path / "a", room_for(64)) as one, opened(tmp_path / "a", room_for(64)) as two:
        values = await one.put_new(8)
        await eventually_async(lambda: len(two.arrived) == 8, what="the other engine is told")
        await two.has_all(values)
        (segment, _) = sorted((tmp_path / "a").rglob("*.seg"))
        with segment.open("rb") as file:
            await one.session.space._give_up([0])
            assert os.fstat(file.fileno()).st_size == 0
        await two.session.followers.refresh()
        assert sum(await two.backend.exists(list(values))) == 4
        assert sorted(two.removed) == sorted(one.removed)
        clone(tmp_path / "a", tmp_path / "b")
    async with opened(tmp_path / "b", room_for(64)) as heir:
        assert (heir.session.owner.intact, heir.session.owner.corrections) == (True, [])
        assert heir.backend.stats().gauges["segments"] == 1


async def test_a_block_stored_again_during_a_read_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that finds another block in a slot removes its own block only if the index still has it there."""
    async with opened(tmp_path, room_for(16)) as rig:
        values = await rig.put_new(1)
        (key,) = values
        engine, read = rig.session.engine, rig.session.engine.read

        async def late(transfers: Any, *args: Any) -> None:
            monkeypatch.setattr(engine, "read", read)
            await rig.backend.delete([key])
            assert await rig.put(values) == [Outcome.OK]
            await read(transfers, *args)

        monkeypatch.setattr(engine, "read", late)
        assert await rig.get([key]) == [None]
        await rig.has_all(values)
        assert rig.removed == []


async def test_a_removal_concerns_its_owners_copy_only(tmp_path: Path) -> None:
    """If two engines hold a block, the removal of the copy that a third one does not use leaves it in place."""
    async with opened(tmp_path, room_for(64)) as one, opened(tmp_path, room_for(64)) as two:
        values = one.new(1)
        (key,) = values
        await asyncio.gather(one.put(values), two.put(values))
        async with opened(tmp_path, room_for(64)) as reader:
            place = reader.session.index.place(key)
            used = reader.session.followers.others[place >> OWNER_SHIFT].name
            await (two if used == one.session.owner.name else one).backend.delete([key])
            await reader.session.followers.refresh()
            assert reader.removed == []
            await reader.has_all(values)
