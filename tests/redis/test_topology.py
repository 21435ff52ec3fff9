"""Routing: slots, cluster maps, redirects, moving slots, replicas."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from redis.crc import key_slot

from kvstore.backends.base import RecordGeometry
from kvstore.backends.redis.control import read_shards
from kvstore.backends.redis.failures import RedisError
from kvstore.backends.redis.topology import slot_of
from kvstore.backends.stream import Endpoint
from kvstore.testing.records import RecordMaker
from kvstore.testing.seeds import fresh_seed
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome
from tests.redis.clients import NAMESPACE, name_of, opened
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


def test_slots_are_those_of_the_specification() -> None:
    """Our slots equal those of redis-py and of the specification's example."""
    assert slot_of(b"123456789") == 0x31C3
    rng = random.Random(5)
    for _ in range(2000):
        key = b"kv:%b" % rng.randbytes(rng.randrange(60)).hex().encode()
        assert slot_of(key) == key_slot(key)


def test_maps_of_a_cluster() -> None:
    """A map is parsed, including nodes without a name; an invalid map is refused."""
    asked = Endpoint("10.0.0.1", 7000)
    (shard,) = read_shards([[0, 16383, [b"", 7000, b"id"], [b"10.0.0.2", 7001, b"id"]]], asked)
    assert shard.master == asked and shard.replicas == (Endpoint("10.0.0.2", 7001),)
    lies: list[Any] = [None, 5, [[0]], [[0, 99999, [b"h", 1]]], [[5, 4, [b"h", 1]]], [[0, 1, [b"h", 0]]]]
    lies += [[[0, 1, []]], [[0, 1]], [[0, 1, [b"\xff", 1]]]]
    # Filling a table of slots again and again would block the loop for seconds.
    lies += [[[0, 16383, [b"h", 1]]] * 2, [[0, 9000, [b"h", 1]], [9000, 16383, [b"h", 1]]]]
    for lie in lies:
        with pytest.raises(RedisError):
            read_shards(lie, asked)


@pytest.mark.matrix
async def test_slots_on_the_move(tmp_path: Path) -> None:
    """While slots move between nodes under load, ASK and MOVED are followed: exact results, no lost block."""
    servers = cluster_nodes(tmp_path, kind="valkey")
    with running(*servers):
        await asyncio.to_thread(join_cluster, servers)
        backend = await opened(servers[0], PAYLOAD_BYTES)
        mix = Mix(backend, fresh_seed(), calm=True)
        await mix.run(4000)
        slots = range(0, 5460, 45)
        maker = RecordMaker(NAMESPACE, RecordGeometry(256, PAYLOAD_BYTES), random.Random(mix.seed))
        keys = (key for key in (maker.key() for _ in itertools.count()) if slot_of(name_of(backend, key)) in slots)
        values = {key: maker.payload() for key in itertools.islice(keys, 60)}
        assert set(await backend.put([maker.write(key, value) for key, value in values.items()])) == {Outcome.OK}
        load = asyncio.create_task(mix.run(16_000))
        await asyncio.to_thread(_move_slots, servers, slots)
        await load
        # The load may have had no key in those slots, or may have ended before the first of them moved.
        await _all_found(backend, maker, values)
        counters = backend.stats().counters
        assert counters["redirects"] > 0, counters


def _move_slots(servers: Sequence[Server], slots: Sequence[int]) -> None:
    """Move slots from the first node to the second, key by key, as an operator's tool does."""
    source, target = servers[:2]
    ids = [cli(server, "CLUSTER", "MYID").strip() for server in servers]
    for slot in slots:
        cli(target, "CLUSTER", "SETSLOT", str(slot), "IMPORTING", ids[0])
        cli(source, "CLUSTER", "SETSLOT", str(slot), "MIGRATING", ids[1])
        while keys := cli(source, "CLUSTER", "GETKEYSINSLOT", str(slot), "10").split():
            cli(source, "MIGRATE", "127.0.0.1", str(target.port), "", "0", "5000", "KEYS", *keys)
        for server in (target, source, servers[2]):
            cli(server, "CLUSTER", "SETSLOT", str(slot), "NODE", ids[1])


async def test_replica_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Reads go to the replica; blocks missing there are read from the master, once; a dead replica costs nothing.

    The nodes are looked for again then, and the same master is no news.
    """
    master = plain("redis", tmp_path / "master")
    replica = replica_of(master, tmp_path / "replica")
    watchers = sentinels(master, tmp_path)
    with running(master, replica, *watchers):
        await asyncio.to_thread(until_watched, watchers)
        backend = await opened(master, PAYLOAD_BYTES, **by_sentinels(watchers), read_from="replica")
        mix = Mix(backend, fresh_seed(), calm=False)
        await mix.run(1000)
        maker = RecordMaker(NAMESPACE, RecordGeometry(256, PAYLOAD_BYTES), random.Random(1))
        # A replica detached from its master never gets these.
        await asyncio.to_thread(cli, replica, "REPLICAOF", "NO", "ONE")
        values = {maker.key(): maker.payload() for _ in range(20)}
        assert set(await backend.put([maker.write(key, value) for key, value in values.items()])) == {Outcome.OK}
        before = _gets(replica), _gets(master)
        assert before[0] > 0
        await _all_found(backend, maker, values)
        if before[0] < _gets(replica):
            assert _gets(master) - before[1] == 20
        assert set(await backend.exists(list(values))) == {True}
        assert set(await backend.exists([bytes([i]) * 32 for i in range(9)])) == {False}
        assert set(await backend.exists(list(values))) == {True}
        assert set(await backend.exists([bytes([i]) * 32 for i in range(9)])) == {False}
        await asyncio.to_thread(replica.kill)
        await _all_found(backend, maker, values)
        await eventually_async(lambda: backend.stats().counters["topology_refreshes"] >= 2, 60, what="refreshes")
        await backend.close()
        assert "new master" not in caplog.text
        await eventually_async(lambda: master.clients() == 0, what="all connections closed")


async def _all_found(backend: Any, maker: RecordMaker, values: dict[bytes, bytes]) -> None:
    targets = [maker.target(key) for key in values]
    outcomes = await backend.get_into([target.read for target in targets])
    assert set(outcomes) == {Outcome.OK}, outcomes
    for target in targets:
        assert maker.content(target) == values[target.key]


def _gets(server: Server) -> int:
    text = cli(server, "INFO", "commandstats")
    return int(text.partition("cmdstat_get:calls=")[2].partition(",")[0] or 0)
