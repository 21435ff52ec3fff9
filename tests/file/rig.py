"""A file backend with a disk that can fail, and plain records to put through it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import mmap
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

from kvstore.backends.base import RecordGeometry, RecordRead, RecordWrite
from kvstore.backends.file import FileBackend, FileConfig
from kvstore.backends.file.layout import block_name, shard_name, shard_of
from kvstore.diskio import EngineChoice, OsDisk
from kvstore.namespace import Namespace
from kvstore.testing import FaultyDisk
from kvstore.types import BlockKey, Outcome, RemovalCause

__all__ = ["NAMESPACE", "PAGE", "Rig", "key", "keys"]

PAGE = 4096
NAMESPACE = Namespace({"model": "a test"})
OTHER_NAMESPACE = Namespace({"model": "another test"})
_SETTLED_WITHIN_S = 60.0


def key(number: int) -> BlockKey:
    """Return a key as engines have them."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def keys(numbers: Iterable[int]) -> list[BlockKey]:
    """Return several keys."""
    return [key(number) for number in numbers]


class Rig:
    """One root directory, and backends over it.

    Args:
        root: The directory.
        payload_bytes: Length of each payload; the header is a page.
        **settings: Configuration of the backends.
    """

    engine: ClassVar[EngineChoice] = "io_uring"

    def __init__(self, root: Path, payload_bytes: int = PAGE, **settings: Any) -> None:
        self.root = root
        self.payload_bytes = payload_bytes
        self.record_bytes = PAGE + payload_bytes
        self.settings: dict[str, Any] = {
            "capacity": "1GiB",
            "reserve": 0,
            "threads": 4,
            "engine": self.engine,
            **settings,
        }
        self.disk = FaultyDisk()
        self.removed: list[tuple[BlockKey, RemovalCause]] = []
        self._made: list[FileBackend] = []

    def config(self, **settings: Any) -> FileConfig:
        """Return the configuration, with changes."""
        return FileConfig(path=str(self.root), **{**self.settings, **settings})

    def backend(self, *, disk: OsDisk | None = None, **settings: Any) -> FileBackend:
        """Return a backend, not opened."""
        backend = FileBackend(self.config(**settings), disk=disk or self.disk)
        self._made.append(backend)
        backend.set_removal_listener(lambda gone, cause: self.removed.extend((key, cause) for key in gone))
        return backend

    @asynccontextmanager
    async def open(
        self,
        namespace: Namespace = NAMESPACE,
        *,
        disk: OsDisk | None = None,
        recovered: bool = True,
        **settings: Any,
    ) -> AsyncIterator[FileBackend]:
        """Open a backend, let recovery end, and close it at the end."""
        backend = self.backend(disk=disk, **settings)
        await backend.open(namespace, RecordGeometry(PAGE, self.payload_bytes))
        try:
            if recovered:
                async for _ in backend.scan():
                    pass
            yield backend
        finally:
            await backend.close()

    def record(self, number: int) -> bytes:
        """Return the bytes of a record; each is different all over."""
        return hashlib.shake_128(number.to_bytes(8, "little")).digest(self.record_bytes)

    def write(self, number: int, content: bytes | None = None) -> RecordWrite:
        """Return a write of a record from aligned memory."""
        content = self.record(number) if content is None else content
        memory = memoryview(mmap.mmap(-1, len(content)))
        memory[:] = content
        return RecordWrite(key(number), [memory[:PAGE], memory[PAGE:]])

    def read(self, number: int) -> RecordRead:
        """Return a read into aligned memory."""
        memory = memoryview(mmap.mmap(-1, self.record_bytes))
        return RecordRead(key(number), [memory[:PAGE], memory[PAGE:]])

    async def put(self, backend: FileBackend, numbers: Iterable[int]) -> list[Outcome]:
        """Put records in one batch."""
        return list(await backend.put([self.write(number) for number in numbers]))

    async def get(self, backend: FileBackend, numbers: Sequence[int]) -> list[Outcome]:
        """Get records in one batch; what is OK has to be right."""
        reads = [self.read(number) for number in numbers]
        outcomes = list(await backend.get_into(reads))
        for number, read, outcome in zip(numbers, reads, outcomes, strict=True):
            if outcome is Outcome.OK:
                assert b"".join(read.buffers)[: read.filled_bytes] == self.record(number), f"wrong bytes of {number}"
        return outcomes

    def path(self, number: int, namespace: Namespace = NAMESPACE) -> Path:
        """Return where a block's file lies."""
        return self.shard(number, namespace) / block_name(key(number))

    def shard(self, number: int, namespace: Namespace = NAMESPACE) -> Path:
        """Return the directory that a block's file lies in."""
        return self.root / namespace.hex / shard_name(shard_of(key(number), 256))

    @property
    def state(self) -> Path:
        """The state directory."""
        return self.root / ".kvstore"

    def files(self, namespace: Namespace | None = None) -> list[Path]:
        """Return the files of all blocks."""
        below = self.root if namespace is None else self.root / namespace.hex
        return [path for path in below.rglob("*.kv") if ".kvstore" not in path.parts]

    def used_bytes(self, namespace: Namespace | None = None) -> int:
        """Return what the files of all blocks take."""
        total = 0
        for path in self.files(namespace):
            # Eviction may be at work.
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

    def used_at_once(self) -> int:
        """Return what files took that were all there at one moment, while other processes come and go."""
        before = self._sizes()
        after = self._sizes()
        return sum(size for found, size in before.items() if found in after)

    def _sizes(self) -> dict[tuple[str, int, int], int]:
        sizes = {}
        for path in self.files():
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                # The number of a file that was removed is soon another one's.
                sizes[str(path), status.st_ino, status.st_ctime_ns] = status.st_size
        return sizes

    async def settled(self, backend: FileBackend) -> None:
        """Wait until the ledger says what the files of blocks take."""
        await self._ticks_until(
            backend, lambda: backend.stats().gauges["root_used_bytes"] == self.used_bytes(), "the ledger is right"
        )

    async def settled_at(self, backend: FileBackend, used_bytes: int) -> None:
        """Wait until the ledger says this."""
        await self._ticks_until(
            backend, lambda: backend.stats().gauges["root_used_bytes"] == used_bytes, f"the ledger says {used_bytes}"
        )

    async def _ticks_until(self, backend: FileBackend, predicate: Callable[[], bool], what: str) -> None:
        """Do what all backends of the root do once a second until something is so."""
        deadline = time.monotonic() + _SETTLED_WITHIN_S
        while not predicate():
            said = backend.stats().gauges["root_used_bytes"]
            assert time.monotonic() < deadline, f"not within {_SETTLED_WITHIN_S} s: {what}; it says {said}"
            for each in self._made:
                if each._machine is not None:
                    await each._machine.upkeep._tick()
            await asyncio.sleep(0.001)
