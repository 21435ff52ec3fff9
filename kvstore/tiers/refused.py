"""Memory of records that are there and can't be read here, so that they are not found, promoted and refused for ever.

Such a record is intact as far as anybody can tell: its key is not in the keyring, its codec is not installed, it is not
sealed where it should be. Another engine may well read it, so it stays where it is. Here it counts as not there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.bounded import BoundedDict
from kvstore.types import BlockKey

__all__ = ["RefusedRecords"]

_KEYS_MAX: Final = 1 << 16
"""Records remembered (some ten megabytes); those forgotten cost one more refused load each."""

_REPLACED_MAX: Final = 4096
"""Records remembered as replaced, while loads that read their predecessors may still end."""

_PAUSE_S: Final = 10.0
"""How long a record is not found after it was refused. The key that it lacks may be in the keyring within a second, and
another engine may store the block anew at any moment."""

_PAUSE_S_MAX: Final = 300.0
"""The pause doubles with each refusal, up to this: then a record costs a load every five minutes, and one that can
be read again is found within as long."""


class RefusedRecords:
    """Keys of records that were refused: hidden until a pause is over, remembered until they are read or replaced.

    Belongs to one event loop.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: BoundedDict[BlockKey, tuple[float, float]] = BoundedDict(_KEYS_MAX)
        """End of the pause, and its length, by key; the one refused longest ago in front."""
        self._replaced: BoundedDict[BlockKey, float] = BoundedDict(_REPLACED_MAX)
        """When a record took the place of a refused one, by key; the first replaced in front."""

    def __len__(self) -> int:
        return len(self._known)

    def note(self, keys: Sequence[BlockKey], seconds: float = 0.0) -> None:
        """Note records that were refused just now, by a load that has taken so long.

        What replaced a record meanwhile is not what that load has read.
        """
        now = self._clock()
        for key in keys:
            if self._replaced.get(key, now - seconds) > now - seconds:
                continue
            _, last_s = self._known.pop(key, (0.0, 0.0))
            pause_s = min(2 * last_s, _PAUSE_S_MAX) or _PAUSE_S
            self._known[key] = (now + pause_s, pause_s)

    def forget(self, keys: Sequence[BlockKey], *, replaced: bool = False) -> None:
        """Note records that were read, replaced or removed."""
        for key in keys if self._known else ():
            if self._known.pop(key, None) is not None and replaced:
                self._replaced[key] = self._clock()

    def among(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Return those that were refused when they were last read, however long ago."""
        return {key for key in keys if key in self._known} if self._known else set()

    def lasting(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Return those that were refused again after a pause: nothing that this engine waited for has helped."""
        return {key for key in self.among(keys) if self._known[key][1] > _PAUSE_S}

    def hidden_among(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Return those that are to count as not there at present."""
        now = self._clock()
        return {key for key in self.among(keys) if now < self._known[key][0]}
