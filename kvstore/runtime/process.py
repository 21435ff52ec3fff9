"""The process host: an I/O half in a child process that maps the same region.

Because the I/O half has its own GIL, it and a busy scheduler don't wait for each other. The channel has the same
interface as the thread host's; in addition it reports :class:`HostDown` and :class:`HostUp`, because a process can end.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from kvstore import errors
from kvstore.errors import BackendUnavailableError, HostClosedError
from kvstore.runtime.forks import OF_PARENT, leave_at_fork
from kvstore.runtime.lifetime import Lifetime
from kvstore.runtime.messages import FromIO, HostDown, HostUp, ToIO
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
)

logger = logging.getLogger("kvstore.runtime")

_READ_BYTES: Final = 1 << 20

_READ_INTERVAL_S: Final = 0.1
"""Maximum time between two reads. A killed child no longer rings the bell."""

_START_TIMEOUT_S: Final = 5.0
_OPEN_TIMEOUT_S: Final = 60.0
_RESTART_PAUSE_S: Final = 0.25
_RESTART_PAUSE_S_MAX: Final = 30.0

_END_TIMEOUT_S: Final = 1.0
"""Time for a child to exit after it closed its medium or failed to open it."""

_SETTLED_CHECK_S: Final = 0.005
"""Polling interval for the end of a killed child's I/O, which usually takes milliseconds."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of child processes that are no options; tests pass smaller ones."""

    # Unread bytes beyond which a child counts as stopped.
    backlog_bytes_max: int = 64 << 20
    # Time limit for the end of a killed child, which may be stuck in the kernel on a dead mount.
    killed_timeout_s: float = 5.0
    # Silence after which a child is pinged.
    quiet_s: float = 2.0
    # Time limit for the answer to a ping: longer than delays by a start or a busy machine. A child with a hanging
    # medium still answers.
    answer_timeout_s: float = 10.0
    # Both limits while a load is late: a running loop reports a load by its deadline, unless the medium hangs.
    late_quiet_s: float = 0.25
    late_answer_timeout_s: float = 1.0


LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class SharedBacking:
    """The shared file behind a piece of memory."""

    fd: int  # Open descriptor; the holder closes it.
    offset: int  # A multiple of the page size. The memory begins in the file at ``offset + skip``.
    skip: int
    size_bytes: int  # Length of the memory.


def find_backing(memory: memoryview) -> SharedBacking | None:
    """Return the file that backs a piece of memory; None if it is private or can't be opened.

    ``/proc/self/maps`` gives the file of an address; device and inode are compared, because another file may have that
    name by now. A file without a name (memfd, or removed) is found among the descriptors of this process.
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


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Parameters of a child process; see :class:`kvstore.runtime.wire.Start` for the first two."""

    target: str
    payload: dict[str, Any] = field(repr=False)  # May contain secrets.
    backing: SharedBacking  # The channel closes its descriptor.
    name: str  # Name of the tier, for messages.
    limits: Limits = LIMITS


