"""Events of real engines over ZMQ: routers list exactly the blocks that ``kvstore inspect`` finds on the disk."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.holdings.medium import Medium as HeldMedium
from kvstore.cli.tier_argument import make_tier
from kvstore.testing import eventually
from tests.vllm.engines import BLOCK_TOKENS, Engine, Start, prompt
from tests.vllm.event_stream import Stream

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

OWNER = "kvstore/file"
CAPACITY = "6MiB"
"""About 170 blocks of the tiny model."""


@pytest.fixture
def streams(tmp_path: Path) -> Iterator[list[Stream]]:
    """Subscribers, closed at the end."""
    opened: list[Stream] = []
    yield opened
    for stream in opened:
        stream.close()


@pytest.fixture
def keyring(tmp_path: Path) -> Path:
    """A keyring with one key."""
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"current": 1, "keys": {"1": base64.b64encode(secrets.token_bytes(32)).decode()}}))
    path.chmod(0o600)
    return path


def tier_of(directory: Path, **more: Any) -> dict[str, Any]:
    """Return the file tier of the tests."""
    return {"type": "file", "path": str(directory), "capacity": CAPACITY, "load_timeout": 60, **more}


def offloading(tier: dict[str, Any]) -> dict[str, Any]:
    """Return an engine's ``kv_connector_extra_config``."""
    return {
        "spec_name": "KVStoreOffloadingSpec",
        "spec_module_path": "kvstore.vllm",
        "manager": "kvstore",
        "cpu_bytes_to_use": 8 * 2**20,
        "self_describing_kv_events": True,
        "secondary_tiers": [tier],
    }


def on_disk(tier: dict[str, Any]) -> set[int]:
    """Return the event hashes of the blocks that ``kvstore inspect`` finds."""
    return {int.from_bytes(key[:-4][-8:], "big") for key in keys_on_disk(tier)}


def keys_on_disk(tier: dict[str, Any]) -> list[bytes]:
    """Return the keys of the blocks that ``kvstore inspect`` finds."""
    options = {name: value for name, value in tier.items() if name not in {"type", "load_timeout"}}
    with HeldMedium(make_tier("file", options)) as medium:
        return [block.key for namespace in medium.namespaces() for block in medium.blocks(namespace)]


def noted(tier: dict[str, Any]) -> bytes:
    """Wait until each block has its note on the disk, written shortly after the block; return all notes."""

    def notes() -> bytes:
        return b"".join(path.read_bytes() for path in Path(tier["path"]).rglob("notes"))

    def whole() -> bool:
        written = notes()
        return all(key in written for key in keys_on_disk(tier))

    eventually(whole, 60, what="notes of all blocks")
    return notes()


def subscribe(streams: list[Stream], folder: Path, **options: Any) -> Stream:
    """Subscribe to an engine that will start next."""
    place = folder / f"s{len(streams)}"
    place.mkdir()
    streams.append(Stream(place, **options))
    return streams[-1]


def agree(engine: Engine | None, stream: Stream, tier: dict[str, Any]) -> set[int]:
    """Wait until the stream's blocks equal those on the disk; return them."""
    held: set[int] = set()

    def same() -> bool:
        nonlocal held
        if engine is not None:
            engine.call("settle")
        router, held = stream.pump(), on_disk(tier)
        if router.blocks.get(OWNER, set()) != held:
            stream.replay()  # An engine that has just started publishes before subscribers have connected.
        return router.blocks.get(OWNER, set()) == held

    eventually(same, 60, what="the blocks of the disk and of the events are the same")
    return held


