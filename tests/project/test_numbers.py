"""Numbers on several pages have one source: docs/performance.md."""

from __future__ import annotations

import re

import pytest

from tests.project.tree import ROOT

pytestmark = pytest.mark.repository

README = (ROOT / "README.md").read_text()
PERFORMANCE = (ROOT / "docs/performance.md").read_text()
COMPARISON = (ROOT / "docs/comparison.md").read_text()


def test_rows_of_the_readme_are_on_the_page_of_performance() -> None:
    """Each row with numbers in the section of numbers is a row there, too."""
    section = README.partition("\n## Numbers\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and re.search(r"\d", line)]
    assert len(rows) >= 2
    assert [row for row in rows if row not in PERFORMANCE.splitlines()] == []


def test_rates_in_the_readme_are_those_of_the_table_of_disks() -> None:
    """The range of rates over ``fs`` spans the table's column, and the lost time that of blocks of 2 MiB."""
    least, most = _found(r"moves (\S+) to (\S+) times as many bytes per second as `fs`", README)
    over = [float(number) for row in _rows("## The disk tier and vLLM's `fs` tier") for number in row[6].split(", ")]
    assert (float(least), float(most)) == (min(over), max(over))
    lost = _found(r"costs a running model (\S+) to (\S+) s for each GB, and `fs` nothing", README)
    rows = _rows("## Next to a model")
    at = next(i for i, row in enumerate(rows) if row[0] == "2 MiB")
    assert (rows[at][1], rows[at + 2][1]) == ("kvstore", "vLLM's `fs`")
    assert sorted(map(float, lost)) == sorted(float(rows[at][column]) for column in (3, 6))
    assert {float(rows[at + 2][column]) for column in (3, 6)} == {0.0}


def test_comparison_has_no_measured_numbers() -> None:
    """Its section on measurements refers to the page of performance."""
    section = COMPARISON.partition("\n## Measured\n")[2]
    assert "performance.md" in section and not re.search(r"\d\.\d", section)


def _found(pattern: str, text: str) -> tuple[str, ...]:
    found = re.search(pattern, " ".join(text.split()))
    assert found is not None, pattern
    return found.groups()


def _rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without its head."""
    table = re.search(r"\n\n(\|.*?)\n\n", PERFORMANCE.partition(f"\n{heading}\n")[2], re.DOTALL)
    assert table is not None, heading
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in table[1].splitlines()[2:]]
