"""Faults inside an I/O process: the plan stays with the test, and the backend in the child queries it over a socket.

One connection carries the queries of a backend as JSON, one line each way. A stalled call has its own connection. It is
closed by the plan on release, or by the backend on cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import socketserver
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Final

import msgspec

from kvstore.config import TierConfig, decode_config
from kvstore.registry import BACKENDS
from kvstore.testing.faults import Fault, FaultKind, FaultPlan, FaultyBackend

_ANSWER_TIMEOUT_S: Final = 30.0
"""Timeout of a query, for a stopped or ended test process; the call then fails like on a broken medium."""

_numbers = itertools.count()


class _Question(msgspec.Struct, omit_defaults=True):
    """A query of a backend: ``take`` an ``op``, ``count`` a ``kind``, ``release``, ``seed``, ``stall`` a ``fault``."""

    ask: str
    op: str = ""
    kind: FaultKind | None = None
    fault: Fault | None = None


class _Answer(msgspec.Struct, omit_defaults=True):
    """The fault that is due, or the plan's seed."""

    fault: Fault | None = None
    seed: int = 0


class PlanServer:
    """Serves a plan to backends in other processes, on its own threads; a context manager."""

    def __init__(self, plan: FaultPlan) -> None:
        # Name of the socket; abstract, so that no file remains.
        self.address = f"kvstore-faults-{os.getpid()}-{next(_numbers)}"
        self._server = _Server(plan, "\0" + self.address)
        # Short polling interval, because a suite opens many tiers and waits for each shutdown.
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), name="kvstore-faults", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> PlanServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def config_around(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a tier's configuration with this plan's faults around its backend."""
        common = {key: value for key, value in config.items() if key in TierConfig.__struct_fields__}
        inner = {**config, "backend": config.get("backend") or config.get("type")}
        path = f"{__name__}:{ServedFaultyBackend.__name__}"
        return {**common, "backend": path, "inner": inner, "plan": self.address}

    def close(self) -> None:
        """Stop the server; its backends must be closed before. Idempotent."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(socketserver.ThreadingUnixStreamServer):
    """One thread per connection; closing the server ends all threads and waits for them."""

    def __init__(self, plan: FaultPlan, address: str) -> None:
        super().__init__(address, _Handler)
        self.plan = plan
        self.connections: set[socket.socket] = set()

    def server_close(self) -> None:
        """See ``socketserver``; closes open connections first, so that an unclosed backend does not block a test."""
        for connection in list(self.connections):
            _hang_up(connection)
        super().server_close()


class _Handler(socketserver.StreamRequestHandler):
    """Answers the queries of one connection until the peer disconnects."""

    server: _Server

    def setup(self) -> None:
        """Register with the server."""
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        """Unregister from the server."""
        self.server.connections.discard(self.connection)
        super().finish()

    def handle(self) -> None:
        """Answer until the end of the stream, which also arrives when a backend's process is killed."""
        with contextlib.suppress(ConnectionError):
            while line := self.rfile.readline():
                question = msgspec.json.decode(line, type=_Question)
                if question.ask == "stall":
                    self._stall(question.fault)
                    return
                self.wfile.write(msgspec.json.encode(self._answer(question)) + b"\n")

    def _answer(self, question: _Question) -> _Answer:
        plan = self.server.plan
        if question.ask == "take":
            return _Answer(fault=plan.take(question.op))
        if question.ask == "count" and question.kind is not None:
            plan.count(question.kind)
        elif question.ask == "release":
            plan.release()
        return _Answer(seed=plan.seed)

    def _stall(self, fault: Fault | None) -> None:
        with self.server.plan.stalling(fault, partial(_hang_up, self.connection)) as is_planned:
            if is_planned:
                self.rfile.read()


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # The peer has already disconnected.
        connection.shutdown(socket.SHUT_RDWR)


class _AskedPlan(FaultPlan):
    """A backend's view of a plan in another process; used only on the loop's thread."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = "\0" + address
        self._socket: socket.socket | None = None
        self._answers: Any = None

    def take(self, op: str) -> Fault | None:
        return self._ask(_Question("take", op=op)).fault

    def count(self, kind: FaultKind) -> None:
        super().count(kind)
        self._ask(_Question("count", kind=kind))

    def release(self) -> None:
        self._ask(_Question("release"))

    async def stall(self, fault: Fault) -> None:
        # Connected here, because some event loops do not support abstract names.
        reader, writer = await asyncio.open_unix_connection(sock=self._connected())
        try:
            writer.write(msgspec.json.encode(_Question("stall", fault=fault)) + b"\n")
            await reader.read()
        finally:
            writer.close()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._socket is not None:
            self._answers.close()
            self._socket.close()
            self._socket = None

    def _connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_ANSWER_TIMEOUT_S)
        try:
            connection.connect(self._address)
        except OSError:
            connection.close()
            raise
        return connection

    def _ask(self, question: _Question) -> _Answer:
        """Send a query and wait for the answer. This blocks the loop for some microseconds, which a test can afford."""
        if self._socket is None:
            self._socket = self._connected()
            self._answers = self._socket.makefile("rb")
            self.seed = self._ask(_Question("seed")).seed
            self.rng.seed(self.seed)
        self._socket.sendall(msgspec.json.encode(question) + b"\n")
        line = self._answers.readline()
        if not line:
            raise ConnectionResetError("The process that has the plan of faults has ended.")
        return msgspec.json.decode(line, type=_Answer)


class ServedFaultyConfig(TierConfig, kw_only=True, frozen=True):
    """Options made by :meth:`PlanServer.config_around`."""

    inner: dict[str, Any]  # Configuration of the tier without faults.
    plan: str  # Address of the plan.


class ServedFaultyBackend(FaultyBackend):
    """A :class:`~kvstore.testing.FaultyBackend` that a configuration can name, so that it can run in an I/O process."""

    config_type: ClassVar[type[TierConfig]] = ServedFaultyConfig

    def __init__(self, config: ServedFaultyConfig) -> None:
        options = dict(config.inner)
        cls = BACKENDS.find(options.pop("backend"))
        options.pop("type", None)
        self._asked = _AskedPlan(config.plan)
        super().__init__(cls(decode_config(cls.config_type, options, where="tier with faults")), self._asked)

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            self._asked.close()
