"""A stranger without the secret, to whom an engine connects, and who passes the greeting on to a real engine."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable
from typing import Self

from kvstore.backends.peer import protocol
from kvstore.backends.peer.protocol import FrameMac, Op, Part
from kvstore.codec.record import HEADER_BYTES, RecordCodec
from kvstore.namespace import Namespace
from tests.peer.ports import free_port
from tests.peer.serving import FIELDS, SLOT_BYTES
from tests.peer.wire import receive

EVIL = b"EVIL" * (SLOT_BYTES // 4)
_TAG_BYTES = FrameMac(bytes(32)).tag_bytes

Frames = list[bytes]


class Relay:
    """Passes on every connection, and changes it on the way; a thread for each connection."""

    def __init__(self, target_port: int) -> None:
        # Changes a frame of the greeting: the hello, the welcome or the proof.
        self.greeting: Callable[[bytes], bytes] = bytes
        self.question: Callable[[Op, bytes], bytes] = lambda op, frame: frame  # Changes a question.
        # Changes the frames of an answer, with their MACs; receives the question as well.
        self.answer: Callable[[Op, bytes, Frames], Frames] = lambda op, question, frames: frames
        self.answered = 0  # Answers that were changed.
        self.stolen: Frames = []  # Records received from the real engine.
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(10)
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(client)
            self._threads.append(threading.Thread(target=self._pass_on, args=(client,)))
            self._threads[-1].start()

    def _pass_on(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, EOFError):
            server = socket.create_connection(("127.0.0.1", self._target_port))
            self._sockets.append(server)
            with server:
                server.sendall(self.greeting(receive(client, protocol.HELLO_BYTES)))
                client.sendall(self.greeting(receive(server, protocol.WELCOME_BYTES)))
                server.sendall(self.greeting(receive(client, protocol.PROOF_BYTES)))
                while True:
                    head = receive(client, protocol.QUESTION_BYTES)
                    asked = protocol.read_question(head)
                    frame = head + receive(client, asked.body_bytes + _TAG_BYTES)
                    server.sendall(self.question(asked.op, frame))
                    frames = list(self._answer(server, asked.op, asked.count))
                    changed = self.answer(asked.op, frame, frames)
                    self.answered += changed is not frames
                    client.sendall(b"".join(changed))

    def _answer(self, server: socket.socket, op: Op, count: int) -> Frames:
        if op is not Op.LOAD:
            return [receive(server, count + _TAG_BYTES)]
        frames = []
        while count:
            head = receive(server, protocol.PART_BYTES)
            part, number = protocol.read_part(head)
            record = receive(server, number) if part is Part.RECORD else b""
            count -= 1 if part is Part.RECORD else number
            self.stolen += [record] if record else []
            frames.append(head + record + receive(server, _TAG_BYTES))
        return frames


class Impostor(Relay):
    """Passes the greeting on, and then asks and answers in its own words, without the MACs that it cannot make.

    It has a forged record of every block.
    """

    def _pass_on(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, EOFError):
            server = socket.create_connection(("127.0.0.1", self._target_port))
            self._sockets.append(server)
            with server:
                server.sendall(receive(client, protocol.HELLO_BYTES))
                client.sendall(receive(server, protocol.WELCOME_BYTES))
                server.sendall(receive(client, protocol.PROOF_BYTES))
                server.sendall(protocol.pack_question(Op.LOAD, [b"served-0"]) + bytes(_TAG_BYTES))
                threading.Thread(target=self._steal, args=(server,)).start()
                while True:
                    asked = protocol.read_question(receive(client, protocol.QUESTION_BYTES))
                    keys = protocol.read_keys(receive(client, asked.body_bytes), asked.count)
                    receive(client, _TAG_BYTES)
                    self.answered += 1
                    if asked.op is not Op.LOAD:
                        client.sendall(b"\1" * asked.count + bytes(_TAG_BYTES))
                        continue
                    for key in keys:
                        client.sendall(forged(key) + random.randbytes(_TAG_BYTES))

    def _steal(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            self.stolen.append(receive(server, protocol.PART_BYTES))


def forged(key: bytes) -> bytes:
    """Return a part with a record of false bytes and right checksums."""
    header = bytearray(HEADER_BYTES)
    RecordCodec(Namespace(FIELDS), header_bytes=HEADER_BYTES).encode_header(memoryview(header), key, memoryview(EVIL))
    return protocol.pack_part(Part.RECORD, HEADER_BYTES + SLOT_BYTES) + header + EVIL
