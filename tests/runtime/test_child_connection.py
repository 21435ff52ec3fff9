"""The connection to a child process: start, supervision and end."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvstore import Namespace
from kvstore.errors import BackendUnavailableError
from kvstore.runtime.process import ChildConnection, ProcessSpec, SharedBacking
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


def test_close_during_the_start_ends_the_child(spec: ProcessSpec) -> None:
    """A close during the start raises an error, and the child is gone."""
    stopping = threading.Event()
    stopping.set()
    connection = ChildConnection(spec)
    with pytest.raises(BackendUnavailableError, match="did not start"):
        connection.await_open(60, stopping)
    assert connection.gone


def test_a_quiet_child_is_asked_once_and_only_looks_count(
    connection: ChildConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two quiet seconds a ping is due; after ten more observed seconds the child is stuck, unless it answers."""
    clock = [connection._answered_at]
    monkeypatch.setattr("kvstore.runtime.process.time", SimpleNamespace(monotonic=lambda: clock[0]))

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
