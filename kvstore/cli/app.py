"""The two commands, put together from the modules that have their subcommands."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from types import TracebackType
from typing import Final, Self

from kvstore.cli.command_line import Context, Exit, ExitCode, Typer, VersionFlag, make_app
from kvstore.cli.commands import (
    archives,
    backends,
    cleaning,
    compare,
    config,
    doctor,
    inspect,
    lifecycle,
    plot,
    record,
    replay,
    run,
    size,
    top,
    verify,
)
from kvstore.cli.reporting.terminal import say
from kvstore.errors import ConfigError, KVStoreError

__all__ = ["bench_app", "kvstore_app", "run_bench", "run_kvstore"]

# Modules with subcommands; each has add_commands(app).
_OF_BENCH = (run, compare, record, replay, plot, verify, doctor, backends)
_OF_KVSTORE = (config, size, top, inspect, cleaning, archives, lifecycle)

bench_app = make_app("Measure kvstore's tiers on this machine, beside alternatives.")
kvstore_app = make_app("Configure, inspect and maintain kvstore's tiers.")

for _module in _OF_BENCH:
    _module.add_commands(bench_app)
for _module in _OF_KVSTORE:
    _module.add_commands(kvstore_app)
kvstore_app.add_typer(bench_app, name="bench", help="All commands of kvstore-bench.")

_WARNINGS_MAX: Final = 32
"""Most different warnings printed."""


def run_bench() -> None:
    """Run ``kvstore-bench`` with the arguments of this process."""
    _run(bench_app, "kvstore-bench")


def run_kvstore() -> None:
    """Run ``kvstore`` with the arguments of this process."""
    _run(kvstore_app, "kvstore")


class Warnings(logging.Handler):
    """Collects warnings of ``kvstore`` within a ``with`` block and writes them to stderr when it ends.

    Earlier output would interrupt the progress line.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.WARNING)
        self._name = name
        self._messages: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Note a record."""
        if len(self._messages) < _WARNINGS_MAX:
            self._messages[record.getMessage()] = None

    def drop(self, text: str) -> None:
        """Forget warnings that only repeat another printed text."""
        self._messages = {message: None for message in self._messages if not message.endswith(text)}

    def __enter__(self) -> Self:
        logging.getLogger("kvstore").addHandler(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        logging.getLogger("kvstore").removeHandler(self)
        for message in self._messages:
            say(f"{self._name}: warning: {message}")


@kvstore_app.callback(invoke_without_command=True)
def _without_command(ctx: Context, version: VersionFlag = False) -> None:
    """Configure, inspect and maintain kvstore's tiers."""
    if ctx.invoked_subcommand is None:
        say(ctx.get_help())
        raise Exit(ExitCode.USAGE)


def _run(app: Typer, name: str) -> None:
    """Run an app; its expected exceptions become one line on stderr and an exit status."""
    with Warnings(name) as warnings:
        _run_under(app, name, warnings)


def _run_under(app: Typer, name: str, warnings: Warnings) -> None:
    try:
        app(prog_name=name)
    except ConfigError as error:
        warnings.drop(str(error))
        say(f"{name}: {error}")
        sys.exit(ExitCode.USAGE)
    except KVStoreError as error:
        warnings.drop(str(error))
        say(f"{name}: {error}")
        sys.exit(ExitCode.FAILED)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader of stdout has ended (head, less): not an error.
        _forget_stdout()
        sys.exit(ExitCode.OK)
    except OSError as error:
        # Commands explain errors of their own files; the remaining ones are mostly those of a closed stdout.
        _forget_stdout()
        where = repr(error.filename) if error.filename else "stdout"
        say(f"{name}: {where} can't be used: {error.strerror or error}. Check space and permissions.")
        sys.exit(ExitCode.FAILED)


def _forget_stdout() -> None:
    """Keep Python from flushing a closed stream at exit."""
    # A replacement of stdout within a program may have no descriptor.
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
