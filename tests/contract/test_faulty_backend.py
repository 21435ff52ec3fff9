"""Fault injection follows its plan, and is otherwise transparent."""

from __future__ import annotations

import asyncio
import random
from typing import cast

import pytest

from kvstore.backends.base import Backend, RecordGeometry
from kvstore.backends.memory import MemoryBackend, MemoryConfig
from kvstore.errors import BackendUnavailableError, NoSpaceError
from kvstore.namespace import Namespace
from kvstore.testing import BackendTests, Fault, FaultKind, FaultPlan, FaultyBackend
from kvstore.testing.records import RecordMaker, Target
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome
from tests.contract.memory import MemorySuite

GEOMETRY = RecordGeometry(256, 4096)
NAMESPACE = Namespace({"test": "faults"})


class TestWithoutFaults(MemorySuite):
    """A wrapped correct backend keeps the contract, and its medium can be broken on purpose."""

    def plan(self) -> FaultPlan:
        """Return an empty plan."""
        return FaultPlan()

    async def make_backend(self) -> Backend:
        return FaultyBackend(await super().make_backend(), self.plan())

    async def reopen(self, backend: Backend) -> Backend:
        return FaultyBackend(await super().reopen(cast(FaultyBackend, backend).inner), self.plan())

    async def make_small_backend(self, capacity_bytes: int) -> Backend:
        return FaultyBackend(await super().make_small_backend(capacity_bytes), self.plan())

    async def break_medium(self, backend: Backend) -> bool:
        ops = ("put", "get", "exists", "delete", "probe")
        cast(FaultyBackend, backend).plan.add(*(Fault(op, FaultKind.ERROR, times=None) for op in ops))
        return True

    async def mend_medium(self, backend: Backend) -> None:
        cast(FaultyBackend, backend).plan.clear()


class TestWithDelays(TestWithoutFaults):
    """A slow medium keeps the contract too, and is cancelled in the middle of its calls."""

    def plan(self) -> FaultPlan:
        """Return a plan in which every tenth call takes a millisecond longer."""
        slow = [
            Fault(op, FaultKind.DELAY, times=None, probability=0.1, seconds=0.001) for op in ("put", "get", "exists")
        ]
        return FaultPlan(slow)


class Bench:
    """A faulty backend with ten blocks in it."""

    def __init__(self, *faults: Fault, seed: int = 7) -> None:
        self.plan = FaultPlan(faults, seed=seed)
        self.backend = FaultyBackend(MemoryBackend(MemoryConfig()), self.plan)
        self.maker = RecordMaker(NAMESPACE, GEOMETRY, random.Random(seed))
        self.values = {self.maker.key(): self.maker.payload() for _ in range(10)}

    async def open(self) -> Bench:
        """Open it and put the blocks; return self."""
        await self.backend.open(NAMESPACE, GEOMETRY)
        await self.put()
        return self

    async def put(self) -> list[Outcome]:
        """Put the blocks."""
        return list(await self.backend.put([self.maker.write(key, payload) for key, payload in self.values.items()]))

    async def get(self) -> tuple[list[Outcome], list[Target]]:
        """Get the blocks."""
        targets = [self.maker.target(key) for key in self.values]
        return list(await self.backend.get_into([target.read for target in targets])), targets

    async def intact(self) -> list[bool]:
        """Return which blocks are complete and right."""
        outcomes, targets = await self.get()
        return [
            outcome is Outcome.OK and self.is_right(target) for outcome, target in zip(outcomes, targets, strict=True)
        ]

    def is_right(self, target: Target) -> bool:
        """Return whether the read bytes verify as the block of the key, and equal it."""
        try:
            return self.maker.content(target) == self.values[target.key]
        except AssertionError:
            return False


@pytest.mark.parametrize("op", ["put", "get"])
@pytest.mark.parametrize(
    "kind", [FaultKind.FLIP_HEADER, FaultKind.FLIP_PAYLOAD, FaultKind.SHORT, FaultKind.MISDIRECT], ids=str
)
async def test_damage_hits_exactly_the_blocks_it_is_planned_for(op: str, kind: FaultKind) -> None:
    """The third and fourth block are damaged, which only verification detects; the others are right."""
    bench = await Bench(Fault(op, kind, at=3, times=2)).open()
    expected = [number not in (2, 3) for number in range(10)]
    assert await bench.intact() == expected
    # Damage on the medium is permanent, damage in transit is not.
    assert await bench.intact() == (expected if op == "put" else [True] * 10)
    assert bench.plan.injected == {kind: 2}
    assert bench.backend.stats().counters[f"injected_{kind.value}"] == 2


