"""Buffers seen as rows of as few arrays as possible, so that one numpy call covers many blocks.

A worker thread that lets go of the GIL waits up to 5 ms for it beside a busy scheduler, and numpy lets go of it once a
call. Slots of a primary tier and rows of a scratch buffer mostly lie at equal distances, and such rows are one array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from kvstore.codec.checksum import bytes_view

__all__ = ["ByteRows", "address_of", "copy_rows", "paired_rows"]

ByteRows: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
"""Array of shape (blocks, bytes); the last axis is contiguous."""


def paired_rows(sources: Sequence[Any], targets: Sequence[Any]) -> Iterator[tuple[slice, ByteRows, ByteRows]]:
    """Yield sources and targets as arrays that cover as many of them as lie evenly in memory.

    Args:
        sources: Buffers of bytes, C-contiguous.
        targets: As many, writable; each may have another length than its source.

    Yields:
        Which blocks, and their sources and targets as two arrays of as many rows; in order, and together all of them.
        An array is good only while the buffers are, and of rows of one length.
    """
    ins, outs = [_row(source) for source in sources], [_row(target) for target in targets]
    start = 0
    while start < len(ins):
        stop = min(_run_end(ins, start), _run_end(outs, start))
        yield slice(start, stop), _stacked(ins[start:stop]), _stacked(outs[start:stop])
        start = stop


def copy_rows(sources: Sequence[Any], targets: Sequence[Any]) -> None:
    """Copy each source to its target, which is as long."""
    for _, source, target in paired_rows(sources, targets):
        np.copyto(target, source)


def address_of(buffer: Any) -> int:
    """Return the address of a buffer, to tell which buffers are neighbours."""
    return _address(_row(buffer))


def _row(buffer: Any) -> ByteRows:
    return np.frombuffer(bytes_view(memoryview(buffer)), np.uint8)


def _address(row: ByteRows) -> int:
    address: int = row.__array_interface__["data"][0]
    return address


def _run_end(rows: Sequence[ByteRows], start: int) -> int:
    """Return the end of the run of rows of one length, at equal and positive distances, that begins at ``start``."""
    length = rows[start].nbytes
    before = _address(rows[start])
    distance = 0
    for i in range(start + 1, len(rows)):
        address = _address(rows[i])
        step, before = address - before, address
        if rows[i].nbytes != length or step < length or (distance and step != distance):
            return i
        distance = step
    return len(rows)


def _stacked(rows: Sequence[ByteRows]) -> ByteRows:
    first = rows[0]
    distance = _address(rows[1]) - _address(first) if len(rows) > 1 else first.nbytes
    # Rows of several objects may become one array: only bytes of the rows are ever reached through it, and the caller
    # holds the objects.
    return np.lib.stride_tricks.as_strided(first, (len(rows), first.nbytes), (distance, 1))
