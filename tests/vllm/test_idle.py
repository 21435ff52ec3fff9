"""Metrics of an engine that makes no steps."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequestType

from kvstore.testing import eventually
from kvstore.vllm import KVStoreOffloadingSpec, manager, steps
from kvstore.vllm.steps import IdleWaker
from tests.vllm.harness import Driver, key_of

WAKE = (EngineCoreRequestType.WAKEUP, None)


class Engine:
    """A process of vLLM, as far as the waker finds it in the call stack."""

    def __init__(self) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()

    def start(self, make: Any) -> Any:
        return make()


@pytest.fixture(autouse=True)
def interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short interval."""
    monkeypatch.setattr(steps, "_INTERVAL_S", 0.01)


def test_an_answer_is_one_wake_up() -> None:
    """An idle engine gets one request for a step when a tier has an answer, and the next only after that step."""
    engine, tier = Engine(), SimpleNamespace(has_answers=False)
    waker: IdleWaker = engine.start(lambda: IdleWaker([tier]))  # type: ignore[list-item]
    try:
        time.sleep(0.1)  # Ten intervals.
        assert not waker.due
        tier.has_answers = True
        assert engine.input_queue.get(timeout=20) == WAKE
        assert waker.due
        for _ in range(3):
            assert engine.input_queue.empty()
            waker.note_step()
            assert engine.input_queue.get(timeout=20) == WAKE
    finally:
        waker.close()
    eventually(lambda: "kvstore-idle" not in {thread.name for thread in threading.enumerate()}, 20, "the thread's end")


def test_a_program_that_makes_the_steps_is_not_woken() -> None:
    """Without an engine's process no thread runs."""
    before = threading.active_count()
    waker = IdleWaker([SimpleNamespace(has_answers=True)])  # type: ignore[list-item]
    assert threading.active_count() == before and not waker.due


@pytest.mark.usefixtures("reports_at_once")
def test_an_idle_engine_reports_the_blocks_stored_last(tmp_path: Path) -> None:
    """The steps that the waker requests report the present gauges, and then the engine may rest."""
    engine = Engine()
    tier = {"type": "file", "path": str(tmp_path), "capacity": "64MiB"}
    driver: Driver = engine.start(lambda: Driver([tier], spec_class=KVStoreOffloadingSpec))
    try:
        driver.store([key_of(number) for number in range(12)])
        blocks = -1.0
        while blocks != 12:
            # As in the engine's loop: no step without a wake-up or work.
            assert engine.input_queue.get(timeout=20) == WAKE
            while driver.manager.has_pending_work():
                driver.step()
                report = driver.manager.get_stats()
                if report is not None:
                    (blocks,) = report.data["data"]["vllm:kvstore_blocks"].values()
    finally:
        driver.close()


@pytest.mark.parametrize(
    ("parameters", "labels"),
    [({"load": False}, ("all", "policy")), ({}, ("memory", "absent"))],
    ids=["policy", "absent"],
)
def test_the_misses_of_the_last_request_are_reported_at_its_end(
    parameters: dict[str, Any], labels: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Misses without any I/O are in the report of the step in which the engine's last request ends, not before."""
    monkeypatch.setattr(manager, "_REPORT_INTERVAL_S", 600.0)
    driver = Driver([{"type": "memory", "capacity": "64MiB"}], spec_class=KVStoreOffloadingSpec)
    ours = driver.manager
    try:
        requests = [driver.request(kv_transfer_params={"kvstore": parameters}) for _ in range(2)]
        reports = []
        ours.get_stats()
        for number, context in enumerate(requests):
            driver.lookup([key_of(number)], context)
            ours.prepare_store([], context)
        driver.settle()
        ours.get_stats()
        for context in requests:
            ours.on_request_finished(context)
            reports.append(ours.get_stats())
        assert reports[0] is None
        assert reports[1].data["data"]["vllm:kvstore_missed_blocks"][labels] == 2
    finally:
        driver.close()
