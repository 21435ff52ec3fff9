"""Events of engines that share Redis, S3 or each other's memory: each block is reported by one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing import eventually
from kvstore.tiers import async_tier
from kvstore.vllm.spec import KVStoreOffloadingSpec
from tests.peer.ports import free_port
from tests.redis import clients as redis_clients
from tests.redis import servers as redis
from tests.s3 import clients as s3_clients
from tests.s3 import servers as s3
from tests.vllm.harness import Driver, key_of
from tests.vllm.router import Router

FRESH = {"negative_ttl": "1ms", "positive_ttl": "1ms", "reset": "keep", "label": "shared"}
"""Every lookup queries the medium."""

OWNER = "STORAGE"


@pytest.fixture(scope="module", params=["redis", "s3"])
def medium(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Any]]:
    """A server; calling the fixture returns a tier's options for a separate part of it."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "redis":
        with redis.running(redis.plain("redis", folder)) as (server,):
            yield lambda: {"type": "redis", **redis_clients.options_for(server), **FRESH}
    else:
        with s3.running(s3.moto(folder)) as server:
            yield lambda: {"type": "s3", **s3_clients.options_for(server), **FRESH}


@pytest.fixture
def engines() -> Iterator[dict[str, Driver]]:
    """Engines by name; all are closed at the end."""
    opened: dict[str, Driver] = {}
    yield opened
    for driver in opened.values():
        driver.close()


def start(engines: dict[str, Driver], name: str, tier: dict[str, Any]) -> Driver:
    """Start an engine with events."""
    engines[name] = Driver([tier], spec_class=KVStoreOffloadingSpec, events=True)
    return engines[name]


def keys_of(numbers: range) -> list[bytes]:
    """Return the blocks' keys."""
    return [key_of(number) for number in numbers]


def test_each_block_is_reported_by_the_engine_that_put_it(
    medium: Callable[[], Any], engines: dict[str, Driver]
) -> None:
    """Blocks computed by both or loaded by one are reported once; a successor reports only its own stores."""
    tier, router = medium(), Router()
    for name in ("a", "b"):
        start(engines, name, tier)
    for wave in range(4):
        for place, driver in enumerate(engines.values()):
            first = 20 * wave + 10 * place
            driver.store(keys_of(range(first, first + 20)))
    held = {name: router.follow(name, driver)[OWNER] for name, driver in engines.items()}
    assert held["a"] | held["b"] == set(keys_of(range(90)))
    assert held["a"] and held["b"] and not held["a"] & held["b"]
    before = set(held["a"])
    engines["a"].forget_primary()
    theirs = sorted(held["b"])[:10]
    assert engines["a"].load(theirs) == theirs
    assert router.follow("a", engines["a"])[OWNER] == before, "loaded, and not put"

    engines.pop("a").close()
    successor = start(engines, "c", tier)
    successor.store([*sorted(before)[:5], *keys_of(range(100, 105))])
    assert router.follow("c", successor)[OWNER] == set(keys_of(range(100, 105)))
    assert router.follow("b", engines["b"])[OWNER] == held["b"]


def test_a_removal_by_another_engine_is_reported(medium: Callable[[], Any], engines: dict[str, Driver]) -> None:
    """The removal is reported once the owner misses the block; an engine that stores it again reports it."""
    tier, router = medium(), Router()
    owner, other = start(engines, "a", tier), start(engines, "b", tier)
    keys = keys_of(range(10))
    owner.store(keys)
    assert router.follow("a", owner)[OWNER] == set(keys)
    other.store(keys)
    assert router.follow("b", other).get(OWNER, set()) == set()
    shared = other.manager.manager.tiers[0]
    shared.remove(keys[:4])
    assert shared.drain(60)
    owner.forget_primary()
    assert owner.load(keys) == keys[4:]
    assert router.follow("a", owner)[OWNER] == set(keys[4:])
    other.forget_primary()
    other.store(keys)
    assert router.follow("b", other)[OWNER] == set(keys[:4]), "put again"
    assert router.follow("a", owner)[OWNER] == set(keys[4:])


def test_a_block_that_redis_evicted_is_reported(
    tmp_path: Path, engines: dict[str, Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evicted block is reported after the next lookup of all reported blocks, without a request for it."""
    with redis.running(redis.plain("redis", tmp_path)) as (server,):
        driver, router = start(engines, "a", {"type": "redis", **redis_clients.options_for(server), **FRESH}), Router()
        keys = keys_of(range(300))
        for first in range(0, 300, 30):
            driver.store(keys[first : first + 30])
        assert router.follow("a", driver)[OWNER] == set(keys)
        names = redis.cli(server, "KEYS", f"*{keys[7].hex()}*").split()
        assert len(names) == 1
        assert redis.cli(server, "DEL", *names).strip() == "1"
        assert router.follow("a", driver)[OWNER] == set(keys), "as yet nothing shows it"
        monkeypatch.setattr(async_tier, "_VERIFICATION_INTERVAL_S", 0.0)
        driver.manager.manager.tiers[0]._verification_due = 0.0
        eventually(lambda: router.follow("a", driver)[OWNER] == {*keys} - {keys[7]}, what="the evicted block is gone")
        engines.pop("a").close()


def test_blocks_in_the_memory_of_peers_are_reported_by_their_engines(engines: dict[str, Driver]) -> None:
    """A peer tier reports nothing itself: a block loaded from another engine is then in both memories."""
    port, router = free_port(), Router()
    common = {"type": "peer", "secret": "a secret of sixteen", "lookup_timeout": 20, "load_timeout": 60, **FRESH}
    a = start(engines, "a", {**common, "listen": f"127.0.0.1:{port}"})
    b = start(engines, "b", {**common, "peers": [f"127.0.0.1:{port}"]})
    keys = keys_of(range(10))
    a.store(keys)
    assert router.follow("a", a) == {"CPU": set(keys)}
    assert not any(router.follow("b", b).values()), "asked for nothing"
    assert b.load(keys[:6]) == keys[:6]
    assert router.follow("b", b) == {"CPU": set(keys[:6])}
    a.forget_primary()
    assert not any(router.follow("a", a).values())
    engines.pop("a").close()
    assert b.load(keys) == keys[:6], "its own copies outlive the other engine"
    assert router.follow("b", b) == {"CPU": set(keys[:6])}
