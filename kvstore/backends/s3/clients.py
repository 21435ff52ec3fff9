"""Which client sends the requests."""

from __future__ import annotations

import importlib
import urllib.request
from typing import Final
from urllib.parse import urlsplit

from kvstore.backends.s3.client import ObjectClient
from kvstore.backends.s3.config import S3Config
from kvstore.errors import ConfigError

__all__ = ["chosen_client", "make_client"]

_CLASSES: Final = {
    "direct": ("kvstore.backends.s3.direct", "DirectClient"),
    "aioboto3": ("kvstore.backends.s3.boto", "BotoClient"),
}


def make_client(config: S3Config) -> ObjectClient:
    """Return the client that a configuration asks for, not opened.

    Raises:
        ConfigError: A package is not installed.
    """
    module, attribute = _CLASSES[chosen_client(config)]
    try:
        # Only here: each needs packages that others don't have.
        found: type[ObjectClient] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(f"S3 can't be used: there is no package {error.name!r}. Install vllm-kvstore[s3].") from error
    return found(config)


def chosen_client(config: S3Config) -> str:
    """Return the name of the client that a configuration means: direct, unless only aioboto3 can do it."""
    if config.client != "auto":
        return config.client
    return "aioboto3" if config.bucket.endswith("--x-s3") or _proxied(config) else "direct"


def _proxied(config: S3Config) -> bool:
    """Tell whether a proxy stands between us and the service."""
    url = urlsplit(config.url(config.region or "us-east-1"))
    return url.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(url.hostname or "")
