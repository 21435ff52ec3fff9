"""``kvstore export`` and ``import``: move blocks between tiers on any media, by an archive."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Annotated

from kvstore.cli.command_line import Argument, Exit, ExitCode, JsonFlag, TierOption, Typer, check_output, opened_input
from kvstore.cli.commands.on_medium import (
    DEADLINE_TO_READ,
    DryRun,
    Namespaces,
    counted,
    expect_all,
    print_report,
    reading,
    say_each,
)
from kvstore.cli.holdings.archive import write_archive
from kvstore.cli.holdings.care import chosen, import_archive
from kvstore.cli.interruption import Deadline, DeadlineOption
from kvstore.cli.reporting.terminal import Bar, print_line, rounded_size, say
from kvstore.cli.tier_argument import parse_tier
from kvstore.errors import ConfigError

__all__ = ["add_commands"]


def add_commands(app: Typer) -> None:
    """Add the commands."""
    app.command("export")(export_command)
    app.command("import")(import_command)


def export_command(
    tier: TierOption,
    archive: Annotated[str, Argument(metavar="FILE", help="The archive, or - for stdout.")],
    namespace: Namespaces = None,
    dry_run: DryRun = False,
    deadline: DeadlineOption = DEADLINE_TO_READ,
    json: JsonFlag = False,
) -> None:
    """Write blocks to an archive. Each block is verified; any tier can import the archive."""
    if archive == "-" and json:
        raise ConfigError("--json and an archive cannot both use stdout. Name a file for the archive.")
    with (
        Deadline(deadline) as limit,
        reading(tier, namespace) as medium,
        _written(None if dry_run else archive) as file,
        Bar("exported") as bar,
    ):
        namespaces = chosen(medium.namespaces(), namespace or ())
        expect_all(bar, medium, namespaces)
        result = write_archive(medium, namespaces, file, _noted(bar, limit))
    faults, unread = result.damaged, result.unread
    if json:
        more = {"blocks": result.blocks, "size_bytes": result.size_bytes, "gone": result.gone, "unread": unread}
        print_report("export", medium.tier, dry_run=dry_run, rows=faults, namespaces=len(namespaces), **more)
    else:
        # stdout may have the archive itself.
        tell = say if archive == "-" else print_line
        verb = "would be written" if dry_run else "written"
        what = f"{counted(result.blocks, 'block')} of {counted(len(namespaces), 'namespace')}"
        tell(f"{what}, {rounded_size(result.size_bytes)}: {verb}")
    say_each("damaged and left out", faults)
    say_each("not read", unread)
    if faults:
        raise Exit(ExitCode.WRONG_BYTES)
    if unread:
        raise Exit(ExitCode.FAILED)


def import_command(
    tier: TierOption,
    archive: Annotated[str, Argument(metavar="FILE", help="The archive, or - for stdin.")],
    dry_run: DryRun = False,
    deadline: DeadlineOption = DEADLINE_TO_READ,
    json: JsonFlag = False,
) -> None:
    """Store the blocks of an archive in a tier. Each is verified; existing blocks stay."""
    with Deadline(deadline) as limit, opened_input(archive, "archive") as file, Bar("imported") as bar:
        argument = parse_tier(tier)
        if bar.shown and archive != "-":
            bar.expect(os.fstat(file.fileno()).st_size)
        result = import_archive(argument, file, dry=dry_run, on_block=_noted(bar, limit))
    if json:
        more = {name: value for name, value in asdict(result).items() if name != "damaged"}
        print_report("import", argument, dry_run=dry_run, rows=result.damaged, **more)
    else:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result.outcomes.items())) or "no blocks"
        print_line(
            f"{argument.name}: {outcomes}; {rounded_size(result.size_bytes)} {'verified' if dry_run else 'stored'}"
        )
    say_each("damaged and left out", result.damaged)
    say_each("not stored", result.failed)
    if result.error:
        say(result.error)
    if result.damaged:
        raise Exit(ExitCode.WRONG_BYTES)
    if not result.is_whole or set(result.outcomes) - {"ok", "exists", "intact"}:
        raise Exit(ExitCode.FAILED)


@contextlib.contextmanager
def _written(path: str | None) -> Iterator[IO[bytes] | None]:
    """Open an archive to write; it gets its name when it is complete."""
    if path is None:
        yield None
        return
    if path == "-":
        if sys.stdout.isatty():
            raise ConfigError("An archive is binary. Name a file, or redirect stdout.")
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    check_output(Path(path), "The archive")
    partial = Path(f"{path}.partial")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except FileExistsError as error:
        raise ConfigError(
            f"{str(partial)!r} exists: another export is running, or one was killed. Remove it."
        ) from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _noted(bar: Bar, limit: Deadline) -> Callable[[int], None]:
    """Return a function that counts a block's bytes, and ends the command after its deadline."""

    def on_block(size_bytes: int) -> None:
        bar.advance(size_bytes)
        limit.check()

    return on_block
