"""``kvstore-bench plot``: pictures of reports, and one HTML file with everything in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

from kvstore.cli.command_line import Argument, Option, Typer
from kvstore.cli.measuring.workload import listed
from kvstore.cli.reporting.html_report import html_report
from kvstore.cli.reporting.plots import pictures_of
from kvstore.cli.reporting.report import read_report
from kvstore.cli.reporting.terminal import print_line
from kvstore.errors import ConfigError
from kvstore.secret import shown

__all__ = ["add_commands"]

_FORMATS: Final = ("png", "svg", "html")

Reports = Annotated[
    list[Path], Argument(metavar="REPORT.json ...", help="Reports of run, sweep, replay, or bench/vllm_e2e.py.")
]
Directory = Annotated[Path, Option("--out", "-o", metavar="DIR", help="Output directory; created if it is missing.")]
Formats = Annotated[str, Option("--format", metavar="NAMES", help="png, svg or html, separated by commas.")]


def add_commands(app: Typer) -> None:
    """Add the command."""
    app.command("plot")(plot)


def plot(reports: Reports, out: Directory = Path("kvstore-bench-report"), formats: Formats = "png,svg,html") -> None:
    """Draw throughput, latency, hit rate and TTFT of reports.

    Throughput is drawn by block size, the hit rate by capacity. Several reports are drawn into the same pictures. The
    names of the files written are printed. report.html needs no other file.
    """
    kinds = listed(formats, str, "--format")
    for kind in kinds:
        if kind not in _FORMATS:
            raise ConfigError(f"--format has {shown(kind)}. Expected of {', '.join(_FORMATS)}.")
    found: dict[str, dict[str, Any]] = {}
    for path in reports:
        name = path.stem if path.stem not in found else str(path)
        found[name] = read_report(path)
        for row in found[name]["rows"]:
            row["report"] = name
    pictures = pictures_of([row for report in found.values() for row in report["rows"]])
    if not pictures:
        raise ConfigError("The reports have nothing that could be drawn. Give those of run, sweep or replay.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for picture in pictures:
            for kind in ("png", "svg"):
                if kind in kinds:
                    _write(out / f"{picture.name}.{kind}", picture.render(kind))  # type: ignore[arg-type]
        if "html" in kinds:
            _write(out / "report.html", html_report(found, pictures).encode())
    except OSError as error:
        raise ConfigError(f"{str(out)!r} can't be written to: {error.strerror}. Give another --out.") from error


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    print_line(str(path))
