"""Names of objects: where a block lies in the bucket."""

from __future__ import annotations

import hashlib

from kvstore.namespace import Namespace
from kvstore.types import BlockKey

__all__ = ["ObjectKeys"]

_SPREAD_DIGITS = 3
"""Hexadecimal digits in front: services split their load by the beginning of names, and 4,096 beginnings spread it over
as many parts as they care to make."""


class ObjectKeys:
    """Names of the objects of one namespace.

    A block's object is ``<prefix><3 digits>/<namespace>/<key>``, all in lower-case hexadecimal; the digits are the
    first of the key's SHA-256. So nothing that a user or a model gives becomes part of a name but the prefix.

    Args:
        prefix: Begins every name; empty, or with a ``/`` at its end.
        namespace: Of the blocks.
    """

    def __init__(self, prefix: str, namespace: Namespace) -> None:
        self._prefix = prefix
        self._middle = f"/{namespace.hex}/"
        self.probe = f"{prefix}_probe/{namespace.hex}"

    def name(self, key: BlockKey) -> str:
        """Return the name of a block's object."""
        return self._prefix + hashlib.sha256(key).hexdigest()[:_SPREAD_DIGITS] + self._middle + key.hex()

    def key_of(self, name: str) -> BlockKey | None:
        """Return the key of the block whose object has this name, None if it is no block of this namespace."""
        try:
            key = bytes.fromhex(name.rpartition("/")[2])
        except ValueError:
            return None
        return key if key and self.name(key) == name else None
