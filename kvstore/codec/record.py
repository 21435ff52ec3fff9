"""Record: the format on every medium. A header of 256 bytes (padded to the medium's alignment), then the payload.

``docs/format.md`` describes it byte by byte. This module does no I/O and copies no payload. :mod:`kvstore.codec.coding`
handles the content of payloads.
"""

from __future__ import annotations

import enum
import hashlib
import os
import struct
import time
from collections.abc import Callable
from typing import Final, NamedTuple, NoReturn

from kvstore.codec.base import Seal
from kvstore.codec.checksum import bytes_view, header_checksum, payload_checksum
from kvstore.errors import RecordError
from kvstore.namespace import FORMAT_VERSION, Namespace
from kvstore.types import BlockKey

MAGIC: Final = b"\x89kvstor\n"
"""First bytes of a record. 0x89 is not text, and a transfer that translates line ends damages the last byte."""

HEADER_BYTES: Final = 256
"""Length of a header without padding: a multiple of a cache line."""

_HEADER_BYTES_MAX: Final = 1024 * 1024
"""Longest padded header: no medium has a greater alignment."""

_FIELDS: Final = struct.Struct("<8sHHIQQ32s32s16sQII16s32s72s")
_CHECKSUM: Final = struct.Struct("<Q")
_CHECKED_BYTES: Final = _FIELDS.size
"""Offset of the header's checksum, which covers all bytes before it."""
_NO_MAC: Final = bytes(32)
_RESERVED: Final = bytes(72)
_NO_CHECKSUM: Final = bytes(16)
_CHECKSUM_PLACE: Final = slice(128, 144)
_MAC_PLACE: Final = slice(144, 176)
_RAW: Final = 0
"""Codec chain of a raw payload."""
_NOWHERE: Final = memoryview(b"")


class RecordFault(enum.StrEnum):
    """Reason for the rejection of a record, and name of its counter, in the order of the checks."""

    HEADER = "header"
    """Magic, header checksum, reserved bytes or padding are wrong."""
    VERSION = "version"
    """Intact, in a format (version or flags) that this release does not know."""
    NAMESPACE = "namespace"
    """Intact, of another namespace."""
    KEY = "key"
    """Intact, of another key: a misdirected write or a swapped file."""
    CODEC = "codec"
    """Intact, with codecs or a key that this tier lacks."""
    GEOMETRY = "geometry"
    """Intact, but its block does not fit the slot, or it was written for a medium of another alignment."""
    LENGTH = "length"
    """The length differs from the header's, or is too short for a record."""
    PAYLOAD = "payload"
    """The payload differs from the stored one."""
    SEAL = "seal"
    """The record was made or changed without its key."""
    ENCODING = "encoding"
    """The payload is the stored one, but its codecs can't decode it."""

    @property
    def is_damage(self) -> bool:
        """Whether the record is broken or misplaced, so that its removal loses no block.

        False if it may be another writer's intact block, which is only a miss here.
        """
        return self in _DAMAGE


_DAMAGE: Final = frozenset(
    {RecordFault.HEADER, RecordFault.KEY, RecordFault.LENGTH, RecordFault.PAYLOAD, RecordFault.ENCODING}
)


class RecordHeader(NamedTuple):
    """The fields of a header in the order of ``docs/format.md``.

    ``header_bytes`` includes the padding. ``plain_bytes`` is the length of the block, ``stored_bytes`` the length of
    the payload on the medium. ``codec_chain`` is 0 without codecs and seal; ``mac_key_id`` is 0 without a seal.
    """

    version: int
    flags: int
    header_bytes: int
    plain_bytes: int
    stored_bytes: int
    namespace_digest: bytes
    key_digest: bytes
    writer_id: bytes
    created_ns: int
    codec_chain: int
    mac_key_id: int
    payload_checksum: bytes
    mac: bytes


