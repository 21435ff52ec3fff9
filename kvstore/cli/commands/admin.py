"""``kvstore inspect``, ``scrub``, ``gc``, ``export`` and ``import``: what lies on the medium of a tier."""

from __future__ import annotations

import contextlib
import json as json_module
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Annotated, Any, Final

from kvstore.cli.command_line import Argument, Exit, JsonFlag, Option, TierOption, Typer
from kvstore.cli.deadline import DEADLINE_TO_LOOK, Deadline, DeadlineOption
from kvstore.cli.exit_codes import ExitCode
from kvstore.cli.holdings.archive import write_archive
from kvstore.cli.holdings.base import Holdings
from kvstore.cli.holdings.care import (
    GcPlan,
    chosen,
    import_archive,
    make_plan,
    open_holdings,
    run_plan,
    scrub,
    summary,
)
from kvstore.cli.output_file import check_output
from kvstore.cli.reporting.quantities import age_text, duration_option, rounded_size
from kvstore.cli.reporting.terminal import Column, print_json_text, print_line, print_table, say
from kvstore.cli.tier_argument import TierArgument, parse_tier
from kvstore.codec.record import HEADER_BYTES, decode_header
from kvstore.errors import BackendUnavailableError, ConfigError, RecordError

__all__ = ["add_commands"]

_SCHEMA: Final = 1
_PROGRESS_BLOCKS: Final = 64
_DEADLINE_TO_REMOVE: Final = "1h"
_DEADLINE_TO_READ: Final = "1d"
"""Deadlines by default, of what removes blocks one by one, and of what reads or writes every byte of a medium."""

_Namespaces = Annotated[
    list[str] | None,
    Option("--namespace", "-n", metavar="HEX", help="Only namespaces whose digest begins so; may be given again."),
]
_DryRun = Annotated[bool, Option("--dry-run", help="Say what would be done, and change nothing.")]

_NAMESPACE_COLUMNS: Final = (
    Column("short", "namespace", left=True, style="bold"),
    Column("model", "model", left=True, rank=3),
    Column("blocks", "blocks"),
    Column("size", "size"),
    Column("oldest", "oldest", rank=1),
    Column("newest", "newest", rank=1),
    Column("unused", "unused for", rank=2),
    Column("in_use", "in use", left=True),
)
_FAULT_COLUMNS: Final = (
    Column("short", "namespace", left=True),
    Column("key", "key", left=True),
    Column("fault", "fault", left=True, style="bold red"),
)


def add_commands(app: Typer) -> None:
    """Add the commands."""
    app.command("inspect")(inspect_command)
    app.command("scrub")(scrub_command)
    app.command("gc")(gc_command)
    app.command("export")(export_command)
    app.command("import")(import_command)


def inspect_command(
    tier: TierOption,
    namespace: _Namespaces = None,
    block: Annotated[
        str | None, Option(metavar="HEX", help="Show the header of the block whose key begins so.")
    ] = None,
    deadline: DeadlineOption = DEADLINE_TO_LOOK,
    json: JsonFlag = False,
) -> None:
    """Show what lies on the medium. Namespaces with their blocks, bytes and ages, or the header of one block.

    Changes nothing.
    """
    with Deadline(deadline), _reading(tier) as (argument, holdings):
        namespaces = chosen(holdings, namespace or ())
        if block is not None:
            _show_header(holdings, _found_block(holdings, namespaces, block), json)
            return
        rows = [summary(holdings, each) for each in namespaces]
        fields = namespaces[0].fields if namespace and len(namespaces) == 1 else None
    if json:
        _print_json("inspect", argument, rows=rows, fields=fields)
        return
    for row in rows:
        row |= {
            "short": row["namespace"][:16],
            "size": rounded_size(row["size_bytes"]),
            "oldest": age_text(row["oldest_s"]),
            "newest": age_text(row["newest_s"]),
            "unused": age_text(row["unused_s"]),
            "in_use": row["holder"] or ("no" if holdings.knows_holders else None),
        }
    total = sum(row["size_bytes"] for row in rows)
    counts = [_counted(len(rows), "namespace"), _counted(sum(row["blocks"] for row in rows), "block")]
    title = f"{argument.name}: {', '.join(counts)}, {rounded_size(total)}"
    print_table(rows, _NAMESPACE_COLUMNS, title=title)
    if fields is not None:
        print_json_text(json_module.dumps(fields, indent=1, ensure_ascii=False))


