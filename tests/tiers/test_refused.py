"""Records that are unreadable here: hidden, retried rarely, and replaced if no other engine needs them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvstore.backends.base import Backend, RecordRead, RecordWrite
from kvstore.backends.memory import MemoryBackend
from kvstore.codec.base import Codec
from kvstore.namespace import Namespace
from kvstore.testing import eventually
from kvstore.testing.tier_rig import TierRig
from kvstore.tiers.presence import RefusedRecords
from kvstore.types import BlockKey, LookupResult, Outcome, RequestContext
from tests.seal.keyrings import document, secret, write

SLOT = 4096
KEYS = [bytes([number]) * 32 for number in range(6)]
_shelves = (f"refused-{number}" for number in itertools.count())


class Counting(MemoryBackend):
    """Memory that counts the requested blocks by call; shared, like a server."""

    authoritative = False
    asked: ClassVar[dict[str, int]] = {}

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        self._count("put", writes)
        return await super().put(writes)

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        self._count("get", reads)
        return await super().get_into(reads)

    async def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        self._count("exists", keys)
        return await super().exists(keys)

    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        self._count("delete", keys)
        return await super().delete(keys)

    def _count(self, call: str, blocks: Sequence[object]) -> None:
        Counting.asked[call] = Counting.asked.get(call, 0) + len(blocks)


class CountingAlone(Counting):
    """The same on an authoritative medium."""

    authoritative = True


class Deflate(Codec):
    """A third-party codec."""

    name = "deflate"
    wire_ids: ClassVar[tuple[int, ...]] = (211,)

    def encode(self, sources: Sequence[memoryview], targets: Sequence[memoryview]) -> Sequence[int | None]:
        return [_put(zlib.compress(source), target) for source, target in zip(sources, targets, strict=True)]

    def decode(
        self, wire_id: int, sources: Sequence[memoryview], targets: Sequence[memoryview]
    ) -> Sequence[int | None]:
        found = []
        for source, target in zip(sources, targets, strict=True):
            try:
                found.append(_put(zlib.decompress(source), target))
            except zlib.error:
                found.append(None)
        return found


class OtherDeflate(Deflate):
    """Another third-party codec with the same id, or a later version of the first."""

    def encode(self, sources: Sequence[memoryview], targets: Sequence[memoryview]) -> Sequence[int | None]:
        return [_put(b"other" + zlib.compress(s), t) for s, t in zip(sources, targets, strict=True)]

    def decode(
        self, wire_id: int, sources: Sequence[memoryview], targets: Sequence[memoryview]
    ) -> Sequence[int | None]:
        return _decode(self, wire_id, [source[5:] for source in sources], targets)


_decode = Deflate.decode
_decode_other = OtherDeflate.decode


def _put(data: bytes, target: memoryview) -> int | None:
    if len(data) > target.nbytes:
        return None
    target[: len(data)] = data
    return len(data)


class Rig(TierRig):
    """A rig with compressible blocks."""

    def payload(self, key: BlockKey) -> bytes:
        return (key + super().payload(key)[:480]) * (self.slot_bytes // 512)


@pytest.fixture(autouse=True)
def _from_zero() -> None:
    Counting.asked = {}


def rig(backend: type[Backend], shelf: str, codec: Any, more: Mapping[str, Any] | None = None) -> Rig:
    """Open a tier that soon queries its medium again for absent blocks."""
    config = {"backend": f"{__name__}:{backend.__name__}", "shelf": shelf, "codec": codec, **(more or {})}
    config |= {"negative_ttl": 0.05, "lookup_timeout": 30, "load_timeout": 30}
    return Rig(config, namespace=Namespace({"suite": "refused"}), slot_bytes=SLOT, slots=16)


def seal(path: Path, *key_ids: int) -> list[Any]:
    """Return a codec option with a keyring of these keys."""
    write(path, document(*key_ids))
    return [{"aead": {"keys": {"file": str(path), "refresh": 0.01}}}]


def request(tier: TierRig, number: int) -> set[LookupResult]:
    """Act like an engine with a request: look up, load found blocks, compute and store the rest."""
    ctx = RequestContext(f"request {number}")
    found = {}

    def known() -> bool:
        for key in KEYS:
            found[key] = tier.tier.lookup(key, ctx)
        return LookupResult.RETRY not in found.values()

    tier.until(known, "answers to all lookups")
    hits = [key for key in KEYS if found[key] is LookupResult.HIT]
    if hits:
        tier.finish(tier.submit_load(hits, ctx=ctx))
    tier.store(KEYS)
    tier.tier.on_request_finished(ctx)
    return set(found.values())


def test_refused_record_is_a_miss_and_kept_on_a_shared_medium(tmp_path: Path) -> None:
    """On a shared medium each record is read once, and then missed; no record is deleted or sent again."""
    shelf = next(_shelves)
    theirs, ours = seal(tmp_path / "theirs", 1, 41), seal(tmp_path / "ours", 1)
    with rig(Counting, shelf, theirs) as writer:
        assert writer.store(KEYS).success
    Counting.asked = {}
    with rig(Counting, shelf, ours) as reader:
        assert request(reader, 0) == {LookupResult.HIT}
        numbers = itertools.count(1)

        def asked_again() -> bool:
            assert request(reader, next(numbers)) == {LookupResult.MISS}
            return Counting.asked.get("exists", 0) >= 3 * len(KEYS)

        eventually(asked_again, 60, "the medium to be asked three times more")
        assert set(Counting.asked) == {"exists", "get"} and Counting.asked["get"] == len(KEYS)
        assert reader.tier.stats().faults == {"codec": len(KEYS)}
        assert reader.tier.drain(20)
        reader.step()
        assert reader.tier.stats().backend_gauges["unreadable_blocks"] == len(KEYS)
    with rig(Counting, shelf, theirs) as writer:
        assert writer.load(KEYS).success


class Noting(Counting):
    """Records the blocks that were reported as verified."""

    verified: ClassVar[list[BlockKey]] = []

    def note_read(self, intact: Sequence[BlockKey], damaged: Sequence[BlockKey]) -> None:
        Noting.verified += intact


def test_refused_record_does_not_count_as_used(tmp_path: Path) -> None:
    """A refused record is not reported as used to a medium that extends lifetimes by use, so it can expire."""
    shelf = next(_shelves)
    old, new = seal(tmp_path / "old", 41), seal(tmp_path / "new", 42)
    with rig(Noting, shelf, old) as writer:
        assert writer.store(KEYS[:3]).success
    with rig(Noting, shelf, new) as writer:
        assert writer.store(KEYS[3:]).success
        Noting.verified = []
        assert set(writer.load(KEYS).outcomes) == {Outcome.OK, Outcome.CORRUPT}
        assert sorted(Noting.verified) == sorted(KEYS[3:])


def test_a_refused_record_that_was_removed_can_be_stored_again(tmp_path: Path) -> None:
    """The removal ends the pause; otherwise the block's next store would be reported without reaching the medium."""
    shelf = next(_shelves)
    theirs, ours = seal(tmp_path / "theirs", 1, 41), seal(tmp_path / "ours", 1)
    with rig(Counting, shelf, theirs) as writer:
        assert writer.store(KEYS).success
    with rig(Counting, shelf, ours) as reader:
        assert request(reader, 0) == {LookupResult.HIT}
        reader.tier.remove(KEYS)
        assert reader.tier.drain(20)
        assert reader.store(KEYS).success
        assert reader.load(KEYS).success


