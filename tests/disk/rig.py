"""Open disk backends, and clones of the state that a kill would leave."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvstore.backends.base import RecordGeometry
from kvstore.backends.disk import DiskBackend, DiskConfig
from kvstore.backends.disk.layout import Head, decode_head
from kvstore.backends.disk.limits import LIMITS, Limits
from kvstore.backends.disk.session import Session
from kvstore.codec.record import HEADER_BYTES
from kvstore.config import Capacity
from kvstore.diskio import OsDisk
from kvstore.namespace import Namespace
from kvstore.tenants import Tenants
from kvstore.testing.records import RecordMaker
from kvstore.types import BlockKey, Outcome, RemovalCause

_T = TypeVar("_T")

NAMESPACE = Namespace({"test": "disk"})
OTHER_NAMESPACE = Namespace({"test": "another"})
PAYLOAD = 8192
SLOT = 4096 + PAYLOAD
GEOMETRY = RecordGeometry(HEADER_BYTES, PAYLOAD)


class Rig:
    """An open backend with shortcuts."""

    def __init__(self, backend: DiskBackend, rng: random.Random, namespace: Namespace) -> None:
        self.backend = backend
        self.maker = RecordMaker(namespace, GEOMETRY, rng)
        self.removed: list[tuple[BlockKey, RemovalCause]] = []
        self.arrived: list[BlockKey] = []
        backend.set_arrival_listener(self.arrived.extend)
        backend.set_removal_listener(lambda keys, cause: self.removed.extend((key, cause) for key in keys))

    async def put(self, values: dict[BlockKey, bytes]) -> list[Outcome]:
        """Put payloads by key."""
        return list(await self.backend.put([self.maker.write(key, payload) for key, payload in values.items()]))

    @property
    def session(self) -> Session:
        """The open session."""
        assert self.backend._open is not None
        return self.backend._open

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

    async def outcomes_of(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Return the outcomes of loads."""
        return list(await self.backend.get_into([self.maker.target(key).read for key in keys]))

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


async def proved(rig: Rig, values: dict[BlockKey, bytes]) -> int:
    """Check that every block found is right; return the number of blocks found."""
    got = await rig.get(list(values))
    for payload, back in zip(values.values(), got, strict=True):
        assert back in (None, payload)
    return sum(back is not None for back in got)


async def stores(rig: Rig, count: int) -> Counter[Outcome]:
    """Store new blocks one by one; return the outcomes."""
    return Counter([outcome for _ in range(count) for outcome in await rig.put(rig.new(1))])


class BadDisk(OsDisk):
    """A disk that fails calls of some kinds on files and directories whose path contains a text, or stops them."""

    ops: tuple[str, ...] = ()
    name = ""  # Start of the names that can't be created; all others are created.
    bad = ""
    error = errno.EIO
    gate: threading.Event | None = None  # If there is one, calls wait for it and don't fail.
    waiting = 0  # Calls that have waited or wait.

    def syscall(self, op: str, function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T:
        if op in self.ops and (op != "open" or (args[1] & os.O_CREAT and args[0].startswith(self.name))):
            fd = kwargs.get("dir_fd", kwargs.get("src_dir_fd", args[0]))
            if self.bad in os.readlink(f"/proc/self/fd/{fd}"):
                if self.gate is not None:
                    self.waiting += 1
                    assert self.gate.wait(30)
                    return super().syscall(op, function, *args, **kwargs)
                raise OSError(self.error, os.strerror(self.error))
        return super().syscall(op, function, *args, **kwargs)


class NoRows(OsDisk):
    """A disk that refuses every write to a table while ``fails`` is set, before or after it is made."""

    fails = False
    after = False

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        is_table = os.readlink(f"/proc/self/fd/{fd}").endswith(".tab") and offset
        if self.fails and is_table:
            if self.after:
                super().pwritev(fd, buffers, offset)
            raise OSError(errno.EIO, "no row is written")
        return super().pwritev(fd, buffers, offset)


@contextlib.asynccontextmanager
async def opened(
    path: Path | Sequence[Path],
    slots: int | str,
    *,
    disk: OsDisk | None = None,
    seed: int | None = None,
    tenants: Tenants | None = None,
    namespace: Namespace = NAMESPACE,
    limits: Limits = LIMITS,
    **options: Any,
) -> AsyncIterator[Rig]:
    """Open a backend with room for so many slots, or a share of the filesystem, while the context lasts."""
    paths = str(path) if isinstance(path, Path) else [str(each) for each in path]
    capacity = Capacity(slots if isinstance(slots, str) else slots * SLOT)
    config = DiskConfig(path=paths, capacity=capacity, **{"reserve": Capacity(0), **options})
    backend = DiskBackend(config, disk=disk, limits=limits)
    backend.tenants = tenants
    rig = Rig(backend, random.Random(seed), namespace)
    await backend.open(namespace, GEOMETRY)
    try:
        yield rig
    finally:
        await backend.close()


async def filled(path: Path, count: int, slots: int = 64) -> dict[BlockKey, bytes]:
    """Fill a root with blocks."""
    async with opened(path, slots) as rig:
        return await rig.put_new(count)


def segment_bytes(root: Path) -> int:
    """Return the length of all segments in a root."""
    size_bytes = 0
    for path in root.rglob("*.seg"):
        # An engine may remove it at the same time.
        with contextlib.suppress(FileNotFoundError):
            size_bytes += path.stat().st_size
    return size_bytes


def tables(root: Path) -> list[Path]:
    """Return the tables in a root, in order."""
    return sorted(root.rglob("*.tab"))


def head_of(table: Path) -> Head:
    """Return the head of a table."""
    head = decode_head(table.read_bytes(), NAMESPACE.digest)
    assert head is not None
    return head


def clone(path: Path, to: Path) -> Path:
    """Copy a directory in the state that a kill of its engine at this moment would leave."""
    shutil.copytree(path, to)
    return to
