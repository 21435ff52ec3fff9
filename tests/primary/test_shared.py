"""Files of primary tiers in /dev/shm: allocated once, and removed after the end of their engine, never before."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.primary.pages import HUGE_BYTES
from kvstore.primary.shared import SUFFIX, allocate, open_shared, remove_dead_files

_SIZE = 4 * HUGE_BYTES

_KILLED = """
import os, signal, sys
from pathlib import Path
from kvstore.primary import pages, shared

def populate(fd, size_bytes, **options):
    pages.populate(fd, size_bytes // 2, **options)
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[3] != "after":
    shared.populate = populate
file = shared.open_shared(Path(sys.argv[1]), int(sys.argv[2]))
if sys.argv[3] == "before":
    print(flush=True)
    sys.stdin.read()
print(shared.allocate(file.fd, huge_pages=True), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path() -> Iterator[Path]:
    """The path of a file that no engine has made yet, in a directory of its own in /dev/shm."""
    with tempfile.TemporaryDirectory(prefix="kvstore-test-", dir="/dev/shm") as directory:
        yield Path(directory) / f"region{SUFFIX}"


def _engine(path: Path, when: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _KILLED, str(path), str(_SIZE), when]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _killed(engine: subprocess.Popen[str]) -> None:
    engine.kill()
    engine.communicate(timeout=60)


def test_one_process_allocates_for_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process makes and allocates the file; another finds it, with the bytes in huge pages."""
    engine = _engine(path, "after")
    try:
        assert engine.stdout is not None
        huge_bytes = int(engine.stdout.readline())
        monkeypatch.setattr("kvstore.primary.shared.populate", None)
        file = open_shared(path, _SIZE)
        assert not file.is_maker
        assert allocate(file.fd, huge_pages=True) == huge_bytes
        os.close(file.fd)
        assert path.stat().st_blocks * 512 >= _SIZE
    finally:
        _killed(engine)


def test_a_file_stays_as_long_as_a_process_has_it_open(path: Path) -> None:
    """A file in use is never removed; after the kill of its last process, the next start removes it."""
    engine = _engine(path, "after")
    try:
        assert engine.stdout is not None and engine.stdout.readline()
        remove_dead_files(path.parent)
        file = open_shared(path, _SIZE)
    finally:
        _killed(engine)
    remove_dead_files(path.parent)
    assert path.exists()
    os.close(file.fd)
    remove_dead_files(path.parent)
    assert not path.exists()


def test_processes_that_allocate_at_once_wait_for_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process waits while the first allocates, and then finds the memory allocated."""
    files = [open_shared(path, _SIZE).fd for _ in range(2)]
    second = threading.Thread(target=allocate, args=(files[1],), kwargs={"huge_pages": True})
    calls = []

    def populate(fd: int, size_bytes: int, **_: Any) -> int:
        calls.append(fd)
        if fd == files[0]:
            second.start()
            second.join(0.2)
        return size_bytes

    monkeypatch.setattr("kvstore.primary.shared.populate", populate)
    assert allocate(files[0], huge_pages=True) == _SIZE
    second.join(60)
    assert calls == files[:1]
    for fd in files:
        os.close(fd)


def test_an_allocation_that_ended_early_is_completed_by_the_next_process(path: Path) -> None:
    """A process that has the file of one that was killed in the middle of the allocation allocates the rest."""
    engine = _engine(path, "before")
    assert engine.stdout is not None and engine.stdout.readline()
    file = open_shared(path, _SIZE)
    engine.communicate("go", timeout=60)
    assert (engine.returncode, file.is_maker) == (-signal.SIGKILL, False)
    allocate(file.fd, huge_pages=True)
    assert os.fstat(file.fd).st_blocks * 512 >= _SIZE
    os.close(file.fd)


def test_a_file_that_is_removed_before_it_is_locked_is_made_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If its last engine ends while a process opens the file, that process gets one that others find, too."""
    last = open_shared(path, _SIZE).fd
    lock = fcntl.flock

    def late(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_SH:
            monkeypatch.undo()
            path.unlink()
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    file = open_shared(path, _SIZE)
    assert file.is_maker and os.path.samestat(os.fstat(file.fd), path.stat())
    os.close(file.fd)
    os.close(last)


def test_a_name_that_another_engine_has_taken_meanwhile_stays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead file that is replaced before it is locked is not removed in its successor's place."""
    path.write_bytes(bytes(mmap.PAGESIZE))
    lock = fcntl.flock

    def late(fd: int, operation: int) -> None:
        monkeypatch.undo()
        path.unlink()
        path.write_bytes(bytes(mmap.PAGESIZE))
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    remove_dead_files(path.parent)
    assert path.exists()


@pytest.mark.parametrize("same_name", [True, False])
def test_a_start_that_was_killed_leaves_no_memory(path: Path, same_name: bool) -> None:
    """An engine killed during the allocation leaves a file, which the next start removes, also one of another name."""
    for _ in range(5):
        engine = _engine(path, "during")
        engine.communicate(timeout=60)
        assert (engine.returncode, path.exists()) == (-signal.SIGKILL, True)
    other = path if same_name else path.with_name(f"other{SUFFIX}")
    file = open_shared(other, _SIZE)
    assert file.is_maker and os.fstat(file.fd).st_blocks == 0
    assert list(path.parent.iterdir()) == [other]
    os.close(file.fd)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/shm", path)])
def test_a_start_passes_over_names_of_other_programs(path: Path, make: Callable[[Path], None]) -> None:
    """A pipe, a directory or a link with the name of a file with a lock neither stops a start nor goes away."""
    other = path.with_name(f"other{SUFFIX}")
    make(other)
    os.close(open_shared(path, _SIZE).fd)
    assert os.path.lexists(other)
    other.rmdir() if make is os.mkdir else other.unlink()


def test_files_without_a_lock_of_ours_stay(path: Path) -> None:
    """Files of other names, which engines without kvstore have, stay whether they are in use or not."""
    other = path.with_name("vllm_offload_1.mmap")
    other.write_bytes(bytes(mmap.PAGESIZE))
    remove_dead_files(path.parent)
    assert other.exists()
