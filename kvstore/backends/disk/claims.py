"""Keys of blocks that are being stored or removed, so that operations on one key follow each other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterator

from kvstore.types import BlockKey


class Claims:
    """Claimed keys, each with a future that ends with its operation."""

    def __init__(self) -> None:
        self._claims: dict[BlockKey, asyncio.Future[None]] = {}

    def of(self, key: BlockKey) -> asyncio.Future[None] | None:
        """Return the future of the operation on a key, if any."""
        return self._claims.get(key)

    async def ended(self, keys: Collection[BlockKey]) -> None:
        """Wait until none of these keys is claimed."""
        while others := {self._claims[key] for key in keys if key in self._claims}:
            await asyncio.wait(others)

    @contextlib.contextmanager
    def held(self, keys: Collection[BlockKey]) -> Iterator[None]:
        """Claim keys that are not claimed."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._claims.update(dict.fromkeys(keys, done))
        try:
            yield
        finally:
            for key in keys:
                del self._claims[key]
            done.set_result(None)
