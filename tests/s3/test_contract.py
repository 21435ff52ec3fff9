"""The contract suites of backends and tiers: both clients, on SeaweedFS, the strictest server.

Another server and https run the value part: the code above the connection is the same.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from kvstore.backends.base import Backend
from kvstore.backends.s3 import S3Backend
from kvstore.testing import BackendTests, HoldingsTests, TierTests
from kvstore.testing.backend_harness import BackendHarness
from kvstore.testing.backend_tests import BackendConcurrencyTests, BackendFailureTests, BackendValueTests
from kvstore.testing.tier_tests import TierHarness, TierValueTests
from kvstore.types import BlockKey
from tests.s3.clients import config_for, options_for
from tests.s3.fault_server import Fault, FaultServer
from tests.s3.servers import S3Server


class S3Harness(BackendHarness):
    """Shared parts of the suites below."""

    scans: ClassVar[bool] = False
    cancel_rounds: ClassVar[int] = 16
    more: ClassVar[dict[str, Any]] = {"client": "direct"}
    # A call of aioboto3 takes milliseconds of Python, and moto's server takes as long to answer.
    time_limit_s: float = 120.0
    # The suite must pass on any slow machine; deadlines are tested elsewhere.
    patient: ClassVar[dict[str, Any]] = {"timeout": 20, "connect_timeout": 20, "lookup_timeout": 30}
    server: S3Server | FaultServer

    async def make_backend(self) -> Backend:
        """Return a backend under a prefix of its own."""
        return S3Backend(config_for(self.server, **self.patient | self.more))

    async def reopen(self, backend: Backend) -> Backend:
        """Return another backend under the same prefix."""
        assert isinstance(backend, S3Backend)
        return S3Backend(backend.config)


class TestMoto(S3Harness, BackendValueTests):
    """moto's server, our own connections."""

    @pytest.fixture(autouse=True)
    def _server(self, moto_server: S3Server) -> None:
        self.server = moto_server


class TestWeed(S3Harness, BackendTests):
    """SeaweedFS, our own connections."""

    @pytest.fixture(autouse=True)
    def _server(self, weed_server: S3Server) -> None:
        self.server = weed_server


class TestWeedAioboto3(TestWeed):
    """SeaweedFS, aioboto3."""

    more: ClassVar[dict[str, Any]] = {"client": "aioboto3"}


class TestWeedTLS(S3Harness, BackendValueTests, BackendConcurrencyTests):
    """SeaweedFS over https, with checksums on writes."""

    more: ClassVar[dict[str, Any]] = {"client": "direct", "checksums": "when_supported"}

    @pytest.fixture(autouse=True)
    def _server(self, weed_tls: S3Server) -> None:
        self.server = weed_tls


class TestWeedTLSAioboto3(TestWeedTLS):
    """SeaweedFS over https, aioboto3."""

    more: ClassVar[dict[str, Any]] = {"client": "aioboto3", "checksums": "when_supported"}


class TestRefused(S3Harness, BackendFailureTests):
    """A service that refuses one object, as if its KMS key were disabled."""

    faults: FaultServer
    fault: ClassVar[Fault] = Fault.KEY_DISABLED

    @pytest.fixture(autouse=True)
    def _server(self, faults: FaultServer) -> None:
        self.server = self.faults = faults

    async def break_key(self, backend: Backend, key: BlockKey) -> bool:
        """Make the service refuse all requests for one object."""
        await asyncio.to_thread(self.faults.plan, self.fault, contains=key.hex())
        return True

    async def mend_medium(self, backend: Backend) -> None:
        """Make the service answer again."""
        await asyncio.to_thread(self.faults.plan, None)


class TestForbidden(TestRefused):
    """A service that forbids one object, as if another account owned it."""

    fault: ClassVar[Fault] = Fault.FORBIDDEN


class TestUnconditional(S3Harness, BackendTests):
    """A service configured as having no conditional writes."""

    more: ClassVar[dict[str, Any]] = {"client": "direct", "conditional_put": "no"}

    @pytest.fixture(autouse=True)
    def _server(self, faults: FaultServer) -> None:
        self.server = faults


class TestOutage(S3Harness, BackendFailureTests):
    """A service that fails, and recovers."""

    faults: FaultServer

    @pytest.fixture(autouse=True)
    def _server(self, faults: FaultServer) -> None:
        self.server = self.faults = faults

    async def break_medium(self, backend: Backend) -> bool:
        """Make the service break every connection."""
        await asyncio.to_thread(self.faults.plan, Fault.RESET_BEFORE)
        return True

    async def mend_medium(self, backend: Backend) -> None:
        """Make the service answer again."""
        await asyncio.to_thread(self.faults.plan, None)


class TestOutageAioboto3(TestOutage):
    """The same with aioboto3."""

    more: ClassVar[dict[str, Any]] = {"client": "aioboto3"}


class S3TierHarness(TierHarness):
    """Shared parts of the suites below."""

    exclusive = False
    client: ClassVar[str] = "direct"
    server: S3Server

    def make_config(self) -> dict[str, Any]:
        """Return the configuration of a tier under an unused prefix."""
        return {"backend": "s3", **options_for(self.server, **S3Harness.patient, client=self.client)}


class TestWeedTier(S3TierHarness, TierTests):
    """A tier over SeaweedFS."""

    @pytest.fixture(autouse=True)
    def _server(self, weed_server: S3Server) -> None:
        self.server = weed_server


class TestWeedTierAioboto3(S3TierHarness, TierValueTests):
    """The same with aioboto3."""

    client: ClassVar[str] = "aioboto3"

    @pytest.fixture(autouse=True)
    def _server(self, weed_server: S3Server) -> None:
        self.server = weed_server


class TestMotoTier(S3TierHarness, TierValueTests):
    """A tier over moto's server."""

    @pytest.fixture(autouse=True)
    def _server(self, moto_server: S3Server) -> None:
        self.server = moto_server


class TestWeedTierTLS(S3TierHarness, TierValueTests):
    """A tier over SeaweedFS with https."""

    @pytest.fixture(autouse=True)
    def _server(self, weed_tls: S3Server) -> None:
        self.server = weed_tls


class TestHoldings(S3Harness, HoldingsTests):
    """Objects of one block, listed from SeaweedFS."""

    @pytest.fixture(autouse=True)
    def _server(self, weed_server: S3Server) -> None:
        self.server = weed_server


class TestPackedHoldings(TestHoldings):
    """Blocks in packs."""

    erases = False
    more: ClassVar[dict[str, Any]] = {"client": "direct", "pack_below": "1MiB", "pack_blocks": 5, "pack_refresh": 0}
