"""Failed tests run once more: luck does not fail a run, a defect does, and both are printed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.tree import ROOT

pytestmark = pytest.mark.program

FAILS_ONCE = """
import pathlib, pytest
pytestmark = pytest.mark.torture  # Heavy tests are distributed by files.
@pytest.mark.parametrize("name", {names})
def test_it(name):
    seen = pathlib.Path(__file__).with_name(name.replace(" ", "-"))
    if not seen.exists():
        seen.touch()
        raise ValueError(f"{{name}} is not ready")
def test_good():
    pass
"""
FAILS_IN_FIXTURE = """
import pathlib, pytest
@pytest.fixture
def failing():
    yield
    seen = pathlib.Path(__file__).with_name("seen")
    if not seen.exists():
        seen.touch()
        raise ValueError("not closed")
def test_it(failing):
    pass
"""
KILLS_ITS_WORKER = """
import os, pathlib
def test_it():
    seen = pathlib.Path(__file__).with_name("seen")
    if not seen.exists():
        seen.touch()
        os._exit(1)
"""


def run(directory: Path, code: str, *options: str) -> tuple[int, str]:
    """Run a file of tests with a second chance, two at a time; return the exit status and the output."""
    shutil.copy(ROOT / "conftest.py", directory)
    (directory / "pytest.ini").write_text("[pytest]\nmarkers = torture\n heavy\n")
    (directory / "test_it.py").write_text(code)
    command = [sys.executable, "-m", "tests.second_chance", "-p", "xdist", "-n", "2", "--dist", "loadgroup", *options]
    # Other plugins are slow to load, and not needed.
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_test_that_fails_once_is_flaky(tmp_path: Path) -> None:
    """It is printed with its first failure, whatever its name has in it, and the run passes."""
    status, output = run(tmp_path, FAILS_ONCE.format(names=["a", "a b"]))
    assert status == 0, output
    for name in ("a", "a b"):
        assert f"flaky: test_it.py::test_it[{name}] (first failure: ValueError: {name} is not ready)" in output
    assert "2 failed, 1 passed" in output and "2 passed" in output


@pytest.mark.parametrize("code", [FAILS_IN_FIXTURE, KILLS_ITS_WORKER], ids=["fixture", "crash"])
def test_every_failure_of_one_test_has_a_second_chance(tmp_path: Path, code: str) -> None:
    """A failed fixture and the death of the test's process count like a failure of the test."""
    status, output = run(tmp_path, code)
    assert status == 0, output
    assert "flaky: test_it.py::test_it (first failure: " in output


def test_a_test_that_fails_twice_fails_the_run(tmp_path: Path) -> None:
    """A defect fails the run, and a flaky test beside it is printed as such."""
    code = FAILS_ONCE.format(names=["a"]) + "def test_bad():\n    assert False\n"
    status, output = run(tmp_path, code)
    assert status == 1, output
    assert "failed, and did not pass alone: test_it.py::test_bad" in output
    assert "flaky: test_it.py::test_it[a] " in output


def test_more_than_five_flaky_tests_fail_the_run(tmp_path: Path) -> None:
    """So much bad luck is a defect."""
    status, output = run(tmp_path, FAILS_ONCE.format(names=list("abcde")))
    assert status == 0, output
    status, output = run(tmp_path, FAILS_ONCE.format(names=list("ghijkl")))
    assert status == 1, output
    assert "6 flaky failures" in output


@pytest.mark.parametrize("code", ["def test_it(:\n", "raise ValueError\n"], ids=["syntax", "import"])
def test_a_broken_file_fails_the_run(tmp_path: Path, code: str) -> None:
    """A file without a test that could run has no second chance to pass."""
    status, output = run(tmp_path, code)
    assert status not in (0, 5), output


LEAKS = """
import pytest
left = []
@pytest.fixture(scope="module", autouse=True)
def nothing_is_left():
    yield
    assert not left
def test_leaking():
    left.append(1)
def test_last():
    pass
"""


@pytest.mark.parametrize(
    "code",
    [
        LEAKS,
        FAILS_ONCE.format(names=["a"]) + "def test_last():\n    pytest.exit('enough', returncode=1)\n",
        FAILS_ONCE.format(names=["a"]).replace("def test_good", "    pytest.skip()\ndef test_good"),
    ],
    ids=["teardown", "exit", "skip"],
)
def test_repeatable_errors_fail_the_run(tmp_path: Path, code: str) -> None:
    """An earlier test's leftovers, an early end, or a test that skips itself the second time are no luck."""
    status, output = run(tmp_path, code, "-n", "0")
    assert status not in (0, 5), output


def test_one_failure_with_many_users_is_one(tmp_path: Path) -> None:
    """A fixture of ten tests that fails once does not fail the run."""
    code = "import pathlib, pytest\n@pytest.fixture(scope='module')\ndef server():\n"
    code += "    seen = pathlib.Path(__file__).with_name('seen')\n"
    code += "    if not seen.exists():\n        seen.touch()\n        raise ValueError('no port')\n"
    code += "@pytest.mark.parametrize('number', range(10))\ndef test_it(number, server):\n    pass\n"
    status, output = run(tmp_path, code, "-n", "0")
    assert status == 0, output
    assert output.count("flaky: ") == 10


def test_a_run_without_tests_fails(tmp_path: Path) -> None:
    """A run that selects nothing, or has wrong arguments, does not pass."""
    assert run(tmp_path, "", "-q")[0] == 5
    assert run(tmp_path, "", "--no-such-option")[0] == 4
