"""Mooncake Store: the contract suite against a real master, and calls that outlive their deadline."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvstore.backends.base import Backend, RecordGeometry, RecordRead, RecordWrite
from kvstore.namespace import Namespace
from kvstore.testing.backend_harness import BackendHarness
from kvstore.testing.backend_tests import BackendConcurrencyTests, BackendLifecycleTests, BackendValueTests
from kvstore.testing.waiting import eventually
from kvstore.types import Outcome
from tests.stopping import stop

store = pytest.importorskip("mooncake.store")
from kvstore.backends.mooncake import MooncakeBackend, MooncakeConfig  # noqa: E402

pytestmark = [pytest.mark.program, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A master, its address and its process."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        port, http = one.getsockname()[1], two.getsockname()[1]
    folder = Path(store.__file__).parent
    log = (tmp_path_factory.mktemp("mooncake") / "log").open("wb")
    command = [
        str(folder / "mooncake_master"),
        "--rpc_address=127.0.0.1",
        f"--rpc_port={port}",
        f"--metrics_port={http}",
    ]
    libraries = str(folder.parent / "mooncake_transfer_engine_non_cuda.libs")
    process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "LD_LIBRARY_PATH": libraries})
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            assert process.poll() is None
            os.sched_yield()
    yield f"127.0.0.1:{port}", process
    process.kill()
    process.wait()
    log.close()


async def opened(address: str, client: Any) -> MooncakeBackend:
    """Open a backend with a client of the test."""
    backend = MooncakeBackend(MooncakeConfig(master=address, segment="64MiB"), lambda: client)  # type: ignore[arg-type]
    await backend.open(Namespace({"test": uuid.uuid4().hex}), RecordGeometry(256, 4096))
    return backend


class MooncakeHarness(BackendHarness):
    """A client over TCP that contributes memory; its records are lost with it."""

    scans: ClassVar[bool] = False
    address: str

    @pytest.fixture(autouse=True)
    def _master(self, master: tuple[str, subprocess.Popen[bytes]]) -> None:
        self.address, _ = master
        self.namespace = Namespace({"suite": uuid.uuid4().hex})

    async def make_backend(self) -> Backend:
        """Return a backend of a new, empty namespace."""
        self.namespace = Namespace({"suite": uuid.uuid4().hex})
        return MooncakeBackend(MooncakeConfig(master=self.address, segment="256MiB"), self.make_client)

    def make_client(self) -> Any:
        """Return a client for the backend."""
        return store.MooncakeDistributedStore()


class KeptStore:
    """A client that backends use one after the other, because the end of a client takes seconds."""

    def __init__(self) -> None:
        self.client = self._store = store.MooncakeDistributedStore()
        self._code: int | None = None
        self._registered: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def setup(self, *args: Any) -> int:
        """Join the pool, the first time."""
        if self._code is None:
            self._code = self._store.setup(*args)
        return self._code

    def register_buffer(self, address: int, size_bytes: int) -> int:
        """Register memory until the backend closes."""
        self._registered.append(address)
        return int(self._store.register_buffer(address, size_bytes))

    def close(self) -> None:
        """Stay in the pool; the next backend has a namespace of its own."""
        while self._registered:
            self._store.unregister_buffer(self._registered.pop())


@pytest.fixture(scope="module")
def kept_store() -> Iterator[KeptStore]:
    """The client of the suites' backends."""
    kept = KeptStore()
    yield kept
    kept.client.close()


class TestMooncake(MooncakeHarness, BackendValueTests, BackendConcurrencyTests):
    """The values of a client that stays in the pool."""

    @pytest.fixture(autouse=True)
    def _kept(self, kept_store: KeptStore) -> None:
        self.kept_store = kept_store

    def make_client(self) -> KeptStore:
        return self.kept_store


class TestMooncakeLifecycle(MooncakeHarness, BackendLifecycleTests):
    """The rest of the suite, with a client for each backend; no test can make the medium fail."""


