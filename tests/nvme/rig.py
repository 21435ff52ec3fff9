"""What the tests of the nvme backend share: backends over directories, and clones of what a crash would leave."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from kvstore.backends.base import RecordGeometry
from kvstore.backends.nvme import NvmeBackend, NvmeConfig
from kvstore.codec.record import HEADER_BYTES
from kvstore.config import Capacity
from kvstore.diskio import OsDisk
from kvstore.namespace import Namespace
from kvstore.testing.records import RecordMaker
from kvstore.types import BlockKey, Outcome

__all__ = ["GEOMETRY", "NAMESPACE", "PAYLOAD", "SLOT", "Rig", "clone", "opened", "room_for"]

NAMESPACE = Namespace({"test": "nvme"})
PAYLOAD = 8192
SLOT = 4096 + PAYLOAD
GEOMETRY = RecordGeometry(HEADER_BYTES, PAYLOAD)


def room_for(blocks: int) -> int:
    """Return the capacity that holds so many blocks."""
    return 8192 + blocks * SLOT


class Rig:
    """An open backend, and short ways to use it."""

    def __init__(self, backend: NvmeBackend, namespace: Namespace, rng: random.Random) -> None:
        self.backend = backend
        self.maker = RecordMaker(namespace, GEOMETRY, rng)
        self.removed: list[BlockKey] = []
        backend.set_removal_listener(lambda keys, cause: self.removed.extend(keys))

    async def put(self, values: dict[BlockKey, bytes]) -> list[Outcome]:
        """Put payloads by key."""
        return list(await self.backend.put([self.maker.write(key, payload) for key, payload in values.items()]))

    async def put_new(self, count: int) -> dict[BlockKey, bytes]:
        """Put new blocks and insist on OK."""
        values = {self.maker.key(): self.maker.payload() for _ in range(count)}
        outcomes = await self.put(values)
        assert outcomes == [Outcome.OK] * count, f"put of {count} new blocks: {outcomes}"
        return values

    async def get(self, keys: Sequence[BlockKey]) -> list[bytes | None]:
        """Get payloads, proved as a tier proves them; None for whatever is not OK."""
        targets = [self.maker.target(key) for key in keys]
        outcomes = await self.backend.get_into([target.read for target in targets])
        return [
            self.maker.content(target) if outcome is Outcome.OK else None
            for target, outcome in zip(targets, outcomes, strict=True)
        ]

    async def scanned(self) -> set[BlockKey]:
        """Return what a scan finds when recovery has ended; the first one may yield what turns out to be lost."""
        async for _ in self.backend.scan():
            pass
        return {info.key async for info in self.backend.scan()}


@contextlib.asynccontextmanager
async def opened(
    paths: Path | Sequence[Path],
    capacity: int,
    *,
    disk: OsDisk | None = None,
    namespace: Namespace = NAMESPACE,
    seed: int = 1,
    **options: Any,
) -> AsyncIterator[Rig]:
    """Open a backend for as long as the context lasts."""
    names = [str(path) for path in ([paths] if isinstance(paths, Path) else paths)]
    config = NvmeConfig(paths=names, capacity=Capacity(capacity), **{"lock_timeout": 0, **options})
    backend = NvmeBackend(config, disk=disk)
    rig = Rig(backend, namespace, random.Random(seed))
    await backend.open(namespace, GEOMETRY)
    try:
        yield rig
    finally:
        await backend.close()


def clone(path: Path, to: Path) -> Path:
    """Copy what lies in a directory, as a kill of its engine at this moment would leave it."""
    shutil.copytree(path, to)
    return to
