"""The contract suites of backends and tiers: both clients, on SeaweedFS, the strictest server.

Another server, https and packs of few blocks run the parts that may differ: the code above the connection is the same.
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
from tests.redis.fixtures import OnServer
from tests.s3.clients import config_for, options_for
from tests.s3.fault_server import Fault
from tests.s3.packed import PACKED


class S3Harness(OnServer, BackendHarness):
    """Shared parts of the suites below."""

    on = "weed_server"
    scans: ClassVar[bool] = False
    cancel_rounds: ClassVar[int] = 16
    more: ClassVar[dict[str, Any]] = {"client": "direct"}
    # A call of aioboto3 takes milliseconds of Python, and moto's server takes as long to answer.
    time_limit_s: float = 120.0
    # The suite must pass on any slow machine; deadlines are tested elsewhere.
    patient: ClassVar[dict[str, Any]] = {"timeout": 20, "connect_timeout": 20, "lookup_timeout": 30}

    async def make_backend(self) -> Backend:
        return S3Backend(config_for(self.server, **self.patient | self.more))

    async def reopen(self, backend: Backend) -> Backend:
        assert isinstance(backend, S3Backend)
        return S3Backend(backend.config)


@pytest.mark.matrix
class TestMoto(S3Harness, BackendValueTests):
    on = "moto_server"


class TestWeed(S3Harness, BackendTests):
    pass


@pytest.mark.matrix
class TestWeedAioboto3(TestWeed):
    more: ClassVar[dict[str, Any]] = {"client": "aioboto3"}


@pytest.mark.matrix
class TestWeedTLS(S3Harness, BackendValueTests, BackendConcurrencyTests):
    """SeaweedFS over https, with checksums on writes."""

    on = "weed_tls"
    more: ClassVar[dict[str, Any]] = {"client": "direct", "checksums": "when_supported"}


class TestWeedTLSAioboto3(TestWeedTLS):
    more: ClassVar[dict[str, Any]] = {"client": "aioboto3", "checksums": "when_supported"}


@pytest.mark.matrix
class TestMotoPacked(S3Harness, BackendValueTests):
    on = "moto_server"
    more = PACKED


class TestWeedPacked(TestWeed):
    cancel_rounds: ClassVar[int] = 24
    more = PACKED


class TestRefused(S3Harness, BackendFailureTests):
    """A service that refuses one object, as if its KMS key were disabled."""

    on = "faults"
    fault: ClassVar[Fault] = Fault.KEY_DISABLED

    async def break_key(self, backend: Backend, key: BlockKey) -> bool:
        await asyncio.to_thread(self.server.plan, self.fault, contains=key.hex())
        return True

    async def mend_medium(self, backend: Backend) -> None:
        await asyncio.to_thread(self.server.plan, None)


@pytest.mark.matrix
class TestForbidden(TestRefused):
    """A service that forbids one object, as if another account owned it."""

    fault: ClassVar[Fault] = Fault.FORBIDDEN


@pytest.mark.matrix
class TestUnconditional(S3Harness, BackendTests):
    """A service configured as having no conditional writes."""

    on = "faults"
    more: ClassVar[dict[str, Any]] = {"client": "direct", "conditional_put": "no"}


class TestOutage(S3Harness, BackendFailureTests):
    """A service that breaks every connection, and recovers."""

    on = "faults"

    async def break_medium(self, backend: Backend) -> bool:
        await asyncio.to_thread(self.server.plan, Fault.RESET_BEFORE)
        return True

    mend_medium = TestRefused.mend_medium


@pytest.mark.matrix
class TestOutageAioboto3(TestOutage):
    more: ClassVar[dict[str, Any]] = {"client": "aioboto3"}


class S3TierHarness(OnServer, TierHarness):
    """Shared parts of the suites below."""

    on = "weed_server"
    authoritative = False
    more: ClassVar[dict[str, Any]] = {"client": "direct"}

    def make_config(self) -> dict[str, Any]:
        return {"backend": "s3", **options_for(self.server, **S3Harness.patient, **self.more)}


class TestWeedTier(S3TierHarness, TierTests):
    pass


@pytest.mark.matrix
class TestWeedTierAioboto3(S3TierHarness, TierValueTests):
    more: ClassVar[dict[str, Any]] = {"client": "aioboto3"}


@pytest.mark.matrix
class TestMotoTier(S3TierHarness, TierValueTests):
    on = "moto_server"


@pytest.mark.matrix
class TestWeedTierTLS(S3TierHarness, TierValueTests):
    on = "weed_tls"


class TestTierPacked(S3TierHarness, TierTests):
    more = PACKED


class TestHoldings(S3Harness, HoldingsTests):
    """Objects of one block, listed from SeaweedFS."""


class TestPackedHoldings(TestHoldings):
    erases = False
    more: ClassVar[dict[str, Any]] = {"client": "direct", "pack_below": "1MiB", "pack_blocks": 5, "pack_refresh": 0}
