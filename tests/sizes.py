"""Sizes of long tests: less in ``make test``, a part for each commit, all of it in the campaign."""

from __future__ import annotations

import os
from typing import Final

SIZE_VARIABLE: Final = "KVSTORE_TEST_SIZE"
"""Environment variable with the size of long tests: ``quick`` in ``make test``, ``full`` in the campaign."""


def sized(per_commit: int, *, full: int, quick: int | None = None) -> int:
    """Return how many steps a long test takes."""
    size = os.environ.get(SIZE_VARIABLE)
    if size == "quick" and quick is not None:
        return quick
    return full if size == "full" else per_commit
