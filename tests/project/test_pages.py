"""What is written for people is true: links lead somewhere, examples run, commands exist."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from typer.main import get_command

from kvstore.cli.app import bench_app, kvstore_app
from kvstore.cli.reporting.plots import pictures_of
from kvstore.config import decode_config
from kvstore.registry import BACKENDS
from tests.project.tree import ROOT, CodeBlock, code_blocks, name_of, pages, texts_of_the_code

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"```.*?```", re.DOTALL)
REPOSITORY_PATH = re.compile(r"(?<![\w/.-])(?:examples|bench|scripts|docs|tests|requirements|\.ci)/[\w./-]*\w")
RUN_SECONDS_MAX = 240
_OF_VLLM = {"type", "backend", "module_path", "backpressure", "locality"}


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


@pytest.mark.parametrize("block", [b for b in code_blocks() if b.language == "json"], ids=str)
def test_tiers_in_json_are_taken(block: CodeBlock) -> None:
    """What a page gives as a tier is one: every option is known, and has a value that can be used."""
    for tier in _tiers(json.loads(block.text)):
        options = {key: _given(key, value) for key, value in tier.items() if key not in _OF_VLLM}
        decode_config(BACKENDS.find(tier.get("backend", tier.get("type"))).config_type, options, where=str(block))


@pytest.mark.parametrize("block", [b for b in code_blocks() if b.language in ("sh", "bash", "console")], ids=str)
def test_commands_have_these_options(block: CodeBlock) -> None:
    """Each ``kvstore`` and ``kvstore-bench`` command of a page exists, and knows the options that it is given."""
    for words in _commands(block.text):
        command: Any = get_command({"kvstore": kvstore_app, "kvstore-bench": bench_app}[words[0]])
        known = {"--help", "--version"}
        for word in words[1:]:
            if word in getattr(command, "commands", {}):
                command = command.commands[word]
                known = {"--help"}
            elif word.startswith("--"):
                known |= {option for parameter in command.params for option in parameter.opts}
                assert word.partition("=")[0] in known, f"{words}: {word}"
        if words[1:] and not words[1].startswith("-"):
            assert command.name == words[1] or words[1] == "bench", words


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


def test_charts_of_pages_are_those_that_plot_draws() -> None:
    """A chart that a page names is one of engines; its image is inserted once it has been drawn."""
    hooks = run_path(str(ROOT / "scripts/mkdocs_hooks.py"))
    row = {"bench": "vllm", "op": "restart", "system": "none", "ttft_s": 1.0, "tokens_per_s": 1.0}
    drawn = {f"{picture.name}.svg" for picture in pictures_of([row])}
    named = {name for page in pages() for name, _ in hooks["CHART"].findall(page.read_text())}
    assert named == drawn
    image = "![Layers](images/architecture.svg)"
    assert hooks["on_page_markdown"]("<!-- chart architecture.svg: Layers -->") == image
    assert hooks["on_page_markdown"]("<!-- chart none.svg: Nothing -->") == ""


def test_readme_gives_the_two_commands() -> None:
    """The README is 80 to 150 lines and tells how to see kvstore work and how to test it."""
    text = (ROOT / "README.md").read_text()
    assert 80 <= len(text.splitlines()) <= 150
    assert "make demo" in text
    assert "make test" in text
    assert "--kv-transfer-config" in text


def test_the_demo_says_how_long_it_takes() -> None:
    """The same everywhere; three minutes at most."""
    program = (ROOT / "examples/vllm_restart.py").read_text()
    (minutes,) = set(re.findall(r"takes (\S+(?: \S+)? minutes) on two idle\s", program, re.IGNORECASE))
    assert minutes in ("two minutes", "three minutes", "two to three minutes")
    for page in ("README.md", "docs/getting-started.md", "Makefile", "CHANGELOG.md"):
        assert minutes in (ROOT / page).read_text(), page


def test_troubleshooting_quotes_the_code() -> None:
    """Every heading of the troubleshooting page quotes a text that the code can print (others may be a server's)."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    headings = re.findall(r"^### (`.+)$", page, re.MULTILINE)
    assert len(headings) >= 20
    texts = texts_of_the_code()
    # Texts with a part that is filled in at run time; short ones would match anything.
    filled = [
        re.compile(re.escape(text).replace("…", ".*?"))
        for text in set(texts.splitlines())
        if "…" in text and len(text.replace("…", "")) >= 20
    ]
    unknown = [
        heading
        for heading in headings
        if not any(
            text in texts or any(pattern.fullmatch(text) for pattern in filled)
            for text in re.findall(r"`([^`]+)`", heading)
        )
    ]
    assert not unknown, "\n".join(unknown)


def _given(key: str, value: Any) -> Any:
    """Return a value of an option; a secret that lies elsewhere is not there for a test."""
    if not isinstance(value, dict) or key == "epoch":
        return value
    if set(value) in ({"env"}, {"file"}):
        return "a secret of more than thirty-two characters"
    return {name: _given(name, each) for name, each in value.items()}


def _tiers(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects in a JSON value that are tiers of backends that ship with kvstore."""
    if isinstance(value, dict):
        if value.get("backend", value.get("type")) in BACKENDS.names():
            yield value
        else:
            for item in value.values():
                yield from _tiers(item)
    elif isinstance(value, list):
        for item in value:
            yield from _tiers(item)


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of the commands of ours in a block of shell, also of those within others."""
    lines = text.replace("\\\n", " ").splitlines()
    for line in lines:
        for part in re.split(r"\||\$\(|&&|;", line.removeprefix("$ ")):
            found = re.match(r"\s*(?:ssh \S+ )?(kvstore(?:-bench)?(?: .*)?)$", part.rstrip(' )"'))
            if found:
                with contextlib.suppress(ValueError):  # A quote that ends in another part.
                    yield shlex.split(found[1], comments=True)


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+\s+(.*?)\s*$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def _exists(path: str) -> bool:
    # Shapes such as tests/<area>/test_*.py are cut short by the pattern; what is left of them is a directory.
    return (ROOT / path).exists()
