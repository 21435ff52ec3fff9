"""The channel between the two halves of a tier, wherever the I/O half runs."""

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
        """Open the I/O half, and wait until it is open.

        Raises:
            TimeoutError: It took longer than ``timeout_s``.
            KVStoreError: The I/O half could not be opened.
        """

    def send(self, messages: Sequence[ToIO]) -> None:
        """Hand over messages, in order; never waits for the I/O half.

        Raises:
            HostClosedError: After ``close``.
        """

    def receive(self) -> FromIO | None:
        """Return the next answer, or None if there is none now."""

    def hurry(self) -> None:
        """Note that a load is late, so that a stopped I/O half is detected soon; never waits."""

    def wait(self, timeout_s: float) -> bool:
        """Block until an answer has arrived; return whether one has. For start, drain and close only."""

    def close(self, timeout_s: float) -> bool:
        """Close the I/O half; its answers can still be received. Idempotent.

        Returns:
            Whether it ended in time. If not, it may still touch slots.
        """
