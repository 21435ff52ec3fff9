"""The command line: options and their values, files that options name, exit status; the only module that uses typer.

Options that several commands share are annotated types here, so that name and help text are the same everywhere.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import json
import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Annotated, Any, Final

from typer import Argument as Argument
from typer import Context as Context
from typer import Exit as Exit
from typer import Option as Option
from typer import Typer as Typer
from typer import confirm as confirm
from typer.core import TyperGroup

import kvstore
from kvstore.cli.terminal import print_line
from kvstore.config import did_you_mean
from kvstore.errors import ConfigError, KVStoreError
from kvstore.quantity import ByteSize, Seconds


class ExitCode(enum.IntEnum):
    """Exit status, the same for every command."""

    OK = 0
    FAILED = 1
    """The command ran and failed: a medium failed, a check failed, or a comparison exceeds its limit."""
    USAGE = 2
    """The command did not run: an option, a configuration or a target can't be used."""
    WRONG_BYTES = 3
    """A block differs from the one stored under its key, or its record does not verify."""
    INTERRUPTED = 130
    """Ctrl-C; the results so far were reported."""


_TEXT_BYTES_MAX: Final = 64 << 20
"""Longest file; a longer one is the wrong file. The token ids of the longest contexts take a few megabytes."""

_PATH_MAX: Final = 4096

_LISTING: Final = frozenset({"backends", "config", "inspect", "s3-lifecycle", "size", "top", "why"})
"""Commands that only print: they succeed even if the reader of stdout exits early."""


class _Group(TyperGroup):
    """A group whose commands exit silently if the reader of stdout (``head``, ``less``) exits.

    The status of a checking command is then 1, because the lost output may have reported a failure. A command that has
    already set its status keeps it.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except Exit:
            try:
                sys.stdout.flush()
            except BrokenPipeError:
                forget_stdout()
            raise
        except BrokenPipeError:
            forget_stdout()
            raise Exit(ExitCode.OK if ctx.invoked_subcommand in _LISTING else ExitCode.FAILED) from None
        return result


def make_app(help_text: str, commands: Mapping[str, Callable[..., None]]) -> Typer:
    """Return an app with these commands, and with plain text as errors."""
    app = Typer(
        cls=_Group,
        help=help_text,
        no_args_is_help=False,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name, command in commands.items():
        app.command(name)(command)
    return app


def forget_stdout() -> None:
    """Keep Python from flushing a closed stream at exit."""
    # A replacement of stdout within a program may have no descriptor.
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
            raise ConfigError(f"--config {str(path)!r}: unknown option {key!r}.{hint}")
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
        help="The tier: an object of secondary_tiers as JSON, a URL such as file:///mnt/kv?capacity=10GiB, or @file "
        "with either.",
    ),
]
"""One tier; parse it with :func:`kvstore.cli.tier_argument.parse_tier`."""
Tiers = Annotated[
    list[str] | None,
    Option(
        "--tier", "-t", metavar="JSON|URL|@FILE",
        help="The tier: an object of secondary_tiers as JSON, a URL, or @file. Several: compared. Without "
        "it, a file tier in a temporary directory.",
    ),
]  # fmt: skip

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
    """Parse the size given for an option; a ConfigError names the option."""
    try:
        return ByteSize(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def duration_option(text: str, option: str) -> Seconds:
    """Parse the duration given for an option; a ConfigError names the option."""
    try:
        return Seconds(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def json_object(text: str | None, option: str) -> dict[str, Any]:
    """Parse the JSON object given for an option, empty for None; a ConfigError names the option."""
    value = {} if text is None else parsed_json(text, option)
    if not isinstance(value, dict):
        raise ConfigError(f"{option} is {value!r}. Expected a JSON object.")
    return value


def parsed_json(text: str, subject: str, expected: str = "") -> Any:
    """Parse JSON; a ConfigError names its subject and the likely mistake.

    The text is not shown, and the cause not chained, because the text may hold a password.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        why = f"{error.msg} at line {error.lineno}, column {error.colno}."
    except RecursionError:
        why = "It is nested too deeply."
    if "\0" not in text and len(text) < _PATH_MAX and Path(text).is_file():
        why = f"{text!r} is a file. Put '@' before its name: '@{text}'."
    elif text.lstrip()[:1] in ("{", "[") and '"' not in text and any(map(str.isalpha, text)):
        why = "It has no double quotes: the shell removed them. Put the whole of it in single quotes."
    raise ConfigError(f"{subject} is not valid JSON. {why}{expected}")


def vllm_module(name: str) -> Any:
    """Import a module of ``kvstore.vllm``, which imports vLLM; a ConfigError says that vLLM is missing."""
    # vLLM would otherwise log its version and platform.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        return importlib.import_module(f"kvstore.vllm.{name}")
    except ImportError as error:
        raise ConfigError(f"vLLM can't be imported ({error}). Run this command in the engine's environment.") from error


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


def text_of(text: str, subject: str) -> str:
    """Return an argument, or the contents of the file that it names as ``@FILE`` (``@-`` for stdin).

    Args:
        subject: Noun for errors, such as ``"configuration"``.

    Raises:
        ConfigError: The file can't be read, or is not text of a plausible length.
    """
    if not text.startswith("@"):
        return text
    with opened_input(text[1:], subject) as file:
        data = file.read(_TEXT_BYTES_MAX + 1)
    if len(data) > _TEXT_BYTES_MAX:
        raise ConfigError(f"The {subject} {text[1:]!r} has more than {_TEXT_BYTES_MAX} bytes. Name another file.")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"The {subject} {text[1:]!r} is not UTF-8 text. Name another file.") from None


def check_output(path: Path | None, option: str) -> None:
    """Check that the file of an option, if given, can be written, before a long command starts."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(
            f"{option} is {str(path)!r}, but {str(path.parent)!r} does not exist. Create that directory first."
        )
    if path.is_dir():
        raise ConfigError(f"{option} is {str(path)!r}, which is a directory. Give the name of a file.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} is {str(path)!r}, which this user may not write. Give another file.")


def write_output(path: Path | None, data: str | bytes, option: str) -> None:
    """Write the file of an option, if given; raises ``KVStoreError``."""
    if path is None:
        return
    try:
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise KVStoreError(f"{option} {str(path)!r} can't be written: {error.strerror}. Give another file.") from error
