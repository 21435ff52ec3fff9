"""Every system call of the file backend fails once, or from then on: nothing wrong is read, nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvstore import Backend, KVStoreError, Outcome
from kvstore.backends.file import FileBackend
from kvstore.testing import eventually
from kvstore.testing.faulty_disk import DiskFault, FaultyDisk
from tests.torture.blocks import Client

pytestmark = [pytest.mark.torture, pytest.mark.timeout(600)]

SLOT = 8192
RECORD = SLOT + 4096
CAPACITY = 5 * RECORD
OLD, NEW = range(100, 103), range(200, 204)
"""Blocks that are there before, and blocks that are stored; together more than the capacity."""

FAULTS: dict[str, dict[str, Any]] = {
    "EIO": {"error": errno.EIO},
    "ENOSPC": {"error": errno.ENOSPC},
    "EROFS": {"error": errno.EROFS},
    "EINTR": {"error": errno.EINTR},
    "EMFILE": {"error": errno.EMFILE},
    "short": {"short": True},
}


def config_of(root: Path, engine: str) -> dict[str, Any]:
    """A small file tier with few threads, so that calls come in nearly the same order; none of them is ever late."""
    return {
        "backend": "file",
        "path": str(root),
        "capacity": CAPACITY,
        "reserve": 0,
        "threads": 2,
        "engine": engine,
        "load_timeout": "60s",
        "store_timeout": "60s",
        "lock_timeout": "1s",
        "durability": "full",
    }


def open_client(root: Path, disk: FaultyDisk | None = None, engine: str = "auto") -> Client:
    """Open a tier, over a faulty disk if there is one."""

    def with_disk(backend: Backend) -> Backend:
        assert isinstance(backend, FileBackend)
        return FileBackend(backend.config, disk=disk)

    return Client(config_of(root, engine), slot_bytes=SLOT, wrap_backend=with_disk if disk else None)


def use(root: Path, disk: FaultyDisk, engine: str) -> Counter[str]:
    """Live a short life: open and recover, store until blocks are evicted, load, close. Returns what became of it."""
    seen: Counter[str] = Counter()
    try:
        client = open_client(root, disk, engine)
    except KVStoreError as error:
        return Counter({f"open: {type(error).__name__}": 1})
    try:
        for numbers in (list(NEW)[:2], list(NEW)[2:]):
            seen.update(f"store.{outcome.name}" for outcome in client.store(numbers).outcomes)
        for numbers in (list(OLD), list(NEW)):
            result = client.load(numbers)
            assert client.wrong(numbers, result) == []
            seen.update(f"load.{outcome.name}" for outcome in result.outcomes)
    finally:
        client.close()
    return seen


def check_healed(root: Path) -> None:
    """With the fault gone: all that is there is right, space is exactly accounted, stores and loads work."""
    client = open_client(root)
    assert client.tier.wait_recovered(60)
    for numbers in (list(OLD), list(NEW)):
        assert client.wrong(numbers, client.load(numbers)) == []
    fresh = [300, 301]
    assert client.store(fresh).success
    result = client.load(fresh)
    assert result.success
    assert client.wrong(fresh, result) == []
    eventually(lambda: accounted(client) == on_disk(root), what="space is accounted")
    assert accounted(client) <= CAPACITY
    # Where unlink itself failed the name stays, for the first start after this process has ended.
    own = f".{os.getpid()}."
    assert not [path for path in root.rglob("*") if ".tmp." in path.name and own not in path.name]
    client.close()


def accounted(client: Client) -> int:
    """Bytes that the tier believes to use."""
    client.tier.drain(20)
    client.tier.get_finished()
    return client.tier.stats().used_bytes


def on_disk(root: Path) -> int:
    """Bytes of all block files; eviction may still be at work."""
    total = 0
    for path in root.rglob("*.kv"):
        if ".kvstore" not in path.parts:
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
    return total


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root as an earlier run left it: three blocks, a snapshot, the litter of a dead writer."""
    root = tmp_path_factory.mktemp("template") / "kv"
    client = open_client(root)
    assert client.store(list(OLD)).success
    client.close()
    return root


@pytest.fixture(scope="module", params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest) -> str:
    """What does the I/O of the life in which calls fail."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def calls(template: Path, engine: str, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """Numbers of the system calls of a life without faults, less most of those that look for absent shards."""
    root = tmp_path_factory.mktemp("clean") / "kv"
    shutil.copytree(template, root)
    disk = FaultyDisk()
    seen = use(root, disk, engine)
    assert seen["store.OK"] == len(NEW), seen
    assert seen["load.OK"] >= len(NEW), seen
    assert {"open", "pwritev", "preadv", "link", "unlink", "fsync", "flock"} <= {call.op for call in disk.calls}
    shards = [call.number for call in disk.calls if call.op == "open" and re.fullmatch("[0-9a-f]{2}", call.name)]
    # One shard that is not there is like another: each tenth is enough.
    skipped = {number for i, number in enumerate(shards) if i % 10}
    return [number for number in range(1, len(disk.calls) + 1) if number not in skipped]


@pytest.mark.parametrize("forever", [False, True], ids=["once", "for_ever"])
@pytest.mark.parametrize("kind", FAULTS)
def test_every_call_fails(
    kind: str,
    forever: bool,
    engine: str,
    template: Path,
    calls: list[int],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The Nth call fails for N = 1, 2, … to the end: misses and refusals, no wrong byte, no leak, whole afterwards."""
    caplog.set_level(logging.ERROR, "kvstore")
    outcomes: Counter[str] = Counter()
    struck = 0
    for nth in calls:
        root = tmp_path / "kv"
        shutil.copytree(template, root)
        disk = FaultyDisk()
        fault = disk.add(DiskFault("any", nth, forever=forever, **FAULTS[kind]))
        seen = use(root, disk, engine)
        struck += bool(fault.hits)
        outcomes.update(seen)
        context = (kind, forever, nth, dict(seen), [str(call) for call in disk.calls[max(0, nth - 3) : nth + 2]])
        assert disk.open_fds == {}, context
        assert not caplog.records, (context, caplog.text)
        check_healed(root)
        shutil.rmtree(root)
    assert struck > 0.05 * len(calls) if kind == "short" else struck > 0.9 * len(calls), (struck, calls)
    assert all(name.startswith(("open:", "store.", "load.")) for name in outcomes)
    assert set(outcomes) & {"store.OK", "load.OK"} or forever
    assert Outcome.OK.name in "".join(outcomes), "a single failure must not make everything fail"
