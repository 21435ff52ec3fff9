"""Early ends of commands: on Ctrl-C, with time to report results, or at a deadline, even if I/O hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from types import FrameType, TracebackType
from typing import Annotated, Any, Final, Self, TypeVar

from kvstore.cli.command_line import ExitCode, Option, duration_option
from kvstore.cli.terminal import say
from kvstore.errors import ConfigError, KVStoreError

_T = TypeVar("_T")

DeadlineOption = Annotated[
    str,
    Option(
        "--deadline",
        metavar="TIME",
        envvar="KVSTORE_DEADLINE",
        help="Time limit of the command, such as 30s, 10min or 1d.",
    ),
]

DEADLINE_TO_LOOK: Final = "30s"
"""Default deadline of a read-only command: listing a million names takes less, and the user waits for the result."""

_DEADLINE_S_MAX: Final = 30 * 86400
_SIGNAL_AFTER_S: Final = 0.5
"""Time from the deadline to the first interrupt; a scan of blocks ends earlier and reports its findings."""
_SIGNAL_EVERY_S: Final = 1.0
"""Pause between interrupts; code may catch one and continue."""
_EXIT_AFTER_S: Final = 5.0
"""Time from the deadline to the exit of a process that does not react to interrupts. Cleanup takes milliseconds."""


class DeadlineError(KVStoreError):
    """A command did not end by its deadline."""


class Deadline:
    """Limits the time of the commands in its ``with`` block; only for the main thread, and one at a time.

    There are three stages. Long scans call :meth:`check` for each block. Then interrupts like those of Ctrl-C end
    system calls and cancel coroutines. If the command still runs 5 s after the deadline, the process exits.

    Raises:
        ConfigError: The text is not a valid duration, or not above 0 and at most 30 days.
        DeadlineError: From the ``with`` block, if the deadline passed.
    """

    def __init__(self, text: str) -> None:
        self._seconds = float(duration_option(text, "--deadline"))
        if not 0 < self._seconds <= _DEADLINE_S_MAX:
            raise ConfigError(f"--deadline is {text!r}. Expected more than 0 and at most 30d.")
        self._error = (
            f"The command did not end within {text} and was stopped (--deadline). If the medium works and the command "
            "needs longer, give it more time."
        )
        self._at = time.monotonic() + self._seconds
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._is_late = False
        self._thread = threading.Thread(target=self._watch, name="kvstore-deadline", daemon=True)

    def check(self) -> None:
        """Raise :class:`DeadlineError` if the deadline has passed."""
        if time.monotonic() >= self._at:
            raise DeadlineError(self._error)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            with self._lock:
                self._ended.set()
        except KeyboardInterrupt:
            self._ended.set()  # From the deadline, just as the block ended, or from the user: same effect.
        if kind is not None and issubclass(kind, KeyboardInterrupt) and self._is_late:
            raise DeadlineError(self._error) from None

    def _watch(self) -> None:
        if self._ended.wait(max(0.0, self._at - time.monotonic()) + _SIGNAL_AFTER_S):
            return
        while time.monotonic() < self._at + _EXIT_AFTER_S:
            with self._lock:
                if self._ended.is_set():
                    return
                self._is_late = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            if self._ended.wait(_SIGNAL_EVERY_S):
                return
        say(f"kvstore: {self._error}")
        sys.stdout.flush()
        os._exit(ExitCode.FAILED)


class Stopping:
    """Context that counts SIGINT and SIGTERM; calling it returns whether one arrived. The second one interrupts."""

    def __init__(self) -> None:
        self._count = 0
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self._count > 0

    def __enter__(self) -> Stopping:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            raise KeyboardInterrupt


def run_interruptibly(runner: asyncio.Runner, coro: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine like ``runner.run``, but Ctrl-C cancels it between two callbacks of the loop.

    A second Ctrl-C interrupts. ``runner.run`` itself cancels the task immediately, even within a callback that is about
    to set a future's result. That callback then fails: asyncio's own socket connect does so, with a traceback on
    stderr. In other threads, or with a custom SIGINT handler, there is no difference.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return runner.run(coro)
    loop, interrupts, tasks = runner.get_loop(), 0, list[asyncio.Task[Any]]()

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts > 1:
            raise KeyboardInterrupt
        for task in tasks:
            loop.call_soon_threadsafe(task.cancel)

    async def interruptible() -> _T:
        if (task := asyncio.current_task()) is not None:
            tasks.append(task)
            if interrupts:
                task.cancel()
        return await coro

    signal.signal(signal.SIGINT, interrupt)
    try:
        result = runner.run(interruptible())
    except asyncio.CancelledError:
        if not interrupts:
            raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupts:
        raise KeyboardInterrupt
    return result
