"""Durations of an engine's steps, measured from the calls of vLLM's scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from kvstore.vllm.steps import StepTimes


def output(new: dict[str, tuple[int, int]], cached: dict[str, tuple[int, int]]) -> Any:
    """Return a ``SchedulerOutput`` for requests, each with its tokens and the tokens before them."""
    counts = {name: count for name, (count, _) in {**new, **cached}.items()}
    return SimpleNamespace(
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=before) for name, (_, before) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[before for _, before in cached.values()]
        ),
    )


def test_steps_run_one_after_the_other() -> None:
    """A step scheduled while another runs starts at that one's end; empty steps and unknown ends are not counted."""
    seen: list[tuple[Sequence[tuple[int, int]], float]] = []
    steps = StepTimes(lambda prefills, seconds: seen.append((prefills, seconds)), 2)
    steps.end(0.5)
    steps.begin(output({"a": (100, 32)}, {"b": (50, 2000), "c": (1, 7)}), 1.0)
    steps.begin(output({}, {"a": (1, 132), "b": (1, 2050)}), 1.25)
    steps.end(2.0)
    steps.end(2.5)
    steps.begin(output({}, {}), 3.0)
    steps.end(3.25)
    steps.begin(output({"d": (64, 0)}, {}), 4.0)
    steps.end(4.5)
    assert seen == [([(100, 32), (50, 2000)], 1.0), ([], 0.5), ([(64, 0)], 0.5)]


def test_a_missed_end_shifts_no_later_step() -> None:
    """Each later step is measured with its own end, and steps with an unknown start are not measured."""
    seen: list[tuple[Sequence[tuple[int, int]], float]] = []
    steps = StepTimes(lambda prefills, seconds: seen.append((prefills, seconds)), 2)
    for number in range(100):
        steps.begin(output({"a": (100, number)}, {}), float(number))
        if number == 50:
            continue  # The end of step 49 is missed.
        if number:
            steps.end(number + 0.5)
    assert [prefills[0][1] for prefills, _ in seen] == [*range(49), *range(51, 99)]
    assert [seconds for _, seconds in seen[1:]] == [1.0] * 96
    for number in range(1000):
        steps.begin(output({"a": (100, 0)}, {}), float(number))
    assert len(steps._running) == 2
