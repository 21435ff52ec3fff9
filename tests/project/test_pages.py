"""What is written for people is true: links lead somewhere, examples run, commands exist."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.tree import ROOT, CodeBlock, code_blocks, name_of, pages, texts_of_the_code

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"```.*?```", re.DOTALL)
REPOSITORY_PATH = re.compile(r"(?<![\w/.-])(?:examples|bench|scripts|docs|tests|requirements|\.ci)/[\w./-]*\w")
RUN_SECONDS_MAX = 240


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file that exists, and a heading that exists in it."""
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert not broken, f"{name_of(page)}: {broken}"


@pytest.mark.parametrize("block", [b for b in code_blocks() if b.language == "python"], ids=str)
def test_python_is_valid(block: CodeBlock) -> None:
    """Every block of Python can be compiled."""
    compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("page", sorted({b.page for b in code_blocks() if b.language == "python" and not b.skipped}))
def test_python_runs(page: str, tmp_path: Path) -> None:
    """The blocks of Python on a page run, one after the other, in one program and an empty directory."""
    program = "\n\n".join(b.text for b in code_blocks() if b.page == page and b.language == "python" and not b.skipped)
    (tmp_path / "page.py").write_text(program)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "page.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS_MAX,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, f"{page}:\n{program}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("block", [b for b in code_blocks() if b.language == "json"], ids=str)
def test_json_is_valid(block: CodeBlock) -> None:
    """Every block of JSON can be parsed."""
    json.loads(block.text)


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_named_files_exist(page: Path) -> None:
    """A path of the repository that a page names exists."""
    text = page.read_text()
    missing = [path for path in sorted(set(REPOSITORY_PATH.findall(text))) if not _exists(path)]
    assert not missing, f"{name_of(page)}: {missing}"


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_make_targets_exist(page: Path) -> None:
    """A ``make`` command that a page gives is one that the Makefile has."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(), re.MULTILINE))
    assert named <= targets


def test_readme_gives_the_two_commands() -> None:
    """The README is 80 to 150 lines and tells how to see kvstore work and how to test it."""
    text = (ROOT / "README.md").read_text()
    assert 80 <= len(text.splitlines()) <= 150
    assert "make demo" in text
    assert "make test" in text
    assert "--kv-transfer-config" in text


def test_troubleshooting_quotes_the_code() -> None:
    """Every heading of the troubleshooting page quotes a text that the code can print (others may be a server's)."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    headings = re.findall(r"^### (`.+)$", page, re.MULTILINE)
    assert len(headings) >= 20
    known = texts_of_the_code().splitlines()
    unknown = [
        heading
        for heading in headings
        if not any(_can_be(text, pattern) for text in re.findall(r"`([^`]+)`", heading) for pattern in known)
    ]
    assert not unknown, "\n".join(unknown)


def _can_be(text: str, pattern: str) -> bool:
    """Tell whether a quoted text, or one that begins with it, is what a text of the code can become."""
    if text in pattern:
        return True
    if len(pattern.replace("…", "")) < 20:
        return False
    return re.fullmatch(re.escape(pattern).replace("…", ".*?"), text) is not None


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+\s+(.*?)\s*$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def _exists(path: str) -> bool:
    # Shapes such as tests/<area>/test_*.py are cut short by the pattern; what is left of them is a directory.
    return (ROOT / path).exists()
