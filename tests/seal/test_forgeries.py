"""Forgeries: a writer to the medium who knows the format but has no key cannot make a record that is accepted.

The forger corrects every checksum after each change, so that only the seal can detect the forgery.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.codec.checksum import header_checksum, payload_checksum
from kvstore.codec.coding import Encoder
from kvstore.codec.record import HEADER_BYTES, RecordCodec, RecordFault
from kvstore.errors import RecordError
from kvstore.namespace import Namespace
from kvstore.testing.seeds import fresh_seed
from kvstore.tiers.codecs import TierCodecs
from tests.seal.keyrings import document, write

SEED = fresh_seed()
SPACES = (Namespace({"dtype": "bfloat16", "of": 1}), Namespace({"dtype": "bfloat16", "of": 2}))
BLOCK_BYTES = 2048
FORGERIES = 5000
KEYS = [b"key %02d" % number * 4 for number in range(8)]


@dataclass
class Record:
    """A record on the medium."""

    key: bytes
    header: bytearray
    payload: bytes

    def copy(self) -> Record:
        """Return a copy to forge."""
        return Record(self.key, bytearray(self.header), self.payload)

    def seem_intact(self) -> Record:
        """Correct both checksums for the record's current bytes."""
        self.header[128:144] = payload_checksum(memoryview(self.payload))
        self.header[248:256] = struct.pack("<Q", header_checksum(bytes(self.header[:248])))
        return self


class Medium:
    """Records of two namespaces, two key ids and several writers, sealed by a tier's own code.

    Args:
        path: Path of the keyring.
        codec: ``"aead"`` or ``"mac"``.
        encoded: Whether there are codecs before the seal.
        accept_unsealed: Whether the reader accepts unsealed records.
    """

    def __init__(self, path: Path, codec: str, *, encoded: bool, accept_unsealed: bool = False) -> None:
        self.rng = random.Random(SEED)
        self.records: list[list[Record]] = [[], []]
        options = {"keys": {"file": str(path)}, "accept_unsealed": accept_unsealed}
        self.config = [*(["byteplane", "zstd:1"] if encoded else []), {codec: options}]
        for key_id in (1, 2):
            write(path, document(1, 2, current=key_id))
            for number, space in enumerate(SPACES):
                codecs = TierCodecs(self.config, space)
                encoder = Encoder(RecordCodec(space, header_bytes=HEADER_BYTES), codecs.chain)
                self.records[number] += self._write(encoder, KEYS[4 * (key_id - 1) :][:4])
        self.reader = RecordCodec(SPACES[0], header_bytes=HEADER_BYTES)
        self.codecs = TierCodecs(self.config, SPACES[0])

    def block(self, key: bytes) -> bytes:
        """Return the block of a key: numbers that compress."""
        return bytes(random.Random(key).choices(range(8), k=BLOCK_BYTES))

    def _write(self, encoder: Encoder, keys: list[bytes]) -> list[Record]:
        def buffers(size: int) -> list[memoryview]:
            return [memoryview(bytearray(size)) for _ in keys]

        headers, targets, spares = buffers(HEADER_BYTES), buffers(BLOCK_BYTES), buffers(BLOCK_BYTES)
        blocks = [memoryview(self.block(key)) for key in keys]
        made, _ = encoder.encode(keys, headers, blocks, targets, spares, encode=True)
        payloads = [bytes(payload) for payload in made if payload is not None]
        return [Record(*parts) for parts in zip(keys, map(bytearray, headers), payloads, strict=True)]

    def read(self, record: Record) -> bytes:
        """Return the block of an accepted record.

        Raises:
            RecordError: The record is refused.
        """
        slot = memoryview(bytearray(BLOCK_BYTES))
        room = min(len(record.payload), BLOCK_BYTES)
        slot[:room] = record.payload[:room]
        refusal = self.codecs.decoder.refusal
        header = memoryview(record.header)
        found = self.reader.check(record.key, header, slot, HEADER_BYTES + len(record.payload), refusal)
        if found.codec_chain:
            rows = [memoryview(bytearray(BLOCK_BYTES))], [memoryview(bytearray(BLOCK_BYTES))]
            (error,) = self.codecs.decoder.decode([found], [slot], *rows)
            if error is not None:
                raise error
        return bytes(slot)

    def two(self) -> tuple[Record, Record]:
        """Return two different records of the reader's namespace, to be forged."""
        one, two = self.rng.sample(self.records[0], 2)
        return one.copy(), two.copy()


def swapped_payload(medium: Medium) -> Record:
    """Another block's payload under this header."""
    one, two = medium.two()
    one.payload = two.payload
    one.header[16:32] = two.header[16:32]
    return one


def swapped_seal(medium: Medium) -> Record:
    """Another record's MAC field and payload under this header."""
    one, two = medium.two()
    one.payload, one.header[144:176], one.header[16:32] = two.payload, two.header[144:176], two.header[16:32]
    return one


def other_key(medium: Medium) -> Record:
    """An intact record under another key."""
    one, two = medium.two()
    two.header[64:96], two.key = one.header[64:96], one.key
    return two


def other_namespace(medium: Medium) -> Record:
    """A record of the other namespace, with our namespace in its header."""
    foreign = medium.rng.choice(medium.records[1]).copy()
    foreign.header[32:64] = SPACES[0].digest
    return foreign


