"""Holdings of a disk tier: its directories are read as engines read each other's, beside engines that use them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NoReturn

from kvstore.backends.disk.config import DiskConfig
from kvstore.backends.disk.files import names_in, open_own_directory, read_json
from kvstore.backends.disk.layout import LOCK_NAME, PAGE, STATE_DIR, Kind, decode_descriptor, is_namespace, is_owner
from kvstore.backends.disk.locks import FileLock
from kvstore.backends.disk.root import not_ours
from kvstore.cli.holdings.base import HeldBlock, HeldNamespace, Holdings, Litter, record_room
from kvstore.cli.holdings.disk_owner import EMPTY_PAGE, HeldOwner, Place
from kvstore.codec.record import HEADER_BYTES, decode_header
from kvstore.diskio import OsDisk
from kvstore.errors import BackendUnavailableError, ConfigError, RecordError
from kvstore.namespace import Namespace

__all__ = ["DiskHoldings"]


class DiskHoldings(Holdings):
    """Holdings of a disk tier.

    Reading takes no lock: whatever is read counts if the owner's journal still says so afterwards. An owner's directory
    is changed only while no engine has it.

    Args:
        config: The tier's configuration.
        disk: What to call the system with.

    Raises:
        ConfigError: There is no disk tier at one of the paths.
    """

    backend = "file"
    header_bytes = HEADER_BYTES

    def __init__(self, config: DiskConfig, disk: OsDisk | None = None) -> None:
        self._disk = disk or OsDisk()
        self._paths = [os.path.abspath(os.path.expanduser(path)) for path in config.paths]
        self._fds: list[int] = []
        self._namespace = ""
        self._owners: dict[str, HeldOwner] = {}
        self._buffer = memoryview(b"")
        for path in self._paths:
            try:
                self._fds.append(self._disk.open_root(path))
                self._disk.close(open_own_directory(self._disk, STATE_DIR, self._fds[-1]))
            except (FileNotFoundError, NotADirectoryError) as error:
                self.close()
                raise ConfigError(f"There is no file tier at {path!r}. Give the 'path' of one.") from error
            except OSError as error:
                self.close()
                self._fail(error)

    def namespaces(self) -> list[HeldNamespace]:
        """See :meth:`Holdings.namespaces`."""
        with self._explained():
            found = [self._describe(name) for name in self._namespace_names()]
        return sorted(found, key=lambda namespace: -namespace.used_at)

    def blocks(self, namespace: HeldNamespace) -> Iterator[HeldBlock]:
        """See :meth:`Holdings.blocks`. When a block was written its header says, so that one page of each is read."""
        page = memoryview(bytearray(PAGE))
        for name in self._owner_names(namespace.hex):
            owner = self._owner(namespace.hex, name)
            if owner is None:
                continue
            columns = owner.columns
            for slot in columns.held().tolist():
                place = Place(name, slot, columns.used_at(slot))
                block = HeldBlock(columns.key(slot), columns.size_bytes(slot), 0.0, place)
                try:
                    length = owner.read(slot, 0, page)
                except FileNotFoundError:
                    continue  # The segment was given up.
                found = decode_descriptor(page) if length == PAGE else None
                if found is not None and found.key == block.key:
                    with contextlib.suppress(RecordError):
                        created_at = decode_header(page[:HEADER_BYTES]).created_ns / 1e9
                        block = HeldBlock(block.key, block.size_bytes, created_at, place)
                elif found is not None or page == EMPTY_PAGE:
                    continue  # Given to another block since, or lost in a power cut.
                yield block

    def read(self, namespace: HeldNamespace, block: HeldBlock) -> memoryview | None:
        """See :meth:`Holdings.read`. In a slot the payload begins on a page of its own; here it follows the header."""
        owner = self._owner(namespace.hex, block.place.owner)
        if owner is None:
            return None
        if len(self._buffer) < block.size_bytes:
            self._buffer = record_room(block.size_bytes)
        page, record = memoryview(bytearray(PAGE)), self._buffer[: block.size_bytes]
        try:
            length = owner.read(block.place.slot, 0, page)
            record[:HEADER_BYTES] = page[: min(HEADER_BYTES, len(record))]
            if len(record) > HEADER_BYTES:
                length = HEADER_BYTES + owner.read(block.place.slot, PAGE, record[HEADER_BYTES:])
            owner.refresh()
        except FileNotFoundError:
            return None
        if not owner.still_holds(block):
            return None
        # Without a right page its engine does not find the block, whatever the record's own header says.
        found = decode_descriptor(page)
        return record[: min(length, len(record))] if found is not None and found.key == block.key else record[:0]

    def set_aside(self, namespace: HeldNamespace, blocks: Sequence[HeldBlock]) -> int:
        """See :meth:`Holdings.set_aside`. The slots are out of use from now on; a running engine does that itself."""
        return self._withdraw(namespace.hex, blocks, Kind.BAD)

    def remove(self, namespace: HeldNamespace, blocks: Sequence[HeldBlock] | None) -> int:
        """See :meth:`Holdings.remove`. Locked while it goes, so that no engine comes to life in it."""
        if blocks is not None:
            return self._withdraw(namespace.hex, blocks, Kind.REMOVE)
        removed = 0
        with self._explained():
            for name in self._owner_names(namespace.hex):
                with self._locked(namespace.hex, name) as owner:
                    removed += 0 if owner is None else owner.remove()
            self._leave()
            for root in self._fds:
                with contextlib.suppress(OSError):
                    # What an engine is in stays.
                    with self._directory(root, namespace.hex) as fd:
                        for name in filter(is_owner, names_in(self._disk, fd)):
                            with contextlib.suppress(OSError):
                                self._disk.rmdir(name, fd)
                        self._disk.unlink("namespace.json", fd)
                    self._disk.rmdir(namespace.hex, root)
        return removed

    def litter(self) -> list[Litter]:
        """See :meth:`Holdings.litter`."""
        found: list[Litter] = []
        with self._explained():
            for namespace in self._namespace_names():
                for name in self._owner_names(namespace):
                    with self._locked(namespace, name) as owner:
                        if owner is not None:
                            found += [
                                Litter(f"{namespace}/{name}/{each.name}", each.why, each.size_bytes)
                                for each in owner.litter()
                            ]
        return found

    def sweep(self, litter: Sequence[Litter]) -> int:
        """See :meth:`Holdings.sweep`."""
        removed = 0
        with self._explained():
            for (namespace, name), pieces in groupby(litter, lambda piece: piece.name.split("/")[:2]):
                with self._locked(namespace, name) as owner:
                    still = {each.name for each in owner.litter()} if owner is not None else set()
                    for file in still & {piece.name.split("/")[2] for piece in pieces}:
                        removed += owner is not None and owner.unlink(file)
        return removed

    def close(self) -> None:
        """See :meth:`Holdings.close`."""
        self._leave()
        fds, self._fds = self._fds, []
        for fd in fds:
            self._disk.close(fd)

    def _withdraw(self, namespace: str, blocks: Sequence[HeldBlock], kind: int) -> int:
        withdrawn = 0
        with self._explained():
            for name, of_owner in groupby(sorted(blocks, key=lambda b: b.place), lambda b: b.place.owner):
                with self._locked(namespace, name) as owner:
                    withdrawn += 0 if owner is None else owner.withdraw(list(of_owner), kind)
        return withdrawn

    def _namespace_names(self) -> list[str]:
        """Return the names of namespaces that are directories of ours."""
        found = []
        for name in filter(is_namespace, names_in(self._disk, self._fds[0])):
            with not_ours():
                self._disk.close(open_own_directory(self._disk, name, self._fds[0]))
                found.append(name)
        return found

    def _describe(self, namespace: str) -> HeldNamespace:
        fields, times, holders = None, [0.0], 0
        with contextlib.suppress(OSError, KeyError, TypeError, ConfigError):
            # For people: without it, or with something else in its place, the blocks are as good.
            with self._directory(self._fds[0], namespace) as fd:
                stated = (read_json(self._disk, "namespace.json", fd) or {})["fields"]
            fields = stated if Namespace(stated).hex == namespace else None
        for name in self._owner_names(namespace):
            with not_ours(), self._directory(self._fds[0], namespace, name) as fd:
                times += [self._disk.stat(each, fd).st_mtime for each in names_in(self._disk, fd)]
                with self._lock(fd) as is_free:
                    holders += not is_free
        holder = "" if not holders else "an engine" if holders == 1 else f"{holders} engines"
        return HeldNamespace(namespace, fields, holder, max(times))

    def _owner_names(self, namespace: str) -> list[str]:
        with not_ours(), self._directory(self._fds[0], namespace) as fd:
            return sorted(filter(is_owner, names_in(self._disk, fd)))
        return []

    def _owner(self, namespace: str, name: str) -> HeldOwner | None:
        """Return an owner, open until another namespace is looked at; None if there is nothing to read."""
        if namespace != self._namespace:
            self._leave()
            self._namespace = namespace
        if name not in self._owners:
            fds: list[int] = []
            with not_ours():
                try:
                    for root in self._fds:
                        with self._directory(root, namespace) as fd:
                            fds.append(open_own_directory(self._disk, name, fd))
                    self._owners[name] = HeldOwner(self._disk, name, fds, bytes.fromhex(namespace))
                except BaseException:
                    for fd in fds:
                        self._disk.close(fd)
                    raise
        return self._owners.get(name)

    @contextlib.contextmanager
    def _locked(self, namespace: str, name: str) -> Iterator[HeldOwner | None]:
        """Hold an owner's directory as an engine does; None if an engine has it, or there is nothing to read."""
        owner = self._owner(namespace, name)
        if owner is None:
            yield None
            return
        with self._lock(owner.fds[0]) as is_free:
            yield owner if is_free else None

    @contextlib.contextmanager
    def _lock(self, owner_fd: int) -> Iterator[bool]:
        lock = FileLock(self._disk, owner_fd, LOCK_NAME)
        try:
            is_free = lock.try_acquire(create=False)
        except FileNotFoundError:
            is_free = True  # Begun or removed by halves; nobody uses it.
        try:
            yield is_free
        finally:
            lock.release()

    @contextlib.contextmanager
    def _directory(self, fd: int, *names: str) -> Iterator[int]:
        with contextlib.ExitStack() as stack:
            for name in names:
                fd = open_own_directory(self._disk, name, fd)
                stack.callback(self._disk.close, fd)
            yield fd

    def _leave(self) -> None:
        for owner in self._owners.values():
            owner.close()
        self._owners.clear()
        self._namespace = ""

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> NoReturn:
        raise BackendUnavailableError(
            f"{', '.join(self._paths)} can't be read or changed: {error.strerror or error}. Check the disk, and that "
            "the cache is this user's.",
            backend=self.backend,
        ) from error
