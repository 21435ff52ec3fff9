"""Engines that are killed while others run, and segments that several engines try to take at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.seeds import fresh_seed
from tests.disk.rig import segment_bytes
from tests.project.tree import ROOT
from tests.sizes import sized
from tests.torture.owners import ENGINES, SLOT

pytestmark = [pytest.mark.torture, pytest.mark.timeout(3600)]

KILLS = sized(10, full=100)
"""Number of kills of a writer whose slots another engine reads."""

RACES = sized(2, full=10)


def run(path: Path, blocks: int, **plan: Any) -> dict[str, Any]:
    """Run a plan of ``tests.torture.owners``, check what is left in the root, and return the report."""
    plan |= {"path": str(path), "blocks": blocks}
    command = [sys.executable, "-m", "tests.torture.owners", json.dumps(plan)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3500, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert not done.stderr, (report, done.stderr)
    assert segment_bytes(path) <= blocks * SLOT
    # Each engine removes the files of those that ended before it started.
    assert len(list(path.glob(".kvstore/engine.*"))) <= ENGINES, report
    return report


def test_engine_is_killed_while_another_one_reads_its_slots(tmp_path: Path) -> None:
    """Whenever an engine is killed, other engines read its blocks correctly, and no torn block is even delivered."""
    seed = fresh_seed()
    found = run(tmp_path, 32, kills=KILLS, seed=seed)
    print(f"{KILLS} kills: {found}")
    assert found["status"] == 0, (seed, found)
    assert found.get("wrong", 0) == 0, (seed, found)
    assert found.get("torn", 0) == 0, (seed, found)
    assert found["right"] > 5 * KILLS and found["words"] > KILLS, (seed, found)


def test_segments_raced_for_by_four_engines(tmp_path: Path) -> None:
    """Engines that start at once share the segments of ended ones, and another one finds all stored blocks."""
    seed = fresh_seed()
    found = run(tmp_path, 512, races=RACES, seed=seed)
    assert found["engines"] == 4 * RACES, (seed, found)
    assert (found["not_stored"], found["failed"]) == (0, 0), (seed, found)
    assert set(found) & {"MISS", "CORRUPT", "IO_ERROR", "torn", "wrong", "silent"} == set(), (seed, found)
    assert found["right"] > 4 * RACES, (seed, found)
