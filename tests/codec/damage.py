"""Ways to damage, misplace and forge records; each counts the expected faults and the results."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable

from kvstore.codec.record import HEADER_BYTES
from tests.codec.records import NAMESPACE, Record, codec, random_payload

Damage = Callable[[random.Random, int], Counter[tuple[str, str]]]
"""Makes that many bad records and counts pairs of expected fault and result."""

PAGE = 4096


def header_bits_on_disk(rng: random.Random, count: int) -> Counter[tuple[str, str]]:
    """Every single bit of a padded header, padding included."""
    record = Record.make(PAGE, random_payload(rng, 5000))
    return _flip_bits(record, range(count), "header")


def header_bits_bare(rng: random.Random, count: int) -> Counter[tuple[str, str]]:
    """Every single bit of a bare header."""
    record = Record.make(HEADER_BYTES, random_payload(rng, PAGE))
    return _flip_bits(record, range(count), "header")


def payload_bits(rng: random.Random, count: int) -> Counter[tuple[str, str]]:
    """One bit anywhere in the payload."""
    record = Record.make(PAGE, random_payload(rng, 70_000))
    bits = (rng.randrange(8 * PAGE, 8 * record.size_bytes) for _ in range(count))
    return _flip_bits(record, bits, "payload")


def bursts(rng: random.Random, count: int) -> Counter[tuple[str, str]]:
    """From 1 to 64 bytes in a row replaced, anywhere in the record."""
    record = Record.make(HEADER_BYTES, random_payload(rng, PAGE))
    intact = bytes(record.data)
    seen: Counter[tuple[str, str]] = Counter()
    for _ in range(count):
        start = rng.randrange(record.size_bytes)
        end = min(record.size_bytes, start + rng.randint(1, 64))
        record.data[start:end] = bytes(byte ^ rng.randint(1, 255) for byte in intact[start:end])
        seen["header" if start < HEADER_BYTES else "payload", record.fault()] += 1
        record.data[start:end] = intact[start:end]
    return seen


def truncations(rng: random.Random, count: int) -> Counter[tuple[str, str]]:
    """Every length that is too short, over the buffers' content from an earlier read."""
    record = Record.make(PAGE, random_payload(rng, count - PAGE))
    intact = bytes(record.data)
    record.data[:] = rng.randbytes(len(intact))
    seen: Counter[tuple[str, str]] = Counter()
    for filled in range(count):
        seen["length", record.fault(filled)] += 1
        # The next byte arrives.
        record.data[filled] = intact[filled]
    assert record.fault() == "ok"
    return seen


def extensions(rng: random.Random, count: int) -> Counter[tuple[str, str]]:
    """Surplus bytes after the payload: to an unaligned length, or bytes that are not padding."""
    record = Record.make(PAGE, random_payload(rng, 5000), slot_bytes=PAGE * 4)
    padded = PAGE * 3
    assert record.fault(padded) == "ok"
    seen: Counter[tuple[str, str]] = Counter()
    for i in range(count):
        if i % 2:
            filled = rng.choice([n for n in (rng.randint(record.size_bytes + 1, 5 * PAGE), padded + 1) if n != padded])
            seen["length", record.fault(filled)] += 1
        else:
            place = rng.randrange(record.size_bytes, padded)
            record.data[place] = rng.randint(1, 255)
            seen["length", record.fault(padded)] += 1
            record.data[place] = 0
    return seen


