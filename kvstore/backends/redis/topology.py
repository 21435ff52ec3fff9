"""Which node to ask for a key: one server, the master that Sentinels name, or the nodes of a cluster."""

from __future__ import annotations

import asyncio
import binascii
import logging
import random
import ssl
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import ClassVar, Final

from kvstore.backends.redis import control
from kvstore.backends.redis.config import RedisConfig
from kvstore.backends.redis.control import SLOTS, Shard
from kvstore.backends.redis.failures import NodeDownError, RedisError, ServerRefusedError
from kvstore.backends.redis.node import Node, check_secure
from kvstore.backends.stream import Endpoint, client_context
from kvstore.errors import ConfigError

__all__ = ["Topology", "connected", "slot_of"]

logger = logging.getLogger("kvstore.backends.redis")

_REFRESH_PAUSE_S: Final = 0.5
"""Shortest time between two looks at the map of nodes; a fail-over takes seconds."""

_NODES_MAX: Final = 1024
"""Most nodes of a cluster; it does not work with more."""

_WARM_NODES: Final = 32
"""Nodes to which a connection is made at the start; to others with the first command for them."""


def slot_of(key: bytes) -> int:
    """Return the slot of a key without braces: CRC-16/XMODEM modulo 16384, as the cluster specification has it."""
    return binascii.crc_hqx(key, 0) % SLOTS


async def connected(config: RedisConfig, counters: Counter[str]) -> Topology:
    """Return the nodes of a server, connected; one that is part of a cluster says so when we log in.

    Raises:
        ConfigError: The configuration can't be used.
        RedisError: The server can't be reached, or refuses.
    """
    context = None
    if config.tls:
        context = client_context(
            ca=config.tls_ca, cert=config.tls_cert, key=config.tls_key, check_hostname=config.tls_check_hostname
        )
    topology: Topology = (Cluster if config.mode == "cluster" else OneMaster)(config, context, counters)
    try:
        await topology.open()
        if config.mode == "auto" and any(node.info.get(b"mode") == "cluster" for node in topology.nodes):
            await topology.close()
            topology = Cluster(config, context, counters)
            await topology.open()
    except BaseException:
        await topology.close()
        raise
    return topology


class Topology(ABC):
    """The nodes, and how changes of them are found out.

    Args:
        config: Of the backend.
        context: TLS settings, if any.
        counters: Shared by all nodes.
    """

    has_many_nodes: ClassVar[bool] = False
    """Whether one of the nodes may be down while the others are worth asking."""

    def __init__(self, config: RedisConfig, context: ssl.SSLContext | None, counters: Counter[str]) -> None:
        self.config = config
        self._context = context
        self._counters = counters
        self._nodes: dict[tuple[Endpoint, bool], Node] = {}
        self._configured, self._database = control.endpoint_of(config)
        self._refreshing: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._closed = False
        self._refreshed_at = float("-inf")

    @abstractmethod
    async def open(self) -> None:
        """Find the nodes and connect.

        Raises:
            RedisError: Nothing can be reached.
        """

    @abstractmethod
    def node_for(self, key: bytes, *, reading: bool) -> Node | None:
        """Return the node for a key, if one serves it at present; a replica only if reading from one is wanted."""

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        # First: what fails now is no reason to look for others, and a redirect leads nowhere any more.
        self._closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait([self._refreshing])
        self._keep(())
        # Not cancelled, as each has connections to close; that waits for nobody.
        if self._leaving:
            await asyncio.wait(self._leaving)

    @property
    def nodes(self) -> Sequence[Node]:
        """All nodes known now."""
        return list(self._nodes.values())

    def redirected(self, key: bytes, moved: ServerRefusedError, asked: Node) -> Node | None:
        """Return the node that a redirect names; None if it leads nowhere."""
        return None

    def note_trouble(self) -> None:
        """Ask soon, in the background, for the map of nodes; failures leave things as they are."""
        if self._refreshing is None and not self._closed:
            pause_s = self._refreshed_at + _REFRESH_PAUSE_S - asyncio.get_running_loop().time()
            self._refreshing = asyncio.create_task(self._refresh_after(max(0.0, pause_s) * random.uniform(1.0, 1.2)))

    async def _refresh_after(self, pause_s: float) -> None:
        try:
            await asyncio.sleep(pause_s)
            self._counters["topology_refreshes"] += 1
            await self._look()
        except RedisError as error:
            logger.debug("The map of nodes could not be asked for: %s", error)
        except ConfigError as error:
            logger.warning("A server names a node that may not be used: %s", error)
        finally:
            self._refreshed_at = asyncio.get_running_loop().time()
            self._refreshing = None

    @abstractmethod
    async def _look(self) -> None:
        """Ask for the map of nodes, and act on it."""

    def _node(self, endpoint: Endpoint, *, is_replica: bool = False) -> Node:
        """Return the node at an endpoint, made if need be.

        Raises:
            ConfigError: It is another machine, and TLS is off.
            NodeDownError: The backend was closed meanwhile.
        """
        if self._closed:
            raise NodeDownError("the backend is closed")
        known = self._nodes.get((endpoint, is_replica))
        if known is None:
            check_secure(endpoint, self.config)
            known = self._nodes[endpoint, is_replica] = Node(
                endpoint,
                self.config,
                self._context,
                self._counters,
                database=self._database,
                is_replica=is_replica,
                on_trouble=self.note_trouble,
            )
        return known

    def _keep(self, used: Iterable[Node]) -> None:
        """Close the nodes that serve nothing any more."""
        keep = set(used)
        for place, node in list(self._nodes.items()):
            if node not in keep:
                del self._nodes[place]
                task = asyncio.create_task(node.close())
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)


