r"""Packs (several records in one object, after a head) and notes of removals from packs.

A pack is::

    magic      8   89 6b 76 70 61 63 6b 0a   ("\x89kvpack\n")
    version    2   1; all numbers are little-endian
    reserved   2   0
    count      4   records in it
    head_bytes 4   length of the head, up to the first record
    reserved   4   0
    namespace 32   digest of the namespace of its blocks
    entries        for each record: length of the record (4), length of the key (1), key
    checksum   8   xxh3-64 of all preceding bytes
    records        in the order of the entries

A note of removals has the same layout without records, and the magic ``\x89kvgone\n``. Each entry is a removed block:
the "record length" is the length of the pack's name without its folder, and the "key" is that name followed by the
block's key.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.backends.s3.client import ObjectClient, ObjectInfo
from kvstore.backends.s3.failures import S3Error
from kvstore.backends.s3.names import ObjectNames
from kvstore.codec.checksum import header_checksum
from kvstore.namespace import Namespace
from kvstore.types import KEY_BYTES_MAX, BlockKey

RECORD_BYTES_MAX: Final = (1 << 32) - 1
"""Longest record that an entry can represent."""

_HEAD_BYTES_FIRST: Final = 4096
"""First read of an unknown pack: the head of 32 blocks has about 1,300 bytes, and a second round trip would take as
long as receiving 4 KiB."""

_HEAD_BYTES_MAX: Final = 1 << 20
_HEADS_AT_ONCE: Final = 64

_VERSION: Final = 1
_PACK: Final = b"\x89kvpack\n"
_GONE: Final = b"\x89kvgone\n"
_START: Final = struct.Struct("<8sHHIII32s")
_ENTRY: Final = struct.Struct("<IB")
_CHECKSUM: Final = struct.Struct("<Q")


class Unreadable(Exception):
    """The object is not a pack or note of this version and namespace, or is damaged.

    ``is_damage``: whether its start has this version and namespace, so that no engine can read it.
    """

    def __init__(self, *, is_damage: bool = False) -> None:
        super().__init__("damaged" if is_damage else "of another version or namespace, or something else")
        self.is_damage = is_damage


class PackEntry(NamedTuple):
    """Location of a record in its pack."""

    key: BlockKey
    offset: int
    size_bytes: int


class PackFormat:
    """Writes and reads heads of packs and notes of one namespace. No I/O."""

    def __init__(self, namespace: Namespace) -> None:
        self._digest = namespace.digest

    def pack_head(self, records: Sequence[tuple[BlockKey, int]]) -> tuple[bytes, list[PackEntry]]:
        """Return the head of a pack of records (key, length), and the location of each."""
        body = b"".join([_ENTRY.pack(size, len(key)) + key for key, size in records])
        head = self._sealed(_PACK, len(records), body)
        return head, _placed(records, len(head))

    def read_pack(self, start: bytes | memoryview) -> list[PackEntry] | int:
        """Return the records' locations, or the length of the head if ``start`` is too short; else raise Unreadable."""
        found = self._entries(_PACK, start)
        if isinstance(found, int):
            return found
        records, head_bytes = found
        if any(not 1 <= len(key) <= KEY_BYTES_MAX for key, _ in records):
            raise Unreadable(is_damage=True)
        return _placed(records, head_bytes)

    def gone_note(self, removed: Sequence[tuple[str, BlockKey]]) -> bytes:
        """Return a note of removed blocks (name of the pack without its folder, key)."""
        parts = []
        for pack, key in removed:
            name = pack.encode()
            parts.append(_ENTRY.pack(len(name), len(name) + len(key)) + name + key)
        return self._sealed(_GONE, len(removed), b"".join(parts))

    def read_gone(self, note: bytes | memoryview) -> list[tuple[str, BlockKey]]:
        """Return the removed blocks that a note lists; else raise Unreadable."""
        found = self._entries(_GONE, note)
        if isinstance(found, int):
            raise Unreadable(is_damage=True)
        try:
            return [(both[:length].decode("ascii"), both[length:]) for both, length in found[0]]
        except UnicodeDecodeError as error:
            raise Unreadable(is_damage=True) from error

    def _sealed(self, magic: bytes, count: int, body: bytes) -> bytes:
        head_bytes = _START.size + len(body) + _CHECKSUM.size
        head = _START.pack(magic, _VERSION, 0, count, head_bytes, 0, self._digest) + body
        return head + _CHECKSUM.pack(header_checksum(head))

    def _entries(self, magic: bytes, start: bytes | memoryview) -> tuple[list[tuple[bytes, int]], int] | int:
        """Return (key, length) of each entry and the length of the head; only the latter if ``start`` is too short."""
        if len(start) < _START.size:
            raise Unreadable
        found, version, _, count, head_bytes, _, digest = _START.unpack_from(start)
        if (found, version, digest) != (magic, _VERSION, self._digest):
            raise Unreadable
        if not _START.size + _CHECKSUM.size <= head_bytes <= _HEAD_BYTES_MAX:
            raise Unreadable(is_damage=True)
        if len(start) < head_bytes:
            return int(head_bytes)
        end = head_bytes - _CHECKSUM.size
        head = bytes(start[:end])
        if _CHECKSUM.unpack_from(start, end)[0] != header_checksum(head):
            raise Unreadable(is_damage=True)
        entries, at = [], _START.size
        for _ in range(count):
            # The checksum matches, so a bad entry was written that way; it is refused nevertheless.
            if at + _ENTRY.size > end:
                raise Unreadable(is_damage=True)
            size, length = _ENTRY.unpack_from(head, at)
            at += _ENTRY.size
            entries.append((head[at : at + length], size))
            at += length
        if at != end:
            raise Unreadable(is_damage=True)
        return entries, head_bytes


