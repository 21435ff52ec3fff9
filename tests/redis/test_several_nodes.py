"""Several nodes, some of them failing or sending false data: other nodes are unaffected, and all costs are bounded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from kvstore.backends.redis import RedisBackend, topology
from kvstore.backends.redis.failures import refusal
from kvstore.backends.redis.limits import Limits
from kvstore.backends.redis.resp import ErrorReply
from kvstore.errors import BackendError
from kvstore.testing.waiting import eventually_async
from kvstore.types import BlockKey, Outcome
from tests.redis.clients import maker, name_of, opened, topology_of
from tests.redis.fake_server import FakeServer, fake_server, reset

SLOTS = 16384


@dataclass
class FakeNode:
    """A node that stores values, and whose answers a test may replace."""

    server: FakeServer = field(default_factory=FakeServer)
    values: dict[bytes, bytes] = field(default_factory=dict)
    instead: Callable[[list[bytes]], bytes | None] = lambda command: None

    async def script(self, command: list[bytes], writer: asyncio.StreamWriter) -> None:
        """Answer a command."""
        answer = self.instead(command)
        writer.write(self._answer(command) if answer is None else answer)

    def count(self, name: bytes) -> int:
        """Return the number of commands with a name."""
        return sum(command[0] == name for command in self.server.commands)

    def _answer(self, command: list[bytes]) -> bytes:
        name, key = command[0], command[-1] if len(command) < 3 else command[1]
        if name == b"GET":
            value = self.values.get(key)
            return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)
        if name == b"SET":
            if b"NX" in command[3:] and key in self.values:
                return b"$-1\r\n"
            self.values[key] = command[2]
            return b"+OK\r\n"
        if name == b"UNLINK":
            return b":%d\r\n" % (self.values.pop(key, None) is not None)
        if name == b"READONLY":
            return b"+OK\r\n"
        return b":%d\r\n" % (key in self.values)


def bulk(text: str) -> bytes:
    """Return a string in its wire format."""
    return b"$%d\r\n%b\r\n" % (len(text), text.encode())


@asynccontextmanager
async def nodes_of_a_cluster(masters: int, replicas: int = 0) -> AsyncIterator[list[FakeNode]]:
    """Run nodes that share the slots evenly; replicas belong to the first master, which then has all slots."""
    nodes = [FakeNode() for _ in range(masters + replicas)]

    def map_of_slots() -> bytes:
        places = [bulk("127.0.0.1") + b":%d\r\n" % node.server.port for node in nodes]
        run = SLOTS // masters
        shards = []
        for number in range(masters):
            copies = places[masters:] if not number else []
            first, last = number * run, SLOTS - 1 if number == masters - 1 else (number + 1) * run - 1
            listed = b"".join(b"*2\r\n" + place for place in [places[number], *copies])
            shards.append(b"*%d\r\n:%d\r\n:%d\r\n%b" % (3 + len(copies), first, last, listed))
        return b"*%d\r\n" % len(shards) + b"".join(shards)

    def script_of(node: FakeNode) -> Any:
        async def script(command: list[bytes], writer: asyncio.StreamWriter) -> None:
            if command[0] == b"CLUSTER":
                writer.write(map_of_slots())
            else:
                await node.script(command, writer)

        return script

    async with AsyncExitStack() as stack:
        for node in nodes:
            node.server = await stack.enter_async_context(fake_server(script_of(node)))
        yield nodes


class Small(RedisBackend):
    """A backend that stores records in short parts."""

    part_bytes = 1024


async def on(node: FakeNode, kind: type[RedisBackend] = RedisBackend, **more: Any) -> RedisBackend:
    """Return a backend that is connected to a cluster."""
    more = {"prefix": "kv:", "mode": "cluster", "ttl": 0, **more}
    return await opened(node.server, 2048 if kind is Small else 1024, kind=kind, **more)


def keys_by_node(backend: RedisBackend, count: int) -> tuple[list[BlockKey], list[BlockKey]]:
    """Return ``count`` keys of each of two nodes."""
    found: tuple[list[BlockKey], list[BlockKey]] = ([], [])
    number = 0
    while min(map(len, found)) < count:
        key = number.to_bytes(32, "big")
        found[topology.slot_of(name_of(backend, key)) >= SLOTS // 2].append(key)
        number += 1
    return found[0][:count], found[1][:count]


@pytest.mark.parametrize(
    "error", [b"-LOADING the dataset\r\n", b"-NOPERM no\r\n", b"-MASTERDOWN x\r\n", b"-ERR no\r\n"]
)
async def test_failing_node_costs_only_its_own_blocks(error: bytes) -> None:
    """Blocks of the other node are found, read and stored; the failing node's are unknown; later it is used again."""
    async with nodes_of_a_cluster(2) as (well, ill):
        backend = await on(well)
        on_well, on_ill = keys_by_node(backend, 20)
        records = maker(1024)
        assert set(await backend.put([records.write(key, key) for key in on_well + on_ill])) == {Outcome.OK}
        ill.instead = lambda command: error
        for keys in (on_ill, on_ill + on_well, on_ill[:1]):
            answers = dict(zip(keys, await backend.exists(keys), strict=True))
            assert all(answers[key] is None for key in on_ill if key in answers)
            assert all(answers[key] is True for key in on_well if key in answers)
        reads = [records.target(key).read for key in on_well]
        assert set(await backend.get_into(reads)) == {Outcome.OK}
        ill.instead = lambda command: None

        async def all_there() -> bool:
            return list(await backend.exists(on_ill)) == [True] * len(on_ill)

        await eventually_async(all_there, 60)


