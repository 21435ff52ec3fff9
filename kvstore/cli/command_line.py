"""Command-line definitions on typer, which only this module imports.

A module with commands has a function ``add_commands(app)``, which :mod:`kvstore.cli.app` calls. Options that several
commands share are annotated types here, so that name and help text are the same everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Context, Exit, Option, Typer, confirm

import kvstore
from kvstore.cli.reporting.terminal import print_line

__all__ = [
    "Argument",
    "Context",
    "Exit",
    "JsonFlag",
    "Option",
    "OutFile",
    "Reuse",
    "TierOption",
    "Typer",
    "VersionFlag",
    "confirm",
    "make_app",
]

TierOption = Annotated[
    str,
    Option(
        "--tier",
        "-t",
        envvar="KVSTORE_TIER",
        metavar="JSON|URL|@FILE",
        help="The tier: the very JSON that goes into secondary_tiers, a URL such as file:///mnt/kv?capacity=10GiB, or "
        "@file with the JSON in it.",
    ),
]
"""One tier; parse it with :func:`kvstore.cli.tier_argument.parse_tier`."""

JsonFlag = Annotated[bool, Option("--json", help="Print one JSON object on stdout and nothing else.")]
OutFile = Annotated[Path | None, Option("--out", "-o", metavar="FILE", help="Also write the JSON report to a file.")]
Reuse = Annotated[
    bool,
    Option("--reuse", help="Use an existing target: a server, or a directory that is not empty."),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        print_line(f"kvstore {kvstore.__version__}")
        raise Exit


VersionFlag = Annotated[
    bool, Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
]


def make_app(help_text: str) -> Typer:
    """Return an app that, called without a command, shows its help; its errors are plain text."""
    return Typer(
        help=help_text,
        no_args_is_help=False,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
