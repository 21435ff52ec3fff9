"""Opening and checking root directories of a disk tier. All calls block."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from kvstore.backends.disk import directories, files
from kvstore.backends.disk.config import DiskConfig
from kvstore.backends.disk.layout import FORMAT, LAYOUT_NAME, STATE_DIR
from kvstore.backends.disk.ledger import LEDGER_NAME, READ_ONLY, LedgerBusyError, ledger_held
from kvstore.backends.disk.members import Members
from kvstore.backends.disk.older import empty_older
from kvstore.backends.disk.root import Root
from kvstore.config import Capacity
from kvstore.diskio import OsDisk
from kvstore.errors import AbsentError, BackendUnavailableError, ConfigError
from kvstore.namespace import Namespace


def open_root(disk: OsDisk, position: int, config: DiskConfig, namespace: Namespace) -> Root:
    """Open a root directory, check it, and create its state directory and the namespace's directory.

    Raises:
        ConfigError: The directory can't be used as it is.
    """
    path = _path_of(config, position)
    with contextlib.ExitStack() as undo:

        def entered(fd: int) -> int:
            undo.callback(files.close_all, disk, fd)
            return fd

        try:
            fd = entered(directories.open_directory(disk, path))
            directories.check_mode(disk.fstat(fd).st_mode, path)
            state_fd = entered(directories.enter(disk, STATE_DIR, fd, path))
            _check_layout(disk, path, state_fd)
            empty_older(disk, path, fd, state_fd)
            direct = config.direct != "off" and directories.takes_direct(disk, LEDGER_NAME, state_fd, path)
            if config.direct == "on" and not direct:
                raise ConfigError(
                    f"'direct' is 'on', but the filesystem of {path!r} refuses direct I/O. Use 'auto', or a directory "
                    "on another filesystem."
                )
            namespace_fd = entered(directories.enter(disk, namespace.hex, fd, path))
            # Blocks are readable without this file, so a full disk or a foreign object there must not prevent a start.
            with contextlib.suppress(OSError, LedgerBusyError):
                if files.read_json(disk, "namespace.json", namespace_fd) is None:
                    with ledger_held(disk, state_fd):
                        files.write_json(disk, "namespace.json", namespace_fd, namespace.document())
            size_bytes = config.capacity.size_bytes
            capacity = config.capacity if size_bytes is None else Capacity(size_bytes // len(config.paths))
            members = Members(disk, state_fd, namespace.digest)
            root = Root(
                disk, path, position, fd, state_fd, namespace_fd, namespace.digest, capacity, config.reserve, direct,
                members,
            )  # fmt: skip
            root.measure()
        except LedgerBusyError as error:
            raise BackendUnavailableError(
                f"{path!r} is being emptied by another engine, because an older kvstore made it. Try again.",
                backend="file",
            ) from error
        except files.ForeignFileError as error:
            raise AbsentError(
                f"'path' is {path!r}, where {error.filename!r} is {error.strerror}. Copy the directory without hard "
                "links, as its owner, or name another directory."
            ) from error
        except OSError as error:
            if error.errno in READ_ONLY | {errno.EPERM}:
                raise AbsentError(
                    f"'path' is {path!r}, which this user may not use ({error.strerror}). Change its owner or mode, "
                    "remount it, or name another directory."
                ) from error
            raise
        undo.pop_all()
    return root


def check_root(disk: OsDisk, position: int, config: DiskConfig) -> None:
    """Refuse an existing root whose state :func:`open_root` would refuse; writes nothing.

    Raises:
        ConfigError: The directory can't be used as it is.
    """
    path = _path_of(config, position)
    # Missing directories are made when the root opens; access is checked elsewhere, for every tier with a directory.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError), _state_opened(disk, path) as fd:
        _check_layout(disk, path, fd)


def check_drives(disk: OsDisk, config: DiskConfig) -> None:
    """Refuse to start without a drive that was used before; writes nothing.

    An empty mount point looks like a new root, and blocks would fill the disk below it.

    Raises:
        BackendUnavailableError: A root is empty, and another one was used with more roots than there are.
    """
    paths = [_path_of(config, position) for position in range(len(config.paths))]
    # In this order: engines that start together make all state directories before any of them notes their number.
    used = max((_roots_used(disk, path) for path in paths), default=0)
    empty = [path for path in paths if not _has_state(disk, path)]
    if empty and len(paths) - len(empty) < used:
        state = os.path.join(empty[0], STATE_DIR)
        raise BackendUnavailableError(
            f"{empty[0]!r} was used before with the other directories of 'path', and is empty now. Mount its drive. If "
            f"an empty drive replaces it, whose blocks are lost, do 'mkdir -p -m 700 {state}'.",
            backend="file",
        )


def _roots_used(disk: OsDisk, path: str) -> int:
    """Return with how many roots this one was used last; 0 if that is unknown."""
    # Opening the root reports what is wrong with it.
    with contextlib.suppress(OSError, ConfigError), _state_opened(disk, path) as fd:
        stated = (files.read_json(disk, LAYOUT_NAME, fd) or {}).get("roots")
        return stated if isinstance(stated, int) else 0
    return 0


def _has_state(disk: OsDisk, path: str) -> bool:
    try:
        disk.close(disk.open_root(os.path.join(path, STATE_DIR)))
    except OSError as error:
        # Opening the root reports any other error.
        return error.errno not in (errno.ENOENT, errno.ENOTDIR)
    return True


@contextlib.contextmanager
def _state_opened(disk: OsDisk, path: str) -> Iterator[int]:
    root_fd = disk.open_root(path)
    try:
        fd = directories.own_directory(disk, STATE_DIR, root_fd, path)
    finally:
        disk.close(root_fd)
    try:
        yield fd
    finally:
        disk.close(fd)


def open_existing_root(disk: OsDisk, position: int, config: DiskConfig) -> Root:
    """Open a root for the admin tools, without a namespace, and change nothing.

    Raises:
        ConfigError: There is no tier, or it is of another format.
        OSError: It can't be opened.
    """
    path = _path_of(config, position)
    with contextlib.ExitStack() as undo:
        try:
            fd = disk.open_root(path)
            undo.callback(files.close_all, disk, fd)
            state_fd = files.open_own_directory(disk, STATE_DIR, fd)
            undo.callback(files.close_all, disk, state_fd)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ConfigError(f"There is no file tier at {path!r}. Give the 'path' of one.") from error
        _check_layout(disk, path, state_fd)
        undo.pop_all()
    members = Members(disk, state_fd, b"")
    return Root(disk, path, position, fd, state_fd, -1, b"", config.capacity, config.reserve, False, members)


def _path_of(config: DiskConfig, position: int) -> str:
    return os.path.abspath(os.path.expanduser(config.paths[position]))


def _check_layout(disk: OsDisk, path: str, state_fd: int) -> None:
    found = (files.read_json(disk, LAYOUT_NAME, state_fd) or {}).get("format", FORMAT)
    if not isinstance(found, int) or found > FORMAT:
        raise ConfigError(
            f"{path!r} is of format {found!r}, this kvstore knows {FORMAT}. Use the kvstore that made it, or name "
            "another 'path'."
        )
