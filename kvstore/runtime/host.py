"""The thread host: one event loop on a daemon thread, for the I/O sides of all tiers of a process.

The scheduler side has a :class:`ThreadChannel` per tier: it sends messages with one wake-up per batch, collects the
answers, and shares nothing else with the loop.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar

from kvstore.errors import HostClosedError
from kvstore.runtime.forks import OF_PARENT, leave_at_fork
from kvstore.runtime.messages import FromIO, ToIO

logger = logging.getLogger("kvstore.runtime")

_T = TypeVar("_T")

SWITCH_S: Final = 0.001
"""Longest switch interval of the interpreter beside a loop: the time after which a computing thread yields the GIL to a
waiting one. With Python's 5 ms, each wake-up of the loop waits so long beside a busy scheduler, and the scheduler
beside a busy loop. An even shorter interval gains little more, and threads that both compute lose time by switching."""

_END_S = 0.5
"""Time for which an ending loop repeats the cancellation of its tasks. Tasks that wait for the kernel may never end."""


class IOSide(Protocol):
    """The I/O half of a tier. All methods are called on the loop thread."""

    async def open(self) -> None:
        """Open the medium; exceptions are raised in the caller of ``Channel.open``."""

    def deliver(self, messages: Sequence[ToIO]) -> None:
        """Process messages without blocking."""

    async def close(self) -> None:
        """End all work, answer all jobs, release all buffers."""


IOSideFactory = Callable[[Callable[[FromIO], None]], IOSide]
"""Creates an I/O side; the argument posts its answers."""


class ThreadChannel:
    """The channel of a tier whose I/O half runs on a thread of this process. In a forked process it is closed."""

    def __init__(self, host: ThreadHost, factory: IOSideFactory) -> None:
        self._host = host
        self._remedy = "The tier is closed; open a new one to continue."
        self._inbox: deque[ToIO] = deque()
        self._outbox: deque[FromIO] = deque()
        self._arrived = threading.Event()
        self._wake_pending = False
        self.closed = False
        self._side = factory(self._post)
        leave_at_fork(self)

    def open(self, timeout_s: float) -> None:
        self._host.call(self._side.open(), timeout_s)

    def send(self, messages: Sequence[ToIO]) -> None:
        """Wakes the loop once per batch."""
        if self.closed:
            raise HostClosedError(self._remedy)
        self._inbox.extend(messages)
        if not self._wake_pending:
            self._wake_pending = True
            self._host.wake(self._deliver)

    def receive(self) -> FromIO | None:
        try:
            return self._outbox.popleft()
        except IndexError:
            return None

    @property
    def pid(self) -> None:
        return None

    @property
    def has_answers(self) -> bool:
        return bool(self._outbox)

    def hurry(self) -> None:
        """A thread does not stop without its process."""

    def wait(self, timeout_s: float) -> bool:
        self._arrived.clear()
        if self._outbox:
            return True
        return self._arrived.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Unfinished work continues in its daemon thread."""
        if self.closed:
            return True
        self.closed = True
        try:
            self._host.call(self._close_side(), timeout_s)
        except TimeoutError:
            return False
        # Backends and codecs may be third-party code, and their exceptions must not end the scheduler. Resources that
        # were not released stay until the process ends.
        except Exception as error:
            logger.warning("An I/O side could not be closed: %s: %s", type(error).__name__, error)
            return False
        finally:
            self._host.detach()
        return True

    def leave_to_parent(self) -> None:
        """Close this copy in a forked process, which lacks the thread; the parent's channel goes on."""
        self.closed, self._remedy = True, OF_PARENT
        # Another thread may have held its lock during the fork.
        self._arrived = threading.Event()

    async def _close_side(self) -> None:
        self._deliver()
        await self._side.close()

    def _post(self, message: FromIO) -> None:
        self._outbox.append(message)
        self._arrived.set()

    def _deliver(self) -> None:
        # Cleared before the inbox is emptied, so that a later message wakes the loop again.
        self._wake_pending = False
        messages = []
        while self._inbox:
            messages.append(self._inbox.popleft())
        if messages:
            self._side.deliver(messages)


class ThreadHost:
    """An event loop (uvloop if installed) on a daemon thread, which ends with its last user."""

    def __init__(self) -> None:
        self._loop = new_event_loop()
        self._users = 0
        self._ended = False
        self._lock = threading.Lock()
        if sys.getswitchinterval() > SWITCH_S:
            sys.setswitchinterval(SWITCH_S)
        self._thread = threading.Thread(target=self._run, name="kvstore-io", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the loop runs and accepts users."""
        return self._thread.is_alive() and not self._ended

    def attach(self, factory: IOSideFactory) -> ThreadChannel:
        """Add an I/O side to the loop; the caller opens and closes it through the channel.

        Raises:
            HostClosedError: The last user has left; this host accepts no others.
        """
        with self._lock:
            if self._ended:
                raise HostClosedError("The I/O loop has ended; open a new tier to continue.")
            self._users += 1
        try:
            return ThreadChannel(self, factory)
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Remove a user; removing the last one stops the loop."""
        with self._lock:
            self._users -= 1
            # Under the lock, so that no new user can attach after the last one left.
            last = self._ended = self._users <= 0
        if last:
            self.stop()

    def stop(self) -> None:
        """Stop the loop; its thread ends after the running callback."""
        self._ended = True
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def wake(self, callback: Callable[[], None]) -> None:
        """Schedule a callback on the loop thread."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError as error:
            raise HostClosedError("The I/O loop has ended; open a new tier to continue.") from error

    def call(self, work: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
        """Run a coroutine on the loop and wait for its result."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(_end_tasks())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


async def _end_tasks() -> None:
    """Cancel all tasks of the loop, also those that have not started, and wait for them.

    After ``_END_S``, tasks that wait for a frozen disk are no longer cancelled. They end, and close its files, once it
    responds; no other thread waits for them.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _END_S
    while (tasks := asyncio.all_tasks() - {asyncio.current_task()}) and loop.time() < deadline:
        for task in tasks:
            task.cancel()
        # A cancelled task may start another one.
        await asyncio.wait({asyncio.gather(*tasks, return_exceptions=True)}, timeout=_END_S / 4)
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(tasks)


_shared: ThreadHost | None = None
_shared_lock = threading.Lock()


def attach_to_shared_host(factory: IOSideFactory) -> ThreadChannel:
    """Add an I/O side to the host of this process, which is started if none is running."""
    global _shared
    with _shared_lock:
        # After a fork the object exists without its thread.
        if _shared is not None and _shared.alive:
            with suppress(HostClosedError):  # The last user has just left.
                return _shared.attach(factory)
        _shared = ThreadHost()
        return _shared.attach(factory)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a uvloop event loop, which costs less per wake-up, or an asyncio loop if uvloop is not installed."""
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
