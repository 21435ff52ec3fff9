"""The commands that maintain a medium: inspect, scrub and gc."""

from __future__ import annotations

import contextlib
import json as json_module
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final

from kvstore.cli.command_line import (
    Exit,
    ExitCode,
    JsonFlag,
    Option,
    TierOption,
    confirm,
    duration_option,
    size_option,
)
from kvstore.cli.holdings.care import GcPlan, chosen, make_plan, run_plan, scrub, summary
from kvstore.cli.holdings.medium import Medium
from kvstore.cli.interruption import DEADLINE_TO_LOOK, Deadline, DeadlineOption
from kvstore.cli.terminal import (
    Bar,
    Column,
    age_text,
    print_json_text,
    print_line,
    print_table,
    printable,
    rounded_size,
    say,
)
from kvstore.cli.tier_argument import TierArgument, parse_medium
from kvstore.codec.record import HEADER_BYTES, decode_header
from kvstore.errors import BackendUnavailableError, ConfigError, RecordError
from kvstore.types import BlockInfo, NamespaceInfo

_SCHEMA: Final = 1

_DEADLINE_TO_READ: Final = "1d"
"""Default deadline of commands that read or write every byte of a medium."""

_Namespaces = Annotated[
    list[str] | None,
    Option("--namespace", "-n", metavar="HEX", help="Only namespaces whose digest begins with this; may be repeated."),
]
_DryRun = Annotated[bool, Option("--dry-run", help="Print the planned changes without making them.")]


@contextlib.contextmanager
def _reading(tier: str, namespaces: Sequence[str] | None = None) -> Iterator[Medium]:
    """Open the medium of a tier; an ``OSError`` becomes a ``BackendError``."""
    argument = parse_medium(tier)
    try:
        with Medium(argument, namespaces or ()) as medium:
            yield medium
    except BrokenPipeError:
        raise  # stdout is closed; nothing is wrong with the medium.
    except OSError as error:
        raise BackendUnavailableError(
            f"{error.filename or 'a file'}: {error.strerror or error}. Check the disk.",
            backend=argument.backend,
        ) from error


def _expect_all(bar: Bar, medium: Medium, namespaces: Iterable[NamespaceInfo]) -> None:
    """Set the total of a visible progress bar to the bytes to read."""
    if bar.shown:
        bar.expect(sum(block.size_bytes for each in namespaces for block in medium.blocks(each)))


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _print_report(command: str, argument: TierArgument, **more: Any) -> None:
    report = {"schema": _SCHEMA, "command": command, "tier": argument.shown(), **more}
    print_json_text(json_module.dumps(report, indent=1, ensure_ascii=False))


