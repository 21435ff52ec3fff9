"""Sealed tiers: wrong, missing or changing keys during jobs, erased namespaces, and names without information."""

from __future__ import annotations

import hashlib
import itertools
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from kvstore.namespace import Namespace
from kvstore.testing import TierTests
from kvstore.testing.seeds import fresh_seed
from kvstore.testing.tier_rig import TierRig
from kvstore.types import BlockKey, LookupResult, Outcome, RemovalCause
from tests.seal.keyrings import document, secret, soon, write

SEED = fresh_seed()
SLOT_BYTES = 4096
_shelves = (f"seal-{number}" for number in itertools.count())


def rig(config: dict[str, Any], *, namespace: str = "", slots: int = 32) -> TierRig:
    """Open a tier; the namespace is set by the tier's option, as users set it."""
    return TierRig(
        {"load_timeout": 30, "lookup_timeout": 30, **config, **({"namespace": namespace} if namespace else {})},
        namespace=Namespace({"suite": "sealed tier"}),
        slot_bytes=SLOT_BYTES,
        slots=slots,
    )


def sealed(path: Path, kind: str = "aead", *, shelf: str = "", refresh: float = 0.01, **options: Any) -> dict[str, Any]:
    """Return the configuration of a sealed tier over a given or new shelf in memory."""
    keys = {"file": str(path), "refresh": refresh}
    return {"backend": "memory", "shelf": shelf or next(_shelves), "codec": [{kind: {"keys": keys, **options}}]}


def some_keys(count: int, salt: int = 0) -> list[BlockKey]:
    """Return keys in vLLM's form."""
    return [hashlib.sha256(b"%d %d" % (salt, number)).digest() + b"\0\0\0\1" for number in range(count)]


def outcomes(rig: TierRig, keys: list[BlockKey]) -> set[Outcome]:
    """Load blocks; return their outcomes."""
    return set(rig.load(keys).outcomes)


class TestSealedTier(TierTests):
    """A tier with seal and keyed names keeps the contract of tiers, including recovery, removal and events."""

    @pytest.fixture(autouse=True)
    def _keyring(self, tmp_path: Path) -> None:
        self.path = write(tmp_path / "keys", document(1, names=secret(9)))

    def make_config(self) -> dict[str, Any]:
        return sealed(self.path, keyed_names=True)

    def small_config(self, capacity_bytes: int) -> dict[str, Any]:
        return {**self.make_config(), "capacity": capacity_bytes}


