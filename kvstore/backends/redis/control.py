"""Control plane with redis-py: URLs, Sentinel queries, the slot map of a cluster.

The only module that imports redis-py. Values never pass through it. Exceptions that quote the server are not chained,
because servers quote arguments, including passwords.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, NamedTuple

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.exceptions import RedisError as ClientError
from redis.exceptions import ResponseError

from kvstore.backends.redis.config import RedisConfig
from kvstore.backends.redis.failures import NodeDownError
from kvstore.backends.stream import Endpoint
from kvstore.errors import ConfigError

__all__ = [
    "SLOTS",
    "ClientError",
    "Shard",
    "client_of",
    "conversation",
    "endpoint_of",
    "sentinel_endpoints",
    "sentinel_nodes",
    "shards",
]

SLOTS: Final = 16384
"""Number of slots in a cluster."""

_ANSWER_BYTES_MAX: Final = 1 << 20
"""Maximum bytes received per connection; the slot map of a cluster of a thousand nodes has a few hundred thousand."""

_has_driver_info = "driver_info" in inspect.signature(Redis.__init__).parameters
_QUIET: Final = dict.fromkeys(("driver_info",) if _has_driver_info else ("lib_name", "lib_version"))
"""Options that stop redis-py from sending its name, which a narrow ACL forbids. Newer releases use one option."""


class Shard(NamedTuple):
    """A range of a cluster's slots, both ends included, and the nodes that serve it."""

    first: int
    last: int
    master: Endpoint
    replicas: tuple[Endpoint, ...] = ()


def endpoint_of(config: RedisConfig) -> tuple[Endpoint, int]:
    """Return the endpoint and the database number of a configuration's url; else raise ConfigError."""
    try:
        found: dict[str, Any] = dict(parse_url(config.url))  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise ConfigError(f"'url' is {config.url!r}: {error}. Expected such as 'redis://host:6379/0'.") from error
    database = int(found.get("db", 0))
    if "path" in found:
        return Endpoint(path=str(found["path"])), database
    return Endpoint(str(found.get("host") or "127.0.0.1"), int(found.get("port") or 6379)), database


def sentinel_endpoints(config: RedisConfig) -> list[Endpoint]:
    places = [address.rpartition(":") for address in config.sentinels]
    return [Endpoint(host.strip("[]"), int(port)) for host, _, port in places]


async def sentinel_nodes(config: RedisConfig) -> tuple[Endpoint, tuple[Endpoint, ...]]:
    """Query the Sentinels for the master and its replicas. RedisError if none responds with a master."""
    addresses = [(endpoint.host, endpoint.port) for endpoint in sentinel_endpoints(config)]
    password = config.sentinel_password.reveal() if config.sentinel_password else None
    options = _options(config) | {"username": config.sentinel_username or None, "password": password, "db": 0}
    sentinel = Sentinel(addresses, sentinel_kwargs=options)  # type: ignore[no-untyped-call]
    try:
        async with conversation(sentinel.sentinels, len(addresses) * 2 * config.connect_timeout):
            master = await sentinel.discover_master(config.sentinel_master)
            found = await sentinel.discover_slaves(config.sentinel_master) if config.read_from == "replica" else []
        return _endpoint(master), tuple(_endpoint(address) for address in found)
    # redis-py raises the last four for malformed responses.
    except (ClientError, OSError, TimeoutError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise NodeDownError(
            f"no Sentinel names a master {config.sentinel_master!r} ({type(error).__name__}). Are they up, and is "
            "that the name they know it by?"
        ) from None


def client_of(endpoint: Endpoint, config: RedisConfig, database: int = 0) -> Redis:
    """Return a client for one node, to be used in a :func:`conversation`."""
    password = config.password.reveal() if config.password else None
    options = _options(config) | {"username": config.username or None, "password": password, "db": database}
    if endpoint.path:
        options = {name: value for name, value in options.items() if not name.startswith("ssl")}
        return Redis(unix_socket_path=endpoint.path, **options)
    return Redis(host=endpoint.host, port=endpoint.port, **options)


@contextlib.asynccontextmanager
async def conversation(
    clients: Sequence[Redis], timeout_s: float, bytes_max: int = _ANSWER_BYTES_MAX
) -> AsyncIterator[None]:
    """Bound the duration and the response bytes of a conversation, and close its clients at the end."""
    for client in clients:
        pool = client.connection_pool
        bases = (_Bounded, pool.connection_class)
        pool.connection_class = type("BoundedConnection", bases, {"_bytes_max": bytes_max})
    try:
        # redis-py only limits single steps.
        async with asyncio.timeout(timeout_s):
            yield
    finally:
        for client in clients:
            await _close(client)


async def shards(endpoint: Endpoint, config: RedisConfig) -> list[Shard]:
    """Query one node for the slot map of its cluster. RedisError without a valid response."""
    client = client_of(endpoint, config)
    try:
        async with conversation([client], 2 * config.connect_timeout):
            answer: object = await client.execute_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]
    except (ClientError, OSError, TimeoutError) as error:
        word = str(error).split(" ", 1)[0] if isinstance(error, ResponseError) else ""
        reason = word if re.fullmatch("[A-Z]{2,20}", word) else type(error).__name__
        raise NodeDownError(f"{endpoint}: CLUSTER SLOTS failed ({reason})") from None
    return read_shards(answer, endpoint)


