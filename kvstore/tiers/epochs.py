"""Epochs of a tier: the scheduler half requests them, the I/O half determines their names.

A name is read from a file that a fleet shares, or is random and used by this engine alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from typing import Final

from kvstore.config import EpochConfig
from kvstore.errors import ConfigError
from kvstore.files import open_regular
from kvstore.primary.lending import Lender
from kvstore.runtime.messages import BeginEpoch, EpochBegun

logger = logging.getLogger("kvstore.tiers")

_READ_TIMEOUT_S: Final = 2.0
"""Time limit for reading the name; meanwhile every lookup is MISS. A slower file system is considered down."""

_NAME_LENGTH_MAX: Final = 256
"""Maximum characters of a name, which becomes a field of the namespace; a version or a UUID needs far fewer."""


class Epoch:
    """The scheduler half's view: requests epochs and tracks whether the latest has begun.

    Args:
        named: Whether a configured source provides the first epoch; if not, the tier opens in the base epoch.
        lender: Source of rows for other engines; closed while the epoch changes.
    """

    def __init__(self, tier: str, *, named: bool, lender: Lender | None = None) -> None:
        self._tier = tier
        self._lender = lender
        self._asked = 0
        # Whether a requested epoch has not begun; until then, messages of the I/O half concern an earlier one.
        self.is_changing = False
        self.name: str | None = None if named else ""  # The present epoch; None while unknown.

    @property
    def present(self) -> str | None:
        """Name of the epoch that lookups refer to; None while it changes or is unknown."""
        return None if self.is_changing else self.name

    def ask(self) -> BeginEpoch:
        self.name = None
        if self._lender is not None:
            self._lender.is_open = False
        return self._request()

    def ask_again(self) -> list[BeginEpoch]:
        """Return the request that moves a new I/O half from its start epoch to the present one, if they differ."""
        return [] if self.name == "" and not self.is_changing else [self._request()]

    def note_begun(self, message: EpochBegun) -> bool:
        """Note an answer; return whether it belongs to the latest request."""
        if message.number != self._asked:
            return False
        if self.name is None:
            logger.info("Tier %s was reset: blocks stored before the epoch %r are not found", self._tier, message.name)
        self.is_changing, self.name = False, message.name
        if self._lender is not None:
            self._lender.is_open = True
        return True

    def _request(self) -> BeginEpoch:
        self._asked += 1
        self.is_changing = True
        return BeginEpoch(self._asked, self.name)


class EpochNames:
    """The I/O half's source of names, at start and at each reset. Belongs to one event loop.

    ``source``: location of the fleet's name; None without a fleet.
    """

    def __init__(self, source: EpochConfig | None) -> None:
        self._source = source
        self._is_reading = False
        """Whether a read is running; on a hanging file system, it may outlive its timeout."""
        self._unused = ""
        """Random name of an epoch without blocks, or empty."""

    def note_stored(self) -> None:
        """Note that the present epoch has blocks."""
        self._unused = ""

    async def after(self, present: str, wanted: str | None) -> str:
        """Return the epoch to enter after a reset in ``present``: ``wanted``, or the next one if that is None."""
        if wanted is not None:
            return wanted
        if self._unused and self._unused == present:
            return present  # It is empty: consecutive resets need only one epoch.
        name = await self.next()
        self._unused = name if self._source is None else ""
        return name

    async def first(self) -> str:
        """Return the epoch of an opening tier: the fleet's, or the base epoch without a fleet."""
        return "" if self._source is None else await self.next()

    async def next(self) -> str:
        """Return the epoch that follows a reset.

        An unreadable name is replaced by a random one: the engine then shares nothing and finds no earlier block,
        which is slow but never wrong.
        """
        if self._source is None:
            return _random_name()
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                return _checked(await self._read(self._source.file), self._source.file)
        # RuntimeError: no thread can be started.
        except (OSError, RuntimeError, ValueError, TimeoutError, ConfigError) as error:
            logger.warning(
                "The name of the epoch can't be read from %s: %s. This engine shares no blocks until the next reset.",
                self._source.file,
                str(error).rstrip(".") or type(error).__name__,
            )
            return _random_name()

    async def _read(self, path: str) -> str:
        """Read a file on its own daemon thread, so that a hanging file system can't block the exit of the process."""
        if self._is_reading:
            # Otherwise each reset would leave another thread behind.
            raise TimeoutError("an earlier attempt to read it has not ended")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str | Exception] = loop.create_future()

        def settle(content: str | Exception) -> None:
            self._is_reading = False
            if not answer.done():
                answer.set_result(content)

        def work() -> None:
            content: str | Exception
            try:
                with open_regular(path) as file:
                    content = file.read(4 * _NAME_LENGTH_MAX).decode()
            except (OSError, ValueError) as error:
                content = error
            with contextlib.suppress(RuntimeError):  # The loop has ended.
                loop.call_soon_threadsafe(settle, content)

        threading.Thread(target=work, name="kvstore-epoch", daemon=True).start()
        self._is_reading = True
        found = await answer
        if isinstance(found, Exception):
            raise found
        return found


def _random_name() -> str:
    return f"engine-{secrets.token_hex(16)}"


def _checked(content: str, path: str) -> str:
    name = content.strip()
    # An empty file is probably being written; the base epoch would expose the oldest blocks.
    if not 0 < len(name) <= _NAME_LENGTH_MAX or not name.isprintable():
        raise ConfigError(
            f"{path} contains {name[:40]!r} ({len(name)} characters). Expected one line of 1 to {_NAME_LENGTH_MAX} "
            "printable characters. Write it to another file and rename that file, so that readers never see a part."
        )
    return name
