"""The process host: the same tier in a child process that may die at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import AsyncTier, ConfigError, Locality, LookupResult, Medium, Namespace, Outcome, TransferJob, open_tier
from kvstore.backends.base import RecordGeometry, RecordRead
from kvstore.backends.memory import MemoryBackend, MemoryConfig
from kvstore.config import decode_config
from kvstore.diskio.ring import probe
from kvstore.errors import BackendUnavailableError
from kvstore.runtime.lifetime import Lifetime
from kvstore.runtime.messages import Drained, FromIO, PresenceAdded, Touch
from kvstore.runtime.process import ChildConnection, Limits, ProcessChannel, ProcessSpec, find_backing
from kvstore.runtime.wire import ParentMessage, Stop, Unpacker, pack, take_frame
from tests.no_threads import no_threads

SLOT = 8192
CONFIG = {"backend": "memory", "capacity": "16MiB", "io": "process"}


class Region:
    """Eight slots of shared memory."""

    def __init__(self) -> None:
        fd = os.memfd_create("kvstore-test")
        os.ftruncate(fd, 8 * SLOT)
        self.memory = mmap.mmap(fd, 8 * SLOT)
        os.close(fd)
        self.view = memoryview(self.memory)
        self.tiers: list[AsyncTier] = []

    def close(self) -> None:
        """Close its tiers and the region; raises if any view of the memory is left."""
        for tier in self.tiers:
            tier.close()
        self.view.release()
        self.memory.close()


@pytest.fixture
def region() -> Iterator[Region]:
    """A region without views left at the end."""
    region = Region()
    yield region
    region.close()


def open_process_tier(region: Region, **options: Any) -> AsyncTier:
    """Open a memory tier with an I/O process; it closes with the region."""
    tier = open_tier({**CONFIG, **options}, primary=region.view, slot_bytes=SLOT, namespace=Namespace({"model": "m"}))
    region.tiers.append(tier)
    channel_of(tier)
    return tier


def open_with_limits(region: Region, limits: Limits, **options: Any) -> AsyncTier:
    """Open a memory tier whose I/O process has other limits; it closes with the region."""
    backend = options.pop("backend", "memory")
    options = {"capacity": "16MiB", "io": "process", **options}
    config = decode_config(MemoryConfig, options, where="memory tier")
    payload = {"backend": backend, "options": options, "tenants": None, "slot_bytes": SLOT}
    payload["namespace"] = Namespace({"model": "m"}).document()
    backing = find_backing(region.view)
    assert backing is not None
    channel = ProcessChannel(ProcessSpec("kvstore.tiers.opening:make_io_side", payload, backing, "memory", limits))
    channel.open(60)
    tier = AsyncTier(
        channel,
        config,
        name="memory",
        medium=Medium.CPU,
        locality=Locality.LOCAL,
        authoritative=False,
        slot_bytes=SLOT,
        slot_count=8,
    )
    tier.wait_recovered(60)
    region.tiers.append(tier)
    return tier


def channel_of(tier: AsyncTier) -> ProcessChannel:
    """Return the channel to a tier's I/O process."""
    channel = tier._channel
    assert isinstance(channel, ProcessChannel)
    return channel


def connection_of(tier: AsyncTier) -> ChildConnection | None:
    """Return the connection to a tier's I/O process; None without one."""
    return channel_of(tier)._connection


def received_from(connection: ChildConnection | None) -> tuple[int, int]:
    """Return the number of complete frames from a child, and the bytes of an incomplete one."""
    found = re.search(r"Unpacker\((\d+) frames and (\d+) bytes\)", repr(connection))
    assert found is not None, connection
    return int(found[1]), int(found[2])


def child_of(tier: AsyncTier) -> int:
    """Return the pid of a tier's I/O process."""
    pid = channel_of(tier).pid
    assert pid is not None
    return pid


def until_replaced(tier: AsyncTier, child: int) -> None:
    """Wait until another I/O process serves a tier."""
    until(lambda: tier.get_finished() or channel_of(tier).pid not in (None, child), tier)


