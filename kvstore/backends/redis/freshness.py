"""Freshness: when the time to live of a used block is to be renewed; not on every use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore.bounded import BoundedDict

__all__ = ["Freshness"]

_REMEMBERED_MAX: Final = 262144
"""Blocks remembered (some 30 MB); of what is forgotten, one use more renews the time to live."""

_RENEW_SHARE: Final = 0.25
"""Part of its time to live that has to pass before a block is renewed: a block lives three quarters at least after its
last use, for a few commands in all that time."""

_WAITING_MAX: Final = 8192
"""Renewals that wait to be sent; what comes on top is renewed at its next use."""


class Freshness:
    """Remembers renewals and collects those that are due. Plain decisions, no clock of its own.

    Args:
        ttl_s: Time to live; 0 if blocks have none.
    """

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._renewed: BoundedDict[bytes, float] = BoundedDict(_REMEMBERED_MAX)
        self._waiting: dict[bytes, None] = {}

    def note_put(self, keys: Sequence[bytes], now: float) -> None:
        """Note that blocks were put: fresh until a share of their time has passed."""
        if self.ttl_s:
            for key in keys:
                self._renewed[key] = now

    def note_use(self, keys: Sequence[bytes], now: float) -> bool:
        """Note a use of blocks; return whether renewals wait to be sent."""
        if not self.ttl_s:
            return False
        for key in keys:
            # A block of somebody else's, or of an earlier run: nothing is known of its age, so it is renewed.
            renewed = self._renewed.get(key)
            if renewed is None or now - renewed >= _RENEW_SHARE * self.ttl_s:
                if len(self._waiting) >= _WAITING_MAX:
                    break
                self._waiting[key] = None
                self._renewed[key] = now
        return bool(self._waiting)

    def take(self) -> list[bytes]:
        """Return the blocks to renew now."""
        waiting, self._waiting = list(self._waiting), {}
        return waiting
