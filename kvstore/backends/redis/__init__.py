"""Blocks on Redis or Valkey: one server, a cluster, or a pair managed by Sentinel.

A GET passes through five modules: ``backend`` (command), ``exchange`` (choice of the node, redirects, retries),
``node`` (choice of the connection, login), ``connection`` (deadlines; bytes are moved by ``kvstore.backends.duplex``)
and ``resp`` (parsing, into the slot). ``topology`` holds the nodes that ``control`` finds; ``parts`` splits long
records.
"""

from kvstore.backends.redis.backend import RedisBackend
from kvstore.backends.redis.config import RedisConfig

__all__ = ["RedisBackend", "RedisConfig"]
