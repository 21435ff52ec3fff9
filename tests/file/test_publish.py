"""Publishing: whole or not at all, first writer wins, with the right modes and as durable as asked for."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import stat
from pathlib import Path

import pytest

from kvstore.backends.base import RecordRead, RecordWrite
from kvstore.testing import DiskFault
from kvstore.types import Outcome
from tests.file.rig import PAGE, Rig, key

pytestmark = pytest.mark.usefixtures("either_engine")

FAILURES = ["tmpfile", "pwritev", "fdatasync", "link", "close"]


async def test_a_block_is_one_file_with_its_bytes(tmp_path: Path) -> None:
    """The file under the key's name holds header and payload, nothing else."""
    rig = Rig(tmp_path / "kv")
    async with rig.open() as backend:
        assert await rig.put(backend, [1]) == [Outcome.OK]
        assert rig.path(1).read_bytes() == rig.record(1)
        assert rig.files() == [rig.path(1)]


async def test_the_first_writer_wins(tmp_path: Path) -> None:
    """A second record of a key is told EXISTS and changes nothing, also when it comes from another engine."""
    rig = Rig(tmp_path / "kv", shared=True)
    async with rig.open() as first, rig.open() as second:
        assert await rig.put(first, [1]) == [Outcome.OK]
        content = rig.record(99)
        assert list(await second.put([rig.write(1, content)])) == [Outcome.EXISTS]
        assert list(await first.put([rig.write(1, content)])) == [Outcome.EXISTS]
    assert rig.path(1).read_bytes() == rig.record(1)


async def test_one_of_many_writers_at_once_wins(tmp_path: Path) -> None:
    """Of eight puts of a key at the same time exactly one is OK, and space is counted once."""
    rig = Rig(tmp_path / "kv", shared=True)
    async with rig.open() as first, rig.open() as second:
        puts = [backend.put([rig.write(1)]) for backend in (first, second) * 4]
        outcomes = [outcome for result in await asyncio.gather(*puts) for outcome in result]
        assert sorted(outcomes) == [Outcome.OK] + [Outcome.EXISTS] * 7
        await rig.settled(first)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
async def test_modes_hold_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    """Directories are 0700 and files 0600 from the moment they are made."""
    rig = Rig(tmp_path / "kv", eviction="s3fifo")
    before = os.umask(umask)
    try:
        async with rig.open() as backend:
            await rig.put(backend, range(20))
            await backend.quarantine([key(1)])
    finally:
        os.umask(before)
    found = [rig.root, *rig.root.rglob("*")]
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in found}
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items()), modes
    assert any(path.name.endswith(".bad") for path in found)
    assert any(path.name.startswith("snapshot.") for path in found)


@pytest.mark.parametrize(("durability", "expected"), [("none", (0, 0)), ("data", (3, 0)), ("full", (3, 1))])
async def test_durability_syncs_as_asked(tmp_path: Path, durability: str, expected: tuple[int, int]) -> None:
    """``data`` syncs each file before it has a name, ``full`` also each directory; ``none`` syncs nothing."""
    rig = Rig(tmp_path / "kv", durability=durability, threads=1)
    async with rig.open() as backend:
        same_shard = [n for n in range(2000) if rig.shard(n) == rig.shard(1)][:3]
        before = len(rig.disk.calls)
        files, names = rig.disk.count("fdatasync"), rig.disk.count("fsync")
        assert await rig.put(backend, same_shard) == [Outcome.OK] * 3
        assert (rig.disk.count("fdatasync") - files, rig.disk.count("fsync") - names) == expected
        if durability != "none":
            order = [call.op for call in rig.disk.calls[before:] if call.op in ("fdatasync", "link")]
            assert all(order[:n].count("fdatasync") >= order[:n].count("link") for n in range(len(order) + 1)), order


