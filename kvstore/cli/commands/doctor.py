"""``kvstore-bench doctor``: checks this machine for problems with a tier, with advice."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Annotated, Final

from kvstore.cli.command_line import Exit, JsonFlag, Option, Typer
from kvstore.cli.commands.doctor_checks import (
    Finding,
    check_limits,
    check_path,
    check_reach,
    check_region,
    check_speed,
    check_vllm,
)
from kvstore.cli.commands.run import Tiers
from kvstore.cli.exit_codes import ExitCode
from kvstore.cli.reporting.quantities import size_option
from kvstore.cli.reporting.report import Report
from kvstore.cli.reporting.terminal import Column, print_json_text, print_table
from kvstore.cli.tier_argument import TierArgument, parse_tier

__all__ = ["add_commands"]

_COLUMNS: Final = (
    Column("status", "", left=True, style="bold"),
    Column("check", "check", left=True),
    Column("text", "found", left=True),
)

At = Annotated[Path | None, Option("--path", metavar="DIR", help="A directory to check, before there is a tier.")]
RegionSize = Annotated[
    str | None, Option("--region", metavar="SIZE", help="Planned size of the primary tier (cpu_bytes_to_use).")
]


def add_commands(app: Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(tier: Tiers = None, path: At = None, region: RegionSize = None, json: JsonFlag = False) -> None:
    """Check this machine and tiers. Each line is ok, warn or fail, with advice.

    Nothing is stored. A tier on a server is connected to; the exit status is 1 if any line says fail.
    """
    tiers = [parse_tier(text) for text in tier or []]
    region_bytes = None if region is None else int(size_option(region, "--region"))
    findings: list[Finding] = []
    places: list[tuple[Path, TierArgument | None]] = [(place, one) for one in tiers for place in one.paths]
    if path is not None or not tiers:
        places.append((path or Path(tempfile.gettempdir()), None))
    for place, one in places:
        findings += check_path(place, one)
    for one in tiers:
        findings += check_reach(one)
    findings += [*check_limits(), *check_speed(), *check_vllm(), *check_region(region_bytes)]
    rows = [dataclasses.asdict(finding) for finding in findings]
    if json:
        parameters = {"tiers": [one.shown() for one in tiers]}
        print_json_text(Report("doctor", rows=rows, parameters=parameters).as_json())
    else:
        texts = [_sentences(finding) for finding in findings]
        print_table([row | {"text": text} for row, text in zip(rows, texts, strict=True)], _COLUMNS)
    if any(finding.status == "fail" for finding in findings):
        raise Exit(ExitCode.FAILED)


def _sentences(finding: Finding) -> str:
    if not finding.advice:
        return finding.found
    end = "" if finding.found.endswith((".", "?", "!")) else "."
    return f"{finding.found}{end} {finding.advice}"
