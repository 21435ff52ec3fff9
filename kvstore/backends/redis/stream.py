"""TLS settings of a Redis configuration."""

from __future__ import annotations

import ssl

from kvstore.backends.redis.config import RedisConfig
from kvstore.backends.stream import client_context

__all__ = ["tls_context"]


def tls_context(config: RedisConfig) -> ssl.SSLContext | None:
    """Return the TLS settings of a configuration, None if it wants none.

    Raises:
        ConfigError: A certificate or key can't be used.
    """
    if not config.tls:
        return None
    return client_context(
        ca=config.tls_ca, cert=config.tls_cert, key=config.tls_key, check_hostname=config.tls_check_hostname
    )
