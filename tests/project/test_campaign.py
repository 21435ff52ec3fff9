"""The campaign has a program and a row in its page for each goal, and the tests that its programs run exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.campaign import __main__ as campaign
from tests.campaign import mutants, suite
from tests.campaign.targets import TARGETS
from tests.project.tree import ROOT

pytestmark = pytest.mark.repository


def test_every_goal_has_a_program_and_a_row() -> None:
    """Each of R1 to R35 has one program and one row."""
    rows = re.findall(r"^\| (R\d+) \|", (ROOT / "docs" / "reliability.md").read_text(), re.MULTILINE)
    assert list(campaign.programs()) == rows == [f"R{number}" for number in range(1, 36)]


@pytest.mark.parametrize("goal", suite.GOALS)
def test_the_tests_of_a_goal_exist(goal: str) -> None:
    """Each test file of a goal exists, and each name after it is one of the file's tests."""
    for path, name in re.findall(r"(tests/\S+\.py)(?:::(\S+))?", suite.GOALS[goal]):
        assert (ROOT / path).is_file(), f"{goal} runs {path}"
        assert not name or f"def {name}(" in (ROOT / path).read_text(), f"{goal} runs {name} of {path}"


def test_mutants_are_made_of_modules_that_have_tests() -> None:
    """Each module listed for mutation testing exists, and so do the tests that must detect its mutants."""
    tests = {path for paths in mutants.modules().values() for path in paths}
    assert tests and not [path for path in tests if not (ROOT / path).exists()]


def test_an_unfinished_program_ends_with_its_children(tmp_path: Path) -> None:
    """A program that takes too long has failed; its log has the output so far, and none of its processes survives."""
    program = tmp_path / "endless.py"
    child = "import time; time.sleep(600)"
    program.write_text(
        f"import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}, {str(tmp_path)!r}])\n"
        f"print('child', child.pid, flush=True)\ntime.sleep(600)\n"
    )
    verdict, figure = campaign.run("R1", [str(program)], 1, 0, tmp_path / "log", limit_s=5)
    assert verdict == "FAIL" and figure.startswith("not finished after")
    found = re.search(r"child (\d+)", (tmp_path / "log").read_text())
    assert found is not None
    # Init may not have reaped it yet.
    status = Path(f"/proc/{found[1]}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("name", TARGETS)
def test_a_fuzz_target_takes_its_first_seed(name: str) -> None:
    """A target whose parser was renamed or changed fails here, not only in the next campaign."""
    TARGETS[name].run(TARGETS[name].seeds()[0])