def _placed(records: Sequence[tuple[BlockKey, int]], offset: int) -> list[PackEntry]:
    entries = []
    for key, size in records:
        entries.append(PackEntry(key, offset, size))
        offset += size
    return entries


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack or note, or the reason why it is unreadable."""

    info: ObjectInfo  # Metadata of the object.
    entries: Sequence[PackEntry] | None = None  # Records of a pack; None for notes, unreadable packs and deleted packs.
    gone: Sequence[tuple[str, BlockKey]] | None = None  # Removals that a note lists: names of packs, and keys.
    fault: Unreadable | S3Error | None = None  # Reason why it is unreadable; None if it was read or no longer exists.

    @property
    def is_damaged(self) -> bool:
        """Whether no engine can ever read it."""
        return isinstance(self.fault, Unreadable) and self.fault.is_damage


class PackReader:
    """Reads pack heads and notes of one namespace. For one event loop. ``reads`` counts answered requests."""

    def __init__(self, client: ObjectClient, prefix: str, namespace: Namespace) -> None:
        self.names = ObjectNames(prefix, namespace)
        self.format = PackFormat(namespace)
        self.reads = 0
        self._client = client

    async def read_all(self, infos: Sequence[ObjectInfo]) -> AsyncGenerator[Pack, None]:
        """Yield packs and notes in order, reading several concurrently."""
        for start in range(0, len(infos), _HEADS_AT_ONCE):
            for pack in await asyncio.gather(*(self.read(info) for info in infos[start : start + _HEADS_AT_ONCE])):
                yield pack

    async def read(self, info: ObjectInfo) -> Pack:
        """Return the contents of a pack's head or of a note."""
        name = self.names.read(info.key)
        try:
            if name is None or name.kind == "block":
                raise Unreadable
            if name.kind == "pack":
                return Pack(info, entries=await self._entries(info))
            note = await self._start(info, min(info.size_bytes, _HEAD_BYTES_MAX))
            gone = None if note is None else self.format.read_gone(note)
        except (Unreadable, S3Error) as error:
            return Pack(info, fault=error.with_traceback(None))
        return Pack(info, gone=None if gone is None else [(self.names.packs + pack, key) for pack, key in gone])

    async def _entries(self, info: ObjectInfo) -> list[PackEntry] | None:
        wanted = min(info.size_bytes, _HEAD_BYTES_FIRST)
        while True:
            head = await self._start(info, wanted)
            if head is None:
                return None
            entries = self.format.read_pack(head)
            if not isinstance(entries, int):
                # The object is shorter than its head states, so reads of its last records would fail.
                if entries and entries[-1].offset + entries[-1].size_bytes > info.size_bytes:
                    raise Unreadable(is_damage=True)
                return entries
            if entries <= wanted or entries > info.size_bytes:
                raise Unreadable(is_damage=True)
            wanted = entries

    async def _start(self, info: ObjectInfo, size_bytes: int) -> bytes | None:
        start = await self._client.get_start(info.key, size_bytes)
        self.reads += size_bytes > 0
        return start
