"""Where the blocks of a disk tier are, read from the tables of its segments."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvstore.backends.disk.layout import Head, State, decode_head, decode_rows, encode_rows, mark_of
from kvstore.types import BlockKey


class Placed(NamedTuple):
    """Place of a block."""

    table: Path
    head: Head
    slot: int
    generation: int
    size_bytes: int

    @property
    def segment(self) -> Path:
        """The file with the slot."""
        return self.table.with_suffix(".seg")

    @property
    def offset(self) -> int:
        """Offset of the slot: the record's header is there, its payload one page further."""
        return self.slot * self.head.slot_bytes


def placed(directory: Path) -> dict[BlockKey, Placed]:
    """Return the places of all blocks below a directory; of a key in two namespaces, one of them."""
    found: dict[BlockKey, Placed] = {}
    for table in directory.rglob("*.tab"):
        content = table.read_bytes()
        head = decode_head(content, bytes.fromhex(table.parent.name))
        assert head is not None, f"{table} has no head"
        rows, intact = decode_rows(content[head.rows_at :], np.arange(head.slots), head)
        for slot in np.flatnonzero(intact & (rows["state"] == State.USED)).tolist():
            row = rows[slot]
            key = row["key"].tobytes()[: row["key_length"]]
            found[key] = Placed(table, head, slot, int(row["generation"]), int(row["size"]))
    return found


def flip(place: Placed, at: int) -> None:
    """Flip a bit of a block at an offset in its slot: the record's header is at 0, the payload at 4096."""
    with place.segment.open("r+b") as file:
        file.seek(place.offset + at)
        byte = file.read(1)[0]
        file.seek(place.offset + at)
        file.write(bytes([byte ^ 1]))


def write_header(key: BlockKey, place: Placed, page: bytes) -> None:
    """Replace the header page of a block's record, and its mark in the row."""
    with place.segment.open("r+b") as file:
        file.seek(place.offset)
        file.write(page)
    values = (place.generation, State.USED, place.size_bytes, mark_of(memoryview(page)), key)
    with place.table.open("r+b") as file:
        file.seek(place.head.row_at(place.slot))
        file.write(encode_rows([values], [place.slot], place.head.segment).tobytes())