def test_a_call_that_outlives_its_deadline_leaves_the_buffers_alone(
    master: tuple[str, subprocess.Popen[bytes]],
) -> None:
    """While the master hangs, a load ends at its deadline; the late end of the call does not write into its buffers."""
    address, process = master

    async def check() -> None:
        backend = MooncakeBackend(MooncakeConfig(master=address, segment="64MiB"))  # type: ignore[arg-type]
        await backend.open(Namespace({"test": uuid.uuid4().hex}), RecordGeometry(256, 4096))
        lanes = backend._lanes
        threads = lanes.qsize()
        try:
            record = memoryview(os.urandom(4096))
            assert list(await backend.put([RecordWrite(b"k", [record])])) == [Outcome.OK]
            target = bytearray(4096)
            stop(process.pid)
            try:
                started = time.monotonic()
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await backend.get_into([RecordRead(b"k", [memoryview(target)])])
                assert time.monotonic() - started < 5
                assert lanes.qsize() < threads
            finally:
                process.send_signal(signal.SIGCONT)
            async with asyncio.timeout(60):
                while lanes.qsize() < threads:
                    await asyncio.sleep(0)
            assert target == bytes(4096)
            assert list(await backend.get_into([RecordRead(b"k", [memoryview(target)])])) == [Outcome.OK]
            assert target == record
        finally:
            await backend.close()

    asyncio.run(check())


class StaleLengths:
    """A client that may describe records as they were at the last description."""

    def __init__(self) -> None:
        self._store = store.MooncakeDistributedStore()
        self.is_stale = False
        self._described: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def batch_get_replica_desc(self, names: Any) -> Any:
        """Describe the records, or repeat the last description."""
        if not self.is_stale:
            self._described = self._store.batch_get_replica_desc(names)
        return self._described


def test_a_record_that_is_replaced_by_a_longer_one_while_it_is_read(
    master: tuple[str, subprocess.Popen[bytes]],
) -> None:
    """The new bytes are read, as many as there are."""

    async def check() -> None:
        client = StaleLengths()
        backend = await opened(master[0], client)
        read = RecordRead(b"k", [memoryview(bytearray(4352))])
        try:
            assert list(await backend.put([RecordWrite(b"k", [memoryview(bytes(300))])])) == [Outcome.OK]
            assert list(await backend.get_into([read])) == [Outcome.OK]
            client.is_stale = True
            assert list(await backend.delete([b"k"])) == [True]
            record = os.urandom(4096)
            assert list(await backend.put([RecordWrite(b"k", [memoryview(record)])])) == [Outcome.OK]
            assert list(await backend.get_into([read])) == [Outcome.OK]
            assert read.filled_bytes == 4096 and read.buffers[0][:4096] == record
        finally:
            await backend.close()

    asyncio.run(check())


class SlowCalls:
    """A client in which calls of one name wait."""

    def __init__(self) -> None:
        self._store = store.MooncakeDistributedStore()
        self.slow_name = ""
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)
        return partial(self._wait, call) if name == self.slow_name else call

    def _wait(self, call: Any, *args: Any) -> Any:
        self.begun.set()
        assert self.goes_on.wait(60)
        return call(*args)


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("first", ["get", "delete"])
def test_no_record_is_removed_while_it_is_read(
    master: tuple[str, subprocess.Popen[bytes]], first: str, cancelled: bool
) -> None:
    """Its memory would be reused. Other keys do not wait, and a cancelled call counts until its end."""

    async def check() -> None:
        slow, record = SlowCalls(), os.urandom(4096)
        backend = await opened(master[0], slow)
        buffers = [bytearray(4096), bytearray(4096)]

        def get(key: bytes, buffer: bytearray) -> Any:
            return backend.get_into([RecordRead(key, [memoryview(buffer)])])

        try:
            for key in (b"k", b"other"):
                assert list(await backend.put([RecordWrite(key, [memoryview(record)])])) == [Outcome.OK]
            slow.slow_name = "batch_get_into" if first == "get" else "batch_remove"
            one = asyncio.ensure_future(get(b"k", buffers[0]) if first == "get" else backend.delete([b"k"]))
            assert await asyncio.to_thread(slow.begun.wait, 60)
            if cancelled:
                one.cancel()
            slow.slow_name = ""
            two = asyncio.ensure_future(backend.delete([b"k"]) if first == "get" else get(b"k", buffers[1]))
            assert list(await get(b"other", buffers[1])) == [Outcome.OK]
            assert list(await backend.delete([b"other"])) == [True]
            assert not two.done()
            slow.goes_on.set()
            results = await asyncio.gather(one, two, return_exceptions=True)
            assert isinstance(results[0], asyncio.CancelledError) is cancelled
            assert list(results[1]) == ([True] if first == "get" else [Outcome.MISS])
            if first == "get" and not cancelled:
                assert list(results[0]) == [Outcome.OK] and buffers[0] == record
            assert not backend._reading and not backend._deleting
        finally:
            await backend.close()

    asyncio.run(check())


