"""Lineage on the medium: the contents of a block's events besides its key, stored for the engine after a restart.

A note is a byte for its form, followed by the plain lineage, or by lineage and secrets encrypted by the tier's seal.
``docs/format.md`` describes it.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.codec.base import Seal
from kvstore.codec.record import RecordHeader, associated_bytes
from kvstore.errors import RecordError
from kvstore.namespace import FORMAT_VERSION, Namespace
from kvstore.runtime.messages import KeepLineage, LineageFound
from kvstore.types import BlockKey

_OPEN: Final = b"\x01"
_SEALED: Final = b"\x02"
_SEAL: Final = struct.Struct("<B3xI16s32s")
"""Wire id of the seal, id of its key, writer, MAC; the encrypted part follows."""
_LENGTH: Final = struct.Struct("<I")
"""Length of the lineage; the secrets follow it."""


class LineageNotes:
    """Writes and reads notes. ``seal``: seal of the tier. Secrets are stored only with a seal that encrypts."""

    def __init__(self, namespace: Namespace, seal: Seal | None) -> None:
        self._digest = namespace.digest
        self._seal = seal if seal is not None and seal.hides else None
        self._writer = os.urandom(16)

    def notes_of(self, message: KeepLineage) -> list[tuple[BlockKey, bytes]]:
        """Return the notes of blocks by their names on the medium; none if the seal lacks its key."""
        if self._seal is None:
            return [(name, _OPEN + lineage) for name, lineage in zip(message.keys, message.lineage, strict=True)]
        try:
            return [
                (name, self._sealed(self._seal, name, lineage, secret))
                for name, lineage, secret in zip(message.keys, message.lineage, message.secrets, strict=True)
            ]
        except RecordError:
            return []

    def found(
        self, notes: Sequence[tuple[BlockKey, bytes]], key_of: Callable[[BlockKey], BlockKey | None]
    ) -> LineageFound:
        """Return the lineage in notes; unreadable notes are omitted."""
        rows: list[tuple[BlockKey, bytes, bytes]] = []
        for name, note in notes:
            key, content = key_of(name), self._content(name, note)
            if key is not None and content is not None:
                rows.append((key, *content))
        keys, lineage, secrets = zip(*rows, strict=True) if rows else ((), (), ())
        return LineageFound(keys, lineage, secrets)

    def _sealed(self, seal: Seal, name: BlockKey, lineage: bytes, secret: bytes) -> bytes:
        plain = _LENGTH.pack(len(lineage)) + lineage + secret
        key_id = seal.key_id
        out = bytearray(len(plain))
        associated = self._associated(name, len(plain), self._writer, seal.wire_id, key_id)
        mac = seal.seal(key_id, associated, memoryview(plain), memoryview(out))
        return _SEALED + _SEAL.pack(seal.wire_id, key_id, self._writer, mac) + out

    def _content(self, name: BlockKey, note: bytes) -> tuple[bytes, bytes] | None:
        """Return lineage and secrets; None if unreadable. A tier that encrypts ignores plain notes."""
        if self._seal is None:
            return (note[1:], b"") if note[:1] == _OPEN else None
        if note[:1] != _SEALED or len(note) < 1 + _SEAL.size + _LENGTH.size:
            return None
        wire_id, key_id, writer, mac = _SEAL.unpack_from(note, 1)
        cipher = memoryview(note)[1 + _SEAL.size :]
        plain = bytearray(len(cipher))
        if wire_id != self._seal.wire_id:
            return None
        try:
            associated = self._associated(name, len(cipher), writer, wire_id, key_id)
            self._seal.open(wire_id, key_id, associated, mac, cipher, memoryview(plain))
        except RecordError:
            return None
        (length,) = _LENGTH.unpack_from(plain)
        return bytes(plain[_LENGTH.size : _LENGTH.size + length]), bytes(plain[_LENGTH.size + length :])

    def _associated(self, name: BlockKey, size_bytes: int, writer: bytes, wire_id: int, key_id: int) -> bytes:
        """Return the authenticated data: a record header with ``header_bytes`` 0, which no record has."""
        header = RecordHeader(
            version=FORMAT_VERSION,
            flags=0,
            header_bytes=0,
            plain_bytes=size_bytes,
            stored_bytes=size_bytes,
            namespace_digest=self._digest,
            key_digest=hashlib.sha256(name).digest(),
            writer_id=writer,
            created_ns=0,
            codec_chain=wire_id,
            mac_key_id=key_id,
            payload_checksum=bytes(16),
            mac=bytes(32),
        )
        return associated_bytes(header)
