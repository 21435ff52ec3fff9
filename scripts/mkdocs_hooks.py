"""Hooks of the documentation build."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

MARK = "<!-- the glossary of CONVENTIONS.md -->"
NUMBERS = "<!-- the numbers of README.md -->"
CHART = re.compile(r"<!-- chart (\S+): (.+) -->")
ROLE = re.compile(r":(?:class|meth|func|attr|data|exc|mod):<code>([^<]+)</code>")
IDENTIFIER = re.compile(r'id="(kvstore[\w.]*)"')
ROOT = Path(__file__).resolve().parents[1]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Insert the glossary of CONVENTIONS.md, the numbers of README.md and the existing charts."""
    markdown = markdown.replace(MARK, glossary()).replace(NUMBERS, numbers())
    return CHART.sub(lambda found: chart(*found.groups()), markdown)


def numbers() -> str:
    """Return the section of README.md with the measurements, with links as on a page."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Numbers\n")[2].partition("\n## ")[0]
    return "## Numbers\n" + text.replace("](docs/", "](")


def glossary() -> str:
    """Return the glossary's table."""
    text = (ROOT / "CONVENTIONS.md").read_text(encoding="utf-8")
    return text.partition("\n## Glossary\n")[2].partition("\n## ")[0].strip()


def chart(name: str, text: str) -> str:
    """Return the image of a chart in docs/images, or nothing if the file does not exist."""
    return f"![{text}](images/{name})" if (ROOT / "docs/images" / name).exists() else ""


def on_page_content(html: str, **_: Any) -> str:
    """Replace Sphinx roles of docstrings by their names, as links where one entry of the page has the name."""
    return ROLE.sub(lambda found: _reference(html, found[1]), html)


def _reference(html: str, target: str) -> str:
    """Return the HTML of a name in a docstring; ``~`` hides the module of a name that no entry describes."""
    path = target.removeprefix("~")
    name = path.rpartition(".")[2] if target != path else path
    ids = {found for found in IDENTIFIER.findall(html) if found == path or found.endswith(f".{path}")}
    return f'<a href="#{ids.pop()}"><code>{name}</code></a>' if len(ids) == 1 else f"<code>{name}</code>"
