"""The peer protocol, version 2: frames as bytes. docs/peer.md describes it; this module does no I/O.

All numbers are little-endian. A connection begins with a greeting, in which both sides prove that they have the secret.
Then the client sends one question at a time, and the server answers it.
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
"""First bytes of either side. Magic and version have the same position in every version."""

KEYS_MAX: Final = 4096
"""Most keys of one question; also the most that a tier looks up at once."""

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32

_FOREIGN: Final = 1
"""Bit of a welcome's notes; releases without this bit ignore it."""

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
"""Most bytes of the metadata of a memory."""

NIXL: Final = b"nixl"
"""Name of a transport that reads memory."""

RETURNED: Final = b"\0"
"""Sent by a client after it has read all rows that were lent to it."""

_SERVER: Final = b"kvstore peer server 2"
_CLIENT: Final = b"kvstore peer client 2"
"""Distinguish the two proofs, so that the proof of one side cannot be replayed to it."""


class PeerProtocolError(Exception):
    """Received bytes do not follow this version of the peer protocol."""


class Op(enum.IntEnum):
    """Kind of a question."""

    LOOKUP = 1
    """Look up blocks. Answer: one byte per key, a ``Found`` other than UNKNOWN."""
    LOAD = 2
    """Send blocks. Answer: one part per key, followed by the record if there is one."""
    HAND_OVERS = 3
    """Query hand-overs. Answer: one byte per name, COMING if its blocks are not known yet, else ABSENT."""
    MEMORY = 4
    """Request metadata for reading memory by these transports. Answer: length (0: not available) and metadata."""
    LEND = 5
    """As ``LOAD``, but the server may lend rows. If it lends any, the client sends ``RETURNED`` after reading them."""


class Part(enum.IntEnum):
    """Kind of the answer for one block of a load."""

    RECORD = 0
    """The record follows."""
    ABSENT = 1
    """The block is not there, or not any more."""
    LENT = 2
    """The address of the row and the header of its record follow. The row is not changed until it is returned."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """First frame of either side.

    Attributes:
        nonce: Random bytes.
        content: In the client's greeting (hello), the digest of the namespace of its questions; in the server's
            (welcome), the proof that it has the secret.
        is_foreign: In a welcome, whether the server's blocks are of another namespace than that of the hello.
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
        PeerProtocolError: The data is not a greeting, or of another version.
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
    """Return the proof of a client, over the same data."""
    return hmac.digest(secret, _CLIENT + hello + nonce, hashlib.sha256)


def pack_question(op: Op, keys: Sequence[BlockKey]) -> bytes:
    """Return a question about 1 to ``KEYS_MAX`` keys as bytes."""
    body = b"".join([bytes((len(key),)) + key for key in keys])
    return _QUESTION.pack(op, 0, len(keys), len(body)) + body


def read_question(data: bytes) -> Question:
    """Read the head of a question.

    Raises:
        PeerProtocolError: The data is not a valid head.
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
        PeerProtocolError: The body does not consist of ``count`` keys.
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
    """Return the bytes before each record of a load; for an absent block, only these are sent."""
    return _PART.pack(part, record_bytes)


def read_part(data: bytes | bytearray) -> tuple[Part, int]:
    """Read the bytes of :func:`pack_part`: the part, and the length of the record.

    Raises:
        PeerProtocolError: The data is not a valid part.
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
        PeerProtocolError: The length exceeds ``METADATA_MAX``.
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
