"""Blocks in packs: their writes and reads."""

from __future__ import annotations

import random
from typing import Any

from kvstore.backends.base import RecordRead, RecordWrite

PACKED: dict[str, Any] = {"pack_below": 1 << 20, "pack_refresh": 0}


def blocks_of(rng: random.Random, count: int, size: int = 3000) -> dict[bytes, bytes]:
    """Return keys with records of various lengths."""
    return {rng.randbytes(32): rng.randbytes(rng.randrange(size // 2, size)) for _ in range(count)}


def writes_of(blocks: dict[bytes, bytes]) -> list[RecordWrite]:
    """Return the writes of blocks, each in two buffers."""
    return [RecordWrite(key, (memoryview(data)[:256], memoryview(data)[256:])) for key, data in blocks.items()]


def reads_of(keys: Any, size: int = 4096) -> list[RecordRead]:
    """Return reads into separate buffers."""
    return [RecordRead(key, (memoryview(bytearray(256)), memoryview(bytearray(size)))) for key in keys]
