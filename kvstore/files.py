"""Small files that operators replace while engines run: read again after a change, without blocking a loop."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import BinaryIO, Final, Generic, TypeVar

from kvstore.errors import AbsentError, ConfigError

logger = logging.getLogger("kvstore.files")

_T = TypeVar("_T")

_LOOK_S: Final = 0.25
"""Longest wait for a look at the files, which takes microseconds. While a filesystem hangs, the last value is used."""

_FIRST_LOOK_S: Final = 10.0
"""The same before the first value; an opening tier waits for it."""

_COMPLETE_S: Final = 10.0
"""Age from which a value is complete. A younger one may be half of a file, and does not become ``previous``."""

_WARN_AGAIN_S: Final = 60.0
"""Interval of log lines about refused credentials; each attempt to connect may be refused."""

_FILE_BYTES_MAX: Final = 16 << 20
"""Longest file; a longer one is the wrong file. The authorities of a whole system take a quarter of a megabyte."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; FIFOs and devices, which could block forever, are refused.

    Raises:
        OSError: The file can't be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return open(descriptor, "rb")


def shown_path(text: str) -> str:
    """Return the text in an error for a secret's path, which may be the secret itself by mistake.

    A path is shown if it exists, or if its directory exists (other than ``/`` and the current one). Otherwise only the
    existing directories and the length are shown, because half of all keys in base64 contain a ``/``.
    """
    parent = text.rpartition("/")[0]
    if _is_there(text, os.path.lexists) or (parent.strip("/.") and _is_there(parent, os.path.isdir)):
        return repr(text)
    while parent.strip("/.") and not _is_there(parent, os.path.isdir):
        parent = parent.rpartition("/")[0]
    below = f" below {parent!r}" if parent.strip("/.") else ""
    return f"(a path of {len(text)} characters{below}; hidden, because it does not exist and may be the value itself)"