def until(condition: Callable[[], Any], tier: AsyncTier | None = None, timeout_s: float = 60) -> Any:
    """Wait for a condition while stepping the tier."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        if tier is not None:
            tier.wait(0.02)
        else:
            time.sleep(0.01)
    raise TimeoutError("the condition did not come true")


def run(tier: AsyncTier, submit: Callable[[TransferJob], None], job: TransferJob) -> Any:
    """Submit a job and wait for its result."""
    submit(job)
    return until(tier.get_finished, tier)[0]


def test_blocks_go_through_a_child_process_byte_for_byte(region: Region) -> None:
    """Blocks that the child stores from the parent's slots are loaded into other slots unchanged."""
    tier = open_process_tier(region)
    region.view[: 2 * SLOT] = os.urandom(2 * SLOT)
    assert run(tier, tier.submit_store, TransferJob(1, [b"a", b"b"], [0, 1])).success
    assert tier.lookup(b"a") is LookupResult.HIT
    assert run(tier, tier.submit_load, TransferJob(2, [b"b", b"a"], [4, 5])).success
    assert region.view[4 * SLOT : 5 * SLOT] == region.view[SLOT : 2 * SLOT]
    assert region.view[5 * SLOT : 6 * SLOT] == region.view[:SLOT]
    assert tier.drain(30)


def test_slots_may_begin_in_the_middle_of_a_page(region: Region) -> None:
    """The child finds the slots of a primary tier at any offset of its file."""
    start = SLOT + 512
    with region.view[start : start + 4 * SLOT] as memory:
        tier = open_tier(CONFIG, primary=memory, slot_bytes=SLOT, namespace=Namespace({}))
        memory[:SLOT] = os.urandom(SLOT)
        assert run(tier, tier.submit_store, TransferJob(1, [b"a"], [0])).success
        assert run(tier, tier.submit_load, TransferJob(2, [b"a"], [3])).success
        assert memory[3 * SLOT :] == memory[:SLOT]
        tier.close()
    assert bytes(region.view[:start]) == bytes(start)


def test_the_answers_of_a_child_are_seen_without_taking_them(region: Region) -> None:
    """A waker finds out that a child has answered; after the answers were taken there is nothing."""
    tier = open_process_tier(region)
    assert run(tier, tier.submit_store, TransferJob(1, [b"a"], [0])).success
    until(lambda: tier.get_finished() or not tier.has_answers, tier)
    tier.submit_load(TransferJob(2, [b"a"], [1]))
    tier.flush()
    until(lambda: tier.has_answers)
    assert until(tier.get_finished, tier)[0].success
    until(lambda: tier.get_finished() or not tier.has_answers, tier)


def test_a_killed_child_fails_its_jobs_and_is_replaced(region: Region) -> None:
    """After SIGKILL jobs are reported as failed, lookups miss, and a new child soon serves."""
    tier = open_process_tier(region)
    assert run(tier, tier.submit_store, TransferJob(1, [b"a"], [0])).success
    old = child_of(tier)
    os.kill(old, signal.SIGKILL)
    tier.submit_load(TransferJob(2, [b"a"], [1]))
    result = until(tier.get_finished, tier)[0]
    assert (result.job_id, result.outcomes) == (2, (Outcome.IO_ERROR,))
    # Down, or up again and empty; in between, on a slow machine, the new child has not reported yet.
    until(lambda: tier.get_finished() or tier.lookup(b"a") is LookupResult.MISS, tier)
    until_replaced(tier, old)
    assert run(tier, tier.submit_store, TransferJob(3, [b"b"], [0])).success
    assert child_of(tier) != old


def test_a_drain_while_there_is_no_child_has_nothing_to_wait_for(region: Region) -> None:
    """The child's jobs have failed and no slot is in use, so a reset at that moment completes at once."""
    tier = open_process_tier(region)
    os.kill(child_of(tier), signal.SIGKILL)
    until(lambda: tier.get_finished() or tier._down, tier)
    assert tier.drain(5)


