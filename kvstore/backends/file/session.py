"""A session: everything that an open file backend holds of its root, from ``open`` to ``close``."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from kvstore.backends.base import RecordGeometry
from kvstore.backends.file.config import FileConfig
from kvstore.backends.file.counters import Counters
from kvstore.backends.file.directories import Directories
from kvstore.backends.file.layout import NAMESPACE_DOCUMENT, is_namespace, lock_name, tmp_name, writer_name
from kvstore.backends.file.ledger import Ledger
from kvstore.backends.file.locks import FileLock
from kvstore.backends.file.root import Root, open_root
from kvstore.backends.file.space import Limits, charge, resolve_limits
from kvstore.backends.file.statefile import publish_file
from kvstore.backends.file.writers import new_writer, process_description, retire_writer
from kvstore.diskio import OsDisk
from kvstore.errors import BackendUnavailableError, LockedError
from kvstore.namespace import Namespace

__all__ = ["Session"]

_log = logging.getLogger("kvstore.backends.file")

_COUNTS: Final = (
    "direct_io_fallbacks",
    "evicted_blocks",
    "evicted_bytes",
    "evicted_idle_blocks",
    "eviction_errors",
    "foreign_objects",
    "io_errors",
    "lost_blocks",
    "no_space_blocks",
    "quarantined_blocks",
    "recovered_from_scan",
    "recovered_from_snapshot",
    "scan_errors",
    "snapshots",
    "swept_tmp",
    "swept_torn",
    "upkeep_errors",
)

_LOCK_TRIES_MAX: Final = 100
_LOCK_PAUSE_S: Final = 0.001

_DOCUMENT_NUMBER: Final = 0xFFFFFFFE
"""Number of the unpublished ``namespace.json``; blocks are numbered from 1."""


@dataclass(slots=True)
class Session:
    """What is held. Its methods block, and are called one after the other.

    Attributes:
        disk: What calls the system.
        config: How it was asked for.
        namespace: Whose blocks.
        geometry: How large they are.
        counters: Where everything counts.
        writer: Who we are.
        root: The root directory.
        limits: Space that may be used.
        ledger: Space that is used.
        directories: Those of the namespace.
    """

    disk: OsDisk
    config: FileConfig
    namespace: Namespace
    geometry: RecordGeometry
    counters: Counters = field(default_factory=lambda: Counters(*_COUNTS))
    writer: str = field(default_factory=new_writer)
    root: Root = field(init=False)
    limits: Limits = field(init=False)
    ledger: Ledger = field(init=False)
    directories: Directories = field(init=False)
    _namespace_lock: FileLock = field(init=False)
    _releases: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def block_bytes(self) -> int:
        """What the largest block is charged."""
        return charge(self.geometry.record_bytes_max)

    def open_root(self) -> None:
        """Open the root and say that we are there.

        Raises:
            ConfigError: The root or the limits can't be used.
            BackendUnavailableError: The disk fails.
        """
        self.root = open_root(self.disk, self.config, self.writer)
        self._releases.callback(self.root.close, self.disk)
        with self._explained("opening the directory"):
            filesystem = self.disk.statvfs(self.root.fd)
            self.limits = resolve_limits(self.config, self.geometry.record_bytes_max, filesystem)
            lock = FileLock(self.disk, self.root.state_fd, writer_name(self.writer))
            for _ in range(_LOCK_TRIES_MAX):
                # Another engine may look just now whether we are alive, for which it takes the lock for a moment.
                if lock.try_acquire(exclusive=True):
                    break
                time.sleep(_LOCK_PAUSE_S)
            self._releases.callback(_release_quietly, lock, remove=True)
            self._namespace_lock = FileLock(self.disk, self.root.state_fd, lock_name(self.namespace.hex))

    def try_lock(self) -> bool:
        """Take the namespace for ourselves, or with others if it is shared; return whether we have it."""
        lock = self._namespace_lock
        with self._explained("locking the namespace"):
            if not lock.try_acquire(exclusive=not self.config.shared):
                return False
            self._releases.callback(_release_quietly, lock, remove=False)
            with contextlib.suppress(OSError):
                # Only a help for people; a full disk does not matter.
                kind = "shared" if self.config.shared else "exclusively"
                lock.describe(f"{process_description()}, {kind}")
            return True

    def locked_error(self) -> LockedError:
        """Return the error for a namespace that somebody else holds."""
        owner = self._namespace_lock.owner() or "another process"
        what = f"namespace {self.namespace.hex[:16]}… in {self.root.path!r} is in use by {owner}"
        if self.config.shared:
            text = f"{what}, which does not share it. Set 'shared': true there as well"
        else:
            text = f"{what}. Stop that engine, set 'shared': true for all engines that use it"
        return LockedError(f"{text}, or give each engine a 'path' or 'namespace' of its own.", backend="file")

    def enter(self) -> None:
        """Open ledger and directories, once the namespace is ours.

        Raises:
            BackendUnavailableError: The disk fails.
        """
        with self._explained("opening the namespace"):
            self.ledger = Ledger(self.disk, self.root.fd, self.root.state_fd, self.writer)
            self._releases.callback(_close_quietly, self.ledger)
            # What others store from here on counts on top of what is found, so the state comes before the look.
            before = self.ledger.open()
            if not before.is_counted and self._is_empty():
                self.ledger.reconcile(before, (0, 0), ())
            self.directories = Directories(
                self.disk, self.root.fd, self.namespace.hex, self.root.fanout, self.root.owner_uid
            )
            self._releases.callback(self.directories.close)
            self.directories.open()
            self._write_document()

    def release(self) -> None:
        """Let go of everything, last taken first; idempotent. What can't be told to the disk any more is left."""
        self._releases.close()
        retire_writer(self.writer)

    def _is_empty(self) -> bool:
        fd = self.disk.open_dir(".", self.root.fd)
        try:
            with self.disk.scandir(fd) as entries:
                return not any(is_namespace(entry.name) for entry in entries)
        finally:
            self.disk.close(fd)

    def _write_document(self) -> None:
        try:
            self.disk.stat(NAMESPACE_DOCUMENT, self.directories.fd)
            return
        except FileNotFoundError:
            pass
        text = json.dumps(self.namespace.document(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        tmp = tmp_name(self.writer, _DOCUMENT_NUMBER)
        try:
            publish_file(self.disk, NAMESPACE_DOCUMENT, self.directories.fd, text.encode(), tmp=tmp, replace=False)
        except OSError as error:
            # For people to read; blocks don't need it.
            _log.warning("can't write %s of namespace %s: %s", NAMESPACE_DOCUMENT, self.namespace.hex[:16], error)

    @contextlib.contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BackendUnavailableError(
                f"{doing} in {self.root.path!r} failed: {error.strerror or error}. Check the disk, and that no part "
                "of the cache belongs to another user.",
                backend="file",
            ) from error


def _release_quietly(lock: FileLock, *, remove: bool) -> None:
    with contextlib.suppress(OSError):
        lock.release(remove=remove)


def _close_quietly(ledger: Ledger) -> None:
    # What it could not enter any more leaves the ledger too high, which the next start sets right.
    with contextlib.suppress(OSError):
        ledger.close()
