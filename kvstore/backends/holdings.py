"""Holdings: everything on a tier's medium, across namespaces, for the admin tools.

The tools (``kvstore inspect``, ``scrub``, ``gc``) are written once, on :class:`Holdings`, which
works for any backend that implements ``namespaces``, ``scan``, ``get_into`` and ``delete``. A backend whose medium
needs more (records of other engines, housekeeping objects) names a subclass in ``Backend.holdings_type``.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import pkgutil
import re
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

from kvstore.backends.base import Backend, RecordGeometry, RecordRead
from kvstore.backends.simple import SimpleBackend
from kvstore.codec.record import HEADER_BYTES
from kvstore.config import TierConfig
from kvstore.errors import BackendError, ConfigError, KVStoreError, RecordError
from kvstore.namespace import Namespace
from kvstore.registry import BACKENDS
from kvstore.types import BlockInfo, BlockKey, NamespaceInfo, Outcome, RemovalCause, is_key

STALE_MAX: Final = 100_000
"""Stale files or objects that one run removes, about 30 MB of memory; the next run continues."""

DESCRIPTION_BYTES_MAX: Final = 1 << 20
"""Longest description of a namespace that is read; those of large models have tens of kilobytes."""

_PAGE: Final = 1024
"""Blocks in one page of a scan."""

_PAYLOAD_BYTES_MAX: Final = 64 << 20
"""Longest payload that a backend is opened for; a block of the largest models has a few megabytes."""

_DIGEST: Final = re.compile("[0-9a-f]{64}")

_ROOM_UNIT: Final = 4096

ReadResult: TypeAlias = memoryview | RecordError | BackendError | None
"""Result of reading a block: the record, the reason it is damaged, the failure to read it, or None if it is gone."""


@dataclass(frozen=True, slots=True)
class StaleItem:
    """A file or object that no engine needs."""

    name: str  # Relative to the tier's directory or prefix.
    why: str
    size_bytes: int


class Holdings:
    """Reads and changes a medium beside running engines. For one event loop, one call at a time.

    No method takes a lock that a running engine holds. Subclasses override methods for which those of the backend are
    not enough.
    """

    ttl_s: float = 0.0  # Age at which unused blocks expire, as configured; 0.0 for never.
    knows_holders: ClassVar[bool] = False  # Whether the medium shows which namespaces are in use.
    record_bytes_max: ClassVar[int] = 1 << 32  # Longest record that is read into memory; blocks have megabytes.

    def __init__(self, backend: type[Backend], config: TierConfig) -> None:
        self.backend = backend
        self.config = config
        # Length of the record headers on this medium.
        self.header_bytes = -(-HEADER_BYTES // backend.alignment) * backend.alignment
        self._opened: tuple[str, Backend] | None = None
        self._room = memoryview(b"")

    async def open(self) -> None:
        """Connect, and check that there is a tier.

        Raises:
            ConfigError: The configuration cannot be used, or the tier does not exist.
            BackendError: The medium cannot be reached.
        """
        if issubclass(self.backend, SimpleBackend) and self.backend.scan is SimpleBackend.scan:
            raise ConfigError(
                f"The backend {self.backend.name!r} has no scan, so its blocks cannot be listed. Add one."
            )

    async def close(self) -> None:
        """Release everything. Idempotent; also after a failed ``open``."""
        await self._close_backend()

    async def namespaces(self) -> list[NamespaceInfo] | None:
        """Return all namespaces; None if the medium cannot list them.

        Raises:
            BackendError: The medium cannot be read.
        """
        await self._close_backend()  # Only one backend may have the medium open, and it would count as an engine.
        with self._explained("namespaces"):
            found = await self.backend(self.config).namespaces()
            for each in found or ():
                sound = is_digest(each.hex) and math.isfinite(each.used_at)
                if not sound or not isinstance(each.fields, dict | None):
                    raise self._error(f"namespaces yields {each!r}, which is not a namespace. Correct the backend.")
            return None if found is None else list(found)

    async def described(self) -> list[NamespaceInfo] | None:
        """Return the namespaces with stored fields, like :meth:`namespaces`, if possible without listing blocks.

        ``used_at`` may be the time at which an engine last stored its first block.

        Raises:
            BackendError: The medium cannot be read.
        """
        return await self.namespaces()

    async def present(self, namespace: NamespaceInfo, keys: Collection[BlockKey]) -> set[BlockKey]:
        """Return which of these blocks are on the medium. The default lists the namespace.

        Raises:
            BackendError: The medium did not answer for all of them.
        """
        found, wanted = set[BlockKey](), set(keys)
        async with contextlib.aclosing(self.scan(namespace)) as pages:
            async for page in pages:
                found.update(block.key for block in page if block.fault is None and block.key in wanted)
        return found

    async def scan(self, namespace: NamespaceInfo) -> AsyncGenerator[Sequence[BlockInfo], None]:
        """Yield every block of a namespace, in pages of some hundreds or thousands.

        Raises:
            BackendError: The medium cannot be read, or lists something that cannot be a block.
        """
        backend = await self._backend_of(namespace)
        page: list[BlockInfo] = []
        with self._explained("scan"):
            async for block in backend.scan():
                if not _is_sound(block.key, block.size_bytes) or not math.isfinite(block.used_at):
                    raise self._error(f"scan yields {block!r}, which cannot be a block. Correct the backend.")
                page.append(block)
                if len(page) == _PAGE:
                    yield page
                    page = []
        yield page

    async def read(self, namespace: NamespaceInfo, blocks: Sequence[BlockInfo]) -> Sequence[ReadResult]:
        """Return the whole record of each block, as stored on the medium. Valid until the next call."""
        backend = await self._backend_of(namespace)
        reads = [RecordRead(block.key, [room]) for block, room in zip(blocks, self._rooms(blocks), strict=True)]
        results: list[ReadResult] = []
        try:
            with self._explained("get_into"):
                for read, outcome in zip(reads, await backend.get_into(reads), strict=True):
                    if outcome is Outcome.OK:
                        results.append(read.buffers[0][: read.filled_bytes])
                    elif outcome is Outcome.MISS:
                        results.append(None)
                    else:
                        results.append(self._error(f"cannot be read: {backend.last_error or outcome.name.lower()}"))
        except BackendError as error:
            return [error] * len(blocks)
        return results

    async def remove(self, namespace: NamespaceInfo, blocks: Sequence[BlockInfo], cause: RemovalCause) -> int:
        """Remove blocks, unless they have been replaced since the scan or a running engine owns them.

        Args:
            namespace: Their namespace.
            blocks: Blocks as yielded by the scan.
            cause: ``CORRUPT`` quarantines damaged records, as the backend does; ``EXPIRED`` removes blocks.

        Returns:
            The number of blocks removed.
        """
        backend, keys = await self._backend_of(namespace), [block.key for block in blocks]
        with self._explained("delete"):
            if cause is RemovalCause.CORRUPT:
                await backend.quarantine(keys)
                return len(keys)
            return sum(map(bool, await backend.delete(keys)))

    async def remove_namespace(self, namespace: NamespaceInfo) -> int:
        """Remove everything that belongs to a namespace and is not in use; return the number of blocks removed."""
        removed = 0
        async with contextlib.aclosing(self.scan(namespace)) as pages:
            async for page in pages:
                removed += await self.remove(namespace, page, RemovalCause.EXPIRED)
        return removed

    async def stale_items(self) -> list[StaleItem]:
        """Return stale files or objects; the list may end soon after ``STALE_MAX`` of them."""
        return []

    async def sweep(self, stale: Sequence[StaleItem]) -> int:
        """Remove stale files or objects that are still unused; return the number removed."""
        return 0

    async def _backend_of(self, namespace: NamespaceInfo) -> Backend:
        if self._opened is None or self._opened[0] != namespace.hex:
            await self._close_backend()
            digest = Namespace.of_digest(bytes.fromhex(namespace.hex))
            backend = self.backend(self.config)
            try:
                with self._explained("open"):
                    await backend.open(digest, RecordGeometry(self.header_bytes, _PAYLOAD_BYTES_MAX))
            except BaseException:
                await backend.close()
                raise
            self._opened = namespace.hex, backend
        return self._opened[1]

    async def _close_backend(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            with self._explained("close"):
                await opened[1].close()

    def _rooms(self, blocks: Sequence[BlockInfo]) -> list[memoryview]:
        """Return memory for the records of blocks, reused by the next call.

        The kernel allocates pages on the first write, so a false length costs only address space.
        """
        starts, end = [], 0
        for block in blocks:
            starts.append(end)
            end += -(-block.size_bytes // _ROOM_UNIT) * _ROOM_UNIT
        if len(self._room) < end:
            self._room = memoryview(mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        return [self._room[start : start + block.size_bytes] for start, block in zip(starts, blocks, strict=True)]

    def _error(self, text: str) -> BackendError:
        return BackendError(text, backend=self.backend.name)

    @contextlib.contextmanager
    def _explained(self, method: str) -> Iterator[None]:
        """Turn an unexpected exception of a backend's method into an error that names it."""
        try:
            yield
        except (KVStoreError, OSError):
            raise
        # Third-party code may raise anything, and a traceback would not name the backend.
        except Exception as error:
            raise self._error(f"{method} raised {type(error).__name__}: {error}. Correct the backend") from error


