"""The answer to one load: records from rows of the primary tier, lent meanwhile, and from this engine's storage."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, Protocol

from kvstore.backends.base import Backend
from kvstore.backends.peer import protocol
from kvstore.backends.peer.config import PeerConfig
from kvstore.backends.peer.nixl import SharedMemory
from kvstore.backends.peer.pipe import Pipe
from kvstore.backends.peer.protocol import Part, PeerProtocolError
from kvstore.backends.peer.stored import BATCH_MAX, StoredRecords
from kvstore.codec.record import HEADER_BYTES, RecordCodec
from kvstore.primary.lending import Loan
from kvstore.types import BlockKey, Found

__all__ = ["LoadAnswer", "RowSource", "ServerCounters"]

_TURN_BYTES: Final = 4 << 20
"""So much is sent to a fast reader before the loop goes on with other things."""


class RowSource(Protocol):
    """Where served blocks come from; :class:`kvstore.primary.lending.Lender` is one."""

    @property
    def slots(self) -> int:
        """Most blocks there can be."""

    @property
    def backends(self) -> Sequence[Backend]:
        """Storage of this engine, on this loop, whose records are served too."""

    @property
    def memory(self) -> memoryview:
        """What the rows are parts of."""

    def keys(self) -> Sequence[BlockKey]:
        """Return all blocks."""

    def find(self, key: BlockKey) -> Found:
        """Return whether a block is there, or coming."""

    def is_waiting(self, hand_over: bytes) -> bool:
        """Return whether a hand-over is known here, and its blocks are not yet."""

    def lend(self, key: BlockKey) -> Loan | None:
        """Return a block's row, which stays as it is until it is given back; None if there is none."""

    def note_sent(self, key: BlockKey) -> None:
        """Note that a block has been sent."""

    def give_back(self, loan: Loan) -> None:
        """End a loan."""


@dataclass(slots=True)
class ServerCounters:
    """Counts of a server."""

    connections_accepted: int = 0
    connections_refused: int = 0
    keys_looked_up: int = 0
    blocks_sent: int = 0
    blocks_lent: int = 0
    bytes_sent: int = 0
    blocks_from_storage: int = 0
    blocks_absent: int = 0


class LoadAnswer:
    """Sends the records of one load, in the order of its keys.

    Args:
        config: Of the backend.
        counters: Of the server.
        source: The primary tier's rows.
        stored: Records on storage.
        records: Makes the headers.
        pipe: To the client.
    """

    def __init__(
        self,
        config: PeerConfig,
        counters: ServerCounters,
        source: RowSource,
        stored: StoredRecords,
        records: RecordCodec,
        pipe: Pipe,
    ) -> None:
        self._config = config
        self._counters = counters
        self._source = source
        self._stored = stored
        self._records = records
        self._pipe = pipe
        self._absent = 0
        """Blocks that are not there, of which the client has not been told yet."""
        self._patience = asyncio.timeout(config.timeout)

    async def send(self, keys: Sequence[BlockKey], header: memoryview, memory: SharedMemory | None, rows: int) -> None:
        """Send all parts.

        Args:
            keys: What was asked for.
            header: Room for one.
            memory: Rows in it are lent, and the client reads them by NIXL.
            rows: Most rows to lend that way; the others are lent one at a time, while they are sent.

        Raises:
            OSError: The client is gone, or slow (``TimeoutError``).
            PeerProtocolError: It did not return the rows.
        """
        lent: list[BlockKey] = []
        in_turn = at = lent_bytes = 0
        with ExitStack() as loans:
            async with self._patience:
                while at < len(keys):
                    key = keys[at]
                    loan = self._source.lend(key)
                    if loan is not None:
                        with ExitStack() as held:
                            held.callback(self._source.give_back, loan)
                            # Made here and now, before the first await: the row is of this namespace while it is lent.
                            self._records.encode_header(header, key, loan.row)
                            in_turn += loan.row.nbytes
                            address = memory.address_of(loan.row) if memory is not None and len(lent) < rows else None
                            if address is None:
                                await self._send_record(key, header, loan.row)
                            else:
                                length = HEADER_BYTES + loan.row.nbytes
                                await self._send(Part.LENT, length, protocol.pack_address(address), header)
                                loans.push(held.pop_all())
                                lent.append(key)
                                lent_bytes += length
                        at += 1
                    elif self._stored:
                        ahead = keys[at + 1 : at + BATCH_MAX]
                        run = [key, *takewhile(lambda one: self._source.find(one) is not Found.THERE, ahead)]
                        await self._send_stored(run)
                        at += len(run)
                    else:
                        self._absent += 1
                        at += 1
                    if in_turn >= _TURN_BYTES:
                        in_turn = 0
                        await asyncio.sleep(0)
                await self._pipe.send(self._told_absent())
                if lent:
                    self._wait_longer(lent_bytes)
                    if await self._pipe.receive_bytes(len(protocol.RETURNED)) != protocol.RETURNED:
                        raise PeerProtocolError("the client did not return the rows that were lent to it")
                    for key in lent:
                        self._source.note_sent(key)
                    self._counters.blocks_lent += len(lent)

    async def _send_stored(self, keys: Sequence[BlockKey]) -> None:
        """Send a few blocks from storage."""
        loop, timeout_s = asyncio.get_running_loop(), self._config.timeout
        self._patience.reschedule(loop.time() + 3 * timeout_s)
        async with self._stored.reading(keys, timeout_s) as records:
            for key in keys:
                if key in records:
                    await self._send_record(key, *records[key])
                    self._counters.blocks_from_storage += 1
                else:
                    self._absent += 1

    async def _send_record(self, key: BlockKey, header: memoryview, payload: memoryview) -> None:
        length = HEADER_BYTES + payload.nbytes
        await self._send(Part.RECORD, length, header, payload)
        self._source.note_sent(key)
        self._counters.blocks_sent += 1
        self._counters.bytes_sent += length

    async def _send(self, part: Part, length: int, *pieces: bytes | memoryview) -> None:
        self._wait_longer(length)
        await self._pipe.send([*self._told_absent(), protocol.pack_part(part, length), *pieces])

    def _told_absent(self) -> Sequence[bytes]:
        """Return what tells the client of absent blocks, if there are any new ones."""
        count, self._absent = self._absent, 0
        self._counters.blocks_absent += count
        return [protocol.pack_part(Part.ABSENT) * count] if count else []

    def _wait_longer(self, length: int) -> None:
        """Give the client the time from now on that so many bytes may take."""
        time_s = self._config.timeout + length / self._config.bytes_per_second_min
        self._patience.reschedule(asyncio.get_running_loop().time() + time_s)
