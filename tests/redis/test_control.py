"""The control plane's connections, which are redis-py's."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from pathlib import Path

from kvstore.backends.redis.config import RedisConfig
from kvstore.backends.redis.control import endpoint_of, shards
from kvstore.backends.redis.failures import NodeDownError
from tests.redis.servers import plain, running
from tests.redis.test_operations import fresh_seed


async def test_a_cancelled_question_closes_its_connection(tmp_path: Path) -> None:
    """Cancelled at any moment, also while it says goodbye, a question leaves no open connection behind."""
    seed = fresh_seed()
    rng = random.Random(seed)
    with running(server := plain("redis", tmp_path / "server")):
        config = RedisConfig(url=server.url)
        endpoint, _ = endpoint_of(config)
        for turns in [*range(80), *(rng.randrange(80) for _ in range(120))]:
            asking = asyncio.create_task(shards(endpoint, config))
            for _ in range(turns):
                # Turns of the loop, so that each step of the conversation is met; now and then time passes, too.
                await asyncio.sleep(0 if rng.randrange(8) else 0.0003)
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError, NodeDownError):
                await asking
        # A connection that was left open would warn now, and warnings are errors.
        gc.collect()
