"""A tier as a URL: the scheme names the backend, the rest is its address, the query has its options."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from kvstore.errors import ConfigError

EXAMPLES = "'file:///mnt/kv?capacity=10GiB', 'redis://host:6379/0' or 's3://bucket/prefix'"


def tier_of_url(text: str) -> dict[str, Any]:
    """Return the configuration of a tier that is given as a URL.

    Raises:
        ConfigError: It is not a URL.
    """
    try:
        url = urlsplit(text)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
    except ValueError:
        url, query = urlsplit(""), {}
    if not url.scheme or "://" not in text:
        # It may hold a password.
        raise ConfigError(f"The tier (not shown) is text, but not a URL. Expected one such as {EXAMPLES}, or a dict.")
    options = {name: _value(item) for name, item in query.items()}
    if "backend" in options:
        raise ConfigError("Unknown key 'backend' in the query of a tier's URL: its scheme names the backend.")
    if url.scheme in ("redis", "rediss", "unix"):
        suffix = f"?db={query['db']}" if url.scheme == "unix" and options.pop("db", None) is not None else ""
        return {"backend": "redis", "url": f"{url.scheme}://{url.netloc}{url.path}{suffix}", **options}
    if url.scheme == "s3":
        prefix = unquote(url.path).strip("/")
        return {"backend": "s3", "bucket": url.netloc, **({"prefix": prefix} if prefix else {}), **options}
    path = unquote(url.netloc + url.path)
    return {"backend": url.scheme, **({"path": path} if path and url.scheme != "memory" else {}), **options}


def _value(text: str) -> Any:
    """Decode a query value as JSON if it is a number, ``true`` or ``false``; otherwise return the text."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return value if isinstance(value, bool | int | float) else text
