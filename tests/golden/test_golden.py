"""Golden files: today's code writes the bytes that it always wrote, and reads them."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.backends.disk.layout import PAGE, ROW_BYTES, decode_head, decode_rows
from kvstore.backends.disk.note_file import read_notes
from kvstore.codec import RecordCodec, decode_header
from kvstore.namespace import FORMAT_VERSION, Namespace
from tests.golden.cases import (
    CASES,
    CREATED_NS,
    FIELDS,
    HERE,
    NOTES,
    NOTES_OWNER,
    TABLE_HEAD,
    TABLE_ROWS,
    WRITER_ID,
    Case,
    namespace_path,
    notes_file,
    notes_path,
    table_file,
    table_path,
)

FORMAT_PAGE = Path(__file__).parents[2] / "docs" / "format.md"
ADVICE = "The format has changed without a new FORMAT_VERSION. Raise it, then see tests/golden/cases.py."
SHA256 = {
    "notes-v1.bin": "1692086cc8211f0a5c1e078a97d81408662b26fb5550b663c8190aab1779ac28",
    "record-v1-bare.bin": "7c4ab73603569584404db48a18404522bf9e0c51a0fa6461b9647bd609062bb0",
    "record-v1-empty.bin": "0b46687054715a9acceae4df01e2c0b6c3bdb2e33a9b1a59d879e0e2df48ff49",
    "record-v1-disk.bin": "e3baa3a985d2a5a48b97be52375399eb178cbcf331f3fc3367eb26615da780b1",
    "record-v1-pieces.bin": "cb1b6ef4c263e573b60da5c4db8dbd9a5696d0abab3d90cb972c0a32dabec9fd",
    "table-v3.bin": "48a9252135fec4472e83959ae5e93a21798c9aa4f8489f87900deb171aeabd9b",
    "namespace-v1.json": "a3bd4f2d04c6413dc341fe6ecd0bebc42a5904f7effc40fea79d24475d84e7a3",
}
"""Digests of all golden files ever made, so that none is quietly replaced."""

ROW = re.compile(r"^\| (\d+) \| (\d+) \| (\w+) \| `(\w+)` \|", re.MULTILINE)


def names(case: Case) -> str:
    """Name a case in the test's id."""
    return case.name


@pytest.mark.parametrize("name", sorted(SHA256))
def test_golden_files_never_change(name: str) -> None:
    """Every file is the one that was made with its version."""
    assert hashlib.sha256((HERE / name).read_bytes()).hexdigest() == SHA256[name]


def test_every_golden_file_is_known() -> None:
    """No golden file is left out of the digests above."""
    assert {path.name for pattern in ("*.bin", "*.json") for path in HERE.glob(pattern)} == set(SHA256)


@pytest.mark.parametrize("case", CASES, ids=names)
def test_the_encoder_makes_the_golden_bytes(case: Case) -> None:
    """A record made today is the golden file of today's version, byte by byte."""
    assert case.path().exists(), ADVICE
    assert case.record() == case.path().read_bytes(), ADVICE


@pytest.mark.parametrize("case", CASES, ids=names)
def test_golden_records_are_read(case: Case) -> None:
    """The golden record verifies, and its header describes its content."""
    data = bytearray(case.path().read_bytes())
    view = memoryview(data)
    codec = RecordCodec(Namespace(FIELDS), header_bytes=case.header_bytes)
    size = codec.verify(case.key, view[: case.header_bytes], view[case.header_bytes :], len(data))
    assert data[case.header_bytes :][:size] == case.payload
    header = decode_header(data)
    assert (header.version, header.writer_id, header.created_ns) == (FORMAT_VERSION, WRITER_ID, CREATED_NS)
    assert header.stored_bytes == len(case.payload)


def test_the_namespace_is_the_golden_one() -> None:
    """The same fields give the digest that they always gave, also in another order."""
    golden = json.loads(namespace_path().read_text())
    assert Namespace(FIELDS).document() == golden, ADVICE
    assert Namespace(dict(reversed(FIELDS.items()))).hex == golden["digest"], ADVICE


@pytest.mark.parametrize("case", CASES, ids=names)
def test_the_page_describes_the_golden_bytes(case: Case) -> None:
    """The table in docs/format.md covers the header without a gap, and its fields are those of the decoder."""
    header = case.path().read_bytes()[:256]
    fields: dict[str, Any] = {}
    end = 0
    for offset, size, kind, name in ROW.findall(FORMAT_PAGE.read_text()):
        assert int(offset) == end, f"{name} starts at {offset}, the one before it ends at {end}"
        end += int(size)
        piece = header[int(offset) : end]
        formats = {"u16": "<H", "u32": "<I", "u64": "<Q"}
        fields[name] = struct.unpack(formats[kind], piece)[0] if kind in formats else piece
    assert end == 256
    decoded = decode_header(header)
    for name in decoded.__slots__:
        assert fields[name] == getattr(decoded, name), name
    assert fields["magic"] == b"\x89kvstor\n"
    assert fields["reserved"] == bytes(72)


def notes_in(content: bytes | bytearray, owner: int) -> list[tuple[int, dict[bytes, bytes]]]:
    """Return the frames of notes in a file of this content."""
    return list(read_notes(lambda at, size: memoryview(content)[at : at + size], owner))


def test_notes_are_made_and_read() -> None:
    """Both frames; damage anywhere ends the file before its frame."""
    data = notes_path().read_bytes()
    assert notes_file() == data, ADVICE
    frames = notes_in(data, NOTES_OWNER)
    assert [notes for _, notes in frames] == [dict(NOTES[:2]), dict(NOTES[2:])]
    assert frames[-1][0] == len(data)
    assert notes_in(data, NOTES_OWNER + 1) == [], "another owner's"
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1
        intact = 0 if place < frames[0][0] else 1
        assert notes_in(damaged, NOTES_OWNER) == frames[:intact]
    for length in range(len(data)):
        intact = 0 if length < frames[0][0] else 1
        assert notes_in(data[:length], NOTES_OWNER) == frames[:intact]


def test_tables_are_made_and_read() -> None:
    """The golden table is made again, and each damaged byte costs its row, or with the head the table."""
    data = table_path().read_bytes()
    assert table_file() == data, ADVICE
    assert decode_head(data, TABLE_HEAD.namespace_digest) == TABLE_HEAD
    slots = np.arange(len(TABLE_ROWS))
    at = TABLE_HEAD.rows_at
    rows, intact = decode_rows(data[at:], slots, TABLE_HEAD)
    assert intact.all()
    found = zip(
        *[rows[name].tolist() for name in ("generation", "state", "size", "mark", "key", "key_length")], strict=True
    )
    assert [(*values, key[:length]) for *values, key, length in found] == TABLE_ROWS
    for place in range(len(TABLE_ROWS) * ROW_BYTES):
        damaged = bytearray(data[at:])
        damaged[place] ^= 1
        _, intact = decode_rows(bytes(damaged), slots, TABLE_HEAD)
        assert np.flatnonzero(~intact).tolist() == [place // ROW_BYTES]
    for place in range(72):
        damaged = bytearray(data[:PAGE])
        damaged[place] ^= 1
        assert decode_head(bytes(damaged), TABLE_HEAD.namespace_digest) is None
