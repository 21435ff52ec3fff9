"""Shared servers of the Redis tests: one of each kind, started by the first test that uses it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.redis.clients import close_all
from tests.redis.fixtures import cluster_fixture, server_fixture
from tests.redis.servers import Server, plain, running, secured

redis_server = server_fixture("redis", "session")
valkey_server = server_fixture("valkey", "session")
cluster = cluster_fixture("session")


@pytest.fixture(autouse=True)
async def nothing_stays_open() -> AsyncIterator[None]:
    """Close the backends of each test."""
    yield
    await close_all()


@pytest.fixture(scope="session")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Redis with TLS, and a user with exactly the rights listed in docs/redis.md."""
    with running(secured(tmp_path_factory.mktemp("tls"))) as (server,):
        yield server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A Redis for one test, which may stop, fill and kill it."""
    with running(plain("redis", tmp_path)) as (server,):
        yield server
