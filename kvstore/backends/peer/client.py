"""Client side of one peer: connections, requests, and whether the peer is available."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import os
import ssl
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

from kvstore.backends.base import RecordRead
from kvstore.backends.peer import protocol
from kvstore.backends.peer.channel import Channel
from kvstore.backends.peer.config import PeerConfig
from kvstore.backends.peer.limits import Limits
from kvstore.backends.peer.protocol import Agreement, Hello, Note, Op, Part, PeerProtocolError
from kvstore.backends.stream import TLS, Endpoint, current_tls, open_stream
from kvstore.backends.vectored import cut
from kvstore.errors import BackendUnavailableError
from kvstore.runtime.breaker import Breaker
from kvstore.runtime.limits import Limiter
from kvstore.types import BlockKey, Found, Outcome

logger = logging.getLogger("kvstore.backends.peer")

_LOOKUP_SHARE: Final = 0.5
"""Share of the tier's lookup timeout for one peer, so that a slow peer does not delay the answers of the others."""

_LOOKUPS_MAX: Final = 8
"""Concurrent lookups of one peer, separate from its loads so that no lookup queues behind megabytes. A scheduler sends
one lookup per step, and the answer of a distant peer takes several steps."""

_FAILURES_MAX: Final = 2
"""Consecutive failures after which a peer is paused; a single one may be a lost connection."""

_WARNINGS_MAX: Final = 10
_WARNINGS_S: Final = 60.0
"""Most warnings about peers in so many seconds: false entries of a directory can name thousands of addresses."""

_ANSWERS: Final = {
    Op.LOOKUP: bytes((Found.ABSENT, Found.THERE, Found.COMING)),
    Op.HAND_OVERS: bytes((Found.ABSENT, Found.COMING)),
}


class PeerError(BackendUnavailableError):
    """A peer could not be queried; ``is_late``: it did not answer in time."""

    def __init__(self, message: str, *, is_late: bool = False) -> None:
        super().__init__(message, backend="peer")
        self.is_late = is_late


class _OtherSecretError(PeerProtocolError):
    """The peer did not prove that it has our secret."""


