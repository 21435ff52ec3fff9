"""Opening: clear errors for what can't work, locks, limits, and closing again."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from kvstore.backends.base import RecordGeometry
from kvstore.backends.file import FileBackend, FileConfig
from kvstore.config import decode_config
from kvstore.diskio import OsDisk
from kvstore.errors import BackendClosedError, BackendError, BackendUnavailableError, ConfigError, LockedError
from kvstore.registry import BACKENDS
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome
from tests.file.rig import NAMESPACE, OTHER_NAMESPACE, PAGE, Rig, key

GEOMETRY = RecordGeometry(PAGE, PAGE)


async def refusal(rig: Rig, kind: type[BackendError | ConfigError], **settings: Any) -> str:
    """Return the text of the error that opening raises."""
    backend = rig.backend(**settings)
    with pytest.raises(kind) as caught:
        await backend.open(NAMESPACE, GEOMETRY)
    await backend.close()
    assert rig.disk.open_fds == {}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvstore-file")]
    return str(caught.value)


async def test_the_last_component_is_made(tmp_path: Path) -> None:
    """A missing directory is made if its parent is there, for this user alone."""
    rig = Rig(tmp_path / "kv")
    async with rig.open():
        assert rig.root.stat().st_mode & 0o7777 == 0o700


async def test_another_engine_makes_the_directory_at_the_same_time(tmp_path: Path) -> None:
    """Whoever loses the race to make the root, or its state directory, uses what the other made."""
    for nth in (1, 2):
        rig = Rig(tmp_path / str(nth))
        fault = rig.disk.fail("mkdir", errno.EEXIST, nth=nth, after=True)
        async with rig.open():
            assert fault.hits == 1
        assert rig.root.stat().st_mode & 0o7777 == 0o700


async def test_a_missing_parent_is_named(tmp_path: Path) -> None:
    """A path that is not mounted is an error that says which directory is missing; nothing is made."""
    rig = Rig(tmp_path / "mnt" / "kv")
    text = await refusal(rig, ConfigError)
    assert str(rig.root) in text
    assert repr(str(tmp_path / "mnt")) in text
    assert not (tmp_path / "mnt").exists()


async def test_a_file_is_no_directory(tmp_path: Path) -> None:
    """A path that is a file, or below one, is refused."""
    (tmp_path / "file").write_bytes(b"")
    assert "not a directory" in await refusal(Rig(tmp_path / "file"), ConfigError)
    assert "not a directory" in await refusal(Rig(tmp_path / "file" / "kv"), ConfigError)


@pytest.mark.parametrize("error", [errno.EACCES, errno.EROFS, errno.EPERM])
async def test_a_directory_that_can_not_be_written(tmp_path: Path, error: int) -> None:
    """Missing permissions and read-only mounts are refused with what to do."""
    (tmp_path / "kv").mkdir(mode=0o700)
    rig = Rig(tmp_path / "kv")
    rig.disk.fail("mkdir", error, forever=True)
    text = await refusal(rig, ConfigError)
    assert "may not write" in text
    assert "Change its owner or mode" in text
    rig.root = tmp_path / "new"
    assert "can't be made" in await refusal(rig, ConfigError)


async def test_a_directory_that_may_not_be_opened(tmp_path: Path) -> None:
    """A directory of somebody else is refused with what to do."""
    (tmp_path / "kv").mkdir()
    rig = Rig(tmp_path / "kv")
    rig.disk.fail("open", errno.EACCES)
    assert "may not open" in await refusal(rig, ConfigError)


async def test_a_root_open_to_all_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Others must not be able to take directories away; a sticky directory is fine, a group gets a warning."""
    rig = Rig(tmp_path / "kv")
    rig.root.mkdir()
    rig.root.chmod(0o777)
    text = await refusal(rig, ConfigError)
    assert "mode 0777" in text
    assert str(rig.root / "kvstore") in text
    rig.root.chmod(0o1777)
    async with rig.open() as backend:
        assert await rig.put(backend, [1]) == [Outcome.OK]
    rig.root.chmod(0o2775)
    caplog.set_level(logging.WARNING)
    async with rig.open() as backend:
        assert await rig.get(backend, [1]) == [Outcome.OK]
    assert "may be written to by its group" in caplog.text


@pytest.mark.parametrize("capacity", [0, PAGE, 2 * PAGE - 1])
async def test_a_capacity_below_one_block(tmp_path: Path, capacity: int) -> None:
    """A capacity that holds no block is refused, with both sizes."""
    text = await refusal(Rig(tmp_path / "kv", capacity=capacity), ConfigError)
    assert f"{capacity} bytes" in text
    assert f"{2 * PAGE} bytes" in text


