"""Hooks of the documentation build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MARK = "<!-- the glossary of CONVENTIONS.md -->"
ROOT = Path(__file__).resolve().parents[1]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the glossary, which stands once, in CONVENTIONS.md, where a page asks for it."""
    if MARK not in markdown:
        return markdown
    return markdown.replace(MARK, glossary())


def glossary() -> str:
    """Return the glossary's table."""
    text = (ROOT / "CONVENTIONS.md").read_text(encoding="utf-8")
    return text.partition("\n## Glossary\n")[2].partition("\n## ")[0].strip()
