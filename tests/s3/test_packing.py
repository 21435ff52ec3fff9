"""Packs: one PUT for many blocks, found by every engine, and removed for every engine."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

import pytest

from kvstore.backends.base import RecordRead
from kvstore.backends.s3 import S3Backend
from kvstore.backends.s3.names import ObjectNames
from kvstore.backends.s3.packing import PackIndex
from kvstore.backends.s3.packs import PackFormat, Unreadable
from kvstore.namespace import Namespace
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome, RemovalCause
from tests.s3.clients import EACH_CLIENT, NAMESPACE, fresh_prefix, opened, opened_client, options_for
from tests.s3.fault_server import Fault, FaultServer
from tests.s3.packed import PACKED, blocks_of, reads_of, writes_of
from tests.s3.servers import S3Server


def index_of(backend: S3Backend) -> PackIndex:
    """Return where a backend that packs blocks knows them to be."""
    packs = backend._packs
    assert packs is not None
    return packs.index


def bytes_of(read: RecordRead) -> bytes:
    """Return the bytes of a read."""
    return b"".join(read.buffers)[: read.filled_bytes]


@pytest.mark.parametrize("client", EACH_CLIENT)
async def test_a_pack_costs_one_put_and_one_get(faults: FaultServer, rng: random.Random, client: str) -> None:
    """64 blocks of a job take two PUTs, and the fields of the namespace one; another engine sends four GETs."""
    more = {**PACKED, "client": client, "prefix": fresh_prefix(), "pack_blocks": 32}
    backend, other = await opened(faults, **more), await opened(faults, **more)
    blocks = blocks_of(rng, 64)
    faults.plan(None)
    before = faults.counts()
    assert set(await backend.put(writes_of(blocks))) == {Outcome.OK}
    after = faults.counts()
    assert after.get("PUT", 0) - before.get("PUT", 0) == 64 // 32 + 1
    assert await other.exists(list(blocks)) == [True] * 64
    before = faults.counts()
    assert "HEAD" not in before
    reads = reads_of(blocks)
    assert set(await other.get_into(reads)) == {Outcome.OK}
    assert [bytes_of(read) for read in reads] == list(blocks.values())
    # A known block needs no list.
    assert faults.counts()["GET"] - before["GET"] == 2
    counters = other.stats().counters
    assert (counters["packs_read"], counters["pack_ranges_read"]) == (2, 2)
    assert backend.stats().counters["packs_written"] == 2


@pytest.mark.parametrize("client", EACH_CLIENT)
async def test_another_part_of_a_pack_is_no_damage(faults: FaultServer, rng: random.Random, client: str) -> None:
    """A service that answers with another range than requested fails the read; no block seems damaged."""
    backend = await opened(faults, **{**PACKED, "prefix": fresh_prefix(), "tries": 1, "client": client})
    blocks = blocks_of(rng, 4)
    assert set(await backend.put(writes_of(blocks))) == {Outcome.OK}
    faults.plan(Fault.OTHER_RANGE, methods=("GET",))
    assert set(await backend.get_into(reads_of(blocks))) == {Outcome.IO_ERROR}
    assert backend.stats().counters["failed_protocol"] == 1
    faults.plan(None)
    assert set(await backend.get_into(reads_of(blocks))) == {Outcome.OK}


async def test_a_record_longer_than_its_buffers_spoils_no_neighbour(faults: FaultServer, rng: random.Random) -> None:
    """Adjacent records of one read are found, although one between them has no room."""
    backend = await opened(faults, **{**PACKED, "prefix": fresh_prefix()})
    blocks = blocks_of(rng, 3)
    assert set(await backend.put(writes_of(blocks))) == {Outcome.OK}
    reads = reads_of(blocks)
    reads[1].buffers = [memoryview(bytearray(16))]
    assert list(await backend.get_into(reads)) == [Outcome.OK, Outcome.CORRUPT, Outcome.OK]
    assert [bytes_of(read) for read in reads[::2]] == list(blocks.values())[::2]


@pytest.mark.parametrize("client", EACH_CLIENT)
async def test_an_error_in_the_body_of_a_success_is_no_store(
    faults: FaultServer, rng: random.Random, client: str
) -> None:
    """A block is not reported as stored if the service answers its PUT with 200 and an error document."""
    more = {**PACKED, "prefix": fresh_prefix(), "tries": 1, "client": client}
    backend, blocks = await opened(faults, **more), blocks_of(rng, 2)
    faults.plan(Fault.XML_ERROR, methods=("PUT",))
    assert set(await backend.put(writes_of(blocks))) == {Outcome.IO_ERROR}
    faults.plan(None)
    assert await backend.exists(list(blocks)) == [False] * 2


@pytest.mark.parametrize("fault", [Fault.KEY_DISABLED, Fault.BAD_RANGE])
async def test_a_pack_that_is_refused_costs_no_other(faults: FaultServer, rng: random.Random, fault: Fault) -> None:
    """An engine works without packs that the service refuses, and does not request them again and again."""
    more = {**PACKED, "prefix": fresh_prefix(), "tries": 1}
    writer = await opened(faults, **more)
    parts = [blocks_of(rng, 4), blocks_of(rng, 4)]
    for part in parts:
        assert set(await writer.put(writes_of(part))) == {Outcome.OK}
    place = index_of(writer).place(next(iter(parts[0])))
    faults.plan(fault, methods=("GET",), contains=place.pack)
    reader = await opened(faults, **more)
    for _ in range(3):
        assert await reader.exists([*parts[0], *parts[1]]) == [False] * 4 + [True] * 4
    assert faults.counts()[f"fault_{fault}"] == 1
    assert reader.stats().counters["packs_unreadable"] == 1


async def test_two_engines_and_a_restart(weed_server: S3Server, rng: random.Random) -> None:
    """Blocks of one engine are read by another, in any selection, and by one that starts later."""
    more = {**PACKED, "prefix": fresh_prefix()}
    engines = [await opened(weed_server, **more) for _ in range(2)]
    parts = [blocks_of(rng, 40), blocks_of(rng, 40)]
    both = {**parts[0], **parts[1]}
    for engine, part in zip(engines, parts, strict=True):
        assert set(await engine.put(writes_of(part))) == {Outcome.OK}
    for engine in engines:
        assert set(await engine.put(writes_of(both))) == {Outcome.EXISTS}
    late = await opened(weed_server, **more)
    for engine in (*engines, late):
        wanted = rng.sample(list(both), 50)
        reads = reads_of([*wanted, b"nobody has this"])
        assert await engine.get_into(reads) == [Outcome.OK] * 50 + [Outcome.MISS]
        assert [bytes_of(read) for read in reads[:-1]] == [both[key] for key in wanted]
        await engine.close()


async def test_removals_reach_all_engines(weed_server: S3Server, rng: random.Random) -> None:
    """A removed block is gone for current and later engines; a pack is removed with its last block."""
    more = {**PACKED, "prefix": fresh_prefix()}
    one, two = await opened(weed_server, **more), await opened(weed_server, **more)
    blocks = blocks_of(rng, 8)
    keys = list(blocks)
    await one.put(writes_of(blocks))
    assert await two.exists(keys) == [True] * 8
    assert await two.delete([*keys[:3], b"nobody has this"]) == [True] * 3 + [False]
    three = await opened(weed_server, **more)
    # An engine notices when it looks up an unknown block.
    assert await one.exists([*keys, b"nobody has this"]) == [False] * 3 + [True] * 5 + [False]
    assert await three.exists(keys) == [False] * 3 + [True] * 5
    again = {key: blocks[key] for key in keys[:1]}
    assert await one.put(writes_of(again)) == [Outcome.OK]
    assert (await three.exists(keys))[0]
    await three.delete(keys)
    names = await asyncio.to_thread(weed_server.names, more["prefix"])
    assert [name for name in names if name.endswith("p")] == []
    four = await opened(weed_server, **more)
    assert await four.exists(keys) == [False] * 8


async def test_a_put_beside_a_removal_stays(faults: FaultServer, rng: random.Random) -> None:
    """A block stored during its removal is stored again, and is there for every engine afterwards."""
    more = {**PACKED, "prefix": fresh_prefix()}
    backend = await opened(faults, **more)
    blocks = blocks_of(rng, 4)
    await backend.put(writes_of(blocks))
    faults.plan(Fault.LATE, methods=("PUT",), count=1, delay_s=0.3)
    removal = asyncio.create_task(backend.delete(list(blocks)))
    await eventually_async(lambda: faults.counts().get("fault_late"), 20)
    assert await backend.put(writes_of(blocks)) == [Outcome.OK] * 4
    assert await removal == [True] * 4
    other = await opened(faults, **more)
    for engine in (backend, other):
        assert await engine.exists(list(blocks)) == [True] * 4
        reads = reads_of(blocks)
        assert set(await engine.get_into(reads)) == {Outcome.OK}
        assert [bytes_of(read) for read in reads] == list(blocks.values())
        await engine.close()


async def test_a_removal_during_a_put_leaves_no_block_reported_as_present(
    faults: FaultServer, rng: random.Random
) -> None:
    """A block found present by a put, and removed while that put writes other blocks, is written again."""
    backend = await opened(faults, **PACKED)
    there, new = blocks_of(rng, 2), blocks_of(rng, 2)
    await backend.put(writes_of(there))
    faults.plan(Fault.LATE, methods=("PUT",), count=1, delay_s=2.0)
    put = asyncio.create_task(backend.put(writes_of(there | new)))
    await eventually_async(lambda: faults.counts().get("fault_late"), 20)
    assert await backend.delete(list(there)) == [True] * 2
    assert await put == [Outcome.OK] * 4
    assert await backend.exists([*there, *new]) == [True] * 4


async def test_a_put_that_is_cancelled_leaves_the_one_it_waits_for_alone(
    faults: FaultServer, rng: random.Random
) -> None:
    """Of three jobs with the same blocks one writes; if a waiting one is cancelled, the other two are unaffected."""
    backend = await opened(faults, **PACKED | {"prefix": fresh_prefix(), "pack_refresh": 60})
    blocks = blocks_of(rng, 4)
    faults.plan(Fault.LATE, methods=("PUT",), count=1, delay_s=3.0)
    writer = asyncio.create_task(backend.put(writes_of(blocks)))
    await eventually_async(lambda: faults.counts().get("fault_late"), 20)
    patient, hasty = (asyncio.create_task(backend.put(writes_of(blocks))) for _ in range(2))
    for _ in range(10):
        await asyncio.sleep(0)
    hasty.cancel()
    await asyncio.wait([hasty])
    assert hasty.cancelled()
    assert await writer == [Outcome.OK] * 4
    assert await patient == [Outcome.EXISTS] * 4


async def test_own_packs_are_not_listed_over_and_over(
    faults: FaultServer, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine lists only names since the last pack, even if it wrote all packs itself: one page, not all."""
    more = {**PACKED, "prefix": fresh_prefix(), "pack_blocks": 1, "store_timeout": 60}
    async with contextlib.AsyncExitStack() as stack:
        writer, reader = await opened(faults, **more), await opened(faults, **more)
        for engine in (writer, reader):
            stack.push_async_callback(engine.close)
        began = time.time()
        # Names use this clock: a thousand packs, an hour later one more, and then a lookup.
        for at_s, count in ((began - 7200, 1050), (began - 3600, 1)):
            monkeypatch.setattr("kvstore.backends.s3.names.time", _Clock(at_s))
            assert set(await writer.put(writes_of(blocks_of(rng, count, 64)))) == {Outcome.OK}
        for engine in (writer, reader):
            assert await engine.exists([b"absent"]) == [False]
            before = engine.stats().counters["requests_list"]
            assert await engine.exists([b"absent"]) == [False]
            assert engine.stats().counters["requests_list"] - before == 1


