"""All output of the commands, and the only use of rich: tables on stdout, progress on stderr if that is a terminal.

Sizes, latencies and ages are rounded to a few digits and a unit; :mod:`kvstore.quantity` is exact.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from kvstore.quantity import ByteSize

Frame = Table | Text
"""A part of the contents of a :class:`Screen`."""

_WIDTH_UNKNOWN = 80
"""Width of a terminal that does not report one."""

_FOLDED_WIDTH_MIN = 10
"""Minimum width of a column that folds."""

_WIDTH_ELSEWHERE = 10_000
"""Width for a pipe or file: each row is one line, with all columns."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    key: str  # Key of the row's value.
    title: str
    rank: int = 0  # Columns with the highest rank are dropped first if there is not enough room; 0 always stays.
    left: bool = False  # Whether it is aligned left (text), not right (numbers).
    style: str = ""  # Colour, on a terminal with colours.
    folds: bool = False  # Whether its cells wrap if there is not enough room; the other columns then do not wrap.
    healthy: tuple[str, ...] = ()
    """Its values in normal operation; others are red on a terminal with colours. Empty: none is red."""


def stdout_width() -> int:
    """Return the width of stdout: ``COLUMNS``, or that of the terminal, or 10 000 for a pipe or file."""
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    if sys.stdout.isatty():
        return os.get_terminal_size(sys.stdout.fileno()).columns or _WIDTH_UNKNOWN
    return _WIDTH_ELSEWHERE


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], *, title: str = "") -> None:
    """Print rows, without empty columns and, in narrow terminals, without those of the highest rank.

    Before a column is dropped, wrapping columns become narrower. A missing value is an empty cell; :func:`cell` formats
    the others.
    """
    width = stdout_width()
    head = [Text(printable(title), style="bold")] if title else []
    print_frame([*head, table_of(rows, columns, width)], width)


def table_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], width: int) -> Table:
    """Return rows as a table, at most ``width`` wide if possible; see :func:`print_table`."""
    shown = [column for column in columns if any(row.get(column.key) is not None for row in rows)]
    while len(shown) > 1 and _width(rows, shown) > width and (most := max(column.rank for column in shown)):
        last = [column for column in shown if column.rank == most][-1]
        shown.remove(last)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", show_edge=False)
    for column in shown:
        justify = "left" if column.left else "right"
        stays = any(each.folds for each in shown) and not column.folds
        table.add_column(column.title, justify=justify, style=column.style or None, overflow="fold", no_wrap=stays)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(_text(cell(row.get(column.key)), column) for column in shown))
    return table


def line_of(text: str, style: str = "") -> Text:
    """Return one line of a frame, truncated if it does not fit."""
    return Text(printable(text).replace("\n", "\\n"), style=style, overflow="ellipsis", no_wrap=True)


def printable(text: str) -> str:
    """Replace unprintable characters, which a terminal would interpret, by escapes.

    Names on a medium and messages of servers are untrusted: control characters could overwrite earlier output, and
    bidirectional marks could disguise text. The escapes are those of JSON, so JSON keeps its meaning.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else _escaped(each) for each in text)


def print_line(text: str) -> None:
    """Write one line to stdout, with escapes."""
    sys.stdout.write(printable(text).replace("\n", "\\n") + "\n")


def say(text: str) -> None:
    """Write a line for the user to stderr."""
    sys.stderr.write(printable(text) + "\n")
    sys.stderr.flush()


def print_json_text(text: str) -> None:
    """Write a JSON text to stdout, with escapes only for unprintable characters."""
    sys.stdout.write(printable(text.rstrip("\n")) + "\n")
    sys.stdout.flush()


def cell(value: object) -> str:
    """Format a value for a table: floats have three digits (from 100 on none after the point), None is empty."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        text = f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
        return f"{Decimal(text):f}" if "e" in text else text
    return printable(str(value)).replace("\n", "\\n")


