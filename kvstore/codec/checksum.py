"""Checksums of records: xxh3-128 for payloads, xxh3-64 for headers.

Source of the functions: the XXH3 specification of the xxHash project, by its Python package. They find accidents,
not attacks; the MAC field of the header is for those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import xxhash

__all__ = ["CHECKSUM_BYTES", "PIECE_BYTES", "bytes_view", "header_checksum", "payload_checksum"]

CHECKSUM_BYTES: Final = 16
"""Length of a payload's checksum."""

PIECE_BYTES: Final = 65536
"""A payload is hashed in pieces of this length. The package lets go of the GIL for longer ones, and to get it back
from a busy scheduler takes up to 5 ms each time; a piece takes microseconds."""


def payload_checksum(payload: memoryview | Sequence[memoryview]) -> bytes:
    """Return the xxh3-128 of a payload, in the canonical (big-endian) form.

    Args:
        payload: C-contiguous buffer of any format and shape, or several, which count as one after the other.

    Raises:
        ValueError: A buffer is not C-contiguous.
    """
    parts = (payload,) if isinstance(payload, memoryview) else payload
    if len(parts) == 1 and parts[0].nbytes <= PIECE_BYTES:
        digest: bytes = xxhash.xxh3_128_digest(bytes_view(parts[0]))
        return digest
    state = xxhash.xxh3_128()
    for part in parts:
        view = bytes_view(part)
        for start in range(0, view.nbytes, PIECE_BYTES):
            state.update(view[start : start + PIECE_BYTES])
    digest = state.digest()
    return digest


def header_checksum(header: bytes | memoryview) -> int:
    """Return the xxh3-64 of the part of a header before its checksum."""
    value: int = xxhash.xxh3_64_intdigest(header)
    return value


def bytes_view(view: memoryview) -> memoryview:
    """Return the bytes of a C-contiguous buffer as a flat view of them; nothing is copied.

    Raises:
        ValueError: It is not C-contiguous.
    """
    if view.format == "B" and view.ndim == 1 and view.contiguous:
        return view
    if not view.c_contiguous:
        raise ValueError("The buffer of a block is not C-contiguous. Hand over the slot as it lies in memory.")
    # A view with a zero in its shape can't be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")
