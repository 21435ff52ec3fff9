"""The node for a key: the one server, the master reported by Sentinels, or a node of a cluster."""

from __future__ import annotations

import asyncio
import binascii
import logging
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.backends.redis import control
from kvstore.backends.redis.config import RedisConfig
from kvstore.backends.redis.control import SLOTS, Shard
from kvstore.backends.redis.failures import NodeDownError, RedisError, ServerRefusedError
from kvstore.backends.redis.limits import LIMITS, Limits
from kvstore.backends.redis.node import Node
from kvstore.backends.stream import TLS, Endpoint, client_tls
from kvstore.errors import ConfigError

logger = logging.getLogger("kvstore.backends.redis")

_REFRESH_PAUSE_S: Final = 0.5
"""Minimum time between two queries of the nodes; a failover takes seconds."""

_WARM_NODES: Final = 32
"""Nodes connected at the start; others are connected by their first command."""


def slot_of(key: bytes) -> int:
    """Return the slot of a key without braces: CRC-16/XMODEM modulo 16384, as specified for Redis Cluster."""
    return binascii.crc_hqx(key, 0) % SLOTS


class Topology:
    """The nodes by slot. A server outside of a cluster serves all slots."""

    def __init__(self, config: RedisConfig, counters: Counter[str], limits: Limits = LIMITS) -> None:
        self.config = config
        self.limits = limits
        self.has_many_nodes = False  # Whether it is a cluster; other nodes then stay in use while one is down.
        self._tls: TLS | None = None
        self._counters = counters
        self._nodes: dict[tuple[Endpoint, bool], Node] = {}
        self._masters: list[Node | None] = [None] * SLOTS
        self._replicas: list[Sequence[Node]] = [()] * SLOTS
        self._configured, self._database = Endpoint(), 0
        self._refreshing: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._closed = False
        self._refreshed_at = float("-inf")

    async def open(self) -> None:
        """Find the nodes and connect; the login shows whether a node is part of a cluster. Allowed again after a close.

        Raises:
            ConfigError: The configuration can't be used.
            RedisError: No node is reachable, or the server refuses.
        """
        config = self.config
        self._closed = False
        self.has_many_nodes = config.mode == "cluster"
        # That of an earlier attempt has counted its refusals.
        self._tls = self._tls or checked_tls(config)
        if self._tls is not None:
            await self._tls.current()
        self._configured, self._database = control.endpoint_of(config)
        try:
            await self._look()
            await self._connect()
            if config.mode == "auto" and any(node.info.get(b"mode") == "cluster" for node in self.nodes):
                self.has_many_nodes = True
                await self._look()
                await self._connect()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        # Set first: failures from now on must not start a refresh, and redirects must not create nodes.
        self._closed = True
        refreshing, self._refreshing = self._refreshing, None
        if refreshing is not None:
            refreshing.cancel()
        # Before the first wait, in which this may be cancelled.
        self._keep(())
        if refreshing is not None:
            await asyncio.wait([refreshing])
        # Awaited, not cancelled: each task closes connections, without waiting for a server.
        if self._leaving:
            await asyncio.wait(self._leaving)

    @property
    def nodes(self) -> Sequence[Node]:
        return list(self._nodes.values())

    @property
    def refusals(self) -> int:
        """Number of refused credentials whose files had no others."""
        secrets = sum(secret.refusals for secret in self.config.secrets.values())
        return secrets + (self._tls.refusals if self._tls else 0)

    @property
    def has_working_nodes(self) -> bool:
        """Whether it is a cluster with at least one working node."""
        return self.has_many_nodes and any(node.is_well for node in self._nodes.values())

    def node_for(self, key: bytes, *, reading: bool) -> Node | None:
        """Return the node for a key, None if its slot is not served; with ``reading``, preferably a replica."""
        slot = slot_of(key) if self.has_many_nodes else 0
        found = (_replica(self._replicas[slot], slot) if reading else None) or self._masters[slot]
        if found is None:
            # An operator may assign the slot at any time, and no redirect would report it.
            self.note_trouble()
        return found

    def redirected(self, key: bytes, moved: ServerRefusedError, asked: Node) -> Node | None:
        """Return the target node of a redirect; None if it cannot be followed."""
        host, port = moved.moved_to or ("", 0)
        endpoint = Endpoint(host or asked.endpoint.host, port)
        is_known = (endpoint, False) in self._nodes
        if not self.has_many_nodes or (not is_known and len(self._nodes) >= self.limits.nodes_max):
            return None
        node = self._node(endpoint)
        if moved.code == "MOVED":
            self._masters[slot_of(key)] = node
            self.note_trouble()
        return node

    def note_trouble(self) -> None:
        """Schedule a background refresh of the nodes; if it fails, they stay unchanged."""
        may_change = self.has_many_nodes or self.config.sentinels
        if may_change and self._refreshing is None and not self._closed:
            pause_s = self._refreshed_at + _REFRESH_PAUSE_S - asyncio.get_running_loop().time()
            self._refreshing = asyncio.create_task(self._refresh_after(max(0.0, pause_s) * random.uniform(1.0, 1.2)))

    async def _refresh_after(self, pause_s: float) -> None:
        try:
            await asyncio.sleep(pause_s)
            self._counters["topology_refreshes"] += 1
            await self._look()
        except RedisError as error:
            logger.debug("The nodes could not be queried: %s", error)
        except ConfigError as error:
            logger.warning("A server names a node that may not be used: %s", error)
        except Exception:  # Nothing awaits this task. The next trouble starts another refresh.
            logger.exception("The nodes could not be queried because of an unexpected error, and are queried again")
        finally:
            self._refreshed_at = asyncio.get_running_loop().time()
            self._refreshing = None

    async def _connect(self) -> None:
        masters = [node for node in self.nodes if not node.is_replica]
        chosen = random.sample(masters, min(_WARM_NODES, len(masters)))
        results = await asyncio.gather(*(node.connect() for node in chosen), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        # Some reachable nodes are enough.
        if len(failures) == len(results):
            raise failures[0] if failures else NodeDownError("the cluster has no nodes that serve slots")

    async def _look(self) -> None:
        """Find the nodes. For a cluster, query known nodes in turn until one responds."""
        if self.config.sentinels:
            master, replicas = await control.sentinel_nodes(self.config, self._tls)
            known = self._masters[0]
            if known is not None and known.endpoint != master:
                logger.warning("Sentinel names a new master: %s", master)
            self._adopt([Shard(0, SLOTS - 1, master, tuple(each for each in replicas if each != master))])
            return
        if not self.has_many_nodes:
            self._adopt([Shard(0, SLOTS - 1, self._configured)])
            return
        up = [node.endpoint for node in self.nodes if not node.down]
        random.shuffle(up)
        failure: RedisError = NodeDownError("no node of the cluster answers")
        for endpoint in dict.fromkeys([*up[:8], self._configured]):
            try:
                self._adopt(await control.shards(endpoint, self.config, self._tls))
                return
            except RedisError as error:
                failure = error
        raise failure

    def _adopt(self, found: Sequence[Shard]) -> None:
        if not found:
            raise NodeDownError("the cluster serves no slots")
        if self.config.read_from == "master":
            found = [shard._replace(replicas=()) for shard in found]
        named = {endpoint for shard in found for endpoint in (shard.master, *shard.replicas)}
        if len(named) > (most := self.limits.nodes_max):
            raise NodeDownError(f"a map of {len(named)} nodes came, expected at most {most}. Is this a cluster?")
        masters: list[Node | None] = [None] * SLOTS
        replicas: list[Sequence[Node]] = [()] * SLOTS
        used: set[Node] = set()
        for shard in found:
            master = self._node(shard.master)
            copies = [self._node(endpoint, is_replica=True) for endpoint in shard.replicas]
            length = shard.last - shard.first + 1
            masters[shard.first : shard.last + 1] = [master] * length
            replicas[shard.first : shard.last + 1] = [copies] * length
            used |= {master, *copies}
        self._masters, self._replicas = masters, replicas
        self._keep(used)

    def _node(self, endpoint: Endpoint, *, is_replica: bool = False) -> Node:
        """Return the node at an endpoint, created if needed; ConfigError if the configuration does not permit it."""
        if self._closed:
            raise NodeDownError("the backend is closed")
        known = self._nodes.get((endpoint, is_replica))
        if known is None:
            _check_secure(endpoint, self.config)
            known = self._nodes[endpoint, is_replica] = Node(
                endpoint,
                self.config,
                self._tls,
                self._counters,
                database=self._database,
                is_replica=is_replica,
                on_trouble=self.note_trouble,
                limits=self.limits,
            )
        return known

    def _keep(self, used: Iterable[Node]) -> None:
        """Close the nodes that are no longer used."""
        keep = set(used)
        for place, node in list(self._nodes.items()):
            if node not in keep:
                del self._nodes[place]
                task = asyncio.create_task(node.close())
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)


def checked_tls(config: RedisConfig) -> TLS | None:
    """Refuse unencrypted connections to other machines, unless permitted; return the TLS settings, None without TLS.

    Sentinels are checked too, because they receive a password.
    """
    named = control.sentinel_endpoints(config) if config.sentinels else [control.endpoint_of(config)[0]]
    for endpoint in named:
        _check_secure(endpoint, config)
    if not config.tls:
        return None
    return client_tls(
        ca=config.tls_ca, cert=config.tls_cert, key=config.tls_key, check_hostname=config.tls_check_hostname
    )


def _check_secure(endpoint: Endpoint, config: RedisConfig) -> None:
    """Refuse to send prompts and passwords unencrypted over a network, unless permitted."""
    if not (config.tls or config.insecure or endpoint.is_local):
        raise ConfigError(
            f"{endpoint} is another machine and 'url' has no TLS. Use 'rediss://', or set 'insecure' to true on a "
            "network that you trust."
        )


def _replica(replicas: Sequence[Node], slot: int) -> Node | None:
    """Return a working replica, for a slot always the same one while none fails: its caches may hold the value."""
    up = [node for node in replicas if not node.down]
    return up[slot % len(up)] if up else None
