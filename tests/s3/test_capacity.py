"""A byte budget for a prefix: one engine at a time evicts, the coldest objects go, and all engines learn of it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable

import pytest

from kvstore.backends.s3.client import ObjectInfo
from kvstore.backends.s3.keeper import EvictionPlan, Lease, OldNotes, Victim
from kvstore.backends.s3.names import KeeperNames, ObjectNames, read_name
from kvstore.backends.s3.notes import Uses, all_uses, name_digest, read_uses, remove
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome, RemovalCause
from tests.s3.clients import EACH_CLIENT, NAMESPACE, config_for, fresh_prefix, opened, opened_client
from tests.s3.fault_server import Fault, FaultServer
from tests.s3.keepers import SLOW, housekeeper_of, is_elected, removals_reported_by
from tests.s3.packed import blocks_of, reads_of, writes_of
from tests.s3.servers import S3Server


def infos(count: int, size: int = 100) -> list[ObjectInfo]:
    """Return objects, the first written first."""
    keys = ObjectNames("kv/", NAMESPACE)
    return [ObjectInfo(keys.block(b"%04x" % number), size, "", 1000.0 + number) for number in range(count)]


def show(plan: EvictionPlan, objects: Iterable[ObjectInfo], prefix: str = "kv/") -> None:
    """Show objects to a plan, as a listing of a prefix would."""
    for info in objects:
        plan.see(info, read_name(info.key.removeprefix(prefix)))


def test_nothing_leaves_below_the_capacity() -> None:
    """At its capacity a prefix keeps all objects; above it, the oldest are evicted until a tenth is free."""
    for count, gone in ((100, 0), (101, 11)):
        plan = EvictionPlan(100 * 100, {})
        show(plan, random.Random(1).sample(infos(count), count))
        assert plan.used_bytes == count * 100
        assert plan.victims() == [Victim(info.key, 100, RemovalCause.EVICTED) for info in infos(gone)]


@pytest.mark.parametrize(("before_s", "goes"), [(600.0, False), (7200.0, True)])
def test_a_note_outlives_the_skew_of_clocks(before_s: float, goes: bool) -> None:
    """A note written shortly before the first pack may refer to that pack, as clocks of engines differ: it stays."""
    names, now = ObjectNames("kv/", NAMESPACE), 1.7e9
    note = names.packs_since(now - before_s) + "0" * 16 + "r"
    pack = names.packs_since(now) + "0" * 16 + "p"
    notes = OldNotes(written_before=now)
    for name in (note, pack):
        notes.see(ObjectInfo(name, 10, modified_at=now - before_s), read_name(name.removeprefix("kv/")))
    assert notes.names() == ([note] if goes else [])


def old_notes(now: float, *objects: tuple[float, str, float], **limits: int) -> list[str]:
    """Return the notes to delete, given objects (seconds before ``now`` in the name, last letter, time of writing)."""
    names, notes = ObjectNames("kv/", NAMESPACE), OldNotes(written_before=now, **limits)
    for before_s, letter, modified_at in objects:
        name = names.packs_since(now - before_s) + "0" * 16 + letter
        notes.see(ObjectInfo(name, 10, modified_at=modified_at), read_name(name.removeprefix("kv/")))
    return notes.names()


def test_notes_of_unknown_or_young_age_stay() -> None:
    """Only a note that is known to be old is deleted."""
    now = 1.7e9
    assert len(old_notes(now, (9e4, "r", now - 9e4))) == 1
    assert old_notes(now, (9e4, "r", 0.0), (8e4, "r", now + 1)) == []


def test_the_first_pack_decides_which_notes_go() -> None:
    """Later packs do not make notes between them and the first pack obsolete."""
    now = 1.7e9
    pack, note = (9e4, "p", now - 9e4), (8e4, "r", now - 8e4)
    assert old_notes(now, pack, note, (10.0, "p", now - 10)) == []


def test_old_notes_are_bounded() -> None:
    """A round remembers a limited number of notes; the next one continues."""
    now = 1.7e9
    assert len(old_notes(now, *[(9e4 - i, "r", now - 9e4) for i in range(5)], notes_max=2)) == 2


def test_recently_used_objects_are_evicted_last() -> None:
    """A use counts as a write: recently used objects are evicted after unused ones."""
    objects = infos(20)
    used = {name_digest(info.key): 5000 for info in objects[:10]}
    plan = EvictionPlan(1000, used)
    show(plan, objects)
    # Of objects used at the same time, the one with the first name.
    first = min(info.key for info in objects[:10])
    assert [victim.name for victim in plan.victims()] == [*(info.key for info in objects[10:]), first]


def test_a_plan_is_bounded_and_still_names_the_coldest() -> None:
    """However many objects there are, the plan remembers a bounded number, and they are the coldest."""
    plan = EvictionPlan(1, {}, victims_max=7)
    show(plan, random.Random(2).sample(infos(500), 500))
    assert [victim.name for victim in plan.victims()] == [info.key for info in infos(7)]


def test_housekeeping_objects_are_never_evicted() -> None:
    """Leases and notes stay; blocks and packs are evicted."""
    packs, block = ObjectNames("kv/", NAMESPACE), ObjectNames("kv/", NAMESPACE).block(b"key")
    pack = packs.new_pack()
    plan = EvictionPlan(1, {})
    names = ["kv/_keeper/lease", packs.new_note(), pack, "kv/_other/x", block]
    show(plan, [ObjectInfo(name, 1, "", 1.0) for name in names])
    assert [victim.name for victim in plan.victims()] == [block, pack]


@pytest.mark.parametrize("prefix", ["", "kv/"])
def test_foreign_objects_are_never_evicted(prefix: str) -> None:
    """Foreign objects in the bucket stay, however old and large, as do the blocks of a tier with a longer prefix."""
    nested = [
        ObjectNames(f"{prefix}abc/", NAMESPACE).block(b"key"),
        ObjectNames(f"{prefix}team/", NAMESPACE).new_pack(),
    ]
    foreign = ["photo.jpg", "models/weights.bin", "000/readme", f"000/{NAMESPACE.hex}/notes.txt", "_packs/x/00p"]
    # Leading digits that do not match the key, and half a byte too many.
    ours = ObjectNames("", NAMESPACE).block(b"key")
    foreign += [f"{int(ours[:3], 16) ^ 1:03x}{ours[3:]}", f"{ours}0"]
    plan = EvictionPlan(1, {}, expire_before=1000.0)
    names = [*nested, *(prefix + name for name in foreign)]
    show(plan, [ObjectInfo(name, 100, "", 1.0) for name in names], prefix)
    assert plan.victims() == []
    assert plan.used_bytes == 900


def test_usage_reports_are_restored_unchanged() -> None:
    """Uses written by one engine are read by another; damage, foreign bytes and future times are ignored."""
    moment = 1000.0
    uses = Uses(lambda: moment)
    uses.note(["a", "b"])
    moment = 2000.0
    uses.note(["a"])
    data = uses.encode()
    assert read_uses(data, 3000.0) == {name_digest("b"): 1000, name_digest("a"): 2000}
    assert read_uses(data, 1500.0)[name_digest("a")] == 1500
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1
        assert read_uses(bytes(damaged), 3000.0) == {}
    assert read_uses(b"", 1.0) == read_uses(data[:-1], 1.0) == {}
    uses.note(str(number) for number in range(70_000))
    assert len(read_uses(uses.encode(), 3000.0)) == 65536


def test_objects_unused_for_the_ttl_expire() -> None:
    """Objects neither written nor used since the given time are removed as expired, however much room there is."""
    objects = infos(10)
    used = {name_digest(objects[2].key): 5000}
    for capacity in (0, 10**9):
        plan = EvictionPlan(capacity, used, expire_before=1005.0)
        show(plan, objects)
        gone = [objects[i] for i in (0, 1, 3, 4)]
        assert plan.victims() == [Victim(info.key, 100, RemovalCause.EXPIRED) for info in gone]
    plan = EvictionPlan(700, used, expire_before=1002.0)
    show(plan, objects)
    causes = [victim.cause.value for victim in plan.victims()]
    assert causes == ["expired"] * 2 + ["evicted"] * 2


def test_objects_of_unknown_age_never_expire_and_are_evicted_last() -> None:
    """Objects of unknown age never expire; for room they are evicted only after all others."""
    keys = ObjectNames("kv/", NAMESPACE)
    unknown = [ObjectInfo(name, 100, "", 0.0) for name in sorted(keys.block(b"unknown%d" % n) for n in range(10))]
    for capacity, gone in ((0, []), (10**9, []), (1500, infos(7)), (500, [*infos(10), *unknown[:6]])):
        plan = EvictionPlan(capacity, {}, expire_before=900.0)
        show(plan, [*unknown, *infos(10)])
        assert plan.victims() == [Victim(info.key, 100, RemovalCause.EVICTED) for info in gone]
    plan = EvictionPlan(0, {}, expire_before=1005.0, victims_max=5)
    show(plan, [*unknown, *infos(10)])
    assert [victim.name for victim in plan.victims()] == [info.key for info in infos(5)]


async def test_latest_usage_reports_are_kept(faults: FaultServer) -> None:
    """Above the limit, the uses last written are kept, whatever their names; those of ended engines are not."""
    more = {**SLOW, "prefix": fresh_prefix()}
    client, config = await opened_client(faults, **more), config_for(faults, **more)
    for number in range(6):
        uses = Uses(lambda number=number: 1000.0 * (number + 1))  # type: ignore[misc]
        uses.note(f"{number}-{each}" for each in range(10))
        name = f"{KeeperNames(config.prefix).uses}{(number * 5) % 7:016x}"
        await client.put(name, [uses.encode()], timeout_s=20)
        faults.age(name, 3600.0 * (10 - number))
    found = await all_uses(client, config.prefix, used_max=20)
    assert found == {name_digest(f"{number}-{each}"): 1000 * (number + 1) for number in (4, 5) for each in range(10)}
    assert len(await all_uses(client, config.prefix)) == 60


async def test_a_report_of_uses_that_goes_after_its_listing_is_skipped(faults: FaultServer) -> None:
    """A report that is removed just before it is read leaves the uses of the other engines."""
    more = {**SLOW, "prefix": fresh_prefix()}
    client, config = await opened_client(faults, **more), config_for(faults, **more)
    uses = Uses(lambda: 1000.0)
    for number in range(3):
        uses.note([str(number)])
        await client.put(f"{KeeperNames(config.prefix).uses}{number:016x}", [uses.encode()])
    faults.plan(Fault.NOT_FOUND, methods=("GET",), contains=f"uses/{2:016x}")
    assert await all_uses(client, config.prefix) == {name_digest("0"): 1000, name_digest("1"): 1000}


@pytest.mark.parametrize("client", EACH_CLIENT)
async def test_one_holds_the_lease(faults: FaultServer, weed_server: S3Server, client: str) -> None:
    """Of concurrent candidates one gets the lease, keeps it while it renews it, and loses it otherwise."""
    # moto's server is excluded: there, two concurrent writes may both meet their condition.
    for server in (faults, weed_server):
        clock = [0.0]
        connection = await opened_client(server, client=client, timeout=20)
        name = fresh_prefix() + "lease"
        leases = [Lease(connection, name, 10.0, 20.0, clock=lambda now=clock: now[0]) for _ in range(5)]
        held = await asyncio.gather(*(lease.hold() for lease in leases))
        assert sum(held) == 1
        holder = leases[held.index(True)]
        others = [lease for lease in leases if lease is not holder]
        for _ in range(4):
            clock[0] += 6.0
            assert await holder.hold()
            assert not any([await lease.hold() for lease in others])
        clock[0] += 10.0
        held = await asyncio.gather(*(lease.hold() for lease in others))
        assert sum(held) == 1
        assert not await holder.hold()
        await connection.close()


async def test_renewal_with_a_lost_answer_keeps_the_lease(faults: FaultServer) -> None:
    """A renewal that succeeded, but whose answer was lost, does not cost the lease."""
    connection = await opened_client(faults, tries=1)
    lease = Lease(connection, "kv/lease", 10.0, 20.0)
    assert await lease.hold()
    faults.plan(Fault.RESET_AFTER, methods=("PUT",))
    with pytest.raises(Exception, match="connection"):
        await lease.hold()
    faults.plan(None)
    assert await lease.hold()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("client", EACH_CLIENT)
async def test_unused_objects_are_evicted_and_all_engines_notified(
    weed_server: S3Server, rng: random.Random, client: str, packed: bool
) -> None:
    """Above its capacity, unused objects are evicted; those that another engine used stay; engines are notified."""
    more = {**SLOW, "prefix": fresh_prefix(), "client": client, "capacity": 50_000}
    if packed:
        more |= {"pack_below": 1 << 20, "pack_blocks": 5, "pack_refresh": 0}
    one, two = await opened(weed_server, **more), await opened(weed_server, **more)
    heard = [removals_reported_by(one), removals_reported_by(two)]
    blocks = blocks_of(rng, 40, 4000)
    keys = list(blocks)
    for start in range(0, 40, 5):
        await one.put(writes_of({key: blocks[key] for key in keys[start : start + 5]}))
    # The first five are the oldest, and the other engine uses them in a later second than any write.
    written_at = time.time()
    await eventually_async(lambda: int(time.time()) > int(written_at))
    assert set(await two.get_into(reads_of(keys[:5]))) == {Outcome.OK}
    await housekeeper_of(two).round()
    await housekeeper_of(one).round()
    assert [is_elected(one), is_elected(two)] == [False, True]
    evicted = frozenset().union(*(gone for gone, _ in heard[1]))
    assert evicted
    assert not evicted & set(keys[:5])
    assert heard[0] == heard[1]
    assert {cause for _, cause in heard[0]} == {RemovalCause.EVICTED}
    left = {key: data for key, data in blocks.items() if key not in evicted}
    used = sum(len(data) for data in left.values())
    # A tenth is freed, plus one object at most: of five blocks if packed, otherwise of one. The other objects
    # there, heads of packs and messages between engines, take less than two thousand bytes.
    largest = 5 * 4000 if packed else 4000
    assert 43_000 - largest < used <= 45_000
    third = await opened(weed_server, **more)
    for engine in (one, two, third):
        assert await engine.exists(keys) == [key in left for key in keys]
    assert two.stats().counters["evicted_bytes"] > 0
    assert two.stats().used_bytes <= 50_000
    # Below its capacity no further object is evicted, and no eviction is reported twice.
    for engine in (two, one):
        await housekeeper_of(engine).round()
    assert heard[0] == heard[1]
    assert len(frozenset().union(*(gone for gone, _ in heard[1]))) == len(evicted)


async def test_housekeeper_survives_failures(faults: FaultServer, rng: random.Random) -> None:
    """Failed rounds are counted, and the next one evicts."""
    more = {"prefix": fresh_prefix(), "capacity": 5000, "tries": 1, "keeper_interval": 1}
    backend = await opened(faults, **more)
    faults.plan(Fault.INTERNAL)
    await eventually_async(lambda: backend.stats().counters["keeper_failures"] >= 1)
    faults.plan(None)
    await backend.put(writes_of(blocks_of(rng, 10, 2000)))
    await eventually_async(lambda: backend.stats().counters["evicted_objects"] >= 5)
    await backend.close()
    # No task continues after the close.
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_error_of_the_program_ends_one_round(faults: FaultServer, caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected error, such as one of a removal listener, is logged, and the rounds continue."""
    backend = await opened(faults, capacity=1 << 30, keeper_interval=1, prefix=fresh_prefix())
    keeper, prefix = housekeeper_of(backend), backend.config.prefix

    def broken(keys: Iterable[bytes], cause: RemovalCause) -> None:
        raise ZeroDivisionError("canary")

    backend.set_removal_listener(broken)
    await remove(
        await opened_client(faults), prefix, [ObjectNames(prefix, NAMESPACE).block(b"key")], RemovalCause.EVICTED
    )
    await eventually_async(lambda: keeper.counters["keeper_rounds"] >= 1)
    assert keeper.counters["keeper_failures"] == 1
    assert "canary" in caplog.text