@pytest.mark.parametrize("op", FAILURES)
@pytest.mark.parametrize("tmpfile", [True, False])
async def test_what_fails_is_never_visible(tmp_path: Path, op: str, tmpfile: bool) -> None:
    """Whatever call of a write fails, the outcome says so, and there is no file, no litter and no charge."""
    rig = Rig(tmp_path / "kv", durability="data")
    if not tmpfile:
        rig.disk.fail("tmpfile", errno.EOPNOTSUPP, forever=True)
    async with rig.open() as backend:
        await rig.put(backend, [2])
        fds = len(rig.disk.open_fds)
        wanted = "open" if op == "tmpfile" and not tmpfile else op
        fault = rig.disk.fail(wanted, errno.EIO, nth=_nth(wanted, op))
        assert await rig.put(backend, [1]) == [Outcome.IO_ERROR]
        assert fault.hits == 1
        assert not rig.path(1).exists()
        assert len(rig.disk.open_fds) == fds + (rig.shard(1) != rig.shard(2) and op != "open")
        assert [path for path in rig.root.rglob(".tmp.*")] == []
        assert await rig.put(backend, [1]) == [Outcome.OK]
        assert await rig.get(backend, [1]) == [Outcome.OK]
        await rig.settled(backend)


def _nth(wanted: str, op: str) -> int:
    """Return which call is about the block: before it the ledger is written and the shard made."""
    if wanted == "open" and op == "tmpfile":
        return 3
    return 2 if op == "pwritev" else 1


async def test_a_failing_name_sync_takes_the_block_back(tmp_path: Path) -> None:
    """With ``durability: full`` a block whose name could not be made durable is not stored."""
    rig = Rig(tmp_path / "kv", durability="full")
    async with rig.open() as backend:
        rig.disk.fail("fsync", errno.EIO)
        assert await rig.put(backend, [1]) == [Outcome.IO_ERROR]
        assert not rig.path(1).exists()
        await rig.settled(backend)


@pytest.mark.parametrize("size_bytes", [PAGE, PAGE + 1, 3 * PAGE + 511])
async def test_short_transfers_are_completed(tmp_path: Path, size_bytes: int) -> None:
    """Reads and writes that the disk keeps cutting in half end with all bytes."""
    rig = Rig(tmp_path / "kv", payload_bytes=64 * PAGE)
    async with rig.open() as backend:
        rig.disk.add(DiskFault("any", short=True, forever=True))
        content = rig.record(1)[: PAGE + size_bytes]
        outcome = (await backend.put([rig.write(1, content)]))[0]
        assert outcome in (Outcome.OK, Outcome.IO_ERROR)
        if outcome is Outcome.IO_ERROR:
            # Direct I/O can't go on below a page: whoever halves that for ever is broken.
            rig.disk.heal()
            assert not rig.path(1).exists()
            assert await rig.put(backend, [1]) == [Outcome.OK]
        else:
            assert rig.path(1).read_bytes() == content


async def test_one_short_write_is_completed(tmp_path: Path) -> None:
    """A write that is cut once goes on where it was cut."""
    rig = Rig(tmp_path / "kv", payload_bytes=15 * PAGE)
    async with rig.open() as backend:
        fault = rig.disk.add(DiskFault("pwritev", nth=2, short=True))
        assert await rig.put(backend, [1]) == [Outcome.OK]
        assert fault.hits == 1
        rig.disk.add(DiskFault("preadv", nth=1, short=True))
        assert await rig.get(backend, [1]) == [Outcome.OK]


@pytest.mark.parametrize("op", ["open", "tmpfile", "pwritev", "link", "preadv", "fstat", "flock", "statvfs", "stat"])
async def test_interrupted_calls_are_repeated(tmp_path: Path, op: str) -> None:
    """EINTR is nobody's failure."""
    rig = Rig(tmp_path / "kv")
    async with rig.open() as backend:
        for nth in range(1, 4):
            rig.disk.fail(op, errno.EINTR, nth=nth)
        assert await rig.put(backend, range(3)) == [Outcome.OK] * 3
        assert await rig.get(backend, range(3)) == [Outcome.OK] * 3


async def test_without_nameless_files_a_name_is_taken_first(tmp_path: Path) -> None:
    """Where a filesystem has no O_TMPFILE, blocks are written under another name and linked."""
    rig = Rig(tmp_path / "kv", shared=True)
    rig.disk.fail("tmpfile", errno.EOPNOTSUPP, forever=True)
    async with rig.open() as first, rig.open() as second:
        assert await rig.put(first, [1, 2]) == [Outcome.OK] * 2
        assert await rig.put(second, [1]) == [Outcome.EXISTS]
        assert await rig.get(second, [1, 2]) == [Outcome.OK] * 2
        assert list(rig.root.rglob(".tmp.*")) == []