class _Clock:
    """A stopped clock."""

    def __init__(self, at_s: float) -> None:
        self._at_s = at_s

    def time(self) -> float:
        return self._at_s


async def test_a_clock_that_is_ahead_hides_nothing(faults: FaultServer, rng: random.Random) -> None:
    """A pack of an engine whose clock is ten minutes ahead is found, as are later packs of others."""
    more = {**PACKED, "prefix": fresh_prefix()}
    writer, reader = await opened(faults, **more), await opened(faults, **more)
    names = ObjectNames(more["prefix"], NAMESPACE)
    head, _ = PackFormat(NAMESPACE).pack_head([(b"early", 3)])
    client = await opened_client(faults)
    await client.put(f"{names.packs_since(time.time() + 600)}{'00' * 8}p", [head + b"abc"], timeout_s=10)
    assert await reader.exists([b"early"]) == [True]
    blocks = blocks_of(rng, 3)
    await writer.put(writes_of(blocks))
    assert await reader.exists([b"early", *blocks]) == [True] * 4


async def test_deleted_pack_is_a_miss(weed_server: S3Server, rng: random.Random) -> None:
    """Blocks of a deleted pack are misses, are reported as lost, and can be stored again."""
    more = {**PACKED, "prefix": fresh_prefix()}
    backend = await opened(weed_server, **more)
    lost: list[tuple[list[bytes], RemovalCause]] = []
    backend.set_removal_listener(lambda keys, cause: lost.append((list(keys), cause)))
    blocks = blocks_of(rng, 5)
    await backend.put(writes_of(blocks))
    admin = weed_server.admin()
    for name in await asyncio.to_thread(weed_server.names, more["prefix"]):
        await asyncio.to_thread(admin.delete_object, Bucket=weed_server.bucket, Key=name)
    admin.close()
    assert set(await backend.get_into(reads_of(blocks))) == {Outcome.MISS}
    assert [(sorted(keys), cause) for keys, cause in lost] == [(sorted(blocks), RemovalCause.LOST)]
    assert await backend.exists(list(blocks)) == [False] * 5
    assert set(await backend.put(writes_of(blocks))) == {Outcome.OK}


