"""Servers that the tests of Redis share: one of each kind, started when the first test asks for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from tests.redis.clients import close_all
from tests.redis.servers import Server, cluster_nodes, join_cluster, plain, running, secured


@pytest.fixture(autouse=True)
async def nothing_stays_open() -> AsyncIterator[None]:
    """Close what a test that fails leaves open."""
    yield
    await close_all()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Redis as Debian has it."""
    with running(plain("redis", tmp_path_factory.mktemp("redis"))) as (server,):
        yield server


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Valkey 9."""
    with running(plain("valkey", tmp_path_factory.mktemp("valkey"))) as (server,):
        yield server


@pytest.fixture(scope="session")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Redis with TLS, and a user that may do what docs/redis.md lists and nothing else."""
    with running(secured(tmp_path_factory.mktemp("tls"))) as (server,):
        yield server


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[Server]]:
    """A cluster of three masters."""
    servers = cluster_nodes(tmp_path_factory.mktemp("cluster"))
    with running(*servers):
        join_cluster(servers)
        yield servers


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A Redis of the test's own, to be stopped, filled and killed."""
    with running(plain("redis", tmp_path)) as (server,):
        yield server
