"""Control plane, by redis-py: URLs, Sentinel's answers, the map of a cluster.

The one module that imports redis-py. Values never pass through here. Causes are not chained: redis-py quotes servers,
and servers quote arguments, so passwords.
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
"""Slots of a cluster."""

_ANSWER_BYTES_MAX: Final = 1 << 20
"""Most bytes that a conversation brings; the map of a cluster of a thousand nodes has some hundred thousand."""

_has_driver_info = "driver_info" in inspect.signature(Redis.__init__).parameters
_QUIET: Final = dict.fromkeys(("driver_info",) if _has_driver_info else ("lib_name", "lib_version"))
"""Keeps redis-py from naming itself to the server, which a narrow ACL forbids. Newer releases have one name for it."""


class Shard(NamedTuple):
    """A run of a cluster's slots, both ends included, and the nodes that serve it."""

    first: int
    last: int
    master: Endpoint
    replicas: tuple[Endpoint, ...] = ()


def endpoint_of(config: RedisConfig) -> tuple[Endpoint, int]:
    """Return where a configuration's url points to, and the number of the database; else ConfigError."""
    try:
        found: dict[str, Any] = dict(parse_url(config.url))  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise ConfigError(f"'url' is {config.url!r}: {error}. Expected such as 'redis://host:6379/0'.") from error
    database = int(found.get("db", 0))
    if "path" in found:
        return Endpoint(path=str(found["path"])), database
    return Endpoint(str(found.get("host") or "127.0.0.1"), int(found.get("port") or 6379)), database


def sentinel_endpoints(config: RedisConfig) -> list[Endpoint]:
    """Return where the Sentinels listen."""
    places = [address.rpartition(":") for address in config.sentinels]
    return [Endpoint(host.strip("[]"), int(port)) for host, _, port in places]


async def sentinel_nodes(config: RedisConfig) -> tuple[Endpoint, tuple[Endpoint, ...]]:
    """Ask the Sentinels for the master and its replicas that are up. RedisError if none answers or knows the master."""
    addresses = [(endpoint.host, endpoint.port) for endpoint in sentinel_endpoints(config)]
    password = config.sentinel_password.reveal() if config.sentinel_password else None
    options = _options(config) | {"username": config.sentinel_username or None, "password": password, "db": 0}
    sentinel = Sentinel(addresses, sentinel_kwargs=options)  # type: ignore[no-untyped-call]
    try:
        async with conversation(sentinel.sentinels, len(addresses) * 2 * config.connect_timeout):
            master = await sentinel.discover_master(config.sentinel_master)
            found = await sentinel.discover_slaves(config.sentinel_master) if config.read_from == "replica" else []
        return _endpoint(master), tuple(_endpoint(address) for address in found)
    # The last four are what redis-py makes of answers that are none.
    except (ClientError, OSError, TimeoutError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise NodeDownError(
            f"no Sentinel names a master {config.sentinel_master!r} ({type(error).__name__}). Are they up, and is "
            "that the name they know it by?"
        ) from None


def client_of(endpoint: Endpoint, config: RedisConfig, database: int = 0) -> Redis:
    """Return a client of one node, for a :func:`conversation`."""
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
    """Bound the time and the answers of a conversation, and close its clients at the end."""
    for client in clients:
        pool = client.connection_pool
        bases = (_Bounded, pool.connection_class)
        pool.connection_class = type("BoundedConnection", bases, {"_bytes_max": bytes_max})
    try:
        # redis-py limits each step only.
        async with asyncio.timeout(timeout_s):
            yield
    finally:
        for client in clients:
            await _close(client)


async def shards(endpoint: Endpoint, config: RedisConfig) -> list[Shard]:
    """Ask one node for the map of its cluster. RedisError if it does not answer with one."""
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
    """Read the answer to CLUSTER SLOTS, else RedisError; a node without a name is the one that was asked."""
    found, slots_left = [], SLOTS
    try:
        for first, last, *nodes in answer:  # type: ignore[attr-defined]
            if not (isinstance(first, int) and isinstance(last, int) and 0 <= first <= last < SLOTS):
                raise ValueError("slots out of range")
            slots_left -= last - first + 1
            if slots_left < 0:
                # Slots named again and again would make filling the table of slots take seconds.
                raise ValueError("slots named twice")
            master, *replicas = [_endpoint(node, asked) for node in nodes]
            found.append(Shard(first, last, master, tuple(replicas)))
    except (TypeError, ValueError, LookupError) as error:
        raise NodeDownError(f"{asked}: its map of the cluster can't be read ({error})") from error
    return found


def _endpoint(address: Any, asked: Endpoint | None = None) -> Endpoint:
    """Read an address, which begins with host and port; one without a name is that of the node that was asked."""
    host, port = address[0], address[1]
    name = host.decode() if isinstance(host, bytes) else host
    # "?" stands for a node whose name is not known yet.
    if asked is not None and name in (None, "", "?"):
        name = asked.host
    if not isinstance(name, str) or not isinstance(port, int) or not 0 < port < 65536:
        raise ValueError("no address")
    return Endpoint(name, port)


class _BoundedReader:
    """What redis-py reads a server's answers from, and not without end: it would keep in memory whatever comes."""

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
    """Mixed into a connection of redis-py, of whatever kind."""

    _reader: Any
    _bytes_max: int

    async def _connect(self) -> None:
        await super()._connect()  # type: ignore[misc]
        self._reader = _BoundedReader(self._reader, self._bytes_max)


async def _close(client: Redis) -> None:
    """Close a client to the end, also when cancelled meanwhile: redis-py would leave its connections open."""
    closing = asyncio.ensure_future(client.aclose())
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        # Takes a time-out of a connection at most.
        await asyncio.wait({closing})
        closing.cancelled() or closing.exception()
        raise


def _options(config: RedisConfig) -> dict[str, Any]:
    """Return what all clients share: short time-outs, no retries of their own, RESP2, as narrow ACLs allow."""
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
