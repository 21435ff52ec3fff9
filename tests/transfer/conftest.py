"""The region of tests of transfers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.primary import PAGE_BYTES, Region
from tests.transfer.caches import random_bytes


@pytest.fixture
def region() -> Iterator[Region]:
    """Eight slots of one page, random."""
    with Region.create(8, PAGE_BYTES) as region:
        region.rows()[:] = random_bytes(np.random.default_rng(1), 8, PAGE_BYTES)
        yield region
