"""The contract suites of backends and tiers, on all kinds of servers.

Variants that only change the connection or an option of the writes run the value part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from kvstore.backends.base import Backend
from kvstore.backends.redis import RedisBackend, RedisConfig
from kvstore.testing import BackendTests, HoldingsTests, TierTests
from kvstore.testing.backend_harness import BackendHarness
from kvstore.testing.backend_tests import BackendConcurrencyTests, BackendFailureTests, BackendValueTests
from kvstore.testing.tier_tests import TierHarness, TierValueTests
from tests.redis.clients import options_for
from tests.redis.servers import Server


class RedisHarness(BackendHarness):
    """Shared parts of the suites below; the server is Redis from Debian."""

    scans: ClassVar[bool] = False
    more: ClassVar[dict[str, Any]] = {}
    server: Server

    @pytest.fixture(autouse=True)
    def _server(self, redis_server: Server) -> None:
        self.server = redis_server

    def options(self) -> dict[str, Any]:
        """Return the options of a backend under an unused prefix."""
        return options_for(self.server, **self.more)

    async def make_backend(self) -> Backend:
        """Return a backend under a prefix of its own."""
        return RedisBackend(RedisConfig(**self.options()))

    async def reopen(self, backend: Backend) -> Backend:
        """Return another backend under the same prefix."""
        assert isinstance(backend, RedisBackend)
        return RedisBackend(backend.config)


class TestRedis(RedisHarness, BackendTests):
    """Redis over TCP."""


class TestRedisRESP2(RedisHarness, BackendValueTests):
    """Blocks without a time to live."""

    more: ClassVar[dict[str, Any]] = {"ttl": 0}


class TestUnixSocket(RedisHarness, BackendValueTests):
    """Redis over a unix socket."""

    def options(self) -> dict[str, Any]:
        """Return the same options with the socket's path."""
        return {**super().options(), "url": f"unix://{self.server.unix_path}"}


class InParts(RedisBackend):
    """A backend with a small part size."""

    part_bytes: ClassVar[int] = 16384


class PartsHarness(RedisHarness):
    """Blocks stored in parts, of 16 KiB here."""

    async def make_backend(self) -> Backend:
        """Return a backend under a prefix of its own."""
        return InParts(RedisConfig(**self.options()))

    async def reopen(self, backend: Backend) -> Backend:
        """Return another backend under the same prefix."""
        assert isinstance(backend, InParts)
        return InParts(backend.config)


class TestParts(PartsHarness, BackendValueTests):
    """Parts on one node."""


class TestPartsInCluster(PartsHarness, BackendTests):
    """Parts on different nodes."""

    @pytest.fixture(autouse=True)
    def _server(self, cluster: Sequence[Server]) -> None:
        self.server = cluster[0]


class TestValkey(TestRedis):
    """Valkey 9."""

    @pytest.fixture(autouse=True)
    def _server(self, valkey_server: Server) -> None:
        self.server = valkey_server


class TestTLS(RedisHarness, BackendValueTests, BackendConcurrencyTests):
    """TLS, with a user of least rights."""

    @pytest.fixture(autouse=True)
    def _server(self, tls_server: Server) -> None:
        self.server = tls_server


class TestCluster(TestRedis):
    """Three masters; the backend detects the cluster."""

    @pytest.fixture(autouse=True)
    def _server(self, cluster: Sequence[Server]) -> None:
        self.server = cluster[0]


class TestOutage(RedisHarness, BackendFailureTests):
    """A server of its own, which the suite may stop."""

    # The check that stops the server waits for these timeouts a few times.
    more: ClassVar[dict[str, Any]] = {"timeout": 3, "connect_timeout": 3}

    @pytest.fixture(autouse=True)
    def _server(self, own_server: Server) -> None:
        self.server = own_server

    async def break_medium(self, backend: Backend) -> bool:
        """Stop the server (SIGSTOP)."""
        self.server.pause()
        return True

    async def mend_medium(self, backend: Backend) -> None:
        """Resume the server, and wait until the backend has noticed."""
        self.server.resume()
        await _until_back(backend)


async def _until_back(backend: Backend) -> None:
    async with asyncio.timeout(50):
        while True:
            try:
                return await backend.probe()
            except Exception:
                # Any error is accepted while the server is down; it has to recover.
                await asyncio.sleep(0.02)


class RedisTierHarness(TierHarness):
    """Shared parts of the suites below; the server is Redis from Debian."""

    exclusive = False

    @pytest.fixture(autouse=True)
    def _server(self, redis_server: Server) -> None:
        self.server = redis_server

    def make_config(self) -> dict[str, Any]:
        """Return the configuration of a tier under an unused prefix."""
        return {"backend": "redis", **options_for(self.server)}


class TestRedisTier(RedisTierHarness, TierTests):
    """A tier over Redis."""


class TestValkeyTier(RedisTierHarness, TierValueTests):
    """A tier over Valkey."""

    @pytest.fixture(autouse=True)
    def _server(self, valkey_server: Server) -> None:
        self.server = valkey_server


class TestTLSTier(RedisTierHarness, TierValueTests):
    """A tier over TLS, whose user has the rights of an engine and may not list."""

    forgets = False

    @pytest.fixture(autouse=True)
    def _server(self, tls_server: Server) -> None:
        self.server = tls_server


class TestClusterTier(RedisTierHarness, TierValueTests):
    """A tier over a cluster."""

    @pytest.fixture(autouse=True)
    def _server(self, cluster: Sequence[Server]) -> None:
        self.server = cluster[0]


class TestHoldings(RedisHarness, HoldingsTests):
    """Values of one part, listed by SCAN."""