def other_key_id(medium: Medium) -> Record:
    """A record that names the other key of the keyring, or an unknown one."""
    one, _ = medium.two()
    given = struct.unpack_from("<I", one.header, 124)[0]
    struct.pack_into("<I", one.header, 124, medium.rng.choice([3 - given, 3, 0xFFFFFFFF]))
    return one


def other_writer(medium: Medium) -> Record:
    """A record with another record's writer, or none."""
    one, two = medium.two()
    one.header[96:112] = two.header[96:112] if two.header[96:112] != one.header[96:112] else bytes(16)
    return one


def flipped_header(medium: Medium) -> Record:
    """One to three bits of the header flipped."""
    one, _ = medium.two()
    # The checksums are excluded, as they are corrected afterwards.
    places = [place for place in range(248) if not 128 <= place < 144]
    for place in medium.rng.sample(places, medium.rng.randint(1, 3)):
        one.header[place] ^= 1 << medium.rng.randrange(8)
    return one


def flipped_payload(medium: Medium) -> Record:
    """One to three bits of the payload flipped."""
    one, _ = medium.two()
    payload = bytearray(one.payload)
    for place in medium.rng.sample(range(len(payload)), medium.rng.randint(1, 3)):
        payload[place] ^= 1 << medium.rng.randrange(8)
    one.payload = bytes(payload)
    return one


def cut_payload(medium: Medium) -> Record:
    """A shortened payload with the matching length in the header."""
    one, _ = medium.two()
    one.payload = one.payload[: -medium.rng.randint(1, 64)]
    struct.pack_into("<Q", one.header, 24, len(one.payload))
    return one


def made_up(medium: Medium) -> Record:
    """A payload and a MAC field made up by the forger."""
    one, _ = medium.two()
    one.payload = medium.rng.randbytes(len(one.payload))
    one.header[144:172] = medium.rng.randbytes(28)
    return one


def stripped(medium: Medium) -> Record:
    """A block of the forger's choice, without any seal."""
    one, _ = medium.two()
    one.payload = medium.rng.randbytes(BLOCK_BYTES)
    struct.pack_into("<QQ", one.header, 16, BLOCK_BYTES, BLOCK_BYTES)
    one.header[120:128] = bytes(8)
    one.header[144:176] = bytes(32)
    return one


def half_stripped(medium: Medium) -> Record:
    """A record without its key id, or without the seal in its chain."""
    one, _ = medium.two()
    chain = bytearray(one.header[120:124])
    if medium.rng.random() < 0.5:
        one.header[124:128] = bytes(4)
    else:
        chain[len(bytes(chain).rstrip(b"\0")) - 1] = 0
        one.header[120:124] = chain
    return one


def other_seal(medium: Medium) -> Record:
    """A record of one seal presented as one of the other."""
    one, _ = medium.two()
    place = 120 + len(bytes(one.header[120:124]).rstrip(b"\0")) - 1
    one.header[place] ^= 64 ^ 65
    return one


FORGERS: list[Callable[[Medium], Record]] = [
    swapped_payload, swapped_seal, other_key, other_namespace, other_key_id, other_writer, flipped_header,
    flipped_payload, cut_payload, made_up, stripped, half_stripped, other_seal,
]  # fmt: skip


@pytest.mark.parametrize("encoded", [False, True], ids=["plain", "encoded"])
@pytest.mark.parametrize("codec", ["aead", "mac"])
def test_every_forgery_is_rejected(tmp_path: Path, codec: str, encoded: bool) -> None:
    """None of 5,000 forgeries of thirteen kinds is accepted, and those that only a seal can find are found by it."""
    medium = Medium(tmp_path / "keys", codec, encoded=encoded)
    for record in medium.records[0]:
        assert medium.read(record.copy()) == medium.block(record.key)
    causes: dict[str, Counter[str]] = {forger.__name__: Counter() for forger in FORGERS}
    for number in range(FORGERIES):
        forger = FORGERS[number % len(FORGERS)]
        forged = forger(medium).seem_intact()
        try:
            medium.read(forged)
        except RecordError as error:
            causes[forger.__name__][error.cause] += 1
            continue
        pytest.fail(f"forgery {number} ({forger.__name__}) was believed; seed {SEED}")
    assert sum(sum(counter.values()) for counter in causes.values()) == FORGERIES
    # If they were refused for another reason, the test would not cover the seal.
    for name in ("swapped_payload", "swapped_seal", "other_key", "other_namespace", "flipped_payload", "made_up"):
        assert set(causes[name]) == {RecordFault.SEAL.value}, (name, causes[name])
    assert set(causes["other_key_id"]) == {RecordFault.SEAL.value, RecordFault.CODEC.value}
    # One in nine on average: 42.
    assert causes["flipped_header"][RecordFault.SEAL.value] > 10, causes["flipped_header"]
    assert set(causes["stripped"]) == {RecordFault.CODEC.value}


def test_unsealed_reader_accepts_the_same_forgeries(tmp_path: Path) -> None:
    """A reader that accepts unsealed records accepts the same forgeries: only the seal stops the forger."""
    medium = Medium(tmp_path / "keys", "aead", encoded=False, accept_unsealed=True)
    forged = stripped(medium).seem_intact()
    assert medium.read(forged) == forged.payload
