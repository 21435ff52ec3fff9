"""The rules of a TieringManager over plain dicts, and a driver that compares the manager with them at each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.primary.tier import SlotState
from kvstore.tiering import OffloadPolicy, StorePlan
from kvstore.types import BlockKey, JobResult, RemovalCause, RequestContext, TransferJob
from tests.tiering.engine import Engine, deadlines_of, key_of
from tests.tiering.fake_tier import ROW_BYTES, FakeTier, payload

SLOTS = 12
FAMILIES = 4
PREFIX = 6
POLICIES: list[dict[str, object]] = [
    {},
    {},
    {},
    {"store": False},
    {"store": 0.5},
    {"store": {"tokens": 3}},
    {"tiers": ["far"]},
    {"tiers": []},
    {"cpu": False},
    {"load": False},
    {"load": ["far"]},
    {"min_uses": 2},
    {"lazy": True},
    {"ttl": 3},
    {"retain": 50},
    {"lazy": True, "ttl": 3, "tiers": ["disk"]},
]
KEYS = [key_of(family * 10 + block) for family in range(FAMILIES) for block in range(PREFIX)]
WAIT_S = 2.0
LOAD_S = 4.0


@dataclass(eq=False)
class Copy:
    """A copy of the engine between device and primary tier, of blocks to their slots."""

    is_load: bool
    lane: int
    slots: dict[BlockKey, int]

    def __len__(self) -> int:
        return len(self.slots)


class Reports:
    """Ended loads and stores, by lane, as reported by the copying side."""

    lanes = 2

    def __init__(self) -> None:
        self.counts = [[0, 0] for _ in range(self.lanes)]

    def ended(self, lane: int, loads: int, stores: int) -> bool:
        """Return whether exactly this many copies have ended."""
        assert self.counts[lane][0] <= loads and self.counts[lane][1] <= stores
        return self.counts[lane] == [loads, stores]


@dataclass(eq=False)
class Request:
    """The model's state of a request."""

    ctx: RequestContext
    policy: OffloadPolicy
    keys: list[BlockKey]
    plan: Copy | None = None
    reads: Copy | None = None
    claims: set[BlockKey] = field(default_factory=set)
    failed: set[tuple[BlockKey, str]] = field(default_factory=set)
    wait_until: float | None = None
    finished: bool = False


