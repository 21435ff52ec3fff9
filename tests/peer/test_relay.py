"""Strangers between two engines relay, replay, reflect, downgrade, cut and reorder; none of their bytes is loaded."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore.backends.peer import protocol
from kvstore.backends.peer.protocol import FrameMac, Op
from kvstore.codec.record import HEADER_BYTES
from kvstore.namespace import Namespace
from kvstore.testing.tier_rig import TierRig
from kvstore.types import LookupResult, RequestContext, Source
from tests.peer.relay import EVIL, Frames, Impostor, Relay, forged
from tests.peer.serving import FIELDS, SLOT_BYTES, Serving, key_of

SECRET = "a secret of sixteen"
KEYS = [key_of(number) for number in range(4)]
PATIENT = {"timeout": 10, "lookup_timeout": 20, "load_timeout": 20, "connect_timeout": 10, "negative_ttl": "1ms"}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """An engine that listens on one address."""
    with Serving(tmp_path_factory.mktemp("one"), secret=SECRET) as process:
        yield process


@pytest.fixture(scope="module")
def open_serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """An engine that listens on all addresses, so that it cannot tell which ones lead to it."""
    process = Serving(tmp_path_factory.mktemp("all"), secret=SECRET)
    process.start(listen=f"0.0.0.0:{process.port}")
    yield process
    process.kill()


def rig_of(**more: Any) -> TierRig:
    """Return an engine that asks peers."""
    return TierRig(
        {"backend": "peer", "secret": SECRET, **PATIENT, **more},
        namespace=Namespace(FIELDS),
        slot_bytes=SLOT_BYTES,
        slots=8,
    )


def stat(rig: TierRig, name: str) -> int:
    """Return the current value of a counter."""
    assert rig.tier.drain(10)
    rig.tier.get_finished()
    return rig.tier.stats().backend_counters[name]


def test_a_relay_to_another_address_is_refused(serving: Serving) -> None:
    """An engine does not answer a client that has dialled another address, and the client's error says so."""
    with Relay(serving.port) as relay, rig_of(request_peers=["127.0.0.0/8:1024-65535"]) as rig:
        ctx = RequestContext("r", source=Source(relay.address))
        assert rig.lookup(KEYS[0], ctx) is LookupResult.MISS
        assert not rig.load(KEYS, ctx=ctx).success
        assert rig.untouched(range(4)) and relay.stolen == []
        assert stat(rig, "connections_failed") > 0
    with Relay(serving.port) as relay, rig_of(peers=[relay.address]) as rig:
        assert rig.lookup(KEYS[0]) is LookupResult.MISS
        assert "leads to an engine that listens elsewhere" in rig.tier.stats().last_error


@pytest.mark.parametrize("target", ["serving", "open_serving"])
def test_relayed_greeting_impersonates_neither_engine(target: str, request: pytest.FixtureRequest) -> None:
    """A relay of the greeting gets no block with a request of its own, and an answer of its own is not loaded."""
    real: Serving = request.getfixturevalue(target)
    with Impostor(real.port) as stranger, rig_of(request_peers=["127.0.0.0/8:1024-65535"]) as rig:
        ctx = RequestContext("r", source=Source(stranger.address))
        assert rig.lookup(b"a block that no engine has", ctx) is LookupResult.MISS
        assert not rig.load([b"a block that no engine has"], ctx=ctx).success
        assert EVIL[:8] not in rig.content(0)
        assert stranger.stolen == []


def test_a_relay_that_changes_nothing_costs_nothing(open_serving: Serving) -> None:
    """An engine that listens on all addresses is reached through a translated address."""
    with Relay(open_serving.port) as relay, rig_of(peers=[relay.address]) as rig:
        assert rig.lookup(KEYS[0]) is LookupResult.HIT
        rig.prove(rig.load(KEYS), KEYS, range(4))
        assert len(relay.stolen) == 4


def changed(at: int, mask: int = 4) -> Callable[[Op, bytes, Frames], Frames]:
    """Flip one bit of the first record's frame."""

    def change(op: Op, question: bytes, frames: Frames) -> Frames:
        data = bytearray(frames[0])
        data[at] ^= mask
        return [bytes(data), *frames[1:]]

    return change


def under_another_key(op: Op, question: bytes, frames: Frames) -> Frames:
    """Send forged records with MACs of a guessed key."""
    mac, changed = FrameMac(b"guess".ljust(32)), []
    for key in KEYS:
        mac.update(forged(key))
        changed.append(forged(key) + mac.end())
    return changed


