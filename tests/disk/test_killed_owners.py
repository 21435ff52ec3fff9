"""Engines that are killed while others run, and directories that several engines try to adopt at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.seeds import fresh_seed
from tests.project.tree import ROOT
from tests.sizes import sized

pytestmark = [pytest.mark.torture, pytest.mark.timeout(3600)]

KILLS = sized(10, full=100)
"""Number of kills of a writer whose slots another engine reads."""

RACES = sized(2, full=10)


def run(**plan: Any) -> dict[str, Any]:
    """Run a plan of ``tests.torture.owners`` and return its report."""
    command = [sys.executable, "-m", "tests.torture.owners", json.dumps(plan)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3500, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert not done.stderr, (report, done.stderr)
    return report


def test_an_owner_is_killed_while_another_engine_reads_its_slots(tmp_path: Path) -> None:
    """Whenever the owner is killed, other engines read its blocks correctly, and no torn block is even delivered."""
    seed = fresh_seed()
    found = run(path=str(tmp_path), blocks=32, kills=KILLS, seed=seed)
    print(f"{KILLS} kills: {found}")
    assert found["status"] == 0, (seed, found)
    assert found.get("wrong", 0) == 0, (seed, found)
    assert found.get("torn", 0) == 0, (seed, found)
    assert found["right"] > 5 * KILLS and found["words"] > KILLS, (seed, found)
    owners = [path for path in tmp_path.glob("*/*") if path.is_dir()]
    # New engines adopt the directories of the killed ones.
    assert len(owners) <= 4, owners


def test_adoption_raced_by_four_engines(tmp_path: Path) -> None:
    """Engines that start at once each have a directory of their own, and each finds all stored blocks."""
    seed = fresh_seed()
    found = run(path=str(tmp_path), blocks=512, races=RACES, seed=seed)
    assert found["engines"] == 4 * RACES, (seed, found)
    assert (found["shared_directories"], found["not_stored"], found["failed"]) == (0, 0, 0), (seed, found)
    assert set(found) & {"MISS", "CORRUPT", "IO_ERROR", "torn", "wrong", "silent"} == set(), (seed, found)
    assert found["right"] > 4 * RACES, (seed, found)
    owners = [path for path in tmp_path.glob("*/*") if path.is_dir()]
    assert len(owners) <= 6, owners
