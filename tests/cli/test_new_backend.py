"""``kvstore new-backend``: the package that it writes passes its own tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.cli.in_process import run_here
from tests.project.tree import ROOT


@pytest.mark.program
def test_the_package_passes_its_own_tests(tmp_path: Path) -> None:
    """The suites of backends and tiers pass in a new package, which is registered under its name."""
    done = run_here("new-backend", "my_medium2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    package = tmp_path / "my_medium2"
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["kvstore.backends"] == {"my_medium2": "my_medium2:MyMedium2Backend"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=package, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert tests.returncode == 0 and " passed" in tests.stdout, tests.stdout + tests.stderr


@pytest.mark.parametrize("name", ["my-medium", "My", "file", "json", "../up", ""])
def test_a_name_that_cannot_be_imported_or_is_taken_is_refused(name: str, tmp_path: Path) -> None:
    """The error has one line, and nothing is written."""
    done = run_here("new-backend", name, "--out", str(tmp_path))
    assert done.returncode == 2 and done.stderr.startswith("kvstore: NAME is ") and not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """An existing directory is refused and unchanged."""
    (tmp_path / "mine").mkdir()
    done = run_here("new-backend", "mine", "--out", str(tmp_path))
    assert done.returncode == 2 and "File exists" in done.stderr and not list((tmp_path / "mine").iterdir())
