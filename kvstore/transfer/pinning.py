"""The CUDA runtime that torch has loaded, and with it the pinning of a region for direct access by a GPU.

A region is existing shared memory, so its pages are registered (``cudaHostRegister``) rather than allocated as pinned.
Without pinning, copies are correct but slower: CUDA copies through its own buffer and blocks the caller.

torch offers neither registration, nor an asynchronous strided copy between host and device (it copies through a host
temporary), nor a way to clear the error of a failed call. Another copy of the library would have its own error state.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from kvstore.primary import PAGE_BYTES, Region

_SIZE, _POINTER = ctypes.c_size_t, ctypes.c_void_p

_ARGUMENTS = {
    "cudaHostRegister": (_POINTER, _SIZE, ctypes.c_uint),
    "cudaHostUnregister": (_POINTER,),
    "cudaGetLastError": (),
    "cudaMemcpy2DAsync": (_POINTER, _SIZE, _POINTER, _SIZE, _SIZE, _SIZE, ctypes.c_int, _POINTER),
}
"""The functions used; each returns 0 for success, otherwise CUDA's error code."""

_MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the direction follows from the addresses.
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices of the process.

_PIECE_BYTES_MAX = 16 << 30
"""Maximum bytes registered per call: drivers refuse very large ranges, and a call can't be interrupted."""

logger = logging.getLogger("kvstore.transfer.pinning")


@cache
def loaded_cudart() -> Any:
    """Return the CUDA runtime loaded by this process; None if it is not loaded from a file of its own."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if "libcudart" in line}
    except OSError:
        return None
    for path in sorted(paths):
        try:
            library = ctypes.CDLL(path)
            for name, arguments in _ARGUMENTS.items():
                getattr(library, name).argtypes = arguments
        except (OSError, AttributeError):
            continue
        return library
    return None


def copy_rows(runtime: Any, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
    """Launch the copy of a matrix, with contiguous rows that may be apart, between host and device.

    Raises:
        RuntimeError: The call failed.
    """
    item, (rows, width) = target.itemsize, target.shape
    ends = [value for one in (target, source) for value in (one.data_ptr(), one.stride(0) * item)]
    code = runtime.cudaMemcpy2DAsync(*ends, width * item, rows, _MEMCPY_DEFAULT, stream.cuda_stream)
    if code:
        runtime.cudaGetLastError()
        raise RuntimeError(f"cudaMemcpy2DAsync failed with code {code}")


class PinnedRegion:
    """Keeps a whole region pinned until :meth:`close`. Close it before the region.

    Args:
        runtime: The CUDA runtime; by default torch's.
        activate: Makes the copying device current. Registration creates a context of about 500 MB on the current
            device; without this, every rank would create one on the first GPU.
        piece_bytes_max: Maximum bytes registered per call. Pieces end at slot boundaries, so that no slot spans two.
    """

    def __init__(
        self,
        region: Region,
        *,
        runtime: Any = None,
        activate: Callable[[], AbstractContextManager[Any]] = nullcontext,
        piece_bytes_max: int = _PIECE_BYTES_MAX,
    ) -> None:
        self._addresses: list[int] = []
        self.reason = ""  # Reason why it is not pinned; otherwise "".
        self._activate = activate
        found = torch.cuda.is_available()
        if runtime is None and found:
            torch.cuda.init()
            runtime = loaded_cudart()
        self._runtime = runtime
        if runtime is None:
            self.reason = "torch has loaded no libcudart" if found else "torch finds no CUDA device"
        elif region.address % PAGE_BYTES:
            self.reason = f"the region does not start on a page boundary (address {region.address:#x})"
        else:
            with activate():
                self._register(region, piece_bytes_max)
        if self.reason:
            logger.warning(
                "The region of %d bytes is not pinned: %s. Copies to and from the GPU are correct but slower. The "
                "usual cause is a limit on locked memory (ulimit -l, the container's memory).",
                region.size_bytes,
                self.reason,
            )

    @property
    def pinned(self) -> bool:
        """Whether the region is pinned."""
        return bool(self._addresses)

    def close(self) -> None:
        """Unpin. No copy may be running. Idempotent."""
        if self._addresses:
            with self._activate():
                self._unregister()

    def _unregister(self) -> None:
        while self._addresses:
            code = self._runtime.cudaHostUnregister(self._addresses.pop())
            if code:
                logger.warning("cudaHostUnregister failed with code %d; the pages stay pinned until the end", code)
                self._runtime.cudaGetLastError()

    def _register(self, region: Region, piece_bytes_max: int) -> None:
        # Registration covers whole pages, so a piece must end at a slot and page boundary.
        step_slots = PAGE_BYTES // math.gcd(region.slot_bytes, PAGE_BYTES)
        piece_bytes = max(1, piece_bytes_max // (step_slots * region.slot_bytes)) * step_slots * region.slot_bytes
        for at in range(0, region.size_bytes, piece_bytes):
            address, size = region.address + at, min(piece_bytes, region.size_bytes - at)
            code = self._runtime.cudaHostRegister(address, size, _PORTABLE)
            if code:
                self._runtime.cudaGetLastError()
                self.reason = f"cudaHostRegister failed with code {code} at {at} of {region.size_bytes} bytes"
                self._unregister()
                return
            self._addresses.append(address)
