"""The channel: what joins the two halves of a tier, wherever the I/O half runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.runtime.messages import FromIO, ToIO

__all__ = ["Channel"]


class Channel(Protocol):
    """The scheduler side's end of a tier; used by one thread at a time."""

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""

    def open(self, timeout_s: float) -> None:
        """Open the I/O half, waiting for it.

        Raises:
            TimeoutError: It took longer than ``timeout_s``.
            KVStoreError: Whatever the I/O half raised.
        """

    def send(self, messages: Sequence[ToIO]) -> None:
        """Hand over messages, in order; never waits for the I/O half.

        Raises:
            HostClosedError: After ``close``.
        """

    def receive(self) -> FromIO | None:
        """Return the next answer, or None if there is none now."""

    def wait(self, timeout_s: float) -> bool:
        """Block until there is an answer to receive, and tell whether there is; for start, drain and close only."""

    def close(self, timeout_s: float) -> bool:
        """Close the I/O half; what it has answered can still be received. Idempotent.

        Returns:
            Whether it ended in time. If not, it may still hold slots.
        """
