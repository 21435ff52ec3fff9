"""The server: answers other engines from lent rows of the primary tier, and from disks."""

from __future__ import annotations

import asyncio
import hmac
import logging
import mmap
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from itertools import takewhile
from typing import Final

from kvstore.backends.base import Backend, RecordRead
from kvstore.backends.peer import protocol
from kvstore.backends.peer.channel import Channel
from kvstore.backends.peer.config import PeerConfig, endpoint_of
from kvstore.backends.peer.limits import Limits
from kvstore.backends.peer.protocol import Address, Agreement, Note, Op, Part, PeerProtocolError, Welcome
from kvstore.backends.stream import TLS, accepted_stream, listening_socket, server_tls
from kvstore.codec.record import HEADER_BYTES, RecordCodec
from kvstore.config import TierConfig
from kvstore.errors import BackendUnavailableError, KVStoreError, RecordError
from kvstore.namespace import Namespace
from kvstore.primary.lending import Lender
from kvstore.runtime.buffers import BufferPool
from kvstore.runtime.limits import Limiter
from kvstore.types import BlockKey, Found, Outcome

BATCH_MAX: Final = 4
"""Most records that one connection reads at once: enough to keep a drive busy, without taking most buffers."""

_BUFFERS_BYTES: Final = 64 << 20
"""Memory of all buffers; they hold at least one batch, whatever the length of blocks."""


