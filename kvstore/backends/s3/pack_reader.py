"""Reads what packs and notes of removals say: their heads, and nothing of the records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.backends.s3.client import ObjectClient, ObjectInfo
from kvstore.backends.s3.failures import S3Error
from kvstore.backends.s3.names import ObjectNames
from kvstore.backends.s3.pack_format import HEAD_BYTES_FIRST, HEAD_BYTES_MAX, PackEntry, PackFormat, Unreadable
from kvstore.namespace import Namespace
from kvstore.types import BlockKey

__all__ = ["Pack", "PackReader"]

_HEADS_AT_ONCE: Final = 64
"""Heads that are read at the same time."""


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack or a note, as far as it could be read.

    Attributes:
        info: What the service says of it.
        entries: Records of a pack that was read.
        gone: What a note that was read says is gone: names of packs, and keys.
        fault: Why it was not read; None if it was, or has gone.
    """

    info: ObjectInfo
    entries: Sequence[PackEntry] | None = None
    gone: Sequence[tuple[str, BlockKey]] | None = None
    fault: Unreadable | S3Error | None = None

    @property
    def is_damaged(self) -> bool:
        """Whether it can never be read, by any engine."""
        return isinstance(self.fault, Unreadable) and self.fault.is_damage


class PackReader:
    """Reads heads of packs, and notes, of one namespace. For one event loop.

    Attributes:
        names: Of the namespace.
        reads: Requests that were answered.
    """

    def __init__(self, client: ObjectClient, prefix: str, namespace: Namespace) -> None:
        self.names = ObjectNames(prefix, namespace)
        self._client = client
        self._format = PackFormat(namespace)
        self.reads = 0

    async def read_all(self, infos: Sequence[ObjectInfo]) -> AsyncGenerator[Pack, None]:
        """Yield packs and notes in order, reading some at once."""
        for start in range(0, len(infos), _HEADS_AT_ONCE):
            for pack in await asyncio.gather(*(self.read(info) for info in infos[start : start + _HEADS_AT_ONCE])):
                yield pack

    async def read(self, info: ObjectInfo) -> Pack:
        """Return what a pack or a note says."""
        name = self.names.read(info.key)
        try:
            if name is None or name.kind == "block":
                raise Unreadable
            if name.kind == "pack":
                return Pack(info, entries=await self._entries(info))
            note = await self._start(info, min(info.size_bytes, HEAD_BYTES_MAX))
            gone = None if note is None else self._format.read_gone(note)
        except (Unreadable, S3Error) as error:
            return Pack(info, fault=error.with_traceback(None))
        return Pack(info, gone=None if gone is None else [(self.names.packs + pack, key) for pack, key in gone])

    async def _entries(self, info: ObjectInfo) -> list[PackEntry] | None:
        wanted = min(info.size_bytes, HEAD_BYTES_FIRST)
        while True:
            head = await self._start(info, wanted)
            if head is None:
                return None
            entries = self._format.read_pack(head)
            if not isinstance(entries, int):
                # Of a pack that is shorter than it says, the records would be read for nothing.
                if entries and entries[-1].offset + entries[-1].size_bytes > info.size_bytes:
                    raise Unreadable(is_damage=True)
                return entries
            if entries <= wanted or entries > info.size_bytes:
                raise Unreadable(is_damage=True)
            wanted = entries

    async def _start(self, info: ObjectInfo, size_bytes: int) -> bytes | None:
        if not size_bytes:
            # Of an empty object there is no range to ask for.
            return b""
        start = await self._client.get_start(info.key, size_bytes)
        self.reads += 1
        return start
