"""The process host: an I/O half in a child process that maps the same region.

Its own GIL is what it is for: a busy scheduler and a busy I/O half no longer wait for each other. The channel is used
exactly like the thread host's; besides, it may say :class:`HostDown` and :class:`HostUp`, as a process can die.
"""

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
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore import errors
from kvstore.errors import BackendUnavailableError, HostClosedError
from kvstore.runtime.bell import Bell
from kvstore.runtime.messages import FromIO, HostDown, HostUp, ToIO
from kvstore.runtime.shared_memory import SharedBacking
from kvstore.runtime.wire import ChildMessage, Closed, Opened, ParentMessage, Ping, Pong, Start, Stop, Unpacker, pack

__all__ = ["ProcessChannel", "ProcessSpec"]

logger = logging.getLogger("kvstore.runtime")

_READ_BYTES = 1 << 20
_BACKLOG_BYTES_MAX = 64 << 20
"""Bytes that a child has not read; one that lets so many pile up has stopped working."""

_LOOK_ANYWAY_S = 0.1
"""Pause between looks at the socket without a ring of the bell: a child that was killed rings no more."""

_QUIET_S = 2.0
"""A child that has said nothing for so long is asked whether its loop runs."""

_ANSWER_TIMEOUT_S = 10.0
"""A loop that does not answer for so long is stopped or stuck: longer than starting, snapshots and a busy machine take.
A medium that hangs is another matter, its loop answers."""

_SETTLE_S = 0.25
"""Pause between the end of a killed child and the reuse of its slots: the kernel may finish direct I/O that io_uring
had in flight after the process itself is gone, which takes a device milliseconds."""

_KILLED_TIMEOUT_S = 5.0
"""What close waits for a killed child; one that is stuck in the kernel, as on a dead mount, is not waited for."""

_END_TIMEOUT_S = 1.0
"""What a child that has closed its medium, or could not open it, gets to end by itself."""

