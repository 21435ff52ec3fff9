"""Checks that must fail: some defects show only by chance, so they may run several times."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.testing.seeds import SEED_VARIABLE

TRIES_MAX = 20


def failure_of(check: Callable[[], None], kinds: tuple[type[BaseException], ...]) -> BaseException:
    """Return the error of a check that must fail within twenty runs.

    A lost block, or bytes that are visible for a moment, are detected by chance; the seed of the environment applies
    to the first run only.
    """
    with pytest.MonkeyPatch.context() as patch:
        for _ in range(TRIES_MAX):
            try:
                check()
            except kinds as error:
                return error
            patch.delenv(SEED_VARIABLE, raising=False)
    raise AssertionError(f"passed {TRIES_MAX} times")
