"""The server: answers other engines from the rows of the primary tier, which are lent while they are sent."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from typing import Final

from kvstore.backends.peer import protocol
from kvstore.backends.peer.config import PeerConfig, endpoint_of
from kvstore.backends.peer.load_answer import LoadAnswer, RowSource, ServerCounters
from kvstore.backends.peer.nixl import SharedMemory
from kvstore.backends.peer.pipe import Pipe
from kvstore.backends.peer.protocol import Greeting, Op, Part, PeerProtocolError
from kvstore.backends.peer.stored import StoredRecords
from kvstore.backends.stream import accepted_stream, listening_socket, server_context
from kvstore.codec.record import HEADER_BYTES, RecordCodec
from kvstore.errors import BackendUnavailableError
from kvstore.namespace import Namespace
from kvstore.runtime.limits import Limiter
from kvstore.types import BlockKey, Found

__all__ = ["PeerServer"]

logger = logging.getLogger("kvstore.backends.peer")

_IDLE_S: Final = 60.0
"""A connection without a question for this long is closed; clients close theirs sooner."""

_GREETINGS_MAX: Final = 64
"""Connections that have not proved themselves yet; a stranger can fill these places, for a second each."""

_PAUSE_S: Final = 0.1
"""Pause after a connection could not be accepted: there are no descriptors left, most likely."""


class PeerServer:
    """Serves the blocks of one namespace.

    Args:
        config: Of the backend.
        source: Where the blocks are.
        namespace: Of these blocks. A client of another one is told that nothing is there.
        counters: Kept by the backend, as servers come and go with epochs.
        payload_bytes: Longest block.
        memory: The source's memory, if clients may read it by NIXL.
    """

    def __init__(
        self,
        config: PeerConfig,
        source: RowSource,
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
        # A load lends one row at a time, unless its rows are read by NIXL.
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
        """Most rows that are lent now."""
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
        elif question.op is Op.MEMORY:
            metadata = self._memory.metadata if self._memory is not None and is_ours and protocol.NIXL in keys else b""
            async with asyncio.timeout(self._config.timeout):
                await pipe.send([protocol.pack_metadata(metadata)])
        else:
            memory = self._memory if question.op is Op.LEND else None
            rows = await self._rows.enter(len(keys) if memory is not None else 1)
            try:
                if is_ours:
                    records = LoadAnswer(self._config, self._counters, self._source, self._stored, self._records, pipe)
                    await records.send(keys, header, memory, rows)
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
