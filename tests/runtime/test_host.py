"""The thread host: order, one wake-up per batch, errors, and an end that leaves no thread."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec
import pytest

from kvstore.errors import ConfigError, HostClosedError
from kvstore.runtime.host import ThreadHost, attach_to_shared_host
from kvstore.runtime.messages import Channel, Drain, Drained, FromIO, JobDone, JobKind, SubmitJob, ToIO, Touch


class Echo:
    """An I/O side that answers each Drain, and counts its calls."""

    def __init__(self, post: Callable[[FromIO], None], open_error: Exception | None = None) -> None:
        self.post = post
        self.open_error = open_error
        self.deliveries = 0
        self.thread: threading.Thread | None = None
        self.close_gate: asyncio.Event | None = None
        self.close_error: Exception | None = None

    async def open(self) -> None:
        """Record the thread, or fail."""
        self.thread = threading.current_thread()
        if self.open_error:
            raise self.open_error

    def deliver(self, messages: Sequence[ToIO]) -> None:
        """Answer drains."""
        self.deliveries += 1
        for message in messages:
            if isinstance(message, Drain):
                self.post(Drained(message.drain_id))

    async def close(self) -> None:
        """Wait at the gate, if any."""
        if self.close_gate is not None:
            await self.close_gate.wait()
        if self.close_error is not None:
            raise self.close_error


def thread_of(host: ThreadHost) -> threading.Thread:
    """Return the thread of a host's loop."""
    return host._thread


def collect(channel: Channel, count: int) -> list[FromIO]:
    """Receive ``count`` answers within half a minute."""
    answers: list[FromIO] = []
    for _ in range(3000):
        while (message := channel.receive()) is not None:
            answers.append(message)
        if len(answers) >= count:
            break
        channel.wait(0.01)
    return answers


def test_messages_arrive_in_order_on_the_loop_thread() -> None:
    """Messages sent in many batches are answered in order, on the host's own thread."""
    sides: list[Echo] = []
    host = ThreadHost()
    channel = host.attach(lambda post: sides.append(Echo(post)) or sides[0])  # type: ignore[func-returns-value]
    channel.open(30)
    for i in range(0, 300, 3):
        channel.send([Drain(i), Drain(i + 1), Drain(i + 2)])
    assert [m.drain_id for m in collect(channel, 300)] == list(range(300))  # type: ignore[union-attr]
    assert sides[0].thread is not threading.current_thread()
    assert sides[0].deliveries <= 100
    assert channel.close(30)
    assert not host.alive


def test_a_wait_ends_with_an_answer() -> None:
    """A scheduler that waits for an answer goes on as soon as there is one."""

    class Later(Echo):
        def deliver(self, messages: Sequence[ToIO]) -> None:
            asyncio.get_running_loop().call_later(0.05, super().deliver, messages)

    channel = ThreadHost().attach(Later)
    channel.open(30)
    channel.send([Drain(1)])
    assert channel.wait(30)
    assert channel.close(30)


def test_a_batch_costs_one_delivery() -> None:
    """All messages sent before the loop's next turn are delivered in one call."""
    sides: list[Echo] = []
    host = ThreadHost()
    channel = host.attach(lambda post: sides.append(Echo(post)) or sides[0])  # type: ignore[func-returns-value]
    channel.open(30)
    blocked = threading.Event()
    host.wake(lambda: blocked.wait(60) and None)
    for i in range(50):
        channel.send([Drain(i)])
    blocked.set()
    assert len(collect(channel, 50)) == 50
    assert sides[0].deliveries == 1
    channel.close(30)


def test_an_error_of_open_reaches_the_caller() -> None:
    """An exception of the I/O side's open is raised in the opening thread."""
    host = ThreadHost()
    channel = host.attach(lambda post: Echo(post, ConfigError("no such directory")))
    with pytest.raises(ConfigError, match="no such directory"):
        channel.open(30)
    assert channel.close(30)


def test_send_after_close_is_refused() -> None:
    """A send on a closed channel raises an error."""
    channel = ThreadHost().attach(Echo)
    channel.open(30)
    channel.close(30)
    with pytest.raises(HostClosedError, match="closed"):
        channel.send([Drain(1)])


def test_a_side_that_can_not_be_closed_does_not_end_the_scheduler(caplog: pytest.LogCaptureFixture) -> None:
    """An exception of a third-party backend or codec is logged as a warning, and the loop keeps serving others."""
    host = ThreadHost()
    sides: list[Echo] = []
    channel, other = host.attach(lambda post: sides.append(Echo(post)) or sides[-1]), host.attach(Echo)
    sides[0].close_error = BufferError("memoryview has 1 exported buffer")
    assert channel.close(30) is False
    assert "could not be closed: BufferError" in caplog.text
    other.send([Drain(1)])
    assert collect(other, 1) == [Drained(1)]
    assert other.close(30)


