"""The process of an I/O half: ``python -m kvstore.runtime.child SOCKET_FD REGION_FD BELL_FD LIFETIME_FD PARENT_PID``.

Maps the parent's region and runs the I/O side on its own loop. It ends with its parent, which it detects by the end of
the socket, or by a new parent id if a forked sibling holds the socket open. If it is stopped at that time, the kernel
continues it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import logging
import mmap
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from kvstore.errors import ConfigError
from kvstore.runtime import LOG_LINE
from kvstore.runtime.host import IOSide, new_event_loop
from kvstore.runtime.lifetime import hold
from kvstore.runtime.messages import FromIO
from kvstore.runtime.wire import (
    Bell,
    ChildMessage,
    Closed,
    Opened,
    ParentMessage,
    Ping,
    Pong,
    Start,
    Stop,
    Unpacker,
    pack,
    take_frame,
)

_READ_BYTES = 1 << 18
_ADOPTION_CHECK_S = 0.25
_CLOSE_TIMEOUT_S = 3.0
"""Time limit for closing the medium; after that, the parent is gone or no longer waits."""

_PR_SET_PDEATHSIG = 1

_NICENESS = 5
"""Priority reduction. With too few processors, the scheduler's thread then keeps three quarters of a processor; with
enough of them, it has no effect."""

logger = logging.getLogger("kvstore.runtime")

_Factory = Callable[[dict[str, Any], memoryview, Callable[[FromIO], None], Callable[[], Awaitable[None]]], IOSide]


class _Child:
    """One I/O side behind one socket."""

    def __init__(self, connection: socket.socket, region_fd: int, bell: Bell) -> None:
        self._socket = connection
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._region_fd = region_fd
        self._bell = bell
        self._unpacker = Unpacker(ParentMessage)
        self._outbox: list[ChildMessage] = []
        self._wake = asyncio.Event()
        self._sent = asyncio.Event()
        self._side: IOSide | None = None

    async def serve(self, parent: int) -> None:
        """Serve until a Stop arrives, or until the parent is gone."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)
        # With a limit of 0, drain() waits until the socket has accepted all data; only then the bell is rung.
        self._writer.transport.set_write_buffer_limits(0)
        writer = asyncio.create_task(self._write_for_ever())
        reader = asyncio.create_task(self._read_until_stopped())
        # A task ends when the parent is gone, or by a defect; this process ends in both cases.
        while not reader.done() and not writer.done() and os.getppid() == parent:
            await asyncio.wait([reader, writer], timeout=_ADOPTION_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
        reader.cancel()
        for error in await asyncio.gather(reader, return_exceptions=True):
            if isinstance(error, Exception) and not isinstance(error, ConnectionError):
                logger.error("The I/O process ends with a defect", exc_info=error)
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                if self._side is not None:
                    await self._side.close()
                self._post(Closed())
                with contextlib.suppress(ConnectionError):  # The parent is gone.
                    await self._flush()
        # Any failure: backends may be third-party code, and only the end of main() leaves blocked threads behind.
        except Exception as error:
            logger.warning("The I/O process ends without closing its medium: %r", error)
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)

    async def _read_until_stopped(self) -> None:
        while data := await self._reader.read(_READ_BYTES):
            work = []
            for message in self._unpacker.feed(data):
                if isinstance(message, Start):
                    if not await self._open(message):
                        return
                elif isinstance(message, Stop):
                    return
                elif isinstance(message, Ping):
                    self._post(Pong())
                else:
                    work.append(message)
            if work and self._side is not None:
                self._side.deliver(work)

    async def _open(self, start: Start) -> bool:
        sys.path[:] = start.sys_path
        try:
            side = _load(start.target)(start.payload, self._map(start), self._post, self._room)
            self._side = side
            _step_back()
            await side.open()
        # The parent raises it as the same class; here it only ends the child.
        except Exception as error:
            self._post(Opened(type(error).__name__, str(error)))
            return False
        self._post(Opened("", ""))
        return True

    def _map(self, start: Start) -> memoryview:
        region = mmap.mmap(self._region_fd, start.skip + start.size_bytes, offset=start.offset)
        os.close(self._region_fd)
        return memoryview(region)[start.skip :]

    def _post(self, message: ChildMessage) -> None:
        self._outbox.append(message)
        self._wake.set()

    async def _write_for_ever(self) -> None:
        try:
            while True:
                await self._wake.wait()
                await self._flush()
        except Exception as error:
            # A job without an answer would wait forever; ending this process makes the parent fail all jobs.
            if not isinstance(error, ConnectionError):
                logger.error("The I/O process can't answer and ends: %r", error)
            raise

    async def _flush(self) -> None:
        self._wake.clear()
        while self._outbox:
            if self._writer.transport.is_closing():
                raise ConnectionResetError("The parent is gone.")  # uvloop would raise a RuntimeError.
            self._writer.write(pack(take_frame(self._outbox)))
            await self._writer.drain()
            self._bell.ring()
        self._sent.set()

    async def _room(self) -> None:
        """Wait until the socket has accepted all posted messages, so that bulk messages don't delay others."""
        while self._outbox:
            self._sent.clear()
            await self._sent.wait()


def main(arguments: list[str]) -> None:
    """Run the child with the descriptors from its parent."""
    socket_fd, region_fd, bell_fd, lifetime_fd, parent = map(int, arguments)
    # Before the first ring is created, so before any I/O.
    hold(lifetime_fd)
    # The parent handles Ctrl-C and the signals of a service manager, which may reach the whole group of processes: it
    # finishes its stores and closes its tiers, which ends this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Also sent when the thread that started this process ends, and then without effect.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    logging.basicConfig(level=logging.WARNING, format=LOG_LINE, datefmt="%m-%d %H:%M:%S")
    connection = socket.socket(fileno=socket_fd)
    loop = new_event_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(_Child(connection, region_fd, Bell(bell_fd)).serve(parent))
    # Threads blocked in the kernel must not delay the exit.
    logging.shutdown()
    os._exit(0)


def _step_back() -> None:
    """Lower the priority of this process; threads started later inherit it."""
    with contextlib.suppress(OSError):  # A container may forbid it.
        os.nice(_NICENESS)


def _load(target: str) -> _Factory:
    module, _, name = target.partition(":")
    try:
        factory: _Factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"The I/O process can't find {target!r}: {error}") from error
    return factory


if __name__ == "__main__":
    main(sys.argv[1:])
