"""Pauses of an engine whose requests all wait for other engines."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult

from kvstore.vllm import KVStoreOffloadingSpec, steps
from tests.vllm.harness import Driver, key_of


class Condition(threading.Condition):
    """Records waits instead of waiting."""

    def __init__(self, lock: Any) -> None:
        super().__init__(lock)
        self.waits: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        """Record a wait."""
        self.waits.append(timeout)
        return False


class EngineCore:
    """The attributes of vLLM's engine that kvstore uses."""

    def __init__(self) -> None:
        self.input_queue: queue.Queue[str] = queue.Queue()
        self.input_queue.not_empty = self.condition = Condition(self.input_queue.mutex)
        self.pauses = steps.Pauses()


def test_only_an_idle_engine_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause is at most a share of the wait so far and bounded; work, a copy or a new request prevents it."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(steps.time, "monotonic", lambda: clock.now)
    engine = EngineCore()
    paused, waits = engine.pauses, engine.condition.waits

    def step(
        *, awaits: bool = True, other: bool = False, is_busy: bool = False, seconds: float = 0.1
    ) -> list[float | None]:
        before = len(waits)
        if awaits:
            paused.note_waiting(for_engine=True)
        if other:
            paused.note_waiting(for_engine=False)
        paused.end_step(is_busy=is_busy)
        clock.now += seconds
        return waits[before:]

    assert step() == [0.0]
    assert step() == [pytest.approx(0.005)]
    assert step(seconds=10.0) == [pytest.approx(0.01)]
    assert step() == [0.05]
    assert step(awaits=False) == []
    assert step() == [0.0], "a new wait"
    assert step(is_busy=True) == []
    assert step(other=True) == [], "another request waits for a tier"
    engine.input_queue.put("request")
    assert step() == []


def test_elsewhere_there_are_no_pauses() -> None:
    """Without vLLM's engine in the call stack nothing can end a pause, so there is none."""
    alone = steps.Pauses()
    alone.note_waiting(for_engine=True)
    alone.end_step(is_busy=False)


def test_an_engine_that_loads_does_not_pause() -> None:
    """The end of a copy to the device is noticed at once, and so is that of a step with tokens."""
    driver = Driver([{"type": "memory"}], spec_class=KVStoreOffloadingSpec)
    try:
        driver.store([key_of(1)])
        seen: list[bool] = []
        driver.manager._pauses = SimpleNamespace(
            note_waiting=lambda **_: None, end_step=lambda *, is_busy: seen.append(is_busy)
        )
        (scheduled,) = driver.engine.on_scheduled
        context = driver.request()
        scheduled(SimpleNamespace(num_scheduled_tokens={}))
        assert driver.lookup([key_of(1)], context) == [LookupResult.HIT]
        job = driver.begin_load([key_of(1)], context)
        scheduled(SimpleNamespace(num_scheduled_tokens={}))
        driver.copy(job)
        scheduled(SimpleNamespace(num_scheduled_tokens={}))
        scheduled(SimpleNamespace(num_scheduled_tokens={"r": 1}, total_num_scheduled_tokens=1))
        assert seen == [False, True, False, True]
    finally:
        driver.close()
