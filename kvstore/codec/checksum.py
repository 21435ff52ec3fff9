"""Checksums of records: xxh3-128 for payloads, xxh3-64 for headers.

The functions follow the XXH3 specification of the xxHash project, whose Python package implements them. They detect
accidental damage; only seals detect attacks.
"""

from __future__ import annotations

from typing import Final

import xxhash

PIECE_BYTES: Final = 65536
"""Length of the pieces in which short payloads are hashed, which take microseconds each. For longer pieces, the package
releases the GIL, and reacquiring it from a busy scheduler takes up to a switch interval each time."""

LONG_BYTES: Final = 1 << 20
"""Length from which payloads are hashed in one piece. They take a tenth of a millisecond and more, for which a model in
the scheduler's process would wait: it releases and reacquires the GIL in every operation."""


def payload_checksum(payload: memoryview) -> bytes:
    """Return the xxh3-128 of a C-contiguous payload, in the canonical (big-endian) form.

    Raises:
        ValueError: The payload is not C-contiguous.
    """
    view = bytes_view(payload)
    if view.nbytes <= PIECE_BYTES or view.nbytes >= LONG_BYTES:
        digest: bytes = xxhash.xxh3_128_digest(view)
        return digest
    state = xxhash.xxh3_128()
    for start in range(0, view.nbytes, PIECE_BYTES):
        state.update(view[start : start + PIECE_BYTES])
    digest = state.digest()
    return digest


def header_checksum(header: bytes | memoryview) -> int:
    """Return the xxh3-64 of the part of a header before its checksum."""
    value: int = xxhash.xxh3_64_intdigest(header)
    return value


def bytes_view(view: memoryview) -> memoryview:
    """Return a flat byte view of a C-contiguous buffer, without a copy.

    Raises:
        ValueError: The buffer is not C-contiguous.
    """
    if view.format == "B" and view.ndim == 1 and view.contiguous:
        return view
    if not view.c_contiguous:
        raise ValueError("The buffer of a block is not C-contiguous. Pass the slot itself.")
    # A view with a zero in its shape can't be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")
