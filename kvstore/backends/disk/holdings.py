"""Holdings of a disk tier: the directories of all owners, read while engines use them.

Reading takes no lock: a record counts if its owner's journal still lists it afterwards. A change to an owner's
directory requires its lock, so directories in use by an engine are never changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, NoReturn

from kvstore.backends.base import Backend
from kvstore.backends.disk import files, layout
from kvstore.backends.disk.columns import Columns
from kvstore.backends.disk.config import DiskConfig
from kvstore.backends.disk.files import FileLock
from kvstore.backends.disk.journal import OwnerState, append_rows, load_owner
from kvstore.backends.disk.layout import PAGE, Kind
from kvstore.backends.disk.notes import NOTES_TMP_NAME
from kvstore.backends.disk.root import not_ours
from kvstore.backends.holdings import Holdings, ReadResult, StaleItem, fields_in
from kvstore.codec.record import HEADER_BYTES, decode_header
from kvstore.config import TierConfig
from kvstore.diskio import OsDisk
from kvstore.errors import BackendUnavailableError, ConfigError, RecordError
from kvstore.namespace import Namespace
from kvstore.types import BlockInfo, BlockKey, NamespaceInfo, RemovalCause

_EMPTY_PAGE = bytes(PAGE)
_SCAN_SLOTS = 1024


class _Place(NamedTuple):
    """Location of a block: owner, slot, and the number of the owner's last change known when it was found."""

    owner: str
    slot: int
    seen: int


