"""The command line: options and their values, files that options name, exit status; the only module that uses typer.

A module with commands has a function ``add_commands(app)``, which :mod:`kvstore.cli.app` calls. Options that several
commands share are annotated types here, so that name and help text are the same everywhere.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any

from typer import Argument, Context, Exit, Option, Typer, confirm

import kvstore
from kvstore.cli.reporting.terminal import print_line
from kvstore.config import did_you_mean
from kvstore.errors import ConfigError, KVStoreError
from kvstore.quantity import ByteSize, Seconds

__all__ = [
    "Argument",
    "Context",
    "DefaultsFile",
    "Exit",
    "ExitCode",
    "JsonFlag",
    "Option",
    "OutFile",
    "OutputError",
    "Reuse",
    "TierOption",
    "Typer",
    "VersionFlag",
    "check_output",
    "confirm",
    "duration_option",
    "json_object",
    "make_app",
    "opened_input",
    "size_option",
    "write_output",
]


class ExitCode(enum.IntEnum):
    """Exit status, the same for every command."""

    OK = 0
    FAILED = 1
    """It ran and did not succeed: a medium failed, a check failed, a comparison is over its limit."""
    USAGE = 2
    """It did not run: an option, a configuration or a target can't be used."""
    WRONG_BYTES = 3
    """A block differs from the one stored under its key, or its record does not verify."""
    INTERRUPTED = 130
    """Ctrl-C; the results until then were reported."""


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


def _print_version(wanted: bool) -> None:
    if wanted:
        print_line(f"kvstore {kvstore.__version__}")
        raise Exit


def _use_defaults(ctx: Context, path: Path | None) -> None:
    """Make the values of a TOML file the defaults of the command's options."""
    if path is None:
        return
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {str(path)!r} can't be read: {error.strerror}. Give a TOML file.") from error
    except ValueError as error:
        raise ConfigError(f"--config {str(path)!r} is not TOML: {error}. Give options such as: runs = 3") from None
    known = {parameter.name: parameter for parameter in ctx.command.params if parameter.name not in (None, "config")}
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name not in known:
            hint = did_you_mean(name, map(str, known)).replace("_", "-")
            raise ConfigError(f"--config {str(path)!r}: there is no option {key!r}.{hint}")
        many = known[name].nargs != 1 or getattr(known[name], "multiple", False)
        values = value if isinstance(value, list) else [value]
        texts = [json.dumps(each) if isinstance(each, dict) else each for each in values]
        found[name] = texts if many else ",".join(map(str, texts)) if isinstance(value, list) else texts[0]
    ctx.default_map = {**(ctx.default_map or {}), **found}


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
VersionFlag = Annotated[
    bool, Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
]
DefaultsFile = Annotated[
    Path | None,
    Option(
        "--config", metavar="FILE", is_eager=True, callback=_use_defaults, expose_value=False,
        help="A TOML file with options, such as: runs = 3. Options of the command line override it.",
    ),
]  # fmt: skip


def size_option(text: str, option: str) -> ByteSize:
    """Return the size that an option was given; a ConfigError names the option."""
    try:
        return ByteSize(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def duration_option(text: str, option: str) -> Seconds:
    """Return the duration that an option was given; a ConfigError names the option."""
    try:
        return Seconds(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def json_object(text: str | None, option: str) -> dict[str, Any]:
    """Return the JSON object that an option was given, empty for None; a ConfigError names the option."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option} is not valid JSON: {error.msg} at column {error.colno}. Give an object.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{option} is {value!r}. Expected a JSON object.")
    return value


@contextlib.contextmanager
def opened_input(path: str, what: str) -> Iterator[IO[bytes]]:
    """Open a file to read, or stdin for ``-``; a ConfigError names it as ``what``."""
    if path == "-":
        yield sys.stdin.buffer
        return
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below; only opening it is explained.
    except OSError as error:
        raise ConfigError(f"The {what} {path!r} can't be read: {error.strerror}. Name a file.") from error
    with file:
        yield file


class OutputError(KVStoreError):
    """A file could not be written; its contents were printed."""


def check_output(path: Path | None, option: str) -> None:
    """Check that the file of an option, if given, can be written, before minutes of work produce its contents."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"{option} is {str(path)!r}, but there is no directory {str(path.parent)!r}. Make it first.")
    if path.is_dir():
        raise ConfigError(f"{option} is {str(path)!r}, which is a directory. Give the name of a file.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} is {str(path)!r}, which this user may not write. Give another file.")


def write_output(path: Path | None, data: str | bytes, option: str) -> None:
    """Write the file of an option, if given; raises :class:`OutputError`."""
    if path is None:
        return
    try:
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise OutputError(f"{option} {str(path)!r} can't be written: {error.strerror}. Give another file.") from error