class ProcessChannel:
    """The channel of a tier whose I/O half runs in a child process.

    When the child ends unexpectedly, a keeper thread waits for the end of its I/O, reports HostDown, starts another
    child with growing pauses, and reports HostUp. Messages sent in between are dropped; their sender fails their jobs
    at HostDown.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        self._spec = spec
        self._connection: ChildConnection | None = None
        self._successor: ChildConnection | None = None
        self._of_parent: tuple[ChildConnection | None, ...] = ()
        self._incoming: deque[FromIO] = deque()
        self._outgoing = bytearray()
        self._looked_at = 0.0
        self.closed = False
        self._stopping = threading.Event()
        self._lost_children: queue.SimpleQueue[tuple[ChildConnection, str] | None] = queue.SimpleQueue()
        self._keeper: threading.Thread | None = None
        self._remedy = "The tier is closed; open a new one to continue."
        leave_at_fork(self)

    def __repr__(self) -> str:
        """Show the tier, its child and how much the child has not read."""
        return f"ProcessChannel({self._spec.name!r}, {self._connection}, {len(self._outgoing)} bytes unsent)"

    @property
    def pid(self) -> int | None:
        return self._connection.pid if self._connection else None

    def open(self, timeout_s: float) -> None:
        # Started now, because no thread may be available when a child is lost.
        keeper = threading.Thread(target=self._replace_lost_children, name="kvstore-io-keeper", daemon=True)
        keeper.start()
        self._keeper = keeper
        connection = ChildConnection(self._spec)
        self._incoming.extend(connection.await_open(timeout_s, self._stopping))
        self._connection = connection

    def send(self, messages: Sequence[ToIO]) -> None:
        """Without a running child, messages are dropped."""
        if self.closed:
            raise HostClosedError(self._remedy)
        if self._connection is not None:
            self._write(messages)

    def receive(self) -> FromIO | None:
        if not self._incoming:
            self._receive_some()
        if not self._incoming:
            return None
        message = self._incoming.popleft()
        if isinstance(message, HostUp):
            # The new child gets messages only after the sender has received HostUp.
            self._connection, self._successor = self._successor, None
        return message

    @property
    def has_answers(self) -> bool:
        connection = self._connection
        # The socket may be closed at any time by the thread that reads it.
        with contextlib.suppress(OSError, ValueError):
            return bool(self._incoming) or (connection is not None and connection.wait(0))
        return True

    def hurry(self) -> None:
        """A child that does not answer soon is killed."""
        self._watch(is_late=True)

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self._incoming and (left := deadline - time.monotonic()) > 0:
            self._push()  # May detect the end of the child.
            connection = self._connection
            if connection is None:
                time.sleep(min(left, 0.005))
            elif connection.wait(min(left, _READ_INTERVAL_S)):
                self._read()
            else:
                self._watch()
        return bool(self._incoming)

    def close(self, timeout_s: float) -> bool:
        """A child that does not end in time is killed."""
        if self.closed:
            return True
        self.closed = True
        self._stopping.set()
        deadline = time.monotonic() + timeout_s
        ended = True
        if self._keeper is not None:
            # The keeper may be waiting for a child that can't be killed; then it starts no other.
            self._lost_children.put(None)
            self._keeper.join(self._spec.limits.killed_timeout_s)
            ended = not self._keeper.is_alive()
        if self._connection is None:
            # A new child must close its medium, even if its HostUp was not received.
            self._connection, self._successor = self._successor, None
        if (last := self._connection) is not None:
            self._write([Stop()])
            # Until the child has closed or ended, which unsets the connection.
            while self._connection is not None and (left := deadline - time.monotonic()) > 0:
                last.wait(min(left, _READ_INTERVAL_S))
                self._push()
                self._read()
            # A closed child gets time to exit; a child past the deadline is killed immediately.
            by_itself = last.end(0.0 if self._connection else _END_TIMEOUT_S)
            self._connection = None
            if not (by_itself and last.has_closed):
                ended = last.await_settled(self._spec.limits.killed_timeout_s) and ended
        if ended:
            # Otherwise kept open: a running restart must not pass another file with the same number to a child.
            os.close(self._spec.backing.fd)
        return ended

    def leave_to_parent(self) -> None:
        """Close this copy in a forked process; the parent's channel keeps using the same socket."""
        self.closed, self._remedy = True, OF_PARENT
        # Kept, because the end of a connection ends the child.
        self._of_parent = self._connection, self._successor
        self._connection = self._successor = None

    def _receive_some(self) -> None:
        now = time.monotonic()
        if self._connection is not None and (self._connection.rang or now - self._looked_at > _READ_INTERVAL_S):
            self._looked_at = now
            self._push()
            if self._connection is not None:
                self._read()
            self._watch()

    def _watch(self, *, is_late: bool = False) -> None:
        """Ping a quiet child; abandon it if it does not answer."""
        sign = "well" if self._connection is None else self._connection.watch(is_late=is_late)
        if sign == "stuck":
            self._lost("it does not answer")
        elif sign == "ask":
            self._write([Ping()])

    def _read(self) -> None:
        if self._connection is None:
            return
        messages = self._connection.read()
        if messages is None:
            self._lost("it ended")
            return
        for message in messages:
            if isinstance(message, Closed):
                self._connection.has_closed = True
                self._lost("it has closed")
                return
            if not isinstance(message, (Opened, Pong)):
                self._incoming.append(message)

    def _write(self, messages: Sequence[ParentMessage]) -> None:
        self._outgoing += pack(messages)
        self._push()
        if len(self._outgoing) > self._spec.limits.backlog_bytes_max:
            self._lost("it does not read")

    def _push(self) -> None:
        if self._connection is None or not self._outgoing:
            return
        try:
            del self._outgoing[: self._connection.write(self._outgoing)]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._lost("its socket is closed")

    def _lost(self, reason: str) -> None:
        """Record the loss of the child; the keeper replaces it."""
        connection, self._connection = self._connection, None
        self._outgoing.clear()
        if connection is None or self.closed:
            return  # close() ends it.
        logger.warning("The I/O process of tier %s is gone (%s); starting another", self._spec.name, reason)
        self._lost_children.put((connection, reason))

    def _replace_lost_children(self) -> None:
        while (lost := self._lost_children.get()) is not None:
            connection, reason = lost
            connection.end(for_ever=True)
            # Without a timeout, even during close(): HostDown returns the slots to the scheduler.
            connection.await_settled(math.inf)
            self._incoming.append(HostDown(f"the I/O process is gone: {reason}"))
            self._start_successor()

    def _start_successor(self) -> None:
        pause_s = _RESTART_PAUSE_S
        while not self._stopping.is_set():
            successor = None
            try:
                successor = ChildConnection(self._spec)
                others = successor.await_open(_OPEN_TIMEOUT_S, self._stopping)
            # Any failure (no memory, process or thread): without another attempt, the tier would miss forever.
            except Exception as error:
                logger.warning("The I/O process of tier %s does not start: %r", self._spec.name, error)
                if successor is not None:
                    # Two children must not use one medium.
                    successor.end()
                self._stopping.wait(pause_s)
                pause_s = min(_RESTART_PAUSE_S_MAX, 2 * pause_s)
                continue
            self._successor = successor
            self._incoming.extend([HostUp(), *others])
            return