class Model:
    """A manager under test, and the model of its state."""

    def __init__(self, *, eviction: str = "lru", counts: bool = True) -> None:
        self.reports = Reports() if counts else None
        self.engine = Engine(
            SLOTS,
            ["disk", "far"],
            eviction=eviction,
            promotion_share=0.5,
            store_share=0.5,
            retain_share=0.25,
            wait_s_max=WAIT_S,
            load_s_max=LOAD_S,
            reports=self.reports,
        )
        self.manager, self.primary, self.tiers = self.engine.manager, self.engine.primary, self.engine.tiers
        # State of each block that has a slot: "writing" (by an engine), "loading" (from a tier) or "ready".
        self.cpu: dict[BlockKey, str] = {}
        self.ends: dict[BlockKey, float] = {}  # Time at which the lifetime of a block ends.
        self.gone: set[BlockKey] = set()  # Blocks that expired or were removed, and have not been stored since.
        self.requests: dict[int, Request] = {}
        self.ended: dict[int, Request] = {}  # Requests that ended before their copies.
        # Unfinished copies voided by a reset, with the bytes that each load has to read.
        self.left_behind: list[tuple[Copy, dict[BlockKey, bytes]]] = []
        self.promised: set[BlockKey] = set()  # Hits of this step.
        self.deadlines: dict[int, float] = {}
        self.by_ctx: dict[RequestContext, Request] = {}
        self.loads: dict[BlockKey, Request] = {}
        self.jobs: dict[int, tuple[FakeTier, bool, TransferJob]] = {}
        self.void: set[int] = set()
        # Loads that hedge another, with its id; the manager needs their reports only to free the slots.
        self.hedges: dict[int, int] = {}
        self.reported: set[int] = set()
        self.sent: dict[str, list[BlockKey]] = {}
        self.dirty_before: set[BlockKey] = set()
        self.left: list[tuple[Sequence[BlockKey], RemovalCause]] = []
        """Blocks that left the primary tier since the last check, in order; events omit those stored again."""
        self.told: set[BlockKey] = set()
        """Blocks of the primary tier, according to events."""
        self.parts = self.engine.parts
        self.parts.hedges.blocks_max = SLOTS // 3
        self.parts.gate.p95_s = lambda tier, blocks: 0.0  # type: ignore[method-assign]
        log, note = self.parts.log, self.parts.log.primary

        def noted(keys: Sequence[BlockKey], cause: RemovalCause | None = None) -> None:
            if cause is not None:
                self.left.append((tuple(keys), cause))
            note(keys, cause)

        log.primary = noted  # type: ignore[method-assign]
        for tier in self.tiers:
            tier.on_submit, tier.on_report = self._submitted, self._reported

    def begin(self, number: int, policy: int, family: int, blocks: int, *, again: bool = False) -> None:
        """Start a request with a prefix of a family of prompts; copies of a request with the same id may be running.

        Args:
            number: Its id.
            policy: Its policy, by number.
            family: Its family of prompts, by number.
            blocks: Selects the number of blocks, and whether another engine will fetch them.
            again: Whether an unfinished request with the same id is left to the manager.
        """
        if not again:
            self.end(number)
        before = self.requests.pop(number, None) or self.ended.pop(number, None)
        keys = [key_of(family % FAMILIES * 10 + block) for block in range(1 + blocks % PREFIX)]
        hand_over_s = 60.0 if blocks % 8 == 0 else 0.0
        ctx = RequestContext(f"request-{number}", POLICIES[policy % len(POLICIES)], hand_over_s=hand_over_s)
        request = self.by_ctx[ctx] = self.requests[number] = Request(ctx, OffloadPolicy(), keys)
        if before is not None:
            request.plan, request.reads = before.plan, before.reads
            self._let_go(before)
        request.policy = self.manager.on_new_request(ctx, keys)

    def look(self, number: int, load: bool) -> None:
        """The scheduler looks up a request's prefix, and may load its ready blocks."""
        request = self.requests.get(number)
        if request is None:
            return
        hits: list[BlockKey] = []
        for key in request.keys:
            self._poll_first()
            expected = self._expected(key, request)
            answer = self.manager.lookup(key, request.ctx).value
            assert answer == expected, f"{key!r} for {request}: {answer}, expected {expected}"
            if answer == "hit":
                self.promised.add(key)
            self._apply_events()
            if answer == "miss":
                break
            if answer == "hit" and len(hits) == request.keys.index(key):
                hits.append(key)
        if load and hits:
            slots = self.manager.prepare_load(hits, request.ctx)
            assert slots is not None and request.reads is None
            request.reads = Copy(True, self.manager.copy_lane, dict(zip(hits, slots, strict=True)))
            request.claims.clear()
            self._extend(hits, request)

    def loaded(self, number: int) -> None:
        """The engine has finished reading a load."""
        request = self._found(number)
        if request is not None and request.reads is not None:
            self._report(request.reads)
            read, request.reads = request.reads, None
            self.manager.complete_load(list(read.slots), request.ctx)
            # Blocks with "cpu": false leave after their last reader.
            self._apply_events()

    def offer(self, number: int, start: int) -> None:
        """The engine offers blocks of a request."""
        request = self.requests.get(number)
        if request is None or request.plan is not None:
            return
        self._poll_first()
        offered = request.keys[start % len(request.keys) :]
        allowed = [key for key in offered if self._may_store(key, request)]
        request.claims.clear()
        plan = self.manager.prepare_store(offered, request.ctx)
        if not self._stores(request):
            assert plan == StorePlan((), (), ())
            return
        self._apply_events()
        ready = [key for key in allowed if self.cpu.get(key) == "ready"]
        self._extend(ready, request)
        if plan is None:
            assert self.engine.primary.stats().free < len(allowed)
            return
        assert list(plan.keys) == [key for key in allowed if key not in self.cpu]
        for key, slot in zip(plan.keys, plan.slots, strict=True):
            self.cpu[key] = "writing"
            self.primary.row(slot)[:] = b"\xdd" * ROW_BYTES
        if plan.keys:
            request.plan = Copy(False, self.manager.copy_lane, dict(zip(plan.keys, plan.slots, strict=True)))

    def stored(self, number: int, success: bool) -> None:
        """The engine has copied a store, or failed."""
        request = self._found(number)
        if request is None or request.plan is None:
            return
        self._report(request.plan)
        done, request.plan = list(request.plan.slots), None
        for key in done if success else ():
            slot = self.primary.slot_of(key)
            assert slot is not None
            self.primary.row(slot)[:] = payload(key)
        room = {flow.name: flow.storing + len(done) <= SLOTS // 2 and not flow.dead for flow in self._flows()}
        allowed = {tier.name for tier in self.tiers if self._goes_to(tier.name, request)} if success else set()
        plain = request.policy.min_uses == 1 and not request.policy.lazy
        self.sent = {tier.name: [] for tier in self.tiers}
        for key in done:
            self.cpu[key] = "ready"
            if not success:
                del self.cpu[key]
        if success:
            self._begin_lifetimes(done, request)
        state = self.parts.requests.by_id[request.ctx.request_id]
        self.manager.complete_store(set(done), request.ctx, success)
        for name, keys in self.sent.items():
            assert set(keys) <= (set(done) if name in allowed else set()), f"{name} was sent {keys}"
            if plain and name in allowed and all(room.values()) and not state.cut:
                assert keys == done, f"{name} was sent {keys} of {done}"

    def end(self, number: int) -> None:
        """A request ends, perhaps before its copies."""
        request = self.requests.pop(number, None)
        if request is not None:
            self.manager.on_request_finished(request.ctx)
            self._let_go(request)
            if request.plan is not None or request.reads is not None:
                self.ended[number] = request

    def late(self, index: int) -> None:
        """A copy from before a reset is made late, and ends."""
        if not self.left_behind:
            return
        copy, before = self.left_behind.pop(index % len(self.left_behind))
        for key, slot in copy.slots.items():
            if copy.is_load:
                assert self.primary.row(slot) == before[key], f"{key!r} was overwritten before it was read"
            else:
                self.primary.row(slot)[:] = b"\xcc" * ROW_BYTES
        self._report(copy)
        if not self.left_behind and self.reports is None:
            self.manager.on_copies_ended()

    def step(self, scheduled: int | None = None) -> None:
        """A step ends, in which a request may have started computing."""
        self._poll_first()
        request = None if scheduled is None else self.requests.get(scheduled)
        if request is not None:
            request.claims.clear()
        self.parts.hedges.budget = SLOTS
        self.manager.on_step_end([] if scheduled is None else [f"request-{scheduled}"])
        self.promised.clear()
        self._apply_events()
        now = self.engine.clock()
        for key in [key for key, end in self.ends.items() if end <= now]:
            del self.ends[key]
            self.gone.add(key)

    def work(self, tier: int, count: int, failing: int, index: int) -> None:
        """A tier runs some of its jobs."""
        bad = [key for number, key in enumerate(KEYS) if failing % 4 == 0 and (number + failing // 4) % 3 == 0]
        chosen = self.tiers[tier % len(self.tiers)]
        chosen.run(1 + count % 3, failing=bad, index=index % 3)
        assert all(content == payload(key) for key, content in chosen.blocks.items()), f"wrong bytes in {chosen.name}"

    def upset(self, tier: int, what: int, block: int) -> None:
        """A tier loses a block, answers RETRY for one, raises, or recovers."""
        chosen = self.tiers[tier % len(self.tiers)]
        key = KEYS[block % len(KEYS)]
        methods = ["lookup", "submit_load", "submit_store", "get_finished", "flush", "touch"]
        match what % 8:
            case 0 | 1 | 2:
                chosen.blocks.pop(key, None)
            case 3:
                chosen.unknown.add(key)
            case 4:
                chosen.raising.add(methods[block % len(methods)])
            case _:
                chosen.raising.clear()
                chosen.unknown.clear()

    def pass_time(self, tenths: int) -> None:
        """Advance the clock."""
        self.engine.clock.now += tenths / 10

    def drop(self, block: int) -> None:
        """Remove a block."""
        key = KEYS[block % len(KEYS)]
        self.manager.remove([key])
        self.ends.pop(key, None)
        self.gone.add(key)

    def reset(self, stuck: bool) -> None:
        """Reset everything; a stuck tier keeps its jobs."""
        self.tiers[0].drains = not stuck
        self._poll_first()
        ended = self.manager.reset(0.0)
        self.tiers[0].drains = True
        self.void |= set(self.jobs)
        self._apply_events(void=True)
        assert ended <= (not self.jobs), "it said that all I/O had ended"
        self.cpu.clear()
        self.loads.clear()
        self.promised.clear()
        for request in (*self.requests.values(), *self.ended.values()):
            for copy in (request.plan, request.reads):
                if copy is not None:
                    read = {key: bytes(self.primary.row(slot)) for key, slot in copy.slots.items()}
                    self.left_behind.append((copy, read))
            request.plan, request.reads, request.claims = None, None, set()
        self.ended.clear()

    def quiesce(self) -> None:
        """Let everything end, and check that no state is left."""
        while self.left_behind:
            self.late(0)
            self.check()
        for tier in self.tiers:
            tier.raising.clear()
            tier.unknown.clear()
        for number in list(self.requests):
            self.end(number)
        for number in list(self.ended):
            self.stored(number, success=True)
            self.loaded(number)
        self.ended.clear()
        for _ in range(20):
            for tier in self.tiers:
                tier.run()
            self.step()
            self.check()
        stats = self.manager.stats()
        assert (stats.jobs, stats.promoting, stats.requests) == (0, 0, 0), stats
        assert (stats.primary.pinned, stats.primary.writing, stats.primary.abandoned) == (0, 0, 0), stats
        assert all(flow.waiting == 0 for flow in stats.tiers), stats
        assert not self.jobs and len(self.reported) == len(set(self.reported))
        self.manager.remove(KEYS)
        cascades = self.parts.cascades
        assert not cascades.making_room and not cascades.unsent and not cascades.step(), "blocks that left are known"
        assert not self.primary.marks.ranks and deadlines_of(self.parts.retention)[0] == 0
        assert not any(map(self.primary.hand_overs.is_coming, KEYS)), "requests that ended promise blocks"

    def check(self) -> None:
        """Check the properties that hold after every step."""
        self._apply_events()
        stats = self.manager.stats()
        primary = stats.primary
        assert primary.free + primary.writing + primary.ready + primary.abandoned == SLOTS, primary
        pins = self._pins()
        slots = set()
        for key in KEYS:
            state = self.primary.lookup(key)
            said = self.cpu.get(key)
            assert (state is None) == (said is None), f"{key!r} is {state}, should be {said}"
            if state is None:
                continue
            assert (state is SlotState.READY) == (said == "ready"), f"{key!r} is {state}, should be {said}"
            slot = self.primary.slot_of(key)
            assert slot is not None and self.primary.state_of(slot) is state
            slots.add(slot)
            if state is SlotState.READY:
                assert self.primary.row(slot) == payload(key), f"{key!r} is readable and not whole"
                assert max(0, self.primary.pins[slot]) == pins[key], f"{key!r}: {self.primary.pins[slot]} {pins[key]}"
        late = {slot for copy, _ in self.left_behind for slot in copy.slots.values()}
        assert all(self.primary.state_of(slot) is SlotState.ABANDONED for slot in late) and not late & slots
        assert len(slots) == len(self.cpu) == primary.writing + primary.ready, "a slot belongs to one key"
        assert primary.pinned == sum(1 for key in pins if pins[key])
        for request in (*self.requests.values(), *self.ended.values()):
            for key, slot in request.reads.slots.items() if request.reads is not None else ():
                assert self.primary.row(slot) == payload(key), f"{key!r} was overwritten while it was read"
        assert stats.jobs == len(self.jobs)
        held = len(self.loads) + sum(len(request.claims) for request in self.requests.values())
        assert stats.promoting == held, f"{stats.promoting} {held}"
        owners = {*self.loads.values(), *(request for request in self.requests.values() if request.claims)}
        assert held <= SLOTS // 2 or len(owners) == 1, "the share is exceeded by one alone"
        assert all(any(ctx is request.ctx for request in self.requests.values()) for ctx in self._refused())
        assert all(flow.storing <= SLOTS // 2 for flow in stats.tiers)
        for link in self.parts.links:
            assert all(self.cpu.get(key) == "ready" for key in link.queue), f"{link.name}: {link.queue}"
        self.dirty_before = set(self.primary.marks.dirty)

    def _expected(self, key: BlockKey, request: Request) -> str:
        """Apply the rule of lookup, and record the loads that it starts."""
        if not request.policy.load or self._forbidden(key):
            return "miss"
        if key in self.cpu:
            return "hit" if self.cpu[key] == "ready" else "hit_pending"
        unknown = False
        for tier, flow in zip(self.tiers, self._flows(), strict=True):
            names = request.policy.load_tiers
            if (names is not None and tier.name not in names) or (key, tier.name) in request.failed or flow.dead:
                continue
            if "lookup" in tier.raising:
                continue
            if key in tier.unknown:
                unknown = True
            elif key in tier.blocks:
                return self._expected_promotion(key, request)
        return self._expected_wait(request) if unknown else "miss"

    def _expected_promotion(self, key: BlockKey, request: Request) -> str:
        full = self._is_full(request)
        if full or not self._has_room():
            if not full and self.parts.cascades.making_room:
                return self._expected_wait(request)
            mine = [other for other in self.loads.values() if other is request]
            return "miss" if mine or request.claims else self._expected_wait(request)
        request.wait_until = None
        self.cpu[key] = "loading"
        self.loads[key] = request
        return "hit_pending"

    def _is_full(self, request: Request) -> bool:
        share = len(self.loads) + sum(len(other.claims) for other in self.requests.values())
        mine = len(request.claims) + sum(owner is request for owner in self.loads.values())
        others_wait = any(ctx is not request.ctx for ctx in self._refused())
        return share >= SLOTS // 2 and (mine < share or others_wait)

    def _refused(self) -> list[RequestContext]:
        """Return the requests that wait for a place among the promotions."""
        return [state.ctx for state in self.parts.promotions._refused]

    def _expected_wait(self, request: Request) -> str:
        now = self.engine.clock()
        if request.wait_until is None:
            request.wait_until = now + WAIT_S
        return "retry" if now < request.wait_until else "miss"

    def _has_room(self) -> bool:
        if self.primary.stats().free:
            return True
        pins, exempt = self._pins(), set(self.primary.marks.dirty) | self.promised
        return any(said == "ready" and not pins[key] and key not in exempt for key, said in self.cpu.items())

    def _forbidden(self, key: BlockKey) -> bool:
        return key in self.gone or self.ends.get(key, float("inf")) <= self.engine.clock()

    def _stores(self, request: Request) -> bool:
        return request.policy.store and (request.policy.cpu or request.policy.tiers != ())

    def _may_store(self, key: BlockKey, request: Request) -> bool:
        position, policy = request.keys.index(key) + 1, request.policy
        if policy.store_tokens is not None:
            return position <= policy.store_tokens
        return policy.store_fraction is None or position <= policy.store_fraction * len(request.keys)

    def _goes_to(self, name: str, request: Request) -> bool:
        return request.policy.tiers is None or name in request.policy.tiers

    def _found(self, number: int) -> Request | None:
        return self.requests.get(number) or self.ended.get(number)

    def _let_go(self, request: Request) -> None:
        """After a request ended, or its id was reused, its unsubmitted loads are dropped."""
        request.finished = True
        request.claims.clear()
        for key in [key for key, owner in self.loads.items() if owner is request and not self._in_a_job(key)]:
            del self.loads[key], self.cpu[key]

    def _report(self, copy: Copy) -> None:
        if self.reports is not None:
            self.reports.counts[copy.lane][not copy.is_load] += 1

    def _flows(self) -> tuple[object, ...]:
        return self.manager.stats().tiers

    def _begin_lifetimes(self, keys: list[BlockKey], request: Request) -> None:
        for key in keys:
            self.gone.discard(key)
            self.ends.pop(key, None)
            if request.policy.ttl_s is not None:
                self.ends[key] = self.engine.clock() + request.policy.ttl_s

    def _extend(self, keys: list[BlockKey], request: Request) -> None:
        for key in keys:
            if key in self.ends:
                if request.policy.ttl_s is None:
                    del self.ends[key]
                else:
                    self.ends[key] = max(self.ends[key], self.engine.clock() + request.policy.ttl_s)

    def _poll_first(self) -> None:
        """Let the manager process finished jobs, so that the model sees the same state."""
        if not self.manager._polled:
            self.parts.poll()
            self._apply_events()

    def _pins(self) -> Counter[BlockKey]:
        pins: Counter[BlockKey] = Counter()
        for request in (*self.requests.values(), *self.ended.values()):
            pins.update(list(request.reads.slots) if request.reads is not None else ())
            pins.update(request.claims)
        promised = self.primary._promise_pins
        assert promised.keys() <= self.promised
        pins.update(list(promised))
        for job_id, (_, is_load, job) in self.jobs.items():
            if not is_load and job_id not in self.void:
                pins.update(job.keys)
        return pins

    def _in_a_job(self, key: BlockKey) -> bool:
        jobs = ((job_id, job) for job_id, (_, is_load, job) in self.jobs.items() if is_load)
        return any(key in job.keys for job_id, job in jobs if job_id not in self.void)

    def _load_of(self, key: BlockKey) -> int | None:
        """Return the load of a block that the manager relies on, other than one submitted just now."""
        loads = [job_id for job_id, (_, is_load, job) in self.jobs.items() if is_load and key in job.keys]
        return next((job_id for job_id in loads[:-1] if job_id not in self.void), None)

    def _submitted(self, tier: FakeTier, is_load: bool, job: TransferJob) -> None:
        assert job.job_id not in self.jobs and job.job_id not in self.reported
        assert len(set(job.keys)) == len(job.keys) == len(job.slots)
        self.jobs[job.job_id] = (tier, is_load, job)
        self.deadlines[job.job_id] = self.engine.clock() + LOAD_S
        first = self._load_of(job.keys[0]) if is_load else None
        if first is not None:
            other, _, theirs = self.jobs[first]
            assert other is self.tiers[0] and tier is self.tiers[1] and theirs.ctx is job.ctx
            assert list(theirs.keys) == list(job.keys) and not set(theirs.slots) & set(job.slots)
            self.hedges[job.job_id] = first
            self.void.add(job.job_id)
            return
        if not is_load:
            self.sent.setdefault(tier.name, []).extend(job.keys)
        elif "submit_load" in tier.raising:
            # The manager abandons the load, and needs its report only to free the slots.
            self.void.add(job.job_id)
            for key in job.keys:
                del self.loads[key], self.cpu[key]
                self.by_ctx[job.ctx].failed.add((key, tier.name))

    def _reported(self, tier: FakeTier, is_load: bool, job: TransferJob, result: JobResult) -> None:
        assert job.job_id not in self.reported, "reported twice"
        self.reported.add(job.job_id)
        del self.jobs[job.job_id]
        first = self.hedges.pop(job.job_id, None)
        if first is not None and result.success and first in self.jobs and first not in self.void:
            self.void.add(first)
        elif not is_load or job.job_id in self.void:
            return
        request = self.by_ctx[job.ctx]
        for key in job.keys:
            del self.loads[key]
            if key in result.successful_keys:
                self.cpu[key] = "ready"
                if not request.finished:
                    request.claims.add(key)
            else:
                del self.cpu[key]
                request.failed.add((key, tier.name))

    def _apply_events(self, *, void: bool = False) -> None:
        """Apply removals from the primary tier; each block must have been evictable."""
        self._apply_overdue()
        for event in self.manager.take_events():
            if event.tier == "cpu":
                (self.told.update if event.cause is None else self.told.difference_update)(event.keys)
        ready = {key for key in KEYS if self.primary.lookup(key) is SlotState.READY}
        assert self.told.intersection(KEYS) == ready, "events state other blocks than those of the primary tier"
        left, self.left = self.left, []
        for keys, cause in left:
            for key in keys:
                if key not in KEYS or void:
                    continue
                assert self.cpu.pop(key) == "ready", f"{key!r} left and was not ready"
                assert not self._pins()[key], f"{key!r} left ({cause}) and was pinned"
                assert key not in self.promised, f"{key!r} left ({cause}) in the step of its hit"
                if cause is RemovalCause.EVICTED:
                    assert key not in self.dirty_before, f"{key!r} was dirty"

    def _apply_overdue(self) -> None:
        """Apply the loads that the manager has abandoned; each must be overdue."""
        for open_job in self.parts.jobs:
            job = open_job.transfer
            if open_job.abandoned and job.job_id not in self.void:
                tier, is_load, _ = self.jobs[job.job_id]
                assert is_load and self.deadlines[job.job_id] <= self.engine.clock(), "given up before its time"
                self.void.add(job.job_id)
                for key in job.keys:
                    del self.loads[key], self.cpu[key]
                    self.by_ctx[job.ctx].failed.add((key, tier.name))


def perform(model: Model, what: int, a: int, b: int, c: int, d: int) -> None:
    """Do one step; more numbers stand for frequent steps."""
    request = a % 5
    match what % 32:
        case 0 | 1 | 2 | 3:
            model.begin(request, b, c, d, again=d >= 192)
        case 4 | 5 | 6 | 7 | 8:
            model.look(request, load=False)
        case 9 | 10 | 11:
            model.loaded(request)
            model.look(request, load=b % 4 > 0)
        case 12 | 13 | 14 | 15:
            model.offer(request, b % 3)
        case 16 | 17 | 18 | 19:
            model.stored(request, success=b % 5 > 0)
        case 20:
            model.end(request)
        case 21 | 22 | 23 | 24:
            model.step(b % 5 if c % 4 == 0 else None)
        case 25 | 26 | 27 | 28:
            model.work(a, b, c, d)
        case 29:
            model.upset(a, b, c)
        case 30:
            model.pass_time(a % 16)
        case _:
            if b % 8 == 0:
                model.reset(stuck=c % 2 == 0)
            elif b % 8 < 4:
                model.late(c)
            else:
                model.drop(c)
