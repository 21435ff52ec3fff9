"""Names of epochs: the one that a fleet has agreed on, or a random one of this engine alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import stat
import threading
from typing import Final

from kvstore.config import EpochConfig
from kvstore.errors import ConfigError

__all__ = ["EpochNames"]

logger = logging.getLogger("kvstore.tiers")

_READ_TIMEOUT_S: Final = 2.0
"""Time for reading the name, while the tier answers every lookup with MISS. A file system that needs longer is down."""

_NAME_LENGTH_MAX: Final = 256
"""Characters of a name; it becomes a field of the namespace, and a version or a UUID needs far fewer."""


class EpochNames:
    """Names the epoch at start and at each reset. Belongs to one event loop.

    Args:
        source: Where the fleet's name is; None: there is no fleet.
    """

    def __init__(self, source: EpochConfig | None) -> None:
        self._source = source
        self._is_reading = False
        """Whether a read has not ended; of a file system that hangs, it may be over long after it was given up."""
        self._unused = ""
        """Random name that was given and whose epoch holds nothing; empty if there is none."""

    def note_stored(self) -> None:
        """Note that a block is stored in the present epoch."""
        self._unused = ""

    async def after(self, present: str, wanted: str | None) -> str:
        """Return the epoch to enter after a reset in the present one, if need be; None wants the next."""
        if wanted is not None:
            return wanted
        if self._unused and self._unused == present:
            return present  # It is empty, so that resets in a row need no more than one epoch.
        name = await self.next()
        self._unused = name if self._source is None else ""
        return name

    async def first(self) -> str:
        """Return the epoch of a tier that opens: the fleet's, or the base one without a fleet."""
        return "" if self._source is None else await self.next()

    async def next(self) -> str:
        """Return the epoch that follows a reset.

        A name that can't be read is replaced by a random one: the engine then shares nothing, and finds nothing that
        was stored before, which costs time and is never wrong.
        """
        if self._source is None:
            return _random_name()
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                return _checked(await self._read(self._source.file), self._source.file)
        except (OSError, ValueError, TimeoutError, ConfigError) as error:
            logger.warning(
                "The name of the epoch can't be read from %s: %s. This engine is alone in an epoch of its own until "
                "the next reset.",
                self._source.file,
                str(error).rstrip(".") or type(error).__name__,
            )
            return _random_name()

    async def _read(self, path: str) -> str:
        """Read a file on a thread of its own, which no end of the process waits for if the file system hangs."""
        if self._is_reading:
            # Each reset would leave one more thread behind.
            raise TimeoutError("an earlier attempt to read it has not ended")
        self._is_reading = True
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()

        def settle(content: str | None, error: Exception | None) -> None:
            self._is_reading = False
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(content or "")

        def work() -> None:
            content, failure = None, None
            try:
                with open(path, encoding="utf-8", opener=_open_regular) as file:
                    content = file.read(4 * _NAME_LENGTH_MAX)
            except (OSError, ValueError, ConfigError) as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # The loop has ended; nobody waits any more.
                loop.call_soon_threadsafe(settle, content, failure)

        threading.Thread(target=work, name="kvstore-epoch", daemon=True).start()
        return await answer


def _random_name() -> str:
    return f"engine-{secrets.token_hex(16)}"


def _checked(content: str, path: str) -> str:
    name = content.strip()
    # An empty file is most likely one that is being written, and the base epoch would find the oldest blocks of all.
    if not 0 < len(name) <= _NAME_LENGTH_MAX or not name.isprintable():
        raise ConfigError(
            f"{path} contains {name[:40]!r} ({len(name)} characters). Expected one line of 1 to {_NAME_LENGTH_MAX} "
            "printable characters. Write it to another file and rename that, so that nobody reads half of it."
        )
    return name


def _open_regular(path: str, flags: int) -> int:
    """Open a regular file only: reading another kind, such as a named pipe, might never end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{path} is not a regular file. Expected a file with the name of the epoch on one line.")
    return descriptor
