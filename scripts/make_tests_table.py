#!/usr/bin/env python3
"""Writes the table of tests/README.md: for each package the test files that import it, directly or through helpers.

.venv/bin/python scripts/make_tests_table.py
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "tests" / "README.md"
BEGIN, END = "<!-- table: scripts/make_tests_table.py -->\n", "<!-- end -->\n"


def page() -> str:
    """Return the page with the table of the present tree."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + "\n".join(_table()) + "\n" + END + rest.partition(END)[2]


def _table() -> Iterator[str]:
    users: dict[str, set[Path]] = defaultdict(set)
    files = sorted(ROOT.glob("tests/**/test_*.py"))
    for file in files:
        for module in _imports(file):
            users[_package(module)].add(file)
    yield from ("| package | test files that import it |", "|---|---|")
    users.pop("kvstore/")  # Most tests import one of its modules.
    for package, found in sorted(users.items()):
        cells = []
        for folder in sorted({file.parent for file in found}):
            here = [file for file in found if file.parent == folder]
            # A folder stands for its files where most of them import the package.
            if 2 * len(here) > sum(file.parent == folder for file in files):
                cells.append(f"`{folder.relative_to(ROOT)}/`")
            else:
                cells += [f"`{file.relative_to(ROOT)}`" for file in sorted(here)]
        yield f"| `{package}` | {', '.join(cells)} |"


def _package(module: Path) -> str:
    """Return the package of a module: a folder of kvstore/ or of kvstore/backends/."""
    *folders, _ = module.relative_to(ROOT).parts
    return "/".join(folders[: 3 if folders[1:2] == ["backends"] else 2]) + "/"


@functools.cache
def _imports(file: Path) -> frozenset[Path]:
    """Return the modules of kvstore that a file of tests/ imports, itself or through others in tests/."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            place = ROOT.joinpath(*name.split("."))
            for module in (place.with_suffix(".py"), place / "__init__.py"):
                if module.is_file() and place.is_relative_to(ROOT / "kvstore"):
                    found.add(module)
                elif module.is_file() and place.is_relative_to(ROOT / "tests"):
                    found |= _imports(module)
    return frozenset(found)


if __name__ == "__main__":
    PAGE.write_text(page())
