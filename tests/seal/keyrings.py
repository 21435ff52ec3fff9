"""Keyrings of the tests: documents in files, and headers in the form that seals use."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvstore.codec.base import CodecContext
from kvstore.codec.seal import AeadSeal, MacSeal, SealOptions
from kvstore.config import decode_config
from kvstore.namespace import Namespace
from kvstore.testing import eventually

NAMESPACE = Namespace({"suite": "seal"})
WRITER = bytes(range(16))


def secret(number: int) -> str:
    """Return 32 bytes in base64, the same for the same number."""
    return base64.b64encode(bytes([number]) * 32).decode()


def document(*key_ids: int, current: int | None = None, **more: Any) -> dict[str, Any]:
    """Return a keyring with keys of these ids, the last one current."""
    keys = {str(key_id): secret(key_id) for key_id in key_ids}
    return {"current": key_ids[-1] if current is None else current, "keys": keys, **more}


def write(path: Path, content: Mapping[str, Any]) -> Path:
    """Write a keyring atomically, as recommended."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(content))
    fresh.chmod(0o600)
    fresh.replace(path)
    return path


def make_seal(
    path: Path,
    kind: type[AeadSeal] | type[MacSeal] = AeadSeal,
    *,
    namespace: Namespace = NAMESPACE,
    refresh: float = 0.001,
    **options: Any,
) -> AeadSeal | MacSeal:
    """Return a seal over the keyring in a file, which it rereads at nearly each use."""
    given = {"keys": {"file": str(path), "refresh": refresh}, **options}
    return kind(decode_config(SealOptions, given, where="codec"), CodecContext(namespace))


def header(key_id: int, *, namespace: Namespace = NAMESPACE, writer: bytes = WRITER, more: int = 0) -> bytes:
    """Return the part of a header that a seal binds: 248 bytes, of which the seal reads only some."""
    found = bytearray(248)
    found[32:64] = namespace.digest
    found[96:112] = writer
    found[112:120] = more.to_bytes(8, "little")
    found[124:128] = key_id.to_bytes(4, "little")
    return bytes(found)


def soon(predicate: Callable[[], object], what: str) -> None:
    """Wait until something is true; the limit is long: reads use threads, and programs start slowly under load."""
    eventually(predicate, 60, what)
