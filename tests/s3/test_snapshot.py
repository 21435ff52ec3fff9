"""Snapshots of presence: a cold engine sends requests only for blocks that may be there."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvstore.backends.s3.client import make_client
from kvstore.backends.s3.failures import S3Error
from kvstore.backends.s3.notes import name_digest
from kvstore.backends.s3.presence import BloomFilter, PresenceSnapshot
from kvstore.namespace import Namespace
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome
from tests.s3.clients import EACH_CLIENT, NAMESPACE, config_for, fresh_prefix, opened, opened_client
from tests.s3.fault_server import Fault, FaultServer
from tests.s3.keepers import housekeeper_of
from tests.s3.packed import blocks_of, reads_of, writes_of
from tests.s3.servers import S3Server

OPTIONS: dict[str, Any] = {"snapshot": True, "keeper_interval": 3600}


def test_filter_has_no_false_negatives(rng: random.Random) -> None:
    """All names in the filter are found, after a round trip too; of other names, less than 2 % are."""
    names = [rng.randbytes(32).hex() for _ in range(100_000)]
    made = BloomFilter.of_digests([name_digest(name) for name in names])
    data = made.encode(NAMESPACE)
    found = BloomFilter.decode(data, NAMESPACE)
    assert found.blocks == 100_000
    assert all(name in found for name in names[:20_000])
    wrong = sum(rng.randbytes(32).hex() in found for _ in range(20_000))
    assert wrong < 20_000 * 0.02
    assert len(data) < 100_000 * 1.3


def test_an_empty_filter_denies_all() -> None:
    """A namespace without blocks also has a filter."""
    made = BloomFilter.of_digests([])
    assert made is not None
    assert "a" not in made


def test_nothing_is_ruled_out_once_own_writes_are_not_all_remembered(
    faults: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write made while the memory of own writes was full may exist: the service is queried."""
    monkeypatch.setattr("kvstore.backends.s3.presence._WRITTEN_MAX", 2)
    config = config_for(faults)
    snapshot = PresenceSnapshot(make_client(config), config, NAMESPACE)
    snapshot._filter = BloomFilter.of_digests([])
    names = [f"{config.prefix}{number}" for number in range(3)]
    snapshot.note_written(names[0])
    assert [snapshot.rules_out(name) for name in names] == [False, True, True]
    for name in names[1:]:
        snapshot.note_written(name)
    assert not any(snapshot.rules_out(name) for name in names)


def test_damaged_snapshots_are_no_snapshots(rng: random.Random) -> None:
    """A snapshot with a wrong bit, of another namespace, or truncated, is refused."""
    made = BloomFilter.of_digests([name_digest(str(number)) for number in range(100)])
    data = made.encode(NAMESPACE)
    assert BloomFilter.decode(data, Namespace({"other": 1})) is None
    assert BloomFilter.decode(data[:-1], NAMESPACE) is None
    assert BloomFilter.decode(b"", NAMESPACE) is None
    # Bytes 12 to 16 are reserved, 24 to 32 the number of blocks, which is only shown.
    for place in [*range(10), *range(16, 24), *range(32, 72), *rng.sample(range(72, len(data)), 100)]:
        damaged = bytearray(data)
        damaged[place] ^= 1 << rng.randrange(8)
        assert BloomFilter.decode(bytes(damaged), NAMESPACE) is None, place


def test_format_of_the_filter_is_fixed() -> None:
    """The bits that a name sets are fixed: engines of other versions read them."""
    made = BloomFilter.of_digests([name_digest("a")])
    data = made.encode(Namespace({"golden": True}))
    bits = [8 * i + bit for i, byte in enumerate(data[72:]) for bit in range(8) if byte >> bit & 1]
    assert data[:24].hex() == GOLDEN_START
    assert bits == GOLDEN_BITS


GOLDEN_START = "896b76626c6f6d0a01000700000000000020000000000000"
GOLDEN_BITS = [214, 1604, 2994, 3615, 5005, 6395, 7785]


