"""A disk that records all writes in order, and the states that a power cut may leave."""

from __future__ import annotations

import os
import random
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.diskio import OsDisk

PAGE = 4096


@dataclass(slots=True)
class Event:
    """A change of the disk, or a mark that a test has set."""

    kind: str  # ``mkdir``, ``create``, ``unlink``, ``rename``, ``rmdir``, ``size``, ``write``, ``sync`` or ``mark``.
    path: str = ""  # Name of the changed object, relative to the root.
    file: int = 0  # Number of the file; unchanged by a rename.
    value: Any = None  # New name, length, first event that a sync does not cover, or the content of a mark.
    offset: int = 0  # Offset of a write.
    content: bytes = field(default=b"", repr=False)  # Content of a write.


class RecordingDisk(OsDisk):
    """The real disk below one directory, recording all changes; for backends on threads.

    A write is recorded when it begins, as part of it may reach the drive at once; a sync is recorded when it ends.
    """

    def __init__(self, root: Path) -> None:
        self.events: list[Event] = []
        self._root = root
        self._lock = threading.Lock()
        self._numbers: dict[int, int] = {}
        self._count = 0

    def mark(self, value: object) -> None:
        """Record a statement about the content of the disk."""
        self._note(Event("mark", value=value))

    def open_file(self, name: str, flags: int, dir_fd: int) -> int:
        path = self._path(dir_fd, name)
        if not flags & os.O_CREAT:
            return super().open_file(name, flags, dir_fd)
        with self._lock:
            is_new = not (self._root / path).exists()
            fd = super().open_file(name, flags, dir_fd)
            if is_new:
                self._count += 1
                self._numbers[os.fstat(fd).st_ino] = self._count
                self.events.append(Event("create", path, self._count))
        if flags & os.O_TRUNC and not is_new:
            self._note(Event("size", file=self._file(fd), value=0))
        return fd

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        self._note(Event("write", file=self._file(fd), offset=offset, content=b"".join(map(bytes, buffers))))
        return super().pwritev(fd, buffers, offset)

    def ftruncate(self, fd: int, size_bytes: int) -> None:
        self._note(Event("size", file=self._file(fd), value=size_bytes))
        super().ftruncate(fd, size_bytes)

    def syscall(self, op: str, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        begun = len(self.events)
        done = super().syscall(op, function, *args, **kwargs)
        if op == "fdatasync":
            self._note(Event("sync", file=self._file(args[0]), value=begun))
        elif op == "fallocate":
            self._note(Event("size", file=self._file(args[0]), value=args[1] + args[2]))
        return done

    def rename(self, name: str, new_name: str, dir_fd: int) -> None:
        self._note(Event("rename", self._path(dir_fd, name), value=self._path(dir_fd, new_name)))
        super().rename(name, new_name, dir_fd)

    def unlink(self, name: str, dir_fd: int) -> None:
        super().unlink(name, dir_fd)
        self._note(Event("unlink", self._path(dir_fd, name)))

    def mkdir(self, name: str, dir_fd: int | None = None) -> None:
        super().mkdir(name, dir_fd)
        self._note(Event("mkdir", os.path.relpath(name, self._root) if dir_fd is None else self._path(dir_fd, name)))

    def rmdir(self, name: str, dir_fd: int) -> None:
        super().rmdir(name, dir_fd)
        self._note(Event("rmdir", self._path(dir_fd, name)))

    def _note(self, event: Event) -> None:
        with self._lock:
            self.events.append(event)

    def _path(self, dir_fd: int, name: str) -> str:
        return os.path.relpath(os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), name), self._root)

    def _file(self, fd: int) -> int:
        return self._numbers.get(os.fstat(fd).st_ino, 0)


def after_power_cut(events: Sequence[Event], cut: int, rng: random.Random, to: Path) -> Path:
    """Create a directory in a state that a power cut after ``cut`` events may leave.

    Names and lengths reach the drive in order, as on a journaling filesystem; file pages reach it in any
    order or not at all. Synced data is there, with all earlier names and lengths.
    """
    events = events[:cut]
    synced: dict[int, int] = defaultdict(int)
    for event in events:
        if event.kind == "sync":
            synced[event.file] = max(synced[event.file], event.value)
    named_until = rng.randint(max(synced.values(), default=0), cut)
    survival = rng.choice([0.0, 0.3, 0.7, 0.95, 1.0])
    names: dict[str, int] = {}
    directories: list[str] = []
    contents: dict[int, bytearray] = defaultdict(bytearray)
    for at, event in enumerate(events):
        if event.kind == "write":
            _write(contents[event.file], event, rng, 1.0 if at < synced[event.file] else survival)
        elif at >= named_until:
            continue
        elif event.kind == "mkdir":
            directories.append(event.path)
        elif event.kind == "create":
            names[event.path] = event.file
        elif event.kind == "rename" and event.path in names:
            names[event.value] = names.pop(event.path)
        elif event.kind == "unlink":
            names.pop(event.path, None)
        elif event.kind == "rmdir":
            directories.remove(event.path)
        elif event.kind == "size":
            _resize(contents[event.file], event.value)
    to.mkdir(mode=0o700)
    for path in directories:
        (to / path).mkdir(mode=0o700)
    for path, file in names.items():
        (to / path).write_bytes(contents[file])
        (to / path).chmod(0o600)
    return to


def _write(content: bytearray, event: Event, rng: random.Random, survival: float) -> None:
    """Apply the surviving pages of a write."""
    end = event.offset + len(event.content)
    at = event.offset
    while at < end:
        stop = min(end, at - at % PAGE + PAGE)
        if rng.random() < survival:
            _resize(content, max(len(content), stop))
            content[at:stop] = event.content[at - event.offset : stop - event.offset]
        at = stop


def _resize(content: bytearray, size: int) -> None:
    del content[size:]
    content.extend(bytes(size - len(content)))
