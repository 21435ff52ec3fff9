"""Shared parts of the disk backend's tests: open backends, and clones of the state that a crash would leave."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from kvstore.backends.base import RecordGeometry
from kvstore.backends.disk import DiskBackend, DiskConfig
from kvstore.backends.disk.session import Session
from kvstore.codec.record import HEADER_BYTES
from kvstore.config import Capacity
from kvstore.diskio import OsDisk
from kvstore.namespace import Namespace
from kvstore.tenants import Tenants
from kvstore.testing.records import RecordMaker
from kvstore.types import BlockKey, Outcome, RemovalCause

NAMESPACE = Namespace({"test": "disk"})
OTHER_NAMESPACE = Namespace({"test": "another"})
PAYLOAD = 8192
SLOT = 4096 + PAYLOAD
GEOMETRY = RecordGeometry(HEADER_BYTES, PAYLOAD)


def room_for(blocks: int) -> int:
    """Return the capacity that holds ``blocks`` blocks."""
    return blocks * SLOT


def segment_bytes(root: Path) -> int:
    """Return the total length of all segments under a directory."""
    total = 0
    for path in root.rglob("*.seg"):
        # An engine may remove it at this moment.
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


class NoFrames(OsDisk):
    """A disk that refuses every frame of a journal, with ``error``, while ``fails`` is set."""

    fails = False
    error = errno.EIO

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        if self.fails and name.startswith("journal.") and offset:
            raise OSError(self.error, "no frame is written")
        return super().pwritev(fd, buffers, offset)


class Rig:
    """An open backend with shortcuts."""

    def __init__(self, backend: DiskBackend, namespace: Namespace, rng: random.Random) -> None:
        self.backend = backend
        self.maker = RecordMaker(namespace, GEOMETRY, rng)
        self.removed: list[tuple[BlockKey, RemovalCause]] = []
        self.arrived: list[BlockKey] = []
        backend.set_removal_listener(lambda keys, cause: self.removed.extend((key, cause) for key in keys))
        backend.set_arrival_listener(lambda keys: self.arrived.extend(keys))

    @property
    def session(self) -> Session:
        """The open session."""
        assert self.backend._open is not None
        return self.backend._open.session

    async def put(self, values: dict[BlockKey, bytes]) -> list[Outcome]:
        """Put payloads by key."""
        return list(await self.backend.put([self.maker.write(key, payload) for key, payload in values.items()]))

    def new(self, count: int) -> dict[BlockKey, bytes]:
        """Return new blocks that were never put."""
        return {self.maker.key(): self.maker.payload() for _ in range(count)}

    async def put_new(self, count: int) -> dict[BlockKey, bytes]:
        """Put new blocks and check for OK."""
        values = self.new(count)
        outcomes = await self.put(values)
        assert outcomes == [Outcome.OK] * count, f"put of {count} new blocks: {outcomes}, {self.backend.last_error}"
        return values

    async def get(self, keys: Sequence[BlockKey]) -> list[bytes | None]:
        """Get payloads, verified as a tier verifies them; None for every outcome but OK."""
        targets = [self.maker.target(key) for key in keys]
        outcomes = await self.backend.get_into([target.read for target in targets])
        return [
            self.maker.content(target) if outcome is Outcome.OK else None
            for target, outcome in zip(targets, outcomes, strict=True)
        ]

    async def has_all(self, values: dict[BlockKey, bytes]) -> None:
        """Check that all of these blocks are found and right."""
        assert await self.get(list(values)) == list(values.values())

    async def still_there(self, values: dict[BlockKey, bytes]) -> dict[BlockKey, bytes]:
        """Return the blocks still stored once eviction has settled: evictions run ahead of need."""
        await self.session.space.close()
        gone = {key for key, _ in self.removed}
        return {key: payload for key, payload in values.items() if key not in gone}

    async def scanned(self) -> set[BlockKey]:
        """Return the keys that a scan finds."""
        return {info.key async for info in self.backend.scan()}


async def stores(rig: Rig, count: int) -> Counter[Outcome]:
    """Store new blocks one by one; return the outcomes."""
    return Counter([outcome for _ in range(count) for outcome in await rig.put(rig.new(1))])


@contextlib.asynccontextmanager
async def opened(
    path: Path | Sequence[Path],
    capacity: int | str,
    *,
    disk: OsDisk | None = None,
    namespace: Namespace = NAMESPACE,
    seed: int | None = None,
    tenants: Tenants | None = None,
    **options: Any,
) -> AsyncIterator[Rig]:
    """Open a backend while the context lasts."""
    paths = str(path) if isinstance(path, Path) else [str(each) for each in path]
    config = DiskConfig(path=paths, capacity=Capacity(capacity), **{"lock_timeout": 0, "reserve": 0, **options})
    backend = DiskBackend(config, disk=disk)
    backend.tenants = tenants
    rig = Rig(backend, namespace, random.Random(seed))
    await backend.open(namespace, GEOMETRY)
    try:
        yield rig
    finally:
        await backend.close()


def clone(path: Path, to: Path) -> Path:
    """Copy a directory in the state that a kill of its engine at this moment would leave."""
    shutil.copytree(path, to)
    return to