def test_record_refused_again_after_a_pause_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a shared medium, too, a permanently unreadable record is replaced by a readable one."""
    monkeypatch.setattr("kvstore.tiers.presence._REFUSED_PAUSE_S", 0.05)
    monkeypatch.setattr("kvstore.tiers.presence._REFUSED_PAUSE_S_MAX", 0.1)
    shelf = next(_shelves)
    old, new = seal(tmp_path / "old", 41), seal(tmp_path / "new", 42)
    with rig(Counting, shelf, old) as writer:
        assert writer.store(KEYS).success
    with rig(Counting, shelf, new) as engine:
        numbers = itertools.count()

        def readable() -> bool:
            request(engine, next(numbers))
            return engine.load(KEYS).success

        eventually(readable, 60, "the blocks stored anew")
        # Once each, and not again.
        assert Counting.asked["delete"] == len(KEYS)


def test_store_replaces_a_refused_record_on_an_authoritative_medium(tmp_path: Path) -> None:
    """On an authoritative medium a recomputed block replaces the unreadable record."""
    shelf = next(_shelves)
    old, new = seal(tmp_path / "old", 41), seal(tmp_path / "new", 42)
    with rig(CountingAlone, shelf, old) as writer:
        assert writer.store(KEYS).success
    with rig(CountingAlone, shelf, new).recovered() as reader:
        Counting.asked = {}
        # A refused record is not removed for that alone, because its key may be restored.
        assert set(reader.load(KEYS).outcomes) == {Outcome.CORRUPT}
        assert "delete" not in Counting.asked
        assert request(reader, 1) == {LookupResult.MISS}
        assert Counting.asked["delete"] == len(KEYS)
        eventually(lambda: request(reader, 2) == {LookupResult.HIT}, 60, "the end of the pause after a failed load")
        assert reader.load(KEYS).success
        assert reader.tier.stats().faults == {"codec": len(KEYS)}


def test_failed_seal_replaces_no_record(tmp_path: Path) -> None:
    """While a key is missing, blocks that can't be sealed don't replace existing records."""
    shelf, path = next(_shelves), tmp_path / "keys"
    codec = [{"aead": {"keys": {"file": str(path), "refresh": 0.01}}}]
    with_salt, without = (document(41, salts={name: secret(7)}) for name in ("acme", "globex"))
    write(path, with_salt)
    with rig(CountingAlone, shelf, codec, {"namespace": "acme"}) as tier:
        assert tier.store(KEYS).success
        write(path, without)
        tier.until(lambda: set(tier.load(KEYS).outcomes) == {Outcome.CORRUPT}, "the loss of the salt")
        assert set(tier.store(KEYS).outcomes) == {Outcome.SHED}
        assert "delete" not in Counting.asked
        write(path, with_salt)
        tier.until(lambda: tier.load(KEYS).success, "the salt")


class Recovering(CountingAlone):
    """Can't delete yet."""

    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        self._count("delete", keys)
        await asyncio.Event().wait()
        raise AssertionError


