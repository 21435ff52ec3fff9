"""The documentation is correct: link targets exist, examples run, commands exist."""

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

import msgspec
import pytest
from typer.main import get_command

from kvstore.cli.app import bench_app, kvstore_app
from kvstore.cli.bench.plot import pictures_of
from kvstore.config import decode_config
from kvstore.registry import BACKENDS
from kvstore.types import MissCause
from tests.project.tree import ROOT, CodeBlock, code_blocks, members_of_classes, name_of, pages, texts_of_the_code

pytestmark = pytest.mark.repository

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"```.*?```", re.DOTALL)
REPOSITORY_PATH = re.compile(r"(?<![\w/.-])(?:examples|bench|scripts|docs|tests|requirements|\.ci)/[\w./-]*\w")
RUN_SECONDS_MAX = 240
_OF_VLLM = {"type", "backend", "module_path", "backpressure", "locality"}


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_links_have_existing_targets(page: Path) -> None:
    """Every relative link points to an existing file and heading."""
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
    """The Python blocks of a page run in sequence, in one program and an empty directory."""
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
    """Every tier on a page is valid: all options exist, with valid values, and an engine could start with it."""
    for tier in _tiers(json.loads(block.text)):
        options = {key: _given(key, value) for key, value in tier.items() if key not in _OF_VLLM}
        backend = BACKENDS.find(tier.get("backend", tier.get("type")))
        config = decode_config(backend.config_type, options, where=str(block))
        if not any(name.startswith("tls_") for name in options):  # The page's files are the reader's.
            backend(config).check()


@pytest.mark.parametrize("block", [b for b in code_blocks() if b.language in ("sh", "bash", "console")], ids=str)
def test_commands_have_these_options(block: CodeBlock) -> None:
    """Each ``kvstore`` and ``kvstore-bench`` command of a page exists, with the given options."""
    for words in _commands(block.text):
        command: Any = get_command({"kvstore": kvstore_app, "kvstore-bench": bench_app}[words[0]])
        known = {"--help", "--version"}
        for word in words[1:]:
            if word in getattr(command, "commands", {}):
                command = command.commands[word]
                known = {"--help"}
            elif word.startswith("--"):
                for parameter in command.params:
                    known.update(parameter.opts, parameter.secondary_opts)
                assert word.partition("=")[0] in known, f"{words}: {word}"
        if words[1:] and not words[1].startswith("-"):
            assert command.name == words[1] or words[1] == "bench", words


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_named_files_exist(page: Path) -> None:
    """Every repository path on a page exists."""
    text = page.read_text()
    missing = [path for path in sorted(set(REPOSITORY_PATH.findall(text))) if not _exists(path)]
    assert not missing, f"{name_of(page)}: {missing}"