async def test_invalid_packs_are_skipped(faults: FaultServer, rng: random.Random) -> None:
    """Foreign, damaged and truncated objects among the packs affect only their own blocks, and are read once."""
    more = {**PACKED, "prefix": fresh_prefix()}
    writer, reader = await opened(faults, **more), await opened(faults, **more)
    client = await opened_client(faults)
    names, made = ObjectNames(more["prefix"], NAMESPACE), PackFormat(NAMESPACE)
    good = blocks_of(rng, 3)
    await writer.put(writes_of(good))
    head, _ = made.pack_head([(b"a", 100)])
    bad = [b"", b"x", rng.randbytes(5000), head[:-1], head + bytes(99), head[:60] + bytes(len(head) - 60) + bytes(100)]
    bad += [PackFormat(Namespace({"another": 1})).pack_head([(b"a", 1)])[0] + b"1", made.gone_note([("p", b"k")])]
    for body in bad:
        await client.put(names.new_pack(), [body], timeout_s=10)
        await client.put(names.new_note(), [rng.randbytes(40)], timeout_s=10)
    await client.put(names.packs + "zz-something-else", [b"x"], timeout_s=10)
    assert await reader.exists([*good, b"a"]) == [True] * 3 + [False]
    read = reader.stats().counters["packs_read"]
    assert await reader.exists([b"b"]) == [False]
    assert reader.stats().counters["packs_read"] == read