def earlier() -> Callable[[Op, bytes, Frames], Frames]:
    """Send the answers of an earlier connection; the first connection breaks."""
    seen: list[Frames] = []

    def change(op: Op, question: bytes, frames: Frames) -> Frames:
        seen.append(frames)
        if len(seen) == 1:
            raise EOFError
        return list(seen[0])

    return change


ATTACKS: dict[str, Callable[[], Callable[[Op, bytes, Frames], Frames]]] = {
    "changed part": lambda: changed(5, 1),
    "changed header": lambda: changed(protocol.PART_BYTES + 60),
    "changed payload": lambda: changed(protocol.PART_BYTES + HEADER_BYTES + 1000),
    "changed MAC": lambda: changed(-1),
    "forged": lambda: under_another_key,
    "without a MAC": lambda: lambda op, question, frames: [forged(key) for key in KEYS],
    "repeated": lambda: lambda op, question, frames: [frames[0]] * 4,
    "replayed": earlier,
    "reflected": lambda: lambda op, question, frames: [question] * 4000,
    "reordered": lambda: lambda op, question, frames: frames[::-1],
    "left out": lambda: lambda op, question, frames: frames[1:],
    "cut": lambda: lambda op, question, frames: [frames[0], frames[1][:-1], b"\0" * (SLOT_BYTES + 1000)],
    "reported absent": lambda: lambda op, question, frames: [protocol.pack_part(protocol.Part.ABSENT, 4) + bytes(16)],
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_changed_answers_are_not_loaded(open_serving: Serving, attack: str) -> None:
    """If the frames of a load are changed on their way, each block is right or failed, and never missing."""
    attacked = ATTACKS[attack]()
    with Relay(open_serving.port) as relay, rig_of(peers=[relay.address]) as rig:
        relay.answer = lambda op, question, frames: attacked(op, question, frames) if op is Op.LOAD else frames
        assert rig.lookup(KEYS[0]) is LookupResult.HIT
        result = rig.load(KEYS)
        rig.prove(result, KEYS, range(4))
        assert relay.answered
        # The first frames are authentic, of the load and of each of its retries.
        good = sum(outcome.ok for outcome in result.outcomes)
        assert good >= 2 if attack in ("repeated", "cut") else not good
        assert not any(outcome.name in ("MISS", "CORRUPT") for outcome in result.outcomes)


def test_changed_questions_are_not_answered(open_serving: Serving) -> None:
    """A question whose keys are changed on their way ends the connection."""
    with Relay(open_serving.port) as relay, rig_of(peers=[relay.address]) as rig:
        relay.question = lambda op, frame: frame[:-20] + bytes([frame[-20] ^ 1]) + frame[-19:]
        assert rig.lookup(KEYS[0]) is LookupResult.MISS
        assert stat(rig, "connections_opened") > 0


def test_modified_lookup_answers_are_rejected(open_serving: Serving) -> None:
    """An answer to a lookup that is changed on its way counts as no answer."""
    with Relay(open_serving.port) as relay, rig_of(peers=[relay.address]) as rig:
        relay.answer = lambda op, question, frames: [b"\1" + frames[0][1:]]
        assert rig.lookup(b"a block that no engine has") is LookupResult.MISS
        assert "a frame was forged" in rig.tier.stats().last_error


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("side", ["hello", "welcome"])
def test_a_downgrade_is_refused(open_serving: Serving, side: str, version: int) -> None:
    """A greeting that is changed to an earlier version of the protocol ends the connection."""
    size = {"hello": protocol.HELLO_BYTES, "welcome": protocol.WELCOME_BYTES}[side]
    with Relay(open_serving.port) as relay, rig_of(peers=[relay.address]) as rig:
        relay.greeting = lambda data: data[:8] + bytes([version]) + data[9:] if len(data) == size else data
        assert rig.lookup(KEYS[0]) is LookupResult.MISS
        assert stat(rig, "connections_opened") == 0


@pytest.mark.parametrize("size", [protocol.HELLO_BYTES, protocol.WELCOME_BYTES, protocol.PROOF_BYTES])
def test_a_changed_greeting_is_refused(open_serving: Serving, size: int) -> None:
    """Whichever byte of the greeting is changed, no question is answered."""
    for _ in range(5):
        at = random.randrange(size)

        def change(data: bytes, at: int = at) -> bytes:
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if len(data) == size else data

        with Relay(open_serving.port) as relay, rig_of(peers=[relay.address], connect_timeout=1) as rig:
            relay.greeting = change
            assert rig.lookup(KEYS[0]) is LookupResult.MISS, at
