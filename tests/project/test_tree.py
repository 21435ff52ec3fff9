"""The tree can be published: it has no local paths or tools, and its project file is correct."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import kvstore
from tests.project.scripts import load_script
from tests.project.tree import PACKAGE, ROOT, name_of, tracked_texts

pytestmark = pytest.mark.repository

# Assembled here, so that this file does not contain the texts that it searches for.
LOCAL = re.compile(
    "|".join(
        [
            r"/" + r"work/(main|shared|\.)",
            r"\.\./" + "shared",
            r"/" + r"root/",
            r"/" + r"home/\w",
            r"farm" + r"-(bench|studio)",
            r"issues" + r" show",
            r"py" + r"pi\.org",
            r"python" + r"hosted\.org",
            r"deb\." + r"debian\.org",
            r"registry\." + r"npmjs",
            r"(extra-|--)index" + r"-url",
        ]
    )
)


def _project() -> dict[str, object]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return dict(tomllib.load(file)["project"])


def test_nothing_local_is_named() -> None:
    """No file mentions a directory of one machine, a package registry, or a tool that readers don't have."""
    found = [
        f"{name_of(path)}:{number}: {line.strip()[:100]}"
        for path in tracked_texts()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if LOCAL.search(line)
    ]
    assert not found, "\n".join(found)


def test_only_our_distribution_is_installed() -> None:
    """No text recommends installing ``kvstore`` from a package index, where the name belongs to another project."""
    advice = re.compile(r"pip3? install[^`\n;&|]*(?<![\w/-])kvstore(?:\[[\w,]+\])?['\"]?(?=[\s`.]|$)", re.MULTILINE)
    assert advice.search("pip install -U 'kvstore[redis]'") and advice.search("`pip install kvstore`")
    assert not advice.search("pip install 'vllm-kvstore[redis]'") and not advice.search("pip uninstall kvstore")
    # The changelog quotes the advice of 0.1.
    texts = [path for path in tracked_texts() if path not in (Path(__file__), ROOT / "CHANGELOG.md")]
    found = [name_of(path) for path in texts if advice.search(path.read_text(errors="replace"))]
    assert not found, found


def test_version_stands_once() -> None:
    """The version of the package is that of the project file."""
    assert kvstore.__version__ == _project()["version"]


def test_entry_points_exist() -> None:
    """The objects of vLLM's entry points exist."""
    groups = _project()["entry-points"]
    assert isinstance(groups, dict)
    for target in groups["vllm.general_plugins"].values():
        module, _, function = target.partition(":")
        path = ROOT / Path(*module.split(".")).with_suffix(".py")
        assert re.search(rf"^def {function}\(", path.read_text(), re.MULTILINE), target


def test_package_is_typed() -> None:
    """Type checkers use kvstore's types."""
    assert (PACKAGE / "py.typed").is_file()


def test_changelog_has_this_version_or_an_unreleased_section() -> None:
    """The changelog has a section for the current tree."""
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in text or f"## [{kvstore.__version__}]" in text


def test_the_table_of_tests_is_current() -> None:
    """The table of tests/README.md equals the script's output; after a change, run scripts/make_tests_table.py."""
    script = load_script("make_tests_table")
    assert script.page() == script.PAGE.read_text()
