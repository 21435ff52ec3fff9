"""A root directory: opening, checks, and allocation of its space in segments. All methods block; none waits for long.

The space in use is the total length of all segments in the directory, so there is no counter that could become wrong.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.backends.disk import directories, files, layout
from kvstore.backends.disk.config import DiskConfig
from kvstore.backends.disk.files import FileLock
from kvstore.backends.disk.journal import JournalReader, append_rows, journals_in, load_owner
from kvstore.config import Capacity
from kvstore.diskio import OsDisk
from kvstore.errors import AbsentError, BackendUnavailableError, ConfigError
from kvstore.namespace import Namespace

_log = logging.getLogger("kvstore.backends.disk")

_LAYOUT_NAME: Final = "disk.json"
_OLD_LAYOUT_NAME: Final = "layout.json"
_LEDGER_NAME: Final = "ledger.lock"
_MEMBERS_NAME: Final = "members.lock"
_WANT_PREFIX: Final = "want."

_LEDGER_WAIT_S: Final = 1.0
_LEDGER_RETRY_S: Final = 0.01
"""Longest wait for the ledger once an ended owner has been loaded, and the pause between two tries."""

_LARGEST_S: Final = 5.0
"""Time for the largest owner to restore capacity or reserve. It may be stopped, so then another owner does it."""

_WISH_S: Final = 10.0
"""Age at which a request for space no longer counts. An engine that still stores repeats it each second."""

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_FALLOCATE: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class LedgerBusyError(Exception):
    """Another engine holds the ledger's lock; try again."""


@dataclass(slots=True)
class OwnerDirectory:
    """An owner: the lengths of its segments, and its last change."""

    namespace: str
    name: str
    is_readable: bool = True
    """Whether its directory could be read; if not, one entry of ``segments`` has its last known size."""
    segments: dict[str, int] = field(default_factory=dict)
    changed_at: float = 0.0
    has_journal: bool = False
    has_ended: bool = False  # Whether its lock was free; False if the lock was not tried.

    @property
    def size_bytes(self) -> int:
        """Length of its segments."""
        return sum(self.segments.values())


