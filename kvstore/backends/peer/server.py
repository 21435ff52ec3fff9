"""The server: answers other engines from the rows of the primary tier, which are lent while they are sent."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, Protocol

from kvstore.backends.base import Backend
from kvstore.backends.peer import protocol
from kvstore.backends.peer.config import PeerConfig, endpoint_of
from kvstore.backends.peer.pipe import Pipe
from kvstore.backends.peer.protocol import Greeting, Op, Part, PeerProtocolError
from kvstore.backends.peer.stored import BATCH_MAX, StoredRecords
from kvstore.backends.stream import accepted_stream, listening_socket, server_context
from kvstore.codec.record import HEADER_BYTES, RecordCodec
from kvstore.errors import BackendUnavailableError
from kvstore.namespace import Namespace
from kvstore.primary.lending import Loan
from kvstore.runtime.limits import Limiter
from kvstore.types import BlockKey, Found

__all__ = ["PeerServer", "RowSource", "ServerCounters"]

logger = logging.getLogger("kvstore.backends.peer")

_IDLE_S: Final = 60.0
"""A connection without a question for this long is closed; clients close theirs sooner."""

_GREETINGS_MAX: Final = 64
"""Connections that have not proved themselves yet; a stranger can fill these places, for a second each."""

_TURN_BYTES: Final = 4 << 20
"""So much is sent to a fast reader before the loop goes on with other things."""

_PAUSE_S: Final = 0.1
"""Pause after a connection could not be accepted: there are no descriptors left, most likely."""


class RowSource(Protocol):
    """Where served blocks come from; :class:`kvstore.primary.lending.Lender` is one."""

    @property
    def slots(self) -> int:
        """Most blocks there can be."""

    @property
    def backends(self) -> Sequence[Backend]:
        """Storage of this engine, on this loop, whose records are served too."""

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
    bytes_sent: int = 0
    blocks_from_storage: int = 0
    blocks_absent: int = 0


class PeerServer:
    """Serves the blocks of one namespace.

    Args:
        config: Of the backend.
        source: Where the blocks are.
        namespace: Of these blocks. A client of another one is told that nothing is there.
        counters: Kept by the backend, as servers come and go with epochs.
        payload_bytes: Longest block.
    """

    def __init__(
        self,
        config: PeerConfig,
        source: RowSource,
        namespace: Namespace,
        counters: ServerCounters,
        payload_bytes: int,
    ) -> None:
        self._config = config
        self._source = source
        self._stored = StoredRecords(source.backends, config, namespace, payload_bytes)
        self._digest = namespace.digest
        self._records = RecordCodec(namespace, header_bytes=HEADER_BYTES)
        self._counters = counters
        self._context: ssl.SSLContext | None = None
        if config.tls and config.tls_cert and config.tls_key:
            self._context = server_context(cert=config.tls_cert, key=config.tls_key, client_ca=config.tls_ca)
        # Each connection lends one row at a time.
        self._rows = Limiter(max(1, int(source.slots * config.serve_share)))
        self._greeting = 0
        self._connections: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def connection_count(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    @property
    def rows_lent(self) -> int:
        """Connections that a load is answered on, each of which has one row at most."""
        return self._rows.in_use

    def memory_keys(self) -> Sequence[BlockKey]:
        """Return the blocks in the primary tier."""
        return self._source.keys()

    def stored_keys(self) -> AsyncIterator[Sequence[BlockKey]]:
        """Yield the blocks on storage, some at a time."""
        return self._stored.keys()

    async def open(self) -> None:
        """Listen.

        Raises:
            BackendUnavailableError: The address can't be had.
        """
        try:
            self._listener = listening_socket(endpoint_of(self._config.listen))
        except OSError as error:
            raise BackendUnavailableError(
                f"can't listen on {self._config.listen}: {error.strerror or error}. Another process may have the port.",
                backend="peer",
            ) from error
        self._loop.add_reader(self._listener, self._accept)

    async def close(self) -> None:
        """End all connections; no row is lent any more. Idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            self._loop.remove_reader(listener)
            listener.close()
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._stored.close()

    def _accept(self) -> None:
        """Take a connection; another one makes the listener readable again."""
        listener = self._listener
        if listener is None:
            return
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            logger.warning("A connection of a peer could not be accepted: %s", error)
            self._loop.remove_reader(listener)
            self._loop.call_later(_PAUSE_S, self._accept_again)
            return
        if len(self._connections) >= self._config.serve_connections or self._greeting >= _GREETINGS_MAX:
            self._counters.connections_refused += 1
            sock.close()
            return
        self._greeting += 1
        task = self._loop.create_task(self._serve(sock))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        # Also of one that was cancelled before it began, and of a connection that never came to be a pipe.
        task.add_done_callback(lambda _: sock.close())

    def _accept_again(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    async def _serve(self, sock: socket.socket) -> None:
        """Serve one connection until its end, whatever the reason."""
        pipe: Pipe | None = None
        try:
            try:
                async with asyncio.timeout(self._config.connect_timeout):
                    pipe = Pipe(await accepted_stream(sock, self._context))
                    is_ours = await self._greet(pipe)
            finally:
                self._greeting -= 1
            self._counters.connections_accepted += 1
            with memoryview(bytearray(HEADER_BYTES)) as header:
                while True:
                    await self._answer_one(pipe, header, is_ours=is_ours)
        except (OSError, PeerProtocolError) as error:
            if pipe is None or not pipe.closed:
                logger.debug("A connection of a peer ended: %s", error)
        finally:
            if pipe is not None:
                pipe.close()

    async def _greet(self, pipe: Pipe) -> bool:
        """Insist that a client has the secret; return whether it asks about our namespace."""
        secret, nonce = self._config.secret_bytes, os.urandom(protocol.NONCE_BYTES)
        data = await pipe.receive_bytes(protocol.GREETING_BYTES)
        try:
            hello = protocol.read_greeting(data)
        except PeerProtocolError:
            # For its log: our version stands in it.
            await pipe.send([protocol.pack_greeting(Greeting(nonce, bytes(protocol.PROOF_BYTES)))])
            self._counters.connections_refused += 1
            raise
        is_ours = hello.content == self._digest
        welcome = Greeting(nonce, protocol.server_proof(secret, data, nonce), is_foreign=not is_ours)
        await pipe.send([protocol.pack_greeting(welcome)])
        proof = await pipe.receive_bytes(protocol.PROOF_BYTES)
        if not hmac.compare_digest(proof, protocol.client_proof(secret, data, nonce)):
            self._counters.connections_refused += 1
            raise PeerProtocolError("the client has another secret")
        return is_ours

    async def _answer_one(self, pipe: Pipe, header: memoryview, *, is_ours: bool) -> None:
        async with asyncio.timeout(_IDLE_S) as patience:
            question = protocol.read_question(await pipe.receive_bytes(protocol.QUESTION_BYTES))
            patience.reschedule(self._loop.time() + self._config.timeout)
            keys = protocol.read_keys(await pipe.receive_bytes(question.body_bytes), question.count)
        if question.op is Op.LOOKUP:
            self._counters.keys_looked_up += len(keys)
            answer = await self._find(keys) if is_ours else bytes(len(keys))
            async with asyncio.timeout(self._config.timeout):
                await pipe.send([answer])
        elif question.op is Op.HAND_OVERS:
            waiting = [is_ours and self._source.is_waiting(name) for name in keys]
            async with asyncio.timeout(self._config.timeout):
                await pipe.send([bytes(Found.COMING if one else Found.ABSENT for one in waiting)])
        else:
            async with self._rows.hold(1):
                await self._send_records(pipe, header, keys if is_ours else (), absent=0 if is_ours else len(keys))

    async def _find(self, keys: Sequence[BlockKey]) -> bytes:
        found = bytes(map(self._source.find, keys))
        if not self._stored or not found.strip(bytes((Found.THERE,))):
            return found
        missing = [key for key, one in zip(keys, found, strict=True) if one != Found.THERE]
        stored = await self._stored.find(missing, self._config.timeout)
        return bytes(Found.THERE if key in stored else one for key, one in zip(keys, found, strict=True))

    async def _send_records(self, pipe: Pipe, header: memoryview, keys: Sequence[BlockKey], *, absent: int) -> None:
        """Answer a load in the order of its keys, one row lent at a time, or a few records read from storage."""
        loop, config, source, counters = self._loop, self._config, self._source, self._counters
        gone = protocol.pack_part(Part.ABSENT)
        unsent = [gone] * absent
        in_turn = at = 0
        async with asyncio.timeout(config.timeout) as patience:

            async def send(key: BlockKey, header: memoryview, payload: memoryview) -> None:
                length = HEADER_BYTES + payload.nbytes
                patience.reschedule(loop.time() + config.timeout + length / config.bytes_per_second_min)
                await pipe.send([*unsent, protocol.pack_part(Part.RECORD, length), header, payload])
                source.note_sent(key)
                counters.blocks_absent += len(unsent)
                counters.blocks_sent += 1
                counters.bytes_sent += length
                unsent.clear()

            while at < len(keys):
                key = keys[at]
                loan = source.lend(key)
                if loan is not None:
                    try:
                        # Made here and now, before the first await: the row is of this namespace while it is lent.
                        self._records.encode_header(header, key, loan.row)
                        in_turn += loan.row.nbytes
                        await send(key, header, loan.row)
                    finally:
                        source.give_back(loan)
                    at += 1
                elif not self._stored:
                    unsent.append(gone)
                    at += 1
                else:
                    ahead = keys[at + 1 : at + BATCH_MAX]
                    run = [key, *takewhile(lambda one: source.find(one) is not Found.THERE, ahead)]
                    patience.reschedule(loop.time() + 3 * config.timeout)
                    async with self._stored.reading(run, config.timeout) as records:
                        for one in run:
                            if one in records:
                                await send(one, *records[one])
                                counters.blocks_from_storage += 1
                            else:
                                unsent.append(gone)
                    at += len(run)
                if in_turn >= _TURN_BYTES:
                    in_turn = 0
                    await asyncio.sleep(0)
            counters.blocks_absent += len(unsent)
            await pipe.send([b"".join(unsent)])