class Bar:
    """Progress of a long command, on stderr if that is a terminal: amount, rate and remaining time.

    The verb is the activity (``"scrubbed"``), the unit ``"B"`` for bytes, otherwise a noun.
    """

    def __init__(self, verb: str, unit: str = "B") -> None:
        amounts = (DownloadColumn(binary_units=True), TransferSpeedColumn()) if unit == "B" else (MofNCompleteColumn(),)
        columns = (TextColumn("{task.description}"), BarColumn(), *amounts, TimeRemainingColumn(compact=True))
        self._bar = RichProgress(*columns, console=Console(stderr=True), transient=True, disable=not self.shown)
        self._task = self._bar.add_task(verb, total=None)

    @property
    def shown(self) -> bool:
        """Whether the bar is visible; otherwise it needs no total."""
        return sys.stderr.isatty()

    def expect(self, total: int) -> None:
        self._bar.update(self._task, total=total)

    def advance(self, amount: int) -> None:
        """Add to the amount done."""
        self._bar.advance(self._task, amount)

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def pause(self) -> None:
        """Hide the bar before a prompt."""
        self._bar.stop()


class Progress:
    """A line of progress on stderr, if that is a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True, highlight=False)
        self._live = Live(console=console, transient=True, auto_refresh=False) if sys.stderr.isatty() else None

    @property
    def shown(self) -> bool:
        """Whether the line is visible."""
        return self._live is not None

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, text: str) -> None:
        """Replace the line."""
        if self._live is not None:
            self._live.update(Text(printable(text), overflow="ellipsis", no_wrap=True), refresh=True)


class Screen:
    """The whole screen of a terminal, redrawn for each frame; its earlier contents are restored at the end."""

    def __init__(self) -> None:
        self._live = Live(console=Console(highlight=False), screen=True, auto_refresh=False)

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.stop()

    def show(self, frame: Sequence[Frame]) -> None:
        """Replace the contents; lines that do not fit are cut off."""
        self._live.update(Group(*frame), refresh=True)


def print_frame(frame: Sequence[Frame], width: int) -> None:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(Group(*frame))
    # Strip the padding of the last column.
    sys.stdout.write("\n".join(line.rstrip() for line in capture.get().split("\n")))
    sys.stdout.flush()


def size_text(size_bytes: int) -> str:
    """Return an exact size with its unit: ``"128KiB"``."""
    return ByteSize(size_bytes).text


def rounded_size(size_bytes: int) -> str:
    """Return a size with three digits and a unit."""
    power = next((power for power in range(5) if size_bytes < 999.5 * 1024**power), 5)
    return f"{size_bytes / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}"


def latency_text(seconds: float | None) -> str | None:
    """Return a latency in us, ms or s: ``"85 us"``, ``"1.24 ms"``, ``"2.1 s"``."""
    if seconds is None:
        return None
    for unit, scale in (("us", 1e6), ("ms", 1e3), ("s", 1.0)):
        value = seconds * scale
        if value < 999.5 or unit == "s":
            return f"{value:.0f} {unit}" if value >= 99.5 else f"{value:.3g} {unit}"
    return None


def age_text(seconds: float | None) -> str | None:
    """Return an age as text, in its largest whole unit."""
    if seconds is None:
        return None
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)}{unit}"
    return f"{int(seconds)}s"


def _text(shown: str, column: Column) -> Text:
    is_unhealthy = column.healthy and shown and shown not in column.healthy
    return Text(shown, style="bold red" if is_unhealthy else "")


def _escaped(character: str) -> str:
    """Return the escape of a character: one UTF-16 unit, or a surrogate pair."""
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def _width(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> int:
    widths = [
        max(len(column.title), *(_FOLDED_WIDTH_MIN if column.folds else len(cell(row.get(column.key))) for row in rows))
        for column in columns
    ]
    return sum(widths) + 2 * (len(columns) - 1)