@pytest.mark.parametrize("outcome", [Outcome.IO_ERROR, Outcome.TIMEOUT, Outcome.REFUSED])
async def test_errors_are_outcomes_of_their_blocks(outcome: Outcome) -> None:
    """An ERROR fails the planned blocks with the planned outcome, and leaves an error text."""
    bench = await Bench(Fault("put", FaultKind.ERROR, at=2, outcome=outcome)).open()
    assert await bench.intact() == [number != 1 for number in range(10)]
    bench.plan.add(Fault("get", FaultKind.ERROR, at=10, times=None, outcome=outcome))
    outcomes, _ = await bench.get()
    assert outcomes == [Outcome.OK, Outcome.MISS, *[Outcome.OK] * 7, outcome]
    assert (await bench.get())[0] == [outcome] * 10
    assert bench.backend.last_error


async def test_a_full_medium() -> None:
    """NO_SPACE fails puts; for a whole call it is an exception."""
    bench = await Bench(Fault("put", FaultKind.NO_SPACE, times=5)).open()
    assert await bench.intact() == [False] * 5 + [True] * 5
    bench.plan.add(Fault("delete", FaultKind.NO_SPACE))
    with pytest.raises(NoSpaceError):
        await bench.backend.delete(list(bench.values))


async def test_lost_writes_and_deletes() -> None:
    """DROP reports OK without effect."""
    bench = Bench(Fault("put", FaultKind.DROP, times=2))
    await bench.backend.open(NAMESPACE, GEOMETRY)
    assert await bench.put() == [Outcome.OK] * 10
    assert await bench.intact() == [False] * 2 + [True] * 8
    bench.plan.add(Fault("delete", FaultKind.DROP))
    assert list(await bench.backend.delete(list(bench.values))) == [True] * 10
    assert await bench.intact() == [False] * 2 + [True] * 8


@pytest.mark.parametrize("op", ["open", "exists", "delete", "scan", "probe", "put", "get"])
async def test_whole_calls_fail(op: str) -> None:
    """A call planned to fail raises, once or for ever; after a single failure the next call works."""
    bench = await Bench().open()
    keys = list(bench.values)
    calls = {
        "open": lambda: bench.backend.open(NAMESPACE, GEOMETRY),
        "exists": lambda: bench.backend.exists(keys),
        "delete": lambda: bench.backend.delete(keys),
        "scan": lambda: anext(aiter(bench.backend.scan())),
        "probe": lambda: bench.backend.probe(),
        "put": lambda: bench.put(),
        "get": lambda: bench.get(),
    }
    bench.plan.add(Fault(op, FaultKind.RAISE, times=1 if op not in ("put", "get") else 10))
    with pytest.raises(BackendUnavailableError):
        await calls[op]()
    await calls[op]()
    bench.plan.add(Fault(op, FaultKind.RAISE, times=None))
    for _ in range(3):
        with pytest.raises(BackendUnavailableError):
            await calls[op]()


async def test_stalls_end_by_release_or_cancellation() -> None:
    """A stalled call continues when released, and releases its buffers when cancelled."""
    bench = await Bench().open()
    bench.plan.add(Fault("get", FaultKind.STALL, times=None))
    stalled = asyncio.ensure_future(bench.get())
    await eventually_async(lambda: bench.plan.stalled == 1)
    stalled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stalled
    assert bench.plan.stalled == 0
    stalled = asyncio.ensure_future(bench.get())
    await eventually_async(lambda: bench.plan.stalled == 1)
    bench.plan.clear()
    outcomes, _ = await stalled
    assert outcomes == [Outcome.OK] * 10


async def test_a_cleared_fault_stalls_nothing() -> None:
    """A call that is delayed when its faults are cleared does not stall afterwards, when no release would end it."""
    bench = await Bench().open()
    bench.plan.add(Fault("get", FaultKind.DELAY, seconds=0.05), Fault("get", FaultKind.STALL, at=2))
    call = asyncio.ensure_future(bench.get())
    await eventually_async(lambda: bench.plan.injected[FaultKind.DELAY] == 1)
    bench.plan.clear()
    outcomes, _ = await asyncio.wait_for(call, 30)
    assert outcomes == [Outcome.OK] * 10
    assert bench.plan.injected[FaultKind.STALL] == 1


async def test_a_seed_repeats_a_run() -> None:
    """The same plan over the same calls injects the same faults; another seed injects others."""

    async def run(seed: int) -> tuple[list[list[bool]], dict[FaultKind, int]]:
        kinds = (FaultKind.FLIP_PAYLOAD, FaultKind.ERROR, FaultKind.MISDIRECT, FaultKind.SHORT)
        bench = Bench(*(Fault("get", kind, times=None, probability=0.2) for kind in kinds), seed=seed)
        await bench.open()
        return [await bench.intact() for _ in range(10)], dict(bench.plan.injected)

    assert await run(11) == await run(11)
    assert (await run(11))[0] != (await run(12))[0]


def test_the_suite_passes_its_subjects_on() -> None:
    """The wrapper has all properties of the wrapped backend that a tier uses."""
    inner = MemoryBackend(MemoryConfig())
    outer = FaultyBackend(inner, FaultPlan())
    for name in ("name", "config_type", "alignment", "medium", "locality", "authoritative", "config"):
        assert getattr(outer, name) == getattr(inner, name), name
    assert issubclass(TestWithoutFaults, BackendTests)
