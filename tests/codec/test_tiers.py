"""Tiers with codecs: over each medium, in each host, and after every change of configuration."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvstore.config import ConfigError
from kvstore.namespace import Namespace
from kvstore.testing import TierRig, TierTests
from kvstore.testing.tier_tests import TierHarness, TierValueTests
from kvstore.types import BlockKey, LookupResult, Outcome
from tests.codec.coding import numbers
from tests.redis.clients import options_for
from tests.redis.fixtures import server_fixture
from tests.s3 import clients as s3_clients
from tests.s3 import servers as s3_servers

NAMESPACE = Namespace({"suite": "codec", "dtype": "bfloat16"})
SLOT = 65536
BLOCKS = 24
CODED = "byteplane+zstd:1"


class CodedRig(TierRig):
    """A rig whose blocks compress like those of a KV cache. Every eighth one is noise."""

    def payload(self, key: BlockKey) -> bytes:
        if key[0] % 8 == 0:
            return super().payload(key)
        return numbers(self.slot_bytes, int.from_bytes(key[:4], "little"))


redis = server_fixture("redis", "module")


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3_servers.S3Server]:
    """An S3 server for this module."""
    with s3_servers.running(s3_servers.moto(tmp_path_factory.mktemp("s3"))) as server:
        yield server


@pytest.fixture(
    params=[
        "file",
        "memory",
        "redis",
        *(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("file-process", "s3")),
    ]
)
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The configuration of a tier whose blocks survive a close."""
    name, _, host = request.param.partition("-")
    more = {"io": "process"} if host else {}
    match name:
        case "memory":
            return {"backend": name, "shelf": str(tmp_path)}
        case "redis":
            return {"backend": name, **options_for(request.getfixturevalue("redis"))}
        case "s3":
            return {"backend": name, **s3_clients.options_for(request.getfixturevalue("s3"))}
        case _:
            return {"backend": name, "path": str(tmp_path / "medium"), "capacity": 64 << 20, **more}


@pytest.fixture
def keyring(tmp_path: Path) -> dict[str, Any]:
    """The options of a seal with its key in a file, which accepts unsealed blocks."""
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"current": 1, "keys": {"1": "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="}}))
    return {"keys": {"file": str(path)}, "accept_unsealed": True}


def rig(config: dict[str, Any], codec: Any, slot_bytes: int = SLOT) -> CodedRig:
    """Open a tier over a medium with a codec."""
    patient = {"load_timeout": 30, "lookup_timeout": 30}
    return CodedRig({**patient, **config, "codec": codec}, namespace=NAMESPACE, slot_bytes=slot_bytes, slots=BLOCKS)


def test_one_configuration_reads_blocks_of_all_others(medium: dict[str, Any], keyring: dict[str, Any]) -> None:
    """Blocks written raw, compressed, sealed and both are all loaded by each of these configurations."""
    seal, mac = {"aead": keyring}, {"mac": keyring}
    writers: list[Any] = ["raw", CODED, [seal], [CODED, seal], [mac], ["zstd:3", mac], [CODED], "auto"]
    keys: dict[int, list[BlockKey]] = {}
    for number, codec in enumerate(writers):
        keys[number] = [bytes([place, number]) * 16 for place in range(BLOCKS)]
        with rig(medium, codec) as tier:
            assert tier.store(keys[number]).success, f"{codec}: {tier.tier.stats().last_error}"
            check_counts(tier, codec)
    for codec in (writers[3], [seal], [CODED, mac]):
        with rig(medium, codec) as tier:
            for number, writer in enumerate(writers):
                assert {tier.lookup(key) for key in keys[number]} == {LookupResult.HIT}, f"{writer} read by {codec}"
                load_all(tier, keys[number], f"{writer} read by {codec}")
            assert tier.tier.stats().faults == {}
    for codec in ("raw", CODED):
        # Without keys the sealed blocks are misses, and the others are still good.
        with rig(medium, codec) as tier:
            for number in (0, 1, 6, 7):
                load_all(tier, keys[number], f"{writers[number]} read by {codec}")
            for number in (2, 3, 4, 5):
                result = tier.load(keys[number])
                assert not result.success and list(result.outcomes) == [Outcome.CORRUPT] * BLOCKS
            tier.until(lambda tier=tier: tier.tier.stats().faults == {"codec": 4 * BLOCKS}, "the faults")
    with rig(medium, [seal]) as tier:
        # The misses were not considered damaged.
        load_all(tier, keys[3], "sealed blocks after a tier without keys")


