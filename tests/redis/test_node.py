"""One node among others: its load limits, its failure and recovery, and its cleanup."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.backends.base import RecordGeometry
from kvstore.backends.redis import RedisBackend
from kvstore.backends.redis.failures import NodeDownError, SkippedError
from kvstore.backends.redis.limits import Limits
from kvstore.backends.redis.topology import slot_of
from kvstore.errors import BackendError
from kvstore.testing.records import RecordMaker
from kvstore.testing.seeds import fresh_seed
from kvstore.testing.waiting import eventually_async
from kvstore.types import BlockKey, Outcome
from tests.redis.clients import (
    NAMESPACE,
    backend_on,
    connections_of,
    maker,
    name_of,
    opened,
    topology_of,
    until_renewed,
)
from tests.redis.fake_server import HELLO, FakeServer, answering, fake_server, reset
from tests.redis.mix import PAYLOAD_BYTES, Mix
from tests.redis.servers import Server, cluster_nodes, join_cluster, plain, running

SIZE = 65536
GEOMETRY = RecordGeometry(256, SIZE)


@asynccontextmanager
async def silent(**more: Any) -> AsyncIterator[tuple[FakeServer, asyncio.Event, RedisBackend]]:
    """Run a server that answers nothing until an event is set, and then answers every command with a miss."""
    go_on = asyncio.Event()

    async def script(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        # Keep reading while answers are held back, to record everything that was sent.
        async def answer() -> None:
            await go_on.wait()
            writer.write(b"$-1\r\n")

        tasks.append(asyncio.ensure_future(answer()))

    tasks: list[asyncio.Future[None]] = []
    async with fake_server(script) as server:
        backend = await opened(server, SIZE, **more)
        try:
            yield server, go_on, backend
        finally:
            await backend.close()
            for task in tasks:
                task.cancel()


@pytest.mark.parametrize(
    ("connections", "depth", "in_flight_bytes", "under_way"),
    [
        (2, 3, 8 << 20, 6),
        (3, 100, 2 * (SIZE + 256), 6),
        # A value longer than the limit is sent alone.
        (2, 100, 1, 2),
    ],
)
async def test_commands_and_bytes_in_flight_are_bounded(
    connections: int, depth: int, in_flight_bytes: int, under_way: int
) -> None:
    """Commands and bytes in flight stay within the limits; the rest waits and is answered too."""
    limits = Limits(pipeline_depth=depth, in_flight_bytes=in_flight_bytes)
    async with silent(connections=connections, limits=limits) as (server, go_on, backend):
        reads = [maker(SIZE).target(bytes([i]) * 32).read for i in range(40)]
        call = asyncio.ensure_future(backend.get_into(reads))
        await eventually_async(lambda: len(server.commands) >= under_way, what="all connections busy")
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert len(server.commands) == under_way
        assert backend.stats().gauges["requests_waiting"] == 40 - under_way
        go_on.set()
        assert list(await call) == [Outcome.MISS] * 40
        assert backend.stats().gauges["requests_waiting"] == 0


async def test_too_many_requests_fail_at_once() -> None:
    """When too many requests wait, further ones fail at once; the waiting ones are unaffected."""
    async with silent(connections=1, limits=Limits(pipeline_depth=1, queue_max=10)) as (server, go_on, backend):
        read_ = [maker(SIZE).target(bytes([i]) * 32).read for i in range(10)]
        waiting = asyncio.ensure_future(backend.get_into(read_))
        await eventually_async(lambda: len(server.commands) == 1, what="the first one under way")
        more = [maker(SIZE).target(b"m" * 32).read for _ in range(5)]
        assert list(await backend.get_into(more)) == [Outcome.IO_ERROR] * 5
        assert "too many requests wait" in backend.last_error
        go_on.set()
        assert list(await waiting) == [Outcome.MISS] * 10


async def test_after_a_late_answer_no_idle_connection_is_trusted() -> None:
    """A hung server costs one deadline, however many connections there are."""
    async with silent(connections=3, timeout=0.5) as (_, go_on, backend):
        go_on.set()

        async def all_open() -> bool:
            await backend.get_into([maker(SIZE).target(bytes([i]) * 32).read for i in range(9)])
            return backend.stats().gauges["connections"] == 3

        await eventually_async(all_open, 60)
        go_on.clear()
        assert list(await backend.get_into([maker(SIZE).target(b"k" * 32).read])) == [Outcome.TIMEOUT]
        assert backend.stats().gauges["connections"] == 0
        assert list(await backend.get_into([maker(SIZE).target(b"k" * 32).read])) == [Outcome.IO_ERROR]


async def test_operator_query_ends_at_its_deadline_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query of the operator's tools has a deadline of its own, even in the queue, and is not sent after it."""
    async with silent(timeout=0.2, connect_timeout=0.2) as (server, go_on, backend):
        (node,) = topology_of(backend).nodes
        monkeypatch.setattr(node, "_roomiest", lambda size_bytes: None)
        async with asyncio.timeout(60):
            with pytest.raises(BackendError, match="no answer within"):
                await node.ask(b"SCAN", b"0")
        monkeypatch.undo()
        go_on.set()
        assert list(await backend.get_into([maker(SIZE).target(b"k" * 32).read])) == [Outcome.MISS]
        assert [command[0] for command in server.commands] == [b"GET"]