async def test_a_pack_that_was_missing_for_a_moment_is_found_again(faults: FaultServer, rng: random.Random) -> None:
    """A false 404 for a listed pack hides its blocks from an engine only until the next refresh."""
    more = {**PACKED, "prefix": fresh_prefix()}
    reader = await opened(faults, **more)
    name, (key,) = ObjectNames(more["prefix"], NAMESPACE).new_pack(), blocks_of(rng, 1)
    head, _ = PackFormat(NAMESPACE).pack_head([(key, 100)])
    await (await opened_client(faults)).put(name, [head, bytes(100)], timeout_s=10)
    faults.plan(Fault.NOT_FOUND, methods=("GET",), contains=name.rpartition("/")[2])
    assert await reader.exists([key]) == [False]
    faults.plan(None)
    assert await reader.exists([key]) == [True]
    faults.plan(Fault.NOT_FOUND, methods=("GET",), contains=name.rpartition("/")[2])
    assert await reader.get_into(reads_of([key])) == [Outcome.MISS]
    faults.plan(None)
    assert await reader.get_into(reads_of([key])) == [Outcome.OK]


async def test_failures_are_no_absence(faults: FaultServer, rng: random.Random) -> None:
    """While packs cannot be listed, lookups fail; a failed GET fails only its blocks; both recover."""
    more = {**PACKED, "prefix": fresh_prefix(), "tries": 1, "timeout": 5}
    writer, reader = await opened(faults, **more), await opened(faults, **more)
    blocks = blocks_of(rng, 4)
    await writer.put(writes_of(blocks))
    faults.plan(Fault.INTERNAL)
    with pytest.raises(Exception, match="500"):
        await reader.exists(list(blocks))
    faults.plan(None)
    assert await reader.exists(list(blocks)) == [True] * 4
    for fault in (Fault.INTERNAL, Fault.RESET_AFTER, Fault.CUT, Fault.NOT_FOUND):
        faults.plan(fault)
        assert not set(await reader.get_into(reads_of(blocks))) & {Outcome.OK}, fault
    faults.plan(None)
    writes = writes_of(blocks_of(rng, 2))
    faults.plan(Fault.INTERNAL, methods=("PUT",))
    assert set(await writer.put(writes)) == {Outcome.IO_ERROR}
    faults.plan(None)
    assert await writer.put(writes) == [Outcome.OK, Outcome.OK]