class ChildConnection:
    """A child process, its socket and its bell. Used by one thread at a time.

    Raises:
        BackendUnavailableError: The child ended immediately.
        OSError: No socket, memory or process is available.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        self._name = spec.name
        self._limits = spec.limits
        self.has_closed = False  # Whether the child reported its medium as closed; it then no longer touches slots.
        self._answered_at = time.monotonic()
        self._looked_at = 0.0
        self._asked_s: float | None = None  # Time since an unanswered ping, as counted by ``watch``; None without one.
        self._is_full = False  # Whether the last write to the socket was incomplete.
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
                # -P excludes the working directory, which may contain another module of the same name.
                [sys.executable, "-P", "-m", "kvstore.runtime.child", *arguments],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                env=os.environ | _environment(),
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
            raise BackendUnavailableError("its I/O process ended immediately", backend=self._name) from error
        self._socket.setblocking(False)

    def __repr__(self) -> str:
        """Show the child and what was received from it."""
        return f"ChildConnection(pid {self.pid}, {self._unpacker})"

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
        """Send as much as the socket accepts; return the number of bytes.

        Raises:
            BlockingIOError: The socket is full.
            OSError: The child has ended.
        """
        was_full, self._is_full = self._is_full, True
        sent = self._socket.send(data)
        self._is_full = sent < len(data)
        if was_full:
            # The socket has room again, so the child has read.
            self._note_alive()
        return sent

    def wait(self, timeout_s: float) -> bool:
        """Wait for a message or the end of the socket; return False at the timeout."""
        # poll, because select() supports no descriptors above 1023, and an engine may have more.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def await_open(self, timeout_s: float, stopping: threading.Event) -> list[FromIO]:
        """Wait until the I/O side is open; return its other messages.

        Raises:
            KVStoreError: It could not be opened or did not answer in time, or ``stopping`` was set.
        """
        deadline = time.monotonic() + timeout_s
        others: list[FromIO] = []
        opened = False
        while not opened and time.monotonic() < deadline and not stopping.is_set():
            self.wait(_READ_INTERVAL_S)
            messages = self.read()
            if messages is None:
                break
            for message in messages:
                if isinstance(message, Opened):
                    if message.error:
                        self.end(_END_TIMEOUT_S)
                        raise _error_of(message)
                    opened = True
                elif not isinstance(message, (Closed, Pong)):
                    others.append(message)
        if not opened:
            # It has no job, so it uses no slot. If its medium is stuck, it can't be killed; don't wait for its end.
            self.end()
            raise BackendUnavailableError("its I/O process did not start", backend=self._name)
        self._is_open = True
        return others

    def watch(self, *, is_late: bool = False) -> Literal["well", "ask", "stuck"]:
        """Return "ask" if the caller must send a ``Ping``, "stuck" if the last one was not answered in time.

        To be called often. Any message counts as an answer. Between two calls, at most the limit of silence counts,
        because the scheduler itself may have been stopped. A late load shortens the limits.
        """
        quiet_s, answer_s = self._limits.quiet_s, self._limits.answer_timeout_s
        if is_late:
            quiet_s, answer_s = self._limits.late_quiet_s, self._limits.late_answer_timeout_s
        now = time.monotonic()
        passed_s, self._looked_at = now - self._looked_at, now
        if self._asked_s is not None:
            self._asked_s += min(passed_s, quiet_s)
            return "stuck" if self._asked_s > answer_s else "well"
        if now - self._answered_at <= quiet_s:
            return "well"
        self._asked_s = 0.0
        return "ask"

    def end(self, timeout_s: float = 0.0, *, for_ever: bool = False) -> bool:
        """Wait for the child's end, kill it after the timeout and wait again; return whether it ended by itself.

        A killed child may still run afterwards, unless ``for_ever`` is set.
        """
        by_itself = True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            by_itself = False
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(None if for_ever else self._limits.killed_timeout_s)
        self._socket.close()
        self._bell.close()
        if self.has_closed or not self._is_open:
            # It has no I/O in flight.
            self._lifetime.close()
        return by_itself

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def gone(self) -> bool:
        return self._process.poll() is not None

    @property
    def has_settled(self) -> bool:
        """Whether the child and its kernel I/O have ended, so that nothing writes to slots any more."""
        return self.gone and self._lifetime.has_ended

    def await_settled(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not (settled := self.has_settled) and time.monotonic() < deadline:
            time.sleep(_SETTLED_CHECK_S)
        return settled

    @property
    def rang(self) -> bool:
        """Whether the bell has rung for unread frames, which may arrive slightly later."""
        return self._bell.count != self._unpacker.frames

    def _note_alive(self) -> None:
        self._answered_at, self._asked_s = time.monotonic(), None


def _environment() -> dict[str, str]:
    """Return the variables of a child that differ from those of this process."""
    # The child finds kvstore where this process found it, installed or not; "" is a working directory of that time.
    home = str(Path(errors.__file__).parents[1])
    # numpy would start a thread for each processor, or end the process where a container allows no more threads.
    return {"PYTHONPATH": os.pathsep.join(path or home for path in sys.path), "OPENBLAS_NUM_THREADS": "1"}


def _error_of(failure: Opened) -> Exception:
    """Recreate the exception of the child's I/O side."""
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
            continue  # The descriptor was closed meanwhile, or cannot be reopened.
    return None
