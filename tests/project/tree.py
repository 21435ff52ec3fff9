"""The tree as seen by these tests: files under version control, modules, pages and their code blocks."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kvstore"
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".txt", ".sh", ".json", ".cfg", ".ini", ""}


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    skipped: bool
    """Whether a comment before the block marks it as not run."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def modules() -> list[Path]:
    """Return all modules of the package."""
    return sorted(PACKAGE.rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(path.read_text(), filename=str(path))


@functools.cache
def members_of_classes() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return methods and attributes, and base classes, of each class of the package by its name."""
    members: dict[str, set[str]] = defaultdict(set)
    bases: dict[str, set[str]] = defaultdict(set)
    for node in [node for module in modules() for node in ast.walk(parsed(module)) if isinstance(node, ast.ClassDef)]:
        for part in ast.walk(node):
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                members[node.name].add(part.name)
            elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                members[node.name].add(part.target.id)
            elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                members[node.name].add(part.attr)
        bases[node.name] |= {base.id for base in node.bases if isinstance(base, ast.Name)}
    return members, bases


def name_of(path: Path) -> str:
    """Return a file's path within the repository."""
    return path.relative_to(ROOT).as_posix()


def pages() -> list[Path]:
    """Return all documentation pages."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("bench/*.md"))]


def tracked_texts() -> list[Path]:
    """Return the text files under version control (all files, if there is no git)."""
    try:
        listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        paths = [ROOT / line for line in listing.splitlines()]
    except (OSError, subprocess.CalledProcessError):
        hidden = {".venv", ".git", "site"}
        paths = [path for path in ROOT.rglob("*") if not hidden & set(path.relative_to(ROOT).parts)]
    return [path for path in paths if path.is_file() and path.suffix in TEXT_SUFFIXES]


def code_blocks() -> list[CodeBlock]:
    """Return the fenced blocks of all pages."""
    return [block for page in pages() for block in _blocks_of(page)]


def _blocks_of(page: Path) -> list[CodeBlock]:
    blocks: list[CodeBlock] = []
    lines = page.read_text().splitlines()
    start: int | None = None
    language = indent = ""
    for number, line in enumerate(lines):
        fence = re.match(r"(\s*)```+\s*([\w+-]*)", line)
        if not fence:
            continue
        if start is None:
            start, indent, language = number, fence[1], fence[2]
        else:
            body = "\n".join(text.removeprefix(indent) for text in lines[start + 1 : number])
            before = next((text for text in reversed(lines[:start]) if text.strip()), "")
            blocks.append(CodeBlock(name_of(page), start + 1, language, body, "<!-- not run" in before))
            start = None
    return blocks


@functools.cache
def texts_of_the_code() -> str:
    """Return all strings in the package's code, one per line, with ``…`` for every inserted value."""
    texts = [_text_of(node) for module in modules() for node in ast.walk(parsed(module)) if isinstance(node, ast.expr)]
    return "\n".join(text for text in texts if text)


def _text_of(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        text = "".join(_text_of(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    else:
        return ""
    # Quoted values are usually quoted by repr(), which is not visible in the code's strings.
    return re.sub(r"'…'|\"…\"|%[srd]|%\.\d+f", "…", text)
