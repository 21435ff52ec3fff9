"""Buffers as rows of as few arrays as possible, so that one numpy call covers many blocks.

numpy releases the GIL once per call, and a worker thread then waits for it while the scheduler is busy.
Slots of a primary tier and rows of a scratch buffer mostly have equal distances, so one array covers them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from kvstore.codec.checksum import bytes_view

ByteRows: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
"""Array of shape (blocks, bytes); the last axis is contiguous."""


def paired_rows(sources: Sequence[Any], targets: Sequence[Any]) -> Iterator[tuple[slice, ByteRows, ByteRows]]:
    """Yield sources and targets as arrays, each covering a run of evenly spaced rows.

    Args:
        targets: As many writable buffers; each may differ in length from its source.

    Yields:
        A slice of the blocks, and arrays of their sources and targets; in order, covering all blocks. An array is valid
        only while its buffers are.
    """
    ins, outs = [_row(source) for source in sources], [_row(target) for target in targets]
    start = 0
    while start < len(ins):
        stop = min(_run_end(ins, start), _run_end(outs, start))
        yield slice(start, stop), _stacked(ins[start:stop]), _stacked(outs[start:stop])
        start = stop


def copy_rows(sources: Sequence[Any], targets: Sequence[Any]) -> None:
    """Copy each source to its target of the same length."""
    for _, source, target in paired_rows(sources, targets):
        np.copyto(target, source)


def address_of(buffer: Any) -> int:
    """Return the address of a C-contiguous buffer, valid as long as the buffer."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    except (TypeError, ValueError):
        # ctypes rejects read-only and empty memory; this way is five times slower, but rarely needed.
        return _address(_row(buffer))


def _row(buffer: Any) -> ByteRows:
    return np.frombuffer(bytes_view(memoryview(buffer)), np.uint8)


def _address(row: ByteRows) -> int:
    address: int = row.__array_interface__["data"][0]
    return address


def _run_end(rows: Sequence[ByteRows], start: int) -> int:
    """Return the end of the run at ``start`` of rows with equal lengths and equal distances."""
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
    # The rows may belong to several objects: the array covers only their bytes, and the caller keeps them alive.
    return np.lib.stride_tricks.as_strided(first, (len(rows), first.nbytes), (distance, 1))