def scrub_command(
    tier: TierOption,
    namespace: _Namespaces = None,
    dry_run: _DryRun = False,
    deadline: DeadlineOption = _DEADLINE_TO_READ,
    json: JsonFlag = False,
) -> None:
    """Verify every record at rest. Damaged ones are taken out of the way; with any, the status is 3.

    If the medium fails on the way, or the time is over, what was found until then is shown, and why it ended.
    """
    with (
        Deadline(deadline) as limit,
        _reading(tier) as (argument, holdings),
        _progress("scrubbed", limit) as on_block,
    ):
        result = scrub(holdings, chosen(holdings, namespace or ()), dry=dry_run, on_block=on_block)
    if json:
        _print_json("scrub", argument, dry_run=dry_run, rows=result.faults, **_without(asdict(result), "faults"))
    else:
        print_line(f"{argument.name}: {_counted(result.blocks, 'block')}, {rounded_size(result.size_bytes)} verified")
        _print_faults(result.faults)
        _print_named("not read", result.unread)
        damaged = sum(fault["damage"] for fault in result.faults)
        if damaged:
            print_line(f"{damaged} damaged, {result.set_aside} taken out of the way")
    if result.error:
        say(f"ended early: {result.error}")
    if result.faults:
        raise Exit(ExitCode.WRONG_BYTES)
    if result.unread or result.error:
        raise Exit(ExitCode.FAILED)


def gc_command(
    tier: TierOption,
    unused_for: Annotated[
        str, Option(metavar="AGE", help="Namespaces that nobody uses or has used for so long go; 0 for none.")
    ] = "30d",
    expire: Annotated[
        str | None,
        Option(metavar="AGE", help="Blocks unused for so long go, where nobody uses the namespace; 0: none."),
    ] = None,
    keep: Annotated[
        list[str] | None,
        Option(metavar="HEX", help="Keep all of the namespaces whose digest begins so; may be given again."),
    ] = None,
    dry_run: _DryRun = False,
    deadline: DeadlineOption = _DEADLINE_TO_REMOVE,
    json: JsonFlag = False,
) -> None:
    """Remove what nobody needs. Litter of dead writers; namespaces, and blocks, that are unused for long.

    Namespaces that an engine holds are left to it.
    """
    age_s = float(duration_option(unused_for, "--unused-for"))
    expire_s = None if expire is None else float(duration_option(expire, "--expire"))
    with Deadline(deadline), _reading(tier) as (argument, holdings):
        if expire is None and holdings.ttl_s:
            # Of a medium that knows when blocks were used, by whichever engine.
            expire, expire_s = age_text(holdings.ttl_s), holdings.ttl_s
        plan = make_plan(holdings, unused_for_s=age_s or None, expire_s=expire_s or None, keep=keep or ())
        sizes = [summary(holdings, each) for each in plan.namespaces]
        done = {"litter": 0, "namespaces": 0, "blocks": 0} if dry_run else run_plan(holdings, plan)
    rows = _plan_rows(plan, sizes, expire)
    held = [each.hex for each in plan.held]
    if json:
        _print_json("gc", argument, dry_run=dry_run, rows=rows, removed=done, held=held, more=plan.more)
        return
    for row in rows:
        count = f"{_counted(row['blocks'], 'block')}, " if "blocks" in row else ""
        print_line(f"{row['what']} {row['name'][:60]}: {row['why']}, {count}{rounded_size(row['size_bytes'])}")
    for name in held:
        print_line(f"namespace {name[:16]}: in use, left alone")
    if dry_run:
        print_line("nothing was removed (--dry-run)")
    else:
        removed = [_counted(done[f"{what}s"], what) for what in ("namespace", "block")]
        print_line(f"removed: {done['litter']} of litter, {', '.join(removed)}")
    if plan.more:
        print_line("more remain than one run takes: run it again")


