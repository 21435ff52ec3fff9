"""The root directory: opened, checked, and what its filesystem can do."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import mmap
import os
import stat
from dataclasses import dataclass
from typing import Final

from kvstore.backends.file.config import FileConfig
from kvstore.backends.file.layout import LAYOUT_NAME, STATE_DIR, suggested_fanout, tmp_name
from kvstore.backends.file.statefile import publish_file, read_file
from kvstore.diskio import ALIGNMENT, OsDisk, write_all
from kvstore.errors import BackendError, BackendUnavailableError, ConfigError

__all__ = ["LAYOUT_FORMAT", "Root", "open_root", "probe_root"]

_log = logging.getLogger("kvstore.backends.file")

LAYOUT_FORMAT: Final = 1
_LAYOUT_BYTES_MAX: Final = 4096
_NO_TMPFILE: Final = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.EXDEV})
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(slots=True)
class Root:
    """An open root directory.

    Attributes:
        path: As an error names it.
        fd: The directory.
        state_fd: Its ``.kvstore``.
        fanout: Shards of each namespace.
        owner_uid: Owner that files we make get here (a network filesystem may map it).
        total_bytes: Size of the filesystem.
        tmpfile: Whether files without a name can be made and linked; switched off for good when that fails.
        direct_read: Whether files are read with direct I/O; switched off for good when the filesystem refuses.
        direct_write: The same for writing.
    """

    path: str
    fd: int
    state_fd: int = -1
    fanout: int = 0
    owner_uid: int = -1
    total_bytes: int = 0
    tmpfile: bool = True
    direct_read: bool = True
    direct_write: bool = True

    def close(self, disk: OsDisk) -> None:
        """Close what is open; idempotent."""
        fds, self.fd, self.state_fd = (self.fd, self.state_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                with contextlib.suppress(OSError):
                    disk.close(fd)


def open_root(disk: OsDisk, config: FileConfig, writer: str) -> Root:
    """Open the root directory, make its state directory, and find out what the filesystem can do.

    Raises:
        ConfigError: It can't be used as it is; the text says what to do.
        BackendUnavailableError: The disk fails or is full.
    """
    path = os.path.abspath(os.path.expanduser(config.path))
    root = _open_directory(disk, path)
    try:
        _check_mode(disk.fstat(root.fd).st_mode, path)
        root.state_fd = _open_state(disk, root)
        root.direct_read = root.direct_write = config.direct != "off"
        filesystem = disk.statvfs(root.fd)
        root.total_bytes = filesystem.f_blocks * filesystem.f_frsize
        root.owner_uid = os.geteuid()
        _find_abilities(disk, root, writer)
        _check_owner(disk, root)
        root.fanout = _read_layout(disk, root, filesystem.f_files, writer)
    except OSError as error:
        root.close(disk)
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ConfigError(
                f"'path' is {path!r}, which this user may not write to ({error.strerror}). "
                "Change its owner or mode, remount it, or name another directory."
            ) from error
        raise _unavailable(path, error) from error
    except BaseException:
        root.close(disk)
        raise
    if config.direct == "on" and not root.direct_write:
        root.close(disk)
        raise ConfigError(
            f"'direct' is 'on', but the filesystem of {path!r} refuses direct I/O. "
            "Use 'auto', or a directory on another filesystem."
        )
    return root


def probe_root(disk: OsDisk, root: Root, writer: str, number: int) -> os.stat_result:
    """Write and remove a small file as a block is written, and return what it was.

    Raises:
        OSError: That is not possible now.
    """
    name = tmp_name(writer, number)
    flags = os.O_DIRECT if root.direct_write else 0
    if root.tmpfile:
        fd = disk.tmpfile(root.state_fd, flags)
    else:
        fd = disk.open_file(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, root.state_fd)
    named = not root.tmpfile
    try:
        try:
            # Anonymous memory is page-aligned, as direct I/O wants it.
            with mmap.mmap(-1, ALIGNMENT) as page, memoryview(page) as view:
                write_all(disk, fd, [view], unit=ALIGNMENT)
            if root.tmpfile:
                disk.link_fd(fd, name, root.state_fd)
                named = True
            status = disk.fstat(fd)
        finally:
            disk.close(fd)
    finally:
        if named:
            disk.unlink(name, root.state_fd)
    return status


def _open_directory(disk: OsDisk, path: str) -> Root:
    try:
        return Root(path, disk.open_root(path))
    except FileNotFoundError:
        pass
    except NotADirectoryError as error:
        raise ConfigError(f"'path' is {path!r}, which is not a directory. Name a directory.") from error
    except PermissionError as error:
        raise ConfigError(f"'path' is {path!r}, which this user may not open. Change its owner or mode.") from error
    except OSError as error:
        raise _unavailable(path, error) from error
    parent = os.path.dirname(path)
    try:
        # Engines that start together make it together; whose mkdir comes second finds it there.
        with contextlib.suppress(FileExistsError):
            disk.make_root(path)
        return Root(path, disk.open_root(path))
    except FileNotFoundError as error:
        raise ConfigError(
            f"'path' is {path!r}, but there is no directory {parent!r}. "
            "Mount the disk or make that directory; only the last component is made by kvstore."
        ) from error
    except NotADirectoryError as error:
        raise ConfigError(f"'path' is {path!r}, but {parent!r} is not a directory. Name a directory.") from error
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            reason = error.strerror
            raise ConfigError(
                f"'path' is {path!r}, which can't be made in {parent!r} ({reason}). Make it, or name another."
            ) from error
        raise _unavailable(path, error) from error


def _check_mode(mode: int, path: str) -> None:
    """Refuse a root in which any user could take our directories away; warn if a group could."""
    if mode & stat.S_ISVTX:
        return
    if mode & stat.S_IWOTH:
        raise ConfigError(
            f"'path' is {path!r}, which every user may write to (mode {mode & 0o7777:04o}). Blocks hold what users "
            f"asked. Do 'chmod o-w' on it, or name a directory below it, such as "
            f"{os.path.join(path, 'kvstore')!r}, which is made with mode 0700."
        )
    if mode & stat.S_IWGRP:
        _log.warning(
            "%s may be written to by its group (mode %04o), which could remove blocks (not read or fake them)",
            path,
            mode & 0o7777,
        )


def _open_state(disk: OsDisk, root: Root) -> int:
    try:
        return disk.open_dir(STATE_DIR, root.fd)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        where = os.path.join(root.path, STATE_DIR)
        raise ConfigError(f"{where!r} is not a directory. Remove it; kvstore keeps its state there.") from error
    with contextlib.suppress(FileExistsError):
        disk.mkdir(STATE_DIR, root.fd)
    return disk.open_dir(STATE_DIR, root.fd)


def _check_owner(disk: OsDisk, root: Root) -> None:
    owner_uid = disk.fstat(root.state_fd).st_uid
    if owner_uid != root.owner_uid:
        raise ConfigError(
            f"{os.path.join(root.path, STATE_DIR)!r} belongs to user {owner_uid}, kvstore runs as user "
            f"{root.owner_uid}. Run it as the same user, or name another 'path'."
        )


def _read_layout(disk: OsDisk, root: Root, files_total: int, writer: str) -> int:
    """Return the number of shards, as the first user of this root chose it."""
    for _ in range(2):
        content = read_file(disk, LAYOUT_NAME, root.state_fd, _LAYOUT_BYTES_MAX)
        if content is not None:
            return _parse_layout(content, root.path)
        layout = {"format": LAYOUT_FORMAT, "fanout": suggested_fanout(files_total)}
        # Synced, as all blocks become unreachable without it; it happens once in the life of a root.
        text = json.dumps(layout).encode()
        publish_file(disk, LAYOUT_NAME, root.state_fd, text, tmp=tmp_name(writer, 0xFFFFFFFF), replace=False, sync=True)
    raise BackendUnavailableError(f"{LAYOUT_NAME} in {root.path!r} can't be read", backend="file")


def _parse_layout(content: bytearray, path: str) -> int:
    where = os.path.join(path, STATE_DIR, LAYOUT_NAME)
    try:
        layout = json.loads(content)
        version, fanout = layout["format"], layout["fanout"]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{where!r} is damaged. Empty the directory {path!r}, or name another 'path'.") from error
    if version != LAYOUT_FORMAT:
        raise ConfigError(
            f"{where!r} is of format {version!r}, this kvstore knows {LAYOUT_FORMAT}. "
            "Use the kvstore that made it, or name another 'path'."
        )
    if not isinstance(fanout, int) or not 1 <= fanout <= 256:
        raise ConfigError(f"{where!r} has a fanout of {fanout!r}, not 1 to 256. Empty {path!r}, or name another.")
    return fanout


def _find_abilities(disk: OsDisk, root: Root, writer: str) -> None:
    """Try how blocks can be written here: without a name at first or not, directly or not."""
    for number, (tmpfile, direct) in enumerate(((True, True), (True, False), (False, True), (False, False))):
        if direct and not root.direct_write:
            continue
        attempt = Root(root.path, root.fd, root.state_fd, tmpfile=tmpfile, direct_write=direct)
        try:
            root.owner_uid = probe_root(disk, attempt, writer, number).st_uid
        except OSError as error:
            if error.errno in _FULL:
                # Full is no reason not to start: what is there can be loaded, and eviction makes room.
                return
            if error.errno not in _NO_TMPFILE and error.errno != errno.EPERM:
                raise
            if number == 3:
                raise
            continue
        root.tmpfile, root.direct_write = tmpfile, direct
        if not direct:
            root.direct_read = False
        return


def _unavailable(path: str, error: OSError) -> BackendError:
    return BackendUnavailableError(
        f"the directory {path!r} can't be used now: {error.strerror or error}. Check the disk.", backend="file"
    )
