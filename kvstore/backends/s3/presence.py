r"""Presence snapshots: the elected engine writes them from its listing; all engines read them and trust recent ones.

A snapshot is a Bloom filter, which spares a cold engine requests for a million blocks. The layout of the object, with
little-endian numbers::

    magic      8   89 6b 76 62 6c 6f 6d 0a   ("\x89kvblom\n")
    version    2   1
    hashes     2   bits set per block
    reserved   4   0
    bits       8   length of the filter
    blocks     8   number of blocks
    namespace 32   digest of their namespace
    checksum   8   xxh3-64 of the filter
    filter         bit n is bit n % 8, from the lowest, of byte n // 8

Bit i of a block is ((a + i * b) mod 2**64) mod bits, where a is the xxh3-64 of its object's name without the prefix,
and b is a rotated by 32 bits, with the lowest bit set.
"""

from __future__ import annotations

import asyncio
import struct
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.backends.s3.client import ObjectClient, ObjectInfo
from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.names import KeeperNames, ObjectName
from kvstore.backends.s3.notes import name_digest
from kvstore.codec.checksum import header_checksum
from kvstore.namespace import Namespace

_ROUNDS_TRUSTED: Final = 3
"""Rounds for which a snapshot is trusted without renewal; after that, the elected engine may be gone."""

_BLOCKS_MAX: Final = 13_000_000
"""Maximum number of listed blocks that the elected engine keeps, at 8 bytes each."""

_WRITTEN_MAX: Final = 500_000
"""Own writes remembered per snapshot, about 70 bytes each."""

_SNAPSHOTS_BACK: Final = 3
"""Number of snapshots for which own writes are remembered. A write before this engine read one snapshot may be missing
in the next, whose listing may already have started. The listing for the one after that started later, and includes
the write."""

_BITS_PER_BLOCK: Final = 10
_HASHES: Final = 7
"""Together: a false-positive rate of about 1 %."""

_BITS_MIN: Final = 1 << 13
_START: Final = struct.Struct("<8sHHIQQ32sQ")
_MAGIC: Final = b"\x89kvblom\n"
_VERSION: Final = 1
_MASK: Final = (1 << 64) - 1

_SNAPSHOT_BYTES_MAX: Final = 16 << 20
"""Longest snapshot, for about thirteen million blocks; larger namespaces have no snapshot."""