def test_close_returns_false_at_its_deadline() -> None:
    """If a side does not end in time, close returns False instead of waiting for ever."""
    sides: list[Echo] = []
    host = ThreadHost()
    channel = host.attach(lambda post: sides.append(Echo(post)) or sides[0])  # type: ignore[func-returns-value]
    channel.open(30)
    sides[0].close_gate = asyncio.Event()
    assert channel.close(0.05) is False


def test_no_task_outlives_the_loop() -> None:
    """Tasks that a side left behind, even in the loop's last turn, are cancelled, with the tasks they start then."""
    tasks: list[asyncio.Task[None]] = []

    def leave_behind() -> None:
        tasks.append(asyncio.get_running_loop().create_task(wait_long()))

    async def wait_long() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            if len(tasks) < 4:
                leave_behind()

    host = ThreadHost()
    channel = host.attach(Echo)
    channel.open(30)
    host.wake(leave_behind)
    host.wake(lambda: asyncio.get_running_loop().call_soon(leave_behind) and None)
    assert channel.close(30)
    thread_of(host).join(30)
    assert len(tasks) == 4
    assert all(task.cancelled() for task in tasks)


def test_the_loop_waits_for_a_task_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that waits for a frozen disk ends once the disk responds, long after its cancellation."""
    monkeypatch.setattr("kvstore.runtime.host._END_S", 0.02)
    responds, ended = threading.Event(), threading.Event()

    async def use_frozen_disk() -> None:
        while not responds.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        ended.set()

    host = ThreadHost()
    channel = host.attach(Echo)
    channel.open(30)
    tasks: list[asyncio.Task[None]] = []
    host.wake(lambda: tasks.append(asyncio.get_running_loop().create_task(use_frozen_disk())))
    assert channel.close(30)
    thread_of(host).join(0.2)
    assert thread_of(host).is_alive() and not ended.is_set()
    responds.set()
    assert ended.wait(30)
    thread_of(host).join(30)
    assert not thread_of(host).is_alive()


def test_a_host_shortens_the_switch_interval() -> None:
    """Beside a busy thread a loop waits a millisecond for the GIL; a shorter interval of the program stays."""
    before = sys.getswitchinterval()
    try:
        for found, left in ((0.005, 0.001), (0.0001, 0.0001)):
            sys.setswitchinterval(found)
            host = ThreadHost()
            host.stop()
            assert sys.getswitchinterval() == pytest.approx(left, abs=2e-6)
    finally:
        sys.setswitchinterval(before)


def test_the_shared_host_lives_as_long_as_its_users() -> None:
    """Tiers of one process share a loop thread; the last one to close ends it, and the next one starts a new one."""
    sides: list[Echo] = []

    def attach() -> Channel:
        channel = attach_to_shared_host(lambda post: sides.append(Echo(post)) or sides[-1])  # type: ignore[func-returns-value]
        channel.open(30)
        return channel

    one, two = attach(), attach()
    one.close(30)
    two.send([Drain(1)])
    assert len(collect(two, 1)) == 1
    two.close(30)
    attach().close(30)
    first, second, third = (side.thread for side in sides)
    assert first is second
    assert first is not third
    assert first is not None and not first.is_alive()


def test_a_side_that_can_not_be_made_leaves_no_host() -> None:
    """An error of the factory is raised, and the failed side does not count as a user."""

    def refuse(post: Callable[[FromIO], None]) -> Echo:
        raise ConfigError("no")

    host = ThreadHost()
    with pytest.raises(ConfigError):
        host.attach(refuse)
    assert not host.alive
    with pytest.raises(HostClosedError):
        host.attach(Echo)


def test_tiers_come_and_go_on_many_threads() -> None:
    """No tier is attached to a loop that its last user is ending."""
    failures: list[BaseException] = []

    def come_and_go() -> None:
        try:
            for _ in range(100):
                channel = attach_to_shared_host(Echo)
                channel.open(60)
                channel.close(60)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_messages_survive_a_process_boundary() -> None:
    """Every message survives encoding and decoding unchanged, so that a process host can send it."""
    to_io = [SubmitJob(1, JobKind.LOAD, (b"\0k",), (3,), 1.5), Touch((b"a", b"b")), Drain(7)]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(to_io), type=list[ToIO]) == to_io
    from_io = [JobDone(1, b"\0\2", 10, 0.5, {"payload": 1}, ""), Drained(7)]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(from_io), type=list[FromIO]) == from_io