def check_counts(tier: CodedRig, codec: Any) -> None:
    """Check that the statistics match the blocks of one store."""
    assert tier.tier.drain(20.0)
    counts = tier.tier.stats().codec
    if codec == "raw":
        assert counts == {}
        return
    noise = BLOCKS // 8
    coded = codec == "auto" or "zstd" in str(codec)
    blocks = BLOCKS - noise if coded else 0
    assert (counts["encoded_blocks"], counts["raw_blocks"]) == (blocks, BLOCKS - blocks), codec
    assert counts["encode_in_bytes"] == BLOCKS * SLOT
    assert 0.6 < counts["ratio"] < 0.95 if coded else counts["ratio"] == 1.0
    assert counts["encode_out_bytes"] == pytest.approx(counts["ratio"] * counts["encode_in_bytes"])
    assert counts["encode_seconds"] > 0
    assert ("auto_encodes" in counts) == (codec == "auto")


def load_all(tier: CodedRig, keys: list[BlockKey], what: str) -> None:
    """Load blocks and check that each is in its slot."""
    result = tier.load(keys)
    assert result.success, f"{what}: {list(result.outcomes)}, {tier.tier.stats().last_error}"


@pytest.mark.parametrize("medium", ["file", "memory", "redis"], indirect=True)
@pytest.mark.parametrize("slot_bytes", [1000, 4096, 12_000, 65_536, 300_000])
def test_slots_of_all_lengths(medium: dict[str, Any], slot_bytes: int) -> None:
    """Encoded records are stored and loaded for any ratio of slot length to the medium's unit."""
    keys = [bytes([place]) * 32 for place in range(BLOCKS)]
    with rig(medium, CODED, slot_bytes) as tier:
        assert tier.store(keys).success, tier.tier.stats().last_error
        load_all(tier, keys, f"slots of {slot_bytes} bytes")
        assert tier.tier.drain(20.0)
        assert tier.tier.stats().codec.get("decoded_blocks", 0) == BLOCKS - BLOCKS // 8
    with rig(medium, "raw", slot_bytes) as tier:
        load_all(tier, keys, f"slots of {slot_bytes} bytes, by a tier set to raw")


def test_unknown_codec_is_refused_at_start(tmp_path: Path) -> None:
    """An unknown codec prevents the start in each host, and leaves no files or processes."""
    for more in ({}, {"io": "process"}):
        config = {"backend": "file", "path": str(tmp_path / "medium"), "capacity": 64 << 20, **more}
        with pytest.raises(ConfigError, match="Did you mean 'zstd'"):
            rig(config, "zsdt")
        with pytest.raises(ConfigError, match="-5 to 19"):
            rig(config, "zstd:99")


class CodedHarness(TierHarness):
    """The contract of tiers, with codecs before the backend."""

    codec: ClassVar[Any] = CODED
    options: ClassVar[dict[str, Any]] = {}
    namespace = NAMESPACE

    @pytest.fixture(autouse=True)
    def _scratch(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path

    def make_config(self) -> dict[str, Any]:
        return self.small_config(64 << 20)

    def small_config(self, capacity_bytes: int) -> dict[str, Any]:
        path = tempfile.mkdtemp(dir=self.tmp_path)
        return {"path": path, "capacity": capacity_bytes, "codec": self.codec, **self.options}

    def rig(self, *args: Any, **kwargs: Any) -> TierRig:
        """Open a tier that stores compressible blocks."""
        made = super().rig(*args, **kwargs)
        made.__class__ = CodedRig
        return made


class TestFile(CodedHarness, TierTests):
    options: ClassVar[dict[str, Any]] = {"backend": "file"}


class TestMemory(CodedHarness, TierValueTests):
    persistent = False
    codec: ClassVar[Any] = ["zstd:-5"]

    def small_config(self, capacity_bytes: int) -> dict[str, Any]:
        return {"backend": "memory", "capacity": capacity_bytes, "codec": self.codec}
