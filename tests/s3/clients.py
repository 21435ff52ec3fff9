"""Backends and clients for tests, each under a prefix of its own."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any, Final

import pytest

from kvstore.backends.base import RecordGeometry
from kvstore.backends.s3 import S3Backend, S3Config
from kvstore.backends.s3.client import ObjectClient, make_client
from kvstore.namespace import Namespace
from tests.s3.fault_server import FaultServer
from tests.s3.servers import S3Server

_numbers = itertools.count()

CLIENTS: Final = ("direct", "aioboto3")
EACH_CLIENT: Final = (CLIENTS[0], pytest.param(CLIENTS[1], marks=pytest.mark.matrix))
"""Parameters of a test that runs with each client."""

PATIENT: Final[dict[str, Any]] = {"timeout": 20, "connect_timeout": 20, "lookup_timeout": 30, "load_timeout": 30}
"""Checks that do not concern deadlines must pass on any slow machine."""

_opened: list[ObjectClient | S3Backend] = []
NAMESPACE: Final = Namespace({"suite": "s3"})


def fresh_prefix() -> str:
    """Return a unique prefix."""
    return f"kv-{os.getpid()}-{next(_numbers)}/"


def options_for(server: S3Server | FaultServer, **more: Any) -> dict[str, Any]:
    """Return the options of a backend on a server, under a prefix of its own, with long deadlines."""
    options: dict[str, Any] = {
        "bucket": server.bucket,
        "endpoint": server.url,
        "region": server.region,
        "access_key_id": server.access_key,
        "secret_access_key": server.secret_key,
        "prefix": fresh_prefix(),
        **PATIENT,
    }
    if server.tls_ca is not None:
        options["tls_ca"] = str(server.tls_ca)
    return options | more


def config_for(server: S3Server | FaultServer, **more: Any) -> S3Config:
    """Return the same options as a configuration."""
    options = options_for(server, **more)
    if options.get("tls_ca"):
        options["tls_ca"] = Path(options["tls_ca"])
    return S3Config(**options)


async def opened_client(server: S3Server | FaultServer, **more: Any) -> ObjectClient:
    """Return a client on a server, open until the end of the test."""
    client = make_client(config_for(server, **more))
    await client.open()
    _opened.append(client)
    return client


async def opened(server: S3Server | FaultServer, payload_bytes: int = 4096, **more: Any) -> S3Backend:
    """Return a backend on a server, open until the end of the test."""
    backend = S3Backend(config_for(server, **more))
    await backend.open(NAMESPACE, RecordGeometry(S3Backend.alignment, payload_bytes))
    _opened.append(backend)
    return backend


async def close_all() -> None:
    """Close the backends and clients of a test."""
    while _opened:
        await _opened.pop().close()
