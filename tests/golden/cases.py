"""What the golden files hold. A file is made once, with its version, and never changes.

After a change of the format: raise ``FORMAT_VERSION``, run ``python -m tests.golden.cases`` for the new files (those
that exist stay as they are), add the version to the tests and to docs/format.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.backends.disk.layout import FORMAT, Head, RowValues, State, encode_head, encode_rows
from kvstore.backends.disk.note_file import encode_notes
from kvstore.codec.record import RecordCodec
from kvstore.namespace import FORMAT_VERSION, Namespace

HERE = Path(__file__).parent

FIELDS: dict[str, Any] = {
    "model": {
        "name": "tiny/llama",
        "revision": "5f2c",
        "config": {"rope": {"factor": 8.0, "type": "yarn"}, "heads": 4},
    },
    "dtype": "bfloat16",
    "block_tokens": 16,
    "layers": ["layer.0", "layer.1"],
    "tensor_parallel": None,
    "canonical": True,
    "salt": "Grüße, 你好",
    "scale": 1.0,
}
WRITER_ID = bytes(range(16))
CREATED_NS = 1_700_000_000_123_456_789


@dataclass(frozen=True)
class Case:
    """One golden record."""

    name: str  # Part of the file's name.
    header_bytes: int  # Length of its header.
    key: bytes  # Key of its block.
    payload: bytes  # Payload of its block.
    padded_bytes: int  # Length of the file, zeros behind the payload included.

    def path(self, version: int = FORMAT_VERSION) -> Path:
        """Name the file of a format version."""
        return HERE / f"record-v{version}-{self.name}.bin"

    def record(self) -> bytes:
        """Make the record as today's code makes it."""
        codec = RecordCodec(
            Namespace(FIELDS), header_bytes=self.header_bytes, writer_id=WRITER_ID, clock_ns=lambda: CREATED_NS
        )
        header = bytearray(b"\xff" * self.header_bytes)
        codec.encode_header(memoryview(header), self.key, memoryview(self.payload))
        return (bytes(header) + self.payload).ljust(self.padded_bytes, b"\0")


def _bytes(count: int) -> bytes:
    return bytes((7 * i + 3) % 256 for i in range(count))


CASES = [
    Case("bare", 256, b"key", _bytes(64), 256 + 64),
    Case("empty", 256, b"\0", b"", 256),
    Case("disk", 4096, _bytes(64), _bytes(300), 8192),
    Case("pieces", 512, _bytes(32), _bytes(70_000), 512 + 70_000),
]


NOTES_OWNER = 0xFEDCBA9876543210
NOTES = [(_bytes(36), b"\x01" + _bytes(70)), (b"key", b""), (_bytes(64), _bytes(300))]


def notes_path() -> Path:
    """Name the golden file of notes."""
    return HERE / "notes-v1.bin"


def notes_file() -> bytes:
    """Make a file of notes as today's code makes it: two frames."""
    return encode_notes(NOTES[:2], NOTES_OWNER) + encode_notes(NOTES[2:], NOTES_OWNER)


TABLE_HEAD = Head(0xFEDCBA9876543210, 3, 12288, Namespace(FIELDS).digest)
TABLE_ROWS: list[RowValues] = [
    (1, State.USED, 8448, 0x12345678, _bytes(36)),
    (2**32 - 1, State.USED, 1, 0, _bytes(64)),
    (7, State.RETIRED, 0, 0, b""),
]


def table_path() -> Path:
    """Name the golden table of the disk tier's format."""
    return HERE / f"table-v{FORMAT}.bin"


def table_file() -> bytes:
    """Make a table as today's code makes it: its head, the generation of its group, and a row of each state."""
    rows = encode_rows(TABLE_ROWS, range(3), TABLE_HEAD.segment).tobytes()
    generations = np.array([9], "<u4").tobytes()
    return encode_head(TABLE_HEAD) + generations.ljust(TABLE_HEAD.rows_at - 4096, b"\0") + rows


def namespace_path(version: int = FORMAT_VERSION) -> Path:
    """Name the golden ``namespace.json`` of a format version."""
    return HERE / f"namespace-v{version}.json"


if __name__ == "__main__":
    files = {case.path(): case.record() for case in CASES}
    files[namespace_path()] = json.dumps(Namespace(FIELDS).document(), indent=2, ensure_ascii=False).encode() + b"\n"
    files[notes_path()] = notes_file()
    files[table_path()] = table_file()
    for path, data in files.items():
        if not path.exists():
            path.write_bytes(data)