def test_routers_know_what_is_on_the_disk(start: Start, tmp_path: Path, streams: list[Stream], keyring: Path) -> None:
    """Routers match the disk through fill, eviction, expiry, SIGKILL, restart, reset; Dynamo finds whole prefixes."""
    codec = [{"aead": {"keys": {"file": str(keyring)}}}]
    tier = tier_of(tmp_path / "kv", codec=codec)
    prompts = [prompt(i, 640 + 32 * i) for i in range(12)]
    stream = subscribe(streams, tmp_path)
    engine = start(offloading=offloading(tier), events=stream.config())
    engine.ask(*prompts[:3])
    held = agree(engine, stream, tier)
    assert len(held) > 50
    assert stream.router.indexed(OWNER) == held, "nothing was evicted, so every prefix is whole"
    engine.ask(*prompts[3:])  # Twice the capacity.
    held = agree(engine, stream, tier)
    assert not held >= set(stream.router.parents), "something was evicted"
    assert stream.router.indexed(OWNER) <= held, "no phantom"
    engine.call("repeat_events")

    def whole() -> bool:
        router = stream.pump()
        return router.indexed(OWNER) == router.reachable(held)

    # It may take a while until all messages have arrived.
    eventually(whole, 60, what="Dynamo finds all whole prefixes")
    agree(engine, stream, tier)
    older = set(stream.router.parents)
    engine.call("ask", [prompt(20, 320)], 6, {"ttl": "10s"})
    agree(engine, stream, tier)
    short = set(stream.router.parents) - older
    assert len(short) >= 320 // BLOCK_TOKENS - 1

    def expired() -> bool:
        engine.ask(prompts[-1])  # An idle engine runs no steps.
        return not short & stream.pump().blocks.get(OWNER, set())

    eventually(expired, 120, what="the events state that blocks have expired")
    assert not short & agree(engine, stream, tier)
    before = stream.router.parents
    noted(tier)
    engine.kill()

    again = subscribe(streams, tmp_path)
    engine = start(offloading=offloading(tier), events=again.config(), in_process=False)
    held = agree(None, again, tier)
    assert len(held) > 50, "recovered without a request"
    recovered = again.router
    assert recovered.parents.items() <= before.items(), "the same parents as before"
    missing = held - recovered.parents.keys()
    assert not missing, "with their tokens"
    assert recovered.indexed(OWNER) == recovered.reachable(held)
    assert recovered.reachable(held)
    matches = [recovered.match(OWNER, tokens, BLOCK_TOKENS) for tokens in prompts]
    assert sum(matches) == len(recovered.reachable(held))
    best = matches.index(max(matches))
    (answer,) = engine.ask(prompts[best])
    assert answer["cached"] >= (matches[best] - 1) * BLOCK_TOKENS > 0, "the router was right"
    engine.call("reset")
    eventually(lambda: not again.pump().blocks.get(OWNER), 60, what="nothing is left of the epoch before the reset")
    assert again.router.indexed(OWNER) == set()
    engine.close()


def test_without_encryption_no_token_is_on_the_disk(start: Start, tmp_path: Path, streams: list[Stream]) -> None:
    """Hashes, parents and lengths survive a SIGKILL; consumers by hash have all blocks, and Dynamo none."""
    tier = tier_of(tmp_path / "kv")
    tokens = prompt(7, 640)
    stream = subscribe(streams, tmp_path)
    engine = start(offloading=offloading(tier), events=stream.config())
    engine.ask(tokens)
    held = agree(engine, stream, tier)
    notes = noted(tier)
    engine.kill()
    for width in (2, 4):
        packed = b"".join(token.to_bytes(width, "little") for token in tokens[:4])
        assert packed not in notes

    again = subscribe(streams, tmp_path)
    engine = start(offloading=offloading(tier), events=again.config())
    assert agree(engine, again, tier) == held
    assert again.router.indexed(OWNER) == set()
    engine.ask(tokens)
    engine.call("settle")
    engine.call("repeat_events")
    # It may take a while until all messages have arrived.
    eventually(lambda: again.pump().indexed(OWNER) == held, 60, what="vLLM has met the tokens again")
    agree(engine, again, tier)
    engine.close()


@pytest.mark.parametrize("buffer_steps", [10_000, 4])
def test_a_subscriber_that_loses_messages_converges(
    start: Start, tmp_path: Path, streams: list[Stream], buffer_steps: int
) -> None:
    """One message in twenty is lost; a replay restores them, or all state is dropped until the next repetition."""
    tier = tier_of(tmp_path / "kv")
    seed = secrets.randbits(32)
    stream = subscribe(streams, tmp_path, loss=0.05, seed=seed)
    engine = start(offloading=offloading(tier), events=stream.config(buffer_steps=buffer_steps))
    for i in range(60):
        engine.ask(prompt(1000 + i, 200))
        engine.call("settle")
        stream.pump()
    assert stream.lost, f"seed {seed}"

    def same() -> bool:
        engine.call("repeat_events")
        engine.call("settle")
        stream.pump()
        stream.replay()  # The last message may be lost, too.
        return stream.router.blocks.get(OWNER, set()) == on_disk(tier)

    eventually(same, 60, what=f"convergence, seed {seed}")
    assert stream.replayed or stream.dropped
    router = stream.router
    assert router.indexed(OWNER) == router.reachable(on_disk(tier))
    engine.close()