@pytest.mark.parametrize("client", EACH_CLIENT)
async def test_cold_engine_with_a_snapshot_sends_few_requests(
    faults: FaultServer, rng: random.Random, client: str
) -> None:
    """With a snapshot, a thousand absent blocks cost some HEADs; present ones are found."""
    more = {**OPTIONS, "prefix": fresh_prefix(), "client": client}
    writer = await opened(faults, **more)
    blocks = blocks_of(rng, 300, 600)
    absent = [rng.randbytes(32) for _ in range(1000)]
    assert set(await writer.put(writes_of(blocks))) == {Outcome.OK}
    await housekeeper_of(writer).round()
    cold = await opened(faults, **more)
    await eventually_async(lambda: cold.stats().counters["snapshots_read"] == 1)
    before = faults.counts().get("HEAD", 0)
    assert await cold.exists(absent) == [False] * 1000
    asked = faults.counts().get("HEAD", 0) - before
    assert asked <= 50
    assert cold.stats().counters["heads_spared"] == 1000 - asked
    assert await cold.exists(list(blocks)) == [True] * 300
    assert set(await cold.get_into(reads_of(blocks, 1024))) == {Outcome.OK}
    # An engine finds its own writes, whatever snapshots say; others find them with the next snapshot.
    own = blocks_of(rng, 20, 600)
    await cold.put(writes_of(own))
    assert await cold.exists(list(own)) == [True] * 20
    await housekeeper_of(cold).round()
    assert await cold.exists(list(own)) == [True] * 20
    await housekeeper_of(writer).round()
    await housekeeper_of(cold).round()
    assert await cold.exists([*own, *blocks]) == [True] * 320
    assert await writer.exists(list(own)) == [True] * 20


async def test_stale_snapshot_is_ignored(weed_server: S3Server, rng: random.Random) -> None:
    """After the end of the engine that writes snapshots, blocks are queried again after three rounds."""
    more = {**OPTIONS, "prefix": fresh_prefix()}
    writer, reader = await opened(weed_server, **more), await opened(weed_server, **more)
    await writer.put(writes_of(blocks_of(rng, 5)))
    await housekeeper_of(writer).round()
    await housekeeper_of(reader).round()
    late = blocks_of(rng, 5)
    await writer.put(writes_of(late))
    await writer.close()
    assert await reader.exists(list(late)) == [False] * 5
    for _ in range(3):
        await housekeeper_of(reader).round()
    assert await reader.exists(list(late)) == [True] * 5


async def test_snapshot_removed_after_its_listing_rules_out_no_block(faults: FaultServer) -> None:
    """A snapshot that is removed just before it is read rules out no block; the next one does."""
    more = {**OPTIONS, "prefix": fresh_prefix()}
    client, config = await opened_client(faults, **more), config_for(faults, **more)
    snapshot, empty = PresenceSnapshot(client, config, NAMESPACE), BloomFilter.of_digests([])
    await client.put(f"{config.prefix}_keeper/presence/{NAMESPACE.hex}", [empty.encode(NAMESPACE)])
    for fault in (Fault.NOT_FOUND, None):
        faults.plan(fault, methods=("GET",), contains=f"presence/{NAMESPACE.hex}")
        await snapshot.refresh()
        assert snapshot.rules_out(f"{config.prefix}absent") is (fault is None)


async def test_engine_without_write_access_reads_snapshots(faults: FaultServer, rng: random.Random) -> None:
    """An engine whose housekeeping fails still reads new snapshots, and queries the service when there are none."""
    more = {**OPTIONS, "prefix": fresh_prefix(), "tries": 1}
    writer, reader = await opened(faults, **more), await opened(faults, **more)
    known, late, last = (blocks_of(rng, 5) for _ in range(3))
    await writer.put(writes_of(known))
    await housekeeper_of(writer).round()
    await housekeeper_of(reader).round()
    for blocks, renewed in ((late, True), (last, False)):
        await writer.put(writes_of(blocks))
        assert await reader.exists(list(blocks)) == [False] * 5
        if renewed:
            await housekeeper_of(writer).round()
        for _ in range(1 if renewed else 3):
            assert set(await reader.get_into(reads_of(known))) == {Outcome.OK}
            faults.plan(Fault.FORBIDDEN, methods=("PUT",))
            with pytest.raises(S3Error, match="403"):
                await housekeeper_of(reader).round()
            faults.plan(None)
        assert await reader.exists(list(blocks)) == [True] * 5


async def test_without_a_snapshot_blocks_are_asked_for(faults: FaultServer, rng: random.Random) -> None:
    """Without a snapshot, or with an unreadable or damaged one, every block is queried."""
    more = {**OPTIONS, "prefix": fresh_prefix(), "tries": 1}
    writer = await opened(faults, **more)
    blocks = blocks_of(rng, 5)
    await writer.put(writes_of(blocks))
    name = f"{more['prefix']}_keeper/presence/{NAMESPACE.hex}"
    for body in (None, b"", b"damaged", b"\x89kvblom\n" + bytes(200)):
        if body is not None:
            await writer._ready().put(name, [body], timeout_s=10)
        reader = await opened(faults, **more)
        snapshot = reader._snapshot
        await snapshot.refresh()
        assert await reader.exists([*blocks, b"absent"]) == [True] * 5 + [False]
        assert reader.stats().counters["heads_spared"] == 0
        await reader.close()
    reader = await opened(faults, **more)
    faults.plan(Fault.INTERNAL, contains="presence")
    with pytest.raises(Exception, match="500"):
        await housekeeper_of(reader).round()
    assert await reader.exists([*blocks, b"absent"]) == [True] * 5 + [False]
