"""Writer processes that are killed at random: the blocks they leave are right, and their directories are adopted."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.testing.seeds import fresh_seed
from tests.sizes import sized
from tests.torture.blocks import Client
from tests.torture.plan import run_plan

pytestmark = [pytest.mark.torture, pytest.mark.timeout(1000)]

KILLS = sized(50, full=500)


def test_kills_of_3_writers_in_one_root(tmp_path: Path) -> None:
    """After many SIGKILLs no wrong block was read, few directories are left, and the capacity was kept."""
    seed = fresh_seed()
    root = tmp_path / "kv"
    config = {"backend": "file", "path": str(root), "capacity": "4MiB", "reserve": 0}
    report = run_plan(config=config, writers=3, universe=400, kills=KILLS, words=8, seed=seed)
    assert report["kills"] == KILLS, (seed, report)
    assert report["wrong"] == 0, (seed, report)
    assert report["errors"] == 0, (seed, report["stderr"], report)
    assert report["stored"] > 2 * KILLS, (seed, report)
    assert report["hits"] > 2 * KILLS, (seed, report)
    # Writers adopt the directories of killed ones instead of creating more and more.
    owners = [path for path in root.glob("*/*") if path.is_dir() and path.parent.name != ".kvstore"]
    assert len(owners) <= 8, owners
    assert sum(path.stat().st_size for path in root.rglob("*.seg")) <= 4 << 20
    client = Client({**config, "load_timeout": 60})
    for start in range(0, 400, 8):
        numbers = range(start, start + 8)
        assert client.wrong(numbers, client.load(numbers)) == [], seed
    client.close()