def test_a_medium_that_can_not_delete_yet_holds_up_nothing(tmp_path: Path) -> None:
    """Records that can't be removed now stay, and the other blocks of the job are stored."""
    shelf = next(_shelves)
    old, new = seal(tmp_path / "old", 41), seal(tmp_path / "new", 42)
    with rig(Counting, shelf, old) as writer:
        assert writer.store(KEYS[:2]).success
    with rig(Recovering, shelf, new).recovered() as reader:
        assert set(reader.load(KEYS[:2]).outcomes) == {Outcome.CORRUPT}
        assert reader.store(KEYS).outcomes == (Outcome.EXISTS,) * 2 + (Outcome.OK,) * 4
        assert Counting.asked["delete"] == 2
        assert reader.load(KEYS[2:]).success


def test_refusal_applies_only_to_the_record_read() -> None:
    """The refusal of a record that has been replaced does not affect its replacement."""
    now = [1000.0]
    refused = RefusedRecords(lambda: now[0])
    refused.note([b"a", b"b"])
    now[0] += 5
    refused.forget([b"a", b"c"], replaced=True)
    refused.forget([b"b"])
    now[0] += 1
    refused.note([b"a", b"b", b"c"], 2.0)
    assert refused.among([b"a", b"b", b"c"]) == {b"b", b"c"}
    refused.note([b"a"], 0.5)
    assert refused.among([b"a"]) == {b"a"}


def test_a_key_that_comes_back_makes_its_blocks_readable(tmp_path: Path) -> None:
    """A load reads even a refused record, and a record that was read is found again."""
    shelf = next(_shelves)
    path = tmp_path / "keys"
    theirs, ours = seal(tmp_path / "theirs", 1, 41), seal(path, 1)
    with rig(Counting, shelf, theirs) as writer:
        assert writer.store(KEYS).success
    with rig(Counting, shelf, ours) as reader:
        assert set(reader.load(KEYS).outcomes) == {Outcome.CORRUPT}
        assert {reader.lookup(key) for key in KEYS} == {LookupResult.MISS}
        write(path, document(1, 41))
        reader.until(lambda: reader.load(KEYS).success, "the key")
        eventually(lambda: {reader.lookup(key) for key in KEYS} == {LookupResult.HIT}, 60, "the blocks to be found")


