"""The peer protocol, version 3: frames as bytes. docs/peer.md describes it; this module does no I/O.

All numbers are little-endian. A connection begins with a greeting, in which both sides prove that they have the secret
and agree on keys. Then the client sends one question at a time, and the server answers it. Each frame of a question or
answer ends with a MAC by these keys (none under TLS or without a secret).
"""

from __future__ import annotations

import enum
import hmac
import ipaddress
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.codec.seal import gcm
from kvstore.types import KEY_BYTES_MAX, BlockKey

VERSION: Final = 3
MAGIC: Final = b"\x89kvpeer\n"
"""First bytes of either side. Magic and version have the same position in every version."""

KEYS_MAX: Final = 4096
"""Maximum keys of one question; a tier looks up no more at once."""

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
_TAG_BYTES: Final = 16
_NONCE_BYTES: Final = 12

_HEAD: Final = struct.Struct("<8sHHI")
_HELLO: Final = struct.Struct("<8sHHI32s32s16sH")
_WELCOME: Final = struct.Struct("<8sHHI32s32s")
QUESTION: Final = struct.Struct("<BBHI")
_PART: Final = struct.Struct("<II")

HEAD_BYTES: Final = _HEAD.size
"""Length of magic, version, flags and notes, with which the greeting of every version begins."""
HELLO_BYTES: Final = _HELLO.size
WELCOME_BYTES: Final = _WELCOME.size
QUESTION_BYTES: Final = QUESTION.size
PART_BYTES: Final = _PART.size


class PeerProtocolError(Exception):
    """Received bytes do not follow this version of the peer protocol."""


class Op(enum.IntEnum):
    """Kind of a question."""

    LOOKUP = 1
    """Look up blocks. Answer: one byte per key, a ``Found`` other than UNKNOWN."""
    LOAD = 2
    """Send blocks. Answer: parts, in the order of the keys."""
    HAND_OVERS = 3
    """Query hand-overs. Answer: one byte per name, COMING if its blocks are not known yet, else ABSENT."""


class Part(enum.IntEnum):
    """Kind of a frame that answers a load."""

    RECORD = 0
    """The record of the next block follows."""
    ABSENT = 1
    """The next blocks are absent."""


class Note(enum.IntFlag):
    """Notes of a server in its welcome, and of a client in its hello."""

    FOREIGN = 1
    """The server's blocks are of another namespace than the hello names."""
    MISDIRECTED = 2
    """The address that the client dialled is not the server's; the server closes the connection."""
    EARLIER = 4
    """Of a client: the server should use the secret before the last change of its file, if it changed recently."""


@dataclass(frozen=True, slots=True)
class Address:
    """IP address and port of a socket, with an IPv4 address as its IPv4-mapped IPv6 address."""

    packed: bytes
    port: int


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of the client."""

    nonce: bytes
    namespace_digest: bytes  # Namespace of its questions.
    dialled: Address  # Address to which the client has connected.
    earlier: bool = False  # Whether the server should use an earlier secret, see ``Note.EARLIER``.


@dataclass(frozen=True, slots=True)
class Welcome:
    """First frame of the server."""

    nonce: bytes
    notes: Note
    proof: bytes = bytes(PROOF_BYTES)  # See :class:`Agreement`.


@dataclass(frozen=True, slots=True)
class Question:
    """Head of a question; ``body_bytes`` with ``count`` keys, or names of hand-overs, follow."""

    op: Op
    count: int
    body_bytes: int


class Agreement:
    """Proofs and keys of one connection, derived from the secret and the greeting without its proofs.

    Args:
        secret: The shared secret; empty for none.
        welcome: The server's welcome; its proof is not read.
        binding: Bytes that only both ends of this TLS connection share; empty without TLS.
    """

    def __init__(self, secret: bytes, hello: bytes, welcome: bytes, binding: bytes) -> None:
        self._secret = secret
        self._transcript = hello + welcome[:-PROOF_BYTES] + binding
        self._has_macs = bool(secret) and not binding

    @property
    def server_proof(self) -> bytes:
        """The server's proof that it has the secret."""
        return self._derived(b"server")

    @property
    def client_proof(self) -> bytes:
        """The client's proof. It differs from the server's, so that neither side can echo the other's."""
        return self._derived(b"client")

    def questions(self) -> FrameMac:
        """Return the MAC of the client's frames."""
        return FrameMac(self._derived(b"questions") if self._has_macs else b"")

    def answers(self) -> FrameMac:
        """Return the MAC of the server's frames."""
        return FrameMac(self._derived(b"answers") if self._has_macs else b"")

    def _derived(self, purpose: bytes) -> bytes:
        return hmac.digest(self._secret, b"kvstore peer %d %s:" % (VERSION, purpose) + self._transcript, "sha256")


