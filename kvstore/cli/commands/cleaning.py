"""``kvstore scrub`` and ``gc``: remove damaged records, stale files and objects, and unused blocks."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final

from kvstore.cli.command_line import (
    Exit,
    ExitCode,
    JsonFlag,
    Option,
    TierOption,
    Typer,
    confirm,
    duration_option,
    size_option,
)
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
from kvstore.cli.holdings.care import GcPlan, chosen, make_plan, run_plan, scrub, summary
from kvstore.cli.interruption import Deadline, DeadlineOption
from kvstore.cli.reporting.terminal import Bar, Column, age_text, print_line, print_table, printable, rounded_size, say
from kvstore.errors import ConfigError
from kvstore.types import NamespaceInfo

__all__ = ["add_commands"]

_DEADLINE_TO_REMOVE: Final = "1h"
"""Default deadline of a command that removes blocks."""

_PACES_A_SECOND: Final = 4
"""Batches per second in which ``gc --rate`` removes."""

_SLEEP_S_MAX: Final = 0.1
"""Longest single sleep: the deadline is checked in between."""

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


def add_commands(app: Typer) -> None:
    """Add the commands."""
    app.command("scrub")(scrub_command)
    app.command("gc")(gc_command)


def scrub_command(
    tier: TierOption,
    namespace: Namespaces = None,
    dry_run: DryRun = False,
    yes: _Yes = False,
    rate: _ReadRate = None,
    deadline: DeadlineOption = DEADLINE_TO_READ,
    json: JsonFlag = False,
) -> None:
    """Verify all records of a tier. Damaged ones are quarantined, and the status is 3 if there are any.

    It asks before, unless --yes is given. If the medium fails on the way, or the time is over, what was found until
    then is shown, and why it ended.
    """
    bytes_per_second = 0 if rate is None else int(size_option(rate, "--rate"))
    if not dry_run:
        _check_can_ask(yes)
    with Deadline(deadline) as limit, reading(tier, namespace) as medium, Bar("scrubbed") as bar:
        namespaces = chosen(medium.namespaces(), namespace or ())
        expect_all(bar, medium, namespaces)
        pace = Pace(bytes_per_second, limit.check)

        def on_block(size_bytes: int) -> None:
            bar.advance(size_bytes)
            pace.spend(size_bytes)

        def confirm(where: NamespaceInfo, damaged: int) -> bool:
            bar.pause()
            return _confirmed(f"Take {counted(damaged, 'damaged block')} of {where.hex[:12]} out of the way?", yes)

        result = scrub(medium, namespaces, dry=dry_run, on_block=on_block, confirm=confirm)
    damaged = sum(fault["damage"] for fault in result.faults)
    if json:
        more = {name: value for name, value in asdict(result).items() if name != "faults"}
        print_report("scrub", medium.tier, dry_run=dry_run, rows=result.faults, **more)
    else:
        print_line(f"{medium.tier.name}: {counted(result.blocks, 'block')}, {rounded_size(result.size_bytes)} verified")
        if result.faults:
            print_table(result.faults, _FAULT_COLUMNS)
    say_each("not read", result.unread)
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
    dry_run: DryRun = False,
    yes: _Yes = False,
    rate: _RemoveRate = 0,
    deadline: DeadlineOption = _DEADLINE_TO_REMOVE,
    json: JsonFlag = False,
) -> None:
    """Remove unused data. Files left by ended writers, and namespaces and blocks unused for long.

    It asks before, unless --yes is given. Namespaces that an engine holds are left to it.
    """
    age_s = float(duration_option(unused_for, "--unused-for"))
    expire_s = None if expire is None else float(duration_option(expire, "--expire"))
    if rate < 0:
        raise ConfigError(f"--rate is {rate}. Expected 0 or more blocks a second.")
    if not dry_run:
        _check_can_ask(yes)
    with Deadline(deadline) as limit, reading(tier, namespace) as medium:
        if expire is None and medium.ttl_s:
            # Of a medium that knows when blocks were used, by whichever engine.
            expire, expire_s = age_text(medium.ttl_s), medium.ttl_s
        plan = make_plan(medium, unused_for_s=age_s or None, expire_s=expire_s or None, keep=keep or ())
        rows = _plan_rows(plan, [summary(medium, each) for each in plan.namespaces], expire)
        if not json:
            _print_plan(medium.tier.name, plan, rows)
        done = {"litter": 0, "namespaces": 0, "blocks": 0}
        if rows and not dry_run and _confirmed(f"Remove {_total(rows)}?", yes):
            with _removing(limit, sum(row.get("blocks", 0) for row in rows), rate) as on_removed:
                batch = max(1, rate // _PACES_A_SECOND) if rate else None
                done = run_plan(medium, plan, on_removed=on_removed, batch=batch)
    if json:
        held = [each.hex for each in plan.held]
        print_report("gc", medium.tier, dry_run=dry_run, rows=rows, removed=done, held=held, more=plan.more)
        return
    if dry_run:
        print_line("nothing was removed (--dry-run)")
    else:
        removed = [counted(done[f"{what}s"], what) for what in ("namespace", "block")]
        print_line(f"removed: {done['litter']} of litter, {', '.join(removed)}")
    if plan.more:
        print_line("more remain than one run takes: run it again")


@contextlib.contextmanager
def _removing(limit: Deadline, total: int, rate: int) -> Iterator[Any]:
    """Show how far a removal is, and keep it to its rate."""
    pace = Pace(rate, limit.check)
    with Bar("removed", unit="blocks") as bar:
        bar.expect(total)

        def on_removed(count: int) -> None:
            bar.advance(count)
            pace.spend(count)

        yield on_removed


def _plan_rows(plan: GcPlan, sizes: Sequence[dict[str, Any]], expire: str | None) -> list[dict[str, Any]]:
    """Return a row for all that is to go; ``sizes`` are the summaries of the plan's namespaces."""
    rows: list[dict[str, Any]] = [
        {"what": "litter", "name": piece.name, "why": piece.why, "size_bytes": piece.size_bytes}
        for piece in plan.litter
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
            "short": row["name"] if row["what"] == "litter" else row["name"][:12],
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
    return f"{counted(len(rows), 'item')}, {rounded_size(sum(row['size_bytes'] for row in rows))}"


def _check_can_ask(yes: bool) -> None:
    """Check that a terminal is available for the question at the end, before the work begins."""
    if not yes and not (sys.stdin is not None and sys.stdin.isatty()):
        raise ConfigError("There is no terminal to ask before something is removed. Give --yes, or --dry-run to look.")


def _confirmed(question: str, yes: bool) -> bool:
    """Ask for confirmation on stderr; return True without a question with ``--yes``."""
    return yes or confirm(printable(question), err=True)


class Pace:
    """Sleeps to keep work below a rate (0: no limit); calls ``check``, which may raise, before each sleep."""

    def __init__(self, per_second: float, check: Callable[[], None]) -> None:
        self._per_second = per_second
        self._check = check
        self._due = 0.0

    def spend(self, amount: float) -> None:
        """Sleep until this amount is within the rate; unused rate is not saved up."""
        self._check()
        if not self._per_second:
            return
        self._due = max(self._due, time.monotonic()) + amount / self._per_second
        while (left := self._due - time.monotonic()) > 0:
            time.sleep(min(left, _SLEEP_S_MAX))
            self._check()