_PARENT = """
import mmap, os, sys, time
from kvstore import Namespace, open_tier
fd = os.memfd_create("r")
os.ftruncate(fd, 65536)
memory = memoryview(mmap.mmap(fd, 65536))
config = {"backend": "memory", "capacity": "1MiB", "io": "process"}
tier = open_tier(config, primary=memory, slot_bytes=8192, namespace=Namespace({}))
forked = os.fork() if sys.argv[1] == "forked" else 0
if forked or sys.argv[1] != "forked":
    print(tier.io_pid, forked, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("case", ["killed", "stopped", "forked"])
def test_a_child_ends_with_its_parent(case: str) -> None:
    """When the parent is killed, its I/O process soon ends in silence, even if it was stopped, or the parent forked."""
    command = [sys.executable, "-c", _PARENT, case]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stderr is not None
        child, forked = map(int, parent.stdout.readline().split())
        try:
            if case == "stopped":
                os.kill(child, signal.SIGSTOP)
                until(lambda: Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "T")
            parent.kill()
            until(lambda: not runs(child), timeout_s=60)
        finally:
            if forked:
                os.kill(forked, signal.SIGKILL)
        assert parent.stderr.read() == ""


def runs(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_error_of_the_childs_start_is_raised_in_the_parent(region: Region, tmp_path: Path) -> None:
    """A configuration that the child refuses is a ConfigError with the child's text, and leaves no process."""
    config = {"backend": "file", "path": str(tmp_path / "no" / "such" / "dir"), "capacity": "1MiB", "io": "process"}
    with pytest.raises(ConfigError, match="such"):
        open_tier(config, primary=region.view, slot_bytes=SLOT, namespace=Namespace({}))


class KilledAtStart(MemoryBackend):
    """Memory whose process is killed at its start, unless it is that of the tests."""

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        if os.getpid() != int(os.environ["KVSTORE_TEST_PARENT"]):
            os.kill(os.getpid(), signal.SIGKILL)
        await super().open(namespace, geometry)


