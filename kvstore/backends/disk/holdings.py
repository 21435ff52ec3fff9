"""Holdings of a disk tier: the segments of all engines, read while engines use them.

Reading takes no lock: a record counts if its row is the same afterwards. A segment is changed only while no engine
holds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, NoReturn

import numpy as np

from kvstore.backends.base import Backend
from kvstore.backends.disk import files
from kvstore.backends.disk.config import DiskConfig
from kvstore.backends.disk.layout import (
    GROUP_ROWS,
    PAGE,
    ROW_BYTES,
    State,
    decode_rows,
    digest_of,
    encode_rows,
    mark_of,
)
from kvstore.backends.disk.ledger import LedgerBusyError
from kvstore.backends.disk.older import empty_older, older_bytes, older_format
from kvstore.backends.disk.opening import open_existing_root
from kvstore.backends.disk.root import Root
from kvstore.backends.disk.segment import Segment
from kvstore.backends.holdings import Holdings, ReadResult, StaleItem, fields_in
from kvstore.codec.record import HEADER_BYTES, decode_header
from kvstore.config import TierConfig
from kvstore.diskio import OsDisk
from kvstore.errors import BackendUnavailableError, ConfigError, RecordError
from kvstore.types import BlockInfo, BlockKey, NamespaceInfo, RemovalCause

_EMPTY_PAGE = bytes(PAGE)
_SCAN_SLOTS = 1024


class _Place(NamedTuple):
    """Location of a block, and its row when it was found."""

    root: int
    number: int  # Of the segment.
    segment: int  # Identity of the segment.
    slot: int
    generation: int


class DiskHoldings(Holdings):
    """Holdings of a disk tier. Every method blocks the loop, on which nothing else runs."""

    knows_holders = True

    def __init__(self, backend: type[Backend], config: TierConfig) -> None:
        super().__init__(backend, config)
        if not isinstance(config, DiskConfig):
            raise ConfigError(f"A disk tier is configured by a DiskConfig. Got {type(config).__name__}.")
        self.header_bytes = HEADER_BYTES
        self._tier = config
        self._disk = OsDisk()
        self._roots: list[Root] = []
        self._segment: Segment | None = None
        """The segment that was read last."""

    async def open(self) -> None:
        with self._failures():
            for position in range(len(self._tier.paths)):
                self._roots.append(open_existing_root(self._disk, position, self._tier))

    async def close(self) -> None:
        self._leave()
        roots, self._roots = self._roots, []
        for root in roots:
            root.close()

    async def namespaces(self) -> list[NamespaceInfo]:
        with self._failures():
            roots = [root for root in self._roots if older_format(self._disk, root.state_fd) is None]
            found = {name for root in roots for name in files.namespaces_in(self._disk, root.fd)}
            return [self._describe(name) for name in sorted(found)]

    async def present(self, namespace: NamespaceInfo, keys: Collection[BlockKey]) -> set[BlockKey]:
        """See :meth:`Holdings.present`. Reads the tables, and one page of each of these blocks."""
        wanted, found = set(keys), set[BlockKey]()
        digests = np.array([digest_of(key) for key in wanted], np.uint64)
        self._leave()
        with self._failures():
            for root in self._entered(namespace.hex):
                for number in root.table_numbers():
                    with contextlib.suppress(FileNotFoundError):
                        if (opened := root.open_segment(number)) is not None:
                            segment, theirs = opened
                            slots = np.flatnonzero((segment.state == State.USED) & np.isin(theirs, digests))
                            blocks = [self._block(segment, slot) for slot in slots.tolist()]
                            segment.close()
                            found.update(block.key for block in blocks if block is not None)
        return found & wanted

    async def scan(self, namespace: NamespaceInfo) -> AsyncGenerator[Sequence[BlockInfo], None]:
        """See :meth:`Holdings.scan`. Reads one page of each block: its header has the time of writing."""
        with self._failures():
            for root in self._entered(namespace.hex):
                for number in root.table_numbers():
                    segment = self._opened_segment(root, number)
                    held = [] if segment is None else segment.held().tolist()
                    for start in range(0, len(held), _SCAN_SLOTS):
                        # Another segment may have been read meanwhile.
                        segment = self._opened_segment(root, number)
                        some = held[start : start + _SCAN_SLOTS]
                        found = [] if segment is None else [self._block(segment, slot) for slot in some]
                        yield [block for block in found if block is not None]
                        await asyncio.sleep(0)

    async def read(self, namespace: NamespaceInfo, blocks: Sequence[BlockInfo]) -> Sequence[ReadResult]:
        roots = self._entered(namespace.hex)
        results: list[ReadResult] = []
        for block, room in zip(blocks, self._rooms(blocks), strict=True):
            try:
                segment = self._opened_segment(roots[block.place.root], block.place.number)
                results.append(None if segment is None else self._record(segment, block, room))
            except FileNotFoundError:
                results.append(None)
            except OSError as error:
                results.append(self._error(f"cannot be read: {error.strerror or error}"))
        return results

    async def remove(self, namespace: NamespaceInfo, blocks: Sequence[BlockInfo], cause: RemovalCause) -> int:
        """See :meth:`Holdings.remove`. The slots of damaged records are never used again."""
        state = State.RETIRED if cause is RemovalCause.CORRUPT else State.FREE
        removed = 0
        with self._failures():
            roots = self._entered(namespace.hex)
            in_order = sorted(blocks, key=lambda block: block.place)
            for (position, number), some in groupby(in_order, lambda block: block.place[:2]):
                with self._taken(roots[position], number) as segment:
                    removed += 0 if segment is None else self._withdraw(segment, list(some), state)
        return removed

    async def remove_namespace(self, namespace: NamespaceInfo) -> int:
        removed = 0
        with self._failures():
            for root in self._entered(namespace.hex):
                for number in root.table_numbers():
                    with self._taken(root, number) as segment:
                        if segment is not None:
                            removed += len(segment.held())
                            root.remove_segment(segment)
                root.remove_namespace()
        return removed

    async def stale_items(self) -> list[StaleItem]:
        with self._failures():
            return [
                StaleItem(str(root.position), f"blocks of format {found}", older_bytes(self._disk, root.fd))
                for root in self._roots
                if (found := older_format(self._disk, root.state_fd)) is not None
            ] + [
                StaleItem(f"{position}/{namespace.hex}/{name}", "file of an incomplete segment", status.st_size)
                for namespace in await self.namespaces()
                for position, root in enumerate(self._entered(namespace.hex))
                for name, status in root.stale_files().items()
            ]

    async def sweep(self, stale: Sequence[StaleItem]) -> int:
        removed = 0
        with self._failures():
            for item in stale:
                position, _, rest = item.name.partition("/")
                if rest:
                    namespace, name = rest.split("/")
                    removed += self._entered(namespace)[int(position)].remove_stale([name])
                else:
                    root = self._roots[int(position)]
                    removed += empty_older(self._disk, root.path, root.fd, root.state_fd)
        return removed

    def _describe(self, namespace: str) -> NamespaceInfo:
        fields, used_at, held, segments = None, 0.0, 0, 0
        for root in self._entered(namespace):
            # namespace.json is for people; blocks are valid without it.
            with contextlib.suppress(OSError):
                fields = fields or fields_in(
                    files.read_json(self._disk, "namespace.json", root.namespace_fd), namespace
                )
            segments += len(root.table_numbers())
            held += len(root.held_segments())
            if root.namespace_fd >= 0:
                entries = files.entries_in(self._disk, root.namespace_fd).values()
                used_at = max([used_at, *(status.st_mtime for status in entries)])
        holder = f"engines hold {held} of {segments} segments" if held else ""
        return NamespaceInfo(namespace, fields, holder, used_at)

    def _entered(self, namespace: str) -> list[Root]:
        """Return the roots, with the directory of a namespace open where there is one."""
        digest = bytes.fromhex(namespace)
        if any(root.digest != digest for root in self._roots):
            self._leave()
            for root in self._roots:
                root.enter(digest)
        return self._roots

    def _leave(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()

    def _opened_segment(self, root: Root, number: int) -> Segment | None:
        """Return a segment, open until another one is; None if it is gone or can't be used."""
        segment = self._segment
        if segment is None or (segment.root, segment.number) != (root.position, number):
            self._leave()
            with contextlib.suppress(FileNotFoundError):
                if (opened := root.open_segment(number)) is not None:
                    self._segment = opened[0]
        return self._segment

    @contextlib.contextmanager
    def _taken(self, root: Root, number: int) -> Iterator[Segment | None]:
        """Hold a segment; None if an engine holds it, or it can't be used."""
        self._leave()
        with contextlib.ExitStack() as stack:
            segment = None
            with contextlib.suppress(FileNotFoundError):
                if (taken := root.take_segment(number)) is not None:
                    segment = taken[0]
                    stack.callback(segment.close)
            yield segment

    def _block(self, segment: Segment, slot: int) -> BlockInfo | None:
        """Return the block in a slot; None if its record was lost."""
        page = self._page(segment, slot)
        created_at = 0.0
        try:
            created_at = decode_header(page[:HEADER_BYTES]).created_ns / 1e9
            if mark_of(page) != segment.mark_view[slot]:
                return None
        except RecordError:
            if page == _EMPTY_PAGE:
                return None
        place = _Place(segment.root, segment.number, segment.head.segment, slot, segment.generation_view[slot])
        return BlockInfo(segment.key(slot), segment.size_view[slot], created_at, place)

    def _record(self, segment: Segment, block: BlockInfo, record: memoryview) -> memoryview | None:
        """Read a record; None if it is gone. In a slot the payload begins on a new page; here it follows the header."""
        place: _Place = block.place
        page = self._page(segment, place.slot)
        record[:HEADER_BYTES] = page[: min(HEADER_BYTES, len(record))]
        length = len(page)
        if len(record) > HEADER_BYTES:
            offset = place.slot * segment.head.slot_bytes + PAGE
            length = HEADER_BYTES + self._disk.preadv(segment.file.fd, [record[HEADER_BYTES:]], offset)
        if not self._is_there(segment, block):
            return None
        # An engine finds no block in a slot with another mark.
        return record[: min(length, len(record))] if mark_of(page) == segment.mark_view[place.slot] else record[:0]

    def _page(self, segment: Segment, slot: int) -> memoryview:
        page = memoryview(bytearray(PAGE))
        offset = slot * segment.head.slot_bytes
        self._disk.preadv(segment.file.fd, [page], offset)
        # The page cache is for other programs.
        os.posix_fadvise(segment.file.fd, offset, segment.head.slot_bytes, os.POSIX_FADV_DONTNEED)
        return page

    def _is_there(self, segment: Segment, block: BlockInfo) -> bool:
        """Return whether the row of a block has not changed since it was found."""
        place: _Place = block.place
        if place.segment != segment.head.segment:
            return False
        content = files.read_at(self._disk, segment.table.fd, segment.head.row_at(place.slot), ROW_BYTES)
        if len(content) < ROW_BYTES:
            return False
        rows, intact = decode_rows(content, np.array([place.slot]), segment.head)
        return bool(intact[0] and rows["state"][0] == State.USED and rows["generation"][0] == place.generation)

    def _withdraw(self, segment: Segment, blocks: Sequence[BlockInfo], state: int) -> int:
        """Remove blocks of a held segment, as an engine does."""
        found = [block for block in blocks if self._is_there(segment, block)]
        for block in found:
            slot = block.place.slot
            row = encode_rows([segment.next_row(slot, state, 0, 0, b"")], [slot], segment.head.segment)
            files.write_at(self._disk, segment.table.fd, row.tobytes(), segment.head.row_at(slot))
            self._disk.pwritev(segment.file.fd, [_EMPTY_PAGE], slot * segment.head.slot_bytes)
        # As an array, because the addition of a single number would warn of an overflow.
        segment.generations[sorted({block.place.slot // GROUP_ROWS for block in found})] += 1
        files.write_at(self._disk, segment.table.fd, segment.generations.tobytes(), PAGE)
        return len(found)

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except LedgerBusyError as error:
            raise BackendUnavailableError(
                f"{self._tier.paths}: an engine makes or removes a segment. Try again.",
                backend=self.backend.name,
            ) from error
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> NoReturn:
        raise BackendUnavailableError(
            f"{', '.join(self._tier.paths)} cannot be read or changed: {error.strerror or error}. Check the disk, "
            "and that the cache belongs to this user.",
            backend=self.backend.name,
        ) from error
