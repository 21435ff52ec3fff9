"""Reads what packs and notes of removals say: their heads, and nothing of the records."""

from __future__ import annotations

from kvstore.backends.s3.client import ObjectClient, ObjectInfo
from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.pack_format import HEAD_BYTES_FIRST, HEAD_BYTES_MAX, PackEntry, PackFormat, Unreadable
from kvstore.namespace import Namespace
from kvstore.types import BlockKey

__all__ = ["PackReader"]


class PackReader:
    """Reads heads of packs, and notes, of one namespace. For one event loop.

    Args:
        client: Sends requests, with retries.
        config: Times.
        namespace: Of the blocks.

    Attributes:
        reads: Requests that were answered.
    """

    def __init__(self, client: ObjectClient, config: S3Config, namespace: Namespace) -> None:
        self._client = client
        self._config = config
        self._format = PackFormat(namespace)
        self.reads = 0

    async def pack(self, info: ObjectInfo) -> list[PackEntry] | None:
        """Return what lies in a pack, and where; None if it is gone.

        Raises:
            Unreadable: It is no pack of this version and namespace, or is damaged.
            S3Error: The service failed, or refuses this one.
        """
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

    async def note(self, info: ObjectInfo) -> list[tuple[str, BlockKey]] | None:
        """Return what a note says is gone: names of packs, without their folder, and keys. None as of :meth:`pack`.

        Raises:
            Unreadable: It is no note of this version and namespace, or is damaged.
            S3Error: The service failed, or refuses this one.
        """
        body = await self._start(info, min(info.size_bytes, HEAD_BYTES_MAX))
        return None if body is None else self._format.read_gone(body)

    async def _start(self, info: ObjectInfo, size_bytes: int) -> bytes | None:
        if not size_bytes:
            # Of an empty object there is no range to ask for.
            return b""
        start = await self._client.get_start(info.key, size_bytes, timeout_s=self._config.lookup_timeout)
        self.reads += 1
        return start
