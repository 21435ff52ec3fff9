"""vLLM's shared region, allocated in huge pages and removed after its engine (:mod:`kvstore.primary.shared`)."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path
from typing import Any, Final

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering import spec as tiering_spec

from kvstore.errors import KVStoreError
from kvstore.primary.memory import size_text
from kvstore.primary.shared import SHM, SUFFIX, allocate, open_shared

logger = logging.getLogger("kvstore.vllm.region")

_LOCKED: Final = SUFFIX.removesuffix(".mmap")
"""Follows the engine's id, to which vLLM appends the rest."""

_huge_pages: dict[str, bool] = {}
"""Engines of this process whose regions are locked, by id, and whether they lie in huge pages."""

_with_workers: set[str] = set()
"""Engines whose scheduler is made after their workers have mapped the region."""

_pages: dict[str, dict[str, int]] = {}
"""Bytes of an engine's region by the kind of their pages."""


class LockedRegion(SharedOffloadRegion):
    """vLLM's region in memory that this process, or another of the engine, has allocated.

    For engines that :func:`use_locked_region` does not name it is vLLM's own.
    """

    def __init__(
        self, engine_id: str, num_chunks: int, rank: int | None, kv_bytes_per_chunk: int, **options: Any
    ) -> None:
        shape = {"num_chunks": num_chunks, "rank": rank, "kv_bytes_per_chunk": kv_bytes_per_chunk}
        if engine_id not in _huge_pages:
            super().__init__(engine_id=engine_id, **shape, **options)
            return
        path, size_bytes = Path(region_path(engine_id)), num_chunks * kv_bytes_per_chunk
        file = open_shared(path, size_bytes)
        try:
            if rank is None and file.is_maker and engine_id in _with_workers:
                raise KVStoreError(
                    f"{path} was removed during the start, so the engine's workers have other memory than its "
                    "scheduler. Start the engine again. Remove no files of running programs from /dev/shm (systemd "
                    "does at the end of a session, unless RemoveIPC=no), and give each engine another 'engine_id'."
                )
            huge_bytes = allocate(file.fd, huge_pages=_huge_pages[engine_id])
            # vLLM finds the file, and what it allocates is there.
            super().__init__(engine_id=engine_id + _LOCKED, **shape, **options)
            fcntl.flock(self.fd, fcntl.LOCK_SH)  # Until the region is closed.
            self._creator = file.is_maker
        except BaseException as error:
            if isinstance(error, KVStoreError):
                logger.error("kvstore: %s", error)  # vLLM shows it only at the end of a worker's traceback.
            if file.is_maker:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
            raise
        finally:
            os.close(file.fd)
        _pages[engine_id] = {"huge": min(huge_bytes, size_bytes), "small": max(0, size_bytes - huge_bytes)}


tiering_spec.SharedOffloadRegion = LockedRegion


def use_locked_region(engine_id: str, *, huge_pages: bool, has_workers: bool = False) -> None:
    """Make the regions of an engine in this process a :class:`LockedRegion`.

    ``has_workers``: whether its workers map the region before its scheduler does. Then the scheduler makes none.
    """
    _huge_pages[engine_id] = huge_pages
    if has_workers:
        _with_workers.add(engine_id)


def region_path(engine_id: str) -> str:
    """Return the path of the region of an engine's processes."""
    return str(SHM / f"vllm_offload_{engine_id}{SUFFIX}")


def region_pages(engine_id: str) -> dict[str, int]:
    """Return the bytes of an engine's region in ``huge`` and ``small`` pages, once this process has mapped it."""
    return _pages.get(engine_id, {})


def described_pages(engine_id: str) -> str:
    """Return the part of a region in huge pages, for the log."""
    pages = region_pages(engine_id)
    return f"{size_text(pages.get('huge', 0))} of {size_text(sum(pages.values()))} in huge pages"