async def test_a_node_that_refuses_is_left_alone() -> None:
    """After a few errors the node gets one command now and then; its blocks are misses, and stores to it are SHED."""
    async with nodes_of_a_cluster(2) as (well, ill):
        backend = await on(well)
        _, on_ill = keys_by_node(backend, 20)
        ill.instead = lambda command: b"-LOADING the dataset\r\n"
        records = maker(1024)
        for key in on_ill[:5]:
            await backend.exists([key])
        before = ill.count(b"EXISTS") + ill.count(b"GET") + ill.count(b"SET")
        outcomes = [(await backend.get_into([records.target(key).read]))[0] for key in on_ill]
        outcomes += [(await backend.put([records.write(key, b"x")]))[0] for key in on_ill]
        assert ill.count(b"EXISTS") + ill.count(b"GET") + ill.count(b"SET") - before <= 4
        assert outcomes.count(Outcome.MISS) >= 16 and outcomes.count(Outcome.SHED) >= 16


async def test_a_trial_that_is_cancelled_does_not_shut_a_node_out() -> None:
    """The trial command may be cancelled before its answer; another trial follows soon."""
    async with nodes_of_a_cluster(2) as (well, ill):
        backend = await on(well, timeout=2, connect_timeout=2)
        _, on_ill = keys_by_node(backend, 8)
        records = maker(1024)
        assert set(await backend.put([records.write(key, key) for key in on_ill])) == {Outcome.OK}
        ill.instead = lambda command: b"-LOADING the dataset\r\n"
        for key in on_ill:
            with contextlib.suppress(BackendError):
                await backend.exists([key])
        ill.instead = lambda command: b""
        asked = ill.count(b"EXISTS")

        async def trial_is_cut() -> bool:
            question = asyncio.create_task(backend.exists(on_ill[:1]))
            await asyncio.wait([question], timeout=0.02)
            question.cancel()
            await asyncio.wait([question])
            return ill.count(b"EXISTS") > asked

        await eventually_async(trial_is_cut, 60)
        ill.instead = lambda command: None

        async def is_taken_back() -> bool:
            read = records.target(on_ill[0]).read
            return list(await backend.get_into([read])) == [Outcome.OK]

        await eventually_async(is_taken_back, 60)