def test_a_tier_that_is_not_required_has_a_thread_if_its_child_is_killed_at_the_start(
    region: Region, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine starts and the tier serves, with a warning; the start of a required tier fails."""
    monkeypatch.setenv("KVSTORE_TEST_PARENT", str(os.getpid()))
    options = {"backend": f"{__name__}:KilledAtStart"}
    with pytest.raises(BackendUnavailableError):
        open_process_tier(region, **options)
    config = {**CONFIG, **options, "required": False}
    tier = open_tier(config, primary=region.view, slot_bytes=SLOT, namespace=Namespace({}))
    region.tiers.append(tier)
    assert tier.io_pid is None and "on a thread instead" in caplog.text
    assert run(tier, tier.submit_store, TransferJob(1, [b"a"], [0])).success


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_all_processes_of_an_engine_leave_its_end_to_the_engine(region: Region, number: int) -> None:
    """A service manager or a terminal signals the child, too, which serves until its parent closes the tier."""
    tier = open_process_tier(region)
    child = child_of(tier)
    os.kill(child, number)
    assert run(tier, tier.submit_store, TransferJob(1, [b"a"], [0])).success
    assert child_of(tier) == child


def test_a_child_starts_no_threads_that_it_does_not_need(region: Region) -> None:
    """A tier without blocking calls has one thread, however many processors numpy finds."""
    assert len(os.listdir(f"/proc/{child_of(open_process_tier(region))}/task")) == 1


_MARKED = """
import mmap, os, sys
sys.path += {packages!r}
from kvstore import Namespace, open_tier
fd = os.memfd_create("r")
os.ftruncate(fd, 8192)
config = {{"backend": "kvstore.marked:Marked", "capacity": "1MiB", "io": "process"}}
tier = open_tier(config, primary=mmap.mmap(fd, 8192), slot_bytes=8192, namespace=Namespace({{}}))
print(tier.io_pid)
tier.close()
"""


def test_the_child_runs_the_code_of_its_parent(tmp_path: Path) -> None:
    """Of two copies of kvstore the child uses its parent's, even if that was found in the working directory."""
    copy = tmp_path / "kvstore"
    copy.mkdir()
    for path in Path(kvstore.__file__).parent.iterdir():
        (copy / path.name).symlink_to(path)
    (copy / "marked.py").write_text("from kvstore.backends.memory import MemoryBackend as Marked\n")
    program = _MARKED.format(packages=[path for path in sys.path if path.endswith("-packages")])
    # -S: without the packages' .pth files, which may name a further copy.
    ended = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 0


@pytest.mark.parametrize("lacking", ["process", "thread", "descriptor"])
def test_without_a_process_the_tier_runs_on_a_thread(
    region: Region, lacking: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a container allows no further process, thread or descriptor, an engine still starts, with one warning."""
    # The first loop of a process opens descriptors for good.
    open_tier(CONFIG | {"io": "thread"}, primary=region.view, slot_bytes=SLOT, namespace=Namespace({})).close()
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as short:
        if lacking == "process":
            short.setattr("sys.executable", "/nonexistent/python")
        elif lacking == "thread":
            short.setattr(threading.Thread, "start", _refused_keeper(threading.Thread.start))
        else:
            short.setattr(os, "memfd_create", _refused)
        tier = open_tier(CONFIG, primary=region.view, slot_bytes=SLOT, namespace=Namespace({}))
    region.tiers.append(tier)
    assert tier.io_pid is None
    assert len([record for record in caplog.records if "on a thread instead" in record.message]) == 1
    assert run(tier, tier.submit_store, TransferJob(1, [b"a"], [0])).success
    tier.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def _refused(*_: Any) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _refused_keeper(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    def refusing(thread: threading.Thread) -> None:
        if thread.name == "kvstore-io-keeper":
            raise RuntimeError("can't start new thread")
        start(thread)

    return refusing


def test_private_memory_falls_back_to_a_thread(caplog: pytest.LogCaptureFixture) -> None:
    """Private memory is served by the thread host, with one warning."""
    memory = memoryview(bytearray(4 * SLOT))
    with caplog.at_level(logging.WARNING, "kvstore"):
        tier = open_tier(CONFIG, primary=memory, slot_bytes=SLOT, namespace=Namespace({}))
    assert tier.io_pid is None
    assert [record.message for record in caplog.records if "shared memory" in record.message]
    assert run(tier, tier.submit_store, TransferJob(1, [b"a"], [0])).success
    tier.close()
    memory.release()


def test_close_leaves_no_process_and_no_descriptor(region: Region) -> None:
    """After close the child is gone and no more descriptors are open than before."""
    before = len(os.listdir("/proc/self/fd"))
    tier = open_process_tier(region)
    child = child_of(tier)
    tier.submit_store(TransferJob(1, [b"a"], [0]))
    tier.flush()
    tier.close()
    tier.close()
    assert not Path(f"/proc/{child}").exists()
    # Descriptors left to the collector by earlier tests may have been closed meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= before
    assert len(tier.get_finished()) == 1


def test_a_child_that_stops_reading_is_killed_at_close(region: Region) -> None:
    """A stopped child does not prevent the close, and leaves no process."""
    tier = open_process_tier(region)
    child = child_of(tier)
    os.kill(child, signal.SIGSTOP)
    tier.close(0.3)
    assert not Path(f"/proc/{child}").exists()


def test_a_child_that_can_not_be_killed_is_not_waited_for_ever(
    region: Region, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Close warns that a child stuck in the kernel may still hold slots, and returns."""
    tier = open_with_limits(region, Limits(killed_timeout_s=0.05))
    connection = connection_of(tier)
    assert connection is not None
    process = connection._process
    os.kill(process.pid, signal.SIGSTOP)
    with monkeypatch.context() as stuck:
        stuck.setattr(process, "send_signal", lambda number: None)
        tier.close(0.05)
    assert "must not be reused" in caplog.text
    process.kill()
    process.wait()


def wait_for_death(pid: int) -> None:
    """Wait until a child has ended, without reaping it."""
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z")


@contextlib.contextmanager
def in_flight(tier: AsyncTier) -> Iterator[None]:
    """Hold the lock of a child's rings, as a pending read into slots does; the child may be killed meanwhile."""
    child = child_of(tier)
    names = [name for name in os.listdir(f"/proc/{child}/fd") if _is_lifetime(child, name)]
    with contextlib.closing(_Pidfd(child)) as pidfd:
        held = [pidfd.copy_of(int(name)) for name in names]
    assert held
    try:
        yield
    finally:
        for fd in held:
            os.close(fd)


def _is_lifetime(child: int, name: str) -> bool:
    with contextlib.suppress(OSError):
        return "kvstore-lifetime" in os.readlink(f"/proc/{child}/fd/{name}")
    return False


class _Pidfd:
    """A process descriptor, used to copy the process's own descriptors."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)

    def copy_of(self, fd: int) -> int:
        """Return a copy of a descriptor of that process, for the same open file with its lock."""
        copy = ctypes.CDLL(None, use_errno=True).syscall(438, self._fd, fd, 0)
        assert copy >= 0, os.strerror(ctypes.get_errno())
        return copy

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)


def test_jobs_of_a_dead_child_wait_for_the_kernel(region: Region) -> None:
    """Jobs are reported when the last operation has ended, however long a drive takes, and not after a timeout."""
    tier = open_process_tier(region)
    dead = connection_of(tier)
    assert dead is not None
    with in_flight(tier):
        child = child_of(tier)
        os.kill(child, signal.SIGSTOP)  # Prevents an answer.
        tier.submit_load(TransferJob(1, [b"a"], [0]))
        tier.flush()
        os.kill(child, signal.SIGKILL)
        until(lambda: dead.gone, tier)
        for _ in range(100):
            assert list(tier.get_finished()) == [] and not dead.has_settled
            time.sleep(0.005)
    results: list[Any] = []
    until(lambda: results.extend(tier.get_finished()) or results, tier=None)
    assert [result.outcomes for result in results] == [(Outcome.IO_ERROR,)]


def test_close_warns_of_pending_operations_of_a_dead_child(region: Region, caplog: pytest.LogCaptureFixture) -> None:
    """If the operations do not end in time, close warns that slots may still be written to."""
    tier = open_with_limits(region, Limits(killed_timeout_s=0.05))
    child = child_of(tier)
    with in_flight(tier):
        os.kill(child, signal.SIGKILL)
        wait_for_death(child)
        tier.close()
    assert "must not be reused" in caplog.text


def test_a_lifetime_lasts_as_long_as_a_ring() -> None:
    """The lock is held while the process or its ring exists, even after the process has closed the file."""
    if why_not := probe():
        pytest.skip(why_not)
    lifetime = Lifetime()
    program = (
        "import os, sys\n"
        "from kvstore.diskio.ring import Ring\n"
        "from kvstore.runtime.lifetime import held, hold\n"
        "hold(int(sys.argv[1]))\n"
        "ring = Ring(4)\n"
        "os.close(held())\n"
        "print('closed', flush=True)\n"
        "sys.stdin.read(1)\n"
        "ring.close()\n"
        "print('ended', flush=True)\n"
        "sys.stdin.read(1)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(lifetime.fd)],
        pass_fds=[lifetime.fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == b"closed\n"
        assert not lifetime.has_ended
        child.stdin.write(b"x")
        child.stdin.flush()
        assert child.stdout.readline() == b"ended\n"
        until(lambda: lifetime.has_ended)
        child.stdin.close()
    assert lifetime.fd == -1


def test_child_just_restarted_is_closed_not_killed(region: Region) -> None:
    """A tier closed just after a restart closes the new child instead of killing it."""
    tier = open_process_tier(region)
    channel = channel_of(tier)
    os.kill(child_of(tier), signal.SIGKILL)
    until(lambda: channel.pid is None, tier)
    # From here on messages are not received, so the parent does not learn of the new child's start.
    successor = until(lambda: channel._successor)
    tier.close(60)
    assert successor.has_closed
    assert successor._process.returncode == 0


def test_a_child_that_dies_on_unread_messages_is_replaced(region: Region) -> None:
    """Messages that no longer fit a dead child's socket neither raise nor reach its successor."""
    tier = open_process_tier(region)
    child = child_of(tier)
    os.kill(child, signal.SIGSTOP)
    tier.submit_store(TransferJob(1, [b"a"], [0]))
    tier.flush()
    channel_of(tier).send([Touch((b"k" * 1000,) * 4000)])
    os.kill(child, signal.SIGKILL)
    wait_for_death(child)
    channel_of(tier).wait(0.05)
    assert until(tier.get_finished, tier)[0].outcomes == (Outcome.IO_ERROR,)
    until_replaced(tier, child)
    assert run(tier, tier.submit_store, TransferJob(2, [b"a"], [0])).success


def test_a_child_that_does_not_read_is_replaced(region: Region) -> None:
    """Unread messages are kept up to a limit; above it the child counts as stopped."""
    tier = open_with_limits(region, Limits(backlog_bytes_max=1 << 20))
    channel, child = channel_of(tier), child_of(tier)
    os.kill(child, signal.SIGSTOP)
    channel.send([Touch((b"k" * 1000,) * 4000)])
    assert channel.pid is None and "0 bytes unsent" in repr(channel)
    until_replaced(tier, child)
    assert run(tier, tier.submit_store, TransferJob(1, [b"a"], [0])).success


def test_a_child_that_does_not_answer_is_replaced(region: Region) -> None:
    """A stopped child fails its jobs like a dead one."""
    tier = open_with_limits(region, Limits(quiet_s=0.1, answer_timeout_s=1.5))
    assert run(tier, tier.submit_store, TransferJob(1, [b"a"], [0])).success
    child = child_of(tier)
    os.kill(child, signal.SIGSTOP)
    tier.submit_load(TransferJob(2, [b"a"], [1]))
    assert until(tier.get_finished, tier)[0].outcomes == (Outcome.IO_ERROR,)
    assert not Path(f"/proc/{child}").exists()
    until_replaced(tier, child)
    assert run(tier, tier.submit_store, TransferJob(3, [b"b"], [0])).success


def test_a_load_of_a_stopped_child_is_reported_by_its_deadline(region: Region) -> None:
    """A stopped child is detected as soon as a load is late, however long the other timeouts are."""
    tier = open_with_limits(region, Limits(quiet_s=3600.0, answer_timeout_s=3600.0), load_timeout=0.2)
    assert run(tier, tier.submit_store, TransferJob(1, [b"a"], [0])).success
    child = child_of(tier)
    os.kill(child, signal.SIGSTOP)
    tier.submit_load(TransferJob(2, [b"a"], [1]))
    assert until(tier.get_finished, tier)[0].outcomes == (Outcome.IO_ERROR,)
    assert not Path(f"/proc/{child}").exists()


class Slow(MemoryBackend):
    """Exceeds every deadline with a load, while its loop keeps running."""

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        await asyncio.sleep(0)
        loading = asyncio.ensure_future(asyncio.sleep(4))
        while not loading.done():
            # Like a running kernel operation, which is awaited even after a cancellation.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({loading})
        return await super().get_into(reads)


def test_a_slow_medium_is_no_stopped_child(region: Region) -> None:
    """A load that is late because of its medium is awaited, and the responsive child is kept."""
    tier = open_with_limits(region, Limits(late_answer_timeout_s=2.0), backend=f"{__name__}:Slow", load_timeout=0.2)
    assert run(tier, tier.submit_store, TransferJob(1, [b"a"], [0])).success
    child = child_of(tier)
    run(tier, tier.submit_load, TransferJob(2, [b"a"], [1]))
    assert child_of(tier) == child


def test_a_child_without_work_answers_and_stays(region: Region) -> None:
    """A quiet child is pinged again and again, and kept."""
    tier = open_with_limits(region, Limits(quiet_s=0.01))
    connection, child = connection_of(tier), child_of(tier)
    answers = received_from(connection)[0] + 5
    until(lambda: connection_of(tier) is None or received_from(connection)[0] >= answers, tier)
    assert child_of(tier) == child
    assert not tier.get_finished()


def test_recently_active_child_is_not_pinged(region: Region) -> None:
    """A wait sends a child nothing before it has been quiet for long."""
    tier = open_with_limits(region, Limits(quiet_s=3600.0))
    assert tier.drain(30)
    received = received_from(connection_of(tier))
    for _ in range(3):
        assert not channel_of(tier).wait(0.15)
    assert received_from(connection_of(tier)) == received


def test_busy_scheduler_does_not_declare_a_child_stuck(region: Region) -> None:
    """A child with a partial message, left by a scheduler that was busy for long, does not count as stuck."""
    tier = open_with_limits(region, Limits(late_quiet_s=0.05, late_answer_timeout_s=60.0))
    channel, child, connection = channel_of(tier), child_of(tier), connection_of(tier)
    assert connection is not None
    # More than a socket takes at once, followed by the ping.
    channel.send([Touch((b"k" * 1000,) * 4000)])
    connection._asked_s, connection._looked_at = 0.0, time.monotonic() - 1000
    channel.hurry()
    assert connection_of(tier) is connection
    until(lambda: "0 bytes unsent" in repr(channel), tier)
    assert run(tier, tier.submit_store, TransferJob(1, [b"a"], [0])).success
    assert child_of(tier) == child


def test_restart_is_retried_after_any_failure(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary lack of threads does not disable a tier for good."""
    tier = open_process_tier(region)
    child = child_of(tier)
    failed = threading.Event()

    def out_of_threads(*args: Any, **kwargs: Any) -> Any:
        failed.set()
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as short:
        short.setattr("kvstore.runtime.process.ChildConnection", out_of_threads)
        os.kill(child, signal.SIGKILL)
        until(failed.is_set, tier)
    until_replaced(tier, child)
    assert run(tier, tier.submit_store, TransferJob(1, [b"a"], [0])).success


def test_pauses_between_restarts_are_bounded(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    """They double, up to half a minute: a tier whose child can't start for an hour still returns soon after."""
    tier = open_process_tier(region)
    child, pauses = child_of(tier), list[float]()

    class Impatient(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0)
            return super().wait(0.001)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(channel_of(tier), "_stopping", Impatient())
    with monkeypatch.context() as broken:
        broken.setattr("kvstore.runtime.process.ChildConnection", fail)
        os.kill(child, signal.SIGKILL)
        until(lambda: len(pauses) > 10, tier)
    assert pauses[:9] == [0.25, 0.5, 1, 2, 4, 8, 16, 30, 30]
    until_replaced(tier, child)


def test_tier_without_a_startable_child_closes(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its close also ends the thread that tries to start another child."""
    tier = open_process_tier(region)
    child, tries = child_of(tier), list[int]()

    def fail(*args: Any, **kwargs: Any) -> Any:
        tries.append(1)
        raise MemoryError

    monkeypatch.setattr("kvstore.runtime.process.ChildConnection", fail)
    os.kill(child, signal.SIGKILL)
    until(lambda: tries, tier)
    assert channel_of(tier).close(60)


def test_failed_child_ends_before_the_next_starts(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    """A medium never has two children: a started and abandoned one ends before the next starts."""
    tier = open_process_tier(region)
    child, begun = child_of(tier), list[int]()

    def fail(connection: ChildConnection, *args: Any) -> Any:
        begun.append(connection.pid)
        raise MemoryError

    with monkeypatch.context() as short:
        short.setattr(ChildConnection, "await_open", fail)
        os.kill(child, signal.SIGKILL)
        until(lambda: len(begun) > 1, tier)
        assert not Path(f"/proc/{begun[0]}").exists()
    until_replaced(tier, child)


def test_a_child_is_replaced_while_no_thread_can_start(region: Region) -> None:
    """Its jobs are answered and another child serves: the thread for this has run since the tier was opened."""
    tier = open_process_tier(region)
    child = child_of(tier)
    assert run(tier, tier.submit_store, TransferJob(1, [b"a"], [0])).success
    with no_threads():
        os.kill(child, signal.SIGSTOP)
        tier.submit_load(TransferJob(2, [b"a"], [1]))
        tier.flush()
        os.kill(child, signal.SIGKILL)
        result = until(tier.get_finished, tier)[0]
        assert (result.job_id, result.outcomes) == (2, (Outcome.IO_ERROR,))
        assert not Path(f"/proc/{child}").exists()
        until_replaced(tier, child)
        assert run(tier, tier.submit_store, TransferJob(3, [b"b"], [0])).success


def test_a_tier_closed_just_after_a_loss_leaves_nothing(region: Region) -> None:
    """After close the abandoned child and the thread that replaces it are gone; the jobs are answered."""
    before = len(os.listdir("/proc/self/fd"))
    tier = open_process_tier(region)
    channel, child = channel_of(tier), child_of(tier)
    os.kill(child, signal.SIGSTOP)
    tier.submit_load(TransferJob(1, [b"a"], [0]))
    tier.flush()
    channel._lost("it does not answer")
    tier.close()
    assert not Path(f"/proc/{child}").exists()
    assert [result.job_id for result in tier.get_finished()] == [1]
    assert not [thread.name for thread in threading.enumerate() if thread.name == "kvstore-io-keeper"]
    assert channel.receive() is None
    assert len(os.listdir("/proc/self/fd")) <= before


def test_the_child_imports_nothing_from_the_working_directory(
    region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file there with a module's name is not run: an engine may start in a shared directory."""
    for name in ("msgspec", "uvloop", "kvstore"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nraise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    tier = open_process_tier(region)
    tier.close()
    assert not (tmp_path / "ran").exists()


def test_a_child_that_ends_at_once_is_an_error_of_the_tier(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that does not start is a named error, and leaves no process and no descriptor."""
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(BackendUnavailableError, match="I/O process"):
        open_process_tier(region)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_descriptors_above_a_thousand(region: Region) -> None:
    """An engine with more open files than select() supports can open, drain and close a tier."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.callback(os.close, os.dup(0))
        tier = open_process_tier(region)
        assert run(tier, tier.submit_store, TransferJob(1, [b"a"], [0])).success
        assert tier.drain(20)
        tier.close()


def test_the_child_leaves_the_processor_to_the_scheduler(region: Region) -> None:
    """The I/O process has a higher niceness than the engine, where possible."""
    tier = open_process_tier(region)
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, child_of(tier)) == min(19, mine + 5)


def test_the_backing_of_memory_is_found_at_any_offset() -> None:
    """A view into the middle of a shared file is found again by its descriptor; private memory is not."""
    region = Region()
    backing = find_backing(region.view[SLOT + 5 : 3 * SLOT])
    again = mmap.mmap(backing.fd, backing.skip + backing.size_bytes, offset=backing.offset)
    region.view[SLOT + 5] = 77
    assert again[backing.skip] == 77
    again.close()
    os.close(backing.fd)
    region.close()
    assert find_backing(memoryview(bytearray(4096))) is None
    assert find_backing(memoryview(b"")) is None


def test_memory_that_a_child_would_not_share_has_no_backing(tmp_path: Path) -> None:
    """Private and read-only mappings, and memory of more than one mapping, are left to a thread."""
    page = mmap.PAGESIZE
    file = tmp_path / "memory"
    file.write_bytes(bytes(2 * page))
    with file.open("r+b") as opened:
        shared = mmap.mmap(opened.fileno(), 2 * page)
        private = mmap.mmap(opened.fileno(), 2 * page, flags=mmap.MAP_PRIVATE)
        read_only = mmap.mmap(opened.fileno(), 2 * page, prot=mmap.PROT_READ)
    assert find_backing(memoryview(private)) is None
    assert find_backing(memoryview(read_only)) is None
    # From here on the second page is a mapping of its own.
    second = ctypes.addressof(ctypes.c_char.from_buffer(shared)) + page
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(second), page, mmap.PROT_READ) == 0
    assert find_backing(memoryview(shared)) is None
    backing = find_backing(memoryview(shared)[:page])
    assert backing is not None
    os.close(backing.fd)


class Crowded(MemoryBackend):
    """Reports a great many blocks of an earlier run."""

    KEYS = 600_000

    async def scan_keys(self) -> AsyncIterator[Sequence[bytes]]:
        for start in range(0, self.KEYS, 100_000):
            yield [b"old %032d" % number for number in range(start, start + 100_000)]


def test_a_job_does_not_wait_for_the_recovery_of_all_blocks(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many blocks there are, and however late the first step: a store completes long before the recovery."""
    monkeypatch.setattr("kvstore.tiers.opening._RECOVERY_WAIT_S", 0.0)
    tier = open_process_tier(region, backend=f"{__name__}:Crowded")
    connection = connection_of(tier)
    assert connection is not None
    # Like an engine that loads its weights: the recovery has time to send as much as it can.
    assert connection.wait(60)
    result = run(tier, tier.submit_store, TransferJob(1, [b"new"], [0]))
    assert result.success
    presence = tier._presence
    assert not presence.complete and len(presence) < Crowded.KEYS
    assert received_from(connection)[1] < 1 << 20
    until(lambda: tier.get_finished() or presence.complete)
    assert len(presence) == Crowded.KEYS + 1


def test_a_step_takes_in_a_part_of_a_recovery() -> None:
    """A frame has a bounded number of keys, and every message is in one frame, in order."""
    messages: list[FromIO] = [PresenceAdded(tuple(b"%d" % i for i in range(count)), True) for count in (4096,) * 5]
    messages[3:3] = [Drained(1), PresenceAdded(tuple(b"%d" % i for i in range(50_000)), True), Drained(2)]
    left, frames = list(messages), []
    while left:
        frames.append(take_frame(left))
    assert [each for frame in frames for each in frame] == messages
    assert [len(frame) for frame in frames] == [2, 3, 3]
    assert take_frame([]) == []


def test_frames_are_cut_wherever_the_stream_breaks() -> None:
    """Messages are restored complete and in order, whatever pieces the socket delivers."""
    stream = pack([Stop()]) + pack([Stop(), Stop()])
    for size in (1, 3, 7, len(stream)):
        unpacker = Unpacker(ParentMessage)
        messages = [m for i in range(0, len(stream), size) for m in unpacker.feed(stream[i : i + size])]
        assert messages == [Stop()] * 3
    with pytest.raises(ValueError, match="frame"):
        Unpacker(ParentMessage).feed(b"\xff\xff\xff\xff")


def test_a_namespace_with_unknown_fields_reaches_the_child(region: Region, tmp_path: Path) -> None:
    """A child stores under the digest of the namespace, whether its fields are known or not."""
    namespace = Namespace.of_digest(b"n" * 32)
    config = {"backend": "file", "path": str(tmp_path), "capacity": "1MiB", "reserve": 0, "io": "process"}
    open_tier(config, primary=region.view, slot_bytes=SLOT, namespace=namespace).close()
    assert namespace.hex in {path.name for path in tmp_path.iterdir()}
