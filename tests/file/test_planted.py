"""Whatever lies in the directory can't hang it, lead out of it, or be taken for a block; and it is left alone."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.backends.base import RecordGeometry
from kvstore.backends.file.layout import shard_name
from kvstore.diskio import OsDisk
from kvstore.errors import BackendUnavailableError, ConfigError
from kvstore.types import Outcome
from tests.file.rig import NAMESPACE, PAGE, Rig, key

pytestmark = pytest.mark.usefixtures("either_engine")


def symlink_to_file(path: Path, outside: Path) -> None:
    """Plant a symbolic link to a file outside."""
    path.symlink_to(outside / "file")


def symlink_to_directory(path: Path, outside: Path) -> None:
    """Plant a symbolic link to a directory outside."""
    path.symlink_to(outside)


def dangling_symlink(path: Path, outside: Path) -> None:
    """Plant a symbolic link to nothing."""
    path.symlink_to(outside / "nothing")


def fifo(path: Path, outside: Path) -> None:
    """Plant a FIFO that nobody writes to."""
    os.mkfifo(path)


def directory(path: Path, outside: Path) -> None:
    """Plant a directory with something in it."""
    path.mkdir()
    (path / "keep").write_text("mine")


def unix_socket(path: Path, outside: Path) -> None:
    """Plant a socket; its directory is named through a descriptor, as bind takes only short paths."""
    directory_fd = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as planted:
        here = os.getcwd()
        os.chdir(f"/proc/self/fd/{directory_fd}")
        try:
            planted.bind("socket")
        finally:
            os.chdir(here)
    os.close(directory_fd)
    (path.parent / "socket").rename(path)


PLANTED = [symlink_to_file, symlink_to_directory, dangling_symlink, fifo, directory, unix_socket]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Return a directory that is nobody's business, with a file as long as a record."""
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    (outside / "file").write_bytes(b"o" * (2 * PAGE))
    return outside


def state_of(outside: Path) -> list[tuple[str, bytes, int, int]]:
    """Return all that could be changed of what lies outside."""
    return [
        (str(path), path.read_bytes() if path.is_file() else b"", path.stat().st_mode, path.stat().st_mtime_ns)
        for path in sorted(outside.rglob("*"))
    ]


def is_there(path: Path) -> bool:
    """Tell whether a name is taken, even by a link to nothing."""
    return os.path.lexists(path)


@pytest.mark.parametrize("plant", PLANTED)
@pytest.mark.parametrize("shared", [False, True])
async def test_in_the_place_of_a_block(
    tmp_path: Path, outside: Path, plant: Callable[[Path, Path], None], shared: bool
) -> None:
    """A load misses, a store is refused, eviction, removal, quarantine and scan leave it where it is; nothing hangs."""
    rig = Rig(tmp_path / "kv", shared=shared)
    before = state_of(outside)
    async with asyncio.timeout(60):
        async with rig.open() as backend:
            await rig.put(backend, [2])
            rig.shard(1).mkdir(exist_ok=True)
            plant(rig.path(1), outside)
            assert await rig.get(backend, [1]) == [Outcome.MISS]
            assert list(await backend.exists([key(1)])) == [False]
            assert await rig.put(backend, [1]) == [Outcome.REFUSED]
            await backend.quarantine([key(1)])
            assert list(await backend.delete([key(1)])) == [False]
            assert await rig.get(backend, [2]) == [Outcome.OK]
            assert backend.stats().counters["foreign_objects"] > 0
        async with rig.open() as backend:
            assert backend.stats().blocks == 1
            backend.touch([key(1)])
            await backend._machine.evictor.make_room([1 << 40])  # type: ignore[union-attr]
            assert backend.stats().blocks == 0
    assert is_there(rig.path(1))
    assert state_of(outside) == before


