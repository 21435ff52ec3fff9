"""Each system of bench/peers.py runs, with bench/hicache.py and bench/mooncake_ssd.py; each tool compares the bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.peers import GROUPS, Size, measure_group


@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", GROUPS)
def test_each_system_stores_and_loads(group: str, tmp_path: Path) -> None:
    """No system of a group fails, and each is compared with kvstore."""
    rows = list(measure_group(group, Size(128, 4, 2), 1, tmp_path))
    assert [row["failure"] for row in rows if "failure" in row] == []
    assert [(row["system"], row["op"]) for row in rows if row["kvstore_over"] > 0] == [
        (name, op) for op in ("store", "load") for name in GROUPS[group]
    ]
