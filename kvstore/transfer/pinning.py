"""CUDA runtime calls that torch does not offer, and with them the pinning of a region for direct access by a GPU.

A region is existing shared memory, so its pages are registered (``cudaHostRegister``) rather than allocated as pinned.
Without pinning, copies are correct but slower: CUDA copies through its own buffer and blocks the caller.

torch has no asynchronous strided copy between host and device (it copies through a host temporary) and cannot clear the
error of a failed call. Each is one function of the runtime, in the library that torch has loaded, because another copy
would have a separate error state.
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

_MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the direction follows from the addresses.


class CudaLibrary:
    """Calls of the CUDA runtime; each returns 0 for success, otherwise CUDA's error code.

    ``library``: ``libcudart``, or an object with its functions.
    """

    def __init__(self, library: Any) -> None:
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        self._register = _function(library, "cudaHostRegister", pointer, size, ctypes.c_uint)
        self._unregister = _function(library, "cudaHostUnregister", pointer)
        self._last_error = _function(library, "cudaGetLastError")
        self._memcpy_2d = _function(
            library, "cudaMemcpy2DAsync", pointer, size, pointer, size, size, size, ctypes.c_int, pointer
        )

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int, /) -> int:
        """Pin a range of pages, in the context of the current device."""
        return int(self._register(address, size_bytes, flags))

    def cudaHostUnregister(self, address: int, /) -> int:
        """Unpin a range, given its first address."""
        return int(self._unregister(address))

    def cudaGetLastError(self) -> int:
        """Return and clear the error of the last failed call."""
        return int(self._last_error())

    def copy_rows(self, target: Any, source: Any, stream: int) -> int:
        """Copy a matrix with contiguous rows between host and device asynchronously.

        ``target``: tensor of two axes, the second with a step of 1.
        """
        item = target.element_size()
        rows, width = target.shape
        return int(
            self._memcpy_2d(
                target.data_ptr(),
                target.stride(0) * item,
                source.data_ptr(),
                source.stride(0) * item,
                width * item,
                rows,
                _MEMCPY_DEFAULT,
                stream,
            )
        )


@cache
def loaded_cudart() -> CudaLibrary | None:
    """Return the CUDA runtime loaded by this process; None if it is not loaded from a file of its own."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if "libcudart" in line}
    except OSError:
        return None
    for path in sorted(paths):
        try:
            return CudaLibrary(ctypes.CDLL(path))
        except (OSError, AttributeError):
            continue
    return None


def _function(library: Any, name: str, *arguments: Any) -> Any:
    function = getattr(library, name)
    function.restype, function.argtypes = ctypes.c_int, list(arguments)
    return function


_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices of the process.

_PIECE_BYTES_MAX = 16 << 30
"""Maximum bytes registered per call: drivers refuse very large ranges, and a call can't be interrupted."""

logger = logging.getLogger("kvstore.transfer.pinning")


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
        runtime: CudaLibrary | None = None,
        activate: Callable[[], AbstractContextManager[Any]] = nullcontext,
        piece_bytes_max: int = _PIECE_BYTES_MAX,
    ) -> None:
        self._addresses: list[int] = []
        self.reason = ""  # Reason why it is not pinned; otherwise "".
        self._activate = activate
        if runtime is None and torch.cuda.is_available():
            torch.cuda.init()
            runtime = loaded_cudart()
        self._runtime = runtime
        if runtime is None:
            found = torch.cuda.is_available()
            self.reason = "torch has loaded no libcudart" if found else "torch finds no CUDA device"
        elif region.address % PAGE_BYTES:
            self.reason = f"the region does not start on a page boundary (address {region.address:#x})"
        else:
            with activate():
                self._register(runtime, region, piece_bytes_max)
        self.pinned = bool(self._addresses)  # Whether the region is pinned.
        if self.reason:
            logger.warning(
                "The region of %d bytes is not pinned: %s. Copies to and from the GPU are correct but slower. The "
                "usual cause is a limit on locked memory (ulimit -l, the container's memory).",
                region.size_bytes,
                self.reason,
            )

    def close(self) -> None:
        """Unpin. No copy may be running. Idempotent."""
        if self._addresses and self._runtime is not None:
            with self._activate():
                self._unregister(self._runtime)
        self.pinned = False

    def _unregister(self, runtime: CudaLibrary) -> None:
        while self._addresses:
            code = runtime.cudaHostUnregister(self._addresses.pop())
            if code:
                logger.warning("cudaHostUnregister failed with code %d; the pages stay pinned until the end", code)
                runtime.cudaGetLastError()

    def _register(self, runtime: CudaLibrary, region: Region, piece_bytes_max: int) -> None:
        # Registration covers whole pages, so a piece must end at a slot and page boundary.
        step_slots = PAGE_BYTES // math.gcd(region.slot_bytes, PAGE_BYTES)
        piece_bytes = max(1, piece_bytes_max // (step_slots * region.slot_bytes)) * step_slots * region.slot_bytes
        for at in range(0, region.size_bytes, piece_bytes):
            address, size = region.address + at, min(piece_bytes, region.size_bytes - at)
            code = runtime.cudaHostRegister(address, size, _PORTABLE)
            if code:
                runtime.cudaGetLastError()
                self.reason = f"cudaHostRegister failed with code {code} at {at} of {region.size_bytes} bytes"
                self._unregister(runtime)
                return
            self._addresses.append(address)
