"""``kvstore top``: the tiers of running engines, live."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

from kvstore.cli.command_line import Argument, Exit, Option, Typer
from kvstore.cli.exit_codes import ExitCode
from kvstore.cli.measuring.stopping import Stopping
from kvstore.cli.reporting.quantities import duration_option
from kvstore.cli.reporting.terminal import Frame, Screen, line_of, print_frame, stdout_width, table_of
from kvstore.cli.watching.scrape import Engine, Watch
from kvstore.cli.watching.view import ENGINE_COLUMNS, ROOM_COLUMNS, TRAFFIC_COLUMNS, engine_row, tier_rows
from kvstore.errors import ConfigError

__all__ = ["add_commands", "frame_of"]

_TIMEOUT_S: Final = 5.0
"""For one answer: a server that is slower than this is busy with something else."""

_TURN_S: Final = 0.1
"""Ctrl-C is noted so soon."""

_Addresses = Annotated[
    list[str] | None,
    Argument(metavar="ADDRESS ...", help="Engines: HOST:PORT of vLLM's server, or the URL of its /metrics."),
]
_Interval = Annotated[str, Option("--interval", "-i", metavar="TIME", help="Time between two scrapes.")]


def add_commands(app: Typer) -> None:
    """Add the command."""
    app.command("top")(top)


def top(addresses: _Addresses = None, interval: _Interval = "2s") -> None:
    """Show the tiers of running engines. States, hits, rates, latencies, queues, room; Ctrl-C ends it.

    Reads the engines' /metrics (default: 127.0.0.1:8000). Rates and latencies are those of the last ten seconds. Where
    stdout is no terminal, two looks are taken and one table is printed.
    """
    pause_s = float(duration_option(interval, "--interval"))
    if not pause_s > 0:
        raise ConfigError(f"--interval {interval}: expected more than 0.")
    watch = Watch(addresses or ["127.0.0.1:8000"], _TIMEOUT_S)
    with Stopping() as stopping:
        watch.scrape()
        if not sys.stdout.isatty():
            _sleep(pause_s, stopping)
            watch.scrape()
            print_frame(frame_of(watch.engines, watch.problems, stdout_width()), stdout_width())
            raise Exit(ExitCode.OK if watch.engines else ExitCode.FAILED)
        with Screen() as screen:
            while not stopping():
                clock = time.strftime("%H:%M:%S")
                head = f"kvstore top   {clock}   every {interval}, rates of the last 10 s   Ctrl-C ends it"
                screen.show([line_of(head, "bold"), *frame_of(watch.engines, watch.problems, stdout_width())])
                _sleep(pause_s, stopping)
                if not stopping():
                    watch.scrape()


def frame_of(engines: Sequence[Engine], problems: Mapping[str, str], width: int) -> list[Frame]:
    """Return what is shown, as wide as this at most.

    Args:
        engines: The engines.
        problems: Why others could not be asked, by address.
        width: Columns.
    """
    tables = (
        (ENGINE_COLUMNS, [engine_row(engine) for engine in engines]),
        (TRAFFIC_COLUMNS, rows := tier_rows(engines)),
        (ROOM_COLUMNS, rows),
    )
    parts: list[Frame] = []
    for columns, shown in tables:
        if shown:
            parts += [line_of(""), table_of(shown, columns, width)]
    parts += [line_of(f"{address}: {problem}", "red") for address, problem in problems.items()]
    return parts


def _sleep(seconds: float, stopping: Stopping) -> None:
    ends_at = time.monotonic() + seconds
    while not stopping() and (left := ends_at - time.monotonic()) > 0:
        time.sleep(min(left, _TURN_S))
