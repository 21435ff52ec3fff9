"""Damaged and forged records of encoded blocks: a miss or the right bytes, whatever the header states."""

from __future__ import annotations

import random
import struct
import threading
from typing import Any

import pytest

from kvstore.codec.checksum import header_checksum
from kvstore.codec.record import HEADER_BYTES, decode_header
from kvstore.testing.codec_tests import memory_rise
from tests.codec.coding import Coding, numbers
from tests.codec.records import SEED, forged

SLOT = 2048
CONFIGS: list[Any] = ["zstd", "byteplane+zstd:1", ["tests.codec.third_party:Inverted", "byteplane", "zstd:-5"]]
MUTATIONS = 60_000
BATCH = 50


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_damaged_record_is_a_miss(config: Any) -> None:
    """Bits flipped, bytes replaced, truncated, inserted or appended: never a block, right or wrong."""
    rng = random.Random(SEED)
    coding = Coding(config)
    blocks = [numbers(SLOT // 2, seed) + bytes(SLOT // 2) for seed in range(BATCH)]
    records = coding.write(blocks)
    assert all(len(record) < HEADER_BYTES + SLOT - 500 for record in records)
    assert coding.read(records, SLOT) == blocks
    for _ in range(MUTATIONS // BATCH):
        found = coding.read([mutated(rng, record) for record in records], SLOT)
        assert all(isinstance(answer, str) for answer in found), f"seed {SEED}: a damaged record was taken for good"


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_header_that_lies_is_a_miss(config: Any) -> None:
    """Each header bit of an encoded record, with a correct checksum: a miss, or the block if the bit is irrelevant."""
    coding = Coding(config)
    block = numbers(SLOT // 2) + bytes(SLOT // 2)
    (record,) = coding.write([block])
    for bit in range(8 * (HEADER_BYTES - 8)):
        data = bytearray(record)
        data[bit // 8] ^= 1 << bit % 8
        struct.pack_into("<Q", data, HEADER_BYTES - 8, header_checksum(bytes(data[: HEADER_BYTES - 8])))
        (found,) = coding.read([bytes(data)], SLOT)
        # The writer, its clock, and the MAC of a record without a key.
        if 96 <= bit // 8 < 120 or 144 <= bit // 8 < 176:
            assert found == block, f"bit {bit}: {found!r}"
        else:
            assert isinstance(found, str), f"bit {bit} was believed"


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_forged_payloads_stay_in_their_slots(config: Any) -> None:
    """A changed payload with a correct checksum is a miss or fills its own slot, and no other."""
    rng = random.Random(SEED)
    coding = Coding(config)
    blocks = [numbers(SLOT // 2, seed) + bytes(SLOT // 2) for seed in range(BATCH)]
    records = coding.write(blocks)
    seen = {"miss": 0, "block": 0}
    for turn in range(200):
        hostile = [forged(bad_payload(rng, record)) for record in records]
        good = turn % BATCH
        hostile[good] = records[good]
        found = coding.read(hostile, SLOT)
        assert found[good] == blocks[good], f"seed {SEED}: a bad payload spoiled a good one"
        for answer in found:
            seen["miss" if isinstance(answer, str) else "block"] += 1
            assert isinstance(answer, str) or len(answer) == SLOT
    assert min(seen.values()) > 100, seen


def test_a_record_that_claims_a_gibibyte_costs_nothing() -> None:
    """A record of 32 KiB whose header, or whose frame, claims 1 GiB is a miss, and the process does not grow."""
    slot = 32 << 10
    coding = Coding("zstd")
    (record,) = coding.write([numbers(slot // 2, element_bytes=1) + bytes(slot // 2)])
    frame = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 30)
    lies = {
        "geometry": forged(record, plain_bytes=1 << 30),
        "encoding": forged(record[:HEADER_BYTES] + frame + record[HEADER_BYTES + len(frame) :]),
    }
    coding.read([record], slot)
    for fault, lie in lies.items():
        with memory_rise() as rise:
            assert coding.read([lie], slot) == [fault]
        assert rise.bytes <= 16 << 20, f"{fault}: memory rose by {rise.bytes} bytes"


def test_payloads_that_change_while_they_are_decoded() -> None:
    """A forbidden write to a slot during decoding damages that block and no other."""
    rng = random.Random(SEED)
    coding = Coding("byteplane+zstd:1")
    size = 65_536
    blocks = [numbers(size, seed) for seed in range(16)]
    records = coding.write(blocks)
    headers = [decode_header(record) for record in records]
    slots = [memoryview(bytearray(size)) for _ in blocks]
    rows, spares = ([memoryview(bytearray(size)) for _ in blocks] for _ in range(2))
    ended = threading.Event()

    def scribble() -> None:
        while not ended.is_set():
            slot, header = rng.choice(list(zip(slots[1:], headers[1:], strict=True)))
            # Mostly in the bytes that contain lengths.
            place = rng.choice((rng.randrange(40), rng.randrange(header.stored_bytes)))
            slot[place : place + 2] = rng.randbytes(2)

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for _ in range(150):
            for slot, record, header in zip(slots, records, headers, strict=True):
                slot[: header.stored_bytes] = record[HEADER_BYTES:]
            errors = coding.codecs.decoder.decode(headers, slots, rows, spares)
            assert errors[0] is None and slots[0] == blocks[0]
    finally:
        ended.set()
        thread.join()


def mutated(rng: random.Random, record: bytes) -> bytes:
    """Return a record with a random change."""
    data = bytearray(record)
    kind, place = rng.randrange(4), rng.randrange(len(data))
    if kind == 0:
        data[place] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data[place : place + 4] = bytes(byte ^ rng.randrange(1, 256) for byte in data[place : place + 4])
    elif kind == 2:
        del data[place:]
    else:
        # Not zeros: zero padding after a payload is allowed.
        data += rng.randbytes(rng.randrange(1, 20)) + b"\1"
    return bytes(data)


def bad_payload(rng: random.Random, record: bytes) -> bytes:
    """Return a record with some bytes of its payload changed, and the same length."""
    data = bytearray(record)
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(HEADER_BYTES, len(data))] = rng.randrange(256)
    return bytes(data)
