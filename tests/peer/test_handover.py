"""Prefill and decode: one engine fetches blocks while the other computes them, and computes blocks that never come."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore.namespace import Namespace
from kvstore.primary import PrimaryTier, Region
from kvstore.primary.lending import Lender
from kvstore.testing.waiting import eventually
from kvstore.tiering import TieringConfig, TieringManager
from kvstore.tiering.policy import HAND_OVER
from kvstore.tiers import AsyncTier, open_tier
from kvstore.types import BlockKey, LookupResult, RequestContext, Source
from tests.peer.ports import free_port

SLOT_BYTES = 65536
NAMESPACE = Namespace({"suite": "handover"})
KEYS = [b"block-%d" % number for number in range(6)]
NEVER_S = 60.0


def payload(key: BlockKey) -> bytes:
    """Return the bytes of a block."""
    return random.Random(key).randbytes(SLOT_BYTES)


def digest(name: str) -> bytes:
    """Return a digest for the name of a hand-over."""
    return hashlib.sha256(name.encode()).digest()


class Side:
    """An engine's manager over one peer tier."""

    def __init__(self, *, serves: bool, slots: int = 16, **options: Any) -> None:
        self.region = Region.create(slots=slots, slot_bytes=SLOT_BYTES)
        self.view = self.region.view()
        self.primary = PrimaryTier(self.view, SLOT_BYTES)
        self.tier: AsyncTier = open_tier(
            {"backend": "peer", "lookup_timeout": 10, "load_timeout": 20, "negative_ttl": 60, **options},
            primary=self.region.view(),
            slot_bytes=SLOT_BYTES,
            namespace=NAMESPACE,
            lender=Lender(self.primary) if serves else None,
        )
        self.manager = TieringManager(
            self.primary, [self.tier], TieringConfig(allow=[HAND_OVER], promotion_share=1.0, wait_s_max=0.05)
        )

    def compute(self, keys: list[BlockKey], ctx: RequestContext) -> None:
        """Compute some of a request's blocks."""
        plan = self.manager.prepare_store(keys, ctx)
        assert plan is not None
        for key, slot in zip(plan.keys, plan.slots, strict=True):
            with self.primary.row(slot) as row:
                row[:] = payload(key)
        self.manager.complete_store(plan.keys, ctx)
        self.manager.on_step_end()

    def look(self, ctx: RequestContext) -> list[str]:
        """Make a step in which a request looks up its blocks."""
        answers = [self.manager.lookup(key, ctx).value for key in KEYS]
        self.manager.on_step_end()
        return answers

    def prove(self, keys: list[BlockKey], ctx: RequestContext) -> None:
        """Compare every byte of the blocks in memory."""
        assert {self.manager.lookup(key, ctx) for key in keys} == {LookupResult.HIT}
        slots = self.manager.prepare_load(keys, ctx)
        assert slots is not None
        for key, slot in zip(keys, slots, strict=True):
            with self.primary.row(slot) as row:
                assert bytes(row) == payload(key)
        self.manager.complete_load(keys, ctx)

    @property
    def held(self) -> int:
        """Return the number of blocks kept for other engines, after a step."""
        self.manager.on_step_end()
        return self.manager.stats().primary.retained

    def close(self) -> None:
        """End it."""
        assert self.manager.close()
        self.primary.close()
        self.region.close()


@pytest.fixture
def port() -> int:
    """The port on which the prefill engine serves."""
    return free_port()


@pytest.fixture
def prefill(port: int) -> Iterator[Side]:
    """The prefill engine."""
    side = Side(serves=True, listen=f"127.0.0.1:{port}")
    yield side
    side.close()


@pytest.fixture
def decode() -> Iterator[Side]:
    """The decode engine."""
    side = Side(serves=False, request_peers=["127.0.0.0/8:1024-65535"])
    yield side
    side.close()


@pytest.fixture
def fetch(port: int, decode: Side) -> Callable[..., RequestContext]:
    """Begin a request of the decode engine that names the prefill engine."""

    def begin(name: str = "r", patience_s: float = NEVER_S, source: str = "") -> RequestContext:
        named = Source(source or f"127.0.0.1:{port}", digest(name))
        ctx = RequestContext(name, source=named, since=time.monotonic(), patience_s=patience_s)
        decode.manager.on_new_request(ctx, KEYS)
        return ctx

    return begin


def handed_over(prefill: Side, name: str = "r") -> RequestContext:
    """Begin a request of the prefill engine."""
    ctx = RequestContext(name, hand_over_s=NEVER_S, hand_over=digest(name))
    prefill.manager.on_new_request(ctx, KEYS)
    return ctx


def test_blocks_arrive_while_others_are_computed(
    prefill: Side, decode: Side, fetch: Callable[..., RequestContext]
) -> None:
    """Computed blocks are loaded at once while the request waits for the rest; fetched blocks are no longer kept."""
    source = handed_over(prefill)
    prefill.compute(KEYS[:2], source)
    ctx = fetch()
    eventually(lambda: decode.look(ctx) == ["hit"] * 2 + ["retry"] * 4, what="the first blocks")
    prefill.compute(KEYS[2:5], source)
    eventually(lambda: decode.look(ctx) == ["hit"] * 5 + ["retry"], what="the next blocks")
    prefill.compute(KEYS[5:], source)
    prefill.manager.on_request_finished(source)
    eventually(lambda: decode.look(ctx) == ["hit"] * 6, what="the last block")
    decode.prove(KEYS, ctx)
    eventually(lambda: prefill.held == 0, what="the end of the holds")
    assert prefill.primary.stats().ready == 6


