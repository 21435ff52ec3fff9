"""The server: answers other engines from rows of the primary tier, which are lent during the transfer."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from kvstore.backends.peer import protocol
from kvstore.backends.peer.config import PeerConfig, endpoint_of
from kvstore.backends.peer.nixl import SharedMemory
from kvstore.backends.peer.pipe import Pipe
from kvstore.backends.peer.protocol import Greeting, Op, Part, PeerProtocolError
from kvstore.backends.peer.stored import BATCH_MAX, StoredRecords
from kvstore.backends.stream import accepted_stream, listening_socket, server_context
from kvstore.codec.record import HEADER_BYTES, RecordCodec
from kvstore.errors import BackendUnavailableError
from kvstore.namespace import Namespace
from kvstore.primary.lending import Lender
from kvstore.runtime.limits import Limiter
from kvstore.types import BlockKey, Found

__all__ = ["PeerServer", "ServerCounters"]

logger = logging.getLogger("kvstore.backends.peer")

_IDLE_S: Final = 60.0
"""A connection without a question for this long is closed; clients close idle ones sooner."""

_GREETINGS_MAX: Final = 64
"""Most unauthenticated connections. An attacker can occupy all of them, each for ``connect_timeout``."""

_PAUSE_S: Final = 0.1
"""Pause after a failed accept, most likely for lack of descriptors."""

_TURN_BYTES: Final = 4 << 20
"""Bytes sent to a fast reader before the loop continues with other tasks."""


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


class PeerServer:
    """Serves the blocks of one namespace.

    Args:
        config: Configuration of the backend.
        source: Lends the blocks.
        namespace: Namespace of these blocks. For a client of another namespace, every block is absent.
        counters: Owned by the backend, because each epoch has a new server.
        payload_bytes: Length of the longest block.
        memory: The source's memory, if clients may read it by NIXL.
    """

    def __init__(
        self,
        config: PeerConfig,
        source: Lender,
        namespace: Namespace,
        counters: ServerCounters,
        payload_bytes: int,
        memory: SharedMemory | None = None,
    ) -> None:
        self._config = config
        self._source = source
        self._memory = memory
        self._stored = StoredRecords(source.backends, config, namespace, payload_bytes)
        self._digest = namespace.digest
        self._records = RecordCodec(namespace, header_bytes=HEADER_BYTES)
        self._counters = counters
        self._context: ssl.SSLContext | None = None
        if config.tls and config.tls_cert and config.tls_key:
            self._context = server_context(cert=config.tls_cert, key=config.tls_key, client_ca=config.tls_ca)
        # A load lends one row at a time, unless the client reads its rows by NIXL.
        self._rows = Limiter(max(1, int(source.slots * config.serve_share)))
        self._greeting = 0
        self._connections: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def connection_count(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    @property
    def rows_lent(self) -> int:
        """Number of rows reserved for loans now; at most so many are lent."""
        return self._rows.in_use

    def memory_keys(self) -> Sequence[BlockKey]:
        """Return the blocks in the primary tier."""
        return self._source.keys()

    def stored_keys(self) -> AsyncIterator[Sequence[BlockKey]]:
        """Yield the blocks on storage, in batches."""
        return self._stored.keys()

    async def open(self) -> None:
        """Listen.

        Raises:
            BackendUnavailableError: The address is not available.
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
        """End all connections; afterwards no row is lent. Idempotent."""
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
        """Accept one connection; a further one makes the listener readable again."""
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
        # Also closes the socket of a task cancelled before it began, and of a connection that never became a pipe.
        task.add_done_callback(lambda _: sock.close())

    def _accept_again(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    async def _serve(self, sock: socket.socket) -> None:
        """Serve one connection until it ends."""
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
        """Greet and authenticate a client; return whether its questions are about our namespace."""
        secret, nonce = self._config.secret_bytes, os.urandom(protocol.NONCE_BYTES)
        data = await pipe.receive_bytes(protocol.GREETING_BYTES)
        try:
            hello = protocol.read_greeting(data)
        except PeerProtocolError:
            # Reports our version to the client, for its log.
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
        elif question.op is Op.MEMORY:
            metadata = self._memory.metadata if self._memory is not None and is_ours and protocol.NIXL in keys else b""
            async with asyncio.timeout(self._config.timeout):
                await pipe.send([protocol.pack_metadata(metadata)])
        else:
            memory = self._memory if question.op is Op.LEND else None
            rows = await self._rows.enter(len(keys) if memory is not None else 1)
            try:
                if is_ours:
                    await _LoadAnswer(self, pipe).send(keys, header, memory, rows)
                else:
                    await self._send_absent(pipe, len(keys))
            finally:
                self._rows.leave(rows)

    async def _find(self, keys: Sequence[BlockKey]) -> bytes:
        found = bytes(map(self._source.find, keys))
        if not self._stored or not found.strip(bytes((Found.THERE,))):
            return found
        missing = [key for key, one in zip(keys, found, strict=True) if one != Found.THERE]
        stored = await self._stored.find(missing, self._config.timeout)
        return bytes(Found.THERE if key in stored else one for key, one in zip(keys, found, strict=True))

    async def _send_absent(self, pipe: Pipe, count: int) -> None:
        self._counters.blocks_absent += count
        async with asyncio.timeout(self._config.timeout):
            await pipe.send([protocol.pack_part(Part.ABSENT) * count])


class _LoadAnswer:
    """Sends the records of one load, in the order of its keys: from lent rows of the primary tier, and from storage."""

    def __init__(self, server: PeerServer, pipe: Pipe) -> None:
        self._config = server._config
        self._counters = server._counters
        self._source = server._source
        self._stored = server._stored
        self._records = server._records
        self._pipe = pipe
        self._absent = 0
        """Number of absent blocks whose parts were not sent yet."""
        self._patience = asyncio.timeout(self._config.timeout)

    async def send(self, keys: Sequence[BlockKey], header: memoryview, memory: SharedMemory | None, rows: int) -> None:
        """Send all parts.

        Args:
            keys: Keys of the requested blocks.
            header: Buffer for one header.
            memory: Memory whose rows may be lent to the client, which reads them by NIXL.
            rows: Most rows to lend by NIXL; all others are lent one at a time, while they are sent.

        Raises:
            OSError: The client is gone or too slow (``TimeoutError``).
            PeerProtocolError: The client did not return the rows.
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
                            # Encoded before the first await, while the row certainly belongs to this namespace.
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
                await self._pipe.send(self._absent_parts())
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
        await self._pipe.send([*self._absent_parts(), protocol.pack_part(part, length), *pieces])

    def _absent_parts(self) -> Sequence[bytes]:
        """Return the unsent parts of absent blocks."""
        count, self._absent = self._absent, 0
        self._counters.blocks_absent += count
        return [protocol.pack_part(Part.ABSENT) * count] if count else []

    def _wait_longer(self, length: int) -> None:
        """Restart the client's time limit, with the time that ``length`` bytes may take."""
        time_s = self._config.timeout + length / self._config.bytes_per_second_min
        self._patience.reschedule(asyncio.get_running_loop().time() + time_s)