class SizedDisk(OsDisk):
    """A disk that tells the size a test says."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes

    def syscall(self, op, function, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        """Change what statvfs tells."""
        result = function(*args, **kwargs)
        if op != "statvfs":
            return result
        fields = list(result)
        fields[2] = self.total_bytes // result.f_frsize
        return os.statvfs_result(fields)


async def test_shares_of_the_filesystem(tmp_path: Path) -> None:
    """``"80%"`` means 80 % of the filesystem's size."""
    rig = Rig(tmp_path / "kv", capacity="80%", reserve="5%")
    async with rig.open(disk=SizedDisk(1 << 30)) as backend:
        assert backend.stats().capacity_bytes == (1 << 30) * 8 // 10
        assert backend.stats().gauges["reserve_bytes"] == (1 << 30) // 20


async def test_shares_of_a_filesystem_without_a_size(tmp_path: Path) -> None:
    """Where the filesystem does not tell its size, shares are refused and sizes work."""
    rig = Rig(tmp_path / "kv", capacity="80%")
    backend = rig.backend(disk=SizedDisk(0))
    with pytest.raises(ConfigError, match="does not tell its size"):
        await backend.open(NAMESPACE, GEOMETRY)
    async with rig.open(disk=SizedDisk(0), capacity="1GiB") as backend:
        assert await rig.put(backend, [1]) == [Outcome.OK]