@pytest.mark.parametrize("backend", [Counting, CountingAlone])
def test_a_codec_that_changed_is_no_damage(
    backend: type[Backend], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks by another version of a third-party codec are misses with one warning with the id, and stay intact."""
    shelf = next(_shelves)
    codec = [f"{__name__}:Deflate"]
    with monkeypatch.context() as other_version:
        other_version.setattr(Deflate, "encode", OtherDeflate.encode)
        with rig(backend, shelf, codec) as writer:
            assert writer.store(KEYS).success
    with rig(backend, shelf, codec) as reader:
        assert set(reader.load(KEYS).outcomes) == {Outcome.CORRUPT}
        assert set(reader.load(KEYS).outcomes) == {Outcome.CORRUPT}
        assert reader.tier.stats().faults == {"codec": 2 * len(KEYS)}
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1 and "codec 211" in told[0], told
    with monkeypatch.context() as other_version:
        other_version.setattr(Deflate, "decode", _decode_other)
        with rig(backend, shelf, codec) as writer:
            assert writer.load(KEYS).success


@pytest.mark.parametrize("backend", [Counting, CountingAlone])
@pytest.mark.parametrize("ours", [[f"{__name__}:Deflate"], "raw"])
def test_blocks_of_another_codec_are_not_even_read(
    backend: type[Backend], ours: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks of a third-party codec are in its own namespace: misses for a tier without it, and they stay intact."""
    shelf = next(_shelves)
    theirs = [f"{__name__}:OtherDeflate"]
    with rig(backend, shelf, theirs) as writer:
        assert writer.store(KEYS).success
    with rig(backend, shelf, ours) as reader:
        assert set(reader.load(KEYS).outcomes) == {Outcome.MISS}
        assert reader.tier.stats().faults == {}
        assert reader.store(KEYS).outcomes == (Outcome.OK,) * len(KEYS)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    with rig(backend, shelf, theirs) as writer:
        assert writer.load(KEYS).success


def test_a_codec_that_is_not_installed_is_no_damage(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of a codec whose package is missing are misses, with one warning with the id, and stay intact."""
    shelf = next(_shelves)
    with rig(CountingAlone, shelf, ["zstd"]) as writer:
        assert writer.store(KEYS).success
    with monkeypatch.context() as uninstalled:
        # The import fails as if it had never been installed.
        uninstalled.setitem(sys.modules, "kvstore.codec.zstd", None)
        with rig(CountingAlone, shelf, "raw") as reader:
            assert set(reader.load(KEYS).outcomes) == {Outcome.CORRUPT}
            assert reader.tier.stats().faults == {"codec": len(KEYS)}
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([text for text in told if "codec 3" in text]) == 1, told
    with rig(CountingAlone, shelf, ["zstd"]) as writer:
        assert writer.load(KEYS).success


def test_pauses_grow_and_memory_does_not() -> None:
    """A record is hidden for 10 s, then twice as long each time up to 5 min; the oldest are forgotten."""
    now = [1000.0]
    refused = RefusedRecords(lambda: now[0])
    for pause_s in (10, 20, 40, 80, 160, 300, 300):
        refused.note([b"a"])
        now[0] += pause_s - 0.5
        assert refused.hidden_among([b"a", b"b"]) == {b"a"}
        now[0] += 1
        assert refused.hidden_among([b"a"]) == set() and refused.among([b"a"]) == {b"a"}
    refused.forget([b"a"])
    assert not refused and refused.among([b"a"]) == set()
    refused.note([b"a"])
    now[0] += 10.5
    assert refused.hidden_among([b"a"]) == set(), "what was read begins anew"
    refused.note([b"%d" % number for number in range(70_000)])
    assert len(refused) == 65_536 and refused.among([b"a"]) == set()