class DiskHoldings(Holdings):
    """Holdings of a disk tier. Every method blocks the loop, on which nothing else runs."""

    knows_holders = True

    def __init__(self, backend: type[Backend], config: TierConfig) -> None:
        super().__init__(backend, config)
        if not isinstance(config, DiskConfig):
            raise ConfigError(f"A disk tier is configured by a DiskConfig. Got {type(config).__name__}.")
        self.header_bytes = HEADER_BYTES
        self._disk = OsDisk()
        self._paths = [os.path.abspath(os.path.expanduser(path)) for path in config.paths]
        self._fds: list[int] = []
        self._namespace = ""
        self._owners: dict[str, _Owner] = {}

    async def open(self) -> None:
        for path in self._paths:
            try:
                self._fds.append(self._disk.open_root(path))
                self._disk.close(files.open_own_directory(self._disk, layout.STATE_DIR, self._fds[-1]))
            except (FileNotFoundError, NotADirectoryError) as error:
                raise ConfigError(f"There is no file tier at {path!r}. Give the 'path' of one.") from error
            except OSError as error:
                self._fail(error)

    async def close(self) -> None:
        self._leave()
        fds, self._fds = self._fds, []
        for fd in fds:
            self._disk.close(fd)

    async def namespaces(self) -> list[NamespaceInfo]:
        with self._failures():
            return [self._describe(name) for name in self._namespace_names()]

    async def scan(self, namespace: NamespaceInfo) -> AsyncGenerator[Sequence[BlockInfo], None]:
        """See :meth:`Holdings.scan`. Reads one page of each block: its header has the time of writing."""
        with self._failures():
            for name in self._owner_names(namespace.hex):
                if (owner := self._owner(namespace.hex, name)) is not None:
                    held = owner.columns.held().tolist()
                    for start in range(0, len(held), _SCAN_SLOTS):
                        found = map(owner.block, held[start : start + _SCAN_SLOTS])
                        yield [block for block in found if block is not None]
                        await asyncio.sleep(0)

    async def present(self, namespace: NamespaceInfo, keys: Collection[BlockKey]) -> set[BlockKey]:
        """See :meth:`Holdings.present`. Reads one page of each of these blocks."""
        found, wanted = set[BlockKey](), set(keys)
        with self._failures():
            for name in self._owner_names(namespace.hex):
                if (owner := self._owner(namespace.hex, name)) is not None:
                    held = owner.columns.held()
                    slots = [
                        slot
                        for slot, key in zip(held.tolist(), owner.columns.keys_in(held), strict=True)
                        if key in wanted
                    ]
                    found.update(block.key for block in map(owner.block, slots) if block is not None)
        return found

    async def read(self, namespace: NamespaceInfo, blocks: Sequence[BlockInfo]) -> Sequence[ReadResult]:
        results: list[ReadResult] = []
        for block, room in zip(blocks, self._rooms(blocks), strict=True):
            try:
                owner = self._owner(namespace.hex, block.place.owner)
                results.append(None if owner is None else owner.read_block(block, room))
            except OSError as error:
                results.append(self._error(f"cannot be read: {error.strerror or error}"))
        return results

    async def remove(self, namespace: NamespaceInfo, blocks: Sequence[BlockInfo], cause: RemovalCause) -> int:
        """See :meth:`Holdings.remove`. The slots of damaged records are never used again."""
        kind, removed = Kind.BAD if cause is RemovalCause.CORRUPT else Kind.REMOVE, 0
        with self._failures():
            for name, of_owner in groupby(sorted(blocks, key=lambda b: b.place), lambda b: b.place.owner):
                with self._locked(namespace.hex, name) as owner:
                    removed += 0 if owner is None else owner.withdraw(list(of_owner), kind)
        return removed

    async def remove_namespace(self, namespace: NamespaceInfo) -> int:
        removed = 0
        with self._failures():
            for name in self._owner_names(namespace.hex):
                with self._locked(namespace.hex, name) as owner:
                    removed += 0 if owner is None else owner.remove()
            self._leave()
            for root in self._fds:
                with contextlib.suppress(OSError):
                    with self._directory(root, namespace.hex) as fd:
                        for name in filter(layout.is_owner, files.names_in(self._disk, fd)):
                            with contextlib.suppress(OSError):
                                self._disk.rmdir(name, fd)
                        if any(map(layout.is_owner, files.names_in(self._disk, fd))):
                            continue  # An engine uses it again.
                        self._disk.unlink("namespace.json", fd)
                    self._disk.rmdir(namespace.hex, root)
        return removed

    async def stale_items(self) -> list[StaleItem]:
        found: list[StaleItem] = []
        with self._failures():
            for namespace in self._namespace_names():
                for name in self._owner_names(namespace):
                    with self._locked(namespace, name) as owner:
                        for file, why, size_bytes in () if owner is None else owner.stale_items():
                            found.append(StaleItem(f"{namespace}/{name}/{file}", why, size_bytes))
        return found

    async def sweep(self, stale: Sequence[StaleItem]) -> int:
        removed = 0
        with self._failures():
            for (namespace, name), pieces in groupby(stale, lambda piece: piece.name.split("/")[:2]):
                with self._locked(namespace, name) as owner:
                    still = {file for file, _, _ in owner.stale_items()} if owner is not None else set()
                    for file in still & {piece.name.split("/")[2] for piece in pieces}:
                        removed += owner is not None and owner.unlink(file)
        return removed

    async def writer(self, namespace: Namespace, payload_bytes_max: int) -> Backend:
        """See :meth:`Holdings.writer`. Waits for recovery: before it ends, a block might be stored twice."""
        backend = await super().writer(namespace, payload_bytes_max)
        try:
            async for _ in backend.scan_keys():
                continue
        except BaseException:
            await backend.close()
            raise
        return backend

    def _namespace_names(self) -> list[str]:
        found = []
        for name in filter(layout.is_namespace, files.names_in(self._disk, self._fds[0])):
            with not_ours():
                self._disk.close(files.open_own_directory(self._disk, name, self._fds[0]))
                found.append(name)
        return found

    def _describe(self, namespace: str) -> NamespaceInfo:
        fields, times, holders = None, [0.0], 0
        # namespace.json is for people; blocks are valid without it.
        with contextlib.suppress(OSError), self._directory(self._fds[0], namespace) as fd:
            fields = fields_in(files.read_json(self._disk, "namespace.json", fd), namespace)
        for name in self._owner_names(namespace):
            with not_ours(), self._directory(self._fds[0], namespace, name) as fd:
                times += [file.st_mtime for file in files.entries_in(self._disk, fd).values()]
                with self._lock(fd) as is_free:
                    holders += not is_free
        holder = "" if not holders else "an engine" if holders == 1 else f"{holders} engines"
        return NamespaceInfo(namespace, fields, holder, max(times))

    def _owner_names(self, namespace: str) -> list[str]:
        with not_ours(), self._directory(self._fds[0], namespace) as fd:
            return sorted(filter(layout.is_owner, files.names_in(self._disk, fd)))
        return []

    def _owner(self, namespace: str, name: str) -> _Owner | None:
        """Return an owner, open until another namespace is used; None if it has no readable files."""
        if namespace != self._namespace:
            self._leave()
            self._namespace = namespace
        if name not in self._owners:
            fds: list[int] = []
            with not_ours():
                try:
                    for root in self._fds:
                        with self._directory(root, namespace) as fd:
                            fds.append(files.open_own_directory(self._disk, name, fd))
                    self._owners[name] = _Owner(self._disk, name, fds, bytes.fromhex(namespace))
                except BaseException:
                    for fd in fds:
                        self._disk.close(fd)
                    raise
        return self._owners.get(name)

    @contextlib.contextmanager
    def _locked(self, namespace: str, name: str) -> Iterator[_Owner | None]:
        """Hold an owner's lock; None if an engine has it, or the owner has no readable files."""
        owner = self._owner(namespace, name)
        if owner is None:
            yield None
            return
        with self._lock(owner.fds[0]) as is_free:
            yield owner if is_free else None

    @contextlib.contextmanager
    def _lock(self, owner_fd: int) -> Iterator[bool]:
        lock = FileLock(self._disk, owner_fd, layout.LOCK_NAME)
        try:
            is_free = lock.try_acquire(create=False)
        except FileNotFoundError:
            is_free = True  # Partly created or partly removed, so not in use.
        try:
            yield is_free
        finally:
            lock.release()

    @contextlib.contextmanager
    def _directory(self, fd: int, *names: str) -> Iterator[int]:
        with contextlib.ExitStack() as stack:
            for name in names:
                fd = files.open_own_directory(self._disk, name, fd)
                stack.callback(self._disk.close, fd)
            yield fd

    def _leave(self) -> None:
        for owner in self._owners.values():
            owner.close()
        self._owners.clear()
        self._namespace = ""

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> NoReturn:
        raise BackendUnavailableError(
            f"{', '.join(self._paths)} cannot be read or changed: {error.strerror or error}. Check the disk, and that "
            "the cache belongs to this user.",
            backend=self.backend.name,
        ) from error


