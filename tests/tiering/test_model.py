"""The manager agrees with a reference model over a hundred thousand random steps."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvstore.eviction import POLICY_NAMES
from tests.tiering.model import Model

STEPS_MIN = 100_000
STEPS_PER_RULE = 100
RULES_PER_EXAMPLE = 10


class ManagerMachine(RuleBasedStateMachine):
    """Programs of bytes, five a step: cheap to draw, so that a hundred thousand steps fit into CI, and they shrink."""

    steps = 0
    hedges_won = 0

    @initialize(eviction=st.sampled_from(POLICY_NAMES), prefetch=st.booleans(), counts=st.booleans())
    def start(self, eviction: str, prefetch: bool, counts: bool) -> None:
        """Begin with an empty manager."""
        self.model = Model(eviction=eviction, prefetch=prefetch, counts=counts)

    @rule(program=st.binary(min_size=5 * STEPS_PER_RULE, max_size=5 * STEPS_PER_RULE))
    def run(self, program: bytes) -> None:
        """Run a program, checking every invariant after every step."""
        for at in range(0, len(program) - 4, 5):
            perform(self.model, *program[at : at + 5])
            self.model.check()
            ManagerMachine.steps += 1

    def teardown(self) -> None:
        """Everything comes to rest, and nothing is left over."""
        if hasattr(self, "model"):
            self.model.quiesce()
            ManagerMachine.hedges_won += self.model.manager.stats().hedges.won


def perform(model: Model, what: int, a: int, b: int, c: int, d: int) -> None:
    """Do one step; frequent things have more numbers."""
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


@pytest.mark.timeout(300)
def test_manager_agrees_with_the_model() -> None:
    """Lookups, stores, loads, failures, evictions, resets, removals and tier deaths go as the rules say, always."""
    ManagerMachine.steps = ManagerMachine.hedges_won = 0
    run_state_machine_as_test(
        ManagerMachine,
        settings=settings(
            max_examples=STEPS_MIN // (STEPS_PER_RULE * RULES_PER_EXAMPLE) + 25,
            stateful_step_count=RULES_PER_EXAMPLE,
            deadline=None,
            print_blob=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert ManagerMachine.steps >= STEPS_MIN
    assert ManagerMachine.hedges_won > 0
