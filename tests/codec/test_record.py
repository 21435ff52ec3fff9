"""The record codec: round trips, lengths, identity, misuse."""

from __future__ import annotations

import hashlib
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codec import RecordCodec, RecordFault, RecordHeader, decode_header
from kvstore.codec.record import HEADER_BYTES, MAGIC
from kvstore.errors import RecordError
from kvstore.namespace import FORMAT_VERSION, Namespace
from tests.codec.records import NAMESPACE, SEED, WRITER_ID, Record, codec, fixed_clock, random_payload

PAGE = 4096


@settings(max_examples=200)
@given(
    header_bytes=st.sampled_from([256, 512, 4096, 65536]),
    payload=st.binary(max_size=9000),
    key=st.binary(min_size=1, max_size=64),
    spare=st.integers(0, 9000),
    writer=st.binary(min_size=16, max_size=16),
    now=st.integers(0, 2**64 - 1),
)
def test_round_trip(header_bytes: int, payload: bytes, key: bytes, spare: int, writer: bytes, now: int) -> None:
    """An encoded record verifies, in a slot of any greater length, and the header contains the original fields."""
    made = RecordCodec(NAMESPACE, header_bytes=header_bytes, writer_id=writer, clock_ns=lambda: now)
    header, slot = bytearray(b"\xaa" * header_bytes), payload + b"\x55" * spare
    made.encode_header(memoryview(header), key, memoryview(payload))
    filled = header_bytes + len(payload)
    assert made.verify(key, memoryview(header), memoryview(slot), filled) == len(payload)
    found = decode_header(bytes(header))
    assert found == RecordHeader(
        version=FORMAT_VERSION,
        flags=0,
        header_bytes=header_bytes,
        plain_bytes=len(payload),
        stored_bytes=len(payload),
        namespace_digest=NAMESPACE.digest,
        key_digest=hashlib.sha256(key).digest(),
        writer_id=writer,
        created_ns=now,
        codec_chain=0,
        mac_key_id=0,
        payload_checksum=found.payload_checksum,
        mac=bytes(32),
    )
    assert header[HEADER_BYTES:] == bytes(header_bytes - HEADER_BYTES)


def test_every_buffer_shape_gives_the_same_header() -> None:
    """Bytes, floats, rows and columns are hashed and verified as their bytes."""
    array = np.random.default_rng(SEED).random((6, 1000), dtype=np.float32)
    forms = {
        "bytes": memoryview(array.tobytes()),
        "array": memoryview(array),
        "half words": memoryview(array.view(np.uint16)),
        "three axes": memoryview(array.reshape(2, 3, 1000)),
    }
    made = codec(PAGE)
    headers = {}
    for name, form in forms.items():
        header = memoryview(bytearray(PAGE))
        made.encode_header(header, b"key", form)
        headers[name] = bytes(header)
        assert made.verify(b"key", header, form, PAGE + array.nbytes) == array.nbytes, name
    assert len(set(headers.values())) == 1


@pytest.mark.parametrize("empty", [memoryview(b""), memoryview(np.empty((0, 4), np.float32))])
def test_empty_payload(empty: memoryview) -> None:
    """An empty payload is valid."""
    made, header = codec(256), memoryview(bytearray(256))
    made.encode_header(header, b"key", empty)
    assert made.verify(b"key", header, memoryview(b""), 256) == 0
    assert made.verify(b"key", header, memoryview(bytearray(10)), 256) == 0


