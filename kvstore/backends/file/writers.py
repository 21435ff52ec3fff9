"""Who writes here: the identity of a writer, and whether a writer still lives."""

from __future__ import annotations

import os
import secrets
from typing import Final

from kvstore.backends.file.layout import writer_name
from kvstore.backends.file.locks import FileLock
from kvstore.diskio import OsDisk

__all__ = ["holds_lock", "is_alive", "new_writer", "process_description", "retire_writer"]

_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
_NO_BOOT_ID: Final = "0" * 32

_OURS: Final[set[str]] = set()
"""Identities of this process that are in use."""


def new_writer() -> str:
    """Return an identity: boot id, process id, start time of the process, and a random part of its own."""
    writer = f"{_process()}.{secrets.token_hex(4)}"
    _OURS.add(writer)
    return writer


def retire_writer(writer: str) -> None:
    """End an identity of this process; what it has left unpublished is litter from now on."""
    _OURS.discard(writer)


def is_alive(disk: OsDisk, state_fd: int, writer: str) -> bool:
    """Tell whether the writer of an unpublished file may still be at work: it holds its lock, or its process runs.

    The process counts as well because a file may be there before its writer's lock, or be one of another program that
    follows the same form.
    """
    if holds_lock(disk, state_fd, writer):
        return True
    process, _, _ = writer.rpartition(".")
    boot_id, pid, start_time = process.split(".")
    if process == _process():
        return writer in _OURS
    return boot_id == _boot_id() and _start_time(int(pid)) == int(start_time)


def holds_lock(disk: OsDisk, state_fd: int, writer: str, *, bury: bool = False) -> bool:
    """Tell whether a writer holds its lock; in other containers too, where process ids mean nothing to us.

    Args:
        disk: What to call the system with.
        state_fd: The root's state directory.
        writer: Whom it is about.
        bury: Remove the lock file of a writer that does not.
    """
    lock = FileLock(disk, state_fd, writer_name(writer))
    try:
        if not lock.try_acquire(exclusive=True, create=False):
            return True
    except FileNotFoundError:
        return False
    lock.release(remove=bury)
    return False


def process_description() -> str:
    """Return one line about this process for whoever finds its lock."""
    try:
        with open("/proc/self/cmdline", "rb") as file:
            command = file.read(200).replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        command = "unknown command"
    # A command line may carry a secret after its first words; the program's name is enough to find the process.
    return f"process {os.getpid()} ({' '.join(command.split()[:1])}) on host {os.uname().nodename}"


def _process() -> str:
    pid = os.getpid()
    return f"{_boot_id()}.{pid}.{_start_time(pid)}"


def _boot_id() -> str:
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            text = file.read(64).strip().replace("-", "")
    except OSError:
        return _NO_BOOT_ID
    return text if len(text) == 32 else _NO_BOOT_ID


def _start_time(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if there is none such."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name in parentheses may hold anything; field 22 of the line is the 20th after it.
            return int(file.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
