"""Seeds of checks: new in each run, shown by a failure, and set by an environment variable to repeat it."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

SEED_VARIABLE: Final = "KVSTORE_TEST_SEED"
"""Environment variable that repeats a run; a failure shows its value."""


class Seeded(Protocol):
    """Base of suites with a seed."""

    rng: random.Random  # Random generator; new for each check.


_S = TypeVar("_S", bound=Seeded)


def fresh_seed() -> int:
    """Return the seed of the environment; without one, a random seed in each call (1 to 2^32 - 1)."""
    return int(os.environ.get(SEED_VARIABLE, 0)) or random.SystemRandom().randrange(1, 1 << 32)


def with_seed(check: Callable[[_S], None]) -> Callable[[_S], None]:
    """Make a test from a check: it sets a fresh seed, and adds the seed to a failure as a note."""

    @functools.wraps(check)
    def test(self: _S) -> None:
        seed = fresh_seed()
        self.rng = random.Random(seed)
        try:
            check(self)
        except BaseException as error:
            error.add_note(f"Repeat it with {SEED_VARIABLE}={seed}.")
            raise

    return test
