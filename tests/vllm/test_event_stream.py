"""Events of real engines over ZMQ: Dynamo and llm-d know exactly the blocks that ``kvstore inspect`` finds."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.holdings.medium import Medium as HeldMedium
from kvstore.cli.tier_argument import make_tier
from kvstore.testing import eventually
from tests.vllm.engines import BLOCK_TOKENS, Engine, Start, prompt
from tests.vllm.event_stream import Stream

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

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
        "tiering": {"allow": ["ttl"]},
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
        return b"".join(path.read_bytes() for path in Path(tier["path"]).rglob("*.notes"))

    def whole() -> bool:
        written = notes()
        return all(key in written for key in keys_on_disk(tier))

    eventually(whole, 60, what="notes of all blocks")
    return notes()


def subscribe(streams: list[Stream], folder: Path) -> Stream:
    """Subscribe to an engine that will start next."""
    place = folder / f"s{len(streams)}"
    place.mkdir()
    streams.append(Stream(place, BLOCK_TOKENS))
    return streams[-1]


def agree(
    engine: Engine | None, stream: Stream, tier: dict[str, Any], prompts: Sequence[Sequence[int]] = ()
) -> set[int]:
    """Wait until llm-d lists the blocks on the disk, and Dynamo finds the prompts in the tiers; return the former."""
    held: set[int] = set()
    wrong: list[str] = []

    def same() -> bool:
        nonlocal held, wrong
        if engine is not None:
            engine.call("settle")
        found, held = stream.pump(), on_disk(tier)
        if found.on("STORAGE") != held:
            stream.replay()  # An engine that has just started publishes before subscribers have connected.
            if engine is not None:
                # An idle engine in its caller's process makes no steps, and a step reports what the disk evicts later.
                engine.ask(prompt(99, 8))
        wrong = stream.mistakes(prompts)
        return found.on("STORAGE") == held and not wrong

    try:
        eventually(same, 60, what="events describe the blocks on the disk")
    except AssertionError as error:
        error.add_note(f"{wrong}; llm-d has {len(stream.filter.on('STORAGE') ^ held)} other blocks")
        raise
    assert not stream.filter.restated, "a block is stated once"
    return held


def test_routers_match_the_tiers(start: Start, tmp_path: Path, streams: list[Stream], keyring: Path) -> None:
    """Routers match the tiers through fill, eviction, resets, expiry, SIGKILL and restart."""
    codec = [{"aead": {"keys": {"file": str(keyring)}}}]
    tier = tier_of(tmp_path / "kv", codec=codec)
    prompts = [prompt(i, 640 + 32 * i) for i in range(12)]
    stream = subscribe(streams, tmp_path)
    engine = start(offloading=offloading(tier), events=stream.config())
    engine.ask(*prompts[:3])
    filled = agree(engine, stream, tier, prompts)
    assert len(filled) > 50
    engine.ask(*prompts[3:])  # Twice the capacity.
    held = agree(engine, stream, tier, prompts)
    assert not held >= filled, "something was evicted"
    engine.call("forget_device")
    assert agree(engine, stream, tier, prompts) == held, "stated again after AllBlocksCleared"
    assert stream.filter.on("CPU")
    engine.call("ask", [prompt(20, 320)], 6, {"ttl": "10s"})
    agree(engine, stream, tier, prompts)
    short = set(stream.filter.path(prompt(20, 320), BLOCK_TOKENS))
    assert len(short) >= 320 // BLOCK_TOKENS - 1

    def expired() -> bool:
        engine.ask(prompts[-1])  # An idle engine runs no steps.
        return not short & stream.pump().on("STORAGE")

    eventually(expired, 120, what="the events state that blocks have expired")
    assert not short & agree(engine, stream, tier, prompts)
    before = stream.filter.chain
    noted(tier)
    engine.kill()

    again = subscribe(streams, tmp_path)
    engine = start(offloading=offloading(tier), events=again.config(), in_process=False)
    held = agree(None, again, tier, prompts)
    assert len(held) > 50, "recovered without a request"
    assert again.filter.chain.items() <= before.items(), "with the same parents and tokens as before"
    assert held <= set(again.filter.chain.values())
    matches = [again.indexer.match(tokens)[2] for tokens in prompts]
    best = matches.index(max(matches))
    (answer,) = engine.ask(prompts[best])
    assert answer["cached"] >= matches[best] - BLOCK_TOKENS > 0, "the router was right"
    engine.call("reset")
    eventually(lambda: not again.pump().on("STORAGE"), 60, what="nothing is left of the epoch before the reset")
    eventually(lambda: not again.mistakes(prompts), 60, what="Dynamo expects nothing, either")
    engine.close()


def test_without_encryption_no_token_is_on_the_disk(start: Start, tmp_path: Path, streams: list[Stream]) -> None:
    """Hashes, parents and lengths survive a SIGKILL; consumers by hash have all blocks, and Dynamo none."""
    tier = tier_of(tmp_path / "kv")
    tokens = prompt(7, 640)
    stream = subscribe(streams, tmp_path)
    engine = start(offloading=offloading(tier), events=stream.config())
    engine.ask(tokens)
    held = agree(engine, stream, tier, [tokens])
    notes = noted(tier)
    engine.kill()
    for width in (2, 4):
        packed = b"".join(token.to_bytes(width, "little") for token in tokens[:4])
        assert packed not in notes

    again = subscribe(streams, tmp_path)
    engine = start(offloading=offloading(tier), events=again.config())
    assert agree(engine, again, tier, [tokens]) == held
    assert again.indexer.match(tokens) == (0, 0, 0)
    engine.close()


def test_a_subscriber_that_loses_messages_converges(start: Start, tmp_path: Path, streams: list[Stream]) -> None:
    """One message in twenty is lost; each consumer requests the replay of those."""
    tier = tier_of(tmp_path / "kv")
    prompts = [prompt(1000 + i, 200) for i in range(60)]
    stream = subscribe(streams, tmp_path)
    engine = start(offloading=offloading(tier), events=stream.config())
    agree(engine, stream, tier)
    stream.lose_every = 20
    for tokens in prompts:
        engine.ask(tokens)
        engine.call("settle")
        stream.pump()
    assert stream.lost
    stream.lose_every = 0
    engine.ask(prompt(2000, 64))  # A message after the last lost one shows the gap.
    agree(engine, stream, tier, prompts)
    assert stream.replayed
    engine.close()
