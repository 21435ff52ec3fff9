"""Rounds of the elected engine besides eviction: leases, sweeps, times to live."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Iterable

import pytest

from kvstore import AsyncTier, RequestContext, TransferJob, open_tier
from kvstore.backends.s3.names import ObjectNames
from kvstore.backends.s3.notes import name_digest, read_uses
from kvstore.backends.s3.packs import PackFormat
from kvstore.errors import BackendClosedError
from kvstore.primary import Region
from kvstore.testing.waiting import eventually_async
from kvstore.types import JobResult, LookupResult, Outcome, RemovalCause
from tests.s3.clients import NAMESPACE, opened_client, options_for
from tests.s3.fault_server import Fault, FaultServer
from tests.s3.keepers import SLOW, engines, housekeeper_of, is_elected, names_under, put_empty, removals_reported_by
from tests.s3.packed import PACKED, blocks_of, reads_of, writes_of

_DAY_S = 86400.0


async def test_an_engine_that_loses_the_lease_stops_deleting(
    faults: FaultServer, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is renewed before each batch of deletions: an engine that has lost it deletes no further batch."""
    monkeypatch.setattr("kvstore.backends.s3.keeper.DELETES_MAX", 1)
    async with engines(faults, 1, capacity=10_000) as (engine,):
        await engine.put(writes_of(blocks_of(rng, 6)))
        # Elected for the round and for its first batch; then another engine holds the lease.
        answers = iter([True, True, False])

        async def hold() -> bool:
            return next(answers)

        monkeypatch.setattr(housekeeper_of(engine)._lease, "hold", hold)
        await housekeeper_of(engine).round()
        assert engine.stats().counters["evicted_objects"] == 1


async def test_close_releases_the_lease(faults: FaultServer, rng: random.Random) -> None:
    """The next engine takes over in its next round, without waiting for the lease to expire."""
    async with engines(faults, 3, capacity=1 << 30) as (first, second, third):
        for engine in (first, second):
            await housekeeper_of(engine).round()
        assert [is_elected(engine) for engine in (first, second)] == [True, False]
        await second.close()
        await housekeeper_of(third).round()
        # An engine that did not hold the lease released nothing.
        assert [is_elected(engine) for engine in (first, third)] == [True, False]
        await first.close()
        await housekeeper_of(third).round()
        assert [is_elected(engine) for engine in (first, third)] == [False, True]
    # All of them have closed; a later engine needs no round to observe the lease.
    async with engines(faults, 1, capacity=1 << 30, prefix=third.config.prefix) as (late,):
        await housekeeper_of(late).round()
        assert is_elected(late)


async def test_a_close_that_is_cancelled_closes_the_client(faults: FaultServer) -> None:
    """Cancelled at its first wait, for the housekeeper."""
    async with engines(faults, 1, capacity=1 << 30) as (engine,):
        client = engine._ready()
        close = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        close.cancel()
        await asyncio.wait({close})
        with pytest.raises(BackendClosedError):
            await client.head("name", timeout_s=20)


@pytest.mark.parametrize("fault", [Fault.BLACK_HOLE, Fault.INTERNAL, Fault.FORBIDDEN])
async def test_lease_holder_closes_in_time_with_a_failing_service(faults: FaultServer, fault: Fault) -> None:
    """The holder of the lease closes in time and without a failure; no task continues afterwards."""
    async with engines(faults, 1, capacity=1 << 30) as (engine,):
        await housekeeper_of(engine).round()
        faults.plan(fault)
        async with asyncio.timeout(engine.config.timeout):
            await engine.close()
        faults.plan(None)
        assert not is_elected(engine)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_sweep_reaches_every_page(faults: FaultServer) -> None:
    """Expired housekeeping objects are deleted, even behind a thousand names still in use."""
    async with engines(faults, 1, capacity=1 << 30) as (engine,):
        young = [f"_keeper/uses/{number:016x}" for number in range(1000)]
        old = [f"_keeper/uses/f{number:015x}" for number in range(30)]
        old += [f"_keeper/removed/{number:028x}" for number in range(3)]
        await put_empty(engine, [*young, *old])
        for name in old:
            faults.age(engine.config.prefix + name, 31 * _DAY_S)
        foreign = "_keeper/else/old"
        await put_empty(engine, [foreign])
        faults.age(engine.config.prefix + foreign, 1000 * _DAY_S)
        await housekeeper_of(engine).round()
        assert await names_under(engine, "_keeper/") == [foreign, "_keeper/lease", *young]


def stamped(names: ObjectNames, age_s: float, kind: str) -> str:
    """Return the name of a pack (p) or note (r) of an age."""
    return names.packs_since(time.time() - age_s) + os.urandom(8).hex() + kind