@dataclass(slots=True)
class Root:
    """An open root directory."""

    disk: OsDisk
    path: str
    fd: int
    state_fd: int = -1  # Its directory ``.kvstore``.
    namespace_fd: int = -1  # The directory of the engine's namespace.
    capacity: Capacity = field(default_factory=lambda: Capacity(0))  # Of this root.
    reserve: Capacity = field(default_factory=lambda: Capacity(0))
    capacity_bytes: int = 0
    reserve_bytes: int = 0  # Bytes of the filesystem to keep free.
    direct: bool = True  # Whether segments are read and written with direct I/O.
    members: FileLock | None = None
    """Lock held by every engine that uses the root: shared, or exclusive if the engine is ``exclusive``."""
    namespace: str = ""
    first: Root | None = None  # The first root, which has the journals; None: this one.
    _sizes: dict[tuple[str, str], int] = field(default_factory=dict)
    _unreadable: set[str] = field(default_factory=set)
    _stuck: set[str] = field(default_factory=set)
    """Ended owners whose segments can't be removed."""
    _lacking_since: float = 0.0  # Time at which capacity or reserve was first found exceeded; 0 if it is not.

    def note_position(self, position: int) -> None:
        """Record the format and position of the root, unless recorded. The position determines its segments."""
        found = files.read_json(self.disk, _LAYOUT_NAME, self.state_fd)
        if found is not None and "position" in found:
            return
        # An older root without a position is usable, also on a full disk.
        with contextlib.suppress(*(() if found is None else (OSError,))):
            document = {"format": layout.FORMAT, "position": position}
            files.write_json(self.disk, _LAYOUT_NAME, self.state_fd, document)

    def join(self, *, exclusive: bool) -> bool:
        """Take the lock ``members``; return whether it is held."""
        if self.members is None:
            self.members = FileLock(self.disk, self.state_fd, _MEMBERS_NAME)
        return self.members.fd >= 0 or self.members.try_acquire(exclusive=exclusive)

    def close(self) -> None:
        """Close what is open; idempotent."""
        if self.members is not None:
            self.members.release()
        files.close_all(self.disk, self.fd, self.state_fd, self.namespace_fd)
        self.fd = self.state_fd = self.namespace_fd = -1

    def make_segment(self, dir_fd: int, owner: str, name: str, size_bytes: int, *, reclaim: bool) -> bool:
        """Create and preallocate a segment of an owner, in its directory.

        With ``reclaim``, segments of ended owners are removed if space is missing.

        Returns:
            Whether it was created; False if the capacity, the reserve or the filesystem leaves no room for it, or if
            another owner has requested the room.

        Raises:
            LedgerBusyError: Another engine holds the ledger's lock.
            OSError: The disk fails.
        """
        made = self._make_if_room(dir_fd, owner, name, size_bytes)
        if made is None and reclaim:
            self._reclaim(size_bytes)
            made = self._make_if_room(dir_fd, owner, name, size_bytes)
        return bool(made)

    def remove_segment(self, dir_fd: int, owner: str, name: str, size_bytes: int) -> None:
        """Remove a segment of an owner from its directory.

        Raises:
            OSError: The disk fails.
        """
        files.remove_segment(self.disk, dir_fd, name)
        self._count(owner, -size_bytes)

    def want(self, owner: str, *, wanted: bool) -> None:
        """Publish that an owner has less than its share and needs a segment, or withdraw this request."""
        name = _WANT_PREFIX + owner
        with contextlib.suppress(OSError):
            if wanted:
                with files.opened(self.disk, name, os.O_WRONLY | os.O_CREAT, self.state_fd) as (fd, _):
                    self.disk.pwritev(fd, [b"\n"], 0)
            else:
                self.disk.unlink(name, self.state_fd)

    def ledger(self) -> FileLock:
        """Return the lock under which segments are made and given up; it is not held yet."""
        return FileLock(self.disk, self.state_fd, _LEDGER_NAME)

    def must_give_up(self, ledger: FileLock, owner: str, segment_bytes: int) -> bool:
        """Return whether an owner must give up a segment.

        Either the capacity or the reserve is exceeded, or another owner requests space and would then have at most as
        much as this one. The room stays reserved while the request lasts. If True, the ledger's lock is held; if False,
        it may be held. The caller releases it in both cases.

        Raises:
            LedgerBusyError: Another engine holds the lock while segments of ended owners are to be removed.
        """
        if not self._wishes() - {owner} and self._missing_bytes(0) <= 0:
            return False
        if not ledger.try_acquire():
            return False
        lacking = self._missing_bytes(0) > 0
        owners = self.owners(try_locks=True)
        if any(each.has_ended and each.segments and each.name not in self._stuck for each in owners):
            # Segments of ended owners are removed first: here to restore the limits, otherwise by the owner that
            # requests space, when it makes its segment.
            if lacking:
                ledger.release()
                self._reclaim(0)
            return False
        sizes = {each.name: each.size_bytes for each in owners if not each.has_ended and each.is_readable}
        if lacking:
            return self._restores(owner, sizes)
        self._lacking_since = 0.0
        wishes = self._wishes() - {owner}
        for name in wishes - sizes.keys():
            self.want(name, wanted=False)
        if not wishes & sizes.keys():
            return False
        poorest = min(wishes & sizes.keys(), key=lambda name: sizes[name])
        # If there is room for the segment, another owner has just given one up.
        return sizes.get(owner, 0) - sizes[poorest] >= 2 * segment_bytes and self._missing_bytes(segment_bytes) > 0

    def _restores(self, owner: str, sizes: Mapping[str, int]) -> bool:
        """Return whether an owner must restore capacity or reserve: the largest, or after ``_LARGEST_S`` any other."""
        now = time.monotonic()
        self._lacking_since = self._lacking_since or now
        is_largest = owner == max(sizes, key=lambda name: (sizes[name], name), default="")
        if not is_largest and now - self._lacking_since < _LARGEST_S:
            return False
        self._lacking_since = now
        return True

    def _wishes(self) -> set[str]:
        """Return the owners that have requested space, or repeated the request, within ``_WISH_S``."""
        entries, oldest = files.entries_in(self.disk, self.state_fd), time.time() - _WISH_S
        return {
            name.removeprefix(_WANT_PREFIX)
            for name, status in entries.items()
            if name.startswith(_WANT_PREFIX) and status.st_mtime > oldest
        }

    def measure(self) -> int:
        """Return the free bytes of the filesystem; shares of it follow its size, because a volume may grow."""
        filesystem = self.disk.statvfs(self.fd)
        total = filesystem.f_blocks * filesystem.f_frsize
        self.capacity_bytes, self.reserve_bytes = self.capacity.resolve(total), self.reserve.resolve(total)
        return filesystem.f_bavail * filesystem.f_frsize

    def _missing_bytes(self, more_bytes: int) -> int:
        """Return how far ``more_bytes`` would exceed the capacity or the free space."""
        free = self.measure()
        used = sum(owner.size_bytes for owner in self.owners())
        return more_bytes + max(used - self.capacity_bytes, self.reserve_bytes - free)

    @contextlib.contextmanager
    def _ledger_held(self, wait_s: float = 0.0) -> Iterator[None]:
        lock, deadline = self.ledger(), time.monotonic() + wait_s
        while not lock.try_acquire():
            if time.monotonic() >= deadline:
                raise LedgerBusyError
            time.sleep(_LEDGER_RETRY_S)
        try:
            yield
        finally:
            lock.release()

    def _make_if_room(self, dir_fd: int, owner: str, name: str, size_bytes: int) -> bool | None:
        """Create a segment; False if the room is not for this owner, None if capacity or reserve leaves no room."""
        with self._ledger_held():
            if self._missing_bytes(size_bytes) > 0:
                return None
            if self._is_for_others(owner, size_bytes) or not self._preallocate(dir_fd, name, size_bytes):
                return False
            self._count(owner, size_bytes)
            return True

    def _count(self, owner: str, more_bytes: int) -> None:
        """Change the size of an owner that counts if the next scan can't read its directory."""
        place = self.namespace, owner
        self._sizes[place] = max(0, self._sizes.get(place, 0) + more_bytes)

    def _is_for_others(self, owner: str, size_bytes: int) -> bool:
        """Return whether another owner requests space and is at least one segment smaller than this one.

        Otherwise the engine that stores most often would take the room that was given up for the smaller one.
        """
        if not (wishes := self._wishes() - {owner}):
            return False
        sizes = {each.name: each.size_bytes for each in self.owners(try_locks=True) if not each.has_ended}
        return any(sizes.get(owner, 0) - sizes[name] >= size_bytes for name in wishes & sizes.keys())

    def _reclaim(self, size_bytes: int) -> None:
        """Remove segments of ended owners, idle namespaces first, until ``size_bytes`` fit."""
        owners = self.owners(try_locks=True)
        busy = {owner.namespace for owner in owners if not owner.has_ended} | {self.namespace}
        ended = [owner for owner in owners if owner.has_ended]
        for owner in sorted(ended, key=lambda owner: (owner.namespace in busy, owner.changed_at)):
            try:
                with contextlib.ExitStack() as stack:
                    owner_fd = self._enter_ended(self.fd, owner, stack)
                    if owner_fd < 0:
                        continue
                    is_enough = False
                    if owner.segments:
                        is_enough = not self._reclaim_from(owner, owner_fd, size_bytes)
                    else:
                        # Its last segments were removed earlier, so other engines have read its journal since.
                        self._remove_owner(owner, owner_fd)
                    self._stuck.discard(owner.name)
                    if is_enough:
                        return
            except OSError as error:
                # Only the space of this owner stays occupied.
                if owner.segments and owner.name not in self._stuck:
                    _log.warning("segments of %s can't be removed: %s", owner.name, error)
                self._stuck.add(owner.name)

    def _enter_ended(self, root_fd: int, owner: OwnerDirectory, stack: contextlib.ExitStack) -> int:
        """Open and lock an ended owner's directory in a root until ``stack`` ends; -1 if it was adopted meanwhile."""
        namespace_fd = files.open_own_directory(self.disk, owner.namespace, root_fd)
        stack.callback(files.close_all, self.disk, namespace_fd)
        owner_fd = files.open_own_directory(self.disk, owner.name, namespace_fd)
        stack.callback(files.close_all, self.disk, owner_fd)
        lock = FileLock(self.disk, owner_fd, layout.LOCK_NAME)
        stack.callback(lock.release)
        return owner_fd if lock.try_acquire() else -1

    def _reclaim_from(self, owner: OwnerDirectory, owner_fd: int, size_bytes: int) -> bool:
        """Remove segments of an ended owner until ``size_bytes`` fit; return whether more must be removed."""
        with contextlib.ExitStack() as stack:
            state, dir_fd = None, owner_fd
            with contextlib.suppress(OSError):
                if self.first is not None:
                    dir_fd = self._enter_ended(self.first.fd, owner, stack)
                if dir_fd >= 0:
                    number, digest = int(owner.name, 16), bytes.fromhex(owner.namespace)
                    state = load_owner(self.disk, [dir_fd, owner_fd], number, digest)
                if state is not None:
                    stack.callback(state.reader.close)
            # Loading a long journal takes seconds, in which other engines may make segments.
            stack.enter_context(self._ledger_held(_LEDGER_WAIT_S))
            missing = self._missing_bytes(size_bytes)
            # The highest number first, because it was filled last.
            names = iter(sorted(owner.segments, reverse=True))
            taken: list[str] = []
            while missing > 0 and (name := next(names, None)) is not None:
                missing -= owner.segments[name]
                taken.append(name)
            # Without these rows, other engines detect the removal only when they load a block.
            with contextlib.suppress(OSError):
                if state is not None:
                    numbers = [layout.segment_number(name) or 0 for name in taken]
                    rows = [row for number in numbers for row in state.columns.segment_removals(number)]
                    append_rows(self.disk, dir_fd, state, int(owner.name, 16), rows)
            for name in taken:
                files.remove_segment(self.disk, owner_fd, name)
            return missing > 0

    def _remove_owner(self, owner: OwnerDirectory, owner_fd: int) -> None:
        files.remove_owner_files(self.disk, owner_fd)
        namespace_fd = self.disk.open_dir(owner.namespace, self.fd)
        try:
            self.disk.rmdir(owner.name, namespace_fd)
        finally:
            self.disk.close(namespace_fd)

    def _preallocate(self, dir_fd: int, name: str, size_bytes: int) -> bool:
        # A crash may have left it before the journal recorded it.
        with contextlib.suppress(FileNotFoundError):
            self.disk.unlink(name, dir_fd)
        fd, _ = files.open_regular(self.disk, name, os.O_RDWR | os.O_CREAT | os.O_EXCL, dir_fd)
        try:
            try:
                self.disk.syscall("fallocate", os.posix_fallocate, fd, 0, size_bytes)
            except OSError as error:
                if error.errno not in _NO_FALLOCATE:
                    raise
                # Without preallocation, stores fail once the filesystem is full.
                self.disk.ftruncate(fd, size_bytes)
        except OSError as error:
            files.remove_segment(self.disk, dir_fd, name)
            if error.errno in NO_ROOM:
                return False
            raise
        finally:
            files.close_all(self.disk, fd)
        return True

    def owners(self, *, try_locks: bool = False) -> list[OwnerDirectory]:
        """List the owners of all namespaces; with ``try_locks``, find out which have ended.

        Objects of other users are skipped. A directory that can't be read counts with its last known size.
        """
        found: list[OwnerDirectory] = []
        for namespace in filter(layout.is_namespace, files.names_in(self.disk, self.fd)):
            try:
                with not_ours():
                    self._add_owners(namespace, try_locks, found)
            except OSError as error:
                for name in [name for known, name in self._sizes if known == namespace]:
                    self._add_unreadable(namespace, name, error, found)
        self._sizes = {(owner.namespace, owner.name): owner.size_bytes for owner in found}
        return found

    def _add_owners(self, namespace: str, try_locks: bool, found: list[OwnerDirectory]) -> None:
        namespace_fd = files.open_own_directory(self.disk, namespace, self.fd)
        try:
            names = files.names_in(self.disk, namespace_fd)
            for name in filter(layout.is_owner, names):
                try:
                    with not_ours():
                        found.append(self._owner(namespace_fd, namespace, name, try_locks))
                except OSError as error:
                    self._add_unreadable(namespace, name, error, found)
        finally:
            self.disk.close(namespace_fd)

    def _owner(self, namespace_fd: int, namespace: str, name: str, try_locks: bool) -> OwnerDirectory:
        owner = OwnerDirectory(namespace, name)
        fd = files.open_own_directory(self.disk, name, namespace_fd)
        try:
            for each, status in files.entries_in(self.disk, fd).items():
                owner.changed_at = max(owner.changed_at, status.st_mtime)
                owner.has_journal |= layout.journal_number(each) is not None
                if layout.segment_number(each) is not None and stat.S_ISREG(status.st_mode):
                    owner.segments[each] = status.st_size
            if try_locks:
                with contextlib.suppress(PermissionError):
                    owner.has_ended = has_ended(self.disk, fd)
        finally:
            files.close_all(self.disk, fd)
        return owner

    def _add_unreadable(self, namespace: str, name: str, error: OSError, found: list[OwnerDirectory]) -> None:
        path = os.path.join(self.path, namespace, name)
        if path not in self._unreadable:
            self._unreadable.add(path)
            _log.warning("%s can't be read and counts with its last known size: %s", path, error)
        size = self._sizes.get((namespace, name), 0)
        found.append(OwnerDirectory(namespace, name, is_readable=False, segments={"": size}))