class PeerLog:
    """Warnings about peers, at most ``_WARNINGS_MAX`` a minute; then one line has the number of the omitted ones."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = -math.inf
        self._count = 0

    def warning(self, text: str, *values: object) -> None:
        """Log a warning; at DEBUG if there were too many in this minute."""
        now = self._clock()
        if now >= self._until:
            if self._count > _WARNINGS_MAX:
                logger.warning("%d more warnings about peers were omitted", self._count - _WARNINGS_MAX)
            self._until, self._count = now + _WARNINGS_S, 0
        self._count += 1
        logger.log(logging.WARNING if self._count <= _WARNINGS_MAX else logging.DEBUG, text, *values)


class Peer:
    """Queries one other engine for blocks, and loads them.

    After several consecutive failures, a peer is paused and tried again in the background, so no request waits for a
    trial. Loads have their own failure count, because short answers may arrive even if blocks don't (on a link that
    drops full packets): after a pause, requests load from the peer again, and the first result decides. A peer that
    sends a record that fails verification is paused for longer.

    Args:
        endpoint: Address on which the peer listens.
        tls: TLS settings, if any.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        config: PeerConfig,
        tls: TLS | None,
        namespace_digest: bytes,
        counts: Counter[str],
        log: PeerLog,
        limits: Limits,
    ) -> None:
        self.endpoint = endpoint
        self.loading = 0  # Number of blocks being loaded from the peer.
        self.has_answered = False  # Whether the peer has ever answered.
        self.is_foreign = False  # Whether the peer had blocks of another namespace at the last greeting.
        self.last_error = ""  # Text of the latest failure.
        self._config = config
        self._tls = tls
        self._namespace_digest = namespace_digest
        self._counts = counts
        self._log = log
        self._idle_s = limits.idle_s
        self._loop = asyncio.get_running_loop()
        pauses_s = float(config.breaker_cooldown), float(config.breaker_cooldown_max)
        self._health = Breaker(_FAILURES_MAX, *pauses_s)
        # After the pause, every request is admitted until a load succeeds, because a lookup may not lead to a load.
        self._trust = Breaker(1, limits.distrust_s, limits.distrust_s_max, trial_s=0.0)
        self._loads = Breaker(_FAILURES_MAX, *pauses_s, trial_s=0.0)
        self._load_places = Limiter(config.connections)
        self._lookup_places = Limiter(_LOOKUPS_MAX)
        self._pipes: set[Channel] = set()
        self._idle: list[tuple[Channel, float]] = []
        self._trial: asyncio.Task[None] | None = None
        self._closed = False

    def __repr__(self) -> str:
        """Show the number of connections."""
        return f"Peer({self.endpoint}, {len(self._idle)} of {len(self._pipes)} connections idle)"

    @property
    def down(self) -> bool:
        """Whether the peer is paused now."""
        return not (self._health.closed and self._trust.closed and self._loads.closed)

    @property
    def busy(self) -> bool:
        """Whether a lookup or a trial is under way."""
        return self._lookup_places.in_use > 0 or self._trial is not None

    @property
    def trying(self) -> bool:
        """Whether a trial is under way."""
        return self._trial is not None

    @property
    def ready(self) -> bool:
        """Whether requests may query the peer now."""
        return self._health.closed and not self.paused

    @property
    def paused(self) -> bool:
        """Whether the peer may not even be tried: in a pause after failures, or during a trial."""
        now = self._loop.time()
        breakers = self._health, self._trust, self._loads
        return self._trial is not None or any(not one.closed and now < one.retry_at for one in breakers)

    def admits(self) -> bool:
        """Return whether the peer may be queried; starts a trial in the background when one is due."""
        now = self._loop.time()
        if self._closed or not all(one.closed or one.admit_trial(now) for one in (self._trust, self._loads)):
            return False
        if self._health.closed:
            return True
        if self._health.admit_trial(now):
            self.start_trial()
        return False

    def start_trial(self) -> None:
        """Query the peer in the background, unless a trial is under way."""
        if self._trial is None:
            self._trial = self._loop.create_task(self._try())

    async def lookup(self, keys: Sequence[BlockKey], hand_overs: Sequence[bytes] = ()) -> tuple[bytes, set[bytes]]:
        """Query the peer for blocks and for hand-overs of requests.

        Returns:
            For each key whether the peer has the block, or computes it: a ``Found``, not UNKNOWN; and the hand-overs
            whose blocks the peer did not know yet.

        Raises:
            PeerError: The peer could not be queried; the text has the reason.
        """
        limit_s = _LOOKUP_SHARE * self._config.lookup_timeout
        async with self._judged(), asyncio.timeout(limit_s), self._lookup_places.hold(1), self._pipe() as pipe:
            # Hand-overs first: the lookup then finds blocks that become known in between.
            answers = await self._ask(pipe, Op.HAND_OVERS, hand_overs)
            waiting = {name for name, answer in zip(hand_overs, answers, strict=True) if answer == Found.COMING}
            return await self._ask(pipe, Op.LOOKUP, keys), waiting

    async def load(self, reads: Sequence[RecordRead]) -> list[Outcome]:
        """Receive records into their buffers; return the outcome of each.

        However the call ends, no buffer is touched afterwards.
        """
        outcomes = [Outcome.IO_ERROR] * len(reads)
        self.loading += len(reads)
        try:
            async with self._judged(), self._load_places.hold(1):
                for start in range(0, len(reads), protocol.KEYS_MAX):
                    places = range(start, min(start + protocol.KEYS_MAX, len(reads)))
                    async with self._pipe() as pipe:
                        await self._load_part(pipe, reads, places, outcomes)
        except PeerError as error:
            # Blocks that have arrived keep their outcomes; the others are IO_ERROR already.
            if self._loads.record_failure(self._loop.time()):
                self._log.warning("Nothing is loaded from peer %s for %.1f s", self.endpoint, self._loads.pause_s)
            if error.is_late:
                return [Outcome.TIMEOUT if one is Outcome.IO_ERROR else one for one in outcomes]
        else:
            self._loads.record_success()
        finally:
            self.loading -= len(reads)
        return outcomes

    def note_verified(self) -> None:
        """Record that a block from the peer was verified."""
        if not self._trust.closed:
            self._trust.record_success()

    def note_damaged(self) -> None:
        """Record that a block from the peer failed verification: the peer is paused."""
        if self._trust.record_failure(self._loop.time()):
            self._counts["peers_distrusted"] += 1
            self.last_error = f"{self.endpoint}: sent a record that does not verify"
            self._log.warning(
                "Peer %s sent a record that does not verify. It is not asked for %.0f s.",
                self.endpoint,
                self._trust.pause_s,
            )

    async def close(self) -> None:
        """Close all connections; running calls fail. Idempotent."""
        self._closed = True
        for pipe in list(self._pipes):
            pipe.close()
        if self._trial is not None:
            self._trial.cancel()
            await asyncio.wait([self._trial])

    async def _ask(self, pipe: Channel, op: Op, names: Sequence[bytes]) -> bytes:
        answers = b""
        for start in range(0, len(names), protocol.KEYS_MAX):
            part = names[start : start + protocol.KEYS_MAX]
            await pipe.send_frames([protocol.pack_question(op, part)])
            answer = await pipe.begin_frame(len(part))
            await pipe.end_frame()
            if answer.translate(None, _ANSWERS[op]):
                raise PeerProtocolError(f"an answer has other bytes than {', '.join(map(str, _ANSWERS[op]))}")
            answers += answer
        return answers

    async def _load_part(
        self, pipe: Channel, reads: Sequence[RecordRead], places: Sequence[int], outcomes: list[Outcome]
    ) -> None:
        """Load some of the reads, and set their outcomes."""
        expected_bytes = sum([reads[place].capacity_bytes for place in places])
        left = deque(places)
        async with asyncio.timeout(self._config.timeout + expected_bytes / self._config.bytes_per_second_min):
            await pipe.send_frames([protocol.pack_question(Op.LOAD, [reads[place].key for place in places])])
            while left:
                part, number = protocol.read_part(await pipe.begin_frame(protocol.PART_BYTES))
                if part is Part.ABSENT:
                    await pipe.end_frame()
                    if number > len(left):
                        raise PeerProtocolError(f"{number} blocks are absent of {len(left)}")
                    for _ in range(number):
                        outcomes[left.popleft()] = Outcome.MISS
                    continue
                read = reads[left[0]]
                if number > read.capacity_bytes:
                    # Not CORRUPT: the length is not authenticated yet, and the rest of the frame doesn't fit.
                    raise PeerProtocolError(f"a record of {number} bytes, longer than a block")
                await pipe.end_frame(cut(read.buffers, number))
                read.filled_bytes = number
                outcomes[left.popleft()] = Outcome.OK

    @asynccontextmanager
    async def _judged(self) -> AsyncIterator[None]:
        """Turn failures into a :class:`PeerError`, and record success or failure for the peer."""
        try:
            yield
        except (OSError, PeerProtocolError) as error:
            if self._closed:
                raise PeerError("the backend is closed") from None
            late = isinstance(error, TimeoutError)
            self._counts["answers_late"] += late
            text = "no answer in time" if late else str(error) or type(error).__name__
            if self._health.record_failure(self._loop.time()):
                self._log.warning("Peer %s is left alone for %.1f s: %s", self.endpoint, self._health.pause_s, text)
            self.last_error = f"{self.endpoint}: {text}"
            # Not kept in a local variable: a reference cycle of frame and exception would keep the buffers alive.
            raise PeerError(self.last_error, is_late=late) from None
        if not self._health.closed:
            self._log.warning("Peer %s answers again", self.endpoint)
        self._health.record_success()
        self.has_answered = True

    @asynccontextmanager
    async def _pipe(self) -> AsyncIterator[Channel]:
        """Yield a connection, an idle one if possible; it is kept only if the context ends without an exception."""
        pipe = self._idle_pipe() or await self._connected()
        try:
            yield pipe
        except BaseException:
            self._pipes.discard(pipe)
            pipe.close()
            raise
        pipe.watch()
        self._idle.append((pipe, self._loop.time()))

    def _idle_pipe(self) -> Channel | None:
        """Return the most recently used idle connection, and close those that were idle for too long."""
        stale = self._loop.time() - self._idle_s
        while self._idle and (self._idle[0][1] < stale or self._idle[0][0].closed):
            pipe, _ = self._idle.pop(0)
            self._pipes.discard(pipe)
            pipe.close(abort=False)
        while self._idle:
            pipe, _ = self._idle.pop()
            if not pipe.closed:
                return pipe
            self._pipes.discard(pipe)
        return None

    async def _connected(self) -> Channel:
        """Connect and greet. ``ConnectionError``: the peer can't be reached, or the greeting failed."""
        if self._closed:
            raise ConnectionError("the backend is closed")
        try:
            pipe = await self._agreed()
        except (OSError, ValueError, OverflowError, PeerProtocolError) as error:
            self._counts["connections_failed"] += 1
            late = isinstance(error, TimeoutError)
            text = f"no connection within {float(self._config.connect_timeout)} s" if late else _reason(error)
            raise ConnectionError(text) from error
        if self._closed:
            pipe.close()
            raise ConnectionError("the backend is closed")
        self._counts["connections_opened"] += 1
        self._pipes.add(pipe)
        return pipe

    async def _agreed(self) -> Channel:
        """Connect and greet, again with other secrets after a refusal.

        First with the secret that the peer had before a change of its file, as ours may still be that one. Then with
        the one that our file has by now.
        """
        secret = self._config.secret
        if secret is None:
            return await self._greeted()
        await secret.renew()
        used = secret.reveal()
        for earlier in (False, True):
            with suppress(_OtherSecretError):
                return await self._greeted(earlier=earlier)
        await secret.refused(used, f"Peer {self.endpoint} has another secret")
        return await self._greeted()

    async def _greeted(self, *, earlier: bool = False) -> Channel:
        limit = asyncio.timeout(self._config.connect_timeout)
        async with current_tls(self._tls, self.endpoint) as context, limit:
            pipe = Channel(await open_stream(self.endpoint, context))
            try:
                await self._greet(pipe, earlier=earlier)
            except BaseException:
                pipe.close()
                raise
        return pipe

    async def _greet(self, pipe: Channel, *, earlier: bool) -> None:
        dialled = protocol.address_of(*pipe.stream.remote_address)
        hello = protocol.pack_hello(Hello(os.urandom(protocol.NONCE_BYTES), self._namespace_digest, dialled, earlier))
        await pipe.send([hello])
        data = await pipe.receive_bytes(protocol.HEAD_BYTES)
        protocol.check_head(data)
        data += await pipe.receive_bytes(protocol.WELCOME_BYTES - protocol.HEAD_BYTES)
        welcome = protocol.read_welcome(data)
        secrets = [self._config.secret_bytes(earlier=each) for each in (False, True)]
        agreements = [Agreement(secret, hello, data, pipe.stream.binding) for secret in secrets]
        proven = [one for one in agreements if hmac.compare_digest(welcome.proof, one.server_proof)]
        if not proven:
            raise _OtherSecretError(
                "it has another 'secret', or the connection leads to another engine. Give all engines the same secret"
            )
        agreement = proven[0]
        if Note.MISDIRECTED in welcome.notes:
            raise PeerProtocolError(
                "the connection leads to an engine that listens elsewhere. If addresses are translated on the way, set "
                f"'host' of that engine's 'directory' to {self.endpoint.host!r}; without that option, its 'listen' to "
                "0.0.0.0. The port must be the same"
            )
        is_foreign = Note.FOREIGN in welcome.notes
        if is_foreign and not self.is_foreign:
            self._log.warning(
                "Peer %s has blocks of another namespace, so none of them can be loaded here: model, revision, data "
                "type, block size, vLLM version, attention backend or parallel sizes differ, or one of the engines was "
                "reset. Start both with the same; the logger kvstore.vllm.manager prints all fields at DEBUG.",
                self.endpoint,
            )
        self.is_foreign = is_foreign
        await pipe.send([agreement.client_proof])
        pipe.agree(agreement, is_server=False)

    async def _try(self) -> None:
        """Look up a block that never exists. Success closes the breaker; failure lengthens its pause."""
        try:
            await self.lookup([b"\0kvstore-probe"])
        except PeerError as error:
            logger.debug("A trial failed: %s", error)
        finally:
            self._trial = None


def _reason(error: Exception) -> str:
    number = getattr(error, "errno", None) or 0
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason}). Do both sides use it, with certificates that the other trusts?"
    return os.strerror(number) if number > 0 else str(error) or type(error).__name__
