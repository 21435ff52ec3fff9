"""Directory servers, and clients that write directory entries by hand, as a foreign program would."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import redis

from kvstore.namespace import Namespace
from tests.peer.holder import NAMESPACE
from tests.redis.servers import Server


class Entry(NamedTuple):
    """An engine's entry."""

    address: bytes
    summary: bytes | None = None
    version: bytes = b"0" * 16
    seconds: float = 100


def prefix_of(namespace: Namespace = NAMESPACE) -> bytes:
    """Return the prefix of a namespace's keys."""
    return f"kvpeers:{namespace.hex}:".encode()


class RedisAdmin:
    """A client with all rights on a server."""

    def __init__(self, server: Server, namespace: Namespace = NAMESPACE) -> None:
        self.client = redis.Redis(port=server.port)
        self._prefix = prefix_of(namespace)

    def write(self, entries: Iterable[Entry]) -> None:
        """Write entries of a namespace."""
        pipeline = self.client.pipeline(transaction=False)
        for one in entries:
            end_ms = (time.time() + one.seconds) * 1000
            pipeline.zadd(self._prefix + b"engines", {one.address + b" " + one.version: end_ms})
            if one.summary is not None:
                pipeline.set(self._prefix + one.address, one.summary)
        pipeline.execute()

    def keys(self) -> Sequence[bytes]:
        return list(self.client.keys("*"))

    def close(self) -> None:
        """Disconnect."""
        self.client.close()
