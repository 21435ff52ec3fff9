"""Tables of segments: geometry of the file, lengths of slots, torn and misplaced rows."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.backends.disk.layout import (
    GROUP_ROWS,
    PAGE,
    ROW_BYTES,
    SLOTS_MAX,
    Head,
    RowValues,
    State,
    decode_head,
    decode_rows,
    encode_head,
    encode_rows,
    mark_of,
    slot_lengths,
    stem_of,
    table_number,
)

DIGEST = bytes(range(32))
HEAD = Head(2**63 + 5, 1000, 3 * PAGE, DIGEST)


def used(count: int) -> list[RowValues]:
    """Return values of rows with blocks."""
    return [(place + 1, State.USED, 300, place, b"key %d" % place) for place in range(count)]


def test_parts_of_a_table_do_not_overlap() -> None:
    """Head, generations and rows follow each other, and the last row ends the file."""
    for slots in (1, GROUP_ROWS, GROUP_ROWS + 1, 70_000, 10**6):
        head = HEAD._replace(slots=slots)
        assert head.groups * GROUP_ROWS >= slots > (head.groups - 1) * GROUP_ROWS
        assert PAGE + 4 * head.groups <= head.rows_at == head.row_at(0)
        assert head.rows_at % PAGE == 0
        assert head.table_bytes == head.row_at(slots - 1) + ROW_BYTES


def test_torn_row_is_free_and_its_neighbours_stay() -> None:
    """Wherever the write of a row over another one ends early, that row is not intact, and all others are."""
    slots = np.arange(3)
    old = encode_rows(used(3), slots, HEAD.segment).tobytes()
    new = encode_rows([(9, State.USED, 400, 77, b"another key")], [1], HEAD.segment).tobytes()
    states = set()
    for written in range(ROW_BYTES + 1):
        torn = old[:ROW_BYTES] + new[:written] + old[ROW_BYTES + written :]
        rows, intact = decode_rows(torn, slots, HEAD)
        assert intact[0] and intact[2]
        if intact[1]:
            states.add(int(rows["generation"][1]))
    assert states == {2, 9}


def test_new_table_holds_no_blocks() -> None:
    """Rows of zeros, as a new file has them, are not intact."""
    _, intact = decode_rows(bytes(64 * ROW_BYTES), np.arange(64), HEAD)
    assert not intact.any()


def test_rows_count_only_in_their_place() -> None:
    """A row written to another slot, or copied from another segment's table, is not intact."""
    slots = np.arange(64)
    content = encode_rows(used(64), slots, HEAD.segment).tobytes()
    assert decode_rows(content, slots, HEAD)[1].all()
    assert not decode_rows(content, slots + 1, HEAD)[1].any()
    assert not decode_rows(content, slots[::-1].copy(), HEAD)[1].any()
    assert not decode_rows(content, slots, HEAD._replace(segment=6))[1].any()


@pytest.mark.parametrize(
    "values",
    [
        (1, 3, 300, 0, b"key"),
        (1, State.USED, 0, 0, b"key"),
        (1, State.USED, 2 * PAGE + 257, 0, b"key"),
        (1, State.USED, 300, 0, b""),
        (1, State.USED, 300, 0, bytes(65)),
    ],
    ids=["state", "empty", "too long", "no key", "key"],
)
def test_values_out_of_range_are_refused(values: RowValues) -> None:
    """A row that no engine writes is not intact, although its checksum is right."""
    assert not decode_rows(encode_rows([values], [0], HEAD.segment).tobytes(), np.arange(1), HEAD)[1].any()


@pytest.mark.parametrize(
    "change",
    [
        {"slots": 0},
        {"slots": SLOTS_MAX + 1},
        {"slot_bytes": PAGE},
        {"slot_bytes": 5 * PAGE + 1},
        {"slot_bytes": 1 << 40},
    ],
    ids=str,
)
def test_impossible_heads_are_refused(change: dict[str, int]) -> None:
    """A head with an impossible size is refused before memory is allocated for it."""
    assert decode_head(encode_head(HEAD), DIGEST) == HEAD
    assert decode_head(encode_head(HEAD._replace(**change)), DIGEST) is None


def test_heads_of_others_are_refused() -> None:
    """A head of another namespace, and one that ends early, is refused."""
    assert decode_head(encode_head(HEAD), bytes(32)) is None
    assert decode_head(encode_head(HEAD)[:71], DIGEST) is None


def test_names() -> None:
    """The name of a table gives its segment's number; other names give none."""
    assert table_number(stem_of(17) + ".tab") == 17
    for name in ("000017.seg", "17.tab", "000017.tab.tmp", "٠٠٠٠١٧.tab"):
        assert table_number(name) is None


def test_lengths_of_slots() -> None:
    """Slots are as long as the whole payload or quarters of it, in whole pages and without repetition."""
    assert slot_lengths(128 << 10) == tuple(PAGE + (kib << 10) for kib in (128, 96, 64, 32))
    assert slot_lengths(5000) == (3 * PAGE, 2 * PAGE)
    assert slot_lengths(1) == (2 * PAGE,)


def test_mark_is_of_the_headers_checksum() -> None:
    """The mark is the first half of the checksum in the record's header, and nothing else in the page changes it."""
    page = bytearray(PAGE)
    page[248:252] = b"\x78\x56\x34\x12"
    assert mark_of(memoryview(page)) == 0x12345678
    page[252:] = b"\xff" * (PAGE - 252)
    page[:248] = b"\xff" * 248
    assert mark_of(memoryview(page)) == 0x12345678