async def test_more_than_the_filesystem_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Capacity plus reserve beyond the filesystem is a warning: it works, the reserve wins."""
    rig = Rig(tmp_path / "kv", capacity="1GiB", reserve="10%")
    caplog.set_level(logging.WARNING)
    async with rig.open(disk=SizedDisk(1 << 30)):
        assert "more than its filesystem has" in caplog.text


async def test_direct_on_insists(tmp_path: Path) -> None:
    """``direct: on`` refuses to start where direct I/O does not work."""
    rig = Rig(tmp_path / "kv", direct="on")
    async with rig.open() as backend:
        assert backend.stats().gauges["direct_io"] == 1
    rig.disk.fail("tmpfile", errno.EINVAL)
    assert "refuses direct I/O" in await refusal(rig, ConfigError)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": 2, "fanout": 256}', '{"format": 1, "fanout": 0}'])
async def test_a_root_of_another_kvstore(tmp_path: Path, content: str) -> None:
    """A layout of another format, or a damaged one, is refused and left as it is."""
    rig = Rig(tmp_path / "kv")
    async with rig.open() as backend:
        await rig.put(backend, [1])
    (rig.state / "layout.json").write_text(content)
    text = await refusal(rig, ConfigError)
    assert "layout.json" in text
    assert rig.path(1).exists()


async def test_the_namespace_is_described(tmp_path: Path) -> None:
    """``namespace.json`` says what the directory is for; a damaged one does not matter."""
    rig = Rig(tmp_path / "kv")
    async with rig.open():
        pass
    document = rig.root / NAMESPACE.hex / "namespace.json"
    assert json.loads(document.read_text()) == NAMESPACE.document()
    document.write_text("damaged")
    async with rig.open() as backend:
        assert await rig.put(backend, [1]) == [Outcome.OK]


async def test_a_second_engine_is_told_who_is_there(tmp_path: Path) -> None:
    """An exclusive namespace has one engine; the error names it and what to do. Other namespaces are free."""
    rig = Rig(tmp_path / "kv", lock_timeout=0.3)
    async with rig.open(), rig.open(OTHER_NAMESPACE):
        text = await held(rig, shared=False)
        assert f"process {os.getpid()}" in text
        assert "'shared': true for all" in text
        text = await held(rig, shared=True)
        assert "which does not share it" in text
    async with rig.open():
        pass
    async with rig.open(shared=True), rig.open(shared=True) as backend:
        assert not backend.exclusive
        assert "in use by process" in await held(rig, shared=False)


async def held(rig: Rig, **settings: Any) -> str:
    """Return the text of the error for a namespace that is held."""
    backend = rig.backend(**settings)
    with pytest.raises(LockedError) as caught:
        await backend.open(NAMESPACE, GEOMETRY)
    await backend.close()
    return str(caught.value)


async def test_a_lock_that_is_let_go_in_time(tmp_path: Path) -> None:
    """An engine that starts while the last one still ends waits for it."""
    rig = Rig(tmp_path / "kv", lock_timeout=30)
    first, second = rig.backend(), rig.backend()
    await first.open(NAMESPACE, GEOMETRY)
    tried = rig.disk.count("flock")
    opening = asyncio.create_task(second.open(NAMESPACE, GEOMETRY))
    # Its own lock, and at least one try for the namespace.
    await eventually_async(lambda: rig.disk.count("flock") >= tried + 3)
    assert not opening.done()
    await first.close()
    await opening
    assert await rig.put(second, [1]) == [Outcome.OK]
    await second.close()


async def test_nothing_is_held_after_close(tmp_path: Path) -> None:
    """Closing gives back every descriptor, thread and lock, and can be repeated; so can opening."""
    rig = Rig(tmp_path / "kv")
    backend = rig.backend()
    await backend.close()
    for _ in range(3):
        await backend.open(NAMESPACE, GEOMETRY)
        await rig.put(backend, [1])
        await backend.close()
        await backend.close()
        assert rig.disk.open_fds == {}
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvstore-file")]


async def test_a_closed_backend_says_so(tmp_path: Path) -> None:
    """Calls before open and after close are errors; touch and stats are not."""
    rig = Rig(tmp_path / "kv")
    backend = rig.backend()
    for _ in range(2):
        for call in (
            backend.put([rig.write(1)]),
            backend.get_into([rig.read(1)]),
            backend.exists([key(1)]),
            backend.delete([key(1)]),
            backend.quarantine([key(1)]),
            backend.probe(),
        ):
            with pytest.raises(BackendClosedError, match="not open"):
                await call
        backend.touch([key(1)])
        assert backend.stats().blocks == 0
        await backend.open(NAMESPACE, GEOMETRY)
        await backend.close()


def test_the_configuration_takes_names_that_users_know() -> None:
    """``root_dir`` and ``max_bytes`` mean ``path`` and ``capacity``; both are required."""
    config = decode_config(FileConfig, {"root_dir": "/x", "max_bytes": "500GiB"}, where="file tier")
    assert (config.path, str(config.capacity)) == ("/x", "500GiB")
    with pytest.raises(ConfigError, match="'capacity'"):
        decode_config(FileConfig, {"path": "/x"}, where="file tier")
    with pytest.raises(ConfigError, match="'path'"):
        decode_config(FileConfig, {"capacity": 1}, where="file tier")
    with pytest.raises(ConfigError, match="Did you mean 'eviction'"):
        decode_config(FileConfig, {"path": "/x", "capacity": 1, "evictoin": "lru"}, where="file tier")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("path", ""),
        ("path", "a\0b"),
        ("high_watermark", 0),
        ("high_watermark", 1.1),
        ("low_watermark", 0.96),
        ("threads", 0),
        ("threads", 1000),
        ("quarantine_blocks", -1),
        ("eviction", "fifo"),
        ("durability", "some"),
        ("direct", "maybe"),
        ("shared", "yes"),
        ("capacity", "0%"),
        ("capacity", "lots"),
        ("snapshot_interval", 0.1),
        ("lock_timeout", "1h"),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: object) -> None:
    """Each bad value is one error that names the key."""
    with pytest.raises(ConfigError, match=name):
        decode_config(FileConfig, {"path": "/x", "capacity": "1GiB", name: value}, where="file tier")


async def test_a_disk_that_fails_at_start(tmp_path: Path) -> None:
    """EIO at start is a BackendUnavailableError that names the directory, with nothing left open."""
    rig = Rig(tmp_path / "kv")
    async with rig.open():
        pass
    rig.disk.fail("flock", errno.EIO, forever=True)
    text = await refusal(rig, BackendUnavailableError)
    assert str(rig.root) in text


async def test_a_full_disk_at_start_serves_what_is_there(tmp_path: Path) -> None:
    """ENOSPC everywhere does not keep an engine from loading what it has."""
    rig = Rig(tmp_path / "kv")
    async with rig.open() as backend:
        await rig.put(backend, [1])
    for op in ("tmpfile", "mkdir", "link"):
        rig.disk.fail(op, errno.ENOSPC, forever=True)
    async with rig.open() as backend:
        assert await rig.get(backend, [1]) == [Outcome.OK]
        assert await rig.put(backend, [2]) == [Outcome.NO_SPACE]
        await backend.probe()


def test_the_registry_knows_it() -> None:
    """``"backend": "file"`` is this class."""
    assert BACKENDS.find("file") is FileBackend
