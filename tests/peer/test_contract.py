"""The contract suites of backends and tiers, over the wire."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, ClassVar

import pytest

from kvstore.backends.base import Backend
from kvstore.backends.peer.server import PeerServer
from kvstore.errors import BackendError
from kvstore.testing import BackendTests, TierTests
from kvstore.testing.backend_harness import BackendHarness
from kvstore.testing.backend_tests import BackendConcurrencyTests, BackendValueTests
from kvstore.testing.tier_tests import TierHarness
from kvstore.types import Outcome
from tests.peer.ports import free_port
from tests.peer.served import ServedConfig, ServedPeer

PATIENT = {"timeout": 20, "lookup_timeout": 20, "connect_timeout": 20}
"""Checks that do not concern deadlines must pass on a busy machine."""


def options(medium_name: str, **more: Any) -> dict[str, Any]:
    """Return the options of a peer that loads from itself."""
    port = free_port()
    # Two names for one place: a peer does not connect to its own listed address.
    named = {"listen": f"127.0.0.1:{port}", "peers": (f"localhost:{port}",), "medium_name": medium_name}
    # Its breaker must not stay open longer than the tier's, which is the only one that the suites wait for.
    return {**named, "breaker_cooldown": "50ms", "breaker_cooldown_max": "100ms", **PATIENT, **more}


def server_of(backend: ServedPeer) -> PeerServer:
    """Return the server in which a backend serves its records."""
    server = backend._server
    assert server is not None
    return server


class PeerHarness(BackendHarness):
    """Shared parts of the suites below."""

    scans: ClassVar[bool] = False
    too_long: ClassVar[Outcome] = Outcome.IO_ERROR  # Nothing has authenticated the length yet.
    more: ClassVar[dict[str, Any]] = {"secret": "sixteen characters"}

    async def make_backend(self) -> Backend:
        return ServedPeer(ServedConfig(**options(uuid.uuid4().hex, **self.more)))

    async def reopen(self, backend: Backend) -> Backend:
        assert isinstance(backend, ServedPeer)
        return ServedPeer(ServedConfig(**options(backend.medium_name, **self.more)))

    async def break_medium(self, backend: Backend) -> bool:
        assert isinstance(backend, ServedPeer)
        await server_of(backend).close()
        backend.is_broken = True
        return True

    async def mend_medium(self, backend: Backend) -> None:
        assert isinstance(backend, ServedPeer)
        await server_of(backend).open()
        backend.is_broken = False
        async with asyncio.timeout(30):
            while True:
                try:
                    return await backend.probe()
                except BackendError:
                    await asyncio.sleep(0.01)


class TestPeer(PeerHarness, BackendTests):
    """Over TCP, with a secret."""


# Python's wrap_socket leaves its socket to the garbage collector if the connection is reset while it runs.
@pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")
@pytest.mark.matrix
class TestTLS(PeerHarness, BackendValueTests, BackendConcurrencyTests):
    """TLS with certificates on both sides."""

    @pytest.fixture(autouse=True)
    def _certificates(self, certificates: dict[str, Any]) -> None:
        self.more = certificates  # type: ignore[misc]


class PeerTierHarness(TierHarness):
    """Shared parts of the suites below."""

    authoritative = False
    forgets = False
    more: ClassVar[dict[str, Any]] = {}

    def make_config(self) -> dict[str, Any]:
        return {"backend": "tests.peer.served:ServedPeer", **options(uuid.uuid4().hex, **self.more)}


class TestPeerTier(PeerTierHarness, TierTests):
    """A tier over a peer."""
