"""Pinning of a region, so that a GPU can access its pages directly.

A region is existing shared memory, so its pages are registered (``cudaHostRegister``) rather than allocated as pinned.
Without pinning, copies are correct but slower: CUDA copies through its own buffer and blocks the caller.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kvstore.primary import PAGE_BYTES, Region
from kvstore.transfer.cudart import CudaLibrary, loaded_cudart

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices of the process.

_PIECE_BYTES_MAX = 16 << 30
"""Maximum bytes registered per call: drivers refuse very large ranges, and a call can't be interrupted."""

logger = logging.getLogger("kvstore.transfer.pinning")


class PinnedRegion:
    """Keeps a whole region pinned until :meth:`close`. Close it before the region.

    Args:
        region: The region. Pinning allocates its pages.
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
