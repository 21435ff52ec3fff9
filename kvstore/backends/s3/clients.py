"""Which client sends the requests."""

from __future__ import annotations

import importlib
import urllib.request
from typing import Final
from urllib.parse import urlsplit

from kvstore.backends.s3.client import ObjectClient
from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.retry import RetryingClient
from kvstore.errors import ConfigError

__all__ = ["chosen_client", "make_client"]

_CLASSES: Final = {
    "aioboto3": ("kvstore.backends.s3.aws", "AwsClient"),
    "obstore": ("kvstore.backends.s3.rust", "RustClient"),
}


def make_client(config: S3Config) -> RetryingClient:
    """Return the client that a configuration asks for, not opened.

    Raises:
        ConfigError: Its package is not installed.
    """
    name = chosen_client(config)
    module, attribute = _CLASSES[name]
    try:
        # Only here: each needs packages that others don't have.
        found: type[ObjectClient] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"The client {name!r} can't be used: there is no package {error.name!r}. "
            "Install kvstore[s3], or set 'client' to the one you have."
        ) from error
    return RetryingClient(found(config), config)  # type: ignore[call-arg]


def chosen_client(config: S3Config) -> str:
    """Return the name of the client that a configuration means: aioboto3, unless only obstore can do it."""
    if config.client != "auto":
        return config.client
    return "obstore" if config.bucket.endswith("--x-s3") or _proxied(config) else "aioboto3"


def _proxied(config: S3Config) -> bool:
    """Tell whether a proxy stands between us and the service."""
    url = urlsplit(config.url(config.region or "us-east-1"))
    return url.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(url.hostname or "")
