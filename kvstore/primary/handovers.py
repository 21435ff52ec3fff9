"""Hand-overs: requests whose blocks another engine will fetch; shared by the scheduler and the serving thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from kvstore.types import BlockKey

__all__ = ["HandOvers"]

_SENT_MAX: Final = 1 << 16
"""Sent blocks that the scheduler has not processed; the holds of further ones end by expiry."""


class HandOvers:
    """Blocks that handed-over requests will compute, and blocks that were sent.

    The scheduler's thread calls :meth:`begin`, :meth:`expect`, :meth:`end` and :meth:`take_sent`; the serving thread
    calls :meth:`is_coming` and :meth:`note_sent`. Each step is one operation on a container, which Python makes atomic,
    so no lock is needed.
    """

    def __init__(self) -> None:
        self._keys: dict[str, Sequence[BlockKey] | None] = {}
        """Blocks of each request; None until they are known."""
        self._coming: dict[BlockKey, int] = {}
        self._unknown = 0
        """Requests whose blocks are unknown: any block may belong to them."""
        self._sent: deque[BlockKey] = deque(maxlen=_SENT_MAX)

    def begin(self, request_id: str) -> None:
        """Add a handed-over request whose blocks are not known yet."""
        self.end(request_id)
        self._keys[request_id] = None
        self._unknown += 1

    def expect(self, request_id: str, keys: Sequence[BlockKey]) -> None:
        """Set the blocks that a request will compute, if it is handed over."""
        if self._keys.get(request_id, ()) is None:
            self._keys[request_id] = keys
            for key in keys:
                self._coming[key] = self._coming.get(key, 0) + 1
            self._unknown -= 1

    def end(self, request_id: str) -> None:
        """Forget a request that has computed all its blocks and whose copies have ended."""
        keys = self._keys.pop(request_id, ())
        if keys is None:
            self._unknown -= 1
            return
        for key in keys:
            left = self._coming[key] - 1
            if left:
                self._coming[key] = left
            else:
                del self._coming[key]

    def is_coming(self, key: BlockKey) -> bool:
        """Whether a handed-over request computes a block, or may."""
        return self._unknown > 0 or key in self._coming

    def note_sent(self, key: BlockKey) -> None:
        """Note that a block was sent to another engine."""
        self._sent.append(key)

    def take_sent(self) -> list[BlockKey]:
        """Return the blocks sent since the last call, once for each sending."""
        return [self._sent.popleft() for _ in range(len(self._sent))]
