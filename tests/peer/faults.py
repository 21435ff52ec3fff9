"""Faults of a peer: false answers and broken connections."""

from __future__ import annotations

import socket
from collections.abc import Callable

from kvstore.backends.peer import protocol
from kvstore.backends.peer.protocol import Op, Part
from kvstore.namespace import Namespace
from tests.peer.fake_peer import FakePeer, on_load, part
from tests.peer.wire import Wire


def flipped(place: int) -> Callable[[FakePeer, Wire, list[bytes]], None]:
    """Send records with one flipped bit, counted from the start of the record."""

    def act(peer: FakePeer, sock: Wire, keys: list[bytes]) -> None:
        for key in keys:
            record = bytearray(peer.record(key))
            record[place] ^= 0x10
            sock.sendall(part(bytes(record)))

    return act


def wrong_block(peer: FakePeer, sock: Wire, keys: list[bytes]) -> None:
    """Send the intact record of another key."""
    for key in keys:
        sock.sendall(part(peer.record(key, of=b"another")))


def wrong_namespace(peer: FakePeer, sock: Wire, keys: list[bytes]) -> None:
    """Send the intact record of another namespace."""
    for key in keys:
        sock.sendall(part(peer.record(key, namespace=Namespace({"suite": "other"}))))


def duplicated(peer: FakePeer, sock: Wire, keys: list[bytes]) -> None:
    """Send the first 100 bytes of each record twice, with the matching total length."""
    for key in keys:
        record = peer.record(key)
        sock.sendall(part((record[:100] + record)[: len(record)]))


def shorter(peer: FakePeer, sock: Wire, keys: list[bytes]) -> None:
    """Send half of each record with the matching length."""
    for key in keys:
        record = peer.record(key)
        sock.sendall(part(record[: len(record) // 2]))


LIES = {
    "payload": on_load(flipped(3000)),
    "header": on_load(flipped(40)),
    "wrong block": on_load(wrong_block),
    "wrong namespace": on_load(wrong_namespace),
    "duplicated": on_load(duplicated),
    "shorter": on_load(shorter),
}


def early_close(peer: FakePeer, sock: Wire, op: Op, keys: list[bytes]) -> None:
    """Close the connection instead of answering."""
    sock.shutdown(socket.SHUT_RDWR)


def cut_off(peer: FakePeer, sock: Wire, keys: list[bytes]) -> None:
    """Close the connection in the middle of the first record."""
    sock.sendall(part(peer.record(keys[0]))[:1000])
    sock.shutdown(socket.SHUT_RDWR)


def huge_length(peer: FakePeer, sock: Wire, keys: list[bytes]) -> None:
    """Announce four gigabytes, and begin to send them."""
    sock.sendall(protocol.pack_part(Part.RECORD, 2**32 - 1) + bytes(100_000))


def nonsense(peer: FakePeer, sock: Wire, keys: list[bytes]) -> None:
    """Send bytes that are not part of an answer."""
    sock.sendall(b"\xff" * 4096)


def endless(peer: FakePeer, sock: Wire, keys: list[bytes]) -> None:
    """Send the answer, followed by more bytes than requested."""
    sock.sendall(b"".join([part(peer.record(key)) for key in keys]) + bytes(100))


def stall(peer: FakePeer, sock: Wire, op: Op, keys: list[bytes]) -> None:
    """Never answer."""
    peer.released.wait(60)


def stall_in_the_middle(peer: FakePeer, sock: Wire, keys: list[bytes]) -> None:
    """Send half of the first record, then nothing more."""
    sock.sendall(part(peer.record(keys[0]))[:1000])
    peer.released.wait(60)


def trickle(peer: FakePeer, sock: Wire, keys: list[bytes]) -> None:
    """Send a byte now and then, far too slowly for any deadline."""
    for byte in part(peer.record(keys[0])):
        sock.sendall(bytes([byte]))
        if peer.released.wait(0.05):
            return


BREAKS = {
    "early close": early_close,
    "cut off": on_load(cut_off),
    "huge length": on_load(huge_length),
    "nonsense": on_load(nonsense),
    "stall": stall,
    "stall in the middle": on_load(stall_in_the_middle),
    "trickle": on_load(trickle),
}
