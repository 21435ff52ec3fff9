"""CUDA runtime calls that torch does not offer, made in the library that torch has loaded.

torch has no asynchronous strided copy between host and device (it copies through a host temporary) and cannot clear the
error of a failed call. Each is one function of the runtime. The library must be the loaded one, because another copy
would have a separate error state.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the direction follows from the addresses.


class CudaLibrary:
    """Calls of the CUDA runtime; each returns 0 for success, otherwise CUDA's error code.

    Args:
        library: ``libcudart``, or an object with its functions.
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

        Args:
            target: Tensor of two axes, the second with a step of 1.
            source: The same, of the same shape and type.
            stream: Handle of the stream.
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