def test_named_methods_exist() -> None:
    """Each method and attribute that docs/design.md names as ``Class.name`` exists in a class of the package."""
    members, bases = members_of_classes()

    def has(owner: str, name: str) -> bool:
        return name in members.get(owner, ()) or any(has(base, name) for base in bases.get(owner, ()))

    named = re.findall(r"\b([A-Z][a-z]\w+)\.(_?[a-z]\w+)\b", (ROOT / "docs/design.md").read_text())
    assert len(named) > 20
    assert [f"{owner}.{name}" for owner, name in named if not has(owner, name)] == []


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_make_targets_exist(page: Path) -> None:
    """Every ``make`` command on a page exists in the Makefile."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(), re.MULTILINE))
    assert named <= targets


def test_charts_of_pages_are_those_that_plot_draws() -> None:
    """A chart on a page is a chart of engines; its image is inserted once it has been drawn."""
    hooks = run_path(str(ROOT / "scripts/mkdocs_hooks.py"))
    row = {"bench": "vllm", "op": "restart", "system": "none", "ttft_s": 1.0, "tokens_per_s": 1.0}
    drawn = {f"{picture.name}.svg" for picture in pictures_of([row])}
    named = {name for page in pages() for name, _ in hooks["CHART"].findall(page.read_text())}
    assert named == drawn
    image = "![Layers](images/architecture.svg)"
    assert hooks["on_page_markdown"]("<!-- chart architecture.svg: Layers -->") == image
    assert hooks["on_page_markdown"]("<!-- chart none.svg: Nothing -->") == ""


def test_readme_gives_the_two_commands() -> None:
    """The README has 80 to 150 lines, the command to try kvstore, and the command to test it."""
    text = (ROOT / "README.md").read_text()
    assert 80 <= len(text.splitlines()) <= 150
    assert "make demo" in text
    assert "make test" in text
    assert "--kv-transfer-config" in text


def test_duration_of_the_demo_is_stated_consistently() -> None:
    """The same duration is stated in all places, and is three minutes at most."""
    program = (ROOT / "examples/vllm_restart.py").read_text()
    (minutes,) = set(re.findall(r"takes (\S+(?: \S+)? minutes) on two idle\s", program, re.IGNORECASE))
    assert minutes in ("two minutes", "three minutes", "two to three minutes")
    for page in ("README.md", "docs/getting-started.md", "Makefile", "CHANGELOG.md"):
        assert minutes in (ROOT / page).read_text(), page


@pytest.mark.parametrize("block", [b for b in code_blocks() if b.language == "text"], ids=str)
def test_diagrams_of_characters_are_not_cut(block: CodeBlock) -> None:
    """A block of text, whose lines are not broken, fits a page in a window of 1,280 pixels."""
    assert max(map(len, block.text.splitlines())) <= 78


def test_troubleshooting_quotes_the_code() -> None:
    """Every heading of the troubleshooting page quotes a message from the code (others may be a server's)."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    headings = re.findall(r"^### (`.+)$", page, re.MULTILINE)
    assert len(headings) >= 20
    texts = texts_of_the_code()
    # Messages with a part filled in at run time; short ones would match any text.
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
    """Return a value of an option; a test has no secrets from other sources."""
    if not isinstance(value, dict) or key == "epoch":
        return value
    if set(value) in ({"env"}, {"file"}):
        return "a secret of more than thirty-two characters"
    return {name: _given(name, each) for name, each in value.items()}


def _tiers(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects in a JSON value that are tiers of shipped backends."""
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
    """Yield the words of our commands in a block of shell, including nested commands."""
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
    # The pattern cuts shapes such as tests/<area>/test_*.py short; the rest is a directory.
    return (ROOT / path).exists()


@pytest.mark.parametrize("backend", BACKENDS.names())
def test_each_option_of_a_backend_is_explained(backend: str) -> None:
    """Each field of a configuration is on a page."""
    written = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    options = msgspec.structs.fields(BACKENDS.find(backend).config_type)
    assert [option.name for option in options if not re.search(rf"`\"?{option.name}\b", written)] == []


def test_each_metric_is_explained() -> None:
    """Each metric that an engine declares is on the page of metrics."""
    written = (ROOT / "docs" / "vllm.md").read_text()
    # Here, because make test collects this file in processes without vLLM.
    from kvstore.vllm.metrics import engine_metric_definitions, manager_metric_definitions, metric_definitions

    declared = {**metric_definitions(), **manager_metric_definitions(), **engine_metric_definitions()}
    short = {name: name.removeprefix("vllm:kvstore") for name in declared}  # A row may have several names.
    assert [name for name in declared if f"`{name}`" not in written and f"`{short[name]}`" not in written] == []


def test_each_cause_of_a_miss_is_explained() -> None:
    """docs/vllm.md has a row for every cause; the alert on tiers that are never read, a remedy for those that last."""
    for page, start, causes in (
        ("vllm.md", "## Why was a request not served from the cache?", set(MissCause)),
        ("troubleshooting.md", "### KVStoreNeverRead", set(MissCause) - {"expired", "no_room", "rate", "recovering"}),
    ):
        _, _, section = (ROOT / "docs" / page).read_text().partition(f"\n{start}\n")
        rows = re.findall(
            r"^\| (`\w+`(?:, `\w+`)*) \|", section.partition("\n## ")[0].partition("\n### ")[0], re.MULTILINE
        )
        assert causes <= set(re.findall(r"\w+", " ".join(rows))), page
