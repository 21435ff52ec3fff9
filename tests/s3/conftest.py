"""Shared servers of the S3 tests: one of each kind, started by the first test that uses it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.s3.clients import close_all
from tests.s3.fault_server import FaultServer, fault_server
from tests.s3.servers import S3Server, moto, over_tls, running, weed


@pytest.fixture(scope="session", autouse=True)
def no_credentials_from_outside() -> Iterator[None]:
    """Keep clients from querying the machine's metadata service and from reading a user's profile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_CONFIG_FILE", "/dev/null")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
        patch.setenv("AWS_ACCESS_KEY_ID", "AKIAENVIRONMENT00000")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "environment-secret-canary")
        for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True)
async def nothing_stays_open() -> AsyncIterator[None]:
    """Close the backends and clients of each test."""
    yield
    await close_all()


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The server of moto: quick to start, and accepts any credentials and checksums."""
    with running(moto(tmp_path_factory.mktemp("moto"))) as server:
        yield server


@pytest.fixture(scope="session")
def weed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """SeaweedFS, which checks signatures, checksums and conditions."""
    with running(weed(tmp_path_factory.mktemp("weed"))) as server:
        yield server


@pytest.fixture(scope="session")
def weed_tls(weed_server: S3Server) -> S3Server:
    """The same SeaweedFS over https, with its own certificate authority."""
    return over_tls(weed_server)


@pytest.fixture(scope="session")
def fault_server_process() -> Iterator[FaultServer]:
    """The process behind ``faults``."""
    with fault_server() as server:
        yield server


@pytest.fixture
def faults(fault_server_process: FaultServer) -> Iterator[FaultServer]:
    """A server with injected faults; at first empty, without faults, and with its counters at zero."""
    fault_server_process.plan(None)
    fault_server_process.keep_puts(True)
    fault_server_process.clear()
    yield fault_server_process
    fault_server_process.plan(None)
