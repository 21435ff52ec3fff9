"""The directory on a Redis or Valkey server: engines publish summaries of their blocks, and read those of others."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple

import xxhash

from kvstore.backends.peer.config import DirectoryConfig, endpoint_of
from kvstore.backends.peer.limits import Limits
from kvstore.backends.peer.server import PeerServer
from kvstore.backends.peer.summary import (
    ENGINES_MAX,
    SUMMARY_BYTES_MAX,
    Index,
    Sample,
    Section,
    SummaryError,
    pack,
    unpack,
)
from kvstore.backends.redis import control
from kvstore.backends.redis.config import RedisConfig
from kvstore.backends.redis.connection import Request, answers_to, ask_all
from kvstore.backends.redis.failures import RedisError, ServerRefusedError
from kvstore.backends.redis.node import Node
from kvstore.backends.redis.resp import Filled, Reply, Target, encode_command
from kvstore.backends.redis.topology import checked_tls
from kvstore.backends.stream import Endpoint
from kvstore.errors import BackendUnavailableError, ConfigError
from kvstore.types import BlockKey

logger = logging.getLogger("kvstore.backends.peer")

_LEASE_S_MAX: Final = 300.0
"""Longest lease that is accepted."""

_LEASE_INTERVALS: Final = 3.0
"""Length of a lease in intervals, so that it survives two failed rounds."""

_ANSWER_BYTES_MIN: Final = 1024
"""Minimum bytes charged for an answer, because even an empty answer has a cost."""

_READ_AT_ONCE: Final = 8

_SAMPLING_SHARE: Final = 0.01
"""Share of time spent sampling keys on storage; a hundred thousand keys take some ten milliseconds."""

_KEYS_AT_ONCE: Final = 1024

_MEMBER: Final = re.compile(rb"([!-~]{3,272}) ([0-9a-f]{16})")
"""Member of the sorted set: address and version of a summary."""


class _Listed(NamedTuple):
    """An engine that has a lease."""

    address: str  # Address on which the engine claims to listen.
    version: str  # Version of its summary.
    left_s: float  # Seconds until its lease ends.


@dataclass(slots=True)
class _Entry:
    """Known state of another engine."""

    version: str
    expires_at: float
    read_version: str = ""
    read_at: float = 0.0
    summary: Sequence[Section] = ()


class Directory:
    """Publishes a summary of this engine at intervals, and reads those of others at a bounded rate.

    No lookup waits for the server: :meth:`candidates` uses only memory. While the server fails, known engines expire
    with their leases.

    Args:
        namespace_hex: Namespace; only engines of the same namespace see each other.
        own: Address under which other engines reach this one; None if it does not serve blocks.
        server: Server of this engine's blocks, if any.
    """

    def __init__(
        self,
        config: DirectoryConfig,
        namespace_hex: str,
        own: Endpoint | None,
        server: PeerServer | None,
        counts: Counter[str],
        limits: Limits,
    ) -> None:
        self._config = config
        self._limits = limits
        self._client = _Server(config, namespace_hex)
        self._own = own
        self._server = server
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        self._entries: dict[Endpoint, _Entry] = {}
        self._indexed: list[Endpoint] = []
        self._places: dict[Endpoint, int] = {}
        self._index = Index.of([])
        self._is_stale = False
        """Whether the index differs from the entries."""
        self._stored: Section | None = None
        self._credit, self._credited_at = float(limits.read_bytes_max), self._loop.time()
        self._failing = False
        self._tasks = [self._loop.create_task(self._refresh_forever())]
        if server is not None:
            self._tasks.append(self._loop.create_task(self._sample_storage_forever(server)))

    @staticmethod
    def check(config: DirectoryConfig) -> None:
        """Check a configuration; nothing is contacted."""
        _Server(config, "")

    @property
    def tls_refusals(self) -> int:
        """Number of failures of TLS with the server whose files had not changed."""
        return self._client.tls.refusals if self._client.tls else 0

    @property
    def engines(self) -> int:
        """Number of other engines with valid leases in the last round."""
        return len(self._entries)

    @property
    def known(self) -> Set[Endpoint]:
        """The engines that :meth:`candidates` may return."""
        return self._places.keys()

    def candidates(self, keys: Sequence[BlockKey], most: int, barred: Set[Endpoint]) -> list[Endpoint]:
        """Return the engines that, according to their summaries, hold the most of the given blocks."""
        places = [self._places[endpoint] for endpoint in barred & self._places.keys()]
        found = [self._indexed[place] for place in self._index.best(keys, most, places)]
        # The index is rebuilt shortly after an engine has left.
        return [endpoint for endpoint in found if endpoint in self._entries]

    async def close(self) -> None:
        """Stop, and withdraw this engine's entry if the server responds soon."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        if self._own is not None:
            with suppress(BackendUnavailableError, TimeoutError):
                async with asyncio.timeout(float(self._config.connect_timeout)), self._client.session():
                    await self._client.withdraw(str(self._own))

    async def _refresh_forever(self) -> None:
        while True:
            await self._refresh()
            # Engines that were started together must not stay synchronised.
            await asyncio.sleep(float(self._config.interval) * random.uniform(0.8, 1.2))

    async def _refresh(self) -> None:
        """Make one round; if the server hangs, it ends at the session's time limit."""
        interval_s = float(self._config.interval)
        self._counts["directory_rounds"] += 1
        try:
            summary = b"" if self._own is None else await self._summary()
            async with self._client.session():
                if self._own is not None:
                    await self._client.announce(str(self._own), summary, _LEASE_INTERVALS * interval_s)
                self._note(*await self._client.listed())
                await self._read()
        # Entries of others may have any content, and must not stop the rounds.
        except Exception as error:
            self._counts["directory_failures"] += 1
            if not self._failing:
                logger.warning("The directory of peers can't be used: %s", str(error) or "no answer in time")
            self._failing = True
            self._expire()
        else:
            if self._failing:
                logger.warning("The directory of peers can be used again")
            self._failing = False
        if self._is_stale:
            self._is_stale = False
            known = list(self._entries.items())
            # On a thread, because sorting releases the GIL.
            index = await asyncio.to_thread(Index.of, [entry.summary for _, entry in known])
            self._indexed, self._index = [endpoint for endpoint, _ in known], index
            self._places = {endpoint: place for place, endpoint in enumerate(self._indexed)}

    async def _summary(self) -> bytes:
        sample = Sample()
        keys = self._server.memory_keys() if self._server is not None else ()
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            sample.add(keys[start : start + _KEYS_AT_ONCE])
            await asyncio.sleep(0)
        return pack([sample.section(), *([self._stored] if self._stored is not None else [])])

    def _note(self, listed: Sequence[_Listed], is_complete: bool) -> None:
        """Update the known engines. Those missing from a complete list have left.

        From a part of the list, engines are added only if there is room, so that false entries do not replace engines.
        """
        now = self._loop.time()
        entries: dict[Endpoint, _Entry] = {}
        for one in listed:
            endpoint = self._admitted(one.address)
            if endpoint is None:
                self._counts["directory_entries_refused"] += 1
                continue
            if endpoint == self._own:
                continue
            # A restarted engine may have two entries for a while; the later one comes last.
            entry = self._entries.get(endpoint) or _Entry("", 0.0)
            entry.version, entry.expires_at = one.version, now + min(one.left_s, _LEASE_S_MAX)
            entries[endpoint] = entry
        if not is_complete:
            known = {one: entry for one, entry in self._entries.items() if entry.expires_at > now}
            entries = dict(islice((known | entries).items(), ENGINES_MAX))
        self._is_stale |= bool(self._entries.keys() - entries.keys())
        self._entries = entries

    def _expire(self) -> None:
        now = self._loop.time()
        for endpoint in [one for one, entry in self._entries.items() if entry.expires_at <= now]:
            del self._entries[endpoint]
            self._is_stale = True

    def _admitted(self, address: str) -> Endpoint | None:
        """Return the endpoint of an address if an entry may name it."""
        try:
            endpoint = endpoint_of(address)
        except ConfigError:
            return None
        return endpoint if self._config.admits(endpoint) else None

    async def _read(self) -> None:
        """Read changed summaries, least recently read first, as far as the rate allows."""
        now = self._loop.time()
        earned = (now - self._credited_at) * self._limits.read_bytes_per_s
        self._credit, self._credited_at = min(self._credit + earned, self._limits.read_bytes_max), now
        wanted = [endpoint for endpoint, one in self._entries.items() if one.version != one.read_version]
        wanted.sort(key=lambda endpoint: self._entries[endpoint].read_at)
        # Stop before the session's time limit, because a round that exceeds the limit counts as failed.
        while wanted and self._credit > 0 and self._loop.time() < now + float(self._config.interval):
            batch, wanted = wanted[:_READ_AT_ONCE], wanted[_READ_AT_ONCE:]
            for endpoint, data in zip(batch, await self._client.read([str(one) for one in batch]), strict=True):
                self._credit -= max(len(data), _ANSWER_BYTES_MIN)
                self._take(self._entries[endpoint], data)

    def _take(self, entry: _Entry, data: bytes) -> None:
        # Set first, so that an invalid summary is not read again before it changes. A missing one is read again: it
        # reappears unchanged when a late engine renews its lease.
        entry.read_version, entry.read_at = entry.version if data else "", self._loop.time()
        self._is_stale = True
        self._counts["directory_summaries_read"] += 1
        self._counts["directory_bytes_read"] += len(data)
        try:
            entry.summary = unpack(data)
        except SummaryError as error:
            entry.summary = ()
            self._counts["directory_entries_refused"] += 1
            logger.debug("A summary can't be read: %s", error)

    async def _sample_storage_forever(self, server: PeerServer) -> None:
        loop = self._loop
        while True:
            begun, sample = loop.time(), Sample()
            try:
                async for keys in server.stored_keys():
                    for start in range(0, len(keys), _KEYS_AT_ONCE):
                        sample.add(keys[start : start + _KEYS_AT_ONCE])
                        await asyncio.sleep(0)
                section = sample.section()
                self._stored = section if len(section.digests) else None
            except Exception as error:  # Backends may be third-party code, and must not stop the sampling.
                logger.debug("The keys on storage could not be sampled: %r", error)
            await asyncio.sleep(max(float(self._config.interval), (loop.time() - begun) / _SAMPLING_SHARE))


