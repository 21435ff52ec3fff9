"""The tests that docs/comparison.md names exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_each_report_of_others_names_its_tests() -> None:
    """Every row has at least one test, and none is missing."""
    page = (ROOT / "docs/comparison.md").read_text()
    _, _, section = page.partition("## Reports about other caches, as tests")
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ") and "](" in line]
    assert len(rows) >= 10
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert named, row
        for path, name in named:
            assert re.search(rf"^(?:async )?def {name}\(", (ROOT / "tests" / path).read_text(), re.MULTILINE), name
