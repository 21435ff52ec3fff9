"""Golden files: a record of every codec, made once with its version, stays readable for ever.

After a new codec or a new meaning of one (which needs a new wire id): add a case, run ``python -m
tests.codec.test_golden`` for its file, and add its digest here. Existing files never change.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvstore.codec.record import decode_header
from kvstore.namespace import Namespace
from tests.codec.coding import Coding

HERE = Path(__file__).parent / "golden"
SLOT = 1003


@dataclass(frozen=True)
class Case:
    """One golden record."""

    name: str  # Name of its file.
    codec: Any  # Codec that wrote it.
    dtype: str  # Type of its elements.
    chain: int  # Chain number in its header.
    sha256: str  # Digest of the file.

    @property
    def path(self) -> Path:
        """Return the path of the file."""
        return HERE / f"{self.name}.bin"

    def coding(self, codec: Any) -> Coding:
        """Return a coding that writes or reads it."""
        return Coding(codec, namespace=Namespace({"golden": self.name, "dtype": self.dtype}))


CASES = [
    Case("zstd-v1", "zstd:1", "fp8", 0x03, "8476d726abb6a3f435af4e3e86aea0e8325ed793ee0d950996b7a057847166f5"),
    Case(
        "byteplane2-zstd-v1",
        "byteplane+zstd:1",
        "bfloat16",
        0x03_01,
        "091cedef5a9e7ec1d6b59a9ede3b3f7c5a1d1dbb2452659a0881bf338dcebc26",
    ),
    Case(
        "byteplane4-zstd-v1",
        "byteplane+zstd:3",
        "float32",
        0x03_02,
        "979420fdd1f0be595d07f5d5b781db86c9493d0c18140448826ce4076b8773ae",
    ),
    Case(
        "byteplane-twice-zstd-v1",
        ["byteplane:2", "byteplane:4", "zstd:19"],
        "bfloat16",
        0x03_02_01,
        "7e800b95565440782f3b95a1d00bb127c45b65d765988d39ba806495b5d33c32",
    ),
]


def block() -> bytes:
    """Return the block of all golden records: a few similar elements, and three bytes that are not an element."""
    return bytes(63 - (i * i) % 3 if i % 4 >= 2 else (37 * (i // 4) + i % 2) % 16 for i in range(SLOT))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden_records_are_read(case: Case) -> None:
    """The record of each codec gives its block in a tier with another configuration."""
    data = case.path.read_bytes()
    assert hashlib.sha256(data).hexdigest() == case.sha256, "golden files never change"
    header = decode_header(data)
    assert (header.codec_chain, header.plain_bytes) == (case.chain, SLOT)
    assert header.stored_bytes < SLOT - SLOT // 32
    assert case.coding("raw").read([data], SLOT) == [block()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_new_records_equal_golden_ones_in_header_and_content(case: Case) -> None:
    """Today's record has the same chain and the same block; zstd may find a shorter frame some day."""
    (record,) = case.coding(case.codec).write([block()])
    header, golden = decode_header(record), decode_header(case.path.read_bytes())
    assert (header.codec_chain, header.plain_bytes) == (golden.codec_chain, golden.plain_bytes)
    assert case.coding("raw").read([record], SLOT) == [block()]


def test_every_golden_file_is_known() -> None:
    """Every golden file has a test."""
    assert {path.name for path in HERE.iterdir()} == {case.path.name for case in CASES}


if __name__ == "__main__":
    for made in CASES:
        if not made.path.exists():
            (content,) = made.coding(made.codec).write([block()])
            made.path.write_bytes(content)
        print(made.name, hashlib.sha256(made.path.read_bytes()).hexdigest())