class _Owner:
    """The files of one owner, kept current through its journal, and the segment that was read last."""

    def __init__(self, disk: OsDisk, name: str, fds: list[int], digest: bytes) -> None:
        self.name = name
        self.fds = fds
        self._disk = disk
        self._digest = digest
        self._segment = (-1, -1)
        self._seen = 0
        self._changed: dict[int, int] = {}
        self._all_changed = 0
        loaded = load_owner(disk, fds, int(name, 16), digest)
        if loaded is None:
            raise FileNotFoundError(f"{name} has no journal")
        self._take(loaded)

    def block(self, slot: int) -> BlockInfo | None:
        """Return the block in a slot; None if the slot has been reused or was lost in a power cut."""
        key, size_bytes = self.columns.key(slot), self.columns.size_view[slot]
        page, created_at = memoryview(bytearray(PAGE)), 0.0
        try:
            length = self._read(slot, 0, page)
        except FileNotFoundError:
            return None
        found = layout.decode_descriptor(page) if length == PAGE else None
        if found is not None and found.key == key:
            with contextlib.suppress(RecordError):
                created_at = decode_header(page[:HEADER_BYTES]).created_ns / 1e9
        elif found is not None or page == _EMPTY_PAGE:
            return None
        return BlockInfo(key, size_bytes, created_at, _Place(self.name, slot, self._seen))

    def read_block(self, block: BlockInfo, record: memoryview) -> memoryview | None:
        """Read a record; None if it is gone. In a slot the payload begins on a new page; here it follows the header."""
        page, slot = memoryview(bytearray(PAGE)), block.place.slot
        try:
            length = self._read(slot, 0, page)
            record[:HEADER_BYTES] = page[: min(HEADER_BYTES, len(record))]
            if len(record) > HEADER_BYTES:
                length = HEADER_BYTES + self._read(slot, PAGE, record[HEADER_BYTES:])
            self._refresh()
        except FileNotFoundError:
            return None
        if not self._still_holds(block):
            return None
        # Without a valid descriptor the engine does not find the block, even if the record's own header is intact.
        found = layout.decode_descriptor(page)
        return record[: min(length, len(record))] if found is not None and found.key == block.key else record[:0]

    def withdraw(self, blocks: Sequence[BlockInfo], kind: int) -> int:
        """Remove blocks that have not changed since they were found; the caller holds the owner's lock."""
        self._refresh()
        found = [block for block in blocks if self._still_holds(block)]
        for block in found:
            fd = self._open(block.place.slot, os.O_RDWR)
            self._disk.pwritev(fd, [_EMPTY_PAGE], self._state.geometry.offset_of(block.place.slot))
        rows = [(kind, block.place.slot, 0, layout.digest_of(block.key), block.key) for block in found]
        append_rows(self._disk, self.fds[0], self._state, int(self.name, 16), rows)
        self._refresh()
        return len(found)

    def remove(self) -> int:
        """Remove all files, the lock file last; return the number of blocks removed. The caller holds the lock."""
        for fd in self.fds:
            files.remove_owner_files(self._disk, fd)
        return len(self.columns.held())

    def stale_items(self) -> list[tuple[str, str, int]]:
        """Return name, reason and length of the files that are not in use; the caller holds the owner's lock."""
        self._refresh()
        found = []
        for fd in self.fds:
            for name, status in files.entries_in(self._disk, fd).items():
                number = layout.segment_number(name)
                if name == layout.INDEX_TMP_NAME:
                    why = "unfinished snapshot"
                elif name == NOTES_TMP_NAME:
                    why = "unfinished notes"
                elif number is not None and self._state.intact and number not in self.columns.segments.nonzero()[0]:
                    why = "segment that no journal lists"
                else:
                    continue
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    found.append((name, why, status.st_size))
        return found

    def unlink(self, name: str) -> bool:
        """Remove a file; the caller holds the owner's lock."""
        removed = False
        for fd in self.fds:
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(name, fd)
                removed = True
        return removed

    def close(self) -> None:
        """Close its files."""
        self._close_segment()
        self._state.reader.close()
        for fd in self.fds:
            self._disk.close(fd)

    def _refresh(self) -> None:
        """Apply the journal records written since; if the journal cannot be read, every slot counts as changed."""
        try:
            for records in self._state.reader.read():
                self._seen += 1
                self.columns.apply(records)
                self._changed.update(dict.fromkeys(records["slot"].tolist(), self._seen))
        except OSError:
            loaded = load_owner(self._disk, self.fds, int(self.name, 16), self._digest)
            if loaded is None:
                raise
            self._state.reader.close()
            self._seen += 1
            self._all_changed = self._seen
            self._take(loaded)

    def _still_holds(self, block: BlockInfo) -> bool:
        slot, columns = block.place.slot, self.columns
        unchanged = block.place.seen >= max(self._all_changed, self._changed.get(slot, 0))
        return unchanged and slot < len(columns.size) and columns.holds(slot, block.key)

    def _read(self, slot: int, at: int, buffer: memoryview) -> int:
        """Read a part of a slot, keeping it out of the page cache; return the bytes read."""
        geometry = self._state.geometry
        length = self._disk.preadv(self._open(slot, os.O_RDONLY), [buffer], geometry.offset_of(slot) + at)
        os.posix_fadvise(self._segment[1], geometry.offset_of(slot), geometry.slot_bytes, os.POSIX_FADV_DONTNEED)
        return length

    def _take(self, state: OwnerState) -> None:
        self._state = state
        self.columns: Columns = state.columns

    def _open(self, slot: int, flags: int) -> int:
        number = slot // self._state.geometry.segment_slots
        if self._segment[0] != number or flags != os.O_RDONLY:
            self._close_segment()
            # Roots may have been added to the configuration since.
            directory = self.fds[number % min(len(self.fds), self._state.geometry.paths)]
            fd, _ = files.open_regular(self._disk, layout.segment_name(number), flags, directory)
            self._segment = (number, fd)
        return self._segment[1]

    def _close_segment(self) -> None:
        if self._segment[1] >= 0:
            self._disk.close(self._segment[1])
        self._segment = (-1, -1)
