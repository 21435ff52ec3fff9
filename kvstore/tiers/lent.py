"""A tier in an I/O process whose blocks this process also reads, to send them to peers."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from kvstore.backends.base import Backend
from kvstore.runtime.host import ThreadChannel, attach_to_shared_host
from kvstore.runtime.messages import BeginEpoch, EpochBegun, FromIO
from kvstore.runtime.process import ProcessChannel, ProcessSpec
from kvstore.tiers.tier_io import TierIO, TierIOSpec


class LentProcess(ProcessChannel):
    """The channel to the I/O process of a tier, beside a reader of its medium on the loop that serves peers.

    The I/O process has no primary tier to serve from, and moves all other blocks without this process.

    Args:
        spec: The I/O process.
        backend: The reader's. Its I/O half opens it like that of a tier, but has no scheduler half.
        side: The I/O half of the tier, as it would be in this process.
    """

    def __init__(self, spec: ProcessSpec, backend: Backend, side: TierIOSpec) -> None:
        super().__init__(spec)
        # The tier is there without its reader, too.
        config = msgspec.structs.replace(side.config, required=False)
        self._side = replace(side, backend=backend, config=config, lineage=False)
        self._reader: ThreadChannel | None = None

    def open(self, timeout_s: float) -> None:
        super().open(timeout_s)
        self._reader = attach_to_shared_host(lambda _: TierIO(self._side, _ignore))
        self._reader.open(timeout_s)

    def receive(self) -> FromIO | None:
        message = super().receive()
        # After close(), messages that the I/O process had sent are still received.
        if self._reader is not None and not self.closed and isinstance(message, EpochBegun) and message.number:
            self._reader.send([BeginEpoch(message.number, message.name)])
        return message

    def close(self, timeout_s: float) -> bool:
        ended = super().close(timeout_s)
        # Its own time: a process that was killed at the end of its time leaves none.
        return (self._reader is None or self._reader.close(timeout_s)) and ended


def _ignore(message: FromIO) -> None:
    """Drop a message, because nobody waits for it."""
