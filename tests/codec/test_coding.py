"""Encoder and decoder: the content of a record, and that any later configuration reads records of any earlier one."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.codec.base import Codec
from kvstore.codec.chain import AUTO, build_chain, pack_chain, parse_chain, unpack_chain
from kvstore.codec.coding import Encoder
from kvstore.codec.record import HEADER_BYTES, decode_header
from kvstore.errors import ConfigError
from kvstore.namespace import Namespace
from kvstore.registry import CODECS
from kvstore.tiers.codecs import TierCodecs, element_bytes_of, namespace_with_codecs
from tests.codec.coding import NAMESPACE, Coding, numbers
from tests.codec.records import SEED, forged
from tests.codec.third_party import Touchy
from tests.seal.keyrings import document, write

SLOT = 8192
CONFIGS: list[Any] = [
    "raw",
    "byteplane",
    "zstd",
    "zstd:-5",
    "byteplane+zstd:1",
    ["byteplane", {"zstd": {"level": 3}}],
    ["byteplane+zstd", "zstd:1"],
    ["tests.codec.third_party:Inverted"],
    ["tests.codec.third_party:Inverted", "byteplane", {"zstd": {"level": 9}}],
]
PLANES_ZSTD = 1 | 3 << 8


@pytest.fixture
def touchy() -> Iterator[type[Touchy]]:
    """The third-party codec, without defects at first."""
    yield Touchy
    Touchy.defect, Touchy.encoded_bytes = "", 0


@pytest.mark.parametrize("reader", CONFIGS, ids=str)
@pytest.mark.parametrize("writer", CONFIGS, ids=str)
def test_each_configuration_reads_blocks_of_each_other(writer: Any, reader: Any) -> None:
    """Blocks are restored byte by byte, compressible or not, with codecs that the reader is not configured for.

    Blocks of a third-party codec have another namespace than those of tiers without it, and are refused there.
    """
    known = namespace_with_codecs(NAMESPACE, writer) == namespace_with_codecs(NAMESPACE, reader)
    blocks = [numbers(SLOT, 1), random.Random(SEED).randbytes(SLOT), bytes(SLOT), numbers(SLOT, 2)]
    for encode in (True, False):
        records = Coding(writer, namespace=namespace_with_codecs(NAMESPACE, writer)).write(blocks, encode=encode)
        found = Coding(reader, namespace=namespace_with_codecs(NAMESPACE, reader)).read(records, SLOT)
        assert found == (blocks if known else ["namespace"] * len(blocks))


def test_incompressible_blocks_are_stored_raw() -> None:
    """Noise is stored unchanged, in the same bytes as without codecs; numbers are stored shorter."""
    noise = random.Random(SEED).randbytes(SLOT)
    (record,) = Coding("byteplane+zstd:1").write([noise])
    assert [record] == Coding("raw").write([noise])
    (record,) = Coding("byteplane+zstd:1").write([numbers(SLOT)])
    header = decode_header(record)
    assert (header.codec_chain, header.plain_bytes) == (PLANES_ZSTD, SLOT)
    assert header.stored_bytes == len(record) - HEADER_BYTES < 0.85 * SLOT
    # While "auto" finds it not worthwhile.
    assert Coding("byteplane+zstd:1").write([numbers(SLOT)], encode=False) == Coding("raw").write([numbers(SLOT)])


@pytest.mark.parametrize(
    ("codec", "encoded", "plain"),
    [
        ("raw", (False, False), (False, False)),
        ("zstd", (True, False), (False, False)),
        ("byteplane+zstd:1", (True, True), (False, False)),
        ("mac", (False, False), (False, False)),
        ("zstd mac", (True, False), (False, False)),
        ("aead", (True, False), (True, False)),
        ("zstd aead", (True, True), (True, False)),
    ],
)
def test_the_rows_that_an_encoder_needs(
    codec: str, encoded: tuple[bool, bool], plain: tuple[bool, bool], tmp_path: Path
) -> None:
    """Targets are for codecs and encryption; spares for what lies between two codecs, or a codec and encryption."""
    keys = {"keys": {"file": str(write(tmp_path / "keys", document(1)))}}
    config = [{name: keys} if name in {"mac", "aead"} else name for name in codec.split()]
    coding = Coding(config)
    encoder = Encoder(coding.records, coding.codecs.chain)
    assert (encoder.needs_rows(encode=True), encoder.needs_rows(encode=False)) == (encoded, plain)


def test_barely_compressible_blocks_are_stored_raw() -> None:
    """A block that shrinks by less than a thirty-second is not worth decoding."""
    mostly_noise = random.Random(SEED).randbytes(SLOT - SLOT // 40) + bytes(SLOT // 40)
    assert Coding("zstd").write([mostly_noise]) == Coding("raw").write([mostly_noise])


@pytest.mark.parametrize(
    ("unit", "size", "is_encoded"),
    [(1, 31 * 4096, True), (1, 31 * 4096 + 1, False), (4096, 30 * 4096 + 1, True), (4096, 31 * 4096 + 1, False)],
)
def test_a_thirty_second_is_worth_decoding(unit: int, size: int, is_encoded: bool, touchy: type[Touchy]) -> None:
    """A block of 32 pages is stored encoded if that saves a page, after padding."""
    touchy.encoded_bytes = size
    (record,) = Coding([TOUCHY], unit=unit).write([bytes(32 * 4096)])
    assert (decode_header(record).codec_chain != 0) is is_encoded


@pytest.mark.parametrize("slot", [SLOT, SLOT - 100])
def test_payloads_for_direct_io_end_with_a_page(slot: int) -> None:
    """With page-sized headers, an encoded payload is padded to whole pages with zeros, but never beyond its block."""
    block = numbers(slot // 2) + bytes(slot - slot // 2)
    coding = Coding("byteplane+zstd:1", header_bytes=4096, unit=4096)
    (record,) = coding.write([block])
    stored = decode_header(record).stored_bytes
    assert 0 < stored < 4096 and len(record) == 2 * 4096
    assert record[4096 + stored :] == bytes(4096 - stored)
    assert coding.read([record], slot) == [block]
    assert coding.read([record[: 4096 + stored]], slot) == [block]
    assert coding.read([record[:-1] + b"\1"], slot) == ["length"]


def test_unknown_codecs_are_misses(caplog: pytest.LogCaptureFixture) -> None:
    """A chain with an unknown codec, or an invalid chain, is a miss with one warning per reason."""
    (record,) = Coding("zstd").write([numbers(SLOT, element_bytes=1)])
    coding = Coding("byteplane+zstd:1")
    for chain in (0xC8, 0xC803, 0x03_00, 0x7F, 0x01_00_00_00, 65):
        assert coding.read([forged(record, codec_chain=chain)], SLOT) == ["codec"], hex(chain)
    # Two of them lack the same codec.
    assert len(caplog.records) == 5


def test_without_the_package_blocks_are_misses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without zstandard installed its blocks are misses, with a warning that names the missing module."""
    (record,) = Coding("zstd").write([numbers(SLOT, element_bytes=1)])
    monkeypatch.delitem(sys.modules, "kvstore.codec.zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert Coding("raw").read([record], SLOT) == ["codec"]
    assert "no module 'zstandard'" in caplog.text


def test_a_package_without_multi_buffer_calls_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The build of zstandard for PyPy, which takes frames only one by one, writes and reads the same records."""
    blocks = [numbers(SLOT, seed, element_bytes=1) for seed in range(3)]
    records = Coding("zstd").write(blocks)
    monkeypatch.delitem(sys.modules, "kvstore.codec.zstd")
    monkeypatch.setitem(sys.modules, "zstandard", importlib.import_module("zstandard.backend_cffi"))
    assert Coding("zstd").write(blocks) == records
    assert Coding("zstd").read(records, SLOT) == blocks


def test_lengths_that_contradict_each_other_are_refused() -> None:
    """A stored length above the plain one, a plain one above the slot, and a raw payload too short are refused."""
    coding = Coding("byteplane+zstd:1")
    (record,) = coding.write([numbers(SLOT)])
    header = decode_header(record)
    cases = {
        "header": {"plain_bytes": header.stored_bytes - 1},
        "geometry": {"plain_bytes": 1 << 40},
        "encoding": {"plain_bytes": SLOT - 1},
    }
    for fault, change in cases.items():
        assert coding.read([forged(record, **change)], SLOT) == [fault], change
    (raw,) = coding.write([random.Random(SEED).randbytes(SLOT)])
    assert coding.read([forged(raw, plain_bytes=SLOT + 1, stored_bytes=SLOT)], 2 * SLOT) == ["header"]


def test_a_bad_payload_spoils_no_other() -> None:
    """In a batch of blocks with several chains, those with an invalid payload for their codec are misses."""
    blocks = [numbers(SLOT, seed) for seed in range(8)]
    records = []
    for place, config in enumerate(["zstd", "byteplane+zstd:1"] * 4):
        records.append(Coding(config).write(blocks[: place + 1])[place])
    for bad in (0, 3, 5):
        record = bytearray(records[bad])
        record[HEADER_BYTES + 4 : HEADER_BYTES + 40] = b"\xff" * 36
        records[bad] = forged(bytes(record))
    found = Coding("raw").read(records, SLOT)
    # Numbers without planes do not compress: these records are raw, and their damaged bytes have a correct checksum.
    assert [found[place] for place in (1, 2, 4, 6, 7)] == [blocks[place] for place in (1, 2, 4, 6, 7)]
    assert found[3] == found[5] == "encoding"


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("raw", []),
        ("byteplane+zstd:1", ["byteplane", "zstd"]),
        (["byteplane", {"zstd": {"level": 3}}], ["byteplane", "zstd"]),
        (["byteplane+zstd:-5"], ["byteplane", "zstd"]),
        ("my_package.codecs:Mine", ["my_package.codecs:Mine"]),
        ("my_package.codecs:Mine+zstd", ["my_package.codecs:Mine", "zstd"]),
    ],
    ids=str,
)
def test_options_are_read(value: Any, names: list[str]) -> None:
    """Text and lists name the same steps."""
    assert [spec.name for spec in parse_chain(value)] == names


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", "names"),
        ("zstd:20", "-5 to 19"),
        ("zstd:-6", "-5 to 19"),
        ("zstd+", "names"),
        ("zsdt", "Did you mean 'zstd'"),
        ([], "at least one"),
        ("raw+zstd", "'raw' means none"),
        ([{"zstd": {}, "byteplane": {}}], "object such as"),
        ([{"zstd": {"levle": 3}}], "Did you mean 'level'"),
        ([{"zstd": {"level": "high"}}], "whole number"),
        ("byteplane:3", "element_bytes"),
        ("zstd+zstd+zstd+zstd+zstd", "at most 4"),
        ("zstd+auto", "'auto' first"),
        ("auto:1", "without an argument"),
        ("auto+zstd", "only a seal"),
        ("tests.codec.third_party:Trespasser", "Expected 128 to 255"),
        ("tests.codec.third_party:Inverted:3", "takes no value"),
        ("tests.codec.coding:Coding", "not a codec"),
    ],
    ids=str,
)
def test_options_are_refused(value: Any, words: str) -> None:
    """An unusable option is refused at start, with a remedy."""
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        TierCodecs(value, NAMESPACE)


INVERTED, MIRRORED, TOUCHY = (f"tests.codec.third_party:{name}" for name in ("Inverted", "Mirrored", "Touchy"))


def test_two_codecs_with_one_id_are_refused() -> None:
    """Two codecs of one chain with the same id are an error at start that names both."""
    words = f"Codecs '{INVERTED}' and '{MIRRORED}' have the same wire id 200, .* Give one of them another id"
    with pytest.raises(ConfigError, match=words):
        TierCodecs([INVERTED, MIRRORED], NAMESPACE)


def test_the_class_of_a_codec_by_others_is_in_the_namespace() -> None:
    """Engines with different codecs of the same id share no block; kvstore's own codecs do not change the namespace."""
    plain = [namespace_with_codecs(NAMESPACE, config) for config in ("raw", "auto", "byteplane+zstd:3", ["zstd"])]
    assert plain == [NAMESPACE] * 4
    theirs = [namespace_with_codecs(NAMESPACE, [name, "zstd"]) for name in (INVERTED, MIRRORED)]
    assert len({NAMESPACE, *theirs}) == 3
    assert theirs[0] == NAMESPACE.with_fields(codecs={"200": INVERTED})
    assert theirs[0] == namespace_with_codecs(NAMESPACE, ["byteplane", {INVERTED: {}}])


def test_two_names_of_one_codec_are_one_namespace() -> None:
    """Only the class counts, however an option names it."""
    assert namespace_with_codecs(NAMESPACE, f"{__name__}:Touchy") == namespace_with_codecs(NAMESPACE, [TOUCHY])


def test_a_codec_without_an_id_is_refused() -> None:
    """Its blocks could not be identified."""
    with pytest.raises(ConfigError, match="no wire ids"):
        namespace_with_codecs(NAMESPACE, ["tests.codec.third_party:Unnumbered"])


@pytest.mark.parametrize("defect", ["raises", "memory", "counts", "sizes"])
def test_a_codec_with_a_defect_costs_only_its_own_blocks(
    defect: str, touchy: type[Touchy], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A payload that the codec fails on, or lacks memory for, is a miss and is not quarantined; others are read."""
    monkeypatch.setattr("kvstore.codec.chain._warned", set())
    blocks = [bytes([place]) * SLOT for place in range(4)]
    records = Coding([TOUCHY]).write(blocks)
    assert all(len(record) < SLOT for record in records)
    touchy.defect = defect
    records[2] = forged(records[2][:HEADER_BYTES] + bytes([Touchy.HATED]) + records[2][HEADER_BYTES + 1 :])
    found = Coding([TOUCHY]).read(records, SLOT)
    assert found == [blocks[0], blocks[1], "codec", blocks[3]]
    assert [TOUCHY in record.message for record in caplog.records].count(True) == 1


@pytest.mark.parametrize("defect", ["raises", "counts", "sizes"])
def test_blocks_that_a_codec_fails_to_encode_are_stored_raw(defect: str, touchy: type[Touchy]) -> None:
    """The blocks are stored unencoded, and restored."""
    blocks = [bytes([place]) * SLOT for place in (1, Touchy.HATED)]
    touchy.defect = defect
    records = Coding([TOUCHY]).write(blocks)
    assert [decode_header(record).codec_chain for record in records] == [0, 0]
    assert Coding("raw").read(records, SLOT) == blocks


def test_a_payload_that_a_third_party_codec_cannot_decode_is_no_damage(touchy: type[Touchy]) -> None:
    """It may be a good block of another codec with the same id: it is a miss and is not quarantined."""
    blocks = [bytes([place]) * SLOT for place in range(2)]
    records = Coding([TOUCHY]).write(blocks)
    touchy.defect = "fails"
    assert Coding([TOUCHY]).read(records, SLOT) == ["codec", "codec"]


def test_numbers_of_chains() -> None:
    """A chain's number has the first step in the lowest byte; a gap makes the chain invalid."""
    assert pack_chain([1, 3, 64]) == 0x40_03_01
    for wire_ids in ((), (3,), (1, 3), (1, 3, 200, 64)):
        assert unpack_chain(pack_chain(wire_ids)) == wire_ids
    assert unpack_chain(0x03_00) is unpack_chain(0xFF_00_00_01) is None


def test_auto_is_byteplane_and_zstd() -> None:
    """``auto`` selects its codecs, and its options are kept for the selection."""
    chain = build_chain([{AUTO: {"objective": "bytes"}}], TierCodecs("raw", NAMESPACE)._context, CODECS.find)
    assert ([codec.name for codec in chain.codecs], chain.auto) == (["byteplane", "zstd"], {"objective": "bytes"})
    with pytest.raises(ConfigError, match="objective"):
        TierCodecs([{AUTO: {"objective": "speed"}}], NAMESPACE)


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, 1),
        ({"dtype": "bfloat16"}, 2),
        ({"dtype": "torch.float16"}, 2),
        ({"dtype": "float32"}, 4),
        ({"dtype": "bfloat16", "kv_dtype": "fp8"}, 1),
        ({"dtype": "bfloat16", "kv_dtype": "auto"}, 2),
        ({"model": {"dtype": "bfloat16"}, "engine_config": {"kv_dtype": "auto"}}, 2),
        ({"model": {"dtype": "bfloat16"}, "engine_config": {"kv_dtype": "fp8_e4m3"}}, 1),
        ({"model": {"dtype": "float32"}, "engine_config": None}, 4),
        ({"dtype": 7}, 1),
    ],
    ids=str,
)
def test_length_of_elements(fields: dict[str, Any], size: int) -> None:
    """The namespace's KV cache type, or otherwise the model's type, gives the length of an element."""
    assert element_bytes_of(fields) == size
    codecs = TierCodecs("byteplane+zstd", Namespace(fields)).chain.codecs
    assert [codec.wire_id for codec in codecs] == {1: [3], 2: [1, 3], 4: [2, 3]}[size]


def test_planes_have_the_order_of_the_format() -> None:
    """The first bytes of all elements, then the second ones, …, then the remaining bytes."""
    (two, four) = (Coding(["byteplane"], namespace=Namespace({"dtype": kind})) for kind in ("bfloat16", "float32"))
    source, out = memoryview(bytes(range(11))), memoryview(bytearray(11))
    for coding, planes in ((two, [0, 2, 4, 6, 8, 1, 3, 5, 7, 9, 10]), (four, [0, 4, 1, 5, 2, 6, 3, 7, 8, 9, 10])):
        codec = coding.codecs.chain.codecs[0]
        assert isinstance(codec, Codec)
        codec.encode([source], [out])
        assert list(out) == planes