def export_command(
    tier: TierOption,
    archive: Annotated[str, Argument(metavar="FILE", help="The archive, or - for stdout.")],
    namespace: _Namespaces = None,
    dry_run: _DryRun = False,
    deadline: DeadlineOption = _DEADLINE_TO_READ,
    json: JsonFlag = False,
) -> None:
    """Write blocks to an archive. Another tier, on any medium, can import it; each block is verified before."""
    if archive == "-" and json:
        raise ConfigError("--json and an archive on stdout don't go together. Name a file for the archive.")
    with (
        Deadline(deadline) as limit,
        _reading(tier) as (argument, holdings),
        _written(None if dry_run else archive) as file,
    ):
        namespaces = chosen(holdings, namespace or ())
        with _progress("exported", limit) as on_block:
            result = write_archive(holdings, namespaces, file, on_block)
    faults = [
        {"namespace": each.hex, "key": key.hex(), "fault": str(error.cause), "what": str(error)}
        for each, key, error in result.damaged
    ]
    unread = [{"namespace": each.hex, "key": key.hex(), "what": what} for each, key, what in result.unread]
    if json:
        more = {"blocks": result.blocks, "size_bytes": result.size_bytes, "gone": result.gone, "unread": unread}
        _print_json("export", argument, dry_run=dry_run, rows=faults, namespaces=len(namespaces), **more)
    else:
        # On stdout the archive is; what a person reads goes beside it.
        tell = say if archive == "-" else print_line
        verb = "would be written" if dry_run else "written"
        what = f"{_counted(result.blocks, 'block')} of {_counted(len(namespaces), 'namespace')}"
        tell(f"{what}, {rounded_size(result.size_bytes)}: {verb}")
        for fault in faults:
            tell(f"damaged and left out: {fault['key']} of namespace {fault['namespace'][:16]}: {fault['what']}")
        _print_named("not read", unread, tell)
    if faults:
        raise Exit(ExitCode.WRONG_BYTES)
    if unread:
        raise Exit(ExitCode.FAILED)


def import_command(
    tier: TierOption,
    archive: Annotated[str, Argument(metavar="FILE", help="The archive, or - for stdin.")],
    dry_run: _DryRun = False,
    deadline: DeadlineOption = _DEADLINE_TO_READ,
    json: JsonFlag = False,
) -> None:
    """Put the blocks of an archive into a tier. Each is verified before; what is there already stays."""
    with Deadline(deadline) as limit, _read(archive) as file, _progress("imported", limit) as on_block:
        argument = parse_tier(tier)
        result = import_archive(argument, file, dry=dry_run, on_block=on_block)
    if json:
        more = _without(asdict(result), "damaged")
        _print_json("import", argument, dry_run=dry_run, rows=result.damaged, **more)
    else:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result.outcomes.items())) or "no blocks"
        print_line(
            f"{argument.name}: {outcomes}; {rounded_size(result.size_bytes)} {'verified' if dry_run else 'stored'}"
        )
        _print_faults(result.damaged)
        _print_named("not stored", result.failed)
    if result.error:
        say(result.error)
    if result.damaged:
        raise Exit(ExitCode.WRONG_BYTES)
    if not result.is_whole or set(result.outcomes) - {"ok", "exists", "intact"}:
        raise Exit(ExitCode.FAILED)


def _found_block(holdings: Holdings, namespaces: Sequence[Any], start: str) -> tuple[Any, Any]:
    for namespace in namespaces:
        for block in holdings.blocks(namespace):
            if block.key.hex().startswith(start.lower()):
                return namespace, block
    raise ConfigError(f"No block has a key that begins with {start!r} (in hexadecimal).")