class FrameMac:
    """MACs of the frames of one direction: AES-256-GMAC, with a frame's number as the nonce.

    ``key``: key of the connection and direction. Empty: frames have no MAC, because TLS authenticates them or there is
    no secret.
    """

    def __init__(self, key: bytes) -> None:
        self.tag_bytes = _TAG_BYTES if key else 0  # Length of a MAC.
        self._key = key
        self._frames = 0
        self._begin()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes of the current frame."""
        if self._key:
            self._gcm.authenticate_additional_data(data)

    def end(self) -> bytes:
        """Return the MAC of the current frame, and begin the next frame."""
        if not self._key:
            return b""
        self._gcm.finalize()
        tag = self._gcm.tag
        self._frames += 1
        self._begin()
        return tag

    def _begin(self) -> None:
        if self._key:
            self._gcm = gcm(self._key, self._frames.to_bytes(_NONCE_BYTES, "little"))


def address_of(host: str, port: int) -> Address:
    """Return the address of a numeric host. ``ValueError``: the host is a name."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        address = ipaddress.IPv6Address(b"\0" * 10 + b"\xff\xff" + address.packed)
    return Address(address.packed, port)


def check_head(data: bytes) -> None:
    """Check the first ``HEAD_BYTES`` of a greeting.

    Raises:
        PeerProtocolError: The data does not begin a greeting, or one of another version.
    """
    magic, version, flags, _ = _HEAD.unpack(data)
    if magic != MAGIC:
        raise PeerProtocolError("it does not speak the peer protocol. Is this the port of a kvstore peer?")
    if version != VERSION or flags:
        raise PeerProtocolError(f"it speaks version {version} (flags {flags:#x}), expected {VERSION}. Run one release")


def pack_hello(hello: Hello) -> bytes:
    notes, dialled = Note.EARLIER * hello.earlier, hello.dialled
    return _HELLO.pack(MAGIC, VERSION, 0, notes, hello.nonce, hello.namespace_digest, dialled.packed, dialled.port)


def read_hello(data: bytes) -> Hello:
    """Read a hello whose head was checked; unknown notes are ignored."""
    *_, notes, nonce, namespace_digest, packed, port = _HELLO.unpack(data)
    return Hello(nonce, namespace_digest, Address(packed, port), bool(notes & Note.EARLIER))


def pack_welcome(welcome: Welcome) -> bytes:
    return _WELCOME.pack(MAGIC, VERSION, 0, welcome.notes, welcome.nonce, welcome.proof)


def read_welcome(data: bytes) -> Welcome:
    """Read a welcome whose head was checked; unknown notes are ignored."""
    *_, notes, nonce, proof = _WELCOME.unpack(data)
    return Welcome(nonce, Note(notes & (Note.FOREIGN | Note.MISDIRECTED)), proof)


def pack_question(op: Op, keys: Sequence[BlockKey]) -> bytes:
    """Return a question about 1 to ``KEYS_MAX`` keys as bytes."""
    body = b"".join([bytes((len(key),)) + key for key in keys])
    return QUESTION.pack(op, 0, len(keys), len(body)) + body


def read_question(data: bytes) -> Question:
    """Read the head of a question. ``PeerProtocolError``: the data is not a valid head."""
    op, reserved, count, body_bytes = QUESTION.unpack(data)
    if reserved or op not in tuple(Op) or not 1 <= count <= KEYS_MAX:
        raise PeerProtocolError(f"invalid question: op {op}, {count} keys")
    if not 2 * count <= body_bytes <= (1 + KEY_BYTES_MAX) * count:
        raise PeerProtocolError(f"{body_bytes} bytes can't be {count} keys")
    return Question(Op(op), count, body_bytes)


def read_keys(body: bytes, count: int) -> list[BlockKey]:
    """Read the keys of a question. ``PeerProtocolError``: the body does not consist of ``count`` keys."""
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


def pack_part(part: Part, number: int) -> bytes:
    """Return the bytes that begin an answer of a load; ``number``: length of the record, or number of absent blocks."""
    return _PART.pack(part, number)


def read_part(data: bytes) -> tuple[Part, int]:
    """Read the bytes of :func:`pack_part`. ``PeerProtocolError``: the data is not a valid part."""
    part, number = _PART.unpack(data)
    if part not in tuple(Part) or not number:
        raise PeerProtocolError(f"invalid part of an answer: {part}, {number}")
    return Part(part), number
