"""Blocks on Redis or Valkey: one server, a cluster, or a pair watched by Sentinel."""

from kvstore.backends.redis.backend import RedisBackend
from kvstore.backends.redis.config import RedisConfig

__all__ = ["RedisBackend", "RedisConfig"]
