"""Blocks on Redis or Valkey: one server, a cluster, or a pair watched by Sentinel.

A GET passes through five modules: ``backend`` (its command made by ``records``), ``exchange`` (choice of the node,
redirects, retries), ``node`` (choice of the connection, login), ``connection`` (bytes, deadlines), ``resp`` (parsing,
into the slot). Beside them, ``topology`` holds the nodes that ``control`` finds, and ``parts`` splits long records.
"""

from kvstore.backends.redis.backend import RedisBackend
from kvstore.backends.redis.config import RedisConfig

__all__ = ["RedisBackend", "RedisConfig"]