class FollowedFiles(Generic[_T]):
    """A value made from the content of files, and made again after a file has changed, in place or by a rename.

    A failed reading keeps the last value: a file may be missing or half-written for a moment. Coroutines read on one
    daemon thread at a time, which a hung filesystem may keep. Threads and event loops may share an object. Nothing is
    read before the first call.

    Args:
        paths: The files; none for a value that never changes.
        make: Makes the value from their contents. ``ConfigError``: they can't be used; its text shows no secret.
        what: Kind of the files, for errors: ``"Secret file"``.
        file_bytes_max: Longest file.
        show: Returns the text for a path in errors; by default one that may hide it.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        make: Callable[[list[bytes]], _T],
        what: str,
        file_bytes_max: int = _FILE_BYTES_MAX,
        show: Callable[[str], str] = shown_path,
    ) -> None:
        self.refusals = 0  # Number of refusals of a value that the files still had.
        self.previous: _T | None = None  # The last complete value before the current one; None if there was none.
        self.replaced_at = float("-inf")  # Time at which it was replaced, by the monotonic clock.
        self.paths = tuple(map(str, paths))
        self._make = make
        self._what = what
        self._file_bytes_max = file_bytes_max
        self._show = show
        self._value: _T | None = None
        self._error: ConfigError | None = None
        self._signature: list[tuple[int, ...]] | None = None
        self._digest = b""
        self._lock = threading.Lock()
        self._reading: Future[None] | None = None
        self._changed_at = float("-inf")
        self._warned_at = float("-inf")

    @property
    def value(self) -> _T:
        """The value as last read.

        Raises:
            ConfigError: The files could not be used yet; ``AbsentError``: one could not be read.
        """
        if self._value is None:
            error = self._error or AbsentError(f"{self._what} has not been read yet. Try again.")
            raise type(error)(str(error))
        return self._value

    def __repr__(self) -> str:
        return f"FollowedFiles({', '.join(map(self._show, self.paths))})"

    async def renew(self) -> None:
        """Read the files again if one has changed."""
        if not self.paths:
            if self._value is None:
                self.look()
            return
        with self._lock:
            reading = self._reading
            if reading is None:
                reading = self._reading = Future()
                try:
                    threading.Thread(target=self._read, args=(reading,), name="kvstore-files", daemon=True).start()
                except RuntimeError:  # No thread can be started; the next login tries again.
                    self._reading = None
                    return
        limit_s = _FIRST_LOOK_S if self._value is None else _LOOK_S
        await asyncio.wait([asyncio.wrap_future(reading)], timeout=limit_s)

    async def current(self) -> _T:
        """Call :meth:`renew`, and return :attr:`value`; for use before a login or handshake."""
        await self.renew()
        return self.value

    def look(self) -> None:
        """Do the same as :meth:`renew` in the calling thread, for as long as it takes."""
        try:
            # Before the content, so that a later change is noticed.
            signature = [self._signed(path) for path in self.paths]
            if signature == self._signature and self._value is not None:
                return
            contents = [self._content(path) for path in self.paths]
            digest = b"".join([hashlib.sha256(content).digest() for content in contents])
            if digest != self._digest or self._value is None:
                value, now = self._make(contents), time.monotonic()
                if self._value is not None:
                    if now - self._changed_at >= _COMPLETE_S:
                        self.previous, self.replaced_at = self._value, now
                    self._changed_at = now
                self._value, self._digest = value, digest
            self._signature, self._error = signature, None
        except ConfigError as error:
            self._error = error

    def continue_count(self, before: FollowedFiles[_T]) -> None:
        """Count refusals on from those of other files, and log them no more often."""
        self.refusals, self._warned_at = before.refusals, before._warned_at

    async def refused(self, used: _T, complaint: str) -> bool:
        """Read the files again after a refusal of the value ``used``; return whether there is another value to try.

        Otherwise the refusal is counted, and logged at most once a minute.

        Args:
            complaint: Who refuses what, as the beginning of a sentence.
        """
        if self._value == used:
            # A file rewritten within one tick of the filesystem's clock has the signature of the one before.
            self._signature = None
            await self.renew()
        if self._value != used:
            return True
        self.refusals += 1
        now = time.monotonic()
        if now - self._warned_at >= _WARN_AGAIN_S:
            self._warned_at = now
            logger.warning("%s. %s", complaint, self._remedy())
        return False

    def _remedy(self) -> str:
        if self._error is not None:
            return f"{self._error} Until then, the last content is used."
        if not self.paths:
            return (
                "It is not given as a file: correct it and restart the engine, or give a file, which is read again "
                "without a restart."
            )
        names = " and ".join(map(self._show, self.paths))
        return f"{names} still has the refused content. Write the current one; it is read again without a restart."

    def _read(self, reading: Future[None]) -> None:
        try:
            self.look()
        finally:
            with self._lock:
                self._reading = None
            reading.set_result(None)

    def _signed(self, path: str) -> tuple[int, ...]:
        try:
            found = os.stat(path)
        except (OSError, ValueError) as error:
            raise self._unreadable(path, error) from None
        return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev

    def _content(self, path: str) -> bytes:
        try:
            with open_regular(path) as file:
                content = file.read(self._file_bytes_max + 1)
        except (OSError, ValueError) as error:
            raise self._unreadable(path, error) from None
        if len(content) > self._file_bytes_max:
            limit = f"a regular file of at most {self._file_bytes_max} bytes"
            raise ConfigError(f"{self._what} {self._show(path)} is not {limit}.")
        return content

    def _unreadable(self, path: str, error: OSError | ValueError) -> ConfigError:
        reason = error.strerror if isinstance(error, OSError) else "bad path"
        kind = AbsentError if isinstance(error, OSError) else ConfigError
        return kind(f"{self._what} {self._show(path)} can't be read: {reason}. Give a path the engine can read.")


def _is_there(text: str, test: Callable[[str], bool]) -> bool:
    try:
        return test(text)
    except (OSError, ValueError):  # Longer than any path, or with a zero byte.
        return False