async def test_failure_of_all_nodes_is_not_a_miss() -> None:
    """If all nodes fail, every key is unknown, which is not a miss."""
    async with nodes_of_a_cluster(2) as nodes:
        backend = await on(nodes[0])
        on_first, on_second = keys_by_node(backend, 4)
        for node in nodes:
            node.instead = lambda command: b"-LOADING the dataset\r\n"
        for _ in range(4):
            answers: list[bool | None] | str
            try:
                answers = list(await backend.exists(on_first + on_second))
            except BackendError:
                answers = "raised"
        assert answers == "raised"


async def test_redirects_that_lead_to_the_block_are_not_counted() -> None:
    """While slots move, one block after the other is redirected, and each is found."""
    async with nodes_of_a_cluster(2) as (old, new):
        backend = await on(old)
        keys = keys_by_node(backend, 300)[0]
        records = maker(1024)
        for start in range(0, 300, 50):
            await backend.put([records.write(key, key) for key in keys[start : start + 50]])
        new.values, old.values = old.values, {}
        port = new.server.port
        old.instead = lambda command: b"-ASK 1 127.0.0.1:%d\r\n" % port
        new.instead = lambda command: b"+OK\r\n" if command[0] == b"ASKING" else None
        for start in range(0, 300, 50):
            reads = [records.target(key).read for key in keys[start : start + 50]]
            assert set(await backend.get_into(reads)) == {Outcome.OK}


async def test_a_slot_that_has_moved_is_asked_for_in_its_new_place() -> None:
    """After MOVED, the new node gets the commands of that slot at once, even before the map is refreshed."""
    async with nodes_of_a_cluster(2) as (old, new):
        backend = await on(old)
        topology_of(backend)._refreshed_at = asyncio.get_running_loop().time() + 1000
        key = keys_by_node(backend, 1)[0][0]
        port = new.server.port
        old.instead = lambda command: b"-MOVED 1 127.0.0.1:%d\r\n" % port
        for _ in range(5):
            assert list(await backend.exists([key])) == [False]
        assert (old.count(b"EXISTS"), new.count(b"EXISTS")) == (1, 5)


async def test_asking_precedes_each_command_after_an_ask() -> None:
    """A node that imports a slot answers for it only after ASKING, on the same connection, for every command."""
    async with nodes_of_a_cluster(2) as (old, new):
        backend = await on(old, connections=1)
        keys = keys_by_node(backend, 12)[0]
        ports = old.server.port, new.server.port
        old.instead = lambda command: b"-ASK 1 127.0.0.1:%d\r\n" % ports[1]

        def importing(command: list[bytes]) -> bytes | None:
            if command[0] == b"ASKING":
                return b"+OK\r\n"
            is_asked = len(new.server.commands) > 1 and new.server.commands[-2][0] == b"ASKING"
            return None if is_asked else b"-MOVED 1 127.0.0.1:%d\r\n" % ports[0]

        new.instead = importing
        records = maker(1024)
        for some in (keys[:1], keys):
            assert set(await backend.exists(some)) == {False}
            assert set(await backend.put([records.write(key, b"payload") for key in some])) == {Outcome.OK}
            assert set(await backend.get_into([records.target(key).read for key in some])) == {Outcome.OK}
            assert set(await backend.delete(some)) == {True}
            # One attempt each: every command was sent with its ASKING, even when several share a send.
            for name in (b"EXISTS", b"SET", b"GET", b"UNLINK"):
                assert new.count(name) == len(some)
            new.server.commands.clear()