def has_ended(disk: OsDisk, owner_fd: int) -> bool:
    """Return whether no engine holds the lock of an owner."""
    lock = FileLock(disk, owner_fd, layout.LOCK_NAME)
    try:
        # Shared, so that two engines that check at once do not exclude each other.
        return lock.try_acquire(exclusive=False, create=False)
    except FileNotFoundError:
        return True  # Partly created or partly removed, so not in use.
    finally:
        lock.release()


def open_root(disk: OsDisk, position: int, config: DiskConfig, namespace: Namespace) -> Root:
    """Open a root directory, check it, and create its state directory and the namespace's directory.

    ``position`` is that of the root in ``config.paths``. The caller notes it once all roots are open.

    Raises:
        ConfigError: The directory can't be used as it is.
    """
    path = _path_of(config, position)
    root: Root | None = None
    try:
        root = Root(disk, path, directories.open_directory(disk, path))
        directories.check_mode(disk.fstat(root.fd).st_mode, path)
        root.state_fd = directories.enter(disk, layout.STATE_DIR, root.fd, path)
        _check_layout(disk, root, position)
        size_bytes = config.capacity.size_bytes
        root.capacity = config.capacity if size_bytes is None else Capacity(size_bytes // len(config.paths))
        root.reserve = config.reserve
        root.measure()
        root.direct = config.direct != "off" and directories.takes_direct(disk, _MEMBERS_NAME, root.state_fd, path)
        if config.direct == "on" and not root.direct:
            raise ConfigError(
                f"'direct' is 'on', but the filesystem of {path!r} refuses direct I/O. Use 'auto', or a directory on "
                "another filesystem."
            )
        root.namespace = namespace.hex
        root.namespace_fd = directories.enter(disk, namespace.hex, root.fd, path)
        _describe(disk, root, namespace.document())
    except BaseException as error:
        if root is not None:
            root.close()
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise AbsentError(
                f"'path' is {path!r}, which this user may not use ({error.strerror}). Change its owner or mode, "
                "remount it, or name another directory."
            ) from error
        raise
    return root


def check_root(disk: OsDisk, position: int, config: DiskConfig) -> None:
    """Refuse an existing root whose state :func:`open_root` would refuse; writes nothing.

    Raises:
        ConfigError: The directory can't be used as it is.
    """
    path = _path_of(config, position)
    # Missing directories are made when the root opens; access is checked elsewhere, for every tier with a directory.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        root = Root(disk, path, disk.open_root(path))
        try:
            root.state_fd = directories.own_directory(disk, layout.STATE_DIR, root.fd, path)
            _check_layout(disk, root, position)
        finally:
            root.close()


def check_drives(disk: OsDisk, config: DiskConfig) -> None:
    """Refuse to start without a drive that was used before; writes nothing.

    An empty mount point looks like a new root. Its segments would count as removed, and their blocks would be lost.

    Raises:
        BackendUnavailableError: A root is empty although the list was used with it.
    """
    paths = [_path_of(config, position) for position in range(len(config.paths))]
    # In this order: engines that start together make all state directories before any of them states a position.
    used = max((_roots_used(disk, path) for path in paths), default=0) if len(paths) > 1 else 0
    for position, path in enumerate(paths[:used]):
        state = os.path.join(path, layout.STATE_DIR)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            disk.close(disk.open_root(state))
            continue
        raise BackendUnavailableError(
            f"{path!r} is directory {position} of 'path', counting from 0, was used before, and is empty now. Mount "
            f"its drive. If an empty drive replaces it, whose blocks are lost, do 'mkdir -p -m 700 {state}'.",
            backend="file",
        )


def _roots_used(disk: OsDisk, path: str) -> int:
    """Return the least number of directories that 'path' listed when this root was used; 0 if that is unknown."""
    used = 0
    # Opening the root reports what is wrong with it.
    with contextlib.suppress(OSError):
        root = Root(disk, path, disk.open_root(path))
        try:
            root.state_fd = files.open_own_directory(disk, layout.STATE_DIR, root.fd)
            stated = (files.read_json(disk, _LAYOUT_NAME, root.state_fd) or {}).get("position")
            used = stated + 1 if isinstance(stated, int) else 0
            for owner in root.owners():
                # Only the first root has journals, so segments alone mean that there was another one.
                used = max(used, _roots_of(root, owner) if owner.has_journal else 2 * bool(owner.segments))
        finally:
            root.close()
    return used


def _roots_of(root: Root, owner: OwnerDirectory) -> int:
    """Return the number of roots that an owner's last journal states; 0 if it can't be read."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        fd = root.fd
        for name in (owner.namespace, owner.name):
            fd = files.open_own_directory(root.disk, name, fd)
            stack.callback(files.close_all, root.disk, fd)
        reader = JournalReader(root.disk, [fd], int(owner.name, 16), bytes.fromhex(owner.namespace))
        stack.callback(reader.close)
        number = max(journals_in(root.disk, fd), default=0)
        if reader.open(layout.journal_name(number), number) and reader.geometry is not None:
            return reader.geometry.paths
    return 0


def _path_of(config: DiskConfig, position: int) -> str:
    return os.path.abspath(os.path.expanduser(config.paths[position]))


@contextlib.contextmanager
def not_ours() -> Iterator[None]:
    """Ignore objects of other users, and objects that have just been removed."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise


def _check_layout(disk: OsDisk, root: Root, position: int) -> None:
    if _OLD_LAYOUT_NAME in files.names_in(disk, root.state_fd):
        raise ConfigError(
            f"{root.path!r} holds blocks of the file tier of version 0.1, one file each, which this one does not "
            "read. Name another 'path', or empty this one."
        )
    found = files.read_json(disk, _LAYOUT_NAME, root.state_fd)
    if found is None:
        return
    if not found:
        raise ConfigError(
            f"{os.path.join(root.path, layout.STATE_DIR, _LAYOUT_NAME)!r} is damaged. If 'path' lists the directories "
            "in their former order, remove that file, and kvstore writes it again. Otherwise empty the directory."
        )
    if found.get("format") != layout.FORMAT:
        raise ConfigError(
            f"{root.path!r} is of format {found.get('format')!r}, this kvstore knows {layout.FORMAT}. Use the kvstore "
            "that made it, or name another 'path'."
        )
    # An older root does not state its position, but only the first one has journals.
    stated = found.get("position", 0 if position and _has_journals(root) else position)
    if stated != position:
        raise ConfigError(
            f"{root.path!r} was made as directory {stated!r} of 'path', counting from 0, and is now directory "
            f"{position}, where other segments belong. List the directories in their former order, or empty this one."
        )


def _has_journals(root: Root) -> bool:
    """Return whether any owner has a journal here. Only the first root has journals."""
    return any(owner.has_journal for owner in root.owners())


def _describe(disk: OsDisk, root: Root, document: dict[str, Any]) -> None:
    """Write the fields of the namespace, for people and tools."""
    # Blocks are readable without this file, so a full disk or a foreign object there must not prevent a start.
    with contextlib.suppress(OSError):
        if files.read_json(disk, "namespace.json", root.namespace_fd) is None:
            files.write_json(disk, "namespace.json", root.namespace_fd, document)
