"""Where buffers lie, as the kernel is told."""

from __future__ import annotations

import ctypes

import numpy as np

__all__ = ["address_of"]


def address_of(buffer: memoryview) -> int:
    """Return the address of a contiguous buffer that is not empty; it stays valid as long as the buffer does."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    except TypeError:
        # Read-only memory, which ctypes does not take; five times slower, and rare.
        address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
        return address
