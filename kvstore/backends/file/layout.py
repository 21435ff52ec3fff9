"""Names in the root directory: what they are, and which are ours. Pure functions; nothing a user gives gets into them.

::

    <root>/
      <namespace, 64 hex digits>/
        namespace.json
        <shard, 2 hex digits>/
          <key, hex>.kv
      .kvstore/
        layout.json  ledger  lock.<namespace>  snapshot.<namespace>  writer.<writer>
        quarantine/<namespace, 16 digits>-<key, hex>-<time>.bad

A name that is none of these is not ours: it is neither read nor counted nor removed.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from kvstore.types import KEY_BYTES_MAX, BlockKey

__all__ = [
    "LAYOUT_NAME",
    "LEDGER_NAME",
    "NAMESPACE_DOCUMENT",
    "QUARANTINE_DIR",
    "STATE_DIR",
    "block_name",
    "is_key",
    "is_namespace",
    "is_quarantined",
    "is_shard",
    "key_of",
    "lock_name",
    "quarantine_name",
    "shard_name",
    "shard_of",
    "snapshot_name",
    "suggested_fanout",
    "tmp_name",
    "tmp_writer",
    "writer_name",
    "writer_of",
]

STATE_DIR: Final = ".kvstore"
QUARANTINE_DIR: Final = "quarantine"
LAYOUT_NAME: Final = "layout.json"
LEDGER_NAME: Final = "ledger"
NAMESPACE_DOCUMENT: Final = "namespace.json"

_KEY_PATTERN: Final = rf"(?:[0-9a-f]{{2}}){{1,{KEY_BYTES_MAX}}}"
_BLOCK: Final = re.compile(rf"({_KEY_PATTERN})\.kv")
_NAMESPACE: Final = re.compile(r"[0-9a-f]{64}")
_SHARD: Final = re.compile(r"[0-9a-f]{2}")
_QUARANTINED: Final = re.compile(rf"[0-9a-f]{{16}}-{_KEY_PATTERN}-[0-9]{{1,20}}\.bad")
_WRITER_PATTERN: Final = r"[0-9a-f]{32}\.[0-9]{1,10}\.[0-9]{1,20}"
_WRITER: Final = re.compile(rf"writer\.({_WRITER_PATTERN}\.[0-9a-f]{{8}})")
_TMP: Final = re.compile(rf"\.tmp\.({_WRITER_PATTERN})\.([0-9a-f]{{1,32}})")


def is_key(key: BlockKey) -> bool:
    """Tell whether a key has a length that can be a name."""
    return 0 < len(key) <= KEY_BYTES_MAX


def block_name(key: BlockKey) -> str:
    """Return the name of a block's file."""
    return key.hex() + ".kv"


def key_of(name: str) -> BlockKey | None:
    """Return the key whose block has this name, or None if it is no block's name."""
    match = _BLOCK.fullmatch(name)
    return bytes.fromhex(match[1]) if match else None


def shard_of(key: BlockKey, fanout: int) -> int:
    """Return the shard, 0 to ``fanout - 1``, that a block lies in; even for keys that are not."""
    return hashlib.sha256(key).digest()[0] % fanout


def shard_name(shard: int) -> str:
    """Return the name of a shard's directory."""
    return f"{shard:02x}"


def suggested_fanout(files_total: int) -> int:
    """Return how many shards suit a filesystem with so many inodes (0: it does not count them); at most 256.

    256 keep directories small with millions of blocks; where inodes are few, directories should not take them all.
    """
    if files_total == 0 or files_total >= 65536:
        return 256
    return 16 if files_total >= 1024 else 1


def is_namespace(name: str) -> bool:
    """Tell whether this is the name of a namespace's directory."""
    return _NAMESPACE.fullmatch(name) is not None


def is_shard(name: str) -> bool:
    """Tell whether this is the name of a shard's directory."""
    return _SHARD.fullmatch(name) is not None


def lock_name(namespace_hex: str) -> str:
    """Return the name of a namespace's lock file."""
    return f"lock.{namespace_hex}"


def snapshot_name(namespace_hex: str) -> str:
    """Return the name of a namespace's snapshot."""
    return f"snapshot.{namespace_hex}"


def writer_name(writer: str) -> str:
    """Return the name of a writer's lock file."""
    return f"writer.{writer}"


def writer_of(name: str) -> str | None:
    """Return the writer whose lock file has this name, or None."""
    match = _WRITER.fullmatch(name)
    return match[1] if match else None


def tmp_name(writer: str, number: int) -> str:
    """Return the name of a file that a writer has not published yet."""
    process, _, instance = writer.rpartition(".")
    return f".tmp.{process}.{instance}{number:08x}"


def tmp_writer(name: str) -> str | None:
    """Return the writer of an unpublished file, or None if this is not the name of one."""
    match = _TMP.fullmatch(name)
    return f"{match[1]}.{match[2][:8]}" if match else None


def quarantine_name(namespace_hex: str, key: BlockKey, time_ns: int) -> str:
    """Return the name of a damaged block in the quarantine."""
    return f"{namespace_hex[:16]}-{key.hex()}-{time_ns}.bad"


def is_quarantined(name: str) -> bool:
    """Tell whether this is the name of a block in the quarantine."""
    return _QUARANTINED.fullmatch(name) is not None