@pytest.mark.parametrize("size", [1, 255, 4095, 4096, 4097, 5000, 8192])
@pytest.mark.parametrize("spare", [0, 1, 100, 5000])
def test_only_the_exact_and_the_padded_length_are_right(size: int, spare: int) -> None:
    """A record has the length in its header, or is padded with zeros to the alignment within the slot."""
    record = Record.make(PAGE, random_payload(random.Random(SEED), size), slot_bytes=size + spare)
    exact, room = PAGE + size, PAGE + size + spare
    right = {exact, min(-(-exact // PAGE) * PAGE, room)}
    for filled in range(room + 10):
        expected = "ok" if filled in right else "length"
        assert record.fault(filled) == expected, f"seed {SEED}: {filled} bytes of {exact}, room for {room}"


def test_alignment_can_be_other_than_the_header() -> None:
    """A medium with exact lengths accepts no padding; one with a coarser unit accepts more."""
    payload = random_payload(random.Random(SEED), 300)
    assert Record.make(256, payload, slot_bytes=PAGE, alignment=1).fault(256 + 512) == "length"
    assert Record.make(256, payload, slot_bytes=PAGE).fault(256 + 512) == "ok"
    assert Record.make(256, payload, slot_bytes=PAGE, alignment=PAGE).fault(PAGE) == "ok"
    assert Record.make(256, payload, slot_bytes=PAGE, alignment=PAGE).fault(256 + 512) == "length"


@pytest.mark.parametrize(
    ("offset", "layout", "value", "expected"),
    [
        (0, "8s", b"\x89kvstor\r", RecordFault.HEADER),
        (0, "8s", bytes(8), RecordFault.HEADER),
        (8, "H", 0, RecordFault.VERSION),
        (8, "H", FORMAT_VERSION + 1, RecordFault.VERSION),
        (10, "H", 1, RecordFault.VERSION),
        (12, "I", 256, RecordFault.GEOMETRY),
        (12, "I", 8192, RecordFault.GEOMETRY),
        (12, "I", 0, RecordFault.GEOMETRY),
        (16, "Q", 4999, RecordFault.HEADER),
        (24, "Q", 4999, RecordFault.HEADER),
        (32, "32s", Namespace({}).digest, RecordFault.NAMESPACE),
        (64, "32s", hashlib.sha256(b"kex").digest(), RecordFault.KEY),
        (120, "I", 1, RecordFault.CODEC),
        (124, "I", 1, RecordFault.CODEC),
        (128, "16s", bytes(16), RecordFault.PAYLOAD),
        (176, "72s", b"\0" * 71 + b"\1", RecordFault.HEADER),
    ],
)
def test_a_wrong_field_under_a_right_checksum(offset: int, layout: str, value: object, expected: RecordFault) -> None:
    """An intact header with a wrong field is refused for that field."""
    record = Record.make(PAGE, random_payload(random.Random(SEED), 5000))
    record.forge(offset, layout, value)
    assert record.fault() == expected


def test_a_longer_payload_than_the_slot_is_another_geometry() -> None:
    """An intact record that does not fit is a miss and not damage, however much of it was read."""
    long = Record.make(PAGE, random_payload(random.Random(SEED), 8192))
    for filled in (PAGE, PAGE + 5000):
        with pytest.raises(RecordError) as caught:
            long.codec.verify(long.key, long.header, long.slot[:5000], filled)
        assert caught.value.cause == RecordFault.GEOMETRY
        assert not RecordFault(caught.value.cause).is_damage


def test_foreign_record_is_reported_before_its_damage() -> None:
    """A broken record of another namespace or key is reported as foreign."""
    record = Record.make(256, random_payload(random.Random(SEED), PAGE))
    record.slot[0] ^= 1
    assert record.fault() == "payload"
    assert record.fault(key=b"another") == "key"
    record.forge(32, "32s", bytes(32))
    assert record.fault(key=b"another") == "namespace"
    assert record.fault(filled_bytes=300) == "namespace"


def test_which_faults_are_damage() -> None:
    """Only broken or misplaced records may be removed; a record that may be another writer's never."""
    damage = {fault for fault in RecordFault if fault.is_damage}
    broken = {RecordFault.HEADER, RecordFault.LENGTH, RecordFault.PAYLOAD, RecordFault.ENCODING}
    assert damage == {RecordFault.KEY, *broken}


def test_errors_have_the_cause_without_key_or_payload() -> None:
    """The text of a refusal is one clear sentence, without key or payload."""
    record = Record.make(256, b"secret payload", b"secret key")
    record.slot[0] ^= 1
    with pytest.raises(RecordError, match=r"checksum is wrong.*counts as a miss") as caught:
        record.codec.verify(record.key, record.header, record.slot, record.size_bytes)
    assert caught.value.cause == "payload"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 1, 255])
def test_inspecting_too_little(size: int) -> None:
    """A partial header is not a header."""
    with pytest.raises(RecordError) as caught:
        decode_header(MAGIC.ljust(size, b"\0")[:size])
    assert caught.value.cause == RecordFault.LENGTH


def test_inspecting_damage() -> None:
    """An inspection refuses the same headers as verification."""
    record = Record.make(256, b"payload")
    record.header[100] ^= 1
    with pytest.raises(RecordError) as caught:
        decode_header(record.header)
    assert caught.value.cause == RecordFault.HEADER


@pytest.mark.parametrize("header_bytes", [0, 128, 255, 257, 4095, 2 * 1024 * 1024, -256])
def test_bad_header_length_is_refused(header_bytes: int) -> None:
    """Header buffers are multiples of 256 bytes, up to 1 MiB."""
    with pytest.raises(ValueError, match="header_bytes"):
        RecordCodec(NAMESPACE, header_bytes=header_bytes)


def test_misuse_is_refused() -> None:
    """A writer id, an alignment or a buffer of another shape is a caller's error, not a miss."""
    with pytest.raises(ValueError, match="writer_id"):
        RecordCodec(NAMESPACE, header_bytes=256, writer_id=b"short")
    with pytest.raises(ValueError, match="alignment"):
        RecordCodec(NAMESPACE, header_bytes=256, alignment=0)
    made = codec(256)
    with pytest.raises(ValueError, match="header buffer"):
        made.encode_header(memoryview(bytearray(255)), b"key", memoryview(b""))
    with pytest.raises(ValueError, match="header buffer"):
        made.verify(b"key", memoryview(bytearray(4096)), memoryview(b""), 256)
    gaps = memoryview(np.zeros((4, 4), np.uint8)[:, ::2])
    with pytest.raises(ValueError, match="C-contiguous"):
        made.encode_header(memoryview(bytearray(256)), b"key", gaps)
    with pytest.raises(ValueError, match="C-contiguous"):
        made.verify(b"key", memoryview(bytearray(256)), memoryview(bytearray(8))[::2], 256)


def test_writers_differ_by_default() -> None:
    """Two codecs have two random writer ids, and verify each other's records."""
    payload, ids = memoryview(b"payload"), []
    header = memoryview(bytearray(256))
    for _ in range(2):
        RecordCodec(NAMESPACE, header_bytes=256).encode_header(header, b"key", payload)
        ids.append(decode_header(header).writer_id)
        assert codec(256).verify(b"key", header, payload, 256 + 7) == 7
    assert ids[0] != ids[1]
    assert WRITER_ID not in ids


def test_the_payload_is_not_written_to() -> None:
    """Encoding and verifying work on read-only payloads, and verifying on a read-only header."""
    made, header, payload = codec(256, NAMESPACE), bytearray(256), bytes(5000)
    made.encode_header(memoryview(header), b"key", memoryview(payload))
    assert made.verify(b"key", memoryview(bytes(header)), memoryview(payload), 5256) == 5000
    assert decode_header(header).created_ns == fixed_clock()


def test_threads_share_a_codec() -> None:
    """One codec makes and checks records on many threads at once."""
    made = codec(256)

    def work(number: int) -> bool:
        rng = random.Random(number)
        for _ in range(50):
            payload, header = memoryview(rng.randbytes(100_000)), memoryview(bytearray(256))
            made.encode_header(header, b"%d" % number, payload)
            if made.verify(b"%d" % number, header, payload, 100_256) != 100_000:
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
