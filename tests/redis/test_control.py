"""The control plane's connections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvstore.backends.redis import node as node_module
from kvstore.backends.redis.config import RedisConfig
from kvstore.backends.redis.connection import Connection
from kvstore.backends.redis.control import endpoint_of, shards
from kvstore.backends.redis.failures import NodeDownError
from kvstore.backends.redis.node import Node
from kvstore.backends.stream import Endpoint
from kvstore.testing.seeds import fresh_seed
from tests.redis.fake_server import answering, fake_server
from tests.redis.servers import plain, running


async def test_a_cancelled_question_closes_its_connection(tmp_path: Path) -> None:
    """A query cancelled at any moment, even during the disconnect, leaves no open connection behind."""
    seed = fresh_seed()
    rng = random.Random(seed)
    with running(server := plain("redis", tmp_path / "server")):
        config = RedisConfig(url=server.url)
        endpoint, _ = endpoint_of(config)
        for turns in [*range(80), *(rng.randrange(80) for _ in range(120))]:
            asking = asyncio.create_task(shards(endpoint, config, None))
            for _ in range(turns):
                # Turns of the loop, so that each step of the exchange is hit; sometimes real time passes.
                await asyncio.sleep(0 if rng.randrange(8) else 0.0003)
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError, NodeDownError):
                await asking
        # A connection left open would warn now, and warnings are errors.
        gc.collect()


async def test_connection_lost_after_login_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection lost between login and first use is a failure, and does not count as connected."""

    class Closing(Connection):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._on_room = self.close

    monkeypatch.setattr(node_module, "Connection", Closing)
    async with fake_server(answering(b"")) as server:
        config = RedisConfig(url=server.url, connect_timeout=20, timeout=20)
        endpoint = Endpoint("127.0.0.1", server.port)
        node = Node(endpoint, config, None, Counter(), database=0, is_replica=False, on_trouble=lambda: None)
        with pytest.raises(NodeDownError, match="at once"):
            await node.connect()
        await node.close()
