"""Cancelled calls: no wrong bytes, no leaked connection, no buffer touched after the call returned."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest

from kvstore.backends.base import RecordGeometry
from kvstore.errors import BackendError
from kvstore.testing.records import RecordMaker, Target
from kvstore.testing.seeds import fresh_seed
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome
from tests.redis.clients import NAMESPACE, opened
from tests.redis.servers import Server
from tests.sizes import sized

CANCELLED = sized(10_000, full=100_000, quick=3_000)
"""Number of calls cancelled while running."""

PAYLOAD_BYTES = 2048
WORKERS = 16


class Storm:
    """Many callers that cancel their calls at random moments, over one backend."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.rng = random.Random(seed)
        self.maker = RecordMaker(NAMESPACE, RecordGeometry(256, PAYLOAD_BYTES), self.rng)
        self.values = {self.maker.key(): self.maker.payload() for _ in range(64)}
        self.cancelled = self.completed = self.misses = 0

    async def run(self, wanted: int) -> None:
        """Continue until ``wanted`` running calls were cancelled."""
        self.backend = await opened(self.server, PAYLOAD_BYTES)
        puts = [self.maker.write(key, payload) for key, payload in self.values.items()]
        assert set(await self.backend.put(puts)) == {Outcome.OK}
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(self.caller(wanted))

    async def caller(self, wanted: int) -> None:
        """Read blocks, sometimes look them up, and cancel most calls at a random point."""
        keys = list(self.values)
        targets = [self.maker.target(key, PAYLOAD_BYTES) for key in keys[:3]]
        while self.cancelled < wanted:
            for target in targets:
                target.fill()
                target.key = target.read.key = self.rng.choice(keys)
                target.read.filled_bytes = 0
            asks = self.rng.random() < 0.1
            call: asyncio.Future[Any] = asyncio.ensure_future(
                self.backend.exists([target.key for target in targets])
                if asks
                else self.backend.get_into([target.read for target in targets])
            )
            # Zero to a few turns of the loop: not started, queued, sent, partly answered, almost complete.
            for _ in range(self.rng.choice((0, 1, 1, 2, 2, 3, 4, 6, 9))):
                await asyncio.sleep(0)
            call.cancel()
            try:
                answers = await call
            except asyncio.CancelledError:
                self.cancelled += 1
                await self.untouched_from_now_on(targets)
                continue
            except BackendError as error:
                # A get may fail like this after its connection was closed for others too often; it is never a miss.
                assert asks, error
                self.misses += 1
                continue
            self.completed += 1
            if asks:
                assert all(answers), "a block that is there was not found"
                assert all(target.untouched for target in targets)
                continue
            for target, outcome in zip(targets, answers, strict=True):
                if outcome is Outcome.OK:
                    assert self.maker.content(target) == self.values[target.key], "bytes of another block"
                else:
                    assert outcome is Outcome.MISS or outcome is Outcome.IO_ERROR
                    self.misses += 1

    async def untouched_from_now_on(self, targets: list[Target]) -> None:
        """After the call, fill the buffers, let other tasks run, and check that no byte was written."""
        for target in targets:
            target.fill()
        for _ in range(self.rng.randrange(3)):
            await asyncio.sleep(0)
        assert all(target.untouched for target in targets), "a buffer was written after its call had been cancelled"


@pytest.mark.timeout(300)
async def test_cancelled_at_random_points(redis_server: Server) -> None:
    """Many cancelled calls: no wrong answer, no leak, and the backend still works."""
    seed = fresh_seed()
    storm = Storm(redis_server, seed)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    started = time.monotonic()
    try:
        await storm.run(CANCELLED)
        keys = list(storm.values)
        targets = [storm.maker.target(key) for key in keys]
        assert set(await storm.backend.get_into([target.read for target in targets])) == {Outcome.OK}
        for target in targets:
            assert storm.maker.content(target) == storm.values[target.key]
        await eventually_async(
            lambda: redis_server.clients() <= storm.backend.config.connections, what="no more connections than allowed"
        )
        await storm.backend.close()
        await eventually_async(lambda: redis_server.clients() == 0, what="all connections closed")
        assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors + 1
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    print(
        f"{storm.cancelled} cancelled, {storm.completed} completed, {storm.misses} misses, "
        f"{storm.backend.stats().counters}, {time.monotonic() - started:.1f} s"
    )


async def test_cancelled_puts(redis_server: Server) -> None:
    """A cancelled put has published the whole record or none, and never reads its buffers afterwards."""
    seed = fresh_seed()
    rng = random.Random(seed)
    size = 1 << 20
    maker = RecordMaker(NAMESPACE, RecordGeometry(256, size), rng)
    backend = await opened(redis_server, size)
    stored = tried = 0
    # Three hundred, then more with longer delays, until some were stored and some were not.
    while tried < 300 or (not 0 < stored < tried and tried < 3000):
        tried += 1
        key, payload = maker.key(), maker.payload()
        write = maker.write(key, payload)
        call = asyncio.ensure_future(backend.put([write]))
        for _ in range(rng.randrange(8 * 2 ** ((tried - 1) // 300))):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        for buffer in write.buffers:
            # If any of these bytes were sent, the stored record would be damaged.
            buffer[:] = bytes([rng.randrange(256)]) * buffer.nbytes
        target = maker.target(key)
        (outcome,) = await backend.get_into([target.read])
        assert outcome in (Outcome.OK, Outcome.MISS), f"seed {seed}: {outcome!r}"
        if outcome is Outcome.OK:
            stored += 1
            assert maker.content(target) == payload, f"seed {seed}: half of a record was published"
            # Other tests also use the server, which evicts when full.
            await backend.delete([key])
    assert 0 < stored < tried, f"seed {seed}: {stored} of {tried} stored: cancellation was always too early or too late"
