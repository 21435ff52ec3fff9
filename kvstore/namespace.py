"""Namespace: the digest of all properties that change the bytes of a block.

No checksum detects intact bytes of another layout, which makes them the most dangerous wrong bytes. Every property that
changes the bytes of a block is therefore a field of its namespace; paths and record headers contain the digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from kvstore.errors import ConfigError

FORMAT_VERSION: Final = 1
"""Version of the format of namespaces and records. Part of every digest, so two formats never share blocks."""

_DEPTH_MAX: Final = 32
"""Deepest nesting of fields: model configurations need about five. Also stops at cycles."""


class Namespace:
    """An immutable set of named fields, identified by its digest.

    The digest is SHA-256 over the canonical JSON of ``{"fields": fields, "format": FORMAT_VERSION}``: keys sorted by
    code point, no spaces, UTF-8, numbers in Python's notation. ``1``, ``1.0``, ``True`` and ``"1"`` differ, the order
    of keys does not matter, and an additional field makes another namespace.

    Args:
        fields: JSON values by name: None, bool, int, float (finite), str, list and dict of these. Similar types
            (subclasses, tuples, numpy scalars) are refused, because their text may change between releases.

    Raises:
        ConfigError: A field has another type, is not finite, is nested too deeply, or can't be written as JSON.
    """

    __slots__ = ("_digest", "_document")

    def __init__(self, fields: Mapping[str, Any]) -> None:
        document = {"fields": _checked(fields, "", 0), "format": FORMAT_VERSION}
        try:
            text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
            # Stored as text, which is immutable; decoding it creates a new copy of the fields.
            self._document = text.encode()
        except ValueError as error:
            # A lone surrogate has no UTF-8 encoding, and Python refuses to format an int of thousands of digits.
            raise ConfigError(f"A field of the namespace can't be written as JSON: {error}") from error
        self._digest = hashlib.sha256(self._document).digest()

    @classmethod
    def of_digest(cls, digest: bytes) -> Namespace:
        """Return a namespace with a known digest but unknown fields, for tools; its document has no fields.

        Raises:
            ConfigError: The digest does not have 32 bytes.
        """
        if len(digest) != 32:
            raise ConfigError(f"A namespace's digest of {len(digest)} bytes. Expected 32.")
        found = cls({})
        found._digest = bytes(digest)
        return found

    @property
    def digest(self) -> bytes:
        """The 32 bytes in every record header."""
        return self._digest

    @property
    def hex(self) -> str:
        """The digest as 64 lower-case hexadecimal digits, the form in paths and object names."""
        return self._digest.hex()

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Namespace:
        """Return the namespace that a :meth:`document` describes; ConfigError if it describes none."""
        fields = document.get("fields")
        if not isinstance(fields, dict) or (found := cls(fields)).hex != document.get("digest"):
            raise ConfigError("The description of a namespace has no fields, or those of another namespace.")
        return found

    def description(self) -> bytes:
        """Return :meth:`document` as JSON, for the medium; empty if the fields are unknown."""
        document = self.document()
        return json.dumps(document, ensure_ascii=False).encode() if document["fields"] else b""

    def document(self) -> dict[str, Any]:
        """Return a copy of the content of ``namespace.json``: the digest, the format and the fields."""
        hashed = json.loads(self._document)
        return {"digest": self.hex, "format": hashed["format"], "fields": hashed["fields"]}

    def with_fields(self, **more: Any) -> Namespace:
        """Return a namespace with fields added or replaced; with unknown fields if those of this one are unknown."""
        if more and self._digest != hashlib.sha256(self._document).digest():
            return self.of_digest(Namespace({"digest": self.hex, **more}).digest)
        return Namespace({**json.loads(self._document)["fields"], **more}) if more else self

    def of_epoch(self, epoch: str) -> Namespace:
        """Return the namespace of an epoch; for the base epoch ``""``, this namespace."""
        return self.with_fields(epoch=epoch) if epoch else self

    def __eq__(self, other: object) -> bool:
        return self._digest == other._digest if isinstance(other, Namespace) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        return f"Namespace({self.hex[:16]}…)"


def _checked(value: Any, path: str, depth: int) -> Any:
    """Return a copy of ``value`` if it is plain JSON at all levels."""
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
        start = f"{path}." if path else ""
        return {_checked_name(name, path): _checked(item, f"{start}{name}", depth + 1) for name, item in value.items()}
    raise ConfigError(
        f"Namespace field {path!r} is of type {type(value).__name__}. Expected None, bool, int, float, "
        "str, list or dict. Convert it to one of these, so that its text can't change."
    )


def _checked_name(name: object, path: str) -> str:
    if type(name) is not str:
        raise ConfigError(f"Namespace field {path!r} has the key {name!r}. Expected a str.")
    return name