@pytest.mark.parametrize("plant", [p for p in PLANTED if p is not directory])
@pytest.mark.parametrize("running", [True, False])
async def test_in_the_place_of_a_shard(
    tmp_path: Path, outside: Path, plant: Callable[[Path, Path], None], running: bool
) -> None:
    """Nothing is read or written through it, whether it was planted before the start or while the engine runs."""
    rig = Rig(tmp_path / "kv")
    before = state_of(outside)
    rig.root.mkdir(mode=0o700)
    (rig.root / NAMESPACE.hex).mkdir(mode=0o700)
    if not running:
        plant(rig.shard(1), outside)
    async with asyncio.timeout(60), rig.open() as backend:
        if running:
            plant(rig.shard(1), outside)
        assert await rig.get(backend, [1]) == [Outcome.MISS]
        assert (await rig.put(backend, [1]))[0] in (Outcome.IO_ERROR, Outcome.REFUSED)
        assert list(await backend.delete([key(1)])) == [False]
        other = next(n for n in range(2, 100) if rig.shard(n) != rig.shard(1))
        assert await rig.put(backend, [other]) == [Outcome.OK]
    assert is_there(rig.shard(1))
    assert state_of(outside) == before


@pytest.mark.parametrize("plant", [p for p in PLANTED if p is not directory])
async def test_in_the_place_of_the_namespace_or_the_state(
    tmp_path: Path, outside: Path, plant: Callable[[Path, Path], None]
) -> None:
    """The engine refuses to start with an error that names the cause."""
    rig = Rig(tmp_path / "kv")
    before = state_of(outside)
    for name, error in ((".kvstore", ConfigError), (NAMESPACE.hex, BackendUnavailableError)):
        shutil.rmtree(rig.root, ignore_errors=True)
        rig.root.mkdir(mode=0o700)
        plant(rig.root / name, outside)
        backend = rig.backend()
        async with asyncio.timeout(60):
            with pytest.raises(error, match=r"not a directory|Not a directory|Too many levels"):
                await backend.open(NAMESPACE, RecordGeometry(PAGE, PAGE))
            await backend.close()
    assert state_of(outside) == before


@pytest.mark.parametrize("name", ["ledger", "layout.json", f"lock.{NAMESPACE.hex}", f"snapshot.{NAMESPACE.hex}"])
@pytest.mark.parametrize("plant", [symlink_to_file, fifo, directory])
async def test_in_the_place_of_state(
    tmp_path: Path, outside: Path, plant: Callable[[Path, Path], None], name: str
) -> None:
    """State that is something else is refused or done without; nothing hangs, nothing outside changes."""
    rig = Rig(tmp_path / "kv")
    before = state_of(outside)
    async with rig.open() as backend:
        await rig.put(backend, [1])
    (rig.state / name).unlink()
    plant(rig.state / name, outside)
    async with asyncio.timeout(60):
        try:
            async with rig.open() as backend:
                assert await rig.get(backend, [1]) == [Outcome.OK]
        except (BackendUnavailableError, ConfigError) as error:
            assert str(rig.root) in str(error)
    assert state_of(outside) == before


async def test_a_hard_link_is_read_but_never_written(tmp_path: Path, outside: Path) -> None:
    """A file of ours that has another name elsewhere keeps its bytes and its times."""
    rig = Rig(tmp_path / "kv", shared=True)
    rig.root.mkdir(mode=0o700)
    rig.shard(1).mkdir(parents=True, mode=0o700)
    os.link(outside / "file", rig.path(1))
    before = state_of(outside)
    async with rig.open() as backend:
        read = rig.read(1)
        assert list(await backend.get_into([read])) == [Outcome.OK]
        assert bytes(read.buffers[0]) == b"o" * PAGE
        backend.touch([key(1)])
        await backend._machine.upkeep._tick()  # type: ignore[union-attr]
        await backend.quarantine([key(1)])
    assert not rig.path(1).exists()
    assert state_of(outside) == before


