"""One end of a connection of the peer protocol on a blocking socket, for peers and clients that misbehave."""

from __future__ import annotations

import os
import socket

from kvstore.backends.peer import protocol
from kvstore.backends.peer.protocol import Address, Agreement, Hello, Note, Op, Welcome


class Wire:
    """Sends and receives frames after a greeting."""

    def __init__(self, sock: socket.socket, agreement: Agreement, *, is_server: bool) -> None:
        self.sock = sock  # The socket.
        macs = agreement.questions(), agreement.answers()
        self._received, self._sent = macs if is_server else macs[::-1]

    def sendall(self, frame: bytes | bytearray) -> None:
        """Send one frame."""
        self._sent.update(frame)
        self.sock.sendall(bytes(frame) + self._sent.end())

    def receive_frame(self, count: int) -> bytes:
        """Receive one frame of a known length, and check it."""
        data = receive(self.sock, count)
        self._received.update(data)
        assert receive(self.sock, self._received.tag_bytes) == self._received.end()
        return data

    def receive_question(self) -> tuple[Op, list[bytes]]:
        """Receive one question, and check it."""
        head = receive(self.sock, protocol.QUESTION_BYTES)
        question = protocol.read_question(head)
        self._received.update(head)
        return question.op, protocol.read_keys(self.receive_frame(question.body_bytes), question.count)

    def recv(self, count: int) -> bytes:
        return self.sock.recv(count)

    def shutdown(self, how: int) -> None:
        self.sock.shutdown(how)


def receive(sock: socket.socket, count: int) -> bytes:
    """Receive exactly ``count`` bytes."""
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def welcome(sock: socket.socket, secret: bytes) -> Wire:
    """Greet a client as a server does, except that its address and proof are not checked."""
    hello = receive(sock, protocol.HELLO_BYTES)
    nonce = os.urandom(protocol.NONCE_BYTES)
    agreement = Agreement(secret, hello, protocol.pack_welcome(Welcome(nonce, Note(0))), b"")
    sock.sendall(protocol.pack_welcome(Welcome(nonce, Note(0), agreement.server_proof)))
    receive(sock, protocol.PROOF_BYTES)
    return Wire(sock, agreement, is_server=True)


def hello_of(namespace_digest: bytes, port: int) -> bytes:
    """Return the hello of a client that has dialled a port of this machine."""
    return protocol.pack_hello(Hello(os.urandom(protocol.NONCE_BYTES), namespace_digest, local(port)))


def local(port: int) -> Address:
    """Return an address of this machine."""
    return protocol.address_of("127.0.0.1", port)
