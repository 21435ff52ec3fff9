"""The process host: an I/O half in a child process that maps the same region.

With a GIL of its own, the I/O half and a busy scheduler don't wait for each other. The channel is used like the thread
host's; in addition it reports :class:`HostDown` and :class:`HostUp`, because a process can end.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import HostClosedError
from kvstore.runtime.child_connection import (
    END_TIMEOUT_S,
    KILLED_TIMEOUT_S,
    LOOK_ANYWAY_S,
    ChildConnection,
    ProcessSpec,
)
from kvstore.runtime.messages import FromIO, HostDown, HostUp, ToIO
from kvstore.runtime.wire import Closed, Opened, ParentMessage, Ping, Pong, Stop, pack

__all__ = ["ProcessChannel"]

logger = logging.getLogger("kvstore.runtime")

_BACKLOG_BYTES_MAX = 64 << 20
"""Unread bytes after which a child counts as stopped."""

_OPEN_TIMEOUT_S = 60.0
_RESTART_PAUSE_S = 0.25
_RESTART_PAUSE_S_MAX = 30.0


@dataclass(slots=True)
class _Loss:
    """A child that was abandoned.

    Attributes:
        connection: Its connection.
        reason: Reason, for messages.
        try_at: Time of the next attempt to start a thread for the restart, monotonic; 0 before the first.
        is_told: Whether HostDown was reported.
    """

    connection: ChildConnection
    reason: str
    try_at: float = 0.0
    is_told: bool = False

    def tell(self) -> HostDown:
        """Return the report that no slot is touched any more."""
        self.is_told = True
        return HostDown(f"the I/O process is gone: {self.reason}")


class ProcessChannel:
    """The channel of a tier whose I/O half runs in a child process.

    When the child ends unexpectedly, the channel reports HostDown once no slot is touched any more, starts another
    child with growing pauses, and reports HostUp. Messages sent in between are dropped; their sender fails their jobs
    at HostDown.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        self._spec = spec
        self._connection: ChildConnection | None = None
        self._successor: ChildConnection | None = None
        self._incoming: deque[FromIO] = deque()
        self._outgoing = bytearray()
        self._looked_at = 0.0
        self._closed = False
        self._stopping = threading.Event()
        # A loss that waits for its restart thread.
        self._loss: _Loss | None = None
        self._restarter: threading.Thread | None = None

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    @property
    def pid(self) -> int | None:
        """Process id of the child, if there is one."""
        return self._connection.pid if self._connection else None

    def open(self, timeout_s: float) -> None:
        """See :meth:`kvstore.runtime.messages.Channel.open`; starts the child."""
        connection = ChildConnection(self._spec)
        self._incoming.extend(connection.await_open(timeout_s, self._stopping))
        self._connection = connection

    def send(self, messages: Sequence[ToIO]) -> None:
        """See :meth:`kvstore.runtime.messages.Channel.send`; without a child at work the messages are dropped."""
        if self._closed:
            raise HostClosedError("The tier is closed; open a new one to go on.")
        if self._connection is not None:
            self._write(messages)

    def receive(self) -> FromIO | None:
        """See :meth:`kvstore.runtime.messages.Channel.receive`."""
        if not self._incoming:
            self._look()
        if not self._incoming:
            return None
        message = self._incoming.popleft()
        if isinstance(message, HostUp):
            # The sender knows of the new child from here on, so the child gets messages only from here on.
            self._connection, self._successor = self._successor, None
        return message

    def hurry(self) -> None:
        """See :meth:`kvstore.runtime.messages.Channel.hurry`; a child that does not answer soon is killed."""
        self._watch(is_late=True)

    def wait(self, timeout_s: float) -> bool:
        """See :meth:`kvstore.runtime.messages.Channel.wait`."""
        deadline = time.monotonic() + timeout_s
        while not self._incoming and (left := deadline - time.monotonic()) > 0:
            self._push()  # May detect the end of the child.
            connection = self._connection
            if connection is None:
                self._see_to_loss()
                time.sleep(min(left, 0.005))
            elif connection.wait(min(left, LOOK_ANYWAY_S)):
                self._read()
            else:
                self._watch()
        return bool(self._incoming)

    def close(self, timeout_s: float) -> bool:
        """See :meth:`kvstore.runtime.messages.Channel.close`; a child that does not end in time is killed."""
        if self._closed:
            return True
        self._closed = True
        self._stopping.set()
        deadline = time.monotonic() + timeout_s
        ended = True
        if self._restarter is not None:
            # It may be waiting for a child that can't be killed; then it starts no other.
            self._restarter.join(KILLED_TIMEOUT_S)
            ended = not self._restarter.is_alive()
        if self._connection is None:
            # A new child that was not reported yet closes its medium like any other.
            self._connection, self._successor = self._successor, None
        # Taken, so that no restart thread is started for it.
        loss, self._loss = self._loss, None
        if loss is not None:
            loss.connection.end()
            ended = loss.connection.await_settled(KILLED_TIMEOUT_S) and ended
        if (last := self._connection) is not None:
            self._write([Stop()])
            self._hear_out(last, deadline)
            # A child that has closed gets time to exit; one that runs past the deadline is killed at once.
            by_itself = last.end(0.0 if self._connection else END_TIMEOUT_S)
            self._connection = None
            if not (by_itself and last.has_closed):
                ended = last.await_settled(KILLED_TIMEOUT_S) and ended
        if ended:
            # Otherwise kept: a running restart must not pass on another file with the same number.
            os.close(self._spec.backing.fd)
        return ended

    def _hear_out(self, last: ChildConnection, deadline: float) -> None:
        """Receive messages until the child has closed or ended, which unsets the connection."""
        while self._connection is not None and (left := deadline - time.monotonic()) > 0:
            last.wait(min(left, LOOK_ANYWAY_S))
            self._push()
            self._read()

    def _look(self) -> None:
        if self._connection is None:
            self._see_to_loss()
            return
        now = time.monotonic()
        if self._connection.rang or now - self._looked_at > LOOK_ANYWAY_S:
            self._looked_at = now
            self._push()
            if self._connection is not None:
                self._read()
            self._watch()

    def _watch(self, *, is_late: bool = False) -> None:
        """Ask a quiet child for a sign of life; abandon it if it does not answer."""
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
        """Note the end of the child; a thread of its own restarts it."""
        connection, self._connection = self._connection, None
        self._outgoing.clear()
        if connection is None or self._closed:
            return  # close() ends it.
        logger.warning("The I/O process of tier %s is gone (%s); starting another", self._spec.name, reason)
        self._loss = _Loss(connection, reason)
        self._see_to_loss()

    def _see_to_loss(self) -> None:
        """Start the restart thread; while none can be started, report HostDown from here."""
        loss, now = self._loss, time.monotonic()
        if loss is None:
            return
        if now >= loss.try_at:
            try:
                restarter = threading.Thread(target=self._restart, args=(loss,), name="kvstore-io-restart", daemon=True)
                restarter.start()
            # A limit of threads or memory, which may be temporary.
            except (RuntimeError, MemoryError) as error:
                if not loss.try_at:
                    loss.connection.kill()
                    logger.warning(
                        "Tier %s stays down: there is no thread to start its I/O process with (%s). It is tried again "
                        "until there is; give this process more threads or memory.",
                        self._spec.name,
                        error,
                    )
                loss.try_at = now + _RESTART_PAUSE_S
            else:
                self._restarter, self._loss = restarter, None
                return
        # Its jobs are not kept waiting for a thread.
        if not loss.is_told and loss.connection.has_settled:
            self._incoming.append(loss.tell())

    def _restart(self, loss: _Loss) -> None:
        loss.connection.end(for_ever=True)
        if not loss.is_told:
            # Not cut short by close(): afterwards the slots belong to the scheduler again.
            loss.connection.await_settled(math.inf)
            self._incoming.append(loss.tell())
        pause_s = _RESTART_PAUSE_S
        while not self._stopping.is_set():
            successor = None
            try:
                successor = ChildConnection(self._spec)
                said = successor.await_open(_OPEN_TIMEOUT_S, self._stopping)
            # Any failure (no memory, process or thread): without another attempt the tier would miss for ever.
            except Exception as error:
                logger.warning("The I/O process of tier %s does not start: %r", self._spec.name, error)
                if successor is not None:
                    # Two children must not use one medium.
                    successor.end()
                self._stopping.wait(pause_s)
                pause_s = min(_RESTART_PAUSE_S_MAX, 2 * pause_s)
                continue
            self._successor = successor
            self._incoming.extend([HostUp(), *said])
            return
