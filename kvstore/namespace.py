"""Namespace: the digest of everything that changes the bytes of a block.

Intact bytes of another layout are the most dangerous wrong bytes, because no checksum detects them. So every property
that changes the bytes of a block is a field of its namespace; the digest is in the path and in each record's header.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from kvstore.errors import ConfigError

__all__ = ["FORMAT_VERSION", "Namespace"]

FORMAT_VERSION: Final = 1
"""Version of the format of namespaces and records. Part of every digest, so two formats never share blocks."""

_DEPTH_MAX: Final = 32
"""Deepest nesting of fields: model configurations need about five. Also ends a cycle."""


class Namespace:
    """An immutable set of named fields, identified by its digest.

    The digest is SHA-256 over the canonical JSON of ``{"fields": fields, "format": FORMAT_VERSION}``: keys sorted by
    code point, no spaces, UTF-8, numbers as Python writes them. So ``1``, ``1.0``, ``True`` and ``"1"`` differ, the
    order of keys does not count, and one field more is another namespace.

    Args:
        fields: Names to JSON values: None, bool, int, float (finite), str, list and dict of these, and nothing that
            only looks like them (subclasses, tuples, numpy scalars), because their text may change between releases.

    Raises:
        ConfigError: A field is none of these.
    """

    __slots__ = ("_digest", "_document")

    def __init__(self, fields: Mapping[str, Any]) -> None:
        document = {"fields": _checked(fields, "", 0), "format": FORMAT_VERSION}
        try:
            text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
            # The text is kept, not the fields: nobody can change it, and reading it gives a fresh copy.
            self._document = text.encode()
        except ValueError as error:
            # A lone surrogate has no UTF-8, and Python refuses to print an int of thousands of digits.
            raise ConfigError(f"A field of the namespace can't be written as JSON: {error}") from error
        self._digest = hashlib.sha256(self._document).digest()

    @classmethod
    def of_digest(cls, digest: bytes) -> Namespace:
        """Return a namespace of which only the digest is known: for tools that look at blocks of others.

        Its document has the digest and no fields.

        Raises:
            ConfigError: A digest has 32 bytes.
        """
        if len(digest) != 32:
            raise ConfigError(f"A namespace's digest of {len(digest)} bytes. Expected 32.")
        found = cls({})
        found._digest = bytes(digest)
        return found

    @property
    def digest(self) -> bytes:
        """The 32 bytes that are in every header."""
        return self._digest

    @property
    def hex(self) -> str:
        """The digest as 64 lower-case hexadecimal digits, as it is in paths and object names."""
        return self._digest.hex()

    def document(self) -> dict[str, Any]:
        """Return what ``namespace.json`` says: the digest, the format and the fields; a copy."""
        hashed = json.loads(self._document)
        return {"digest": self.hex, "format": hashed["format"], "fields": hashed["fields"]}

    def with_fields(self, **more: Any) -> Namespace:
        """Return a namespace with fields added or replaced."""
        return Namespace({**json.loads(self._document)["fields"], **more})

    def of_epoch(self, epoch: str) -> Namespace:
        """Return the namespace of an epoch: of blocks that a reset separates from earlier ones.

        The base epoch ``""`` is the namespace itself, so that what was stored without epochs is found.
        """
        return self.with_fields(epoch=epoch) if epoch else self

    def __eq__(self, other: object) -> bool:
        return self._digest == other._digest if isinstance(other, Namespace) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        return f"Namespace({self.hex[:16]}…)"


def _checked(value: Any, path: str, depth: int) -> Any:
    """Return ``value`` if it is plain JSON all the way down."""
    if depth > _DEPTH_MAX:
        raise ConfigError(f"Namespace field {path[:80]!r} is nested deeper than {_DEPTH_MAX}. Flatten it.")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        if value - value != 0:
            raise ConfigError(f"Namespace field {path!r} is {value}. Expected a finite number.")
        return value
    if type(value) is list:
        return [_checked(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    if type(value) is dict or (depth == 0 and isinstance(value, Mapping)):
        return {_checked_name(name, path): _checked(item, f"{path}.{name}", depth + 1) for name, item in value.items()}
    raise ConfigError(
        f"Namespace field {path.lstrip('.')!r} is of type {type(value).__name__}. Expected None, bool, int, float, "
        "str, list or dict. Convert it to one of these, so that its text can't change."
    )


def _checked_name(name: object, path: str) -> str:
    if type(name) is not str:
        raise ConfigError(f"Namespace field {path.lstrip('.')!r} has the key {name!r}. Expected a str.")
    return name
