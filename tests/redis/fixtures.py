"""Fixtures of servers, with the scope that the caller chooses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import pytest

from tests.redis.servers import Server, cluster_nodes, join_cluster, plain, running

Scope = Literal["session", "module"]


def server_fixture(kind: str, scope: Scope) -> Any:
    """Return a fixture of a server without password (``redis`` of Debian, or ``valkey`` 9)."""

    @pytest.fixture(scope=scope)
    def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        with running(plain(kind, tmp_path_factory.mktemp(kind))) as (one,):
            yield one

    return server


def cluster_fixture(scope: Scope) -> Any:
    """Return a fixture of a cluster of three masters."""

    @pytest.fixture(scope=scope)
    def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[Server]]:
        servers = cluster_nodes(tmp_path_factory.mktemp("cluster"))
        with running(*servers):
            join_cluster(servers)
            yield servers

    return cluster


class OnServer:
    """The server of a contract suite, by the name of its fixture; of a cluster, one node."""

    on: ClassVar[str] = "redis_server"
    server: Any

    @pytest.fixture(autouse=True)
    def _server(self, request: pytest.FixtureRequest) -> None:
        found = request.getfixturevalue(self.on)
        self.server = found[0] if isinstance(found, Sequence) else found
