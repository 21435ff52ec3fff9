"""The manager agrees with a reference model over many random steps."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvstore.eviction import POLICY_NAMES
from tests.sizes import sized
from tests.tiering.model import Model, perform

STEPS_MIN = sized(10_000, full=100_000)
STEPS_PER_RULE = 100
RULES_PER_EXAMPLE = 10


class ManagerMachine(RuleBasedStateMachine):
    """Byte programs, five bytes per step: cheap to generate, and they shrink."""

    steps = 0

    @initialize(eviction=st.sampled_from(POLICY_NAMES), counts=st.booleans())
    def start(self, eviction: str, counts: bool) -> None:
        """Start with an empty manager."""
        self.model = Model(eviction=eviction, counts=counts)

    @rule(program=st.binary(min_size=5 * STEPS_PER_RULE, max_size=5 * STEPS_PER_RULE))
    def run(self, program: bytes) -> None:
        """Run a program, checking every invariant after every step."""
        for at in range(0, len(program) - 4, 5):
            perform(self.model, *program[at : at + 5])
            self.model.check()
            ManagerMachine.steps += 1

    def teardown(self) -> None:
        """Let everything end, and check that no state is left."""
        if hasattr(self, "model"):
            self.model.quiesce()


@pytest.mark.timeout(300)
def test_manager_agrees_with_the_model() -> None:
    """Lookups, stores, loads, failures, evictions, resets, removals and tier deaths always follow the rules."""
    ManagerMachine.steps = 0
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
