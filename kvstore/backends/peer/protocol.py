"""The peer protocol, version 2: frames as bytes. docs/peer.md describes it; nothing here does I/O.

All numbers are little-endian. A connection begins with a greeting, in which both sides prove that they have the secret.
Then the client asks, one question at a time, and the server answers.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.types import KEY_BYTES_MAX, BlockKey

__all__ = [
    "ADDRESS_BYTES",
    "GREETING_BYTES",
    "KEYS_MAX",
    "LENGTH_BYTES",
    "METADATA_MAX",
    "NIXL",
    "PART_BYTES",
    "PROOF_BYTES",
    "QUESTION_BYTES",
    "RETURNED",
    "VERSION",
    "Greeting",
    "Op",
    "Part",
    "PeerProtocolError",
    "Question",
    "client_proof",
    "pack_address",
    "pack_greeting",
    "pack_metadata",
    "pack_part",
    "pack_question",
    "read_address",
    "read_greeting",
    "read_keys",
    "read_length",
    "read_part",
    "read_question",
    "server_proof",
]

VERSION: Final = 2
MAGIC: Final = b"\x89kvpeer\n"
"""First bytes of either side. Magic and version stand where they stand in every version."""

KEYS_MAX: Final = 4096
"""Keys of one question; as many as a tier asks for at once."""

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32

_FOREIGN: Final = 1
"""Bit of a welcome's notes; a release that does not know it ignores it."""

_GREETING: Final = struct.Struct("<8sHHI32s32s")
_QUESTION: Final = struct.Struct("<BBHI")
_PART: Final = struct.Struct("<II")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")

GREETING_BYTES: Final = _GREETING.size
QUESTION_BYTES: Final = _QUESTION.size
PART_BYTES: Final = _PART.size
LENGTH_BYTES: Final = _U32.size
ADDRESS_BYTES: Final = _U64.size

METADATA_MAX: Final = 65536
"""Longest metadata of a memory."""

NIXL: Final = b"nixl"
"""Name of a transport that reads memory."""

RETURNED: Final = b"\0"
"""What a client sends when it has read all rows that were lent to it."""

_SERVER: Final = b"kvstore peer server 2"
_CLIENT: Final = b"kvstore peer client 2"
"""What tells the two proofs apart, so that neither side's can be sent back to it."""


class PeerProtocolError(Exception):
    """What came is not the peer protocol, or another version of it."""


class Op(enum.IntEnum):
    """What is asked."""

    LOOKUP = 1
    """Which of these blocks are there? One byte a key, a ``Found``; none is UNKNOWN."""
    LOAD = 2
    """Send these blocks. One part a key, with its record behind it if it is there."""
    HAND_OVERS = 3
    """Which of these hand-overs compute blocks that are not known yet? One byte a name: COMING, or ABSENT."""
    MEMORY = 4
    """How is your memory read by these transports? A length, and so many bytes of metadata; 0 if not at all."""
    LEND = 5
    """As ``LOAD``, but rows may be lent. If any is, the client sends ``RETURNED`` when it has read them."""


