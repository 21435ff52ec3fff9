"""Backends for tests, each under a prefix of its own."""

from __future__ import annotations

import itertools
import os
import random
from typing import Any

from kvstore.backends.base import RecordGeometry
from kvstore.backends.redis import RedisBackend, RedisConfig
from kvstore.backends.redis.connection import Connection
from kvstore.backends.redis.limits import LIMITS, Limits
from kvstore.backends.redis.node import Node
from kvstore.backends.redis.topology import Topology
from kvstore.namespace import Namespace
from kvstore.testing.records import RecordMaker
from kvstore.testing.waiting import eventually_async
from kvstore.types import BlockKey
from tests.redis.fake_server import FakeServer
from tests.redis.servers import Server

_numbers = itertools.count()
_opened: list[RedisBackend] = []

NAMESPACE = Namespace({})
"""Without fields, so the server gets only blocks."""

PATIENT: dict[str, Any] = {"timeout": 20, "connect_timeout": 20, "lookup_timeout": 30, "load_timeout": 30}
"""Checks that do not concern deadlines must pass on any slow machine."""


def fresh_prefix() -> str:
    """Return a unique prefix."""
    return f"kv:{os.getpid()}-{next(_numbers)}:"


def options_for(server: Server | FakeServer, **more: Any) -> dict[str, Any]:
    """Return the options of a backend on a server, under a prefix of its own, with long deadlines."""
    options: dict[str, Any] = {"url": server.url, "prefix": fresh_prefix(), **PATIENT}
    if server.tls_ca is not None:
        options |= {"tls_ca": str(server.tls_ca), "username": server.username, "password": server.password}
    return options | more


def backend_on(server: Server, **more: Any) -> RedisBackend:
    """Return a backend on a server, not opened."""
    return RedisBackend(RedisConfig(**options_for(server, **more)))


async def opened(
    server: Server | FakeServer,
    payload_bytes: int = 4096,
    *,
    kind: type[RedisBackend] = RedisBackend,
    limits: Limits = LIMITS,
    **more: Any,
) -> RedisBackend:
    """Return a backend on a server, open until the end of the test."""
    backend = kind(RedisConfig(**options_for(server, **more)), limits)
    await backend.open(NAMESPACE, RecordGeometry(RedisBackend.alignment, payload_bytes))
    _opened.append(backend)
    return backend


def topology_of(backend: RedisBackend) -> Topology:
    """Return what a backend knows of its servers."""
    return backend._topology


def connections_of(node: Node) -> list[Connection]:
    """Return a copy of the list of a node's connections."""
    return list(node._connections)


def name_of(backend: RedisBackend, key: BlockKey) -> bytes:
    """Return the name of a block on the server; of its first part, if it has several."""
    return backend._ready().key_of(key)


async def until_renewed(backend: RedisBackend, timeout_s: float = 10.0) -> None:
    """Wait until no renewal of a time to live is under way."""
    await eventually_async(lambda: backend._renewing is None, timeout_s, what="the end of the renewals")


async def close_all() -> None:
    """Close the backends of a test."""
    while _opened:
        await _opened.pop().close()


def maker(payload_bytes: int = 4096, seed: int = 7) -> RecordMaker:
    """Return a maker of records."""
    return RecordMaker(NAMESPACE, RecordGeometry(256, payload_bytes), random.Random(seed))