class OneMaster(Topology):
    """One server, or the master that Sentinels name, and its replicas where reading from them is wanted."""

    _master: Node | None = None
    _replicas: Sequence[Node] = ()

    async def open(self) -> None:
        """See :meth:`Topology.open`."""
        if self.config.sentinels:
            # The Sentinels are given a password, too.
            for endpoint in control.sentinel_endpoints(self.config):
                check_secure(endpoint, self.config)
            await self._look()
        else:
            self._master = self._node(self._configured)
        if self._master is not None:
            await self._master.connect()

    def node_for(self, key: bytes, *, reading: bool) -> Node | None:
        """See :meth:`Topology.node_for`."""
        return (_replica(self._replicas, slot_of(key)) if reading else None) or self._master

    def note_trouble(self) -> None:
        """See :meth:`Topology.note_trouble`."""
        if self.config.sentinels:
            super().note_trouble()

    async def _look(self) -> None:
        master, replicas = await control.sentinel_nodes(self.config)
        new = self._node(master)
        if new is not self._master and self._master is not None:
            logger.warning("Sentinel names a new master: %s", master)
        self._master = new
        self._replicas = [self._node(endpoint, is_replica=True) for endpoint in replicas if endpoint != master]
        self._keep([new, *self._replicas])


class Cluster(Topology):
    """The nodes of a cluster, by slot."""

    has_many_nodes = True

    def __init__(self, config: RedisConfig, context: ssl.SSLContext | None, counters: Counter[str]) -> None:
        super().__init__(config, context, counters)
        self._masters: list[Node | None] = [None] * SLOTS
        self._replicas: list[Sequence[Node]] = [()] * SLOTS

    async def open(self) -> None:
        """See :meth:`Topology.open`."""
        check_secure(self._configured, self.config)
        await self._look()
        masters = [node for node in self.nodes if not node.is_replica]
        up = random.sample(masters, min(_WARM_NODES, len(masters)))
        results = await asyncio.gather(*(node.connect() for node in up), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        # One node that is down is no reason to do without the others.
        if len(failures) == len(results):
            raise failures[0] if failures else NodeDownError("the cluster has no nodes that serve slots")

    def node_for(self, key: bytes, *, reading: bool) -> Node | None:
        """See :meth:`Topology.node_for`."""
        slot = slot_of(key)
        found = (_replica(self._replicas[slot], slot) if reading else None) or self._masters[slot]
        if found is None:
            # An operator may give the slot to a node at any time, and no redirect would say so.
            self.note_trouble()
        return found

    def redirected(self, key: bytes, moved: ServerRefusedError, asked: Node) -> Node | None:
        """See :meth:`Topology.redirected`."""
        host, port = moved.moved_to or ("", 0)
        endpoint = Endpoint(host or asked.endpoint.host, port)
        if (endpoint, False) not in self._nodes and len(self._nodes) >= _NODES_MAX:
            return None
        node = self._node(endpoint)
        if moved.code == "MOVED":
            self._masters[slot_of(key)] = node
            self.note_trouble()
        return node

    async def _look(self) -> None:
        """Ask the nodes, one after the other, until one answers."""
        known = [node.endpoint for node in self.nodes if not node.down]
        random.shuffle(known)
        failure: RedisError = NodeDownError("no node of the cluster answers")
        for endpoint in dict.fromkeys([*known[:8], self._configured]):
            try:
                self._adopt(await control.shards(endpoint, self.config))
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
        if len(named) > _NODES_MAX:
            raise NodeDownError(f"a map of {len(named)} nodes came, expected at most {_NODES_MAX}. Is this a cluster?")
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


def _replica(replicas: Sequence[Node], slot: int) -> Node | None:
    """Return the replica to ask, always the same one for a slot: it may have the value in memory still."""
    up = [node for node in replicas if not node.down]
    return up[slot % len(up)] if up else None
