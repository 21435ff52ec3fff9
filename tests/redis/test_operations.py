"""Twenty thousand mixed operations on every kind of server, with every answer checked, and masters being killed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.backends.base import RecordGeometry
from kvstore.backends.redis import RedisBackend
from kvstore.testing.records import RecordMaker
from kvstore.testing.seeds import fresh_seed
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome
from tests.redis.clients import NAMESPACE, opened
from tests.redis.fake_server import Weather, stormy
from tests.redis.mix import PAYLOAD_BYTES, Mix
from tests.redis.servers import (
    Server,
    by_sentinels,
    cli,
    cluster_nodes,
    join_cluster,
    plain,
    replica_of,
    running,
    sentinels,
    until_watched,
)

OPERATIONS = 20_000

QUICK: dict[str, Any] = {"timeout": 3, "connect_timeout": 3}
"""For servers that are stopped: each detection takes a deadline, which a running server must not miss."""

pytestmark = pytest.mark.timeout(600)


async def settled(backend: RedisBackend, within_s: float = 120.0) -> float:
    """Wait until blocks of many slots can be stored and read again; return how long it took."""
    started = time.monotonic()
    mix = Mix(backend, fresh_seed(), calm=True)
    while True:
        try:
            await mix.run(300)
        except* AssertionError as errors:
            if time.monotonic() - started > within_s:
                raise errors.exceptions[0] from None
            await asyncio.sleep(0.1)
        else:
            return time.monotonic() - started


@asynccontextmanager
async def under_load(mix: Mix) -> AsyncIterator[None]:
    """Run the mix during the context."""
    ended = asyncio.Event()

    async def work() -> None:
        while not ended.is_set():
            await mix.run(500)

    async with asyncio.TaskGroup() as group:
        group.create_task(work())
        yield
        ended.set()


async def until_noticed(mix: Mix) -> None:
    """Wait until operations have failed, or were rejected at once, because a server is gone."""
    await eventually_async(
        lambda: mix.counts["failed"] + mix.counts["put SHED"], timeout_s=60, what=f"failures after a server died: {mix}"
    )


async def calm(server: Server, **more: Any) -> None:
    """Run the mix on an undisturbed server."""
    backend = await opened(server, PAYLOAD_BYTES, **more)
    mix = Mix(backend, fresh_seed(), calm=True)
    await mix.run(OPERATIONS)
    assert mix.counts["put OK"] > 1000 and mix.counts["get OK"] > 1000 and mix.counts["get MISS"] > 100, str(mix)
    await backend.close()


@pytest.mark.parametrize(
    "kind", ["redis", *(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("valkey", "unix socket"))]
)
async def test_plain_server(request: pytest.FixtureRequest, kind: str) -> None:
    """Redis of Debian, Valkey 9, and a unix socket: exact results, no lost block."""
    server: Server = request.getfixturevalue("valkey_server" if kind == "valkey" else "redis_server")
    await calm(server, **({"url": f"unix://{server.unix_path}"} if kind == "unix socket" else {}))


@pytest.mark.matrix
async def test_tls_with_acl(tls_server: Server) -> None:
    """TLS and a user of least rights: exact results, no lost block, no forbidden command."""
    admin = replace(tls_server, username="admin", process=None)
    cli(admin, "ACL", "LOG", "RESET")
    await calm(tls_server)
    denied = cli(admin, "ACL", "LOG")
    assert "username" not in denied, denied


@pytest.mark.matrix
async def test_cluster_recovers_from_a_killed_master(tmp_path: Path) -> None:
    """Three masters, one killed under load and restarted: no wrong byte, no hang, and full recovery."""
    servers = cluster_nodes(tmp_path)
    with running(*servers):
        await asyncio.to_thread(join_cluster, servers)
        backend = await opened(servers[0], PAYLOAD_BYTES, **QUICK)
        assert backend.stats().gauges["nodes"] == 3
        mix = Mix(backend, fresh_seed(), calm=True)
        await mix.run(4000)
        mix.calm = False
        async with under_load(mix):
            await asyncio.to_thread(servers[1].kill)
            await until_noticed(mix)
            await asyncio.to_thread(servers[1].start)
        await mix.run(OPERATIONS - 8000)
        assert mix.counts["get OK"] > 1000, str(mix)
        took_s = await settled(backend)
        mix.calm = True
        await mix.run(4000)
        print(mix, f"back after {took_s:.1f} s")


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["redis", "valkey"])
async def test_sentinel_fail_over(tmp_path: Path, kind: str) -> None:
    """The master is killed under load, Sentinel promotes its replica, and we follow: no wrong byte, no hang."""
    master = plain(kind, tmp_path / "master")
    replica = replica_of(master, tmp_path / "replica")
    watchers = sentinels(master, tmp_path)
    with running(master, replica, *watchers):
        await asyncio.to_thread(until_watched, watchers)
        backend = await opened(master, PAYLOAD_BYTES, **by_sentinels(watchers), **QUICK)
        mix = Mix(backend, fresh_seed(), calm=True)
        await mix.run(6000)
        mix.calm = False
        async with under_load(mix):
            await asyncio.to_thread(master.kill)
            await until_noticed(mix)
        await mix.run(OPERATIONS - 10_000)
        took_s = await settled(backend)
        mix.calm = True
        await mix.run(OPERATIONS - 10_000)  # Operations without a master fail at once: they are not counted.
        print(mix, f"back after {took_s:.1f} s")
        await backend.close()


async def _in_storm(server: Server, url: str, weather: Weather, kind: str, timeout_s: float) -> Mix:
    """Run the mix through a bad network until enough faults were seen, or a time limit."""
    backend = None
    while backend is None:
        # The network is equally bad during login.
        try:
            backend = await opened(server, PAYLOAD_BYTES, url=url, timeout=timeout_s, connect_timeout=max(1, timeout_s))
        except Exception:  # Any network error of the first attempt.
            continue
    mix = Mix(backend, fresh_seed(), calm=False)
    mix.flips = kind == "flip"
    patience = time.monotonic() + 40
    while time.monotonic() < patience:
        await mix.run(4000 if kind != "stall" else 1500)
        if _is_seen(mix, weather, kind):
            break
    await backend.close()
    return mix


def _is_seen(mix: Mix, weather: Weather, kind: str) -> bool:
    """Return whether both failures and successes were seen.

    Stalls are rare, as each costs a deadline; and a failed node fails thousands of operations at once until the
    next attempt.
    """
    return bool(weather.injected or kind == "delay") and mix.counts["get OK"] > 50


@pytest.mark.parametrize("kind", ["cut", "reset", "flip", "stall", "delay"])
async def test_bad_network(redis_server: Server, kind: str) -> None:
    """Connections cut, reset, stalled, delayed, bits flipped: no wrong byte, no hang."""
    weather = Weather(random.Random(fresh_seed()))
    if kind == "delay":
        weather.delay_s = 0.004
    else:
        setattr(weather, kind, 0.02 if kind != "stall" else 0.002)
    async with stormy(redis_server.port, weather) as url:
        # A machine too slow for the first deadline gets more time.
        for timeout_s in (0.3, 1.0, 3.0):
            mix = await _in_storm(redis_server, url, weather, kind, timeout_s)
            if _is_seen(mix, weather, kind):
                break
        assert weather.injected or kind == "delay", "nothing went wrong"
        assert mix.counts["get OK"] > 50, str(mix)
        print(kind, weather.injected, mix)
    healthy = await opened(redis_server, PAYLOAD_BYTES)
    assert set(await healthy.exists([b"a" * 32])) == {False}


async def test_killed_and_started_again(own_server: Server) -> None:
    """A server killed and restarted empty: failures while it is down, then misses, then normal operation."""
    backend = await opened(own_server, PAYLOAD_BYTES, **QUICK)
    mix = Mix(backend, fresh_seed(), calm=True)
    await mix.run(1000)
    mix.calm = False
    async with under_load(mix):
        await asyncio.to_thread(own_server.kill)
        await until_noticed(mix)
        await asyncio.to_thread(own_server.start)
    await settled(backend)


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru", "volatile-lru"])
async def test_full_server(tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """A full server refuses or evicts: NO_SPACE or misses, never a failure; the start warns of noeviction."""
    with running(plain("redis", tmp_path, memory="8mb", policy=policy)) as (server,):
        backend = await opened(server, 65536)
        assert ("noeviction" in caplog.text) == (policy == "noeviction")
        maker = RecordMaker(NAMESPACE, RecordGeometry(256, 65536), random.Random(3))
        values = {maker.key(): maker.payload() for _ in range(300)}
        outcomes = []
        for key, payload in values.items():
            outcomes += await backend.put([maker.write(key, payload)])
        expected = {Outcome.OK, Outcome.NO_SPACE} if policy == "noeviction" else {Outcome.OK}
        assert set(outcomes) == expected
        found = 0
        for key, payload in values.items():
            target = maker.target(key)
            (outcome,) = await backend.get_into([target.read])
            assert outcome in (Outcome.OK, Outcome.MISS)
            if outcome is Outcome.OK:
                found += 1
                assert maker.content(target) == payload
        assert 0 < found < 300
