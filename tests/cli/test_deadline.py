"""Deadlines of commands: no command exceeds its deadline, whatever hangs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.backends.holdings import Holdings, ReadResult
from kvstore.backends.memory import MemoryBackend
from kvstore.cli.holdings.care import scrub
from kvstore.cli.holdings.medium import Medium
from kvstore.cli.interruption import Deadline, DeadlineError, run_interruptibly
from kvstore.cli.tier_argument import parse_tier
from kvstore.errors import ConfigError
from kvstore.types import BlockInfo, NamespaceInfo, RemovalCause
from tests.cli.in_process import run_here
from tests.project.tree import ROOT

_PATIENCE_S = 20.0
"""Far less than any of the hanging operations would take, and far more than a busy machine needs to end."""


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """A pipe without a writer: opening it blocks."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A redis tier on a port that accepts connections and never answers, with timeouts longer than the test's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"redis://127.0.0.1:{server.getsockname()[1]}"
        yield json.dumps({"type": "redis", "url": url, "connect_timeout": 240, "timeout": 240})


def _ended_in_time(*arguments: str) -> None:
    begun = time.monotonic()
    done = run_here(*arguments, "--deadline", "300ms")
    assert time.monotonic() - begun < _PATIENCE_S
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "did not end within 300ms" in done.stderr and "--deadline" in done.stderr


@pytest.mark.parametrize("command", ["inspect", "scrub", "gc"])
def test_no_command_waits_longer_for_a_server(command: str, silent_server: str) -> None:
    """A server that accepts connections and never answers ends the command with status 1 and a clear error."""
    _ended_in_time(command, "--tier", silent_server)


@pytest.mark.parametrize("command", ["config", "s3-lifecycle", "inspect", "scrub", "gc"])
def test_no_command_waits_longer_for_its_tier(command: str, fifo: Path) -> None:
    """A tier file that can't be read to its end ends the command in the same way."""
    _ended_in_time(command, "--tier", f"@{fifo}")


def test_uninterruptible_command_ends_with_its_process() -> None:
    """A command that catches interrupts, or is stuck in a system call, ends with the same error."""
    program = (
        "import signal, time, kvstore.cli.interruption as found\n"
        "found._EXIT_AFTER_S = 0.2\n"
        "with found.Deadline('100ms'):\n"
        "    signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "    time.sleep(600)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "did not end within 100ms" in done.stderr


def test_an_interrupt_that_is_caught_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that swallows the first interrupt gets another."""
    monkeypatch.setattr("kvstore.cli.interruption._SIGNAL_EVERY_S", 0.1)
    caught = 0
    with pytest.raises(DeadlineError), Deadline("100ms"):
        for _ in range(2):
            try:
                signal.pause()
            except KeyboardInterrupt:
                caught += 1
        signal.pause()
    assert caught == 2


def test_a_command_that_ends_in_time_is_not_interrupted() -> None:
    """Its watchdog ends with it, and Ctrl-C works as usual."""
    with Deadline("1h") as deadline:
        deadline.check()
    watchdog = deadline._thread
    watchdog.join(_PATIENCE_S)
    assert not watchdog.is_alive()
    with pytest.raises(KeyboardInterrupt), Deadline("1h"):
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        signal.pause()


def test_an_interrupt_cancels_between_two_callbacks() -> None:
    """The callback's changes to a future are applied first; then the coroutine is cancelled, and cleans up."""
    states: list[bool] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def callback() -> None:
            signal.raise_signal(signal.SIGINT)
            states.append(future.done())
            future.set_result(None)

        loop.call_soon(callback)
        try:
            await future
            await asyncio.sleep(_PATIENCE_S)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            states.append(future.done())
            raise

    with asyncio.Runner() as runner:
        with pytest.raises(KeyboardInterrupt):
            run_interruptibly(runner, work())
        assert states == [False, True]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert run_interruptibly(runner, asyncio.sleep(0, 5)) == 5


def test_second_interrupt_ends_a_coroutine_that_caught_the_first() -> None:
    """A coroutine that continues, or hangs in a system call, is interrupted there."""

    async def work() -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(_PATIENCE_S)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second one was not heeded")

    with asyncio.Runner() as runner, pytest.raises(KeyboardInterrupt):
        run_interruptibly(runner, work())


def test_without_an_interrupt_cancelled_is_cancelled() -> None:
    """A coroutine that ends as cancelled by itself is not interrupted, and its errors are passed on."""

    async def work() -> None:
        raise asyncio.CancelledError

    with asyncio.Runner() as runner, pytest.raises(asyncio.CancelledError):
        run_interruptibly(runner, work())


@pytest.mark.parametrize("text", ["0", "31d", "-1s", "soon"])
def test_invalid_deadlines_are_refused(text: str) -> None:
    """A deadline must be a practicable duration."""
    with pytest.raises(ConfigError, match="--deadline"):
        Deadline(text)


class _Damaged(Holdings):
    """A namespace in which all blocks are damaged."""

    removed = 0

    async def scan(self, namespace: NamespaceInfo) -> AsyncGenerator[Sequence[BlockInfo], None]:
        yield [BlockInfo(bytes([number]), 256) for number in range(8)]

    async def read(self, namespace: NamespaceInfo, blocks: Sequence[BlockInfo]) -> Sequence[ReadResult]:
        return [memoryview(bytes(256)) for _ in blocks]

    async def remove(self, namespace: NamespaceInfo, blocks: Sequence[BlockInfo], cause: RemovalCause) -> int:
        _Damaged.removed += len(blocks)
        return len(blocks)


class DamagedBackend(MemoryBackend):
    """Its namespace has damaged blocks only."""

    holdings_type = f"{__name__}:_Damaged"


def test_scrub_reports_its_findings_at_its_deadline() -> None:
    """Damage found so far is reported, and no block is removed any more, because removal takes time, too."""
    late = Deadline("1us")
    seen = 0

    def on_block(size_bytes: int) -> None:
        nonlocal seen
        seen += 1
        if seen == 3:
            late.check()

    with Medium(parse_tier(json.dumps({"type": f"{__name__}:DamagedBackend"}))) as medium:
        result = scrub(medium, [NamespaceInfo("ab" * 32)], dry=False, on_block=on_block)
    assert (len(result.faults), result.set_aside, _Damaged.removed) == (3, 0, 0)
    assert "did not end within" in result.error