class SnapshotMaker:
    """Makes snapshots of all namespaces under a prefix from a listing of its objects."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._digests: dict[str, array[int]] = {}
        self._blocks = 0

    def see(self, info: ObjectInfo, name: ObjectName | None) -> None:
        """Add an object and its parsed name."""
        if name is not None and name.kind == "block" and self._blocks < _BLOCKS_MAX:
            self._blocks += 1
            digest = name_digest(info.key.removeprefix(self._prefix))
            self._digests.setdefault(name.namespace, array("Q")).append(digest)

    async def publish(self, client: ObjectClient, may_write: Callable[[], Awaitable[bool]]) -> int:
        """Write the snapshots and return their number. With more blocks than the maximum, none is written.

        ``may_write`` is awaited before each write, and False ends the publication: a listing takes long, and an engine
        that has taken the lease meanwhile may have written newer snapshots.
        """
        written = 0
        for namespace, digests in self._digests.items() if self._blocks < _BLOCKS_MAX else ():
            # On a thread: numpy needs tenths of a second for a million blocks.
            made = await asyncio.to_thread(BloomFilter.of_digests, digests)
            if made is not None:
                if not await may_write():
                    break
                body = made.encode(Namespace.of_digest(bytes.fromhex(namespace)))
                await client.put(KeeperNames(self._prefix).snapshots + namespace, [body])
                written += 1
        return written


class PresenceSnapshot:
    """Negative lookups from the last snapshot of a namespace. For one event loop."""

    def __init__(self, client: ObjectClient, config: S3Config, namespace: Namespace) -> None:
        self._client = client
        self._prefix = config.prefix
        self._namespace = namespace
        self._name = KeeperNames(config.prefix).snapshots + namespace.hex
        self._filter: BloomFilter | None = None
        self._version: tuple[str, float] | None = None
        self._rounds = 0
        # Digests of own writes, one set per snapshot, the newest first.
        self._written: deque[set[int]] = deque([set()], maxlen=_SNAPSHOTS_BACK)
        self.counters = dict.fromkeys(("snapshots_read", "heads_spared"), 0)

    def note_written(self, name: str) -> None:
        """Remember an object that this engine writes."""
        if len(self._written[0]) < _WRITTEN_MAX:
            self._written[0].add(name_digest(name))

    def rules_out(self, name: str) -> bool:
        """Return whether a recent snapshot shows that an object does not exist."""
        is_recent = self._rounds < _ROUNDS_TRUSTED
        if self._filter is None or not is_recent or name.removeprefix(self._prefix) in self._filter:
            return False
        digest = name_digest(name)
        # A full set may be incomplete: snapshots are too rare for the rate of writes.
        if any(digest in written or len(written) >= _WRITTEN_MAX for written in self._written):
            return False
        self.counters["heads_spared"] += 1
        return True

    async def refresh(self) -> None:
        """Read the snapshot if it is new; called once per round. After a failure, the last one stays and ages."""
        self._rounds += 1
        # Starts just before the snapshot's name: not all clients accept a full name as a prefix.
        folder = KeeperNames(self._prefix).snapshots
        page = await self._client.list_page(folder, start_after=self._name[:-1])
        info = next((info for info in page.objects if info.key == self._name), None)
        if info is None or not 0 < info.size_bytes <= _SNAPSHOT_BYTES_MAX:
            return
        # The same content written again counts as a renewal.
        version = (info.etag, info.modified_at)
        if version == self._version:
            return
        data = await self._client.get_start(self._name, info.size_bytes)
        if data is None:
            return
        made = await asyncio.to_thread(BloomFilter.decode, data, self._namespace)
        if made is not None:
            self._filter, self._version, self._rounds = made, version, 0
            self._written.appendleft(set())
            self.counters["snapshots_read"] += 1


class BloomFilter:
    """A set of names with false positives but no false negatives.

    ``bits`` are the filter's bytes; each name sets ``hashes`` bits; ``blocks`` is the number of names.
    """

    def __init__(self, bits: npt.NDArray[np.uint8], hashes: int = _HASHES, blocks: int = 0) -> None:
        self._bits = bits
        self._hashes = hashes
        self.blocks = blocks

    @classmethod
    def of_digests(cls, digests: Iterable[int]) -> BloomFilter | None:
        """Return the filter of names given by their digests; None if too many. Takes 0.2 s for a million."""
        starts = np.fromiter(digests, np.uint64)
        count = max(_BITS_MIN, -(-len(starts) * _BITS_PER_BLOCK // 8) * 8)
        if count // 8 + _START.size > _SNAPSHOT_BYTES_MAX:
            return None
        # One byte per bit, packed at the end: faster than setting single bits.
        flags = np.zeros(count, np.bool_)
        steps = (starts << np.uint64(32) | starts >> np.uint64(32)) | np.uint64(1)
        for i in range(_HASHES):
            flags[(starts + np.uint64(i) * steps) % np.uint64(count)] = True
        return cls(np.packbits(flags, bitorder="little"), blocks=len(starts))

    def __contains__(self, name: str) -> bool:
        start = name_digest(name)
        step = (start << 32 & _MASK | start >> 32) | 1
        count = len(self._bits) * 8
        for i in range(self._hashes):
            bit = (start + i * step & _MASK) % count
            if not self._bits[bit >> 3] >> (bit & 7) & 1:
                return False
        return True

    def encode(self, namespace: Namespace) -> bytes:
        body = self._bits.tobytes()
        checksum = header_checksum(body)
        start = _START.pack(_MAGIC, _VERSION, self._hashes, 0, len(body) * 8, self.blocks, namespace.digest, checksum)
        return start + body

    @classmethod
    def decode(cls, data: bytes, namespace: Namespace) -> BloomFilter | None:
        """Return the filter in an object; None if it is damaged, or not of this version and namespace."""
        if len(data) < _START.size:
            return None
        magic, version, hashes, _, bits, blocks, digest, checksum = _START.unpack_from(data)
        body = memoryview(data)[_START.size :]
        if (magic, version, digest) != (_MAGIC, _VERSION, namespace.digest) or not 1 <= hashes <= 64:
            return None
        if not bits or bits != len(body) * 8 or checksum != header_checksum(body):
            return None
        return cls(np.frombuffer(body, np.uint8), hashes, blocks)
