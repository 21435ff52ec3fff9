"""What the tests of all areas share: waiting for a condition, and randomness that can be repeated."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from kvstore.testing import eventually as _eventually
from kvstore.testing.seeds import SEED_VARIABLE, fresh_seed


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Return ``kvstore.testing.eventually``: waits until a predicate is true, up to ``timeout_s``."""
    return _eventually


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> Iterator[random.Random]:
    """Return a source of randomness; a failure prints the variable that repeats it."""
    seed = fresh_seed()
    # Captured by pytest, which shows it when the test fails.
    print(f"{request.node.name}: repeat it with {SEED_VARIABLE}={seed}")
    yield random.Random(seed)