def _say_each(what: str, rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        say(f"{what}: {row['key']} of namespace {row['namespace']}: {row['what']}")


_COLUMNS: Final = (
    Column("short", "namespace", left=True, style="bold"),
    Column("model", "model", left=True, rank=1, folds=True),
    Column("blocks", "blocks"),
    Column("size", "size"),
    Column("ages", "ages", rank=4),
    Column("unused", "unused", rank=3),
    Column("in_use", "in use", rank=2, left=True),
)


def inspect_command(
    tier: TierOption,
    namespace: _Namespaces = None,
    block: Annotated[
        str | None, Option(metavar="HEX", help="Show the header of the block whose key begins with this.")
    ] = None,
    keys: Annotated[
        bool, Option("--keys", help="List all blocks, one per line: namespace, key, bytes, last use (Unix time).")
    ] = False,
    deadline: DeadlineOption = DEADLINE_TO_LOOK,
    json: JsonFlag = False,
) -> None:
    """Show the contents of a medium. Namespaces with blocks, bytes and ages; keys; or the header of one block.

    Changes nothing.
    """
    with Deadline(deadline), _reading(tier, namespace) as medium:
        namespaces = chosen(medium.namespaces(), namespace or ())
        if block is not None:
            _show_header(medium, _found_block(medium, namespaces, block), json)
            return
        if keys:
            _list_keys(medium, namespaces, json)
            return
        rows = [summary(medium, each) for each in namespaces]
        fields = namespaces[0].fields if namespace and len(namespaces) == 1 else None
    if json:
        _print_report("inspect", medium.tier, rows=rows, fields=fields)
        return
    for row in rows:
        row |= {
            "short": row["namespace"][:12],
            "size": rounded_size(row["size_bytes"]),
            "ages": _ages(row["newest_s"], row["oldest_s"]),
            "unused": age_text(row["unused_s"]),
            "in_use": row["holder"] or ("no" if medium.knows_holders else None),
        }
    total = sum(row["size_bytes"] for row in rows)
    counts = [_counted(len(rows), "namespace"), _counted(sum(row["blocks"] for row in rows), "block")]
    print_table(rows, _COLUMNS, title=f"{medium.tier.name}: {', '.join(counts)}, {rounded_size(total)}")
    if fields is not None:
        print_line(f"namespace {namespaces[0].hex}")
        print_json_text(json_module.dumps(fields, indent=1, ensure_ascii=False))


def _ages(newest_s: float | None, oldest_s: float | None) -> str | None:
    """Return the ages of the youngest and the oldest block: ``"5m-12d"``."""
    newest, oldest = age_text(newest_s), age_text(oldest_s)
    return newest if newest == oldest else f"{newest}-{oldest}"


def _list_keys(medium: Medium, namespaces: Sequence[NamespaceInfo], json: bool) -> None:
    """Print blocks during the scan, because there may be millions."""
    if json:
        head = json_module.dumps(
            {"schema": _SCHEMA, "command": "inspect", "tier": medium.tier.shown()}, ensure_ascii=False
        )
        print_json_text(head[:-1] + ', "rows": [')
    comma = ""
    for namespace in namespaces:
        for block in medium.blocks(namespace):
            key, used_at = block.key.hex(), int(block.used_at) or None
            if json:
                row = {"namespace": namespace.hex, "key": key, "size_bytes": block.size_bytes, "used_at": used_at}
                print_json_text(comma + json_module.dumps(row))
                comma = ", "
            else:
                print_line(f"{namespace.hex} {key} {block.size_bytes} {used_at or '-'}")
    if json:
        print_json_text("]}")


def _found_block(medium: Medium, namespaces: Sequence[NamespaceInfo], start: str) -> tuple[NamespaceInfo, BlockInfo]:
    for namespace in namespaces:
        for block in medium.blocks(namespace):
            if block.key.hex().startswith(start.lower()):
                return namespace, block
    raise ConfigError(f"No block has a key that begins with {start!r} (in hexadecimal). List them: --keys.")


def _show_header(medium: Medium, found: tuple[NamespaceInfo, BlockInfo], json: bool) -> None:
    namespace, block = found
    (record,) = medium.read(namespace, [block])
    if record.error is not None:
        raise record.error
    if record.data is None:
        raise ConfigError(f"Block {block.key.hex()} has left the tier since the listing. Give another key.")
    row: dict[str, Any] = {"namespace": namespace.hex, "key": block.key.hex(), "size_bytes": block.size_bytes}
    try:
        header = decode_header(bytes(record.data[:HEADER_BYTES]))
    except RecordError as error:
        row["fault"] = str(error)
    else:
        row |= {name: value.hex() if isinstance(value, bytes) else value for name, value in header._asdict().items()}
    if json:
        print_json_text(json_module.dumps({"schema": _SCHEMA, "command": "inspect", "block": row}, indent=1))
        return
    for name, value in row.items():
        print_line(f"{name:<18}{value}")


_DEADLINE_TO_REMOVE: Final = "1h"
"""Default deadline of a command that removes blocks."""

_READ_RATE_LEAST: Final = 4096
"""A smaller ``scrub --rate``, in bytes per second, probably lacks its unit."""

_PACES_A_SECOND: Final = 4
"""Removal batches per second with ``gc --rate``."""

_SLEEP_S_MAX: Final = 0.1
"""Longest single sleep; the deadline is checked after each."""

_FAULT_COLUMNS: Final = (
    Column("namespace", "namespace", left=True, folds=True),
    Column("key", "key", left=True, folds=True),
    Column("fault", "fault", left=True, style="bold red"),
)
_PLAN_COLUMNS: Final = (
    Column("kind", "what", left=True),
    Column("short", "namespace", left=True, style="bold", folds=True),
    Column("model", "model", left=True, rank=1, folds=True),
    Column("why", "why", left=True, folds=True),
    Column("blocks", "blocks"),
    Column("size", "size"),
)

_Yes = Annotated[bool, Option("--yes", "-y", envvar="KVSTORE_YES", help="Remove without asking.")]
_ReadRate = Annotated[
    str | None, Option("--rate", metavar="SIZE", help="Read limit, bytes per second, such as 200MiB.")
]
_RemoveRate = Annotated[int, Option("--rate", metavar="N", help="Limit of removed blocks per second; 0 for none.")]


def scrub_command(
    tier: TierOption,
    namespace: _Namespaces = None,
    dry_run: _DryRun = False,
    yes: _Yes = False,
    rate: _ReadRate = None,
    deadline: DeadlineOption = _DEADLINE_TO_READ,
    json: JsonFlag = False,
) -> None:
    """Verify all records of a tier. Damaged ones are quarantined, and the status is 3 if there are any.

    Asks for confirmation unless --yes is given. If the medium fails or the deadline passes, the results so far and the
    reason are shown.
    """
    bytes_per_second = 0 if rate is None else int(size_option(rate, "--rate"))
    if 0 < bytes_per_second < _READ_RATE_LEAST:
        raise ConfigError(f"--rate is {rate!r}, less than a block a second. Give it a unit, such as '200MiB'.")
    if not dry_run:
        _check_can_ask(yes)
    with Deadline(deadline) as limit, _reading(tier, namespace) as medium, Bar("scrubbed") as bar:
        namespaces = chosen(medium.namespaces(), namespace or ())
        _expect_all(bar, medium, namespaces)

        def confirm(where: NamespaceInfo, damaged: int) -> bool:
            bar.pause()
            return _confirmed(f"Take {_counted(damaged, 'damaged block')} of {where.hex[:12]} out of the way?", yes)

        on_block = _progress_of(bar, limit, bytes_per_second)
        result = scrub(medium, namespaces, dry=dry_run, on_block=on_block, confirm=confirm)
    damaged = sum(fault["damage"] for fault in result.faults)
    if json:
        more = {name: value for name, value in asdict(result).items() if name != "faults"}
        _print_report("scrub", medium.tier, dry_run=dry_run, rows=result.faults, **more)
    else:
        print_line(
            f"{medium.tier.name}: {_counted(result.blocks, 'block')}, {rounded_size(result.size_bytes)} verified"
        )
        if result.faults:
            print_table(result.faults, _FAULT_COLUMNS)
    _say_each("not read", result.unread)
    if damaged:
        say(f"{damaged} damaged, {result.set_aside} taken out of the way")
    if result.error:
        say(f"ended early: {result.error}")
    if result.faults:
        raise Exit(ExitCode.WRONG_BYTES)
    if result.unread or result.error:
        raise Exit(ExitCode.FAILED)


def gc_command(
    tier: TierOption,
    namespace: Annotated[
        list[str] | None,
        Option("--namespace", "-n", metavar="HEX", help="Whole digests, for a backend that can't list namespaces."),
    ] = None,
    unused_for: Annotated[
        str, Option(metavar="AGE", help="Remove namespaces unused for this long; 0 for none.")
    ] = "30d",
    expire: Annotated[
        str | None,
        Option(metavar="AGE", help="Remove blocks unused for this long from namespaces not in use; 0 for none."),
    ] = None,
    keep: Annotated[
        list[str] | None,
        Option(metavar="HEX", help="Keep namespaces whose digest begins with this; may be repeated."),
    ] = None,
    dry_run: _DryRun = False,
    yes: _Yes = False,
    rate: _RemoveRate = 0,
    deadline: DeadlineOption = _DEADLINE_TO_REMOVE,
    json: JsonFlag = False,
) -> None:
    """Remove unused data. Files left by ended writers, and namespaces and blocks unused for long.

    Asks for confirmation unless --yes is given. Namespaces that an engine uses are kept.
    """
    age_s = float(duration_option(unused_for, "--unused-for"))
    expire_s = None if expire is None else float(duration_option(expire, "--expire"))
    if rate < 0:
        raise ConfigError(f"--rate is {rate}. Expected 0 or more blocks a second.")
    if not dry_run:
        _check_can_ask(yes)
    with Deadline(deadline) as limit, _reading(tier, namespace) as medium:
        if expire is None and medium.ttl_s:
            # The tier's ttl is the default, on media that record the last use by any engine.
            expire, expire_s = age_text(medium.ttl_s), medium.ttl_s
        plan = make_plan(medium, unused_for_s=age_s or None, expire_s=expire_s or None, keep=keep or ())
        rows = _plan_rows(plan, [summary(medium, each) for each in plan.namespaces], expire)
        if not json:
            _print_plan(medium.tier.name, plan, rows)
        done = {"stale": 0, "namespaces": 0, "blocks": 0}
        if rows and not dry_run and _confirmed(f"Remove {_total(rows)}?", yes):
            with Bar("removed", unit="blocks") as bar:
                bar.expect(sum(row.get("blocks", 0) for row in rows))
                batch = max(1, rate // _PACES_A_SECOND) if rate else None
                done = run_plan(medium, plan, on_removed=_progress_of(bar, limit, rate), batch=batch)
    if json:
        held = [each.hex for each in plan.held]
        _print_report("gc", medium.tier, dry_run=dry_run, rows=rows, removed=done, held=held, more=plan.more)
        return
    if dry_run:
        print_line("nothing was removed (--dry-run)")
    else:
        removed = [_counted(done[f"{what}s"], what) for what in ("namespace", "block")]
        print_line(f"removed: {done['stale']} stale files or objects, {', '.join(removed)}")
    if plan.more:
        print_line("more remain than one run takes: run it again")


def _plan_rows(plan: GcPlan, sizes: Sequence[dict[str, Any]], expire: str | None) -> list[dict[str, Any]]:
    """Return a row for each item to remove; ``sizes`` are the summaries of the plan's namespaces."""
    rows: list[dict[str, Any]] = [
        {"what": "stale", "name": piece.name, "why": piece.why, "size_bytes": piece.size_bytes} for piece in plan.stale
    ]
    for row in sizes:
        why = f"unused for {age_text(row['unused_s']) or 'long'}"
        found = {"model": row["model"], "blocks": row["blocks"], "size_bytes": row["size_bytes"]}
        rows.append({"what": "namespace", "name": row["namespace"], "why": why, **found})
    for namespace, blocks in plan.blocks:
        size_bytes = sum(block.size_bytes for block in blocks)
        found = {"model": namespace.model, "blocks": len(blocks), "size_bytes": size_bytes}
        rows.append({"what": "blocks", "name": namespace.hex, "why": f"unused for {expire}", **found})
    return rows


def _print_plan(name: str, plan: GcPlan, rows: Sequence[dict[str, Any]]) -> None:
    shown = [
        row
        | {
            "kind": row["what"],
            "short": row["name"] if row["what"] == "stale" else row["name"][:12],
            "size": rounded_size(row["size_bytes"]),
        }
        for row in rows
    ]
    if shown:
        print_table(shown, _PLAN_COLUMNS, title=f"{name}: {_total(rows)}")
    else:
        print_line(f"{name}: nothing to remove")
    for namespace in plan.held:
        print_line(f"namespace {namespace.hex[:12]}: in use, left alone")


def _total(rows: Sequence[dict[str, Any]]) -> str:
    return f"{_counted(len(rows), 'item')}, {rounded_size(sum(row['size_bytes'] for row in rows))}"


def _check_can_ask(yes: bool) -> None:
    """Check before the work begins that a terminal is available for the confirmation."""
    if not yes and not (sys.stdin is not None and sys.stdin.isatty()):
        raise ConfigError("There is no terminal to ask before something is removed. Give --yes, or --dry-run to look.")


def _confirmed(question: str, yes: bool) -> bool:
    """Ask for confirmation on stderr, unless ``--yes`` is given."""
    return yes or confirm(printable(question), err=True)


class Pace:
    """Sleeps to keep work below a rate (0: no limit); calls ``check``, which may raise, before each sleep."""

    def __init__(self, per_second: float, check: Callable[[], None], clock: Any = time) -> None:
        self._per_second = per_second
        self._check, self._clock = check, clock
        self._due = 0.0

    def spend(self, amount: float) -> None:
        """Sleep until this amount is within the rate; unused rate is not saved up."""
        self._check()
        if not self._per_second:
            return
        self._due = max(self._due, self._clock.monotonic()) + amount / self._per_second
        while (left := self._due - self._clock.monotonic()) > 0:
            self._clock.sleep(min(left, _SLEEP_S_MAX))
            self._check()


def _progress_of(bar: Bar, limit: Deadline, per_second: float = 0) -> Callable[[int], None]:
    """Return a function that shows progress, limits the rate, and ends the command at its deadline."""
    pace = Pace(per_second, limit.check)

    def on_done(amount: int) -> None:
        bar.advance(amount)
        pace.spend(amount)

    return on_done