class Part(enum.IntEnum):
    """What becomes of one block of a load."""

    RECORD = 0
    """The record follows."""
    ABSENT = 1
    """There is no such block (any more)."""
    LENT = 2
    """The address of the row and the header of its record follow; the row stays as it is until it is returned."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """First frame of either side.

    Attributes:
        nonce: Random.
        content: In a client's (hello), the digest of the namespace that its questions are about; in a server's
            (welcome), the proof that it has the secret.
        is_foreign: In a welcome, whether the server's blocks are of another namespace than the hello names.
    """

    nonce: bytes
    content: bytes
    is_foreign: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """Head of a question; ``body_bytes`` with ``count`` keys, or names of hand-overs, follow."""

    op: Op
    count: int
    body_bytes: int


def pack_greeting(greeting: Greeting) -> bytes:
    """Return a hello or a welcome as bytes."""
    return _GREETING.pack(MAGIC, VERSION, 0, _FOREIGN * greeting.is_foreign, greeting.nonce, greeting.content)


def read_greeting(data: bytes) -> Greeting:
    """Read a hello or a welcome.

    Raises:
        PeerProtocolError: It is none, or of another version.
    """
    magic, version, flags, notes, nonce, content = _GREETING.unpack(data)
    if magic != MAGIC:
        raise PeerProtocolError("it does not speak the peer protocol. Is this the port of a kvstore peer?")
    if version != VERSION or flags:
        raise PeerProtocolError(f"it speaks version {version} (flags {flags:#x}), expected {VERSION}. Run one release")
    return Greeting(nonce, content, bool(notes & _FOREIGN))


def server_proof(secret: bytes, hello: bytes, nonce: bytes) -> bytes:
    """Return the proof of a server: HMAC-SHA-256 over the client's hello and the server's nonce."""
    return hmac.digest(secret, _SERVER + hello + nonce, hashlib.sha256)


def client_proof(secret: bytes, hello: bytes, nonce: bytes) -> bytes:
    """Return the proof of a client, over the same."""
    return hmac.digest(secret, _CLIENT + hello + nonce, hashlib.sha256)


def pack_question(op: Op, keys: Sequence[BlockKey]) -> bytes:
    """Return a question about 1 to ``KEYS_MAX`` keys as bytes."""
    body = b"".join([bytes((len(key),)) + key for key in keys])
    return _QUESTION.pack(op, 0, len(keys), len(body)) + body


def read_question(data: bytes) -> Question:
    """Read the head of a question.

    Raises:
        PeerProtocolError: It is none.
    """
    op, reserved, count, body_bytes = _QUESTION.unpack(data)
    if reserved or op not in tuple(Op) or not 1 <= count <= KEYS_MAX:
        raise PeerProtocolError(f"no question: op {op}, {count} keys")
    if not 2 * count <= body_bytes <= (1 + KEY_BYTES_MAX) * count:
        raise PeerProtocolError(f"{body_bytes} bytes can't be {count} keys")
    return Question(Op(op), count, body_bytes)


def read_keys(body: bytes, count: int) -> list[BlockKey]:
    """Read the keys of a question.

    Raises:
        PeerProtocolError: The body does not consist of so many keys.
    """
    keys, at = [], 0
    for _ in range(count):
        length = body[at] if at < len(body) else 0
        key = body[at + 1 : at + 1 + length]
        if not 1 <= length <= KEY_BYTES_MAX or len(key) != length:
            raise PeerProtocolError(f"a key of {length} bytes at byte {at} of {len(body)}")
        keys.append(key)
        at += 1 + length
    if at != len(body):
        raise PeerProtocolError(f"{len(body) - at} bytes follow the keys")
    return keys


def pack_part(part: Part, record_bytes: int = 0) -> bytes:
    """Return what stands before each record of a load, and in place of one that is not there."""
    return _PART.pack(part, record_bytes)


def read_part(data: bytes | bytearray) -> tuple[Part, int]:
    """Read what :func:`pack_part` made: the part, and the length of the record that follows.

    Raises:
        PeerProtocolError: It is none.
    """
    part, record_bytes = _PART.unpack(data)
    if part not in tuple(Part) or (record_bytes and part == Part.ABSENT):
        raise PeerProtocolError(f"no part of an answer: {part}, {record_bytes} bytes")
    return Part(part), record_bytes


def pack_metadata(metadata: bytes) -> bytes:
    """Return the answer to a question about memory."""
    return _U32.pack(len(metadata)) + metadata


def read_length(data: bytes) -> int:
    """Read the length of metadata.

    Raises:
        PeerProtocolError: It is above ``METADATA_MAX``.
    """
    (length,) = _U32.unpack(data)
    if length > METADATA_MAX:
        raise PeerProtocolError(f"{length} bytes of metadata, expected {METADATA_MAX} at most")
    return int(length)


def pack_address(address: int) -> bytes:
    """Return an address as bytes."""
    return _U64.pack(address)


def read_address(data: bytes | bytearray) -> int:
    """Read an address."""
    return int(_U64.unpack(data)[0])