async def test_asking_precedes_a_command_that_follows_one_of_a_moved_slot() -> None:
    """Commands for one node after MOVED and after ASK may be ready together; only the latter need ASKING."""
    async with nodes_of_a_cluster(2) as (old, new):
        backend = await on(old, connections=1)
        keys = keys_by_node(backend, 8)[0]
        moved = {name_of(backend, key) for key in keys[::2]}
        ports = old.server.port, new.server.port
        old.instead = lambda command: (
            b"-%b 1 127.0.0.1:%d\r\n" % (b"MOVED" if command[-1] in moved else b"ASK", ports[1])
        )

        def importing(command: list[bytes]) -> bytes | None:
            if command[0] == b"ASKING":
                return b"+OK\r\n"
            is_asked = len(new.server.commands) > 1 and new.server.commands[-2][0] == b"ASKING"
            return None if is_asked or command[-1] in moved else b"-MOVED 1 127.0.0.1:%d\r\n" % ports[0]

        new.instead = importing
        assert list(await backend.exists(keys)) == [False] * 8
        assert (new.count(b"EXISTS"), new.count(b"ASKING")) == (8, 4)


async def test_a_closed_backend_follows_no_redirect() -> None:
    """A redirect read during the close creates no node, and so no connection that would stay open."""
    async with nodes_of_a_cluster(2) as (old, new):
        backend = await on(old)
        nodes = topology_of(backend)
        asked = nodes.nodes[0]
        await backend.close()
        moved = refusal(ErrorReply("MOVED", f"1 127.0.0.1:{new.server.port}"))
        with pytest.raises(BackendError, match="closed"):
            nodes.redirected(b"key", moved, asked)
        assert not nodes.nodes


async def test_the_first_part_is_written_last() -> None:
    """The part that makes a block visible is sent after all others, and its first writer wins."""
    async with nodes_of_a_cluster(1) as (node,):
        backend = await on(node, Small)
        records = maker(2048)
        assert list(await backend.put([records.write(b"k" * 32, bytes(2048))])) == [Outcome.OK]
        sets = [command for command in node.server.commands if command[0] == b"SET"]
        assert sorted(command[1][-2:] for command in sets[:-1]) == [b":1", b":2"]
        assert sets[-1][1].endswith(b":0")
        assert [b"NX" in command[3:] for command in sets] == [False, False, True]


async def test_parts_of_a_block_that_could_not_be_stored_are_removed() -> None:
    """A refused part makes the store fail, and the parts already stored are removed from the server."""
    async with nodes_of_a_cluster(1) as (node,):
        backend = await on(node, Small)
        records = maker(2048)
        refused: list[bytes] = []

        def full_from_the_second_part(command: list[bytes]) -> bytes | None:
            if command[0] == b"SET" and command[1].endswith(b":2"):
                refused.append(command[1])
                return b"-OOM command not allowed\r\n"
            return None

        node.instead = full_from_the_second_part
        assert list(await backend.put([records.write(b"k" * 32, bytes(2048))])) == [Outcome.NO_SPACE]
        assert refused
        unlinked = {command[1][-2:] for command in node.server.commands if command[0] == b"UNLINK"}
        assert unlinked == {b":1", b":2"}


async def test_a_block_stays_until_all_its_parts_are_removed() -> None:
    """If a part can't be removed, the removal fails and the block is found, so that the next removal completes it."""
    async with nodes_of_a_cluster(1) as (node,):
        backend = await on(node, Small)
        key = b"k" * 32
        await backend.put([maker(2048).write(key, bytes(2048))])
        node.instead = lambda command: b"-ERR no\r\n" if command[0] == b"UNLINK" and command[1][-2:] == b":2" else None
        with pytest.raises(BackendError, match="ERR"):
            await backend.delete([key])
        assert {name[-2:] for name in node.values} == {b":0", b":2"}
        assert list(await backend.exists([key])) == [True]
        # A load finds the rest, and can't remove it either.
        assert list(await backend.get_into([maker(2048).target(key).read])) == [Outcome.MISS]
        assert {name[-2:] for name in node.values} == {b":0", b":2"}
        node.instead = lambda command: None
        assert list(await backend.delete([key])) == [True]
        assert not node.values


