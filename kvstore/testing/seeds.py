"""Seeds of checks: fresh in each run, named by each failure."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from typing import Protocol, TypeVar

from kvstore.testing.backend_harness import SEED_VARIABLE

__all__ = ["Seeded", "with_seed"]


class Seeded(Protocol):
    """What has checks with a seed.

    Attributes:
        rng: Set anew for each check.
    """

    rng: random.Random


_S = TypeVar("_S", bound=Seeded)


def with_seed(check: Callable[[_S], None]) -> Callable[[_S], None]:
    """Make a test of a check with a fresh seed; a failure is given a note that names it."""

    @functools.wraps(check)
    def test(self: _S) -> None:
        seed = int(os.environ.get(SEED_VARIABLE, 0)) or random.SystemRandom().randrange(1, 1 << 32)
        self.rng = random.Random(seed)
        try:
            check(self)
        except BaseException as error:
            error.add_note(f"Repeat it with {SEED_VARIABLE}={seed}.")
            raise

    return test
