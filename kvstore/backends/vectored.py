"""Byte sequences in several buffers: cutting, copying and consuming them."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import Any


def scatter(record: bytes | bytearray | memoryview, buffers: Sequence[memoryview]) -> int:
    """Copy a record into buffers, in order, unless it is longer than they are.

    Returns:
        Length of the record in bytes, as ``SimpleBackend.get_one_into`` returns it: a length that does not fit means a
        corrupt record. Bytes of the buffers behind the record are unchanged.
    """
    rest = memoryview(record)
    size_bytes = rest.nbytes
    if size_bytes <= sum(buffer.nbytes for buffer in buffers):
        for buffer in buffers:
            part = rest[: buffer.nbytes]
            buffer[: part.nbytes] = part
            rest = rest[part.nbytes :]
            if not rest.nbytes:
                break
    return size_bytes


def cut(buffers: Sequence[memoryview], end: int, start: int = 0) -> list[memoryview]:
    """Return non-empty views of bytes ``start`` to ``end`` of buffers, or up to their end."""
    found = []
    for buffer in buffers:
        if end <= 0:
            break
        size = buffer.nbytes
        if start < size:
            part = buffer[max(start, 0) : end]
            if part.nbytes:
                found.append(part)
        start -= size
        end -= size
    return found


def drop_front(buffers: MutableSequence[Any], count: int) -> None:
    """Remove the first ``count`` bytes from a list or deque of buffers (bytes, or flat views), which must have them."""
    while count:
        first = buffers[0]
        length = len(first)
        if count < length:
            buffers[0] = memoryview(first)[count:]
            return
        count -= length
        del buffers[0]
