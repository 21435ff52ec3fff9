"""A peer that completes the greeting, and then sends false data, stalls, trickles or disconnects, as requested."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Callable
from typing import Self

from kvstore.backends.peer import protocol
from kvstore.backends.peer.protocol import Greeting, Op, Part
from kvstore.codec.record import HEADER_BYTES, RecordCodec
from kvstore.namespace import Namespace
from tests.peer.ports import free_port

Answer = Callable[["FakePeer", socket.socket, Op, list[bytes]], None]


class FakePeer:
    """Listens on a port of its own and answers each request by :attr:`answer`, on a thread for each connection.

    It holds every block: the bytes are a function of the key, as in :class:`kvstore.testing.tier_rig.TierRig`.

    Attributes:
        answer: Answers one request; :func:`honest` by default.
        greets: Called for a new connection instead of the greeting, or None.
        secret: Shared secret.
        namespace: Namespace of its blocks.
        slot_bytes: Length of its blocks.
        questions: Received requests, in order: the kind, and the number of keys.
    """

    def __init__(self, namespace: Namespace | None = None, slot_bytes: int = 4096) -> None:
        self.answer: Answer = honest
        self.greets: Callable[[socket.socket], None] | None = None
        self.secret = b""
        self.namespace = namespace or Namespace({"suite": "peer"})
        self.slot_bytes = slot_bytes
        self.questions: list[tuple[Op, int]] = []
        self.released = threading.Event()
        self.port = free_port()
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._thread = threading.Thread(target=self._accept, daemon=True)

    @property
    def address(self) -> str:
        """Return the address it listens on."""
        return f"127.0.0.1:{self.port}"

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
            self._sockets.add(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        # A client may close the connection at any time; that ends the loop.
        with sock, contextlib.suppress(OSError, EOFError):
            if self.greets is not None:
                self.greets(sock)
                return
            hello = receive(sock, protocol.GREETING_BYTES)
            nonce = os.urandom(protocol.NONCE_BYTES)
            sock.sendall(protocol.pack_greeting(Greeting(nonce, protocol.server_proof(self.secret, hello, nonce))))
            receive(sock, protocol.PROOF_BYTES)
            while True:
                question = protocol.read_question(receive(sock, protocol.QUESTION_BYTES))
                keys = protocol.read_keys(receive(sock, question.body_bytes), question.count)
                self.questions.append((question.op, question.count))
                self.answer(self, sock, question.op, keys)


def receive(sock: socket.socket, count: int) -> bytes:
    """Receive exactly ``count`` bytes."""
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def part(record: bytes) -> bytes:
    """Return a record in its wire format."""
    return protocol.pack_part(Part.RECORD, len(record)) + record


def honest(peer: FakePeer, sock: socket.socket, op: Op, keys: list[bytes]) -> None:
    """Hold and send every block."""
    if op is Op.LOOKUP:
        sock.sendall(b"\1" * len(keys))
    else:
        sock.sendall(b"".join([part(peer.record(key)) for key in keys]))


def on_load(act: Callable[[FakePeer, socket.socket, list[bytes]], None]) -> Answer:
    """Report every block as present, and answer loads by ``act``."""

    def answer(peer: FakePeer, sock: socket.socket, op: Op, keys: list[bytes]) -> None:
        if op is Op.LOOKUP:
            honest(peer, sock, op, keys)
        else:
            act(peer, sock, keys)

    return answer
