"""What lies in a slab: the superblock, and the descriptor beside each record's header. Bytes in, values out; no I/O.

A slab begins with two copies of its superblock (a page each), then come slots of equal length. A slot is a header page
and the payload, rounded up to whole pages. The header page holds the record's own header (``docs/format.md``) and,
from byte 256 on, the slot's descriptor: both lie in the first 512 bytes, which every drive writes whole or not at all.

All numbers are little-endian.

Superblock: magic (8), format version (u32), zero (u32), slab id (16), slot length (u64), number of slots (u64), epoch
(u64), closed cleanly (u64), xxh3-64 of all before (u64).

Descriptor: magic (8), slab id (16), number of the slot (u64), epoch (u32), zero (u32), record length (u64), header
length (u16), key length (u16), zero (u32), namespace digest (32), key (64, zero-padded), xxh3-64 of the record's
header and of all before (u64).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from kvstore.codec.record import HEADER_BYTES
from kvstore.types import KEY_BYTES_MAX, BlockKey

__all__ = [
    "DATA_OFFSET",
    "DESCRIPTOR_MAGIC",
    "PAGE",
    "SLAB_NAME",
    "SLAB_VERSION",
    "SNAPSHOT_NAME",
    "Descriptor",
    "Superblock",
    "decode_descriptor",
    "decode_superblock",
    "encode_descriptor",
    "encode_superblock",
    "is_named",
    "slot_bytes_for",
]

PAGE: Final = 4096
"""Unit of everything in a slab: what direct I/O takes everywhere."""

SLAB_NAME: Final = "slab.kvs"
SNAPSHOT_NAME: Final = "snapshot.kvs"
SLAB_VERSION: Final = 1
DATA_OFFSET: Final = 2 * PAGE
"""Where the slots begin, behind the copies of the superblock."""

SUPERBLOCK_MAGIC: Final = b"\x89kvslab\n"
DESCRIPTOR_MAGIC: Final = b"\x89kvslot\n"

_SUPERBLOCK: Final = struct.Struct("<8sII16sQQQQ")
_DESCRIPTOR: Final = struct.Struct("<8s16sQIIQHHI32s64s")
_IDENTITY: Final = struct.Struct("<HI32s64s")
"""The last fields of a descriptor: which block it names."""
_CHECKSUM: Final = struct.Struct("<Q")
_DESCRIPTOR_END: Final = HEADER_BYTES + _DESCRIPTOR.size
_IDENTITY_AT: Final = _DESCRIPTOR_END - _IDENTITY.size


@dataclass(frozen=True, slots=True)
class Superblock:
    """What a slab says of itself.

    Attributes:
        version: Format version.
        slab_id: 16 random bytes; a slab that begins anew gets others, so that nothing old in it counts.
        slot_bytes: Length of a slot.
        slots: How many there are.
        epoch: Counts the times that the slab was opened.
        clean: Whether it was closed with a snapshot of the same epoch, which is then the whole truth.
    """

    version: int
    slab_id: bytes
    slot_bytes: int
    slots: int
    epoch: int
    clean: bool

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return DATA_OFFSET + self.slots * self.slot_bytes


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Which record lies in a slot.

    Attributes:
        epoch: Epoch of the slab when it was written.
        record_bytes: Length of the record, header included.
        namespace_digest: 32 bytes.
        key: Key of the block.
    """

    epoch: int
    record_bytes: int
    namespace_digest: bytes
    key: BlockKey


def slot_bytes_for(payload_bytes_max: int) -> int:
    """Return the length of slots for payloads up to a length."""
    return PAGE + -(-payload_bytes_max // PAGE) * PAGE


def encode_superblock(superblock: Superblock) -> bytes:
    """Return the page of a superblock."""
    body = _SUPERBLOCK.pack(
        SUPERBLOCK_MAGIC,
        superblock.version,
        0,
        superblock.slab_id,
        superblock.slot_bytes,
        superblock.slots,
        superblock.epoch,
        superblock.clean,
    )
    return (body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))).ljust(PAGE, b"\0")


def decode_superblock(page: bytes) -> Superblock | None:
    """Return the superblock in a page; None if it is damaged or none.

    Of an unknown version only the version is looked at; the rest may mean something else.
    """
    magic, version, _, slab_id, slot_bytes, slots, epoch, clean = _SUPERBLOCK.unpack_from(page)
    (checksum,) = _CHECKSUM.unpack_from(page, _SUPERBLOCK.size)
    if magic != SUPERBLOCK_MAGIC:
        return None
    if version != SLAB_VERSION:
        return Superblock(version, slab_id, 0, 0, 0, False)
    if checksum != xxhash.xxh3_64_intdigest(page[: _SUPERBLOCK.size]):
        return None
    return Superblock(version, slab_id, slot_bytes, slots, epoch, clean == 1)


def encode_descriptor(
    page: memoryview, slab_id: bytes, slot: int, header_bytes: int, epoch: int, record_bytes: int, digest: bytes,
    key: BlockKey,
) -> None:  # fmt: skip
    """Write a descriptor into a header page that has the record's header in it already.

    Args:
        page: The header page.
        slab_id: Of the slab.
        slot: Number of the slot in it.
        header_bytes: Length of the record's header.
        epoch: See :class:`Descriptor`, of which this takes the fields: making one would double the time.
        record_bytes: See there.
        digest: Digest of the namespace.
        key: Key of the block.
    """
    _DESCRIPTOR.pack_into(
        page,
        HEADER_BYTES,
        DESCRIPTOR_MAGIC,
        slab_id,
        slot,
        epoch & 0xFFFFFFFF,
        0,
        record_bytes,
        header_bytes,
        len(key),
        0,
        digest,
        key,
    )
    _CHECKSUM.pack_into(page, _DESCRIPTOR_END, xxhash.xxh3_64_intdigest(page[:_DESCRIPTOR_END]))


def is_named(page: memoryview, digest: bytes, key: BlockKey) -> bool:
    """Tell whether a header page names this block. It proves nothing: checksum, slab and slot are not looked at."""
    return _IDENTITY.unpack_from(page, _IDENTITY_AT) == (len(key), 0, digest, key.ljust(KEY_BYTES_MAX, b"\0"))


def decode_descriptor(page: memoryview, slab_id: bytes, slot: int) -> Descriptor | None:
    """Return the descriptor in a header page.

    None if there is none, if it or the record's header is damaged, or if it is not of this slot of this slab.
    """
    magic, found_id, found_slot, epoch, _, size, _, key_length, _, digest, key = _DESCRIPTOR.unpack_from(
        page, HEADER_BYTES
    )
    if magic != DESCRIPTOR_MAGIC or found_id != slab_id or found_slot != slot:
        return None
    (checksum,) = _CHECKSUM.unpack_from(page, _DESCRIPTOR_END)
    if checksum != xxhash.xxh3_64_intdigest(page[:_DESCRIPTOR_END]) or not 0 < key_length <= KEY_BYTES_MAX:
        return None
    return Descriptor(epoch, size, digest, key[:key_length])
