"""Checksums are those of the XXH3 specification, however a payload is split."""

from __future__ import annotations

import random

import pytest
import xxhash

from kvstore.codec.checksum import LONG_BYTES, PIECE_BYTES, bytes_view, header_checksum, payload_checksum
from tests.codec.records import SEED


def test_known_values() -> None:
    """The empty input has the digests that the XXH3 specification gives it."""
    assert payload_checksum(memoryview(b"")).hex() == "99aa06d3014798d86001c324468d497f"
    assert header_checksum(b"") == 0x2D06800538D394C2


@pytest.mark.parametrize(
    "size",
    [1, 100, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES, 1_000_003, LONG_BYTES - 1, LONG_BYTES],
)
def test_pieces_do_not_show(size: int) -> None:
    """A payload in pieces has the same checksum as in one piece."""
    data = random.Random(SEED).randbytes(size)
    assert payload_checksum(memoryview(data)) == xxhash.xxh3_128_digest(data), f"seed {SEED}"


def test_views_are_not_copies() -> None:
    """The flat view of a buffer is the buffer."""
    memory = bytearray(16)
    bytes_view(memoryview(memory).cast("I"))[5] = 7
    assert memory[5] == 7
