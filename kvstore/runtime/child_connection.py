"""The parent's connection to a child process: the process, its socket and its bell, and the memory that both map."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

from kvstore import errors
from kvstore.errors import BackendUnavailableError
from kvstore.runtime.lifetime import Lifetime
from kvstore.runtime.messages import FromIO
from kvstore.runtime.wire import Bell, ChildMessage, Closed, Opened, Pong, Start, Unpacker, pack

__all__ = [
    "END_TIMEOUT_S",
    "KILLED_TIMEOUT_S",
    "LOOK_ANYWAY_S",
    "ChildConnection",
    "ProcessSpec",
    "SharedBacking",
    "find_backing",
]

logger = logging.getLogger("kvstore.runtime")

_READ_BYTES: Final = 1 << 20

LOOK_ANYWAY_S: Final = 0.1
"""Interval of reads without a ring of the bell: a killed child no longer rings."""

KILLED_TIMEOUT_S: Final = 5.0
"""Time limit for the end of a killed child, which may be stuck in the kernel on a dead mount."""

END_TIMEOUT_S: Final = 1.0
"""Time for a child to exit after it closed its medium or failed to open it."""

_SETTLED_LOOK_S: Final = 0.005
"""Interval of checks for the end of a killed child's I/O, which mostly takes milliseconds."""

_START_TIMEOUT_S: Final = 5.0

_QUIET_S: Final = 2.0
"""Silence after which a child is asked for a sign of life."""

_ANSWER_TIMEOUT_S: Final = 10.0
"""Time limit for the sign of life: longer than delays by a start, a snapshot or a busy machine. A child whose medium
hangs still answers."""

_LATE_QUIET_S: Final = 0.25
_LATE_ANSWER_TIMEOUT_S: Final = 1.0
"""Both limits while a load is late: a running loop reports it by its deadline, unless the medium hangs."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Parameters of a child process.

    Attributes:
        target: ``"module:function"`` that makes the I/O side; see :class:`kvstore.runtime.wire.Start`.
        payload: Its first argument, of plain values. May hold secrets, so it is not shown.
        backing: The region to map; the channel closes its descriptor.
        name: Name of the tier, for messages.
    """

    target: str
    payload: dict[str, Any] = field(repr=False)
    backing: SharedBacking
    name: str


