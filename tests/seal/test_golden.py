"""Golden files: records sealed once can be opened for ever, so no part of the key derivation can change.

After a new seal (which needs a new wire id): add a case, run ``python -m tests.seal.test_golden`` for its file, and add
its digest. Existing files never change: nonces are random, so they cannot be regenerated.
"""

from __future__ import annotations

import base64
import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvstore.codec.record import HEADER_BYTES, decode_header
from kvstore.namespace import Namespace
from tests.codec.coding import Coding
from tests.seal.keyrings import document, secret, write

HERE = Path(__file__).parent / "golden"
SLOT = 500
NAMESPACE = Namespace({"golden": "seal", "dtype": "bfloat16", "user_namespace": "acme"})
KEY_ID = 7


@dataclass(frozen=True)
class Case:
    """One golden record."""

    name: str  # Name of its file.
    before: tuple[str, ...]  # Codecs before the seal.
    seal: str  # Name of its seal.
    chain: int  # Chain number in its header.
    sha256: str  # Digest of the file.

    @property
    def path(self) -> Path:
        """Return the path of the file."""
        return HERE / f"{self.name}.bin"


CASES = [
    Case("aead-v1", (), "aead", 0x40, "93b5b0d5087f121753cbe0cb466aec893a7c8ed45be1aacd4b3fdab393338ba5"),
    Case("mac-v1", (), "mac", 0x41, "7bc7389cca175b59200aada6f6c325cbae45a7955b8065e363e9a9530d44a1cf"),
    Case(
        "byteplane2-zstd-aead-v1",
        ("byteplane", "zstd:1"),
        "aead",
        0x40_03_01,
        "fadace3abbf375f7921e4d176226e51c796e6309926e6be2ba23b12050f432ad",
    ),
]


def block() -> bytes:
    """Return the block of all golden records, which codecs shorten."""
    return bytes(i % 16 if i % 2 else 63 for i in range(SLOT))


def coding(seal: str, keyring: Path, *before: str) -> Coding:
    """Return a coding with a seal."""
    step: dict[str, Any] = {seal: {"keys": {"file": str(keyring)}, "keyed_names": True}}
    return Coding([*before, step], namespace=NAMESPACE)


def make_keyring(path: Path) -> Path:
    """Write the keyring of all golden records."""
    return write(path, document(3, KEY_ID, salts={"acme": secret(9)}, names=secret(8)))


@pytest.fixture
def keyring(tmp_path: Path) -> Iterator[Path]:
    """The keyring of all golden records, in a file."""
    yield make_keyring(tmp_path / "keys")


@pytest.mark.parametrize("reader", ["aead", "mac"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden_records_are_opened(case: Case, reader: str, keyring: Path) -> None:
    """The record of each seal gives its block in a tier with either seal over the same keyring."""
    data = case.path.read_bytes()
    assert hashlib.sha256(data).hexdigest() == case.sha256, "golden files never change"
    header = decode_header(data)
    assert (header.codec_chain, header.mac_key_id, header.plain_bytes) == (case.chain, KEY_ID, SLOT)
    assert coding(reader, keyring).read([data], SLOT) == [block()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden_records_are_encrypted_or_authenticated(case: Case) -> None:
    """An encrypted record shows no part of its block, and an authenticated one contains the block."""
    payload = case.path.read_bytes()[HEADER_BYTES:]
    assert (payload == block()) == (case.seal == "mac")


def test_the_keyed_name_of_a_key_never_changes(keyring: Path) -> None:
    """Engines of all releases find each other's blocks by this name."""
    seal = coding("aead", keyring).codecs.chain.seal
    assert seal is not None and seal.names is not None
    name = seal.names.name_of(b"a key of 24 bytes, thus.")
    assert base64.b64encode(name).decode() == "89NWrisba9ch/Us/UY9J7x2ESKMVncsb5ewW1y/vRARF2i8IBp+8vg=="
    assert seal.names.key_of(name) == b"a key of 24 bytes, thus."


def test_every_golden_file_is_known() -> None:
    """Every golden file has a test."""
    assert {path.name for path in HERE.iterdir()} == {case.path.name for case in CASES}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        keys = make_keyring(Path(folder) / "keys")
        for made in CASES:
            if not made.path.exists():
                (content,) = coding(made.seal, keys, *made.before).write([block()])
                made.path.write_bytes(content)
            print(json.dumps({made.name: hashlib.sha256(made.path.read_bytes()).hexdigest()}))
