"""Backends for tests, each over a part of a server that nobody else uses."""

from __future__ import annotations

import itertools
import os
from typing import Any

from kvstore.backends.base import RecordGeometry
from kvstore.backends.redis import RedisBackend, RedisConfig
from kvstore.namespace import Namespace
from tests.redis.servers import Server

_numbers = itertools.count()
_opened: list[RedisBackend] = []

NAMESPACE = Namespace({"suite": "redis"})

PATIENT: dict[str, Any] = {"timeout": 20, "connect_timeout": 20, "lookup_timeout": 30, "load_timeout": 30}
"""What is not about deadlines must hold however slow the machine is."""


def fresh_prefix() -> str:
    """Return a prefix that no other test has."""
    return f"kv:{os.getpid()}-{next(_numbers)}:"


def options_for(server: Server, **more: Any) -> dict[str, Any]:
    """Return the options of a backend on a server, under a prefix of its own, with long deadlines."""
    options: dict[str, Any] = {"url": server.url, "prefix": fresh_prefix(), **PATIENT}
    if server.tls_ca is not None:
        options |= {"tls_ca": str(server.tls_ca), "username": server.username, "password": server.password}
    return options | more


def backend_on(server: Server, **more: Any) -> RedisBackend:
    """Return a backend on a server, not opened."""
    return RedisBackend(RedisConfig(**options_for(server, **more)))


async def opened(server: Server, payload_bytes: int = 4096, **more: Any) -> RedisBackend:
    """Return a backend on a server, opened."""
    backend = backend_on(server, **more)
    await backend.open(NAMESPACE, RecordGeometry(RedisBackend.alignment, payload_bytes))
    return close_in_any_case(backend)


def close_in_any_case(backend: RedisBackend) -> RedisBackend:
    """Note a backend that has to be closed also if the test that opened it fails."""
    _opened.append(backend)
    return backend


async def close_all() -> None:
    """Close what a test has opened and, as it failed, not closed: it would fail the next one by its open sockets."""
    while _opened:
        await _opened.pop().close()
