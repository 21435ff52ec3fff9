"""Every test belongs to a level (``make test``, ``test-all``, ``test-versions``, ``lint``), and CI runs all of them."""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import tomllib
from collections.abc import Set

import pytest

from tests.project.tree import ROOT

pytestmark = pytest.mark.repository

LEVELS = ("test", "test-all", "test-versions", "lint")


@functools.cache
def marks() -> frozenset[str]:
    """Return the marks of the project."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        lines = tomllib.load(file)["tool"]["pytest"]["ini_options"]["markers"]
    return frozenset(line.partition(":")[0] for line in lines)


@functools.cache
def commands(level: str) -> str:
    """Return the commands of a target of the Makefile, which are not run."""
    return subprocess.run(["make", "-n", level], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def runs(level: str, marked: Set[str]) -> bool:
    """Return whether a level runs a test with these marks."""
    found = re.search(r'^.* -q .* -m (?:"([^"]+)"|(\w+)) ', commands(level), re.MULTILINE)
    assert found is not None, level
    # In this form a selection by marks is also an expression of Python.
    return bool(eval(found[1] or found[2], {mark: mark in marked for mark in marks()}))


def combinations() -> list[frozenset[str]]:
    """Return all sets of marks that a test can have."""
    return [frozenset(some) for count in range(len(marks()) + 1) for some in itertools.combinations(marks(), count)]


def test_every_test_has_a_level() -> None:
    """Whatever marks a test has, one of the levels runs it, and ``make test-all`` runs all of ``make test``."""
    for marked in combinations():
        assert any(runs(level, marked) for level in LEVELS), f"no level runs a test marked {sorted(marked)}"
        assert not runs("test", marked) or runs("test-all", marked), sorted(marked)


def test_files_of_walks_are_given_to_pytest() -> None:
    """``make test-versions`` only runs the files that it names: those with the mark ``walk``."""
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark." + "walk" in path.read_text()}
    assert {ROOT / name for name in re.findall(r"\btests/\S+\.py\b", commands("test-versions"))} == marked


@pytest.mark.parametrize("mark", sorted(marks()))
def test_ci_runs_every_mark(mark: str) -> None:
    """A level that ``.ci/run`` calls runs the tests with the mark."""
    lines = (ROOT / ".ci" / "run").read_text().replace("\\\n", " ").splitlines()
    called = {word for line in lines if re.match('part ".*" make ', line) for word in line.split('"')[2].split()}
    assert any(runs(level, {mark}) for level in called & set(LEVELS))


def test_make_test_names_the_marks_that_it_leaves_out() -> None:
    """Its last line has each of them, beside the command that runs it."""
    (line,) = re.findall(r'^echo "(.*)"; ', commands("test"), re.MULTILINE)
    others = {level: set(re.findall(r"\w+", text)) for text, level in re.findall(r"(.*?)\(make (\S+)\)", line)}
    for mark in marks():
        assert runs("test", {mark}) == (not any(mark in words for words in others.values())), mark
        assert all(runs(level, {mark}) for level, words in others.items() if mark in words), mark