async def test_without_hard_links_a_block_is_renamed(tmp_path: Path) -> None:
    """Where a filesystem has no links either (FAT), rename publishes, and still does not replace a block."""
    rig = Rig(tmp_path / "kv", shared=True)
    rig.disk.fail("tmpfile", errno.EOPNOTSUPP, forever=True)
    async with rig.open() as first, rig.open() as second:
        rig.disk.fail("link", errno.EPERM, forever=True)
        assert await rig.put(first, [1]) == [Outcome.OK]
        assert list(await second.put([rig.write(1, rig.record(99))])) == [Outcome.EXISTS]
        assert await rig.get(first, [1]) == [Outcome.OK]
        assert list(rig.root.rglob(".tmp.*")) == []


async def test_no_direct_io_at_open(tmp_path: Path) -> None:
    """A filesystem that refuses direct I/O is used through the page cache from the start."""
    rig = Rig(tmp_path / "kv")
    rig.disk.fail("tmpfile", errno.EINVAL)
    async with rig.open() as backend:
        assert await rig.put(backend, [1]) == [Outcome.OK]
        assert await rig.get(backend, [1]) == [Outcome.OK]
        assert backend.stats().gauges["direct_io"] == 0
        assert backend.stats().counters["direct_io_fallbacks"] == 0


async def test_direct_io_refused_by_a_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Aligned writes and reads that are refused go through the page cache from then on: counted, warned of once."""
    rig = Rig(tmp_path / "kv", engine="threads")  # In a batch, what is refused once is tried by itself first.
    async with rig.open() as backend:
        rig.disk.fail("pwritev", errno.EINVAL, nth=2)
        with caplog.at_level(logging.WARNING):
            assert await rig.put(backend, [1]) == [Outcome.OK]
            assert await rig.put(backend, [2, 3]) == [Outcome.OK] * 2
        assert backend.stats().counters["direct_io_fallbacks"] == 1
        assert len([r for r in caplog.records if "direct I/O" in r.message]) == 1
        rig.disk.fail("preadv", errno.EINVAL)
        assert await rig.get(backend, [1, 2, 3]) == [Outcome.OK] * 3
        assert backend.stats().counters["direct_io_fallbacks"] == 2
        assert backend.stats().gauges["direct_io"] == 0


async def test_misaligned_buffers_fall_back_one_by_one(tmp_path: Path) -> None:
    """Odd lengths and addresses are stored and loaded right, and do not end direct I/O for others."""
    rig = Rig(tmp_path / "kv", payload_bytes=4 * PAGE)
    async with rig.open() as backend:
        odd = bytearray(rig.record(1) + b"x")
        views = [memoryview(odd)[1 : PAGE + 1], memoryview(odd)[PAGE + 1 : 3 * PAGE + 12]]
        assert list(await backend.put([RecordWrite(key(1), views), rig.write(2)])) == [Outcome.OK] * 2
        assert rig.path(1).read_bytes() == bytes(odd[1 : 3 * PAGE + 12])
        target = bytearray(5 * PAGE + 3)
        read = RecordRead(key(1), [memoryview(target)[3 : PAGE + 3], memoryview(target)[PAGE + 3 :]])
        assert list(await backend.get_into([read])) == [Outcome.OK]
        assert read.filled_bytes == 3 * PAGE + 11
        assert target[3 : 3 + read.filled_bytes] == odd[1 : 3 * PAGE + 12]
        assert backend.stats().counters["direct_io_fallbacks"] >= 1
        assert backend.stats().gauges["direct_io"] == 1


async def test_direct_off_never_asks_for_it(tmp_path: Path) -> None:
    """``direct: off`` goes through the page cache and counts no fallback."""
    rig = Rig(tmp_path / "kv", direct="off")
    async with rig.open() as backend:
        assert await rig.put(backend, [1]) == [Outcome.OK]
        assert await rig.get(backend, [1]) == [Outcome.OK]
        assert backend.stats().counters["direct_io_fallbacks"] == 0