class RecordCodec:
    """Makes and verifies the records of one tier.

    Stateless after construction, so any number of threads may share one. Costs a few microseconds per block plus
    the payload's checksum.

    Args:
        header_bytes: Length of header buffers: the greater of 256 and the medium's alignment.
        alignment: Unit of lengths on a medium that can't keep exact lengths (direct I/O): zeros may follow a record up
            to a multiple of it. None means ``header_bytes``.
        writer_id: 16 bytes that identify the writer; random by default.
        clock_ns: Clock for ``created``, nanoseconds since the Unix epoch.

    Raises:
        ValueError: ``header_bytes`` is not a multiple of 256 up to 1 MiB, ``alignment`` is below 1, or ``writer_id`` is
            not 16 bytes.
    """

    def __init__(
        self,
        namespace: Namespace,
        *,
        header_bytes: int,
        alignment: int | None = None,
        writer_id: bytes | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        if header_bytes % HEADER_BYTES or not HEADER_BYTES <= header_bytes <= _HEADER_BYTES_MAX:
            raise ValueError(f"header_bytes is {header_bytes}. Expected a multiple of {HEADER_BYTES} up to 1 MiB.")
        self._alignment = header_bytes if alignment is None else alignment
        if self._alignment < 1:
            raise ValueError(f"alignment is {alignment}. Expected at least 1.")
        self._writer_id = os.urandom(16) if writer_id is None else writer_id
        if len(self._writer_id) != 16:
            raise ValueError(f"writer_id has {len(self._writer_id)} bytes. Expected 16.")
        self._namespace_digest = namespace.digest
        self.header_bytes = header_bytes  # Length of header buffers.
        self._padding = bytes(header_bytes - HEADER_BYTES)
        self._clock_ns = clock_ns

    def encode_header(
        self,
        out: memoryview,
        key: BlockKey,
        payload: memoryview,
        *,
        plain_bytes: int | None = None,
        chain: int = _RAW,
        seal: Seal | None = None,
        sealed: memoryview = _NOWHERE,
    ) -> None:
        """Write the header of a block into ``out``, and seal its payload if a seal is given.

        Args:
            out: Writable buffer of ``header_bytes`` bytes.
            payload: C-contiguous buffer of any format and shape. Must not change until the record is put.
            plain_bytes: Length of the block; None for the length of ``payload``.
            chain: Codec chain of the stored payload, including the seal.
            seal: The seal, or None.
            sealed: Buffer for the encrypted payload, as long as ``payload``; used by a seal that encrypts.

        Raises:
            ValueError: ``out`` has another length, or a buffer is not C-contiguous.
            RecordError: The seal has no key.
        """
        out = self._checked_header(out)
        stored = payload.nbytes
        key_id = 0 if seal is None else seal.key_id
        _FIELDS.pack_into(
            out,
            0,
            MAGIC,
            FORMAT_VERSION,
            0,
            self.header_bytes,
            stored if plain_bytes is None else plain_bytes,
            stored,
            self._namespace_digest,
            hashlib.sha256(key).digest(),
            self._writer_id,
            self._clock_ns(),
            chain,
            key_id,
            _NO_CHECKSUM if seal else payload_checksum(payload),
            _NO_MAC,
            _RESERVED,
        )
        if seal is not None:
            out[_MAC_PLACE] = seal.seal(key_id, bytes(out[:_CHECKED_BYTES]), bytes_view(payload), sealed)
            out[_CHECKSUM_PLACE] = payload_checksum(sealed if seal.hides else payload)
        _CHECKSUM.pack_into(out, _CHECKED_BYTES, header_checksum(out[:_CHECKED_BYTES]))
        out[HEADER_BYTES:] = self._padding

    def verify(self, key: BlockKey, header: memoryview, payload: memoryview, filled_bytes: int) -> int:
        """Check that a record is complete, intact, and the requested one.

        Args:
            header: Buffer of ``header_bytes`` bytes with the start of the record.
            payload: Buffer with the rest; C-contiguous, may be longer than the payload.
            filled_bytes: Length of the record that was read into both buffers.

        Returns:
            Length of the payload in bytes; it is at the start of ``payload``.

        Raises:
            RecordError: A check failed, or the record is encoded or sealed; ``cause`` is a :class:`RecordFault`. Counts
                as a miss.
            ValueError: ``header`` has another length, or ``payload`` is not C-contiguous.
        """
        return self.check(key, header, payload, filled_bytes, _refuse_all_but_raw).stored_bytes

    def check(
        self,
        key: BlockKey,
        header: memoryview,
        payload: memoryview,
        filled_bytes: int,
        refusal: Callable[[RecordHeader], str],
        *,
        decodes: bool = True,
    ) -> RecordHeader:
        """Verify a record like :meth:`verify`, with the same errors, for a reader that supports codecs or seals.

        ``refusal`` returns the reason why a payload with this header can't be read; empty if it can. With ``decodes``,
        the block will be decoded into ``payload``, which must have room for it; otherwise only the stored record is
        verified.

        Returns:
            The header; the first ``stored_bytes`` bytes of ``payload`` are the stored payload.
        """
        header = self._checked_header(header)
        payload = bytes_view(payload)
        if filled_bytes < HEADER_BYTES:
            _fail(RecordFault.LENGTH, f"{filled_bytes} bytes, less than a header")
        # Copied (256 bytes), so that the header can't change after the check.
        found = decode_header(bytes(header[:HEADER_BYTES]))
        self._check_identity(found, key)
        if reason := refusal(found):
            _fail(RecordFault.CODEC, reason)
        self._check_lengths(found, header, payload, filled_bytes, decodes=decodes)
        if payload_checksum(payload[: found.stored_bytes]) != found.payload_checksum:
            _fail(RecordFault.PAYLOAD, "the payload's checksum is wrong")
        return found

    def _checked_header(self, header: memoryview) -> memoryview:
        if header.nbytes != self.header_bytes:
            raise ValueError(f"The header buffer has {header.nbytes} bytes. Expected {self.header_bytes}.")
        return bytes_view(header)

    def _check_identity(self, found: RecordHeader, key: BlockKey) -> None:
        if found.namespace_digest != self._namespace_digest:
            theirs, ours = found.namespace_digest.hex()[:16], self._namespace_digest.hex()[:16]
            _fail(RecordFault.NAMESPACE, f"it is of namespace {theirs}…, not {ours}…")
        if found.key_digest != hashlib.sha256(key).digest():
            _fail(RecordFault.KEY, "it is of another key")

    def _check_lengths(
        self, found: RecordHeader, header: memoryview, payload: memoryview, filled_bytes: int, *, decodes: bool
    ) -> None:
        if found.header_bytes != self.header_bytes:
            _fail(RecordFault.GEOMETRY, f"its header takes {found.header_bytes} bytes, not {self.header_bytes}")
        if decodes and found.plain_bytes > payload.nbytes:
            _fail(RecordFault.GEOMETRY, f"its block of {found.plain_bytes} bytes is longer than {payload.nbytes}")
        exact = self.header_bytes + found.stored_bytes
        # A padded medium may fill the buffers to a multiple of the alignment, or to their end if that comes first.
        room = self.header_bytes + (payload.nbytes if decodes else max(payload.nbytes, found.plain_bytes))
        padded = min(-(-exact // self._alignment) * self._alignment, room)
        if filled_bytes not in (exact, padded):
            _fail(RecordFault.LENGTH, f"{filled_bytes} bytes, not {exact}")
        # One memcmp of bytes; the copy is at most a page on usual media.
        if bytes(header[HEADER_BYTES:]) != self._padding:
            _fail(RecordFault.HEADER, "the header's padding is not zero")
        if filled_bytes > exact and any(payload[found.stored_bytes : filled_bytes - self.header_bytes]):
            _fail(RecordFault.LENGTH, "bytes follow the payload")


def decode_header(data: bytes | memoryview) -> RecordHeader:
    """Read a header from its first 256 bytes, without the payload; for tools that inspect records.

    Raises:
        RecordError: Too short, damaged, or of a version that this release does not know.
    """
    if len(data) < HEADER_BYTES:
        _fail(RecordFault.LENGTH, f"{len(data)} bytes, less than a header")
    (magic, *fields, reserved) = _FIELDS.unpack_from(data)
    (checksum,) = _CHECKSUM.unpack_from(data, _CHECKED_BYTES)
    if magic != MAGIC:
        _fail(RecordFault.HEADER, "it does not start with the magic of a record")
    if checksum != header_checksum(data[:_CHECKED_BYTES]):
        _fail(RecordFault.HEADER, "the header's checksum is wrong")
    found = RecordHeader._make(fields)
    if found.version != FORMAT_VERSION or found.flags != 0:
        _fail(RecordFault.VERSION, f"it has version {found.version} and flags {found.flags:#x}")
    shorter = found.stored_bytes < found.plain_bytes
    if reserved != _RESERVED or found.stored_bytes > found.plain_bytes or (found.codec_chain == _RAW and shorter):
        _fail(RecordFault.HEADER, "the header contradicts itself")
    return found


def checksum_in(header: bytes | memoryview) -> bytes:
    """Return the stored payload's checksum from a header, sealed or not; empty without one, and for other bytes."""
    checksum = bytes(header[_CHECKSUM_PLACE])
    return b"" if bytes(header[: len(MAGIC)]) != MAGIC or checksum == _NO_CHECKSUM else checksum


def associated_bytes(header: RecordHeader) -> bytes:
    """Return the data that a seal authenticates: the header up to its checksum, without payload checksum and MAC."""
    # RecordHeader has the fields in the order of the format.
    return _FIELDS.pack(MAGIC, *header[:-2], _NO_CHECKSUM, _NO_MAC, _RESERVED)


def _refuse_all_but_raw(found: RecordHeader) -> str:
    if found.codec_chain == _RAW and found.mac_key_id == 0:
        return ""
    return f"it has codec chain {found.codec_chain} and MAC key {found.mac_key_id}"


def _fail(fault: RecordFault, what: str) -> NoReturn:
    raise RecordError(f"Not the requested record: {what}. It counts as a miss.", fault)
