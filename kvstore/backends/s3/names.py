"""Names of objects: blocks, packs and notes of a namespace, and housekeeping objects shared by engines.

Under the prefix of a tier::

    <3 digits>/<namespace>/<key>                           a block; the digits are the first of the key's SHA-256
    _packs/<namespace>/<12 digits: ms><16 at random>p      a pack
    _packs/<namespace>/<12 digits: ms><16 at random>r      a note of blocks removed from packs
    _namespaces/<namespace>                                the fields of the namespace
    _keeper/lease                                          the lease of the engine that does the housekeeping
    _keeper/removed/<12 digits: ms><16 at random>          a note of removed objects
    _keeper/uses/<16 at random>                            the objects that one engine used

All digits are lower-case hexadecimal: the prefix is the only part of a name that users or models control.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from dataclasses import dataclass
from typing import Final, Literal

from kvstore.namespace import Namespace
from kvstore.types import BlockKey

_SPREAD_DIGITS = 3
"""Services partition load by the prefix of names; 4,096 prefixes spread it over all partitions."""

DESCRIPTIONS: Final = "_namespaces/"
"""Folder of the fields of namespaces."""

_TIME_DIGITS: Final = 12
_RANDOM_BYTES: Final = 8

# The even number of a key's digits is checked separately: a regular expression of pairs takes three times as long.
_BLOCK: Final = re.compile(r"([0-9a-f]{3})/([0-9a-f]{64})/([0-9a-f]{2,128})")
_PACK_OR_NOTE: Final = re.compile(r"_packs/([0-9a-f]{64})/([0-9a-f]{28})([pr])")


@dataclass(frozen=True, slots=True)
class ObjectName:
    """Parsed name; ``key`` is a block's key, or the time and random bytes of a pack or note."""

    kind: Literal["block", "pack", "note"]
    namespace: str
    key: BlockKey

    @property
    def made_at(self) -> float:
        """Time in the name of a pack or note, by the clock of its engine, in seconds since the epoch."""
        return int.from_bytes(self.key[: _TIME_DIGITS // 2], "big") / 1000


def read_name(own: str) -> ObjectName | None:
    """Parse a name (without the prefix); None if it is not the name of a block, pack or note."""
    if (match := _BLOCK.fullmatch(own)) is not None:
        spread, namespace, digits = match.groups()
        if len(digits) % 2:
            return None
        key = bytes.fromhex(digits)
        return ObjectName("block", namespace, key) if _spread(key) == spread else None
    if (match := _PACK_OR_NOTE.fullmatch(own)) is not None:
        return ObjectName("pack" if match[3] == "p" else "note", match[1], bytes.fromhex(match[2]))
    return None


class ObjectNames:
    """Names of the objects of one namespace; ``prefix`` is empty or ends with ``/``."""

    def __init__(self, prefix: str, namespace: Namespace) -> None:
        self._prefix = prefix
        self._namespace = namespace.hex
        self.probe = f"{prefix}_probe/{namespace.hex}"  # An object that need not exist.
        self.fields = f"{prefix}{DESCRIPTIONS}{namespace.hex}"
        self.packs = f"{prefix}_packs/{namespace.hex}/"  # Folder of packs and notes.

    def block(self, key: BlockKey) -> str:
        """Return the name of a block's object."""
        return f"{self._prefix}{_spread(key)}/{self._namespace}/{key.hex()}"

    def read(self, name: str) -> ObjectName | None:
        """Parse a name (with the prefix); None if it does not belong to this namespace."""
        found = read_name(name[len(self._prefix) :]) if name.startswith(self._prefix) else None
        return found if found is not None and found.namespace == self._namespace else None

    def new_pack(self) -> str:
        """Return a unique name for a pack."""
        return f"{self.packs}{new_stamp()}p"

    def new_note(self) -> str:
        """Return a unique name for a note of removals from packs."""
        return f"{self.packs}{new_stamp()}r"

    def packs_since(self, moment: float) -> str:
        """Return a string that sorts before the names of all packs and notes made at ``moment`` or later."""
        return self.packs + stamp(moment)


class KeeperNames:
    """Names of the housekeeping objects of one prefix: the lease and two folders."""

    def __init__(self, prefix: str) -> None:
        self.lease = f"{prefix}_keeper/lease"
        self.notes = f"{prefix}_keeper/removed/"
        self.uses = f"{prefix}_keeper/uses/"


def new_stamp() -> str:
    """Return a unique suffix for a name, sortable by time."""
    return stamp(time.time()) + os.urandom(_RANDOM_BYTES).hex()


def stamp(moment: float) -> str:
    """Return a string that sorts before all suffixes made at ``moment`` (seconds since the epoch) or later."""
    return f"{int(max(0.0, moment) * 1000):0{_TIME_DIGITS}x}"


def _spread(key: BlockKey) -> str:
    return hashlib.sha256(key).hexdigest()[:_SPREAD_DIGITS]
