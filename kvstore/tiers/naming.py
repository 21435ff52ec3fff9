"""Keyed names in front of the I/O half of a tier: keys above, names below, mapped where messages pass.

So the scheduler half knows keys only, and backends and records, headers included, know names only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvstore.codec.names import KeyedNames
from kvstore.runtime.messages import (
    Delete,
    ExistsBatch,
    FromIO,
    PresenceAdded,
    PresenceRemoved,
    SubmitJob,
    ToIO,
    Touch,
)

__all__ = ["Naming"]

_M = TypeVar("_M", bound=SubmitJob | ExistsBatch | Delete | Touch | PresenceAdded | PresenceRemoved)


class Naming:
    """Maps the keys in messages: going in to names, coming out back to keys.

    Args:
        names: What maps a key; None: every key is its own name, and messages pass as they are.
    """

    def __init__(self, names: KeyedNames | None) -> None:
        self._names = names

    def inward(self, message: ToIO) -> ToIO:
        """Return a message to the I/O half, as that half is to see it."""
        if self._names is not None and isinstance(message, SubmitJob | ExistsBatch | Delete | Touch):
            return _mapped(message, self._names.name_of)
        return message

    def outward(self, message: FromIO) -> FromIO:
        """Return a message of the I/O half, as the scheduler half is to see it."""
        if self._names is not None and isinstance(message, PresenceAdded | PresenceRemoved):
            return _mapped(message, self._names.key_of)
        return message


def _mapped(message: _M, mapping: Callable[[bytes], bytes]) -> _M:
    return msgspec.structs.replace(message, keys=tuple(mapping(key) for key in message.keys))