async def test_foreign_names_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    """Files and directories whose names are not ours stay, whatever happens around them."""
    rig = Rig(tmp_path / "kv")
    async with rig.open() as backend:
        await rig.put(backend, [1])
        used = backend.stats().used_bytes
    shard = rig.shard(1)
    planted = [
        rig.root / "notes.txt",
        rig.root / ("A" * 64),
        rig.root / NAMESPACE.hex / "zz",
        rig.root / NAMESPACE.hex / "README",
        shard / "x.kv",
        shard / f"{key(2).hex().upper()}.kv",
        shard / f"{key(3).hex()}.kv.bak",
        shard / f"{'ab' * 65}.kv",
        shard / "abc.kv",
        shard / ".kv",
        shard / ".tmp.mine",
        shard / f".tmp.{'0' * 32}.1",
        rig.state / "notes",
        rig.state / "writer.me",
    ]
    for path in planted:
        path.write_bytes(b"p" * 3 * PAGE)
    (shard / "keep").mkdir()
    async with rig.open() as backend:
        assert backend.stats().blocks == 1
        assert backend.stats().used_bytes == used
        await rig.settled_at(backend, used)
        await backend._machine.evictor.make_room([1 << 40])  # type: ignore[union-attr]
        await backend.delete([key(1), key(2), key(3)])
    assert all(path.read_bytes() == b"p" * 3 * PAGE for path in planted)
    assert (shard / "keep").is_dir()


async def test_a_block_in_the_wrong_shard_is_no_block(tmp_path: Path) -> None:
    """A file that a lookup would never find is not told to be there."""
    rig = Rig(tmp_path / "kv")
    async with rig.open() as backend:
        await rig.put(backend, [1])
        shard = int(rig.shard(1).name, 16)
    wrong = rig.root / NAMESPACE.hex / shard_name((shard + 1) % 256)
    wrong.mkdir(mode=0o700)
    rig.path(1).rename(wrong / rig.path(1).name)
    (rig.state / f"snapshot.{NAMESPACE.hex}").unlink()
    async with rig.open() as backend:
        assert backend.stats().blocks == 0
        assert await rig.get(backend, [1]) == [Outcome.MISS]
        assert await rig.put(backend, [1]) == [Outcome.OK]


class ForeignDisk(OsDisk):
    """A disk on which one file belongs to somebody else."""

    def __init__(self, inode: int) -> None:
        self.inode = inode

    def syscall(self, op, function, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        """Change the owner that the system tells of."""
        result = function(*args, **kwargs)
        if op in ("stat", "fstat") and result.st_ino == self.inode:
            fields = list(result)
            fields[4] = 12345
            extra = {"st_mtime_ns": result.st_mtime_ns, "st_ctime_ns": result.st_ctime_ns}
            return os.stat_result(fields, extra)
        return result


@pytest.mark.parametrize("level", ["file", "shard", "namespace"])
async def test_what_belongs_to_another_user_is_not_ours(tmp_path: Path, level: str) -> None:
    """Files and directories of other users are not used, not counted and not removed."""
    rig = Rig(tmp_path / "kv", engine="threads")  # The disk that lies about owners does so call by call.
    async with rig.open() as backend:
        await rig.put(backend, [1])
    path = {"file": rig.path(1), "shard": rig.shard(1), "namespace": rig.root / NAMESPACE.hex}[level]
    disk = ForeignDisk(path.stat().st_ino)
    if level == "namespace":
        with pytest.raises(BackendUnavailableError, match="another user"):
            async with rig.open(disk=disk):
                pass
        return
    async with rig.open(disk=disk) as backend:
        expected = {"file": Outcome.MISS, "shard": Outcome.REFUSED}[level]
        assert await rig.get(backend, [1]) == [expected]
        neighbour = next(n for n in range(2, 9999) if rig.shard(n) == rig.shard(1))
        assert await rig.put(backend, [1 if level == "file" else neighbour]) == [Outcome.REFUSED]
        assert list(await backend.delete([key(1)])) == [False]
    assert rig.path(1).exists()


async def test_a_file_too_long_is_corrupt_and_stays_within_the_buffers(tmp_path: Path) -> None:
    """A longer file is told CORRUPT without being read; a shorter one is read as far as it goes."""
    rig = Rig(tmp_path / "kv")
    async with rig.open() as backend:
        await rig.put(backend, [1, 2])
        with rig.path(1).open("ab") as file:
            file.write(b"x")
        with rig.path(2).open("r+b") as file:
            file.truncate(PAGE + 100)
        reads = [rig.read(1), rig.read(2)]
        assert list(await backend.get_into(reads)) == [Outcome.CORRUPT, Outcome.OK]
        assert reads[0].filled_bytes == 0
        assert bytes(reads[0].buffers[0]) == bytes(PAGE)
        assert reads[1].filled_bytes == PAGE + 100
