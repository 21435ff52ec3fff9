"""Copies between one run of bytes and several buffers, for media that hand out whole records."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["scatter"]


def scatter(record: bytes | bytearray | memoryview, buffers: Sequence[memoryview]) -> int:
    """Copy a record into buffers, one after the other, unless it is longer than they are.

    Returns:
        Length of the record in bytes: what ``SimpleBackend.get_one_into`` returns, where a length that does not fit
        says that the record is corrupt. What lies behind the record in the buffers is left alone.
    """
    rest = memoryview(record)
    size_bytes = rest.nbytes
    if size_bytes <= sum(buffer.nbytes for buffer in buffers):
        for buffer in buffers:
            part = rest[: buffer.nbytes]
            buffer[: part.nbytes] = part
            rest = rest[part.nbytes :]
    return size_bytes
