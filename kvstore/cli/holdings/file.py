"""Holdings of a file tier: its directories are walked, beside engines that use them."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import msgspec

from kvstore.backends.file.config import FileConfig
from kvstore.backends.file.counters import Counters
from kvstore.backends.file.idle import IdleNamespaces
from kvstore.backends.file.layout import (
    NAMESPACE_DOCUMENT,
    STATE_DIR,
    block_name,
    is_namespace,
    is_shard,
    key_of,
    lock_name,
    quarantine_name,
    snapshot_name,
    tmp_writer,
    writer_name,
    writer_of,
)
from kvstore.backends.file.ledger import Ledger, Removal
from kvstore.backends.file.locks import FileLock
from kvstore.backends.file.quarantine import Quarantine
from kvstore.backends.file.root import Root, open_root
from kvstore.backends.file.space import charge
from kvstore.backends.file.statefile import read_file
from kvstore.backends.file.writers import holds_lock, is_alive, new_writer, retire_writer
from kvstore.cli.holdings.base import HeldBlock, HeldNamespace, Holdings, Litter
from kvstore.diskio import ALIGNMENT, OsDisk, read_into
from kvstore.errors import BackendUnavailableError, ConfigError
from kvstore.namespace import Namespace

__all__ = ["FileHoldings"]

_DOCUMENT_BYTES_MAX: Final = 1 << 24
"""Longest ``namespace.json``: a model's whole configuration is a few thousand bytes."""


_NOT_OURS: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES})
"""A directory that has gone, or that is something else, or somebody else's."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Which file a block was when it was found."""

    shard: str
    inode: int
    changed_ns: int