def test_a_removed_record_is_not_brought_back_by_a_late_put(master: tuple[str, subprocess.Popen[bytes]]) -> None:
    """A removal waits for a put of its key that has outlived its deadline; other keys do not wait."""

    async def check() -> None:
        slow, record = SlowCalls(), memoryview(os.urandom(4096))
        backend = await opened(master[0], slow)
        try:
            slow.slow_name = "batch_put_session_start"
            put = asyncio.ensure_future(backend.put([RecordWrite(b"k", [record])]))
            assert await asyncio.to_thread(slow.begun.wait, 60)
            put.cancel()
            await asyncio.wait({put})
            slow.slow_name = ""
            removal = asyncio.ensure_future(backend.delete([b"k"]))
            assert list(await backend.put([RecordWrite(b"other", [record])])) == [Outcome.OK]
            assert list(await backend.delete([b"other"])) == [True]
            await asyncio.wait({removal}, timeout=0.5)
            assert not removal.done()
            slow.goes_on.set()
            assert list(await removal) == [True]
            assert list(await backend.exists([b"k"])) == [False]
            assert not backend._writing and not backend._putting
        finally:
            slow.goes_on.set()
            await backend.close()

    asyncio.run(check())


def threads() -> int:
    """Return the number of threads of backends."""
    return sum(thread.name == "kvstore-mooncake" for thread in threading.enumerate())


_HANGING = """
import asyncio, os, signal, sys
from kvstore.backends.base import RecordGeometry
from kvstore.backends.mooncake import MooncakeBackend, MooncakeConfig
from kvstore.namespace import Namespace

async def main():
    backend = MooncakeBackend(MooncakeConfig(master=sys.argv[1], segment="16MiB"))
    await backend.open(Namespace({}), RecordGeometry(256, 4096))
    os.kill(int(sys.argv[2]), signal.SIGSTOP)
    try:
        await asyncio.wait_for(backend.exists([b"k" * 32]), 1)
    except TimeoutError:
        print("late")

asyncio.run(main())
"""


def test_a_hanging_master_does_not_abort_the_process_at_its_end(master: tuple[str, subprocess.Popen[bytes]]) -> None:
    """The end of a process waits for a call that no longer has a caller, and the exit status is 0."""
    address, process = master
    try:
        ended = subprocess.run(
            [sys.executable, "-c", _HANGING, address, str(process.pid)], capture_output=True, text=True, check=False
        )
    finally:
        process.send_signal(signal.SIGCONT)
    assert (ended.returncode, ended.stdout) == (0, "late\n"), ended.stderr


def test_a_cancelled_open_leaves_no_threads() -> None:
    """Each probe of an unreachable pool opens the backend and is cancelled: its threads end with the late call."""
    goes_on = threading.Event()

    class Unreachable:
        """A store that answers late."""

        def setup(self, *_: Any) -> int:
            """Wait, as for a master that hangs."""
            assert goes_on.wait(60)
            return -1

    async def check() -> None:
        backend = MooncakeBackend(MooncakeConfig(master="127.0.0.1:1"), Unreachable)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await backend.open(Namespace({}), RecordGeometry(256, 4096))
            await backend.close()

    before = threads()
    asyncio.run(check())
    goes_on.set()
    eventually(lambda: threads() == before, 60, what="the end of the threads")