@pytest.mark.parametrize("kind", ["aead", "mac"])
def test_a_missing_key_is_a_miss_and_one_warning(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Blocks of a key missing from the keyring are misses, the tier stays in use, and the blocks are not removed."""
    keys = some_keys(8)
    full = write(tmp_path / "full", document(1, 41))
    config = sealed(full, kind)
    with rig(config) as writer:
        assert writer.store(keys).success
    poor = sealed(write(tmp_path / "poor", document(1)), kind, shelf=config["shelf"])
    wrong_document = document(1, 41)
    wrong_document["keys"]["41"] = secret(42)
    wrong = sealed(write(tmp_path / "wrong", wrong_document), kind, shelf=config["shelf"])
    for other, fault in ((poor, "codec"), (wrong, "seal")):
        caplog.clear()
        with rig(other) as reader:
            assert outcomes(reader, keys) == {Outcome.CORRUPT}
            stats = reader.tier.stats()
            assert stats.faults == {fault: 8} and stats.load_breaker == "closed"
            # Stores continue, under another key than the missing one, or under the wrong one.
            assert reader.store(some_keys(2, salt=1)).success
        told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(told) == 1 and "41" in told[0], told
        assert not [number for number in (1, 41, 42) if secret(number)[:8] in caplog.text]
    with rig(config) as writer:
        assert outcomes(writer, keys) == {Outcome.OK}


def test_tier_without_keys_misses_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Sealed blocks are misses for a tier without a seal, and the warning names their key."""
    keys = some_keys(4)
    config = sealed(write(tmp_path / "keys", document(41)))
    with rig(config) as writer:
        writer.store(keys)
    with rig({**config, "codec": "raw"}) as reader:
        assert outcomes(reader, keys) == {Outcome.CORRUPT}
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "key 41" in told[0]


@pytest.mark.parametrize("io", ["thread", "process"])
def test_keys_rotate_while_jobs_run(tmp_path: Path, io: str) -> None:
    """During eight rotations of a running tier every stored block can be loaded while its key is in the keyring."""
    path = write(tmp_path / "keys", document(1))
    # Two tiers of two engines over one directory: one reads the other's records of new keys.
    where = {"backend": "file", "path": str(tmp_path / "tier"), "capacity": "64MiB", "reserve": 0}
    config = {**where, "codec": sealed(path)["codec"]}
    rng = random.Random(SEED)
    with rig({**config, "io": io}) as first, rig(config) as second:
        assert (first.tier.io_pid is not None) == (io == "process")
        stored: list[BlockKey] = []
        for turn in range(1, 9):
            # Old keys are kept.
            write(path, document(*range(1, turn + 1)))
            for part in range(4):
                keys = some_keys(8, salt=10 * turn + part)
                writer = first if part % 2 else second
                storing = writer.submit_store(keys, slots=range(8))
                again = rng.sample(stored, min(8, len(stored)))
                loading = writer.submit_load(again, slots=range(8, 8 + len(again)))
                assert writer.finish(storing).success, f"seed {SEED}"
                writer.prove(writer.finish(loading), again, range(8, 8 + len(again)))
                # A block just stored by the other tier, or with a key not read yet, is a miss once.
                known = {Outcome.OK, Outcome.MISS, Outcome.CORRUPT}
                assert set(writer.results[loading].outcomes) <= known, f"seed {SEED}"
                stored += keys
        for reader in (first, second):
            for start in range(0, len(stored), 32):
                soon(lambda r=reader, s=start: r.load(stored[s : s + 32]).success, what="blocks of all keys")
        salts = itertools.count(1000)

        def is_noticed() -> bool:
            """Keys are read in the background: a block stored after that uses the new key."""
            assert first.store(some_keys(1, salt=next(salts))).success
            return len(_key_ids(tmp_path / "tier")) >= 2

        soon(is_noticed, what="blocks of two keys: rotations were not noticed")


def _key_ids(root: Path) -> set[int]:
    """Return the key ids in the headers of all records in a disk tier's segments."""
    found = set()
    for segment in root.rglob("*.seg"):
        data = segment.read_bytes()
        starts = (data[start : start + 128] for start in range(0, len(data), 4096))
        found |= {int.from_bytes(start[124:], "little") for start in starts if start[:8] == b"\x89kvstor\n"}
    return found


def test_erasing_one_namespace_erases_no_other(tmp_path: Path) -> None:
    """When a namespace's salt is dropped, running tiers lose its blocks and store no more; others keep theirs."""
    path = write(tmp_path / "keys", document(1, salts={"a": secret(10), "b": secret(11)}))
    config = sealed(path)
    keys = some_keys(8)
    with rig(config, namespace="a") as mine, rig(config, namespace="b") as theirs:
        assert mine.store(keys).success and theirs.store(keys).success
        assert outcomes(mine, keys) == outcomes(theirs, keys) == {Outcome.OK}
        write(path, document(1, salts={"b": secret(11)}))
        soon(lambda: outcomes(mine, keys) == {Outcome.CORRUPT}, what="the end of the namespace's blocks")
        more = some_keys(4, salt=1)
        assert set(mine.store(more).outcomes) == {Outcome.SHED}
        assert mine.tier.stats().store_breaker == "closed"
        assert outcomes(theirs, keys) == {Outcome.OK}
        assert theirs.store(more).success
    # Even with a new secret for the same namespace.
    write(path, document(1, salts={"a": secret(12), "b": secret(11)}))
    with rig(config, namespace="a") as mine:
        assert outcomes(mine, keys) == {Outcome.CORRUPT}
        assert mine.tier.stats().faults == {"seal": 8}
        assert mine.store(more).success


def test_medium_contains_no_key_block_or_secret(tmp_path: Path) -> None:
    """With aead and keyed names the medium contains no key, no digest of one, no part of a block and no secret."""
    path = write(tmp_path / "keys", document(1, names=secret(9)))
    root = tmp_path / "tier"
    config = {**sealed(path, keyed_names=True), "backend": "file", "path": str(root), "capacity": "64MiB", "reserve": 0}
    config.pop("shelf")
    keys = some_keys(16)
    with rig(config) as writer:
        assert writer.store(keys).success
        payloads = [writer.payload(key) for key in keys]
    names = " ".join(str(file.relative_to(root)) for file in root.rglob("*"))
    content = b"".join(file.read_bytes() for file in root.rglob("*") if file.is_file())
    assert len(content) > 16 * SLOT_BYTES
    for key, payload in zip(keys, payloads, strict=True):
        assert key.hex()[:16] not in names.lower()
        for part in (key[:8], hashlib.sha256(key).digest()[:8], payload[:16], payload[2000:2016]):
            assert part not in content
    for number in (1, 9):
        assert bytes([number]) * 16 not in content
    # All blocks are found again by key after a restart.
    with rig(config).recovered() as reader:
        assert all(reader.tier.lookup(key) is LookupResult.HIT for key in keys)
        assert outcomes(reader, keys) == {Outcome.OK}
        assert reader.tier.lookup(some_keys(1, salt=9)[0]) is LookupResult.MISS


def test_events_name_keys_not_names(tmp_path: Path) -> None:
    """Recovered, stored and evicted blocks are reported by key, whatever their names on the medium."""
    path = write(tmp_path / "keys", document(1, names=secret(9)))
    config = {**sealed(path, keyed_names=True), "capacity": 8 * (SLOT_BYTES + 256)}
    old, new = some_keys(6), some_keys(6, salt=1)
    with rig(config) as tier:
        tier.store(old)
    with rig(config).recovered() as tier:
        assert {key for event in tier.tier.take_events() for key in event.keys} == set(old)
        tier.store(new)
        gone: set[BlockKey] = set()

        def evicted() -> bool:
            for event in tier.tier.take_events():
                if event.cause is RemovalCause.EVICTED:
                    gone.update(event.keys)
            return bool(gone)

        tier.until(evicted, "an eviction")
        assert gone <= {*old, *new}


def test_overlong_key_loses_no_job(tmp_path: Path) -> None:
    """A key that is too long does not affect the messages that are sent with it."""
    keys = some_keys(2)
    with rig(sealed(write(tmp_path / "keys", document(1, names=secret(9))), keyed_names=True)) as tier:
        tier.store(keys)
        tier.tier.remove([b"k" * 200])
        assert outcomes(tier, keys) == {Outcome.OK}


def test_other_names_find_nothing(tmp_path: Path) -> None:
    """A tier with the keys but another secret of names, or none, neither finds nor recognises a block."""
    keys = some_keys(4)
    config = sealed(write(tmp_path / "keys", document(1, names=secret(9))), keyed_names=True)
    with rig(config) as writer:
        writer.store(keys)
    others = [
        sealed(write(tmp_path / "other", document(1, names=secret(8))), shelf=config["shelf"], keyed_names=True),
        sealed(tmp_path / "keys", shelf=config["shelf"]),
    ]
    for other in others:
        with rig(other).recovered() as reader:
            assert all(reader.lookup(key) is LookupResult.MISS for key in keys)
            assert outcomes(reader, keys) == {Outcome.MISS}


def test_unsealed_blocks_are_readable_if_configured(tmp_path: Path) -> None:
    """Unsealed blocks are misses by default, and are read if the configuration accepts them for a time."""
    path = write(tmp_path / "keys", document(1))
    shelf = next(_shelves)
    keys = some_keys(4)
    with rig({"backend": "memory", "shelf": shelf}) as writer:
        writer.store(keys)
    with rig(sealed(path, shelf=shelf)) as strict:
        assert outcomes(strict, keys) == {Outcome.CORRUPT}
        assert strict.tier.stats().faults == {"codec": 4}
    with rig(sealed(path, shelf=shelf, accept_unsealed=True)) as lenient:
        assert outcomes(lenient, keys) == {Outcome.OK}
        assert lenient.store(some_keys(4, salt=1)).success
    with rig(sealed(path, "mac", shelf=shelf)) as strict:
        assert outcomes(strict, some_keys(4, salt=1)) == {Outcome.OK}