async def test_a_request_is_not_moved_for_ever() -> None:
    """A request whose connection is repeatedly closed by others' cancellations ends as a failure."""
    async with silent(connections=1) as (server, _, backend):
        patient = asyncio.ensure_future(backend.get_into([maker(SIZE).target(b"p" * 32).read]))
        await eventually_async(lambda: server.commands, what="the request sent")
        for _ in range(40):
            if patient.done():
                break
            seen = len(server.commands)
            other = asyncio.ensure_future(backend.get_into([maker(SIZE).target(b"o" * 32).read]))
            await eventually_async(
                lambda seen=seen: any(b"6f6f" in command[-1] for command in server.commands[seen:]), what="the other"
            )
            other.cancel()
            await asyncio.wait([other])
        assert list(await asyncio.wait_for(patient, 60)) == [Outcome.IO_ERROR]


async def test_an_idle_connection_that_the_server_closes_is_no_loss() -> None:
    """Servers close connections that are unused for long: this counts as no failure, and the next call connects."""
    writers: list[asyncio.StreamWriter] = []
    async with fake_server(answering(b":0\r\n")) as server:
        server.on_hello = writers.append
        backend = await opened(server, SIZE, connections=1)
        for _ in range(3):
            assert list(await backend.exists([b"k" * 32])) == [False]
            writers[-1].close()
            await eventually_async(lambda: not backend.stats().gauges["connections"], what="the end of the connection")
        assert not backend.stats().counters.get("connections_lost", 0)


