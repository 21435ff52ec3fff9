"""Names of objects: where a block lies in the bucket."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final, Literal

from kvstore.namespace import Namespace
from kvstore.types import BlockKey

__all__ = ["ObjectKeys", "ObjectName", "read_name"]

_SPREAD_DIGITS = 3
"""Hexadecimal digits in front: services split their load by the beginning of names, and 4,096 beginnings spread it over
as many parts as they care to make."""

# That the digits of a key are even in number is checked apart: to count in pairs takes three times as long.
_BLOCK: Final = re.compile(r"([0-9a-f]{3})/([0-9a-f]{64})/([0-9a-f]{2,128})")
_PACK_OR_NOTE: Final = re.compile(r"_packs/([0-9a-f]{64})/([0-9a-f]{28})([pr])")


@dataclass(frozen=True, slots=True)
class ObjectName:
    """What the name of an object of ours says.

    Attributes:
        kind: What lies there.
        namespace: Whose, in hexadecimal.
        key: Key of a block; of packs and notes what tells them from others.
    """

    kind: Literal["block", "pack", "note"]
    namespace: str
    key: BlockKey


def read_name(own: str) -> ObjectName | None:
    """Return what a name (without the prefix) says; None if it is none that we give to blocks, packs or notes."""
    if (match := _BLOCK.fullmatch(own)) is not None:
        spread, namespace, digits = match.groups()
        if len(digits) % 2:
            return None
        key = bytes.fromhex(digits)
        return ObjectName("block", namespace, key) if _spread(key) == spread else None
    if (match := _PACK_OR_NOTE.fullmatch(own)) is not None:
        return ObjectName("pack" if match[3] == "p" else "note", match[1], bytes.fromhex(match[2]))
    return None


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
        return self._prefix + _spread(key) + self._middle + key.hex()

    def key_of(self, name: str) -> BlockKey | None:
        """Return the key of the block whose object has this name, None if it is no block of this namespace."""
        try:
            key = bytes.fromhex(name.rpartition("/")[2])
        except ValueError:
            return None
        return key if key and self.name(key) == name else None


def _spread(key: BlockKey) -> str:
    return hashlib.sha256(key).hexdigest()[:_SPREAD_DIGITS]
