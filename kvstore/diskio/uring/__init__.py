"""io_uring through ctypes and numpy: many file operations by one system call that has dropped the GIL."""

from __future__ import annotations

from kvstore.diskio.uring.ring import Ring, UringUnavailableError, probe

__all__ = ["Ring", "UringUnavailableError", "probe"]