@pytest.mark.parametrize("hello", [HELLO, b"-ERR max number of clients reached\r\n"])
async def test_a_server_that_drops_us_is_left_alone(hello: bytes) -> None:
    """A server that drops connections is retried at growing intervals; meanwhile calls fail at once."""

    async def drop(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with fake_server(drop) as server:
        backend = await opened(server, SIZE)
        server.hello = hello
        started, before = time.monotonic(), server.connections
        calls = 0
        while time.monotonic() < started + 1.5 or calls <= 20:
            calls += 1
            (outcome,) = await backend.get_into([maker(SIZE).target(b"k" * 32).read])
            assert outcome is Outcome.IO_ERROR
            await asyncio.sleep(0.002)
        # Pauses of 50 ms and more, doubled up to 3 s, of which at least half passes: six within 1.6 s, eight
        # within 4.7 s, then one per 1.5 s; plus one call's own attempts.
        assert server.connections - before <= 9 + (time.monotonic() - started) / 1.5


Slots = list[tuple[int, int]]


def cluster_script(slots: Callable[[], Slots], others: Callable[[list[bytes]], bytes]) -> Any:
    """Return a script of a server that reports the slots of a cluster."""

    async def script(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        if command[0] != b"CLUSTER":
            writer.write(others(command))
            return
        port = writer.get_extra_info("sockname")[1]
        entries = [b"*3\r\n:%d\r\n:%d\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % (*run, port) for run in slots()]
        writer.write(b"*%d\r\n" % len(entries) + b"".join(entries))

    return script


async def test_slot_without_a_node_is_found_when_served_again() -> None:
    """The state of a slot without a node is unknown; when a node takes the slot, we find it without a notification."""
    slots: Slots = [(0, 99)]
    async with fake_server(cluster_script(lambda: slots, lambda command: b":1\r\n")) as server:
        backend = await opened(server, SIZE, mode="cluster")
        key = next(key for key in (bytes([n]) * 32 for n in range(9)) if slot_of(name_of(backend, key)) > 99)
        assert list(await backend.exists([key])) == [None]
        slots = [(0, 16383)]

        async def found() -> bool:
            return list(await backend.exists([key])) == [True]

        await eventually_async(found, 60, "the map of the cluster was never asked for again")


@pytest.mark.parametrize("host", [b"\x00nowhere", b".nowhere", b"nowhere.invalid"])
async def test_a_redirect_to_an_impossible_name(host: bytes) -> None:
    """A redirect to an unusable host name fails in time."""
    script = cluster_script(lambda: [(0, 16383)], lambda command: b"-ASK 1 %b:7000\r\n" % host)
    async with fake_server(script) as server:
        backend = await opened(server, SIZE, mode="cluster", insecure=True, connect_timeout=1)
        async with asyncio.timeout(60):
            (outcome,) = await backend.get_into([maker(SIZE).target(b"k" * 32).read])
        assert outcome in (Outcome.IO_ERROR, Outcome.MISS)
        assert "None" not in backend.last_error


async def test_a_redirect_to_another_machine_without_tls(caplog: pytest.LogCaptureFixture) -> None:
    """A cluster that names other machines receives no data there without TLS; the reason is logged on first use."""
    script = cluster_script(lambda: [(0, 16383)], lambda command: b"-MOVED 1 192.0.2.7:7000\r\n")
    async with fake_server(script) as server:
        backend = await opened(server, SIZE, mode="cluster")
        (outcome,) = await backend.get_into([maker(SIZE).target(b"k" * 32).read])
        assert outcome is Outcome.IO_ERROR
        assert "192.0.2.7" in backend.last_error and "TLS" in backend.last_error


@pytest.mark.parametrize("kind", ["INFO", "CLUSTER"])
async def test_endless_answers_to_the_control_plane(kind: str) -> None:
    """A server that never ends its control answers costs the connect timeout and does not delay the start further."""

    async def endless(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        writer.write(b"$1000000000000\r\n" if command[0] == b"INFO" else b"*100000000\r\n")
        while True:
            writer.write(b":1\r\n")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with fake_server(endless, info=None) as server:
        async with asyncio.timeout(60):
            if kind == "INFO":
                backend = await opened(server, SIZE, connect_timeout=1)
                await backend.close()
            else:
                with pytest.raises(BackendError, match="CLUSTER SLOTS failed"):
                    await opened(server, SIZE, connect_timeout=1, mode="cluster")


@pytest.mark.parametrize("sentinel", [False, True])
async def test_the_control_plane_never_quotes_the_server(sentinel: bool) -> None:
    """Passwords echoed by a server or Sentinel appear neither in errors of the control plane nor in their causes."""

    async def echo(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        shown = b" ".join(command)
        writer.write(b"-ERR unknown command, with args beginning with: %b\r\n" % shown)

    # Without HELLO, the password is sent by AUTH.
    async with fake_server(echo, hello=b"-ERR unknown command\r\n") as server:
        more: dict[str, Any] = {"mode": "cluster", "password": "canary-secret"}
        if sentinel:
            address = f"127.0.0.1:{server.port}"
            more = {"sentinels": (address,), "sentinel_master": "m", "sentinel_password": "canary-secret"}
        with pytest.raises(BackendError) as caught:
            await opened(server, SIZE, **more)
        assert any(b"canary-secret" in command for command in server.commands), "the password was never sent"
    error: BaseException | None = caught.value
    while error is not None:
        assert "canary" not in str(error) + repr(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@pytest.mark.parametrize("hello", [b"-NOPERM no\r\n", b"-NOPROTO no\r\n", b"-ERR unknown command\r\n"])
async def test_a_server_that_refuses_hello_gets_the_password_by_auth(hello: bytes) -> None:
    """HELLO may be unknown, or forbidden to the user, and the login still succeeds."""

    async def well(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        writer.write(b"+OK\r\n")

    async with fake_server(well, hello=hello) as server:
        backend = await opened(server, SIZE, password="canary-secret")
        assert [b"AUTH", b"canary-secret"] in server.commands
        await backend.close()


async def test_nothing_goes_on_after_close() -> None:
    """A backend closed during calls leaves no task and no connection behind."""

    async def slow(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        if command[0] == b"CLUSTER":
            await answers(command, writer)
        # Other commands get no answer: calls are in flight when the backend is closed.

    answers = cluster_script(lambda: [(0, 16383)], lambda command: b"")
    async with fake_server(slow) as server:
        backend = await opened(server, SIZE, mode="cluster")
        calls = [asyncio.ensure_future(backend.get_into([maker(SIZE).target(bytes([i]) * 32).read])) for i in range(4)]
        await eventually_async(lambda: len(server.commands) >= 4, what="calls under way")
        await backend.close()
        for call in calls:
            assert list(await call) == [Outcome.IO_ERROR]
        assert not [task for task in asyncio.all_tasks() if "kvstore/backends" in task.get_coro().cr_code.co_filename]
        await eventually_async(lambda: server.open_connections == 0, what="all connections closed")


async def test_delete_beside_a_failing_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks on a node known to be down count as absent for delete; a failed delete is raised."""
    async with silent() as (_, _, backend):
        keys, answers = [b"a" * 16, b"b" * 16, b"c" * 16], [1, SkippedError("one node is down"), 0]

        async def run(commands: Sequence[object]) -> list[Any]:
            return answers

        monkeypatch.setattr(backend._exchange, "run", run)
        assert list(await backend.delete(keys)) == [True, False, False]
        answers[1] = NodeDownError("no connection")
        with pytest.raises(NodeDownError):
            await backend.delete(keys)
        assert "no connection" in backend.last_error


async def test_tasks_that_a_close_cancels_do_not_block_those_after_it() -> None:
    """A renewal and a refresh that were cancelled before their start are forgotten when the backend opens again."""
    script = cluster_script(lambda: [(0, 16383)], lambda command: b":0\r\n")
    async with fake_server(script) as server:
        backend = await opened(server, SIZE, mode="cluster", ttl=600)
        backend.touch([b"a" * 32])
        topology_of(backend).note_trouble()
        await backend.close()
        await backend.open(NAMESPACE, GEOMETRY)
        backend.touch([b"b" * 32])
        topology_of(backend).note_trouble()
        await eventually_async(lambda: any(command[0] == b"EXPIRE" for command in server.commands), 60)
        await eventually_async(lambda: backend.stats().counters["topology_refreshes"], 60)


async def test_a_close_that_is_cancelled_closes_the_connections() -> None:
    """Cancelled at its first wait, for a renewal that has no answer."""
    async with silent(ttl=600) as (server, _, backend):
        backend.touch([b"k" * 32])
        await eventually_async(lambda: bool(server.commands), what="the renewal under way")
        close = asyncio.create_task(backend.close())
        await asyncio.sleep(0)
        close.cancel()
        await asyncio.wait({close})
        await eventually_async(lambda: server.open_connections == 0, 60, what="all connections closed")


async def test_a_close_opens_no_connection() -> None:
    """A connection that ends by the close is not replaced, though all others are busy."""
    async with silent(connections=2, limits=Limits(pipeline_depth=1)) as (server, _, backend):
        (node,) = topology_of(backend).nodes
        reads = [maker(SIZE).target(bytes([i]) * 32).read for i in range(2)]
        call = asyncio.ensure_future(backend.get_into(reads))
        await eventually_async(lambda: server.busy_connections == 2, what="both connections busy")
        await backend.close()
        assert not {Outcome.OK, Outcome.MISS} & set(await call)
        assert (node.connection_count, "0 opening" in repr(node), server.connections) == (0, True, 2)


async def test_a_failed_renewal_is_made_by_the_next_use() -> None:
    """A block does not count as renewed for a quarter of its time to live after a failure."""
    answers = [b":1\r\n", b"-ERR no\r\n"]

    async def script(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        writer.write(answers.pop())

    async with fake_server(script) as server:
        backend = await opened(server, SIZE, ttl=600)
        for renewals in (1, 2, 2):
            backend.touch([b"k" * 32])
            await until_renewed(backend)
            assert len(server.commands) == renewals


async def test_a_call_of_any_length_is_sent() -> None:
    """More commands than may wait at a node are sent in batches, whose length alone makes none of them fail."""

    async def script(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        writer.write(b":0\r\n")

    async with fake_server(script) as server:
        backend = await opened(server, SIZE)
        keys = [number.to_bytes(16, "big") for number in range(70_000)]
        assert set(await backend.exists(keys)) == {False}
        assert len(server.commands) == len(keys)


async def test_renewals_of_long_blocks_reach_the_server() -> None:
    """As many renewals as may be pending, of blocks with nine parts each, are more commands than may wait at a node."""

    class Small(RedisBackend):
        part_bytes = 4096

    renewed = 0

    async def script(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        nonlocal renewed
        renewed += command[0] == b"EXPIRE"
        writer.write(b":1\r\n")

    async with fake_server(script) as server:
        backend = await opened(server, 8 * 4096, kind=Small, ttl=600)
        backend.touch([number.to_bytes(16, "big") for number in range(8192)])
        await until_renewed(backend, 120)
        assert renewed == 8192 * 9


async def test_a_node_comes_back_after_an_unexpected_error(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception of any type while reconnecting is one more failure, and not the end of the attempts."""
    backend = await opened(own_server, SIZE)
    own_server.kill()
    with pytest.raises(BackendError):
        await backend.exists([b"k" * 32])
    await eventually_async(lambda: backend.stats().gauges["nodes_down"] == 1, 60)
    failed = asyncio.Event()

    async def broken(*_: Any) -> Any:
        failed.set()
        raise RuntimeError("a defect")

    with monkeypatch.context() as context:
        context.setattr("kvstore.backends.redis.node.open_stream", broken)
        await failed.wait()
    own_server.start()
    await eventually_async(lambda: backend.stats().gauges["nodes_down"] == 0, 60)
    assert list(await backend.exists([b"k" * 32])) == [False]


async def test_touch_after_close_begins_nothing() -> None:
    """A late report of uses starts no work on a closed backend."""
    async with silent() as (_, _, backend):
        await backend.close()
        backend.touch([b"k" * 16])
        assert backend._renewing is None


async def test_close_waits_for_a_call_between_two_attempts() -> None:
    """A call that pauses before its next attempt has ended, without a hit, when close returns."""
    script = cluster_script(lambda: [(0, 16383)], lambda command: b"-TRYAGAIN several keys\r\n")
    async with fake_server(script) as server:
        backend = await opened(server, SIZE, mode="cluster", limits=Limits(later_pause_s=0.3))
        call = asyncio.ensure_future(backend.get_into([maker(SIZE).target(b"k" * 32).read]))
        await eventually_async(lambda: backend.stats().counters["retries"], what="the pause")
        await backend.close()
        assert call.done()
        assert Outcome.OK not in await call


async def test_nodes_that_were_left_are_closed() -> None:
    """A node that serves no slots any more is dropped; a close right then leaves none of its connections."""
    script = cluster_script(lambda: [(0, 16383)], lambda command: b":1\r\n")
    async with fake_server(script) as server:
        backend = await opened(server, SIZE, mode="cluster")
        topology = topology_of(backend)
        assert server.open_connections > 0
        topology._keep([])
        await backend.close()
        await eventually_async(lambda: server.open_connections == 0, what="all connections closed")


async def test_one_stopped_node_of_a_cluster(tmp_path: Path) -> None:
    """A node stopped by SIGSTOP costs its calls one deadline; blocks of other nodes stay available all the time."""
    servers = cluster_nodes(tmp_path)
    with running(*servers):
        await asyncio.to_thread(join_cluster, servers)
        backend = await opened(servers[0], PAYLOAD_BYTES, timeout=3, connect_timeout=3)
        records = RecordMaker(NAMESPACE, RecordGeometry(256, PAYLOAD_BYTES), random.Random(2))
        values = {records.key(): records.payload() for _ in range(60)}
        assert set(await backend.put([records.write(key, value) for key, value in values.items()])) == {Outcome.OK}
        stopped = _keys_of(backend, values, servers[1])
        assert 0 < len(stopped) < 60
        servers[1].pause()
        try:
            outcomes = await _read(backend, records, values)
            assert all(outcomes[key] is (Outcome.TIMEOUT if key in stopped else Outcome.OK) for key in values), outcomes
            # The node is known to be down: it gets no commands, so there is no wait.
            for _ in range(3):
                outcomes = await _read(backend, records, values)
                assert all(outcomes[k] is (Outcome.MISS if k in stopped else Outcome.OK) for k in values), outcomes
            new = {records.key(): records.payload() for _ in range(60)}
            stored = await backend.put([records.write(key, value) for key, value in new.items()])
            assert set(stored) == {Outcome.OK, Outcome.SHED}
            assert backend.stats().gauges["nodes_down"] == 1
            assert backend.stats().counters["answers_late"] <= backend.config.connections
        finally:
            servers[1].resume()
        deadline = time.monotonic() + 60
        while set((await _read(backend, records, values)).values()) != {Outcome.OK}:
            assert time.monotonic() < deadline, "the node was not taken back"
            await asyncio.sleep(0.05)
        mix = Mix(backend, fresh_seed(), calm=True)
        await mix.run(500)


def _keys_of(backend: RedisBackend, values: dict[BlockKey, bytes], server: Server) -> set[BlockKey]:
    topology = topology_of(backend)
    nodes = {key: topology.node_for(name_of(backend, key), reading=False) for key in values}
    return {key for key, node in nodes.items() if node is not None and node.endpoint.port == server.port}


async def _read(backend: RedisBackend, records: RecordMaker, values: dict[BlockKey, bytes]) -> dict[BlockKey, Outcome]:
    targets = [records.target(key) for key in values]
    outcomes: Sequence[Outcome] = await backend.get_into([target.read for target in targets])
    for target, outcome in zip(targets, outcomes, strict=True):
        assert outcome is not Outcome.OK or records.content(target) == values[target.key]
    return dict(zip(values, outcomes, strict=True))


@pytest.mark.parametrize("redirect", [b"-MOVED 1 127.0.0.1:%d\r\n", b"-ASK 1 127.0.0.1:%d\r\n"])
async def test_redirects_in_a_circle_end(redirect: bytes) -> None:
    """Circular redirects cost a few commands, and the block fails."""
    script = cluster_script(lambda: [(0, 16383)], lambda command: redirect % server.port)
    async with fake_server(script) as server:
        backend = await opened(server, SIZE, mode="cluster")
        before = len(server.commands)
        (outcome,) = await backend.get_into([maker(SIZE).target(b"k" * 32).read])
        assert outcome is Outcome.IO_ERROR
        gets = [command for command in server.commands[before:] if command[0] == b"GET"]
        assert 2 <= len(gets) <= 5


async def test_a_thousand_questions_are_one_round_trip() -> None:
    """All lookups of a batch are sent before the first answer, on one connection."""
    async with silent() as (server, _, backend):
        call = asyncio.ensure_future(backend.exists([number.to_bytes(32, "big") for number in range(1000)]))
        await eventually_async(lambda: len(server.commands) == 1000, what="all questions asked")
        assert {command[0] for command in server.commands} == {b"EXISTS"}
        assert server.busy_connections == 1
        assert not call.done()
        call.cancel()
        await asyncio.wait([call])


@pytest.mark.parametrize(
    ("memory", "policy", "ttl", "told"),
    [
        ("8mb", "allkeys-lru", 0, ""),
        ("8mb", "volatile-lru", 60, ""),
        ("8mb", "volatile-lru", 0, "never evicts blocks without 'ttl'"),
        ("8mb", "noeviction", 60, "a full server refuses stores"),
        ("0", "allkeys-lru", 60, "has no maxmemory"),
    ],
)
async def test_a_server_that_will_hurt_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, memory: str, policy: str, ttl: int, told: str
) -> None:
    """At the start the log has the server's version, and a warning only for harmful settings."""
    caplog.set_level(logging.INFO, "kvstore")
    with running(plain("valkey" if ttl else "redis", tmp_path, memory=memory, policy=policy)) as (server,):
        backend = await opened(server, ttl=ttl)
        await backend.close()
    named = r"Blocks go to (redis [67]|valkey 9)\S* \(standalone\), nodes: 1"
    assert re.search(named, caplog.text), caplog.text
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == bool(told)
    assert told in caplog.text


async def test_pauses_between_attempts_double_up_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that stays unreachable is tried again after 50 ms, and then at intervals that grow to 3 s."""
    pauses_s = []

    class NoPause:
        def __rmul__(self, pause_s: float) -> float:
            pauses_s.append(pause_s)
            return 0.0

    monkeypatch.setattr("kvstore.backends.redis.node.random", SimpleNamespace(uniform=lambda low, high: NoPause()))
    async with fake_server(answering(b":0\r\n")) as server:
        backend = await opened(server, SIZE)
    await eventually_async(lambda: backend.stats().gauges["connections"] == 0, 60)
    with pytest.raises(BackendError, match="refused"):
        await backend.exists([b"k" * 32])
    await eventually_async(lambda: len(pauses_s) >= 9, 60)
    assert pauses_s[:9] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.0, 3.0, 3.0]


async def test_expired_pause_delays_no_request() -> None:
    """Once a node is reachable again, requests do not wait for the end of an earlier pause."""

    async def script(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        writer.write(b":0\r\n")

    async with fake_server(script) as server:
        backend = await opened(server, SIZE, limits=Limits(pause_s_min=1000, pause_s_max=1000))
        (node,) = topology_of(backend).nodes
        node._note_failure(NodeDownError("as if a connection had failed"))
        await node._open_one()
        for connection in connections_of(node):
            connection.close()
        async with asyncio.timeout(60):
            assert list(await backend.exists([b"k" * 32])) == [False]


@pytest.mark.parametrize("connections", [1, 4])
@pytest.mark.parametrize("end", ["closed", "reset"])
async def test_a_server_that_is_back_is_used_at_once(connections: int, end: str) -> None:
    """Connections that break right after login do not count as connected: another one soon serves waiting requests."""
    trouble = 0

    async def script(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        writer.write(b":0\r\n")

    async with fake_server(script) as server:

        def on_hello(writer: asyncio.StreamWriter) -> None:
            nonlocal trouble
            if trouble:
                trouble -= 1
                (reset if end == "reset" else asyncio.StreamWriter.close)(writer)

        server.on_hello = on_hello
        backend = await opened(server, SIZE, connections=connections)
        (node,) = topology_of(backend).nodes
        for _ in range(10):
            await backend.exists([b"k" * 32])
            trouble = connections
            for connection in connections_of(node):
                connection.close()

            async def asked() -> bool:
                # At most the pause before the next background attempt; far from any deadline.
                try:
                    async with asyncio.timeout(10):
                        return list(await backend.exists([b"k" * 32])) == [False]
                except BackendError:
                    return False

            await eventually_async(asked, 60)
            assert node.waiting_count == 0
        await eventually_async(lambda: "not pausing" in repr(node), what="an end of the tries to come back")
        assert node.connection_count <= connections


async def test_outage_is_one_warning_and_failed_open_only_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed open is reported by its exception alone; a server lost later is one warning, however often it fails."""
    server = plain("redis", tmp_path)
    with pytest.raises(NodeDownError, match="refused"):
        await backend_on(server).open(NAMESPACE, GEOMETRY)
    assert not caplog.records
    with running(server):
        backend = await opened(server)
        await asyncio.to_thread(server.kill)
        with pytest.raises(NodeDownError):
            await backend.exists([b"k" * 32])
        await eventually_async(lambda: backend.stats().counters["connections_failed"] >= 4)
        await backend.close()
    assert [record.getMessage().partition(":")[0] for record in caplog.records if record.levelname == "WARNING"] == [
        "A Redis node can't be used, and is tried again at growing intervals"
    ]