def _show_header(holdings: Holdings, found: tuple[Any, Any], json: bool) -> None:
    namespace, block = found
    record = holdings.read(namespace, block)
    if record is None:
        raise ConfigError(f"Block {block.key.hex()} has just gone. Ask for another one.")
    row: dict[str, Any] = {"namespace": namespace.hex, "key": block.key.hex(), "size_bytes": block.size_bytes}
    try:
        header = decode_header(bytes(record[:HEADER_BYTES]))
    except RecordError as error:
        row["fault"] = str(error)
    else:
        row |= {name: value.hex() if isinstance(value, bytes) else value for name, value in asdict(header).items()}
    if json:
        print_json_text(json_module.dumps({"schema": _SCHEMA, "command": "inspect", "block": row}, indent=1))
        return
    for name, value in row.items():
        print_line(f"{name:<18}{value}")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _print_faults(faults: Sequence[dict[str, Any]]) -> None:
    if faults:
        print_table([fault | {"short": fault["namespace"][:16]} for fault in faults], _FAULT_COLUMNS)


def _print_named(what: str, rows: Sequence[dict[str, Any]], tell: Callable[[str], object] = print_line) -> None:
    for row in rows:
        tell(f"{what}: {row['key']} of namespace {row['namespace'][:16]}: {row['what']}")


def _print_json(command: str, argument: TierArgument, **more: Any) -> None:
    report = {"schema": _SCHEMA, "command": command, "tier": argument.shown(), **more}
    print_json_text(json_module.dumps(report, indent=1, ensure_ascii=False))


def _without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def _plan_rows(plan: GcPlan, sizes: Sequence[dict[str, Any]], expire: str | None) -> list[dict[str, Any]]:
    """Return a row for all that is to go; ``sizes`` are the summaries of the plan's namespaces."""
    rows: list[dict[str, Any]] = [
        {"what": "litter", "name": piece.name, "why": piece.why, "size_bytes": piece.size_bytes}
        for piece in plan.litter
    ]
    for row in sizes:
        why = f"unused for {age_text(row['unused_s']) or 'long'}"
        found = {"blocks": row["blocks"], "size_bytes": row["size_bytes"]}
        rows.append({"what": "namespace", "name": row["namespace"], "why": why, **found})
    for namespace, blocks in plan.blocks:
        found = {"blocks": len(blocks), "size_bytes": sum(block.size_bytes for block in blocks)}
        rows.append({"what": "blocks", "name": namespace.hex, "why": f"unused for {expire}", **found})
    return rows


@contextlib.contextmanager
def _reading(tier: str) -> Iterator[tuple[TierArgument, Holdings]]:
    """Open what lies on the medium of a tier; an error of the system becomes one of the backend."""
    argument = parse_tier(tier)
    try:
        with open_holdings(argument) as holdings:
            yield argument, holdings
    except OSError as error:
        raise BackendUnavailableError(
            f"{error.filename or 'a file'}: {error.strerror or error}. Check the disk, and where the archive goes.",
            backend=argument.backend,
        ) from error


@contextlib.contextmanager
def _written(path: str | None) -> Iterator[IO[bytes] | None]:
    """Open an archive to write; it gets its name when it is whole."""
    if path is None:
        yield None
        return
    if path == "-":
        if sys.stdout.isatty():
            raise ConfigError("An archive is no text for a terminal. Name a file, or send stdout elsewhere.")
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
        raise ConfigError(f"{str(partial)!r} is there: another export runs, or one was killed. Remove it.") from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _read(path: str) -> Iterator[IO[bytes]]:
    if path == "-":
        yield sys.stdin.buffer
        return
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below; only opening it is explained.
    except OSError as error:
        raise ConfigError(f"The archive {path!r} can't be read: {error.strerror}. Name a file.") from error
    with file:
        yield file


@contextlib.contextmanager
def _progress(verb: str, deadline: Deadline) -> Iterator[Callable[[], None]]:
    """Check the deadline at each block, and show on stderr how many were done where somebody sees it."""
    if not sys.stderr.isatty():
        yield deadline.check
        return
    count = 0

    def on_block() -> None:
        nonlocal count
        count += 1
        if count % _PROGRESS_BLOCKS == 0:
            print(f"\r\x1b[K{count} blocks {verb}", end="", file=sys.stderr, flush=True)
        deadline.check()

    try:
        yield on_block
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
