"""An index without files: its segments, and the blocks in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.backends.disk.index import Index
from kvstore.backends.disk.layout import PAGE, ROW, Head, RowValues, State, digest_of, encode_rows
from kvstore.backends.disk.segment import OpenFile, Segment, Table
from kvstore.diskio import OsDisk
from kvstore.types import BlockKey
from tests.disk.rig import NAMESPACE, SLOT


def open_segment(index: Index, slots: int) -> Segment:
    """Add an empty segment."""
    head, rows = Head(1, slots, SLOT, NAMESPACE.digest), np.zeros(slots, ROW)
    content = Table(head, np.zeros(head.groups, np.uint32), rows, np.zeros(slots, np.bool_))
    segment = Segment(0, 0, OpenFile(OsDisk(), -1), OpenFile(OsDisk(), -1), content)
    index.open_segment(segment, rows["digest"])
    return segment


def read_segment(*blocks: tuple[int, BlockKey], is_ours: bool = True) -> tuple[Segment, npt.NDArray[np.uint64]]:
    """Return a segment with these blocks, each with the generation of its row, as a table has them; and its digests."""
    head = Head(1, len(blocks), SLOT, NAMESPACE.digest)
    values: list[RowValues] = [(generation, State.USED, 100, generation, key) for generation, key in blocks]
    rows = encode_rows(values, range(len(blocks)), head.segment)
    content = Table(head, np.zeros(head.groups, np.uint32), rows, np.ones(len(blocks), np.bool_))
    segment = Segment(0, 0, OpenFile(OsDisk(), -1), OpenFile(OsDisk(), -1), content, is_ours=is_ours)
    return segment, rows["digest"]


def take(index: Index, count: int) -> list[int]:
    """Take free slots of any length."""
    return index.take(count, PAGE, longer=True)


def add(index: Index, places: Sequence[int], keys: Sequence[BlockKey] | None = None) -> None:
    """Add blocks in taken slots, whose keys are by default their places."""
    for place, key in zip(places, keys or [b"%d" % place for place in places], strict=True):
        index.add(place, 100, 0, digest_of(key), key)
