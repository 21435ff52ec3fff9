"""Sizes of long tests: a part for each commit, all of it in the campaign."""

from __future__ import annotations

import os
from typing import Final

FULL_VARIABLE: Final = "KVSTORE_TEST_FULL"
"""Environment variable that makes long tests run in full; the campaign sets it."""


def sized(per_commit: int, *, full: int) -> int:
    """Return how many steps a long test takes."""
    return full if os.environ.get(FULL_VARIABLE) else per_commit
