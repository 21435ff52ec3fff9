"""Checks that have to fail: some of what they look for needs luck, so they may try more than once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.testing.seeds import SEED_VARIABLE

TRIES_MAX = 20


def failure_of(check: Callable[[], None], kinds: tuple[type[BaseException], ...]) -> BaseException:
    """Return the error of a check that must fail at the latest when it is run for the twentieth time.

    A block that is lost, or bytes that are there for a moment, are met by chance; the seed of the environment counts
    for the first run only.
    """
    with pytest.MonkeyPatch.context() as patch:
        for _ in range(TRIES_MAX):
            try:
                check()
            except kinds as error:
                return error
            patch.delenv(SEED_VARIABLE, raising=False)
    raise AssertionError(f"passed {TRIES_MAX} times")
