"""The commands ``kvstore`` and ``kvstore-bench``, assembled from the modules of their subcommands."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

from kvstore.cli import backends, check, config, doctor, lifecycle, top
from kvstore.cli.bench import plot, record, replay, run, size, verify
from kvstore.cli.command_line import Context, Exit, ExitCode, Typer, VersionFlag, forget_stdout, make_app
from kvstore.cli.holdings import commands as medium
from kvstore.cli.holdings import why
from kvstore.cli.terminal import say
from kvstore.errors import ConfigError, KVStoreError

_OF_BENCH: Final[dict[str, Callable[..., None]]] = {
    "run": run.run,
    "sweep": run.sweep,
    "record": record.record,
    "replay": replay.replay_command,
    "plot": plot.plot,
    "verify": verify.verify,
    "doctor": doctor.doctor,
    "backends": backends.backends,
}
_OF_KVSTORE: Final[dict[str, Callable[..., None]]] = {
    "config": config.config_command,
    "check": check.check_command,
    "doctor": doctor.doctor,
    "size": size.size_command,
    "top": top.top,
    "inspect": medium.inspect_command,
    "why": why.why_command,
    "scrub": medium.scrub_command,
    "gc": medium.gc_command,
    "new-backend": backends.new_backend_command,
    "s3-lifecycle": lifecycle.lifecycle_command,
}

bench_app = make_app("Measure kvstore's tiers on this machine, and compare them with alternatives.", _OF_BENCH)
kvstore_app = make_app("Configure, inspect and maintain kvstore's tiers.", _OF_KVSTORE)
kvstore_app.add_typer(bench_app, name="bench", help="All commands of kvstore-bench.")

_WARNINGS_MAX: Final = 32
"""Most distinct warnings printed."""


def run_bench() -> None:
    """Run ``kvstore-bench`` with the arguments of this process."""
    _run(bench_app, "kvstore-bench")


def run_kvstore(arguments: Sequence[str] | None = None) -> None:
    """Run ``kvstore``, by default with the arguments of this process."""
    _run(kvstore_app, "kvstore", arguments)


class Warnings(logging.Handler):
    """Collects warnings of ``kvstore`` within a ``with`` block and writes them to stderr when it ends.

    Earlier output would interrupt the progress line.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.WARNING)
        self._name = name
        self._messages: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record's message."""
        if len(self._messages) < _WARNINGS_MAX:
            self._messages[record.getMessage()] = None

    def drop(self, text: str) -> None:
        """Drop warnings that only repeat another printed text."""
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


@bench_app.callback(invoke_without_command=True)
def _bench_without_command(ctx: Context, version: VersionFlag = False) -> None:
    """Measure kvstore's tiers on this machine. Without a command: a quick mixed run in a temporary directory."""
    if ctx.invoked_subcommand is None:
        run.run()


def _run(app: Typer, name: str, arguments: Sequence[str] | None = None) -> None:
    """Run an app; its expected exceptions become one line on stderr and an exit status."""
    with Warnings(name) as warnings:
        try:
            app(arguments, prog_name=name)
        except KVStoreError as error:
            warnings.drop(str(error))
            say(f"{name}: {error}")
            sys.exit(ExitCode.USAGE if isinstance(error, ConfigError) else ExitCode.FAILED)
        except KeyboardInterrupt:
            sys.exit(ExitCode.INTERRUPTED)
        except OSError as error:
            # Commands report errors of their own files; the remaining ones mostly concern stdout (disk full).
            forget_stdout()
            where = repr(error.filename) if error.filename else "stdout"
            say(f"{name}: {where} can't be used: {error.strerror or error}. Check space and permissions.")
            sys.exit(ExitCode.FAILED)