def test_format_of_pack_heads_and_notes_is_fixed() -> None:
    """The bytes of a head and a note are fixed: other versions and engines read them."""
    made = PackFormat(Namespace({"golden": True}))
    head, entries = made.pack_head([(b"\x01" * 3, 7), (b"\x02" * 4, 9)])
    assert head.hex() == GOLDEN_HEAD
    assert [(entry.key, entry.offset, entry.size_bytes) for entry in entries] == [
        (b"\x01" * 3, len(head), 7),
        (b"\x02" * 4, len(head) + 7, 9),
    ]
    assert made.read_pack(head + bytes(16)) == entries
    assert made.read_pack(head[:-1]) == len(head)
    note = made.gone_note([("00aap", b"\x03" * 5)])
    assert note.hex() == GOLDEN_NOTE
    assert made.read_gone(note) == [("00aap", b"\x03" * 5)]


GOLDEN_HEAD = (
    "896b767061636b0a0100000002000000510000000000000069e1f5c2ba1fac3ecbe3e519157b2f7f"
    "23094ad44b4abf00f72ea2a3f57b99b10700000003010101090000000402020202ae41c4552844ef"
    "a0"
)
GOLDEN_NOTE = (
    "896b76676f6e650a01000000010000004f0000000000000069e1f5c2ba1fac3ecbe3e519157b2f7f"
    "23094ad44b4abf00f72ea2a3f57b99b1050000000a303061617003030303030bc187e4ac48bdb9"
)


def test_every_damaged_byte_of_a_head_is_seen() -> None:
    """A head with any wrong bit is refused, or claims more bytes than there are."""
    made = PackFormat(NAMESPACE)
    head, _ = made.pack_head([(b"k" * 32, 1000), (b"l" * 64, 5)])
    for place in range(len(head)):
        for bit in range(8):
            damaged = bytearray(head)
            damaged[place] ^= 1 << bit
            try:
                found = made.read_pack(damaged)
            except Unreadable:
                continue
            # Reserved fields are covered by the checksum; only the length may be wrong, and too large.
            assert isinstance(found, int), (place, bit)
            assert found > len(head), (place, bit)