class _Server:
    """Sessions with the server, one at a time.

    Its keys are ``<prefix><namespace>:engines`` and ``<prefix><namespace>:<address>``, which expire. The scores of the
    sorted set are the ends of leases by the server's clock, so the clocks of engines do not matter.
    """

    def __init__(self, config: DirectoryConfig, namespace_hex: str) -> None:
        names = "url", "username", "password", "insecure", "tls_ca", "tls_cert", "tls_key", "tls_check_hostname"
        fields = {name: getattr(config, name) for name in names}
        self._config = RedisConfig(**fields, connect_timeout=config.connect_timeout, timeout=config.connect_timeout)
        self._endpoint, self._database = control.endpoint_of(self._config)
        self.tls = checked_tls(self._config)
        self._prefix = f"{config.prefix}{namespace_hex}:".encode()
        self._engines = self._prefix + b"engines"
        self._session_s = 2 * float(config.interval) + float(config.connect_timeout)
        self._listed = 0
        """Entries of the list that earlier rounds have read; 0 at its beginning."""
        self._node: Node
        self._member = b""

    @asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        """Connect, for a limited time; failures within the context are ``BackendUnavailableError``."""
        place = self._endpoint, self._config, self.tls, self._session_s, self._database
        try:
            async with control.session(*place) as self._node:
                yield
        # The last four result from invalid answers. Not chained, because servers quote arguments.
        except (RedisError, TypeError, ValueError, LookupError, AttributeError) as error:
            reason = error.bare if isinstance(error, RedisError) else type(error).__name__
            reason = reason.removeprefix(f"{self._endpoint}: ")
            raise BackendUnavailableError(f"{self._endpoint}: {reason}", backend="peer") from None

    async def announce(self, address: str, summary: bytes, lease_s: float) -> None:
        """Publish the summary of this engine, and renew its lease."""
        member = f"{address} {xxhash.xxh3_64_hexdigest(summary)}".encode()
        lease_ms = int(1000 * lease_s)
        end_ms = await self._now_ms() + lease_ms
        commands = [
            (b"SET", self._prefix + address.encode(), summary, b"PX", b"%d" % lease_ms),
            (b"ZADD", self._engines, b"%d" % end_ms, member),
            (b"PEXPIRE", self._engines, b"%d" % (1000 * _LEASE_S_MAX)),
        ]
        if self._member not in (b"", member):
            commands.append((b"ZREM", self._engines, self._member))
        await self._ask(*commands)
        self._member = member

    async def listed(self) -> tuple[Sequence[_Listed], bool]:
        """Return engines by the end of their leases, and whether the list is complete.

        Expired and overlong leases are removed.
        """
        now_ms = await self._now_ms()
        last_ms = now_ms + int(1000 * _LEASE_S_MAX)
        start, count = self._listed, 2 * ENGINES_MAX
        part = b"LIMIT", b"%d" % start, b"%d" % count
        found: Any
        *_, found = await self._ask(
            (b"ZREMRANGEBYSCORE", self._engines, b"-inf", b"%d" % now_ms),
            (b"ZREMRANGEBYSCORE", self._engines, b"(%d" % last_ms, b"+inf"),
            (b"ZRANGEBYSCORE", self._engines, b"(%d" % now_ms, b"%d" % last_ms, b"WITHSCORES", *part),
        )
        members, scores = found[::2], found[1::2]
        # A long list is read in parts, one a round.
        self._listed = start + count if len(members) == count else 0
        listed = []
        for member, score in zip(members, scores, strict=True):
            match = _MEMBER.fullmatch(member)
            address, version = (match[1], match[2]) if match else (b"", b"")
            listed.append(_Listed(address.decode("ascii"), version.decode("ascii"), (float(score) - now_ms) / 1000))
        return listed, not start and len(members) < ENGINES_MAX

    async def read(self, addresses: Sequence[str]) -> Sequence[bytes]:
        """Return the summaries of engines, a little more than ``SUMMARY_BYTES_MAX`` at most; empty without one."""
        room = SUMMARY_BYTES_MAX + 1
        buffers = [bytearray(room) for _ in addresses]
        requests = []
        for address, buffer in zip(addresses, buffers, strict=True):
            # Limits the length of the answer, whatever the length of the value.
            command = encode_command(b"GETRANGE", self._prefix + address.encode(), b"0", b"%d" % SUMMARY_BYTES_MAX)
            requests.append(Request([command], Target([memoryview(buffer)]), room))
        answers = await answers_to(self._node.submit, requests)
        for answer in answers:
            # A key of another type must fail for one engine only.
            if isinstance(answer, RedisError) and not isinstance(answer, ServerRefusedError):
                raise answer
        pairs = zip(buffers, answers, strict=True)
        return [bytes(buffer[:answer]) if isinstance(answer, Filled) else b"" for buffer, answer in pairs]

    async def withdraw(self, address: str) -> None:
        """End the lease of this engine."""
        await self._ask((b"ZREM", self._engines, self._member), (b"UNLINK", self._prefix + address.encode()))

    async def _now_ms(self) -> int:
        found: Any = await self._node.ask(b"TIME")
        seconds, microseconds = found
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def _ask(self, *commands: Sequence[bytes]) -> list[Reply]:
        """Send commands together; return their replies, or raise the first error."""
        return await ask_all(self._node.submit, [Request([encode_command(*command)], None) for command in commands])
