"""Test records: one buffer with header and slot, as a tier holds them, and the result of their verification."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field

from kvstore.codec.checksum import header_checksum, payload_checksum
from kvstore.codec.record import HEADER_BYTES, RecordCodec, RecordFault
from kvstore.errors import RecordError
from kvstore.namespace import Namespace
from kvstore.testing.seeds import fresh_seed

SEED = fresh_seed()
"""Seed of all random tests here; every failure prints it."""

NAMESPACE = Namespace({"model": "tiny", "layers": 2})
WRITER_ID = bytes(range(16))


def fixed_clock() -> int:
    """Time of writing that never changes."""
    return 1_700_000_000_123_456_789


def codec(header_bytes: int, namespace: Namespace = NAMESPACE, alignment: int | None = None) -> RecordCodec:
    """Make a codec whose records are the same in each run."""
    return RecordCodec(
        namespace, header_bytes=header_bytes, alignment=alignment, writer_id=WRITER_ID, clock_ns=fixed_clock
    )


@dataclass
class Record:
    """A record in memory, with the buffers it would be read into."""

    key: bytes  # Key of the block.
    codec: RecordCodec  # Codec that makes and verifies the record.
    data: bytearray  # Header and payload, then the rest of the slot.
    size_bytes: int  # Length of header and payload.
    header: memoryview = field(init=False)
    slot: memoryview = field(init=False)

    def __post_init__(self) -> None:
        view = memoryview(self.data)
        self.header, self.slot = view[: self.codec.header_bytes], view[self.codec.header_bytes :]

    @classmethod
    def make(
        cls,
        header_bytes: int,
        payload: bytes,
        key: bytes = b"key",
        *,
        slot_bytes: int | None = None,
        namespace: Namespace = NAMESPACE,
        alignment: int | None = None,
    ) -> Record:
        """Encode a record of ``payload`` into a slot that may be longer."""
        room = len(payload) if slot_bytes is None else slot_bytes
        made = cls(
            key,
            codec(header_bytes, namespace, alignment),
            bytearray(header_bytes) + payload + bytes(room - len(payload)),
            header_bytes + len(payload),
        )
        made.codec.encode_header(made.header, key, made.slot[: len(payload)])
        return made

    def fault(self, filled_bytes: int | None = None, key: bytes | None = None) -> str:
        """Return the result of verification: a fault, or "ok"."""
        filled = self.size_bytes if filled_bytes is None else filled_bytes
        try:
            self.codec.verify(self.key if key is None else key, self.header, self.slot, filled)
        except RecordError as error:
            return RecordFault(error.cause).value
        return "ok"

    def forge(self, offset: int, layout: str, value: object) -> None:
        """Change a field of the header and correct its checksum."""
        struct.pack_into("<" + layout, self.header, offset, value)
        struct.pack_into("<Q", self.header, HEADER_BYTES - 8, header_checksum(self.header[: HEADER_BYTES - 8]))


def random_payload(rng: random.Random, size: int) -> bytes:
    """Return random bytes, none of them zero (so that every zeroed byte is a change)."""
    return rng.randbytes(size).replace(b"\0", b"\x01")


def forged(record: bytes, **changes: int) -> bytes:
    """Return a record with changed header fields, and both checksums correct."""
    places = {
        "plain_bytes": (16, "<Q"),
        "stored_bytes": (24, "<Q"),
        "codec_chain": (120, "<I"),
        "mac_key_id": (124, "<I"),
    }
    data = bytearray(record)
    for name, value in changes.items():
        offset, layout = places[name]
        struct.pack_into(layout, data, offset, value)
    (header_bytes, stored) = struct.unpack_from("<I", data, 12) + struct.unpack_from("<Q", data, 24)
    data[128:144] = payload_checksum(memoryview(data)[header_bytes:][:stored])
    struct.pack_into("<Q", data, HEADER_BYTES - 8, header_checksum(bytes(data[: HEADER_BYTES - 8])))
    return bytes(data)
