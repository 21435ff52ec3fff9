"""A process that is forked after ``open``: its calls end at once, and the parent's engine goes on."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.diskio import OsDisk
from kvstore.testing.waiting import eventually_async
from tests.disk.rig import OTHER_NAMESPACE, filled, opened
from tests.project.tree import ROOT

pytestmark = pytest.mark.timeout(120)

BACKEND = """
import asyncio, os, sys, traceback
from pathlib import Path
from kvstore.errors import BackendClosedError
from tests.disk.rig import NAMESPACE, GEOMETRY, opened

async def refused(call):
    try:
        await call
    except BackendClosedError as error:
        assert "fork" in str(error), error
    else:
        raise AssertionError("not refused")

async def child(rig, values):
    backend = rig.backend
    await refused(rig.put(rig.new(1)))
    await refused(rig.get(list(values)))
    await refused(backend.exists(list(values)))
    await refused(backend.delete(list(values)))
    await refused(backend.probe())
    await refused(rig.scanned())
    await refused(backend.open(NAMESPACE, GEOMETRY))
    backend.touch(list(values))
    backend.stats()
    await backend.close()
    await backend.close()
    # A backend of the child's own works.
    async with opened(Path(sys.argv[1]), "64MiB") as own:
        await own.has_all(values)
        await own.has_all(await own.put_new(2))

async def parent():
    async with opened(Path(sys.argv[1]), "64MiB", engine=sys.argv[2]) as rig:
        values = await rig.put_new(4)
        pid = os.fork()
        if not pid:
            try:
                asyncio.run(child(rig, values))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
        assert status == 0, status
        await rig.has_all(values)
        await rig.has_all(await rig.put_new(2))
        # The parent's segments are still its own.
        async with opened(Path(sys.argv[1]), "64MiB") as other:
            assert other.backend.own(list(values)) == [False] * 4
    print("good")

asyncio.run(parent())
"""

TIER = """
import mmap, os, sys, time
from kvstore import Namespace
from kvstore.tiers.threaded import ThreadedTier
from kvstore.tiers.opening import open_tier
from kvstore.types import LookupResult, TransferJob

file = os.memfd_create("primary")
os.ftruncate(file, 4 * 4096)
memory = mmap.mmap(file, 4 * 4096)
memory[:5] = b"block"
config = {"backend": "file", "path": sys.argv[1], "capacity": "64MiB", "reserve": 0}
options = dict(primary=memory, slot_bytes=4096, namespace=Namespace({"test": "forks"}))
threaded = ThreadedTier(config, **options)
assert threaded.store([b"key"], [0]) == [True]
plain = open_tier({**config, "io": sys.argv[2], "lookup_timeout": 0.1}, **options)
pid = os.fork()
if not pid:
    try:
        assert threaded.lookup([b"key"]) == [False]
        assert threaded.store([b"other"], [0]) == [False]
        assert threaded.load([b"key"], [1]) == [False]
        threaded.remove([b"key"])
        assert not threaded.clear(60)
        threaded.stats()
        threaded.close()
        plain.submit_load(TransferJob(1, [b"key"], [1]))
        plain.submit_store(TransferJob(2, [b"new"], [1]))
        assert {result.job_id for result in plain.get_finished() if not result.successful_keys} == {1, 2}
        assert "fork" in plain.stats().last_error
        assert plain.drain(60)
        plain.close()
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(1)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert threaded.load([b"key"], [1]) == [True]
assert memory[4096:4101] == b"block"
memory[4096:4101] = b"12345"
plain.submit_load(TransferJob(1, [b"key"], [1]))
assert plain.drain(60)
assert [list(result.successful_keys) for result in plain.get_finished()] == [[b"key"]]
assert memory[4096:4101] == b"block"
plain.close()
threaded.close()
print("good")
"""


def run(program: str, *arguments: str) -> None:
    """Run a program that forks, and check that it ends well."""
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            said, errors = process.communicate(timeout=60)
        except BaseException:
            # With its child.
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert (process.returncode, said) == (0, "good\n"), said + errors


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
def test_calls_in_a_forked_process_are_refused(tmp_path: Path, engine: str) -> None:
    """Each call of a backend that was opened before the fork is an error at once, and a new backend works."""
    run(BACKEND, str(tmp_path), engine)


@pytest.mark.parametrize("host", ["thread", "process"])
def test_tier_is_closed_in_a_forked_process(tmp_path: Path, host: str) -> None:
    """Lookups, stores and loads are misses and failures at once, a close returns, and the parent's tier goes on."""
    run(TIER, str(tmp_path), host)


class Copies(OsDisk):
    """A disk whose process is forked during each look at a lock: the fork has a copy of the descriptor."""

    def __init__(self) -> None:
        self.copies: list[int] = []

    def flock(self, fd: int, operation: int) -> None:
        super().flock(fd, operation)
        if operation & fcntl.LOCK_SH:
            self.copies.append(os.dup(fd))


async def test_process_forked_during_a_look_at_a_segment_holds_no_lock(tmp_path: Path) -> None:
    """A segment without a holder that an engine has looked at can be taken by another one."""
    values = await filled(tmp_path, 4)
    disk = Copies()
    async with opened(tmp_path, 64, namespace=OTHER_NAMESPACE, disk=disk) as rig:
        await rig.put_new(1)
        assert disk.copies
        async with opened(tmp_path, 64) as other:
            assert other.backend.own(list(values)) == [True] * 4
            assert other.backend.stats().blocks == 4
    for fd in disk.copies:
        os.close(fd)


async def test_helper_holds_no_lock(tmp_path: Path) -> None:
    """A process forked from an engine holds none of its segments after the engine's end, and keeps no file locked."""
    reading, writing = os.pipe()
    pid = 0

    def locks() -> list[str]:
        found = []
        for info in Path(f"/proc/{pid}/fdinfo").iterdir():
            # The helper is closing the descriptors at this moment.
            with contextlib.suppress(FileNotFoundError):
                found += [line for line in info.read_text().splitlines() if line.startswith("lock:")]
        return found

    try:
        async with opened(tmp_path, 64) as rig:
            values = await rig.put_new(4)
            pid = os.fork()
            if not pid:
                os.read(reading, 1)
                os._exit(0)
            # If the engine is killed, only the last close releases the locks.
            await eventually_async(lambda: not locks(), timeout_s=10, what="the helper has no lock")
        async with opened(tmp_path, 64) as rig:
            assert rig.backend.own(list(values)) == [True] * 4
            assert rig.backend.stats().blocks == 4
            assert len(list((tmp_path / ".kvstore").glob("engine.*"))) == 1
    finally:
        os.write(writing, b"x")
        if pid:
            await asyncio.to_thread(os.waitpid, pid, 0)
        os.close(reading)
        os.close(writing)
