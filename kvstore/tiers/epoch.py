"""The epoch of a tier, as its scheduler half knows it."""

from __future__ import annotations

import logging

from kvstore.runtime.messages import BeginEpoch, EpochBegun

__all__ = ["Epoch"]

logger = logging.getLogger("kvstore.tiers")


class Epoch:
    """Asks for epochs, and knows whether the one asked for last has begun.

    Args:
        tier: Name of the tier, for messages.
        named: Whether the I/O half names the first epoch (it is configured); else the tier opens in the base epoch.

    Attributes:
        name: The present epoch; None while it is not known.
    """

    def __init__(self, tier: str, *, named: bool) -> None:
        self._tier = tier
        self._asked = 0
        self._begun = 0
        self.name: str | None = None if named else ""

    @property
    def is_changing(self) -> bool:
        """Whether an epoch was asked for that has not begun: what the I/O half says is about an earlier one."""
        return self._begun < self._asked

    @property
    def present(self) -> str | None:
        """Name of the epoch that lookups are about; None while it changes or is not known."""
        return None if self.is_changing else self.name

    def ask(self) -> BeginEpoch:
        """Return the request for a new epoch."""
        self.name = None
        return self._request()

    def ask_again(self) -> list[BeginEpoch]:
        """Return the request that brings a new I/O half from the epoch of its start to the present one, if need be."""
        return [] if self.name == "" and not self.is_changing else [self._request()]

    def note_begun(self, message: EpochBegun) -> bool:
        """Note an answer; return whether it is the one to the latest request."""
        if message.number != self._asked:
            return False
        self._begun, self.name = message.number, message.name
        logger.info("Tier %s is in the epoch %r", self._tier, message.name)
        return True

    def _request(self) -> BeginEpoch:
        self._asked += 1
        return BeginEpoch(self._asked, self.name)