def zeroed_pages(rng: random.Random, count: int) -> Counter[tuple[str, str]]:
    """One page of the record never reached the medium, or was discarded."""
    seen: Counter[tuple[str, str]] = Counter()
    pages = 5
    for _ in range(count // pages):
        record = Record.make(PAGE, random_payload(rng, (pages - 1) * PAGE), rng.randbytes(32))
        for page in range(pages):
            kept = bytes(record.data[page * PAGE : (page + 1) * PAGE])
            record.data[page * PAGE : (page + 1) * PAGE] = bytes(PAGE)
            seen["payload" if page else "header", record.fault()] += 1
            record.data[page * PAGE : (page + 1) * PAGE] = kept
    return seen


def swapped_pages(rng: random.Random, count: int) -> Counter[tuple[str, str]]:
    """A page of a record replaced by one from an older version of the same key, or from another place of the record."""
    seen: Counter[tuple[str, str]] = Counter()
    for i in range(count):
        record = Record.make(PAGE, random_payload(rng, 2 * PAGE))
        first, second = slice(PAGE, 2 * PAGE), slice(2 * PAGE, 3 * PAGE)
        if i % 2:
            record.data[second] = random_payload(rng, PAGE)
        else:
            record.data[first], record.data[second] = record.data[second], record.data[first]
        seen["payload", record.fault()] += 1
    return seen


def misdirected(rng: random.Random, count: int) -> Counter[tuple[str, str]]:
    """Each of many records at the place of each other one."""
    side = int(count**0.5) + 1
    records = [Record.make(HEADER_BYTES, random_payload(rng, PAGE), rng.randbytes(32)) for _ in range(side)]
    pairs = [(here, there) for here in records for there in records if here is not there]
    return Counter(("key", there.fault(key=here.key)) for here, there in pairs[:count])


def foreign_namespaces(rng: random.Random, count: int) -> Counter[tuple[str, str]]:
    """Intact records of the same key in other namespaces."""
    record = Record.make(HEADER_BYTES, random_payload(rng, PAGE))
    seen: Counter[tuple[str, str]] = Counter()
    for salt in range(count):
        codec(HEADER_BYTES, NAMESPACE.with_fields(salt=salt)).encode_header(record.header, record.key, record.slot)
        seen["namespace", record.fault()] += 1
    return seen


def near_identities(rng: random.Random, count: int) -> Counter[tuple[str, str]]:
    """Intact records whose namespace or key differs in one bit of its digest."""
    record = Record.make(HEADER_BYTES, random_payload(rng, PAGE))
    intact = bytes(record.data)
    seen: Counter[tuple[str, str]] = Counter()
    for bit in range(count):
        place = 32 + bit // 8
        record.forge(place, "B", intact[place] ^ 1 << bit % 8)
        seen["namespace" if place < 64 else "key", record.fault()] += 1
        record.data[:] = intact
    return seen


def stale_versions(rng: random.Random, count: int) -> Counter[tuple[str, str]]:
    """Intact records of every other version, and with undefined flags."""
    record = Record.make(HEADER_BYTES, random_payload(rng, PAGE))
    seen: Counter[tuple[str, str]] = Counter()
    for version in rng.sample([v for v in range(65536) if v != 1], count - 16):
        record.forge(8, "H", version)
        seen["version", record.fault()] += 1
    record.forge(8, "H", 1)
    for bit in range(16):
        record.forge(10, "H", 1 << bit)
        seen["version", record.fault()] += 1
    return seen


KINDS: list[tuple[Damage, int]] = [
    (header_bits_on_disk, 8 * PAGE),
    (header_bits_bare, 8 * HEADER_BYTES),
    (payload_bits, 100_000),
    (bursts, 60_000),
    (truncations, 12_000),
    (extensions, 4_000),
    (zeroed_pages, 2_000),
    (swapped_pages, 1_000),
    (misdirected, 9_900),
    (foreign_namespaces, 2_000),
    (near_identities, 8 * 64),
    (stale_versions, 5_000),
]


def _flip_bits(record: Record, bits: Iterable[int], expected: str) -> Counter[tuple[str, str]]:
    assert record.fault() == "ok"
    seen: Counter[tuple[str, str]] = Counter()
    for bit in bits:
        record.data[bit // 8] ^= 1 << bit % 8
        seen[expected, record.fault()] += 1
        record.data[bit // 8] ^= 1 << bit % 8
    return seen
