"""Shared by the commands that work on a medium: options, opening it, the deadline of long loops, and reports."""

from __future__ import annotations

import contextlib
import json as json_module
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Final

from kvstore.cli.command_line import Option
from kvstore.cli.holdings.medium import Medium
from kvstore.cli.reporting.terminal import Bar, print_json_text, say
from kvstore.cli.tier_argument import TierArgument, parse_tier
from kvstore.errors import BackendUnavailableError
from kvstore.types import NamespaceInfo

__all__ = [
    "DEADLINE_TO_READ",
    "SCHEMA",
    "DryRun",
    "Namespaces",
    "counted",
    "expect_all",
    "print_report",
    "reading",
    "say_each",
]

SCHEMA: Final = 1

DEADLINE_TO_READ: Final = "1d"
"""Default deadline of commands that read or write every byte of a medium."""

Namespaces = Annotated[
    list[str] | None,
    Option("--namespace", "-n", metavar="HEX", help="Only namespaces whose digest begins with this; may be repeated."),
]
DryRun = Annotated[bool, Option("--dry-run", help="Print the planned changes without making them.")]


@contextlib.contextmanager
def reading(tier: str, namespaces: Sequence[str] | None = None) -> Iterator[Medium]:
    """Open the medium of a tier; an ``OSError`` becomes a ``BackendError``."""
    argument = parse_tier(tier)
    try:
        with Medium(argument, namespaces or ()) as medium:
            yield medium
    except BrokenPipeError:
        raise  # stdout is closed; nothing is wrong with the medium.
    except OSError as error:
        raise BackendUnavailableError(
            f"{error.filename or 'a file'}: {error.strerror or error}. Check the disk, and the archive's destination.",
            backend=argument.backend,
        ) from error


def expect_all(bar: Bar, medium: Medium, namespaces: Iterable[NamespaceInfo]) -> None:
    """Set the total of a visible progress bar to the bytes to read."""
    if bar.shown:
        bar.expect(sum(block.size_bytes for each in namespaces for block in medium.blocks(each)))


def counted(count: int, what: str) -> str:
    """Return a number with its noun."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def print_report(command: str, argument: TierArgument, **more: Any) -> None:
    """Print the one JSON object of ``--json``."""
    report = {"schema": SCHEMA, "command": command, "tier": argument.shown(), **more}
    print_json_text(json_module.dumps(report, indent=1, ensure_ascii=False))


def say_each(what: str, rows: Sequence[dict[str, Any]]) -> None:
    """Name each failed block on stderr, with the reason."""
    for row in rows:
        say(f"{what}: {row['key']} of namespace {row['namespace']}: {row['what']}")
