"""Files that operators replace: the last good value stays, a hung filesystem delays little, a refusal reads again."""

from __future__ import annotations

import asyncio
import io
import os
import threading
from pathlib import Path

import pytest

from kvstore import files
from kvstore.errors import AbsentError, ConfigError
from kvstore.files import FollowedFiles
from kvstore.testing.waiting import eventually_async


def number_in(path: Path, goes_on: threading.Event | None = None) -> FollowedFiles[int]:
    """A number in a file; a reading of more than one digit waits for the event."""

    def make(contents: list[bytes]) -> int:
        assert goes_on is None or len(contents[0]) == 1 or goes_on.wait(60)
        if not contents[0].isdigit():
            raise ConfigError("not a number")
        return int(contents[0])

    return FollowedFiles([path], make, "Number file")


async def test_a_bad_file_keeps_the_value(tmp_path: Path) -> None:
    """A missing, unreadable or invalid file keeps the last value until a valid one is there."""
    path = tmp_path / "number"
    followed = number_in(path)
    with pytest.raises(AbsentError, match="can't be read: No such file"):
        await followed.current()
    path.write_text("1")
    assert await followed.current() == 1
    for change in (lambda: path.write_text("x"), path.unlink, path.mkdir):
        change()
        assert await followed.current() == 1
    path.rmdir()
    path.write_text("2")
    assert await followed.current() == 2
    assert followed.previous == 1


async def test_a_half_written_file_does_not_replace_the_value_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that lasted for a moment is no value before a change; one that lasted for longer is."""
    path = tmp_path / "number"
    followed = number_in(path)
    path.write_text("1")
    assert (await followed.current(), followed.previous) == (1, None)
    monkeypatch.setattr(files, "_COMPLETE_S", 3600.0)
    replaced_at = []
    for content in ("2", "23", "234"):
        path.write_text(content)
        assert (await followed.current(), followed.previous) == (int(content), 1)
        replaced_at.append(followed.replaced_at)
    assert len(set(replaced_at)) == 1, "later changes prolong no acceptance of the value before"
    monkeypatch.setattr(files, "_COMPLETE_S", 0.0)
    path.write_text("5")
    assert (await followed.current(), followed.previous) == (5, 234)


async def test_a_refusal_reads_a_file_that_looks_unchanged(tmp_path: Path) -> None:
    """A file with the same length, time and inode is read again only after a refusal, which is counted if in vain."""
    path = tmp_path / "number"
    path.write_text("1")
    followed = number_in(path)
    assert await followed.current() == 1
    before = path.stat()
    path.write_text("2")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert await followed.current() == 1
    assert await followed.refused(1, "The server refuses 1")
    assert (followed.value, followed.refusals) == (2, 0)
    assert not await followed.refused(2, "The server refuses 2")
    assert followed.refusals == 1


async def test_a_change_during_a_reading_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changes right after its content was read is read again at the next look."""
    path = tmp_path / "number"
    path.write_text("1")
    followed = number_in(path)

    def open_before_change(name: str) -> io.BytesIO:
        monkeypatch.undo()
        content = path.read_bytes()
        path.write_text("23")
        return io.BytesIO(content)

    monkeypatch.setattr(files, "open_regular", open_before_change)
    assert await followed.current() == 1
    assert await followed.current() == 23


async def test_a_hung_filesystem_delays_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a file can't be read, the last value is used, and many attempts keep one thread."""
    path = tmp_path / "number"
    path.write_text("1")
    goes_on = threading.Event()
    followed = number_in(path, goes_on)
    assert await followed.current() == 1
    monkeypatch.setattr(files, "_LOOK_S", 0.01)
    path.write_text("22")
    try:
        assert await asyncio.gather(*[followed.current() for _ in range(20)]) == [1] * 20
        assert await followed.current() == 1
        # The thread of an earlier reading may still be about to end.
        await eventually_async(lambda: [each.name for each in threading.enumerate()].count("kvstore-files") == 1)
    finally:
        goes_on.set()
    await followed.renew()
    assert await followed.current() == 22
