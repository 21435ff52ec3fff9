"""Two real engines: one loads from the other's memory the blocks computed there, and computes them if it dies."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.waiting import eventually
from tests.peer.ports import free_port
from tests.redis import servers as redis
from tests.vllm.engines import BLOCK_TOKENS, Engine, Start, full_blocks, prompt
from tests.vllm.peers import offloading

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LENGTHS = (650, 640, 333, 65)


def prompts(seed: int) -> list[list[int]]:
    """Return prompts of several lengths."""
    return [prompt(100 * seed + number, tokens) for number, tokens in enumerate(LENGTHS)]


def tokens_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    """Return the tokens of answers."""
    return [answer["tokens"] for answer in answers]


def cached_of(answers: list[dict[str, Any]]) -> list[int]:
    """Return the number of each prompt's tokens that came from a cache."""
    return [answer["cached"] for answer in answers]


ALL_CACHED = [full_blocks(tokens) for tokens in LENGTHS]


@pytest.fixture(scope="module")
def port() -> int:
    """The port of the first engine."""
    return free_port()


@pytest.fixture(scope="module")
def first(start: Start, port: int) -> Engine:
    """An engine that serves its blocks."""
    return start(offloading=offloading(listen=f"127.0.0.1:{port}"))


@pytest.fixture(scope="module")
def expected(plain: Engine) -> Callable[[int], list[list[int]]]:
    """The expected answers: those of an engine without offloading."""
    return lambda seed: tokens_of(plain.ask(*prompts(seed)))


def test_second_engine_loads_blocks_of_the_first(start: Start, first: Engine, port: int, expected: Any) -> None:
    """Blocks are loaded from an idle engine's memory, by a static list; outputs equal those without offloading."""
    computed = first.ask(*prompts(1))
    assert cached_of(computed) == [0] * len(LENGTHS)
    second = start(offloading=offloading(peers=[f"127.0.0.1:{port}"]))
    loaded = second.ask(*prompts(1))
    assert cached_of(loaded) == ALL_CACHED
    assert tokens_of(loaded) == tokens_of(computed) == expected(1)
    assert first.call("tier_errors") == second.call("tier_errors") == 0
    # Blocks that neither has are computed, and no request waits for them.
    assert cached_of(second.ask(prompt(999, 320))) == [0]
    second.close()


def test_two_engines_find_each_other_by_a_directory(start: Start, expected: Any, tmp_path: Path) -> None:
    """Neither engine has a list: each loads blocks computed by the other, and both survive the directory's end."""
    with redis.running(redis.plain("redis", tmp_path / "redis")) as (server,):
        directory = {"url": server.url, "networks": ["127.0.0.1"], "interval": "200ms"}
        one, two = (
            start(offloading=offloading(listen=f"127.0.0.1:{free_port()}", directory=directory, negative_ttl="1ms"))
            for _ in range(2)
        )
        for seed, giver, taker in ((6, one, two), (7, two, one)):
            given = giver.ask(*prompts(seed))
            assert cached_of(given) == [0] * len(LENGTHS)
            # Until the summary has been read, such a prompt is computed; each attempt uses another prompt.
            probes = iter(range(100 * seed, 100 * seed + 100))
            eventually(lambda giver=giver, taker=taker, probes=probes: is_found(giver, taker, next(probes)), 300)
            taken = taker.ask(*prompts(seed))
            assert cached_of(taken) == ALL_CACHED
            assert tokens_of(taken) == tokens_of(given) == expected(seed)
        server.kill()
        assert tokens_of(two.ask(*prompts(8))) == expected(8)
        assert one.call("tier_errors") == two.call("tier_errors") == 0
        one.close()
        two.close()


def is_found(giver: Engine, taker: Engine, number: int) -> bool:
    """Return whether one engine loads a short prompt that the other one has computed."""
    asked = prompt(10_000 + number, 320)
    giver.ask(asked)
    time.sleep(0.5)  # For some rounds; without it this loop would only compute more prompts.
    return cached_of(taker.ask(asked)) == [full_blocks(320)]


@pytest.mark.parametrize("manager", ["kvstore", "vllm"])
def test_a_request_names_its_source(start: Start, first: Engine, port: int, expected: Any, manager: str) -> None:
    """With vLLM's parameters a request names the source of its blocks, which keeps them; otherwise no peer is asked."""
    seed = {"kvstore": 2, "vllm": 5}[manager]
    first.call("ask", prompts(seed), 6, None, {"remote_decoder": {"kv_request_id": "r"}})
    first.call("settle")
    # Priorities of earlier requests end when their blocks are fetched, or expire.
    assert first.call("manager_stats")["primary"]["retained"] >= sum(ALL_CACHED) // BLOCK_TOKENS
    second = start(offloading=offloading(manager, request_peers=["127.0.0.0/8:1024-65535"]))
    named = {"remote_kv_source": {"kv_request_id": "r", "remote_host": "127.0.0.1", "remote_port": port}}
    loaded = second.call("ask", prompts(seed)[:2], 6, None, named)
    assert cached_of(loaded) == ALL_CACHED[:2]
    assert cached_of(second.ask(*prompts(seed)[2:])) == [0, 0]
    named = {"remote_prefiller": {**named["remote_kv_source"], "remote_port": free_port()}}
    assert cached_of(second.call("ask", [prompt(998, 320)], 6, None, named)) == [0]
    assert tokens_of(loaded) == expected(seed)[:2]
    assert second.call("tier_errors") == 0
    second.close()


def test_an_engine_that_dies_in_the_middle_of_a_load(start: Start, expected: Any) -> None:
    """The serving engine is killed when half of the blocks have arrived: the other one computes, and continues."""
    serving_port = free_port()
    # On all addresses, because the other one connects through a proxy.
    dying = start(offloading=offloading(listen=f"0.0.0.0:{serving_port}"))
    dying.ask(*prompts(3))
    with cut_after(serving_port, 400_000, dying.kill) as (proxy_port, was_cut):
        second = start(offloading=offloading(peers=[f"127.0.0.1:{proxy_port}"], connections=1, timeout=2))
        answers = second.ask(*prompts(3))
        assert was_cut.is_set()
        assert tokens_of(answers) == expected(3)
        assert cached_of(answers) != ALL_CACHED
        # Repeat with the peer known to be down.
        assert tokens_of(second.ask(*prompts(4))) == expected(4)
        assert second.call("tier_errors") == 0
        second.close()


@contextlib.contextmanager
def cut_after(port: int, count: int, cut: Callable[[], None]) -> Iterator[tuple[int, threading.Event]]:
    """Forward connections to a port; after ``count`` bytes from there call ``cut``, and forward no more."""
    was_cut, lock, left = threading.Event(), threading.Lock(), [count]
    threads: list[threading.Thread] = []
    sockets: list[socket.socket] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(16384):
                if counted:
                    with lock:
                        left[0] -= len(data)
                        if left[0] <= 0 and not was_cut.is_set():
                            was_cut.set()
                            cut()
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        while True:
            try:
                ours, _ = listener.accept()
            except OSError:
                return
            try:
                theirs = socket.create_connection(("127.0.0.1", port))
            except OSError:
                ours.close()
                continue
            sockets.extend((ours, theirs))
            for arguments in ((ours, theirs, False), (theirs, ours, True)):
                threads.append(threading.Thread(target=pump, args=arguments, daemon=True))
                threads[-1].start()

    threads.append(threading.Thread(target=accept, daemon=True))
    threads[0].start()
    try:
        yield listener.getsockname()[1], was_cut
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(30)
        for sock in (listener, *sockets):
            sock.close()