class ChildConnection:
    """A child process, its socket and its bell. Used by one thread at a time.

    Attributes:
        has_closed: Whether the child reported its medium as closed, so that it no longer touches a slot.

    Raises:
        BackendUnavailableError: The child ended at once.
        OSError: No socket, memory or process is available.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        self._name = spec.name
        self.has_closed = False
        # Time of its last sign of life, and of the last check for one.
        self._heard_at = time.monotonic()
        self._looked_at = 0.0
        # Checked time since it was asked for a sign of life; None if it was not asked, or has answered.
        self._asked_s: float | None = None
        # Whether the socket took less than was offered.
        self._is_full = False
        self._is_open = False
        self._unpacker = Unpacker(ChildMessage)
        with contextlib.ExitStack() as on_failure:
            self._lifetime = Lifetime()
            on_failure.callback(self._lifetime.close)
            self._socket, theirs = socket.socketpair()
            on_failure.callback(self._socket.close)
            on_failure.callback(theirs.close)
            self._bell = Bell()
            on_failure.callback(self._bell.close)
            fds = (theirs.fileno(), spec.backing.fd, self._bell.fd, self._lifetime.fd)
            arguments = [str(number) for number in (*fds, os.getpid())]
            self._process = subprocess.Popen(
                # Not from the working directory (-P), which may hold a foreign module of the same name.
                [sys.executable, "-P", "-m", "kvstore.runtime.child", *arguments],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                # The child finds kvstore where this process found it, installed or not.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
            on_failure.pop_all()
        theirs.close()
        backing = spec.backing
        start = Start(spec.target, spec.payload, backing.offset, backing.skip, backing.size_bytes, sys.path)
        self._socket.settimeout(_START_TIMEOUT_S)
        try:
            self._socket.sendall(pack([start]))
        except OSError as error:
            self.end()
            raise BackendUnavailableError("its I/O process ended at once", backend=self._name) from error
        self._socket.setblocking(False)

    def read(self) -> list[ChildMessage] | None:
        """Return the messages that have arrived; None at the end of the socket."""
        try:
            data = self._socket.recv(_READ_BYTES)
            self._note_alive()
            return self._unpacker.feed(data) if data else None
        except (BlockingIOError, InterruptedError):
            return []
        except (OSError, ValueError) as error:
            logger.debug("The socket of an I/O process failed: %r", error)
            return None

    def write(self, data: bytearray) -> int:
        """Send as much as the socket takes; return the number of bytes.

        Raises:
            BlockingIOError: The socket is full.
            OSError: The child has ended.
        """
        was_full, self._is_full = self._is_full, True
        sent = self._socket.send(data)
        self._is_full = sent < len(data)
        if was_full:
            # There is room, so the child has read.
            self._note_alive()
        return sent

    def wait(self, timeout_s: float) -> bool:
        """Wait for a message or the end of the socket; return whether either has come."""
        # Not select(): it knows no descriptor above 1023, and an engine may well have more.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def await_open(self, timeout_s: float, stopping: threading.Event) -> list[FromIO]:
        """Wait until the I/O side is open; return its other messages.

        Raises:
            KVStoreError: It could not be opened or did not answer in time, or ``stopping`` was set.
        """
        deadline = time.monotonic() + timeout_s
        said: list[FromIO] = []
        opened = False
        while not opened and time.monotonic() < deadline and not stopping.is_set():
            self.wait(LOOK_ANYWAY_S)
            messages = self.read()
            if messages is None:
                break
            for message in messages:
                if isinstance(message, Opened):
                    if message.error:
                        self.end(END_TIMEOUT_S)
                        raise _error_of(message)
                    opened = True
                elif not isinstance(message, (Closed, Pong)):
                    said.append(message)
        if not opened:
            # It has no job, so no slot. If its medium is stuck, it can't be killed, and is not waited for.
            self.end()
            raise BackendUnavailableError("its I/O process did not start", backend=self._name)
        self._is_open = True
        return said

    def watch(self, *, is_late: bool = False) -> Literal["well", "ask", "stuck"]:
        """Return "ask" if a quiet child must be asked for a sign of life, "stuck" if it was asked and does not answer.

        To be called often; after "ask" the caller sends a ``Ping``. Any message counts as an answer. Only checked time
        counts, because the scheduler itself may have been stopped meanwhile. A late load shortens the limits.
        """
        quiet_s, answer_s = (_LATE_QUIET_S, _LATE_ANSWER_TIMEOUT_S) if is_late else (_QUIET_S, _ANSWER_TIMEOUT_S)
        now = time.monotonic()
        passed_s, self._looked_at = now - self._looked_at, now
        if self._asked_s is not None:
            self._asked_s += min(passed_s, quiet_s)
            return "stuck" if self._asked_s > answer_s else "well"
        if now - self._heard_at <= quiet_s:
            return "well"
        self._asked_s = 0.0
        return "ask"

    def kill(self) -> None:
        """Kill the child without waiting for its end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    def end(self, timeout_s: float = 0.0, *, for_ever: bool = False) -> bool:
        """Wait for the child's end, kill it after that and wait again; return whether it ended by itself.

        A killed child may not have ended afterwards (see :attr:`gone`), unless ``for_ever`` is set.
        """
        by_itself = True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            by_itself = False
            self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(None if for_ever else KILLED_TIMEOUT_S)
        self._socket.close()
        self._bell.close()
        if self.has_closed or not self._is_open:
            # No I/O of it is in flight.
            self._lifetime.close()
        return by_itself

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    @property
    def gone(self) -> bool:
        """Whether the child has ended."""
        return self._process.poll() is not None

    @property
    def has_settled(self) -> bool:
        """Whether the child and its kernel I/O have ended: only then nothing writes to a slot."""
        return self.gone and self._lifetime.has_ended

    def await_settled(self, timeout_s: float) -> bool:
        """Wait until it has settled; return whether it has."""
        deadline = time.monotonic() + timeout_s
        while not (settled := self.has_settled) and time.monotonic() < deadline:
            time.sleep(_SETTLED_LOOK_S)
        return settled

    @property
    def rang(self) -> bool:
        """Whether the child has rung for frames that were not read; they may arrive slightly later."""
        return self._bell.count != self._unpacker.frames

    def _note_alive(self) -> None:
        self._heard_at, self._asked_s = time.monotonic(), None


@dataclass(frozen=True, slots=True)
class SharedBacking:
    """A shared file behind a piece of memory.

    Attributes:
        fd: An open descriptor of it; the holder closes it.
        offset: Offset in the file of the page with the first byte (a multiple of the page size).
        skip: Bytes between ``offset`` and the first byte of the memory.
        size_bytes: Length of the memory.
    """

    fd: int
    offset: int
    skip: int
    size_bytes: int


def find_backing(memory: memoryview) -> SharedBacking | None:
    """Return the file that backs a piece of memory; None if it is private or can't be opened.

    ``/proc/self/maps`` names the file of an address; device and inode are compared, because another file may have that
    name now. A file without a name (memfd, or removed) is found among the descriptors of this process.
    """
    if not memory.nbytes:
        return None
    start = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
    end = start + memory.nbytes
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            low, high = (int(part, 16) for part in fields[0].split("-"))
            if low <= start < high:
                if end > high or not fields[1].endswith("s") or "w" not in fields[1]:
                    return None
                path = fields[5].strip() if len(fields) == 6 else ""
                fd = _open_inode(path, fields[3], int(fields[4]))
                page_start = start - start % os.sysconf("SC_PAGESIZE")
                if fd is None:
                    return None
                return SharedBacking(fd, int(fields[2], 16) + page_start - low, start - page_start, memory.nbytes)
    return None


def _error_of(failure: Opened) -> Exception:
    """Make the error that the child's I/O side raised."""
    kind = getattr(errors, failure.error, None)
    if isinstance(kind, type) and issubclass(kind, errors.BackendError):
        error = kind.__new__(kind, failure.text)
        error.args = (failure.text,)
        return error
    if isinstance(kind, type) and issubclass(kind, errors.KVStoreError):
        return kind(failure.text)
    return errors.KVStoreError(f"{failure.error}: {failure.text}")


def _open_inode(path: str, device: str, inode: int) -> int | None:
    candidates = [path] if path.startswith("/") and not path.endswith(" (deleted)") else []
    candidates += [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    for candidate in candidates:
        try:
            found = os.stat(candidate)
            if found.st_ino != inode or f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}" != device:
                continue
            return os.open(candidate, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # A descriptor that was closed meanwhile, or cannot be reopened.
    return None
