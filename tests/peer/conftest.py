"""Fixtures of the peer tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.peer.fake_peer import FakePeer
from tests.peer.serving import Serving
from tests.redis.servers import make_certificates


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options for TLS with certificates on both sides."""
    directory = tmp_path_factory.mktemp("tls")
    make_certificates(directory)
    names = {"tls_ca": "ca.crt", "tls_cert": "server.crt", "tls_key": "server.key"}
    return {"tls": True, **{option: str(directory / name) for option, name in names.items()}}


@pytest.fixture
def fake() -> Iterator[FakePeer]:
    """A peer that misbehaves as a test requests."""
    with FakePeer() as peer:
        yield peer


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """A process that serves blocks; tests may stop and kill it."""
    with Serving(tmp_path) as process:
        yield process