def test_names_are_in_the_order_of_time() -> None:
    """Names sort by their creation time and contain it; a name of another form gives no time."""
    names = ObjectNames("kv/", NAMESPACE)
    made = [names.new_pack() for _ in range(3)]
    first = names.read(made[0])
    moment = first.made_at
    assert moment == pytest.approx(time.time(), abs=60)
    assert names.packs_since(moment - 1) < made[0]
    assert names.packs_since(moment + 60) > made[-1]
    assert names.read(names.packs + "x" * 29) is None
    assert names.read("kv/_packs/elsewhere/" + made[0][-29:]) is None
    assert names.read(ObjectNames("kv/", Namespace({"other": 1})).new_pack()) is None
    assert names.read(ObjectNames("", NAMESPACE).new_pack()) is None


def test_the_index_is_bounded_and_forgets_the_oldest() -> None:
    """Above the limit, whole packs are forgotten, the oldest first; counts stay right."""
    made = PackFormat(NAMESPACE)
    index = PackIndex(blocks_max=10)
    for number in range(8):
        keys = [bytes([number, i]) for i in range(3)]
        index.add(f"{number}p", made.pack_head([(key, 1) for key in keys])[1])
    assert repr(index) == "PackIndex(9 blocks in 3 packs)"
    assert len(index) == 9
    assert bytes([5, 0]) in index
    assert bytes([4, 2]) not in index
    assert index.forget("6p") == [bytes([6, i]) for i in range(3)]
    assert index.remove([("7p", bytes([7, i])) for i in range(3)]) == ["7p"]
    assert len(index) == 3


@pytest.mark.parametrize("order", ["pack first", "note first"])
def test_a_note_counts_whenever_it_comes(order: str) -> None:
    """A removal note also applies to a pack seen after the note, and not to a later pack of the same block."""
    entries = PackFormat(NAMESPACE).pack_head([(b"a", 1), (b"b", 1)])[1]
    index = PackIndex()
    steps = [lambda: index.add("1p", entries), lambda: index.remove([("1p", b"a")])]
    for step in steps if order == "pack first" else steps[::-1]:
        step()
    assert b"a" not in index
    assert b"b" in index
    index.add("2p", entries)
    assert b"a" in index
    assert index.packs_of(b"b") == ["2p", "1p"]


def test_a_block_in_two_packs_is_there_until_both_are_gone() -> None:
    """Of a block's packs the last one counts, then the one before it; deleted packs leave no trace."""
    packs = {name: PackFormat(NAMESPACE).pack_head([(b"a", size)])[1] for name, size in (("1p", 1), ("2p", 2))}
    for order in (("1p", "2p"), ("2p", "1p")):
        for leave in ("forget", "remove"):
            index = PackIndex()
            for name in order:
                index.add(name, packs[name])
            assert index.packs_of(b"a") == ["2p", "1p"]
            if leave == "forget":
                assert index.forget("2p") == []
            else:
                assert index.remove([("2p", b"a")]) == ["2p"]
            place = index.place(b"a")
            assert (place.pack, place.size_bytes, index.packs_of(b"a")) == ("1p", 1, ["1p"])
            assert index.forget("1p") == [b"a"]
            assert (b"a" in index, index.packs_of(b"a"), len(index)) == (False, [], 0)
            # The losing pack leaves no trace in the winning one.
            index = PackIndex()
            for name in order:
                index.add(name, packs[name])
            assert index.forget("1p") == []
            assert index.packs_of(b"a") == ["2p"]
            assert index.remove([("2p", b"a")]) == ["2p"]
            assert b"a" not in index


def test_emptied_packs_are_remembered_up_to_a_bound() -> None:
    """A pack whose blocks were all removed is not read again when listed again; the number of such packs is bounded."""
    index = PackIndex(emptied_max=10)
    for number in range(100):
        index.add(f"{number:03}p", PackFormat(NAMESPACE).pack_head([(b"%03d" % number, 1)])[1])
        assert index.remove([(f"{number:03}p", b"%03d" % number)]) == [f"{number:03}p"]
        assert index.knows(f"{number:03}p")
    assert sum(index.knows(f"{number:03}p") for number in range(100)) == 10
    assert repr(index) == "PackIndex(0 blocks in 0 packs)"
    assert len(index) == 0


