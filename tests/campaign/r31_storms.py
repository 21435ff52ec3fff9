"""R31: everything at once leaves each byte right and each slot accounted for.

Method: storms. In each, two managers over memory, disk and peer tiers with faults serve random requests: tenants,
policies, hints, hand-overs from one manager to the other, aborts, preemptions, resets, removals, late copies. Each load
and each block of the primary tiers is compared, also with the new content that a reset may bring; free slots hold a
canary, and at the end no job, request, pin or lent buffer is left.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import random
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, TypeVar

from kvstore.backends.base import RecordRead, RecordWrite
from kvstore.namespace import Namespace
from kvstore.primary.lending import Lender
from kvstore.primary.tier import PrimaryTier, SlotState
from kvstore.runtime.workers import to_the_end
from kvstore.tenants import Tenant, Tenants, tag_of
from kvstore.testing.faults import Fault, FaultKind, FaultPlan, FaultyBackend
from kvstore.tiering import TieringConfig, TieringManager
from kvstore.tiering.config import Backfill
from kvstore.tiering.policy import PARAMETERS
from kvstore.tiers import open_tier
from kvstore.types import BlockKey, LookupResult, Outcome, RequestContext, Source
from tests.campaign.program import failed, passed, rounds
from tests.peer.ports import free_port
from tests.torture.blocks import lent_by

_T = TypeVar("_T")

STORMS: Final = 1000
STEPS: Final = 400
SLOT_BYTES: Final = 4096
BLOCK_TOKENS: Final = 16
NAMESPACE: Final = Namespace({"suite": "storms"})
CANARY: Final = b"\xc7" * SLOT_BYTES
UNWRITTEN: Final = b"\xdd" * SLOT_BYTES
NAMES: Final = ("a", "b", "c", "")
FAMILIES: Final = [[b"%d-%02d" % (family, place) + b"k" * 12 for place in range(20)] for family in range(4)]
"""Blocks of prompts; requests of one family share a prefix."""

FAULTS: Final = [
    *(("get", kind) for kind in FaultKind if kind not in {FaultKind.NO_SPACE, FaultKind.DROP}),
    *(("put", kind) for kind in (FaultKind.DELAY, FaultKind.STALL, FaultKind.ERROR, FaultKind.NO_SPACE)),
    *(("put", kind) for kind in (FaultKind.FLIP_PAYLOAD, FaultKind.MISDIRECT, FaultKind.DROP)),
    *(("exists", kind) for kind in (FaultKind.DELAY, FaultKind.STALL, FaultKind.RAISE)),
    *(("delete", kind) for kind in (FaultKind.DROP, FaultKind.ERROR)),
]


class WrongError(Exception):
    """The storm found a defect."""


@lru_cache(4096)
def payload(key: BlockKey, weights: str) -> bytes:
    """Return the content of a block that an engine with these weights computes."""
    return random.Random(f"{key!r} {weights}").randbytes(SLOT_BYTES)


class ThreadedBackend(FaultyBackend):
    """A backend whose cancelled calls use their buffers to the end, like calls on threads."""

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        return await _to_its_end(super().put(writes))

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        return await _to_its_end(super().get_into(reads))


async def _to_its_end(call: Coroutine[Any, Any, _T]) -> _T:
    task = asyncio.ensure_future(call)
    await to_the_end(task)
    return task.result()


@dataclass(eq=False)
class Request:
    """A request of one engine."""

    ctx: RequestContext
    keys: list[BlockKey]
    state: str = "waiting"
    computed: int = 0
    deferred_at: float | None = None


@dataclass(eq=False)
class Copy:
    """A copy by a worker, which happens some steps later, also after a reset."""

    request: Request
    keys: Sequence[BlockKey]
    slots: Sequence[int]
    lane: int
    due: int
    is_load: bool
    weights: str
    is_void: bool = False


class Lanes:
    """Reports of the workers."""

    lanes = 4

    def __init__(self) -> None:
        self.counts = [[0, 0] for _ in range(self.lanes)]

    def ended(self, lane: int, loads: int, stores: int) -> bool:
        """Return whether so many loads and stores of a lane have ended."""
        return self.counts[lane][1] >= loads and self.counts[lane][0] >= stores


@dataclass(eq=False)
class Engine:
    """A manager, its tiers with faults, and the engine that drives it."""

    choose: random.Random
    stack: ExitStack
    root: Path
    tenants: Tenants | None
    peer: dict[str, Any]
    counts: Counter[str]
    live: dict[str, Request] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        choose, slots = self.choose, self.choose.choice([6, 10, 16, 32])
        self.memory = memoryview(mmap.mmap(-1, slots * SLOT_BYTES))
        self.memory[:] = CANARY * slots
        self.primary = PrimaryTier(self.memory, SLOT_BYTES, policy=choose.choice(["lru", "arc", "adaptive"]))
        self.weights, self.gets_weights = "", choose.random() < 0.3
        self.plans, tiers = [], []
        common = {"load_timeout": 1, "store_timeout": 0.5, "lookup_timeout": 0.3, "negative_ttl": "50ms"}
        common |= {"inflight_bytes": choose.choice([4, 16, 1000]) * SLOT_BYTES}
        common |= {"store_backlog_bytes": choose.choice([2, 8, 1000]) * SLOT_BYTES}
        kinds: list[dict[str, Any]] = [
            {"type": "memory", "capacity": SLOT_BYTES * choose.choice([12, 60, 2000])},
            {"type": "file", "path": str(self.root / "kv"), "capacity": "1MiB", "reserve": 0},
            {"type": "peer", "secret": "a secret of sixteen", **self.peer},
        ]
        lender = Lender(self.primary)
        for number, options in enumerate(choose.sample(kinds[:2], choose.randint(0, 2)) + kinds[2:]):
            self.plans.append(FaultPlan(seed=choose.getrandbits(32)))
            options |= {"label": f"t{number}", **common}
            faulty = choose.choice([FaultyBackend, ThreadedBackend])
            options["reset"] = "forget" if self.gets_weights else choose.choice(["forget", "keep"])
            tier = open_tier(
                {**options, "breaker_cooldown": "50ms"},
                primary=self.memory,
                slot_bytes=SLOT_BYTES,
                namespace=NAMESPACE,
                wrap_backend=partial(faulty, plan=self.plans[-1]) if options["type"] != "peer" else None,
                lender=lender if options["type"] == "peer" else None,
                tenants=self.tenants,
            )
            tiers.append(tier)
        self.tiers = tiers
        self.names = [tier.name for tier in tiers]
        self.lanes = Lanes() if choose.random() < 0.7 else None
        config = TieringConfig(
            allow=PARAMETERS,
            gate=choose.random() < 0.7,
            hedge=choose.random() < 0.7,
            promotion_share=choose.choice([0.2, 0.5, 1.0]),
            store_share=choose.choice([0.25, 1.0]),
            retain_share=choose.choice([0.25, 0.75]),
            wait_s_max=choose.choice([0.05, 0.3]),
            load_s_max=choose.choice([0.2, 1.0]),
            retain_s_max=0.2,
            backfill=choose.choice([True, False, Backfill(min_uses=1)]),
            events=choose.random() < 0.6,
            tokens_per_block=BLOCK_TOKENS,
            tenants=self.tenants,
        )
        self.manager = TieringManager(self.primary, tiers, config, reports=self.lanes)
        self.stack.callback(self.close)
        self._free: list[int] = []

    def begin(self, hand_over: bytes = b"", source: Source | None = None, family: int | None = None) -> None:
        """Start a request."""
        self._check_slots()
        choose = self.choose
        name, tag = choose.choice(NAMES), b""
        if self.tenants is not None:
            tag = tag_of(name, named=name in self.tenants.named)
        blocks = FAMILIES[choose.randrange(len(FAMILIES)) if family is None else family]
        keys = [tag + key for key in blocks[: choose.randint(1, len(blocks))]]
        self.counts["requests"] += 1
        more: dict[str, Any] = {"hand_over_s": 0.5, "hand_over": hand_over} if hand_over else {}
        if source is not None:
            more = {"source": source, "since": time.monotonic(), "patience_s": 0.5}
        ctx = RequestContext(f"q{self.counts['requests']}", self._policy(), tag=tag, **more)
        request = self.live[ctx.request_id] = Request(ctx, keys)
        ends = range(BLOCK_TOKENS, BLOCK_TOKENS * len(keys) + 1, BLOCK_TOKENS)
        self.manager.on_new_request(ctx)
        self.manager.set_keys(ctx, tuple(request.keys), ends=ends)

    def step(self) -> None:
        """Run a step of the scheduler and of the workers."""
        self._check_slots()
        self.steps += 1
        computed: list[tuple[int, int]] = []
        for request in self.choose.sample(list(self.live.values()), len(self.live)):
            if self.choose.random() < 0.01:
                self._finish(request)
            elif request.state == "waiting":
                self._look_up(request)
            elif request.state == "running":
                computed += self._compute(request)
        for copy in [copy for copy in self.copies if copy.due <= self.steps]:
            self._end(copy)
        self.manager.on_step_end()
        if computed:
            self.manager.note_step(computed, sum(tokens for tokens, _ in computed) * 2e-4 + 5e-4)
        if not self.steps % 20:
            self.manager.take_events()
        self._disturb()
        # Until the next step, in which the manager may give them away, nothing may write to free slots.
        self._free = [slot for slot in range(self.primary.slots) if self.primary.state_of(slot) is SlotState.FREE]
        for slot in self._free:
            self._write(slot, CANARY)

    def end(self) -> None:
        """Let everything end."""
        self._check_slots()
        for plan in self.plans:
            plan.clear()
        while self.copies:
            self._end(self.copies[0])
        if self.lanes is None:
            self.manager.on_copies_ended()
        for request in list(self.live.values()):
            self._finish(request)
        deadline = time.monotonic() + 30
        while (left := self._left()) and time.monotonic() < deadline:
            self.manager.on_step_end()
            time.sleep(0.005)
        if left:
            raise WrongError(f"left at the end: {left}")
        for flow in self.manager.stats().tiers:
            self.counts["from tiers"] += flow.loaded
            if flow.errors:
                raise WrongError(f"{flow.name} raised {flow.errors} exceptions")

    def close(self) -> None:
        """End the tiers."""
        for plan in self.plans:
            plan.clear()
        self.manager.close(5)
        for plan in self.plans:
            plan.release()

    def _left(self) -> dict[str, int]:
        stats = self.manager.stats()
        left = {"jobs": stats.jobs, "promoting": stats.promoting, "requests": stats.requests}
        left |= {"writing": stats.primary.writing, "abandoned": stats.primary.abandoned, "pinned": stats.primary.pinned}
        left |= {f"{name} of {tier.name}": count for tier in self.tiers for name, count in lent_by(tier).items()}
        return {name: count for name, count in left.items() if count}

    def _check_slots(self) -> None:
        keys = self.primary.keys()
        for key in keys:
            slot = self.primary.slot_of(key)
            if self.primary.lookup(key) is SlotState.READY and self._read(slot) != payload(key, self.weights):
                raise WrongError(f"slot {slot} of {key!r} has other bytes")
        for slot in self._free:
            if self._read(slot) != CANARY:
                raise WrongError(f"free slot {slot} was written")
        self._free = []

    def _policy(self) -> dict[str, Any]:
        choose = self.choose
        some: dict[str, list[Any]] = {
            "retain": [5, 90, {"priority": 30, "duration": 0.05, "after": 48}],
            "demote": [True, {"after": 64}],
            "forget": [True, {"after": 48}],
            "lazy": [True],
            "cpu": [False],
            "ttl": [0.05, 5],
            "min_uses": [2],
            "store": [False, 0.5, {"tokens": 64}],
            "load": [[], [choose.choice(self.names)]],
        }
        return {name: choose.choice(values) for name, values in some.items() if choose.random() < 0.1}

    def _look_up(self, request: Request) -> None:
        hits, waits = 0, False
        for key in request.keys:
            answer = self.manager.lookup(key, request.ctx)
            if answer is LookupResult.MISS:
                break
            waits |= answer is not LookupResult.HIT
            hits += not waits
        if waits:
            now = time.monotonic()
            request.deferred_at = request.deferred_at or now
            if now - request.deferred_at > 20:
                raise WrongError(f"{request.ctx} waits for 20 s")
            return
        request.deferred_at = None
        request.state = "running"
        if hits:
            slots = self.manager.prepare_load(request.keys[:hits], request.ctx)
            if slots is None:
                raise WrongError("hits of this step can't be loaded")
            self._copy(request, request.keys[:hits], slots, is_load=True)
            request.state, request.computed = "loading", hits

    def _compute(self, request: Request) -> list[tuple[int, int]]:
        choose, before = self.choose, request.computed
        if choose.random() < 0.03:  # Preempted.
            request.state, request.computed = "waiting", 0
            return []
        request.computed = min(len(request.keys), before + choose.randint(1, 4))
        offered = request.keys[0 if choose.random() < 0.3 else max(0, before - 1) : request.computed]
        plan = self.manager.prepare_store(offered, request.ctx)
        if plan is not None and plan.keys:
            for slot in plan.slots:
                self._write(slot, UNWRITTEN)
            self._copy(request, plan.keys, plan.slots, is_load=False)
        if request.computed == len(request.keys) and choose.random() < 0.5:
            self._finish(request)
        return [((request.computed - before) * BLOCK_TOKENS, before * BLOCK_TOKENS)]

    def _finish(self, request: Request) -> None:
        self.live.pop(request.ctx.request_id, None)
        self.manager.on_request_finished(request.ctx)

    def _copy(self, request: Request, keys: Sequence[BlockKey], slots: Sequence[int], *, is_load: bool) -> None:
        due = self.steps + self.choose.randrange(6)
        lane = self.manager.copy_lane
        self.copies.append(Copy(request, list(keys), list(slots), lane, due, is_load, self.weights))

    def _end(self, copy: Copy) -> None:
        self.copies.remove(copy)
        for key, slot in zip(copy.keys, copy.slots, strict=True):
            if not copy.is_load:
                self._write(slot, payload(key, copy.weights))
            elif not copy.is_void and self._read(slot) != payload(key, copy.weights):
                raise WrongError(f"slot {slot} has other bytes than those of {key!r}")
            else:
                self.counts["loaded"] += not copy.is_void
        if self.lanes is not None:
            self.lanes.counts[copy.lane][copy.is_load] += 1
        if copy.is_void:
            return
        if copy.is_load:
            self.manager.complete_load(set(copy.keys), copy.request.ctx)
            copy.request.state = "running" if copy.request.state == "loading" else copy.request.state
        else:
            self.manager.complete_store(set(copy.keys), copy.request.ctx, self.choose.random() < 0.95)

    def _disturb(self) -> None:
        choose, kind = self.choose, self.choose.random()
        if kind < 0.004:
            self.manager.reset(choose.choice([0.0, 0.05, 0.5]))
            self.counts["resets"] += 1
            if self.gets_weights:
                self.weights = f"{self.root.name} {self.counts['resets']}"
            for copy in self.copies:
                copy.is_void = True
            for request in self.live.values():
                request.state, request.computed = ("waiting" if request.state == "loading" else request.state), 0
            if self.lanes is None:
                while self.copies:
                    self._end(self.copies[0])
                self.manager.on_copies_ended()
        elif kind < 0.02:
            self.manager.remove(choose.sample(choose.choice(FAMILIES), 3))
        elif kind < 0.03 and self.tenants is not None:
            self.manager.forget_tenant(tag_of(choose.choice(NAMES), named=False))
        elif kind < 0.035:
            self.manager.restate_events()
        elif kind < 0.06:
            operation, fault = choose.choice(FAULTS)
            seconds, times = choose.choice([0.01, 0.1, 0.5]), choose.choice([1, 3, 10])
            choose.choice(self.plans).add(Fault(operation, fault, times=times, seconds=seconds, probability=0.5))
        elif kind < 0.08:
            choose.choice(self.plans).clear()

    def _write(self, slot: int, content: bytes) -> None:
        self.memory[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = content

    def _read(self, slot: int) -> bytes:
        return bytes(self.memory[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES])


def storm(seed: int, counts: Counter[str]) -> None:
    """Run one storm.

    Raises:
        WrongError: A byte or a slot is wrong, or something never ends.
    """
    choose, port = random.Random(seed), free_port()
    tenants = None
    if choose.random() < 0.5:
        named = {"a": Tenant(guaranteed=0.3, load_rate="100KB"), "b": Tenant(maximum=0.4)}
        tenants = Tenants(by="parameter", named=named, idle_s=0.05)
    with tempfile.TemporaryDirectory(prefix="storm-") as folder, ExitStack() as stack:
        listen = {"listen": f"127.0.0.1:{port}"}
        sides = []
        for name, peer in (("prefill", listen), ("decode", {"request_peers": ["127.0.0.0/8:1024-65535"]})):
            (Path(folder) / name).mkdir()
            sides.append(Engine(choose, stack, Path(folder) / name, tenants, peer, counts))
        prefill, decode = sides
        for number in range(STEPS):
            if len(prefill.live) + len(decode.live) < 12 and choose.random() < 0.4:
                name, family = b"%032d" % number, choose.randrange(len(FAMILIES))
                if choose.random() < 0.5:
                    prefill.begin(hand_over=name, family=family)
                    decode.begin(source=Source(f"127.0.0.1:{port}", name), family=family)
                else:
                    choose.choice(sides).begin()
            for side in sides:
                side.step()
            if choose.random() < 0.3:
                time.sleep(0.001)
        for side in sides:
            side.end()


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    total: Counter[str] = Counter()
    for first in rounds():
        for seed in range(first, first + STORMS):
            try:
                storm(seed, total)
            except WrongError as error:
                failed(f"storm {seed}: {error}")
            total["storms"] += 1
    if not total["from tiers"]:
        failed("no tier gave a block")
    passed(", ".join(f"{count} {what}" for what, count in total.items()))