class FileHoldings(Holdings):
    """Holdings of a file tier.

    Reading takes no lock: a block's file is whole as long as it has its name. Removing goes through the ledger that the
    engines share, and touches a namespace only while nobody holds it.

    Args:
        config: The tier's configuration.
        disk: What to call the system with.

    Raises:
        ConfigError: There is no file tier at ``path``, or it belongs to another user.
    """

    backend = "file"
    header_bytes = ALIGNMENT

    def __init__(self, config: FileConfig, disk: OsDisk | None = None) -> None:
        self._config = config
        self._disk = disk or OsDisk()
        self._path = os.path.abspath(os.path.expanduser(config.path))
        self._stack = contextlib.ExitStack()
        self._buffer = bytearray()
        try:
            self._fd = self._opened(self._disk.open_root, self._path)
            self._state_fd = self._opened(self._disk.open_dir, STATE_DIR, self._fd)
        except (FileNotFoundError, NotADirectoryError) as error:
            self.close()
            raise ConfigError(f"There is no file tier at {self._path!r}. Give the 'path' of one.") from error
        except OSError as error:
            self.close()
            self._fail(error)

    def namespaces(self) -> list[HeldNamespace]:
        """See :meth:`Holdings.namespaces`."""
        with self._explained():
            found = [self._namespace(name) for name in self._own_namespaces()]
        return sorted(found, key=lambda namespace: -namespace.used_at)

    def blocks(self, namespace: HeldNamespace) -> Iterator[HeldBlock]:
        """See :meth:`Holdings.blocks`."""
        for shard, name, status in self._files(namespace.hex):
            key = key_of(name)
            if key is not None:
                place = _Place(shard, status.st_ino, status.st_ctime_ns)
                yield HeldBlock(key, status.st_size, status.st_mtime, place)

    def read(self, namespace: HeldNamespace, block: HeldBlock) -> memoryview | None:
        """See :meth:`Holdings.read`. What was read is dropped from the page cache, where it would be in the way."""
        try:
            with self._directory(namespace.hex, block.place.shard) as dir_fd:
                fd = self._disk.open_file(block_name(block.key), os.O_RDONLY, dir_fd)
                try:
                    size_bytes = self._disk.fstat(fd).st_size
                    if len(self._buffer) < size_bytes:
                        self._buffer = bytearray(size_bytes)
                    view = memoryview(self._buffer)[:size_bytes]
                    length = read_into(self._disk, fd, [view], size_bytes)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    return view[:length]
                finally:
                    self._disk.close(fd)
        except FileNotFoundError:
            return None

    def set_aside(self, namespace: HeldNamespace, blocks: Sequence[HeldBlock]) -> int:
        """See :meth:`Holdings.set_aside`. An engine that holds the namespace finds out by a miss, and counts anew."""
        with self._writing() as (root, ledger):
            quarantine = Quarantine(
                self._disk,
                root.state_fd,
                ledger,
                blocks_max=self._config.quarantine_blocks,
                bytes_max=self._config.quarantine_bytes,
            )
            return sum(self._set_one_aside(namespace.hex, block, quarantine, ledger) for block in blocks)

    def remove(self, namespace: HeldNamespace, blocks: Sequence[HeldBlock] | None) -> int:
        """See :meth:`Holdings.remove`. Locked while it goes, so that no engine comes to life in it."""
        names = None if blocks is None else {(block.place.shard, block_name(block.key)) for block in blocks}
        with self._writing() as (root, ledger):
            counters = Counters("evicted_idle_blocks")
            return IdleNamespaces(self._disk, root, ledger, counters, "").drop(namespace.hex, names)

    def litter(self) -> list[Litter]:
        """See :meth:`Holdings.litter`."""
        found: list[Litter] = []
        with self._explained():
            for name in self._names(self._state_fd, _is_of_writer):
                found += self._dead(name, self._state_fd, STATE_DIR)
            for namespace in self._own_namespaces():
                with contextlib.suppress(FileNotFoundError), self._directory(namespace) as fd:
                    for name in self._names(fd, _is_of_writer):
                        found += self._dead(name, fd, namespace)
                for shard, name, status in self._files(namespace):
                    where = f"{namespace}/{shard}"
                    if key_of(name) is not None and status.st_size < ALIGNMENT:
                        found.append(Litter(f"{where}/{name}", "cut off by a power failure", status.st_size))
                    elif tmp_writer(name) is not None:
                        with contextlib.suppress(FileNotFoundError), self._directory(namespace, shard) as fd:
                            found += self._dead(name, fd, where)
        return found

    def sweep(self, litter: Sequence[Litter]) -> int:
        """See :meth:`Holdings.sweep`."""
        removed = 0
        with self._explained():
            for piece in litter:
                *parents, name = piece.name.split("/")
                with contextlib.suppress(FileNotFoundError), self._directory(*parents) as fd:
                    writer = writer_of(name)
                    if writer is not None:
                        removed += not holds_lock(self._disk, fd, writer, bury=True)
                    else:
                        self._disk.unlink(name, fd)
                        removed += 1
        return removed

    def close(self) -> None:
        """See :meth:`Holdings.close`."""
        self._stack.close()

    def _set_one_aside(self, namespace: str, block: HeldBlock, quarantine: Quarantine, ledger: Ledger) -> bool:
        """Move a block into the quarantine, or delete it if it can't be kept there; False if it is another one now."""
        name = block_name(block.key)
        with contextlib.suppress(FileNotFoundError), self._directory(namespace, block.place.shard) as fd:
            status = self._disk.stat(name, fd)
            if (status.st_ino, status.st_ctime_ns) != (block.place.inode, block.place.changed_ns):
                return False
            size_bytes = charge(status.st_size)
            if quarantine.make_room(size_bytes):
                kept = quarantine_name(namespace, block.key, quarantine.next_time_ns())
                return quarantine.take(name, fd, kept, status.st_ino)
            removal = Removal(size_bytes, 1)
            ledger.begin(removal)
            try:
                self._disk.unlink(name, fd)
            except OSError:
                ledger.end(removal, (0, 0))
                raise
            ledger.end(removal, (size_bytes, 1))
            return True
        return False

    def _own_namespaces(self) -> list[str]:
        """Return the directories of namespaces; what somebody else has put there under such a name is not ours."""
        found = []
        for name in self._names(self._fd, is_namespace):
            try:
                with self._directory(name) as fd:
                    is_own = self._disk.fstat(fd).st_uid == os.geteuid()
            except OSError as error:
                if error.errno not in _NOT_OURS:
                    raise
                is_own = False
            found += [name] if is_own else []
        return found

    def _namespace(self, name: str) -> HeldNamespace:
        lock = FileLock(self._disk, self._state_fd, lock_name(name))
        times, holder = [0.0], ""
        for state_name in (lock_name(name), snapshot_name(name)):
            with contextlib.suppress(FileNotFoundError):
                times.append(self._disk.stat(state_name, self._state_fd).st_mtime)
        with contextlib.suppress(FileNotFoundError):
            if lock.try_acquire(exclusive=True, create=False):
                lock.release()
            else:
                holder = lock.owner() or "an engine"
        return HeldNamespace(name, self._fields(name), holder, max(times))

    def _fields(self, name: str) -> dict[str, Any] | None:
        """Return what a namespace stands for, if its document says so and is right."""
        with contextlib.suppress(OSError, msgspec.MsgspecError, KeyError, TypeError, ConfigError):
            # For people: without it, or with something else in its place, the blocks are as good.
            with self._directory(name) as fd:
                text = read_file(self._disk, NAMESPACE_DOCUMENT, fd, _DOCUMENT_BYTES_MAX)
            fields: dict[str, Any] = msgspec.json.decode(text or b"")["fields"]
            if Namespace(fields).hex == name:
                return fields
        return None

    def _files(self, namespace: str) -> Iterator[tuple[str, str, os.stat_result]]:
        """Yield shard, name and status of the files of ours in a namespace; what goes meanwhile is left out."""
        for shard in sorted(self._shards(namespace)):
            try:
                with self._directory(namespace, shard) as fd:
                    for name in sorted(self._names(fd, lambda name: True)):
                        with contextlib.suppress(FileNotFoundError):
                            status = self._disk.stat(name, fd)
                            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                                yield shard, name, status
            except OSError as error:
                if error.errno not in _NOT_OURS:
                    raise

    def _shards(self, namespace: str) -> list[str]:
        # An engine may have evicted the last block of it just now.
        with contextlib.suppress(FileNotFoundError), self._directory(namespace) as fd:
            return self._names(fd, is_shard)
        return []

    def _dead(self, name: str, dir_fd: int, where: str) -> list[Litter]:
        """Return what a name says of a dead writer, if it does."""
        lock, tmp = writer_of(name), tmp_writer(name)
        try:
            size_bytes = self._disk.stat(name, dir_fd).st_size
        except FileNotFoundError:
            return []
        if tmp is not None and not is_alive(self._disk, self._state_fd, tmp):
            return [Litter(f"{where}/{name}", "not published by a writer that died", size_bytes)]
        if lock is not None and not holds_lock(self._disk, dir_fd, lock):
            return [Litter(f"{where}/{name}", "lock of a writer that died", size_bytes)]
        return []

    @contextlib.contextmanager
    def _writing(self) -> Iterator[tuple[Root, Ledger]]:
        """Take part in the root as a writer, as engines do."""
        with contextlib.ExitStack() as stack, self._explained():
            writer = new_writer()
            stack.callback(retire_writer, writer)
            root = open_root(self._disk, self._config, writer)
            stack.callback(root.close, self._disk)
            lock = FileLock(self._disk, root.state_fd, writer_name(writer))
            lock.try_acquire(exclusive=True)
            stack.callback(lock.release, remove=True)
            ledger = Ledger(self._disk, root.fd, root.state_fd, writer)
            stack.callback(ledger.close)
            ledger.open()
            yield root, ledger

    @contextlib.contextmanager
    def _directory(self, *names: str) -> Iterator[int]:
        with contextlib.ExitStack() as stack:
            fd = self._fd
            for name in names:
                fd = self._disk.open_dir(name, fd)
                stack.callback(self._disk.close, fd)
            yield fd

    def _names(self, fd: int, wanted: Callable[[str], bool]) -> list[str]:
        # The position of a descriptor is shared by all who scan it, so the directory is opened once more.
        own_fd = self._disk.open_dir(".", fd)
        try:
            with self._disk.scandir(own_fd) as entries:
                return [entry.name for entry in entries if wanted(entry.name)]
        finally:
            self._disk.close(own_fd)

    def _opened(self, open_: Callable[..., int], *arguments: Any) -> int:
        fd = open_(*arguments)
        self._stack.callback(self._disk.close, fd)
        return fd

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> NoReturn:
        raise BackendUnavailableError(
            f"{self._path!r} can't be read or changed: {error.strerror or error}. Check the disk, and that the cache "
            "is this user's.",
            backend=self.backend,
        ) from error


def _is_of_writer(name: str) -> bool:
    return writer_of(name) is not None or tmp_writer(name) is not None
