"""The parent's connection with a child process: the process itself, the socket to it and its bell."""

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

from kvstore import errors
from kvstore.errors import BackendUnavailableError
from kvstore.runtime.bell import Bell
from kvstore.runtime.lifetime import Lifetime
from kvstore.runtime.messages import FromIO
from kvstore.runtime.shared_memory import SharedBacking
from kvstore.runtime.wire import ChildMessage, Closed, Opened, Pong, Start, Unpacker, pack

__all__ = ["END_TIMEOUT_S", "KILLED_TIMEOUT_S", "LOOK_ANYWAY_S", "ChildConnection", "ProcessSpec"]

logger = logging.getLogger("kvstore.runtime")

_READ_BYTES: Final = 1 << 20

LOOK_ANYWAY_S: Final = 0.1
"""Pause between looks at the socket without a ring of the bell: a child that was killed rings no more."""

KILLED_TIMEOUT_S: Final = 5.0
"""What is waited for a killed child; one that is stuck in the kernel, as on a dead mount, is not waited for."""

END_TIMEOUT_S: Final = 1.0
"""What a child that has closed its medium, or could not open it, gets to end by itself."""

_SETTLED_LOOK_S: Final = 0.005
"""Pause between two looks whether what a killed child had in flight has ended; mostly that takes milliseconds."""

_START_TIMEOUT_S: Final = 5.0

_QUIET_S: Final = 2.0
"""A child that has said nothing for so long is asked whether its loop runs."""

_ANSWER_TIMEOUT_S: Final = 10.0
"""A loop that does not answer for so long is stopped or stuck: longer than starting, snapshots and a busy machine take.
A medium that hangs is another matter, its loop answers."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What a child runs.

    Attributes:
        target: ``"module:function"`` that makes the I/O side; see :class:`kvstore.runtime.wire.Start`.
        payload: Its first argument: plain values only. May hold secrets, and is not shown.
        backing: The region that it maps; the channel closes its descriptor.
        name: Name of the tier, for messages.
    """

    target: str
    payload: dict[str, Any] = field(repr=False)
    backing: SharedBacking
    name: str


class ChildConnection:
    """A child process and what joins it with this one. Used by one thread at a time.

    Args:
        spec: What the child runs.

    Raises:
        BackendUnavailableError: The child ended at once.
        OSError: There is no socket, no page or no process to be had.

    Attributes:
        has_closed: Whether the child has said that its medium is closed: nothing of it touches a slot any more.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        self._name = spec.name
        self.has_closed = False
        # When it last said something, and when somebody last looked whether it had.
        self._heard_at = time.monotonic()
        self._looked_at = 0.0
        # For how long it was looked at since it was asked; None if it was not asked, or has said something since.
        self._asked_s: float | None = None
        # Whether its socket took less than there was to send.
        self._is_full = False
        self._is_open = False
        self._lifetime = Lifetime()
        try:
            self._socket, theirs = socket.socketpair()
        except BaseException:
            self._lifetime.close()
            raise
        try:
            self._bell = Bell()
        except BaseException:
            self._lifetime.close()
            self._socket.close()
            theirs.close()
            raise
        self._unpacker = Unpacker(ChildMessage)
        fds = (theirs.fileno(), spec.backing.fd, self._bell.fd, self._lifetime.fd)
        arguments = [str(number) for number in (*fds, os.getpid())]
        try:
            self._process = subprocess.Popen(
                # Not from the working directory (-P), where anybody may have put a module of some name.
                [sys.executable, "-P", "-m", "kvstore.runtime.child", *arguments],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                # Where this process found kvstore, the child must find it too, installed or not.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        except BaseException:
            self._lifetime.close()
            self._socket.close()
            self._bell.close()
            raise
        finally:
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
        """Return what has arrived; None at the end."""
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
        """Send what the socket takes; return how many bytes.

        Raises:
            BlockingIOError: It takes nothing now.
            OSError: The child has ended.
        """
        was_full, self._is_full = self._is_full, True
        sent = self._socket.send(data)
        self._is_full = sent < len(data)
        if was_full:
            # There is room because it has read.
            self._note_alive()
        return sent

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to read, or the end; return whether there is."""
        # Not select(): it knows no descriptor above 1023, and an engine may well have more.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
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
            # It has no job yet, and so no slot: one that can't be killed, its medium being stuck, is left to itself.
            self.end()
            raise BackendUnavailableError("its I/O process did not start", backend=self._name)
        self._is_open = True
        return said

    def watch(self) -> Literal["well", "ask", "stuck"]:
        """Tell whether a child is quiet and has to be asked whether its loop runs, or was asked and does not answer.

        To be called often, and "ask" to be followed: what comes is taken for an answer, and what does not, for none.
        Only time in which somebody looks counts: a scheduler that was away for long has left the child half a message,
        or was stopped together with it.
        """
        now = time.monotonic()
        passed_s, self._looked_at = now - self._looked_at, now
        if self._asked_s is not None:
            self._asked_s += min(passed_s, _QUIET_S)
            return "stuck" if self._asked_s > _ANSWER_TIMEOUT_S else "well"
        if now - self._heard_at <= _QUIET_S:
            return "well"
        self._asked_s = 0.0
        return "ask"

    def kill(self) -> None:
        """Kill the child without waiting for its end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    def end(self, timeout_s: float = 0.0, *, for_ever: bool = False) -> bool:
        """Wait for the child's end, kill it after that and wait again; return whether it ended by itself.

        A killed child may still be there afterwards, which :attr:`gone` tells, unless it is waited for ``for_ever``.
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
            # It has nothing in flight any more, or never had anything.
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
        """Whether the child has ended with all that the kernel did for it: only then nothing writes to a slot."""
        return self.gone and self._lifetime.has_ended

    def await_settled(self, timeout_s: float) -> bool:
        """Wait until it has settled; return whether it has."""
        deadline = time.monotonic() + timeout_s
        while not (settled := self.has_settled) and time.monotonic() < deadline:
            time.sleep(_SETTLED_LOOK_S)
        return settled

    @property
    def rang(self) -> bool:
        """Whether the child has rung for what has not been read; an event loop may send a little after that."""
        return self._bell.count != self._unpacker.frames

    def _note_alive(self) -> None:
        self._heard_at, self._asked_s = time.monotonic(), None


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
