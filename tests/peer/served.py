"""A backend that loads from its own server, which serves its own memory: the contract suites can store to it."""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar

from kvstore.backends.base import RecordGeometry, RecordWrite
from kvstore.backends.peer import PeerBackend, PeerConfig
from kvstore.codec.record import HEADER_BYTES
from kvstore.config import TierConfig
from kvstore.namespace import Namespace
from kvstore.primary.lending import Loan
from kvstore.types import BlockKey, Found, Outcome

_MEMORY_BYTES = 1 << 30
"""Address space for all records of one medium; unwritten pages take no memory."""


class Records:
    """Stored rows with their headers: a source of rows, and the encoder of their headers."""

    slots = 4096
    backends = ()

    def __init__(self) -> None:
        self.by_key: dict[BlockKey, memoryview] = {}
        self.memory = memoryview(mmap.mmap(-1, _MEMORY_BYTES))
        self._used = 0

    def keys(self) -> list[BlockKey]:
        return list(self.by_key)

    def find(self, key: BlockKey) -> Found:
        return Found.THERE if key in self.by_key else Found.ABSENT

    def is_waiting(self, hand_over: bytes) -> bool:
        return False

    def lend(self, key: BlockKey) -> Loan | None:
        record = self.by_key.get(key)
        return None if record is None else Loan(0, record[HEADER_BYTES:])

    def add(self, key: BlockKey, pieces: Sequence[memoryview]) -> None:
        """Keep a record; its memory is never reused."""
        data = b"".join(pieces)
        self.by_key[key] = self.memory[self._used : self._used + len(data)]
        self.by_key[key][:] = data
        self._used += len(data)

    def note_sent(self, key: BlockKey) -> None:
        """See ``Lender``."""

    def give_back(self, loan: Loan) -> None:
        loan.row.release()

    def encode_header(self, out: memoryview, key: BlockKey, payload: memoryview) -> None:
        """Stand in for the server's ``RecordCodec``: the suites may put a record with a damaged or partial header."""
        out[:] = bytes(self.by_key[key][:HEADER_BYTES]).ljust(HEADER_BYTES, b"\0")


_MEDIA: defaultdict[tuple[str, str], Records] = defaultdict(Records)
"""Records by medium and namespace; a reopened backend finds them."""


class ServedConfig(PeerConfig, kw_only=True, frozen=True):
    """A peer that loads from itself; ``medium_name`` names its records."""

    has_own_load_breakers: ClassVar[bool] = False  # The suites test the tier's breaker, with faults above the peers.
    medium_name: str


class ServedPeer(PeerBackend):
    """Stores to memory, and loads from there over the wire."""

    config_type: ClassVar[type[TierConfig]] = ServedConfig
    takes_stores = True
    records: Records

    def __init__(self, config: ServedConfig) -> None:
        super().__init__(config)
        self.medium_name = config.medium_name
        self.is_broken = False

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        self.records = _MEDIA[self.medium_name, namespace.hex]
        self.set_lender(self.records)  # type: ignore[arg-type]
        await super().open(namespace, geometry)
        assert self._server is not None
        self._server._records = self.records  # type: ignore[assignment]

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        self._ready()
        return [Outcome.IO_ERROR if self.is_broken else self._put_one(write) for write in writes]

    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        self._ready()
        return [self.records.by_key.pop(key, None) is not None for key in keys]

    def _put_one(self, write: RecordWrite) -> Outcome:
        if write.key in self.records.by_key:
            return Outcome.EXISTS
        self.records.add(write.key, write.buffers)
        return Outcome.OK