async def test_a_block_in_two_packs_outlives_one(faults: FaultServer, rng: random.Random) -> None:
    """Two engines that wrote a block concurrently left it in two packs: if one pack goes, the other serves."""
    more = {**PACKED, "prefix": fresh_prefix()}
    async with contextlib.AsyncExitStack() as stack:
        writers = []
        for _ in range(2):
            # Neither lists new packs before it writes.
            writers.append(await opened(faults, **{**more, "pack_refresh": 3600}))
            stack.push_async_callback(writers[-1].close)
            await writers[-1].exists([b"nothing"])
        blocks = blocks_of(rng, 3)
        for writer in writers:
            assert set(await writer.put(writes_of(blocks))) == {Outcome.OK}
        reader = await opened(faults, **more)
        stack.push_async_callback(reader.close)
        assert await reader.exists(list(blocks)) == [True] * 3
        place = index_of(reader).place(next(iter(blocks)))
        await (await opened_client(faults)).delete_all([place.pack], timeout_s=30)
        assert set(await reader.get_into(reads_of(blocks))) == {Outcome.MISS}
        assert await reader.exists(list(blocks)) == [True] * 3
        reads = reads_of(blocks)
        assert set(await reader.get_into(reads)) == {Outcome.OK}
        assert [bytes_of(read) for read in reads] == list(blocks.values())


def test_options_are_checked(faults: FaultServer) -> None:
    """Numbers out of range are refused when the configuration is made."""
    for wrong in ({"pack_blocks": 0}, {"pack_blocks": 257}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            S3Backend.config_type(**options_for(faults, **wrong))


async def test_a_damaged_copy_leaves_the_other_one(faults: FaultServer, rng: random.Random) -> None:
    """If the copy in use of a block in two packs is damaged, that copy is removed and the other is read next."""
    more = {**PACKED, "prefix": fresh_prefix()}
    first = await opened(faults, **more)
    blocks = blocks_of(rng, 3)
    assert await first.put(writes_of(blocks)) == [Outcome.OK] * 3
    bad = next(iter(blocks))
    good_pack = index_of(first).place(bad).pack  # type: ignore[union-attr]
    # Later in name order, so that it is the one in use.
    names, size = ObjectNames(more["prefix"], NAMESPACE), len(blocks[bad])
    head, _ = PackFormat(NAMESPACE).pack_head([(bad, size)])
    bad_pack = f"{names.packs}{'0fffffffffff'}{rng.randbytes(8).hex()}p"
    await (await opened_client(faults)).put(bad_pack, [head, bytes(size)], timeout_s=30)
    second = await opened(faults, **more)
    (read,) = reads_of([bad])
    assert await second.get_into([read]) == [Outcome.OK]
    assert bytes_of(read) == bytes(size), "the damaged copy is not the one that counts"
    await second.quarantine([bad])
    assert await second.get_into([read]) == [Outcome.OK]
    assert bytes_of(read) == blocks[bad]
    third = await opened(faults, **more)
    assert await third.exists(list(blocks)) == [True] * 3
    assert index_of(third).packs_of(bad) == [good_pack]
    # A delete removes both copies.
    await third.delete([bad])
    assert await third.exists(list(blocks)) == [False, True, True]


async def test_a_pack_cut_short_is_no_success(faults: FaultServer, rng: random.Random) -> None:
    """A read of a pack that returns fewer bytes than its records have is corrupt, because a slot has old bytes."""
    engine = await opened(faults, **PACKED, prefix=fresh_prefix())
    blocks = blocks_of(rng, 3)
    assert set(await engine.put(writes_of(blocks))) == {Outcome.OK}
    faults.plan("short_object", methods=["GET"])
    assert set(await engine.get_into(reads_of(blocks))) == {Outcome.CORRUPT}
