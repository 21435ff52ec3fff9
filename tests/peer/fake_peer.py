"""A peer that completes the greeting, and then sends false data, stalls, trickles or disconnects, as requested."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable
from typing import Self

from kvstore.backends.peer import protocol
from kvstore.backends.peer.protocol import Op, Part
from kvstore.codec.record import HEADER_BYTES, RecordCodec
from kvstore.namespace import Namespace
from tests.peer.ports import free_port
from tests.peer.wire import Wire, welcome

Answer = Callable[["FakePeer", Wire, Op, list[bytes]], None]


class FakePeer:
    """Listens on a port of its own and answers each request by :attr:`answer`, on a thread for each connection.

    It holds every block: the bytes are a function of the key, as in :class:`kvstore.testing.tier_rig.TierRig`.
    """

    def __init__(self, namespace: Namespace | None = None, slot_bytes: int = 4096) -> None:
        self.answer: Answer = honest  # Answers one request; :func:`honest` by default.
        # Called for a new connection instead of the greeting, or None.
        self.greets: Callable[[socket.socket], None] | None = None
        self.secret = b""  # Shared secret.
        self.namespace = namespace or Namespace({"suite": "peer"})  # Namespace of its blocks.
        self.slot_bytes = slot_bytes  # Length of its blocks.
        self.questions: list[tuple[Op, int]] = []  # Received requests, in order: the kind, and the number of keys.
        self.released = threading.Event()
        self.port = free_port()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._thread = threading.Thread(target=self._accept, daemon=True)

    @property
    def address(self) -> str:
        """Return the address it listens on."""
        return f"127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """Return the number of open connections."""
        return sum(sock.fileno() >= 0 for sock in list(self._sockets))

    def payload(self, key: bytes) -> bytes:
        """Return the bytes of a key's block."""
        return random.Random(key).randbytes(self.slot_bytes)

    def record(self, key: bytes, of: bytes | None = None, namespace: Namespace | None = None) -> bytes:
        """Return the record of a key; ``of`` is another key whose block it holds instead."""
        codec = RecordCodec(namespace or self.namespace, header_bytes=HEADER_BYTES)
        header, payload = bytearray(HEADER_BYTES), self.payload(of or key)
        codec.encode_header(memoryview(header), of or key, memoryview(payload))
        return bytes(header) + payload

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.released.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        # A client may close the connection at any time; that ends the loop.
        with sock, contextlib.suppress(OSError, EOFError):
            if self.greets is not None:
                self.greets(sock)
                return
            wire = welcome(sock, self.secret)
            while True:
                op, keys = wire.receive_question()
                self.questions.append((op, len(keys)))
                self.answer(self, wire, op, keys)


def part(record: bytes) -> bytes:
    """Return a record in its wire format."""
    return protocol.pack_part(Part.RECORD, len(record)) + record


def honest(peer: FakePeer, sock: Wire, op: Op, keys: list[bytes]) -> None:
    """Hold and send every block."""
    if op is Op.LOOKUP:
        sock.sendall(b"\1" * len(keys))
    else:
        for key in keys:
            sock.sendall(part(peer.record(key)))


def honest_when_released(peer: FakePeer, sock: Wire, op: Op, keys: list[bytes]) -> None:
    """Answer like :func:`honest`, but only after the test sets ``released``."""
    peer.released.wait(30)
    honest(peer, sock, op, keys)


def on_load(act: Callable[[FakePeer, Wire, list[bytes]], None]) -> Answer:
    """Report every block as present, and answer loads by ``act``."""

    def answer(peer: FakePeer, sock: Wire, op: Op, keys: list[bytes]) -> None:
        if op is Op.LOOKUP:
            honest(peer, sock, op, keys)
        else:
            act(peer, sock, keys)

    return answer