def read_shards(answer: object, asked: Endpoint) -> list[Shard]:
    """Parse the response to CLUSTER SLOTS, else raise RedisError; an empty host means the responding node's host."""
    found, slots_left = [], SLOTS
    try:
        for first, last, *nodes in answer:  # type: ignore[attr-defined]
            if not (isinstance(first, int) and isinstance(last, int) and 0 <= first <= last < SLOTS):
                raise ValueError("slots out of range")
            slots_left -= last - first + 1
            if slots_left < 0:
                # With many repeated slots, filling the slot table would take seconds.
                raise ValueError("slots named twice")
            master, *replicas = [_endpoint(node, asked) for node in nodes]
            found.append(Shard(first, last, master, tuple(replicas)))
    except (TypeError, ValueError, LookupError) as error:
        raise NodeDownError(f"{asked}: its map of the cluster can't be read ({error})") from error
    return found


def _endpoint(address: Any, asked: Endpoint | None = None) -> Endpoint:
    """Parse an address that begins with host and port; an empty host means the host of ``asked``."""
    host, port = address[0], address[1]
    name = host.decode() if isinstance(host, bytes) else host
    # "?" means a host name that is not known yet.
    if asked is not None and name in (None, "", "?"):
        name = asked.host
    if not isinstance(name, str) or not isinstance(port, int) or not 0 < port < 65536:
        raise ValueError("no address")
    return Endpoint(name, port)


class _BoundedReader:
    """Stream reader for redis-py with a bound on the total bytes: redis-py itself would buffer any amount."""

    def __init__(self, reader: asyncio.StreamReader, bytes_max: int = _ANSWER_BYTES_MAX) -> None:
        self._reader = reader
        self._left = bytes_max

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    async def read(self, count: int) -> bytes:
        return self._counted(await self._reader.read(min(count, self._left + 1)))

    async def readline(self) -> bytes:
        return self._counted(await self._reader.readline())

    async def readexactly(self, count: int) -> bytes:
        if count > self._left:
            raise ConnectionError("an answer is too long")
        return self._counted(await self._reader.readexactly(count))

    def _counted(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            raise ConnectionError("an answer is too long")
        return data


class _Bounded:
    """Mixin for all connection classes of redis-py."""

    _reader: Any
    _bytes_max: int

    async def _connect(self) -> None:
        await super()._connect()  # type: ignore[misc]
        self._reader = _BoundedReader(self._reader, self._bytes_max)


async def _close(client: Redis) -> None:
    """Close a client completely, even if cancelled: redis-py would leave its connections open."""
    closing = asyncio.ensure_future(client.aclose())
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        # Takes at most one connection timeout.
        await asyncio.wait({closing})
        closing.cancelled() or closing.exception()
        raise


def _options(config: RedisConfig) -> dict[str, Any]:
    """Return the options of all clients: short timeouts, no retries, RESP2, and no commands that narrow ACLs forbid."""
    options: dict[str, Any] = {
        "socket_timeout": float(config.connect_timeout),
        "socket_connect_timeout": float(config.connect_timeout),
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        **_QUIET,
    }
    if config.tls:
        options |= {
            "ssl": True,
            "ssl_ca_certs": str(config.tls_ca) if config.tls_ca else None,
            "ssl_certfile": str(config.tls_cert) if config.tls_cert else None,
            "ssl_keyfile": str(config.tls_key) if config.tls_key else None,
            "ssl_check_hostname": config.tls_check_hostname,
        }
    return options