_START_TIMEOUT_S = 5.0
_OPEN_TIMEOUT_S = 60.0
_RESTART_PAUSE_S = 0.25
_RESTART_PAUSE_S_MAX = 30.0


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What a child runs.

    Attributes:
        target: ``"module:function"`` that makes the I/O side; see :class:`kvstore.runtime.wire.Start`.
        payload: Its first argument: plain values only.
        backing: The region that it maps; the channel closes its descriptor.
        name: Name of the tier, for messages.
    """

    target: str
    payload: dict[str, Any]
    backing: SharedBacking
    name: str


class _Connection:
    """A running child, its socket and its bell.

    Attributes:
        has_closed: Whether the child has said that its medium is closed: nothing of it touches a slot any more.
        heard_at: When it last said something, by the monotonic clock.
        asked_s: How long it has been asked whether its loop runs, and looked at; None if it has said something since.
        looked_at: When it was last looked at.
        is_full: Whether its socket took less than there was to send.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        self._name = spec.name
        self.has_closed = False
        self.heard_at = time.monotonic()
        self.asked_s: float | None = None
        self.looked_at = 0.0
        self.is_full = False
        self.socket, theirs = socket.socketpair()
        try:
            self.bell = Bell()
        except BaseException:
            self.socket.close()
            theirs.close()
            raise
        self.unpacker = Unpacker(ChildMessage)
        fds = (theirs.fileno(), spec.backing.fd, self.bell.fd)
        arguments = [str(number) for number in (*fds, os.getpid())]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvstore.runtime.child", *arguments],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                # Where this process found kvstore, the child must find it too, installed or not.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        except BaseException:
            self.socket.close()
            self.bell.close()
            raise
        finally:
            theirs.close()
        backing = spec.backing
        start = Start(spec.target, spec.payload, backing.offset, backing.skip, backing.size_bytes, sys.path)
        self.socket.settimeout(_START_TIMEOUT_S)
        try:
            self.socket.sendall(pack([start]))
        except OSError as error:
            self.end(killed_timeout_s=_KILLED_TIMEOUT_S)
            raise BackendUnavailableError("its I/O process ended at once", backend=self._name) from error
        self.socket.setblocking(False)

    def read(self) -> list[ChildMessage] | None:
        """Return what has arrived; None at the end."""
        try:
            data = self.socket.recv(_READ_BYTES)
            self.note_alive()
            return self.unpacker.feed(data) if data else None
        except (BlockingIOError, InterruptedError):
            return []
        except (OSError, ValueError) as error:
            logger.debug("The socket of an I/O process failed: %r", error)
            return None

    def write(self, data: bytearray) -> int:
        """Send what the socket takes; return how many bytes.

        Raises:
            BlockingIOError: It takes nothing now.
            OSError: The child has ended.
        """
        was_full, self.is_full = self.is_full, True
        sent = self.socket.send(data)
        self.is_full = sent < len(data)
        if was_full:
            # There is room because it has read.
            self.note_alive()
        return sent

    def note_alive(self) -> None:
        """Note a sign of life."""
        self.heard_at, self.asked_s = time.monotonic(), None

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to read, or the end; return whether there is."""
        # Not select(): it knows no descriptor above 1023, and an engine may well have more.
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def await_open(self, timeout_s: float, stopping: threading.Event) -> list[FromIO]:
        """Wait until the I/O side is open; return what it has said besides.

        Raises:
            KVStoreError: It could not be opened, did not answer in time, or nobody wants it any more.
        """
        deadline = time.monotonic() + timeout_s
        said: list[FromIO] = []
        opened = False
        while not opened and time.monotonic() < deadline and not stopping.is_set():
            self.wait(_LOOK_ANYWAY_S)
            messages = self.read()
            if messages is None:
                break
            for message in messages:
                if isinstance(message, Opened):
                    if message.error:
                        self.end(_END_TIMEOUT_S, killed_timeout_s=_KILLED_TIMEOUT_S)
                        raise _error_of(message)
                    opened = True
                elif not isinstance(message, (Closed, Pong)):
                    said.append(message)
        if not opened:
            # It has no job yet, and so no slot: one that can't be killed, its medium being stuck, is left to itself.
            self.end(killed_timeout_s=_KILLED_TIMEOUT_S)
            raise BackendUnavailableError("its I/O process did not start", backend=self._name)
        return said

    def end(self, timeout_s: float = 0.0, *, killed_timeout_s: float | None = None) -> bool:
        """Wait for the child's end, kill it after that and wait again; return whether it ended by itself.

        With ``killed_timeout_s`` it may still be there, which :attr:`gone` tells.
        """
        by_itself = True
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            by_itself = False
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(killed_timeout_s)
        self.socket.close()
        self.bell.close()
        return by_itself

    @property
    def gone(self) -> bool:
        """Whether the child has ended."""
        return self.process.poll() is not None


class ProcessChannel:
    """The channel of a tier whose I/O half runs in a child process.

    When the child ends unasked, the channel says HostDown once it is certain that no slot is touched any more, starts
    another one with growing pauses, and says HostUp. What is sent in between is dropped: its sender fails it when it
    hears HostDown.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        self._spec = spec
        self._connection: _Connection | None = None
        self._successor: _Connection | None = None
        self._incoming: deque[FromIO] = deque()
        self._outgoing = bytearray()
        self._looked_at = 0.0
        self._closed = False
        self._stopping = threading.Event()
        self._restarter: threading.Thread | None = None

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    @property
    def pid(self) -> int | None:
        """Process id of the child, if there is one."""
        return self._connection.process.pid if self._connection else None

    def open(self, timeout_s: float) -> None:
        """See :meth:`kvstore.runtime.channel.Channel.open`; starts the child."""
        connection = _Connection(self._spec)
        self._incoming.extend(connection.await_open(timeout_s, self._stopping))
        self._connection = connection

    def send(self, messages: Sequence[ToIO]) -> None:
        """See :meth:`kvstore.runtime.channel.Channel.send`; without a child at work the messages are dropped."""
        if self._closed:
            raise HostClosedError("The tier is closed; open a new one to go on.")
        if self._connection is not None:
            self._write(messages)

    def receive(self) -> FromIO | None:
        """See :meth:`kvstore.runtime.channel.Channel.receive`."""
        if not self._incoming:
            self._look()
        if not self._incoming:
            return None
        message = self._incoming.popleft()
        if isinstance(message, HostUp):
            # From here on the sender knows that a new child is there, so only from here on it may be given work.
            self._connection, self._successor = self._successor, None
        return message

    def wait(self, timeout_s: float) -> bool:
        """See :meth:`kvstore.runtime.channel.Channel.wait`."""
        deadline = time.monotonic() + timeout_s
        while not self._incoming and (left := deadline - time.monotonic()) > 0:
            self._push()  # Which may show that the child is gone.
            connection = self._connection
            if connection is None:
                time.sleep(min(left, 0.005))
            elif connection.wait(min(left, _LOOK_ANYWAY_S)):
                self._read()
            else:
                self._watch()
        return bool(self._incoming)

    def close(self, timeout_s: float) -> bool:
        """See :meth:`kvstore.runtime.channel.Channel.close`; a child that does not end in time is killed."""
        if self._closed:
            return True
        self._closed = True
        self._stopping.set()
        deadline = time.monotonic() + timeout_s
        ended = True
        if self._restarter is not None:
            # It may be waiting for a child that can't be killed; if so, it starts no other.
            self._restarter.join(_KILLED_TIMEOUT_S)
            ended = not self._restarter.is_alive()
        if self._connection is None:
            # A new child that nobody has heard of yet is at work, and closes its medium like any other.
            self._connection, self._successor = self._successor, None
        if (last := self._connection) is not None:
            self._write([Stop()])
            self._hear_out(last, deadline)
            # What has ended has its status to leave; what goes on after the deadline is killed at once.
            by_itself = last.end(0.0 if self._connection else _END_TIMEOUT_S, killed_timeout_s=_KILLED_TIMEOUT_S)
            self._connection = None
            if not (by_itself and last.has_closed):
                time.sleep(_SETTLE_S)
                ended = ended and last.gone
        if ended:
            # Kept otherwise: a restart that is still under way must not pass on another file under its number.
            os.close(self._spec.backing.fd)
        return ended

    def _hear_out(self, last: _Connection, deadline: float) -> None:
        """Take in what a child says until it has closed or ended, which unsets the connection."""
        while self._connection is not None and (left := deadline - time.monotonic()) > 0:
            last.wait(min(left, _LOOK_ANYWAY_S))
            self._push()
            self._read()

    def _look(self) -> None:
        if self._connection is None:
            return
        now = time.monotonic()
        # An event loop may send a frame a little after it was written, so a ring counts until its frame has come.
        if self._connection.bell.count != self._connection.unpacker.frames or now - self._looked_at > _LOOK_ANYWAY_S:
            self._looked_at = now
            self._push()
            if self._connection is not None:
                self._read()
            self._watch()

    def _watch(self) -> None:
        """Ask a child that is quiet whether its loop runs, and give it up if it does not say so.

        Only time in which somebody looks counts: a scheduler that was away for long has left the child half a message,
        or was stopped together with it.
        """
        connection, now = self._connection, time.monotonic()
        if connection is None:
            return
        passed_s, connection.looked_at = now - connection.looked_at, now
        if connection.asked_s is not None:
            connection.asked_s += min(passed_s, _QUIET_S)
            if connection.asked_s > _ANSWER_TIMEOUT_S:
                self._lost("it does not answer")
        elif now - connection.heard_at > _QUIET_S:
            connection.asked_s = 0.0
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
        if len(self._outgoing) > _BACKLOG_BYTES_MAX:
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
        """Note the child's end; what follows takes time and is done by a thread of its own."""
        connection, self._connection = self._connection, None
        self._outgoing.clear()
        if connection is None or self._closed:
            return  # close() sees to its end.
        logger.warning("The I/O process of tier %s is gone (%s); starting another", self._spec.name, reason)
        self._restarter = threading.Thread(
            target=self._restart, args=(connection, reason), name="kvstore-io-restart", daemon=True
        )
        self._restarter.start()

    def _restart(self, lost: _Connection, reason: str) -> None:
        lost.end()
        # Not cut short by close(): the slots are the scheduler's again when this is over.
        time.sleep(_SETTLE_S)
        self._incoming.append(HostDown(f"the I/O process is gone: {reason}"))
        pause_s = _RESTART_PAUSE_S
        while not self._stopping.is_set():
            successor = None
            try:
                successor = _Connection(self._spec)
                said = successor.await_open(_OPEN_TIMEOUT_S, self._stopping)
            # Whatever it is (no memory, no process, no thread): without another try the tier would miss for ever.
            except Exception as error:
                logger.warning("The I/O process of tier %s does not start: %r", self._spec.name, error)
                if successor is not None:
                    # Two must not be at work on one medium.
                    successor.end(killed_timeout_s=_KILLED_TIMEOUT_S)
                self._stopping.wait(pause_s)
                pause_s = min(_RESTART_PAUSE_S_MAX, 2 * pause_s)
                continue
            self._successor = successor
            self._incoming.extend([HostUp(), *said])
            return


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
