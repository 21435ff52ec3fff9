"""The connection to a child process: start, supervision and end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore import Namespace
from kvstore.errors import BackendUnavailableError
from kvstore.runtime.messages import Drained, FromIO, HostDown, HostUp, Touch
from kvstore.runtime.process import ChildConnection, ProcessChannel, ProcessSpec, SharedBacking
from kvstore.runtime.wire import Ping, pack
from kvstore.testing import eventually

SLOT = 8192
OPTIONS = {"capacity": "1MiB"}


@pytest.fixture
def spec() -> Iterator[ProcessSpec]:
    """A tier of two slots in memory."""
    payload = {"backend": "memory", "options": OPTIONS, "tenants": None, "slot_bytes": SLOT}
    payload["namespace"] = Namespace({}).document()
    fd = os.memfd_create("kvstore-test")
    try:
        os.ftruncate(fd, 2 * SLOT)
        yield ProcessSpec("kvstore.tiers.opening:make_io_side", payload, SharedBacking(fd, 0, 0, 2 * SLOT), "test")
    finally:
        os.close(fd)


@pytest.fixture
def connection(spec: ProcessSpec) -> Iterator[ChildConnection]:
    """A connection to a child whose I/O side is open."""
    connection = ChildConnection(spec)
    try:
        connection.await_open(60, threading.Event())
        yield connection
    finally:
        connection.end()


@pytest.fixture
def clock(connection: ChildConnection, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the connection's watch, which a test advances."""
    clock = [connection._answered_at]
    monkeypatch.setattr("kvstore.runtime.process.time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


_SIDE = """
import asyncio, threading, time
from kvstore.runtime.messages import Drained

class Side:
    def __init__(self, case, post):
        self.case, self.post = case, post

    async def open(self):
        self.post(Drained(0))
        if self.case == "fails":
            threading.Thread(target=time.sleep, args=(600,)).start()

    def deliver(self, messages):
        pass

    async def close(self):
        if self.case == "fails":
            raise ValueError("it can't be closed")
        for number in range(3):
            self.post(Drained(number))
            await asyncio.sleep(0.05)

def make(payload, primary, post, room):
    return Side(payload["case"], post)
"""


@pytest.mark.parametrize(("case", "said"), [("answers", ""), ("fails", "without closing")])
def test_a_child_ends_after_its_socket(
    case: str,
    said: str,
    spec: ProcessSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In silence, also while it answers; and although its medium can't be closed and a thread of it is blocked."""
    (tmp_path / "kvstore_test_side.py").write_text(_SIDE)
    monkeypatch.syspath_prepend(tmp_path)
    connection = ChildConnection(replace(spec, target="kvstore_test_side:make", payload={"case": case}))
    try:
        connection.await_open(60, threading.Event())
        connection._socket.close()
        eventually(lambda: connection.gone, 60, "the end of the child")
        error = capfd.readouterr().err
        assert "Traceback" not in error and (said in error if said else not error)
    finally:
        connection.end()


def test_messages_before_the_end_of_each_open_are_received(
    spec: ProcessSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first child's and its successor's, which follow the HostUp."""
    (tmp_path / "kvstore_test_side.py").write_text(_SIDE)
    monkeypatch.syspath_prepend(tmp_path)
    backing = replace(spec.backing, fd=os.dup(spec.backing.fd))
    spec = replace(spec, target="kvstore_test_side:make", payload={"case": "answers"}, backing=backing)
    channel = ProcessChannel(spec)
    received: list[FromIO] = []
    try:
        channel.open(60)
        assert channel.receive() == Drained(0)
        assert channel.pid is not None
        os.kill(channel.pid, signal.SIGKILL)

        def receive() -> bool:
            if message := channel.receive():
                received.append(message)
            return len(received) == 3

        eventually(receive, 60, "the messages of the next child")
        assert [type(message) for message in received] == [HostDown, HostUp, Drained]
    finally:
        channel.close(60)


def test_close_during_the_start_ends_the_child(spec: ProcessSpec) -> None:
    """A close during the start raises an error, and the child is gone."""
    stopping = threading.Event()
    stopping.set()
    connection = ChildConnection(spec)
    with pytest.raises(BackendUnavailableError, match="did not start"):
        connection.await_open(60, stopping)
    assert connection.gone


def test_a_quiet_child_is_asked_once_and_only_looks_count(connection: ChildConnection, clock: list[float]) -> None:
    """After two quiet seconds a ping is due; after ten more observed seconds the child is stuck, unless it answers."""

    def signs(steps: list[float]) -> list[str]:
        found = []
        for step_s in steps:
            clock[0] += step_s
            found.append(connection.watch())
        return found

    assert signs([1.9, 0.2, 1, 1]) == ["well", "ask", "well", "well"]
    # An absence of hours counts as two seconds.
    assert signs([10_000, 5, 1.5, 1.5]) == ["well"] * 4
    connection.write(bytearray(pack([Ping()])))
    assert connection.wait(60)
    assert connection.read()
    assert signs([1.9, 0.2, *[1] * 9, 0.5, 1]) == ["well", "ask", *["well"] * 10, "stuck"]


def test_a_child_that_reads_a_backlog_is_alive(connection: ChildConnection, clock: list[float]) -> None:
    """Room in a full socket counts as an answer, because the ping is behind many messages, which take long."""
    frame = pack([Touch((bytes(1000),) * 1000)])
    unsent = bytearray()

    def is_full() -> bool:
        unsent.extend(b"" if unsent else frame)
        try:
            del unsent[: connection.write(unsent)]
        except BlockingIOError:
            return True
        return False

    os.kill(connection.pid, signal.SIGSTOP)
    while not is_full():
        pass
    clock[0] += 3
    assert connection.watch() == "ask"
    os.kill(connection.pid, signal.SIGCONT)
    eventually(lambda: not is_full(), 60, "room in the socket")
    clock[0] += 3
    assert connection.watch() == "ask"


def test_the_bell_has_rung_until_all_frames_are_read(connection: ChildConnection) -> None:
    """Without unread frames the socket needs no read."""
    # The child also reports the end of its recovery.
    eventually(lambda: connection.read() is not None and not connection.rang, 20, "the end of the start")
    connection.write(bytearray(pack([Ping()])))
    eventually(lambda: connection.rang, 20, "the bell")
    eventually(lambda: connection.read() is not None and not connection.rang, 20, "the answer")


def test_no_descriptor_is_left_by_a_child_that_could_not_begin(
    spec: ProcessSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a socket, page or process cannot be created, all earlier descriptors are closed."""

    def broken(*_: object, **__: object) -> None:
        raise OSError("no more")

    before = len(os.listdir("/proc/self/fd"))
    for name in ("socket.socketpair", "subprocess.Popen"):
        with monkeypatch.context() as poor:
            poor.setattr(f"kvstore.runtime.process.{name}", broken)
            with pytest.raises(OSError, match="no more"):
                ChildConnection(spec)
    with monkeypatch.context() as poor:
        poor.setattr("kvstore.runtime.wire.mmap.mmap", broken)
        with pytest.raises(OSError, match="no more"):
            ChildConnection(spec)
    assert len(os.listdir("/proc/self/fd")) <= before
