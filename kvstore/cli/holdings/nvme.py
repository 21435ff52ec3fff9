"""Holdings of an nvme tier: the slots of its slabs are read while no engine has them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from kvstore.backends.base import RecordGeometry
from kvstore.backends.nvme import NvmeBackend
from kvstore.backends.nvme.config import NvmeConfig
from kvstore.backends.nvme.layout import (
    DATA_OFFSET,
    PAGE,
    SLAB_NAME,
    SLAB_VERSION,
    Descriptor,
    Superblock,
    decode_descriptor,
    decode_superblock,
)
from kvstore.cli.holdings.base import HeldBlock, HeldNamespace, Holdings, Litter
from kvstore.codec.record import HEADER_BYTES, decode_header
from kvstore.errors import BackendUnavailableError, ConfigError, LockedError, RecordError
from kvstore.namespace import Namespace
from kvstore.quantity import Capacity
from kvstore.types import BlockKey

__all__ = ["NvmeHoldings"]

_LOCK_RETRY_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class _Slab:
    """A slab that is open and locked."""

    path: str
    fd: int
    superblock: Superblock


@dataclass(frozen=True, slots=True)
class _Place:
    """Which slot of which slab."""

    slab: int
    slot: int
    record_bytes: int


class NvmeHoldings(Holdings):
    """Holdings of an nvme tier. A slab belongs to one engine: while one has it, this raises.

    Args:
        config: The tier's configuration.

    Raises:
        ConfigError: There is no nvme tier at one of the ``paths``.
        LockedError: An engine has it.
    """

    backend = "nvme"
    header_bytes = HEADER_BYTES

    def __init__(self, config: NvmeConfig) -> None:
        self._config = config
        self._stack = contextlib.ExitStack()
        self._slabs: list[_Slab] = []
        self._found: dict[str, dict[BlockKey, tuple[HeldBlock, int]]] | None = None
        self._buffer = bytearray()
        try:
            self._slabs = [self._open(path) for path in config.path_list]
        except BaseException:
            self.close()
            raise

    def namespaces(self) -> list[HeldNamespace]:
        """See :meth:`Holdings.namespaces`. Used last is when the newest block was written."""
        found = [
            HeldNamespace(digest, used_at=max(block.used_at for block, _ in blocks.values()))
            for digest, blocks in self._scan().items()
        ]
        return sorted(found, key=lambda namespace: -namespace.used_at)

    def blocks(self, namespace: HeldNamespace) -> Iterator[HeldBlock]:
        """See :meth:`Holdings.blocks`."""
        for block, _ in list(self._scan().get(namespace.hex, {}).values()):
            yield block

    def read(self, namespace: HeldNamespace, block: HeldBlock) -> memoryview | None:
        """See :meth:`Holdings.read`. In a slab the payload begins on a page of its own; here it follows the header."""
        place: _Place = block.place
        slab = self._slabs[place.slab]
        if len(self._buffer) < place.record_bytes:
            self._buffer = bytearray(place.record_bytes)
        view = memoryview(self._buffer)[: place.record_bytes]
        offset = _offset_of(slab.superblock, place.slot)
        # Two reads, as what lies between header and payload is the slab's, not the record's.
        length = os.preadv(slab.fd, [view[:HEADER_BYTES]], offset)
        length += os.preadv(slab.fd, [view[HEADER_BYTES:]], offset + PAGE) if len(view) > HEADER_BYTES else 0
        os.posix_fadvise(slab.fd, offset, slab.superblock.slot_bytes, os.POSIX_FADV_DONTNEED)
        return view[:length]

    def set_aside(self, namespace: HeldNamespace, blocks: Sequence[HeldBlock]) -> int:
        """See :meth:`Holdings.set_aside`. A slab has no quarantine: damaged records are deleted."""
        return self._delete(namespace, [block.key for block in blocks])

    def remove(self, namespace: HeldNamespace, blocks: Sequence[HeldBlock] | None) -> int:
        """See :meth:`Holdings.remove`."""
        chosen = list(self.blocks(namespace)) if blocks is None else blocks
        return self._delete(namespace, [block.key for block in chosen])

    def litter(self) -> list[Litter]:
        """See :meth:`Holdings.litter`. A slab has none: a slot that was not finished is a free slot."""
        return []

    def sweep(self, litter: Sequence[Litter]) -> int:
        """See :meth:`Holdings.sweep`."""
        return 0

    @property
    def payload_bytes_max(self) -> int:
        """The longest payload that a slot takes: another one would begin the slabs anew."""
        return min(slab.superblock.slot_bytes for slab in self._slabs) - PAGE

    def close(self) -> None:
        """See :meth:`Holdings.close`."""
        self._stack.close()
        self._slabs = []

    def _open(self, path: str) -> _Slab:
        name = os.path.join(os.path.expanduser(path), SLAB_NAME)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ConfigError(f"There is no nvme tier at {path!r}. Give the 'paths' of one.") from error
        except OSError as error:
            raise self._unavailable(name, error) from error
        self._stack.callback(os.close, fd)
        # Of each slot only a page is read at first: what the kernel would read ahead is not wanted.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        self._lock(fd, name)
        try:
            pages = [os.pread(fd, PAGE, at) for at in (0, PAGE)]
        except OSError as error:
            raise self._unavailable(name, error) from error
        copies = [copy for page in pages if len(page) == PAGE and (copy := decode_superblock(page)) is not None]
        if not copies:
            raise ConfigError(f"{name!r} is no slab, or its superblock is damaged. An engine would begin it anew.")
        best = max(copies, key=lambda copy: (copy.epoch, copy.clean))
        if best.version != SLAB_VERSION:
            raise ConfigError(f"{name!r} has format version {best.version}; this release knows {SLAB_VERSION}.")
        return _Slab(path, fd, best)

    def _lock(self, fd: int, name: str) -> None:
        deadline = time.monotonic() + self._config.lock_timeout
        while True:
            try:
                # For ourselves: what is read must not change, and an engine must not begin in between.
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise LockedError(
                        f"{name} is in use by an engine, to which a slab belongs alone. Stop it first; its own "
                        "statistics say what it holds.",
                        backend=self.backend,
                    ) from None
                time.sleep(_LOCK_RETRY_S)

    def _scan(self) -> dict[str, dict[BlockKey, tuple[HeldBlock, int]]]:
        """Read the header page of every slot, once."""
        if self._found is None:
            self._found = {}
            for number, slab in enumerate(self._slabs):
                try:
                    self._scan_slab(number, slab, self._found)
                except OSError as error:
                    raise self._unavailable(slab.path, error) from error
        return self._found

    def _scan_slab(self, number: int, slab: _Slab, found: dict[str, dict[BlockKey, tuple[HeldBlock, int]]]) -> None:
        page = memoryview(bytearray(PAGE))
        for slot in range(slab.superblock.slots):
            if os.preadv(slab.fd, [page], _offset_of(slab.superblock, slot)) < PAGE:
                return
            descriptor = decode_descriptor(page, slab.superblock.slab_id, slot)
            if descriptor is None:
                continue
            block = _block(page, descriptor, _Place(number, slot, descriptor.record_bytes))
            blocks = found.setdefault(descriptor.namespace_digest.hex(), {})
            # Of a key in two slots the later one counts, as it does at an engine's start.
            if descriptor.epoch >= blocks.get(descriptor.key, (block, -1))[1]:
                blocks[descriptor.key] = (block, descriptor.epoch)

    def _delete(self, namespace: HeldNamespace, keys: Sequence[BlockKey]) -> int:
        """Delete blocks as an engine would, which keeps snapshot and superblock right."""
        superblocks = [slab.superblock for slab in self._slabs]
        if len({(superblock.slot_bytes, superblock.slots) for superblock in superblocks}) > 1:
            raise ConfigError("The slabs of this tier differ in length, so none can be changed without its engine.")
        capacity = Capacity(sum(superblock.size_bytes for superblock in superblocks))
        config = msgspec.structs.replace(self._config, capacity=capacity, unknown_format="refuse")
        self.close()
        self._found = None

        async def delete() -> int:
            backend = NvmeBackend(config)
            try:
                payload_bytes_max = superblocks[0].slot_bytes - PAGE
                await backend.open(
                    Namespace.of_digest(bytes.fromhex(namespace.hex)),
                    RecordGeometry(backend.alignment, payload_bytes_max),
                )
                async for _ in backend.scan_keys():
                    pass
                return sum(await backend.delete(keys))
            finally:
                await backend.close()

        try:
            return asyncio.run(delete())
        finally:
            self._slabs = [self._open(path) for path in self._config.path_list]

    def _unavailable(self, name: str, error: OSError) -> BackendUnavailableError:
        reason = error.strerror or str(error)
        return BackendUnavailableError(
            f"{name!r} can't be read: {reason}. Check the disk, and that the slab is this user's.", backend=self.backend
        )


def _offset_of(superblock: Superblock, slot: int) -> int:
    return DATA_OFFSET + slot * superblock.slot_bytes


def _block(page: memoryview, descriptor: Descriptor, place: _Place) -> HeldBlock:
    try:
        created_at = decode_header(bytes(page[:HEADER_BYTES])).created_ns / 1e9
    except RecordError:
        created_at = 0.0
    return HeldBlock(descriptor.key, descriptor.record_bytes, created_at, place)