def test_a_prefill_that_has_not_begun_is_waited_for(
    prefill: Side, decode: Side, fetch: Callable[..., RequestContext]
) -> None:
    """A decode request waits for a request that reached the prefill engine but whose blocks are still unknown there."""
    source = RequestContext("r", hand_over_s=NEVER_S, hand_over=digest("r"))
    prefill.manager.on_new_request(source)
    ctx = fetch()
    ctx.since -= 30  # The time allowed for its arrival is over.
    for _ in range(50):
        assert decode.look(ctx) == ["retry"] * 6
        time.sleep(0.002)
    prefill.manager.set_keys(source, KEYS)
    prefill.compute(KEYS, source)
    eventually(lambda: decode.look(ctx) == ["hit"] * 6, what="the blocks")


def test_a_lost_block_is_not_waited_for_because_another_request_waits(
    prefill: Side, decode: Side, fetch: Callable[..., RequestContext]
) -> None:
    """While the blocks of another hand-over are unknown, a lost block is a miss, not a block that may still come."""
    prefill.manager.on_new_request(RequestContext("other", hand_over_s=NEVER_S, hand_over=digest("other")))
    source = handed_over(prefill)
    prefill.compute(KEYS[:3], source)
    prefill.manager.on_request_finished(source)
    ctx = fetch()
    ctx.since -= 30  # The time allowed for the request's arrival is over.
    eventually(lambda: decode.look(ctx) == ["hit"] * 3 + ["miss"] * 3, what="the misses")
    # The pending request is still waited for, although the same blocks were looked up before.
    other = fetch("other")
    other.since -= 30
    for _ in range(50):
        assert decode.look(other) == ["hit"] * 3 + ["retry"] * 3
        time.sleep(0.002)
    prefill.manager.on_request_finished(RequestContext("other"))
    eventually(lambda: decode.look(other) == ["hit"] * 3 + ["miss"] * 3, what="the other's misses")


def test_a_hand_over_without_a_name_is_waited_for_a_second(
    prefill: Side, decode: Side, fetch: Callable[..., RequestContext]
) -> None:
    """Without a name from the routers, a request does not wait for unknown blocks."""
    prefill.manager.on_new_request(RequestContext("r", hand_over_s=NEVER_S))
    ctx = fetch()
    ctx.source = Source(ctx.source.address)
    ctx.since -= 30
    eventually(lambda: decode.look(ctx) == ["miss"] * 6, what="the misses")


def test_blocks_missing_after_the_prefill_are_misses(
    prefill: Side, decode: Side, fetch: Callable[..., RequestContext]
) -> None:
    """If the prefill ends without some blocks, they are misses, and the blocks that arrived remain valid."""
    source = handed_over(prefill)
    prefill.compute(KEYS[:3], source)
    ctx = fetch()
    eventually(lambda: decode.look(ctx) == ["hit"] * 3 + ["retry"] * 3, what="the first blocks")
    prefill.manager.on_request_finished(source)
    eventually(lambda: decode.look(ctx) == ["hit"] * 3 + ["miss"] * 3, what="the misses")
    decode.prove(KEYS[:3], ctx)


def test_source_without_the_request_costs_a_second(
    prefill: Side, decode: Side, fetch: Callable[..., RequestContext]
) -> None:
    """A source that never receives the request costs a second, and an unreachable one less."""
    ctx = fetch()
    begun = time.monotonic()
    eventually(lambda: decode.look(ctx) == ["miss"] * 6, what="the misses")
    assert time.monotonic() - begun >= 0.9
    gone = fetch("s", source=f"127.0.0.1:{free_port()}")
    eventually(lambda: decode.look(gone) == ["miss"] * 6, what="the misses")


def test_patience_ends(prefill: Side, decode: Side, fetch: Callable[..., RequestContext]) -> None:
    """The wait for a hanging prefill is bounded."""
    handed_over(prefill)
    ctx = fetch(patience_s=0.3)
    eventually(lambda: decode.look(ctx) == ["miss"] * 6, what="the misses")


def test_others_do_not_wait_for_a_prefill(
    prefill: Side, decode: Side, fetch: Callable[..., RequestContext], port: int
) -> None:
    """A request that names the engine only as a source computes missing blocks at once."""
    source = handed_over(prefill)
    prefill.compute(KEYS[:3], source)
    ctx = fetch(patience_s=0.0)
    eventually(lambda: decode.look(ctx) == ["hit"] * 3 + ["miss"] * 3, what="the misses")


def test_blocks_are_kept_for_each_engine_that_is_to_fetch_them(
    prefill: Side, decode: Side, fetch: Callable[..., RequestContext]
) -> None:
    """Blocks of two hand-overs stay until both have been fetched, beside others up to a quarter of the slots."""
    one, two = handed_over(prefill, "one"), handed_over(prefill, "two")
    prefill.compute(KEYS, one)
    prefill.compute(KEYS, two)
    for request in (one, two):
        prefill.manager.on_request_finished(request)
    ctx = fetch()
    eventually(lambda: decode.look(ctx) == ["hit"] * 6, what="the blocks")
    # Both fetches are needed: the second is still outstanding.
    assert prefill.held == len(KEYS)
    crowd = RequestContext("crowd")
    prefill.manager.on_new_request(crowd)
    plan = prefill.manager.prepare_store([b"crowd-%d" % number for number in range(12)], crowd)
    prefill.manager.complete_store(plan.keys, crowd, success=False)
    assert sum(key in prefill.primary for key in KEYS) == prefill.primary.slots // 4