class StoredRecords:
    """Finds and reads records of backends that run on the same loop.

    Records are verified before they are sent, because a client would distrust this engine after a damaged one.

    Args:
        backends: Backends with records of a 256-byte header and an unencoded payload. The list may grow. Backends with
            another configured ``namespace`` or ``epoch`` are skipped.
        payload_bytes: Length of the longest payload.
    """

    def __init__(
        self, backends: Sequence[Backend], config: TierConfig, namespace: Namespace, payload_bytes: int
    ) -> None:
        self._all_backends = backends
        self._config = config
        self._records = RecordCodec(namespace, header_bytes=HEADER_BYTES)
        # The header ends a page, so that the payload begins a page and direct I/O needs no copy.
        room = mmap.PAGESIZE + -payload_bytes % mmap.PAGESIZE + payload_bytes
        self._pool = BufferPool(room, max(BATCH_MAX, _BUFFERS_BYTES // room))
        self._payload_bytes = payload_bytes
        self._reads: set[asyncio.Task[Mapping[BlockKey, Sequence[memoryview]]]] = set()

    def __bool__(self) -> bool:
        return bool(self._backends)

    @property
    def _backends(self) -> list[Backend]:
        """The backends with blocks of our namespace. Iterates over a copy, because the list may grow."""
        ours = self._config.namespace, self._config.epoch
        return [one for one in tuple(self._all_backends) if (one.config.namespace, one.config.epoch) == ours]

    async def keys(self) -> AsyncIterator[Sequence[BlockKey]]:
        """Yield the keys of all blocks, in batches."""
        for backend in self._backends:
            async for keys in backend.scan_keys():
                yield keys

    async def find(self, keys: Sequence[BlockKey], timeout_s: float) -> set[BlockKey]:
        """Return the blocks that a backend has; at the time limit, those found by then."""
        found: set[BlockKey] = set()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for backend in self._backends:
                    with suppress(KVStoreError):
                        found.update(key for key, there in zip(keys, await backend.exists(keys), strict=True) if there)
        return found

    @asynccontextmanager
    async def reading(
        self, keys: Sequence[BlockKey], timeout_s: float
    ) -> AsyncIterator[Mapping[BlockKey, Sequence[memoryview]]]:
        """Read at most ``BATCH_MAX`` records; they are valid within the ``async with``.

        Records that are missing, damaged or late are left out.
        """
        try:
            async with asyncio.timeout(timeout_s):
                buffers = await self._pool.take(len(keys))
        except TimeoutError:
            yield {}
            return
        read = asyncio.get_running_loop().create_task(self._read(keys, buffers))
        self._reads.add(read)
        read.add_done_callback(self._reads.discard)
        try:
            await asyncio.wait({read}, timeout=timeout_s)
            yield read.result() if read.done() else {}
        finally:
            if read.done():
                self._pool.give_back(buffers)
            else:
                # A hanging disk may still write to the buffers, so they are not reused before the read has ended.
                read.add_done_callback(lambda _: self._pool.give_back(buffers))

    def close(self) -> None:
        """Release the memory, unless a hanging disk still uses some of it."""
        if not self._reads:
            with suppress(BufferError):
                self._pool.close()

    async def _read(
        self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]
    ) -> Mapping[BlockKey, Sequence[memoryview]]:
        left = dict(zip(keys, buffers, strict=True))
        found: dict[BlockKey, Sequence[memoryview]] = {}
        for backend in self._backends:
            reads = [RecordRead(key, self._cut(buffer)) for key, buffer in left.items()]
            with suppress(KVStoreError):
                for read, outcome in zip(reads, await backend.get_into(reads), strict=True):
                    header, payload = read.buffers
                    with suppress(RecordError):
                        if outcome is Outcome.OK:
                            length = self._records.verify(read.key, header, payload, read.filled_bytes)
                            found[read.key] = (header, payload[:length])
                            del left[read.key]
        return found

    def _cut(self, buffer: memoryview) -> Sequence[memoryview]:
        page = mmap.PAGESIZE
        return buffer[page - HEADER_BYTES : page], buffer[page : page + self._payload_bytes]


logger = logging.getLogger("kvstore.backends.peer")

_IDLE_S: Final = 60.0
"""Idle connections are closed after this time; clients close them sooner."""

_LENT_SHARE: Final = 0.25
"""Largest share of the primary tier's slots that may be lent at once, so that most slots remain evictable."""

_TURN_BYTES: Final = 4 << 20
"""Bytes sent to a fast reader before the loop continues with other tasks."""


class PeerServer:
    """Serves the blocks of one namespace.

    Args:
        namespace: Namespace of these blocks. For a client of another namespace, every block is absent.
        counts: Counts of events, owned by the backend, because each epoch has a new server.
        payload_bytes: Length of the longest block.
    """

    def __init__(
        self,
        config: PeerConfig,
        source: Lender,
        namespace: Namespace,
        counts: Counter[str],
        payload_bytes: int,
        limits: Limits,
    ) -> None:
        self._config = config
        self._source = source
        self._stored = StoredRecords(source.backends, config, namespace, payload_bytes)
        self._digest = namespace.digest
        self._records = RecordCodec(namespace, header_bytes=HEADER_BYTES)
        self._counts = counts
        self._limits = limits
        self._tls = serving_tls(config)
        # Each load lends one row at a time.
        self._rows = Limiter(max(1, int(source.slots * _LENT_SHARE)))
        self._greeting: dict[asyncio.Task[None], None] = {}
        """Tasks of unauthenticated connections, the oldest first."""
        self._connections: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def connection_count(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    @property
    def rows_lent(self) -> int:
        """Number of rows reserved for loans; at most this many are lent."""
        return self._rows.in_use

    def memory_keys(self) -> Sequence[BlockKey]:
        """Return the blocks in the primary tier."""
        return self._source.keys()

    def stored_keys(self) -> AsyncIterator[Sequence[BlockKey]]:
        """Yield the blocks on storage, in batches."""
        return self._stored.keys()

    async def open(self) -> None:
        """Listen. ``BackendUnavailableError``: the address is not available; ``ConfigError``: a certificate is."""
        if self._tls is not None:
            await self._tls.current()
        try:
            self._listener = listener = listening_socket(endpoint_of(self._config.listen))
        except OSError as error:
            raise BackendUnavailableError(
                f"can't listen on {self._config.listen}: {error.strerror or error}. Another process may have the port.",
                backend="peer",
            ) from error
        self._loop.add_reader(listener, self._accept, listener)

    async def close(self) -> None:
        """End all connections; afterwards no row is lent. Idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            self._loop.remove_reader(listener)
            listener.close()
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                await asyncio.wait(tasks)
        finally:
            self._stored.close()

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection; a further one makes the listener readable again."""
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            logger.warning("A connection of a peer could not be accepted: %s", error)
            self._loop.remove_reader(listener)
            self._loop.call_later(self._limits.accept_pause_s, self._accept_again)
            return
        is_crowded = len(self._greeting) >= self._limits.greetings_max
        if is_crowded or len(self._connections) >= self._config.serve_connections:
            self._counts["served_connections_refused"] += 1
            if not self._greeting:
                sock.close()
                return
            oldest = next(iter(self._greeting))
            del self._greeting[oldest]
            oldest.cancel()
        task = self._loop.create_task(self._serve(sock))
        self._greeting[task] = None
        task.add_done_callback(lambda task: self._greeting.pop(task, None))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        # Covers a task cancelled before it began, and a connection that failed before it became a channel.
        task.add_done_callback(lambda _: sock.close())

    def _accept_again(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept, self._listener)

    async def _serve(self, sock: socket.socket) -> None:
        """Serve one connection until it ends."""
        pipe: Channel | None = None
        try:
            async with asyncio.timeout(self._config.connect_timeout):
                arrived_at = protocol.address_of(*sock.getsockname()[:2])
                context = await self._tls.current() if self._tls is not None else None
                pipe = Channel(await accepted_stream(sock, context))
                is_ours = await self._greet(pipe, arrived_at)
            task = asyncio.current_task()
            if task is not None:
                self._greeting.pop(task, None)
            self._counts["served_connections_accepted"] += 1
            with memoryview(bytearray(HEADER_BYTES)) as header:
                while True:
                    await self._answer_one(pipe, header, is_ours=is_ours)
        except (OSError, PeerProtocolError) as error:
            if pipe is None or not pipe.closed:
                logger.debug("A connection of a peer ended: %s", error)
        finally:
            if pipe is not None:
                pipe.close()

    async def _greet(self, pipe: Channel, arrived_at: Address) -> bool:
        """Greet and authenticate a client; return whether its questions are about our namespace."""
        nonce = os.urandom(protocol.NONCE_BYTES)
        hello = await pipe.receive_bytes(protocol.HEAD_BYTES)
        try:
            protocol.check_head(hello)
        except PeerProtocolError:
            # Reports our version to the client, for its log.
            await pipe.send([protocol.pack_welcome(Welcome(nonce, Note(0)))])
            self._counts["served_connections_refused"] += 1
            raise
        hello += await pipe.receive_bytes(protocol.HELLO_BYTES - protocol.HEAD_BYTES)
        wanted = protocol.read_hello(hello)
        is_ours = wanted.namespace_digest == self._digest
        is_misdirected = wanted.dialled != arrived_at and not self._may_be_known_as(wanted.dialled)
        notes = Note(Note.FOREIGN * (not is_ours) | Note.MISDIRECTED * is_misdirected)
        draft = protocol.pack_welcome(Welcome(nonce, notes))
        if self._config.secret is not None:
            await self._config.secret.renew()
        secret = self._config.secret_bytes(earlier=wanted.earlier)
        agreement = Agreement(secret, hello, draft, pipe.stream.binding)
        await pipe.send([protocol.pack_welcome(Welcome(nonce, notes, agreement.server_proof))])
        if is_misdirected:
            self._counts["served_connections_refused"] += 1
            raise PeerProtocolError("the client dialled another address")
        proof = await pipe.receive_bytes(protocol.PROOF_BYTES)
        if not hmac.compare_digest(proof, agreement.client_proof):
            self._counts["served_connections_refused"] += 1
            raise PeerProtocolError("the client has another secret")
        pipe.agree(agreement, is_server=True)
        return is_ours

    def _may_be_known_as(self, dialled: Address) -> bool:
        """Return whether a dialled address may lead to this server, directly or by address translation.

        Always true for a server known by a name or listening on all addresses. A relay can then read the traffic, but
        MACs (or TLS) keep it from changing any of it.
        """
        host = self._config.directory.host if self._config.directory is not None else ""
        if self._listener is None:
            return False
        bound, port = self._listener.getsockname()[:2]
        try:
            return dialled == protocol.address_of(host or bound, port) or ip_address(host or bound).is_unspecified
        except ValueError:
            return True

    async def _answer_one(self, pipe: Channel, header: memoryview, *, is_ours: bool) -> None:
        async with asyncio.timeout(_IDLE_S) as time_limit:
            question = protocol.read_question(await pipe.begin_frame(protocol.QUESTION_BYTES))
            time_limit.reschedule(self._loop.time() + self._config.timeout)
            body = await pipe.begin_frame(question.body_bytes)
            await pipe.end_frame()
            keys = protocol.read_keys(body, question.count)
        if question.op is Op.LOOKUP:
            self._counts["served_keys_looked_up"] += len(keys)
            answer = await self._find(keys) if is_ours else bytes(len(keys))
            async with asyncio.timeout(self._config.timeout):
                await pipe.send_frames([answer])
        elif question.op is Op.HAND_OVERS:
            waiting = [is_ours and self._source.is_waiting(name) for name in keys]
            async with asyncio.timeout(self._config.timeout):
                await pipe.send_frames([bytes(Found.COMING if one else Found.ABSENT for one in waiting)])
        else:
            async with self._rows.hold(1):
                await _LoadAnswer(self, pipe).send(keys if is_ours else (), header, absent=0 if is_ours else len(keys))

    async def _find(self, keys: Sequence[BlockKey]) -> bytes:
        found = bytes(map(self._source.find, keys))
        if not self._stored or not found.strip(bytes((Found.THERE,))):
            return found
        missing = [key for key, one in zip(keys, found, strict=True) if one != Found.THERE]
        stored = await self._stored.find(missing, self._config.timeout)
        return bytes(Found.THERE if key in stored else one for key, one in zip(keys, found, strict=True))


class _LoadAnswer:
    """Sends the records of one load, in the order of its keys: from lent rows of the primary tier, and from storage."""

    def __init__(self, server: PeerServer, pipe: Channel) -> None:
        self._config = server._config
        self._counts = server._counts
        self._source = server._source
        self._stored = server._stored
        self._records = server._records
        self._pipe = pipe
        self._absent = 0
        """Absent blocks not reported yet."""
        self._time_limit = asyncio.timeout(self._config.timeout)

    async def send(self, keys: Sequence[BlockKey], header: memoryview, *, absent: int = 0) -> None:
        """Send all parts. ``OSError``: the client is gone or too slow (``TimeoutError``).

        ``absent``: number of further blocks to report as absent.
        """
        at = unbroken_bytes = 0
        async with self._time_limit:
            while at < len(keys):
                key = keys[at]
                loan = self._source.lend(key)
                if loan is not None:
                    try:
                        # Encoded before the first await, while the row certainly belongs to this namespace.
                        self._records.encode_header(header, key, loan.row)
                        unbroken_bytes += loan.row.nbytes
                        await self._send_record(key, header, loan.row)
                    finally:
                        self._source.give_back(loan)
                    at += 1
                elif self._stored:
                    ahead = keys[at + 1 : at + BATCH_MAX]
                    run = [key, *takewhile(lambda one: self._source.find(one) is not Found.THERE, ahead)]
                    await self._send_stored(run)
                    at += len(run)
                else:
                    self._absent += 1
                    at += 1
                if unbroken_bytes >= _TURN_BYTES:
                    unbroken_bytes = 0
                    await asyncio.sleep(0)
            self._absent += absent
            await self._pipe.send_frames(*self._absent_frames())

    async def _send_stored(self, keys: Sequence[BlockKey]) -> None:
        """Send a few blocks from storage."""
        loop, timeout_s = asyncio.get_running_loop(), self._config.timeout
        self._time_limit.reschedule(loop.time() + 3 * timeout_s)
        async with self._stored.reading(keys, timeout_s) as records:
            for key in keys:
                if key in records:
                    await self._send_record(key, *records[key])
                    self._counts["served_blocks_from_storage"] += 1
                else:
                    self._absent += 1

    async def _send_record(self, key: BlockKey, header: memoryview, payload: memoryview) -> None:
        length = HEADER_BYTES + payload.nbytes
        # Restart the client's time limit, with the time that sending ``length`` bytes may take.
        time_s = self._config.timeout + length / self._config.bytes_per_second_min
        self._time_limit.reschedule(asyncio.get_running_loop().time() + time_s)
        frame = (protocol.pack_part(Part.RECORD, length), header, payload)
        await self._pipe.send_frames(*self._absent_frames(), frame)
        self._source.note_sent(key)
        self._counts["served_blocks_sent"] += 1
        self._counts["served_bytes_sent"] += length

    def _absent_frames(self) -> Sequence[Sequence[bytes]]:
        """Return the frame that reports absent blocks, if some are not reported yet."""
        count, self._absent = self._absent, 0
        self._counts["served_blocks_absent"] += count
        return [[protocol.pack_part(Part.ABSENT, count)]] if count else []


def serving_tls(config: PeerConfig) -> TLS | None:
    """Return the TLS settings for connections from peers; None without TLS or, for a mere client, a certificate."""
    if not (config.tls and config.tls_cert and config.tls_key):
        return None
    return server_tls(cert=config.tls_cert, key=config.tls_key, client_ca=config.tls_ca)
