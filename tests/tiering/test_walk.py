"""The manager agrees with the reference model on random walks whose steps are all alike likely."""

from __future__ import annotations

import random

import pytest

from kvstore.eviction import POLICY_NAMES
from kvstore.testing.seeds import fresh_seed
from tests.tiering.model import Model
from tests.tiering.test_model import perform

WALKS = 100
STEPS = 500


@pytest.mark.timeout(300)
def test_manager_agrees_with_the_model_on_random_walks() -> None:
    """Fifty thousand steps of walks that hypothesis, which prefers small and repeated bytes, would hardly take."""
    start = fresh_seed()
    for seed in range(start, start + WALKS):
        chance = random.Random(seed)
        model = Model(eviction=chance.choice(POLICY_NAMES), prefetch=chance.random() < 0.5)
        for number in range(STEPS):
            step = [chance.randrange(256) for _ in range(5)]
            try:
                perform(model, *step)
                model.check()
            except AssertionError as error:
                error.add_note(f"seed {seed}, step {number}: {step}")
                raise
        model.quiesce()