async def test_notes_of_packs_go_when_no_pack_is_as_old(faults: FaultServer, rng: random.Random) -> None:
    """A note of removed blocks is kept as long as its pack may exist, and for at least a day."""
    async with engines(faults, 1, **PACKED, capacity=1 << 30) as (engine,):
        prefix = engine.config.prefix
        names, made = ObjectNames(prefix, NAMESPACE), PackFormat(NAMESPACE)
        head, _ = made.pack_head([(b"kept", 3), (b"gone", 3)])
        pack, note = (stamped(names, age_s, kind) for age_s, kind in ((3 * _DAY_S, "p"), (2 * _DAY_S, "r")))
        # No pack of the first note is left; the second note is too young.
        older, young = stamped(names, 4 * _DAY_S, "r"), stamped(names, 3 * _DAY_S, "r").replace(names.packs, "")
        body = made.gone_note([(pack.removeprefix(names.packs), b"gone")])
        client = await opened_client(faults)
        await client.put(pack, [head + b"123456"], timeout_s=30)
        other = f"{prefix}_packs/{'0' * 64}/"
        for name in (older, note, other + older.removeprefix(names.packs), other + young):
            await client.put(name, [body], timeout_s=30)
        foreign = [f"_packs/{'0' * 64}/{'0' * 27}r", "_packs/notes/readme", f"_packs/{'0' * 64}/x"]
        await put_empty(engine, foreign)
        faults.age(f"{prefix}_packs/", 2 * _DAY_S)
        faults.age(other + young, -2 * _DAY_S)
        await engine.put(writes_of(blocks_of(rng, 2)))
        fresh = [name for name in await names_under(engine, "_packs/") if name[-1] == "p" and prefix + name != pack]
        await housekeeper_of(engine).round()
        left = [prefix + name for name in (*fresh, *foreign)] + [pack, note, other + young]
        assert await names_under(engine, "_packs/") == sorted(name.removeprefix(prefix) for name in left)
        assert await engine.exists([b"kept", b"gone"]) == [True, False]
        await client.delete_all([pack], timeout_s=30)
        await housekeeper_of(engine).round()
        left = [name for name in left if name not in (pack, note)]
        assert await names_under(engine, "_packs/") == sorted(name.removeprefix(prefix) for name in left)
        assert engine.stats().counters["keeper_failures"] == 0


async def test_failed_usage_report_is_repeated(faults: FaultServer, rng: random.Random) -> None:
    """If the service fails to store an engine's uses, the next round writes them, even without new uses."""
    async with engines(faults, 1, capacity=1 << 30, tries=1) as (engine,):
        blocks = blocks_of(rng, 3)
        await engine.put(writes_of(blocks))
        assert set(await engine.get_into(reads_of(blocks))) == {Outcome.OK}
        faults.plan(Fault.INTERNAL, methods=("PUT",))
        with pytest.raises(Exception, match="500"):
            await housekeeper_of(engine).round()
        faults.plan(None)
        await housekeeper_of(engine).round()
        (name,) = await names_under(engine, "_keeper/uses/")
        body = memoryview(bytearray(4096))
        found = await (await opened_client(faults)).get_into(engine.config.prefix + name, [body], timeout_s=30)
        told = read_uses(bytes(body[: found.size_bytes]), time.time())
        assert set(told) == {name_digest(engine._names.block(key)) for key in blocks}


def lookup(tier: AsyncTier, keys: Iterable[bytes]) -> list[LookupResult]:
    """Look up each key once, as a scheduler does in one step."""
    answers = [tier.lookup(key, RequestContext("r")) for key in keys]
    tier.flush()
    tier.get_finished()
    return answers


@pytest.mark.parametrize("packed", [False, True])
async def test_expired_blocks_are_misses_for_all_engines(faults: FaultServer, rng: random.Random, packed: bool) -> None:
    """Blocks unused for the time to live are removed; engines with a cached hit miss them after ``positive_ttl``."""
    more = {"ttl": 3600, **(PACKED if packed else {})}
    async with engines(faults, 2, **more) as (elected, user):
        heard = removals_reported_by(elected)
        old, used, young = (blocks_of(rng, 3) for _ in range(3))
        for blocks in (old, used):
            await elected.put(writes_of(blocks))
        faults.age(elected.config.prefix, 3000.0)
        assert await user.exists([*old, *used]) == [True] * 6
        options = {**options_for(faults, **SLOW, **more), "prefix": elected.config.prefix, "positive_ttl": 2}
        with Region.create(3, 4096) as region:
            other = open_tier({"backend": "s3", **options}, primary=region.view(), slot_bytes=4096, namespace=NAMESPACE)
            with contextlib.closing(other):
                hits = [LookupResult.HIT] * 6
                await eventually_async(lambda: lookup(other, [*old, *used]) == hits)
                await housekeeper_of(elected).round()
                assert heard == []
                # A use reported by another engine counts as a write.
                assert set(await user.get_into(reads_of(used))) == {Outcome.OK}
                await housekeeper_of(user).round()
                faults.age(elected.config.prefix, 700.0)
                await elected.put(writes_of(young))
                await housekeeper_of(elected).round()
                assert heard == [(frozenset(old), RemovalCause.EXPIRED)]
                if packed:
                    # It knows the blocks' places and sends no lookup; after a failed load it marks them as gone.
                    other.submit_load(TransferJob(1, list(old), range(3)))
                    other.flush()
                    results: list[JobResult] = []
                    await eventually_async(lambda: results.extend(other.get_finished()) or results)
                    assert list(results[0].successful_keys) == []
                await eventually_async(lambda: lookup(other, old) == [LookupResult.MISS] * 3)
                await eventually_async(lambda: lookup(other, [*used, *young]) == hits)
        assert await elected.exists([*old, *used, *young]) == [False] * 3 + [True] * 6
        assert set(await elected.get_into(reads_of(old))) == {Outcome.MISS}
        counters = elected.stats().counters
        assert counters["expired_objects"] == (1 if packed else 3)
        assert counters["evicted_objects"] == 0
        # The engine that used the others is notified in its next round.
        removed = removals_reported_by(user)
        await housekeeper_of(user).round()
        assert removed == [(frozenset(old), RemovalCause.EXPIRED)]
