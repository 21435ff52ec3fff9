"""Snapshots of presence: made of what the elected engine lists, read by all, trusted while they are renewed."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from kvstore.backends.s3.client import ObjectClient, ObjectInfo
from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.keys import ObjectName
from kvstore.backends.s3.snapshot import SNAPSHOT_BYTES_MAX, BloomFilter
from kvstore.backends.s3.uses import name_digest
from kvstore.namespace import Namespace

__all__ = ["PresenceSnapshot", "SnapshotMaker", "snapshot_folder"]

_ROUNDS_TRUSTED: Final = 3
"""Rounds that a snapshot is trusted without being renewed: after that nobody may be making them any more."""

_BLOCKS_MAX: Final = 13_000_000
"""Blocks that the elected engine takes note of, 8 bytes each."""

_WRITTEN_MAX: Final = 500_000
"""Objects of our own that are remembered beside each snapshot, some 70 bytes each."""

_SNAPSHOTS_BACK: Final = 3
"""For so many snapshots what this engine wrote is remembered. What it wrote before it read the first need not be in the
second, whose list may have been under way then; the list for the third began when the second was there."""


def snapshot_folder(prefix: str) -> str:
    """Return where snapshots lie; each has the name of its namespace."""
    return f"{prefix}_keeper/presence/"


class SnapshotMaker:
    """Makes snapshots of all namespaces under a prefix, from a list of its objects.

    Args:
        prefix: Of the objects.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._digests: dict[str, array[int]] = {}
        self._blocks = 0

    def see(self, info: ObjectInfo, name: ObjectName | None) -> None:
        """Take note of an object, and of what its name says."""
        if name is not None and name.kind == "block" and self._blocks < _BLOCKS_MAX:
            self._blocks += 1
            digest = name_digest(info.key.removeprefix(self._prefix))
            self._digests.setdefault(name.namespace, array("Q")).append(digest)

    async def publish(
        self, client: ObjectClient, timeout_s: float, *, may_write: Callable[[], Awaitable[bool]] | None = None
    ) -> int:
        """Write the snapshots; return how many. If there were too many blocks to note them all, none is written.

        Args:
            client: Sends requests, with retries.
            timeout_s: For each of them.
            may_write: Asked before each snapshot; the first no ends it. A list takes long, and whoever has taken over
                meanwhile may have written newer ones.

        Raises:
            S3Error: The service failed.
        """
        if self._blocks >= _BLOCKS_MAX:
            return 0
        written = 0
        for namespace, digests in self._digests.items():
            # On a thread: numpy needs tenths of a second for a million.
            made = await asyncio.to_thread(BloomFilter.of_digests, digests)
            if made is not None:
                if may_write is not None and not await may_write():
                    break
                body = made.encode(Namespace.of_digest(bytes.fromhex(namespace)))
                await client.put(snapshot_folder(self._prefix) + namespace, [body], timeout_s=timeout_s)
                written += 1
        return written


class PresenceSnapshot:
    """What the last snapshot of a namespace says of blocks. For one event loop.

    Args:
        client: Sends requests, with retries.
        config: Prefix and times.
        namespace: Of the blocks.
    """

    def __init__(self, client: ObjectClient, config: S3Config, namespace: Namespace) -> None:
        self._client = client
        self._config = config
        self._namespace = namespace
        self._name = snapshot_folder(config.prefix) + namespace.hex
        self._filter: BloomFilter | None = None
        self._version: tuple[str, float] | None = None
        self._rounds = 0
        # What this engine wrote since the last snapshot, since the one before it, and so on.
        self._written: deque[set[int]] = deque([set()], maxlen=_SNAPSHOTS_BACK)
        self.counters = dict.fromkeys(("snapshots_read", "heads_spared"), 0)

    @property
    def is_trusted(self) -> bool:
        """Whether there is a snapshot, and somebody renews it."""
        return self._filter is not None and self._rounds < _ROUNDS_TRUSTED

    def note_written(self, name: str) -> None:
        """Note an object that this engine wrote."""
        if len(self._written[0]) < _WRITTEN_MAX:
            self._written[0].add(name_digest(name))

    def rules_out(self, name: str) -> bool:
        """Tell that an object is not there, without a request; False if that is not known."""
        if self._filter is None or not self.is_trusted or name.removeprefix(self._config.prefix) in self._filter:
            return False
        digest = name_digest(name)
        # Of one that is full we don't know: nobody makes snapshots, or too seldom.
        if any(digest in written or len(written) >= _WRITTEN_MAX for written in self._written):
            return False
        self.counters["heads_spared"] += 1
        return True

    async def refresh(self) -> None:
        """Read the snapshot if there is a new one; called once a round.

        Raises:
            S3Error: The service failed; the last snapshot stays, and grows old.
        """
        self._rounds += 1
        # From just before its name: not all clients take a whole name as a prefix.
        page = await self._client.list_page(
            snapshot_folder(self._config.prefix),
            start_after=self._name[:-1],
            timeout_s=self._config.lookup_timeout,
        )
        info = next((info for info in page.objects if info.key == self._name), None)
        if info is None or not 0 < info.size_bytes <= SNAPSHOT_BYTES_MAX:
            return
        # The same bytes written anew are news, too: somebody looked.
        version = (info.etag, info.modified_at)
        if version == self._version:
            return
        body = memoryview(bytearray(info.size_bytes))
        timeout_s = self._config.load_timeout + info.size_bytes / self._config.bytes_per_second_min
        found = await self._client.get_into(self._name, [body], offset=0, timeout_s=timeout_s)
        if found is None:
            return
        made = await asyncio.to_thread(BloomFilter.decode, bytes(body[: found.size_bytes]), self._namespace)
        if made is not None:
            self._filter, self._version, self._rounds = made, version, 0
            self._written.appendleft(set())
            self.counters["snapshots_read"] += 1