def _is_sound(key: object, size_bytes: object) -> bool:
    """Return whether a block's key and length are possible; a third-party backend may yield any object."""
    return is_key(key) and isinstance(size_bytes, int) and size_bytes >= 0


def is_digest(digits: str) -> bool:
    """Return whether a text has the form of a namespace's digest."""
    return _DIGEST.fullmatch(digits) is not None


def fields_in(document: object, digits: str) -> dict[str, Any] | None:
    """Return the fields in the description of a namespace; None if it is missing, damaged or of another one.

    Args:
        document: Decoded JSON, or JSON as bytes.
        digits: First digits of the namespace's digest.
    """
    try:
        stated = json.loads(document) if isinstance(document, bytes) else document
        found = Namespace.of_document(stated if isinstance(stated, dict) else {})
    except (ValueError, RecursionError, ConfigError):
        return None
    return found.document()["fields"] if found.hex.startswith(digits) else None


def open_holdings(backend: str, config: TierConfig) -> Holdings:
    """Return the holdings of a tier, not opened.

    Raises:
        ConfigError: The backend has no medium of its own.
    """
    found = BACKENDS.find(backend)
    if not found.takes_stores:
        raise ConfigError(f"A {backend} tier keeps no blocks of its own. Name the tier that does.")
    kind: type[Holdings] = pkgutil.resolve_name(found.holdings_type)
    return kind(found, config)
