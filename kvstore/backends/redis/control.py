"""Control plane: the url, Sentinel queries, the slot map of a cluster. Each query has a connection of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from kvstore.backends.redis.config import RedisConfig
from kvstore.backends.redis.failures import AnswerLateError, NodeDownError, RedisError
from kvstore.backends.redis.node import Node
from kvstore.backends.stream import TLS, Endpoint

SLOTS: Final = 16384
"""Number of slots in a cluster."""


class Shard(NamedTuple):
    """A range of a cluster's slots, both ends included, and the nodes that serve it."""

    first: int
    last: int
    master: Endpoint
    replicas: tuple[Endpoint, ...] = ()


def endpoint_of(config: RedisConfig) -> tuple[Endpoint, int]:
    """Return the endpoint and the database number of a configuration's url."""
    url = urlsplit(config.url)
    database = parse_qs(url.query).get("db", [""])[0]
    if url.scheme == "unix":
        return Endpoint(path=unquote(url.path)), int(database or 0)
    endpoint = Endpoint(unquote(url.hostname or "127.0.0.1"), url.port or 6379)
    return endpoint, int(database or url.path.strip("/") or 0)


def sentinel_endpoints(config: RedisConfig) -> list[Endpoint]:
    places = [address.rpartition(":") for address in config.sentinels]
    return [Endpoint(host.strip("[]"), int(port)) for host, _, port in places]


@contextlib.asynccontextmanager
async def session(
    endpoint: Endpoint, config: RedisConfig, tls: TLS | None, limit_s: float, database: int = 0
) -> AsyncIterator[Node]:
    """Connect to a server for some commands, for at most ``limit_s``; failures are ``RedisError``."""
    one = msgspec.structs.replace(config, connections=1)
    node = Node(endpoint, one, tls, Counter(), database=database, is_replica=False, on_trouble=lambda: None)
    try:
        async with asyncio.timeout(limit_s):
            yield node
    except TimeoutError:
        raise AnswerLateError(f"{endpoint}: no answer within {limit_s:.3g} s") from None
    finally:
        await node.close()


async def sentinel_nodes(config: RedisConfig, tls: TLS | None) -> tuple[Endpoint, tuple[Endpoint, ...]]:
    """Query the Sentinels for the master and its replicas. RedisError if none responds with a master."""
    login = msgspec.structs.replace(config, username=config.sentinel_username, password=config.sentinel_password)
    name, reason = config.sentinel_master.encode(), ""
    for endpoint in sentinel_endpoints(config):
        try:
            async with session(endpoint, login, tls, 2 * config.connect_timeout) as node:
                found = [each for each in _states(await node.ask(b"SENTINEL", b"MASTERS")) if each[b"name"] == name]
                (master,) = [_endpoint_of_state(each) for each in found if _is_well(each, b"master")]
                asks = config.read_from == "replica"
                replicas = _states(await node.ask(b"SENTINEL", b"SLAVES", name)) if asks else []
                return master, tuple(_endpoint_of_state(each) for each in replicas if _is_well(each, b"slave"))
        # The last three for malformed responses, and for one without the master.
        except (RedisError, TypeError, ValueError, LookupError) as error:
            reason = error.bare if isinstance(error, RedisError) else f"{endpoint} does not"
    raise NodeDownError(
        f"no Sentinel names a master {config.sentinel_master!r} ({reason}). Are they up, and is that the name they "
        "know it by?"
    )


def _states(reply: Any) -> list[dict[bytes, bytes]]:
    """Return the items of a Sentinel's response, each a list of names and values."""
    return [dict(zip(each[::2], each[1::2], strict=True)) for each in reply]


def _is_well(state: dict[bytes, bytes], role: bytes) -> bool:
    flags = state[b"flags"].split(b",")
    return role in flags and b"s_down" not in flags and b"o_down" not in flags


def _endpoint_of_state(state: dict[bytes, bytes]) -> Endpoint:
    return _endpoint([state[b"ip"], int(state[b"port"])])


async def shards(endpoint: Endpoint, config: RedisConfig, tls: TLS | None) -> list[Shard]:
    """Query one node for the slot map of its cluster. RedisError without a valid response."""
    try:
        async with session(endpoint, config, tls, 2 * config.connect_timeout) as node:
            answer = await node.ask(b"CLUSTER", b"SLOTS")
    except RedisError as error:
        reason = error.bare.removeprefix(f"{endpoint}: ")
        raise NodeDownError(f"{endpoint}: CLUSTER SLOTS failed: {reason}") from None
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
            master, *replicas = [_endpoint(node, asked.host) for node in nodes]
            found.append(Shard(first, last, master, tuple(replicas)))
    except (TypeError, ValueError, LookupError) as error:
        raise NodeDownError(f"{asked}: its map of the cluster can't be read ({error})") from error
    return found


def _endpoint(address: Any, host_asked: str | None = None) -> Endpoint:
    """Parse an address that begins with host and port; an empty host means ``host_asked``."""
    host, port = address[0], address[1]
    name = host.decode() if isinstance(host, bytes) else host
    # "?" means a host name that is not known yet.
    if name in (None, "", "?"):
        name = host_asked
    if not isinstance(name, str) or not 0 < port < 65536:
        raise ValueError("no address")
    return Endpoint(name, port)
