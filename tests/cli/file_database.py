"""A third party's backend whose option ``path`` is a file."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore import SimpleBackend, TierConfig
from kvstore.config import Capacity


class _Config(TierConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    path: str
    capacity: Capacity = Capacity("0")


class FileDatabase(SimpleBackend):
    """Stores nothing."""

    name = "filedb"
    config_type = _Config

    async def put_one(self, key: bytes, buffers: Sequence[memoryview]) -> bool:
        return True

    async def get_one_into(self, key: bytes, buffers: Sequence[memoryview]) -> int | None:
        return None

    async def exists_one(self, key: bytes) -> bool:
        return False
