"""A directory on a Redis or Valkey server: a sorted set of leases, and one value with each engine's summary."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import xxhash

from kvstore.backends.peer.config import DirectoryConfig
from kvstore.backends.peer.directory import ENGINES_MAX, LEASE_S_MAX, DirectoryClient, Listed
from kvstore.backends.peer.summary import SUMMARY_BYTES_MAX
from kvstore.backends.redis import control
from kvstore.backends.redis.config import RedisConfig
from kvstore.backends.redis.node import check_secure
from kvstore.errors import BackendUnavailableError

_ANSWER_BYTES_MAX: Final = 4 << 20
"""Most bytes received in one session: a list of 2,048 entries, and a megabyte of summaries."""

_MEMBER: Final = re.compile(rb"([!-~]{3,272}) ([0-9a-f]{16})")
"""Member of the sorted set: address and version of a summary."""

_CODE: Final = re.compile("[A-Z]{2,20}")


class RedisDirectory(DirectoryClient):
    """Keys ``<prefix><namespace>:engines`` and ``<prefix><namespace>:<address>``, which expire.

    The scores of the sorted set are the ends of leases by the server's clock, so the clocks of engines do not matter.
    """

    def __init__(self, config: DirectoryConfig, namespace_hex: str) -> None:
        names = "url", "username", "password", "insecure", "tls_ca", "tls_cert", "tls_key", "tls_check_hostname"
        fields = {name: getattr(config, name) for name in names}
        self._config = RedisConfig(**fields, connect_timeout=config.connect_timeout)
        self._endpoint, self._database = control.endpoint_of(self._config)
        check_secure(self._endpoint, self._config)
        self._prefix = f"{config.prefix}{namespace_hex}:"
        self._engines = f"{self._prefix}engines"
        self._session_s = config.session_s
        self._listed = 0
        """Entries of the list that earlier rounds have read; 0 at its beginning."""
        self._client: Any = None
        self._member = b""

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        self._client = control.client_of(self._endpoint, self._config, self._database)
        try:
            async with control.conversation([self._client], self._session_s, _ANSWER_BYTES_MAX):
                yield
        # redis-py raises the last four for invalid answers. Not chained, because servers quote arguments.
        except (control.ClientError, OSError, TypeError, ValueError, LookupError, AttributeError) as error:
            code = str(error).split(" ", 1)[0]
            reason = code if _CODE.fullmatch(code) else type(error).__name__
            raise BackendUnavailableError(f"{self._endpoint}: {reason}", backend="peer") from None

    async def announce(self, address: str, summary: bytes, lease_s: float) -> None:
        member = f"{address} {xxhash.xxh3_64_hexdigest(summary)}".encode()
        pipeline = self._client.pipeline(transaction=False)
        pipeline.set(self._prefix + address, summary, px=int(1000 * lease_s))
        pipeline.zadd(self._engines, {member: await self._now_ms() + int(1000 * lease_s)})
        pipeline.pexpire(self._engines, int(1000 * LEASE_S_MAX))
        if self._member not in (b"", member):
            pipeline.zrem(self._engines, self._member)
        await pipeline.execute()
        self._member = member

    async def listed(self) -> tuple[Sequence[Listed], bool]:
        """See :meth:`DirectoryClient.listed`. Expired and overlong leases are removed."""
        now_ms = await self._now_ms()
        last_ms = now_ms + int(1000 * LEASE_S_MAX)
        pipeline = self._client.pipeline(transaction=False)
        pipeline.zremrangebyscore(self._engines, "-inf", now_ms)
        pipeline.zremrangebyscore(self._engines, f"({last_ms}", "+inf")
        start, count = self._listed, 2 * ENGINES_MAX
        pipeline.zrangebyscore(self._engines, f"({now_ms}", last_ms, start=start, num=count, withscores=True)
        *_, found = await pipeline.execute()
        # A long list is read in parts, one a round.
        self._listed = start + count if len(found) == count else 0
        listed = []
        for member, score in found:
            match = _MEMBER.fullmatch(member)
            address, version = (match[1], match[2]) if match else (b"", b"")
            listed.append(Listed(address.decode("ascii"), version.decode("ascii"), (score - now_ms) / 1000))
        return listed, not start and len(found) < ENGINES_MAX

    async def read(self, addresses: Sequence[str]) -> Sequence[bytes]:
        pipeline = self._client.pipeline(transaction=False)
        for address in addresses:
            # Limits the length of the answer, whatever the length of the value.
            pipeline.getrange(self._prefix + address, 0, SUMMARY_BYTES_MAX)
        # A key of another type must fail for one engine only.
        answers = await pipeline.execute(raise_on_error=False)
        return [answer if isinstance(answer, bytes) else b"" for answer in answers]

    async def withdraw(self, address: str) -> None:
        pipeline = self._client.pipeline(transaction=False)
        pipeline.zrem(self._engines, self._member)
        pipeline.unlink(self._prefix + address)
        await pipeline.execute()

    async def _now_ms(self) -> int:
        seconds, microseconds = await self._client.time()
        return int(seconds) * 1000 + int(microseconds) // 1000