async def test_a_block_with_a_part_on_a_skipped_node_stays() -> None:
    """It counts as not removed and is found, and a later removal completes it."""
    async with nodes_of_a_cluster(2) as (well, ill):
        backend = await on(well, Small)
        name_of = backend._ready()._names

        def is_on_ill(name: bytes) -> bool:
            return topology.slot_of(name) >= SLOTS // 2

        keys = [number.to_bytes(32, "big") for number in range(1000)]
        torn = next(key for key in keys if [*map(is_on_ill, name_of(key))] == [False, False, True])
        await backend.put([maker(2048).write(torn, bytes(2048))])
        ill.instead = lambda command: b"-LOADING the dataset\r\n"
        on_ill = keys_by_node(backend, 8)[1]
        for key in on_ill:
            await backend.exists([key])
        assert list(await backend.delete([torn])) == [False]
        assert list(await backend.exists([torn])) == [True]
        ill.instead = lambda command: None

        async def is_removed() -> bool:
            with contextlib.suppress(BackendError):
                return list(await backend.delete([torn])) == [True]
            return False

        await eventually_async(is_removed, 60)
        assert not well.values and not ill.values


async def test_an_unexpected_error_does_not_end_the_refreshes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and the next trouble makes another refresh."""
    async with nodes_of_a_cluster(1) as (node,):
        backend = await on(node)
        with monkeypatch.context() as context:
            context.setattr(topology.control, "shards", None)
            topology_of(backend).note_trouble()
            await eventually_async(lambda: "unexpected error" in caplog.text, 60, what="the log line")
        topology_of(backend).note_trouble()

        def is_refreshed() -> bool:
            return backend.stats().counters["topology_refreshes"] == 2 and topology_of(backend)._refreshing is None

        await eventually_async(is_refreshed, 60)
        assert caplog.text.count("could not be queried") == 1


async def test_redirects_are_a_tenth_of_the_load() -> None:
    """Nodes that redirect to each other receive at most a tenth more commands than requested, after an allowance."""
    async with nodes_of_a_cluster(2) as nodes:
        ports = [node.server.port for node in nodes]
        nodes[0].instead = lambda command: b"-MOVED 1 127.0.0.1:%d\r\n" % ports[1]
        nodes[1].instead = lambda command: b"-MOVED 1 127.0.0.1:%d\r\n" % ports[0]
        backend = await on(nodes[0])
        asked = 400
        for start in range(0, asked, 20):
            await backend.put([maker(1024).write((start + i).to_bytes(32, "big"), b"x") for i in range(20)])
        assert asked <= sum(node.count(b"SET") for node in nodes) <= 1.1 * asked + 70


async def test_tries_after_lost_connections_are_a_tenth_of_the_load() -> None:
    """Retries are bounded too if a server answers once before each loss, and so never counts as down."""
    answered = set()

    async def script(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        if writer in answered:
            reset(writer)
        else:
            answered.add(writer)
            writer.write(b":0\r\n")

    async with fake_server(script) as server:
        backend = await opened(server, 1024, connections=1, ttl=0)
        asked = 400
        for number in range(asked):
            with contextlib.suppress(BackendError):
                await backend.exists([number.to_bytes(32, "big")])
        assert asked <= len(server.commands) <= 1.1 * asked + 25
        await backend.close()


async def test_a_map_of_too_many_nodes_is_refused() -> None:
    """A map with more nodes than a cluster can have is rejected: no node is created or contacted."""
    limits = Limits(nodes_max=3)
    async with nodes_of_a_cluster(4) as nodes:
        with pytest.raises(BackendError, match="4 nodes"):
            await on(nodes[0], limits=limits)
        assert all(node.server.connections == 0 for node in nodes[1:])
    async with nodes_of_a_cluster(3) as nodes:
        backend = await on(nodes[0], limits=limits)
        assert backend.stats().gauges["nodes"] == 3


async def test_redirects_make_no_more_nodes_than_a_cluster_has() -> None:
    """Redirects to ever new addresses are not followed without end."""
    ports = iter(range(2, 2000))
    async with nodes_of_a_cluster(1) as (node,):
        node.instead = lambda command: b"-ASK 1 127.0.0.1:%d\r\n" % next(ports)
        backend = await on(node, limits=Limits(nodes_max=5))
        for number in range(20):
            await backend.get_into([maker(1024).target(number.to_bytes(32, "big")).read])
            assert backend.stats().gauges["nodes"] <= 5


async def test_a_replica_that_refused_is_used_again() -> None:
    """Answers after errors count for replicas, too: they are then asked for every block again."""
    async with nodes_of_a_cluster(1, replicas=1) as (master, replica):
        backend = await on(master, read_from="replica", timeout=1, connect_timeout=1)
        records = maker(1024)
        keys = [number.to_bytes(32, "big") for number in range(10)]
        assert set(await backend.put([records.write(key, key) for key in keys])) == {Outcome.OK}
        replica.values = master.values
        replica.instead = lambda command: b"-LOADING the dataset\r\n" if command[0] == b"GET" else None
        for key in keys[:5]:
            await backend.get_into([records.target(key).read])
        replica.instead = lambda command: None

        async def all_come_from_it() -> bool:
            before = replica.count(b"GET")
            for key in keys:
                await backend.get_into([records.target(key).read])
            return replica.count(b"GET") - before == len(keys)

        await eventually_async(all_come_from_it, 15)


@pytest.mark.parametrize("error", [b"-LOADING the dataset\r\n", b"-MASTERDOWN x\r\n", b"-NOPERM x\r\n", b"-ERR x\r\n"])
async def test_a_replica_that_refuses_costs_no_block(error: bytes) -> None:
    """The master answers instead of it, however long it refuses: only its own few errors are retries."""
    async with nodes_of_a_cluster(1, replicas=1) as (master, replica):
        backend = await on(master, read_from="replica", timeout=1, connect_timeout=1)
        records = maker(1024)
        keys = [number.to_bytes(32, "big") for number in range(300)]
        assert set(await backend.put([records.write(key, key) for key in keys])) == {Outcome.OK}
        replica.instead = lambda command: error if command[0] in (b"GET", b"EXISTS") else None
        for key in keys:
            assert list(await backend.exists([key])) == [True]
            assert list(await backend.get_into([records.target(key).read])) == [Outcome.OK]
        assert backend.stats().counters["retries"] < 20


async def test_a_store_is_tried_again_at_the_master() -> None:
    """A replica gets no store, also if reads go to it and the master has refused the first attempt."""
    async with nodes_of_a_cluster(1, replicas=1) as (master, replica):
        backend = await on(master, read_from="replica")
        refusals = [b"-TRYAGAIN several keys\r\n"]
        master.instead = lambda command: refusals.pop() if refusals and command[0] == b"SET" else None
        assert list(await backend.put([maker(1024).write(b"k" * 32, b"x")])) == [Outcome.OK]
        assert (master.count(b"SET"), replica.count(b"SET")) == (2, 0)


async def test_a_replica_that_redirects_is_looked_up_again() -> None:
    """It may belong to another master now, so the map of nodes is refreshed."""
    async with nodes_of_a_cluster(1, replicas=1) as (master, replica):
        backend = await on(master, read_from="replica", timeout=1, connect_timeout=1)
        records = maker(1024)
        key = bytes(32)
        await backend.put([records.write(key, key)])
        replica.instead = lambda command: b"-MOVED 5 127.0.0.1:1\r\n" if command[0] == b"GET" else None
        assert list(await backend.get_into([records.target(key).read])) == [Outcome.OK]

        async def is_refreshed() -> bool:
            return backend.stats().counters["topology_refreshes"] > 0

        await eventually_async(is_refreshed, 15)


@pytest.mark.parametrize("is_equal", [True, False])
async def test_engines_that_store_a_block_at_the_same_time(is_equal: bool) -> None:
    """Parts of two engines make a block if their payloads are equal; otherwise it is a miss, and its parts go."""
    async with nodes_of_a_cluster(1) as (node,):
        backend = await on(node, Small)
        records = maker(2048)
        key, first = b"k" * 32, bytes(range(256)) * 8
        await backend.put([records.write(key, first)])
        of_other = dict(node.values)
        node.values.clear()

        def other_stores(command: list[bytes]) -> bytes | None:
            """Let the other engine store the block once this one has not found it."""
            if command[0] != b"EXISTS":
                return None
            node.values.update(of_other)
            return b":0\r\n"

        node.instead = other_stores
        second = first if is_equal else first[::-1]
        assert list(await backend.put([records.write(key, second)])) == [Outcome.EXISTS]
        target = records.target(key)
        assert list(await backend.get_into([target.read])) == [Outcome.OK if is_equal else Outcome.MISS]
        assert records.content(target) == first if is_equal else not node.values


async def test_a_replica_that_lags_takes_nothing_away() -> None:
    """Inconsistent parts on a replica are read from the master, and only parts torn there are removed."""
    async with nodes_of_a_cluster(1, replicas=1) as (master, replica):
        writer = await on(master, Small)
        records = maker(2048)
        key = b"k" * 32
        payload = bytes(range(256)) * 8
        await writer.put([records.write(key, payload[::-1])])
        old = dict(master.values)
        first = next(name for name in master.values if name.endswith(b":0"))
        del master.values[first]
        assert list(await writer.put([records.write(key, payload)])) == [Outcome.OK]
        # The replica has the new first part but not yet the others.
        replica.values = {**old, first: master.values[first]}
        reader = await on(master, Small, read_from="replica")
        target = records.target(key)
        assert list(await reader.get_into([target.read])) == [Outcome.OK]
        assert records.content(target) == payload
        assert master.values.keys() == old.keys() and replica.count(b"GET") >= 2
        # Now the value on the master is torn as well.
        master.values[next(name for name in old if name.endswith(b":1"))] = old[
            next(name for name in old if name.endswith(b":1"))
        ]
        assert list(await reader.get_into([records.target(key).read])) == [Outcome.MISS]
        assert not master.values


async def test_unsolicited_flood_ends_the_connection() -> None:
    """Endless pushes on an idle connection have no effect but to close it."""

    async def script(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        writer.write(b":0\r\n")
        while True:
            writer.write(b">1\r\n+x\r\n" * 1000)
            await writer.drain()

    async with fake_server(script) as server:
        backend = await opened(server, 2048, connections=1)
        with contextlib.suppress(BackendError):
            await backend.exists([b"k" * 32])
        await eventually_async(lambda: server.open_connections == 0, what="the connection closed")
        await backend.close()


@pytest.mark.parametrize("sentinel", [False, True])
async def test_an_endless_value_for_the_control_plane_costs_no_memory(sentinel: bool) -> None:
    """An endless string in place of a cluster map or a Sentinel's answer is not kept in memory."""
    sent = 0

    async def script(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"*1\r\n$8000000000\r\n")
        while True:
            writer.write(b"x" * (1 << 20))
            sent += 1
            await writer.drain()

    async with fake_server(script) as server:
        more: dict[str, Any] = {"mode": "cluster"}
        if sentinel:
            more = {"sentinels": (f"127.0.0.1:{server.port}",), "sentinel_master": "m"}
        before = psutil.Process().memory_info().rss
        with pytest.raises(BackendError):
            await opened(server, **more)
        assert sent < 64
        assert psutil.Process().memory_info().rss - before < 32 << 20
