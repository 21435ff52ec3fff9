"""``kvstore-bench plot``: pictures of reports, and one self-contained HTML file."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from kvstore.cli.command_line import Argument, Option
from kvstore.cli.measuring.workload import listed
from kvstore.cli.reporting.plots import Picture, pictures_of
from kvstore.cli.reporting.report import read_report
from kvstore.cli.reporting.terminal import cell, latency_text, print_line, size_text
from kvstore.errors import ConfigError
from kvstore.secret import shown

_FORMATS: Final = ("png", "svg", "html")

Reports = Annotated[
    list[Path], Argument(metavar="REPORT.json ...", help="Reports of run, sweep, replay, or bench/vllm_e2e.py.")
]
Directory = Annotated[Path, Option("--out", "-o", metavar="DIR", help="Output directory; created if it is missing.")]
Formats = Annotated[str, Option("--format", metavar="NAMES", help="png, svg or html, separated by commas.")]

_CSS: Final = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff; margin: 0 auto; max-width: 70rem;
  padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0; } .quiet { color: #555; } .bad { color: #a40000; font-weight: 600; }
figure { margin: 1rem 0; } figure img { max-width: 100%; height: auto; } figcaption { color: #555; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem .25rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid #e3e3e3; }
th { font-weight: 600; border-bottom: 2px solid #999; } td.text, th.text { text-align: left; }
td.value { text-align: left; white-space: normal; overflow-wrap: anywhere; }
@media print { body { max-width: none; } }
"""
_TEXTS: Final = frozenset(
    {"system", "op", "host", "mix", "policy", "trace", "errors", "cache", "status", "check", "found"}
)
_HIDDEN: Final = frozenset({"bench", "latency_hdr", "last_error", "tiers", "payload", "report"})
_FIRST: Final = (
    "system", "op", "block_bytes", "jobs", "mix", "gb_per_s", "of_device", "latency_s_p50", "latency_s_p90",
    "latency_s_p99", "latency_s_p99_9", "latency_s_max", "ops_per_s", "cpu_s_per_gb", "hit_rate", "spin_rate", "errors",
    "verified",
)  # fmt: skip
"""The most important columns; all others follow in their order."""

_TITLES: Final = {
    "gb_per_s": "GB/s", "ops_per_s": "blocks/s", "cpu_s_per_gb": "CPU s/GB", "of_device": "of device",
    "block_bytes": "block", "capacity_bytes": "capacity", "blocks_per_job": "blocks/job", "hit_rate": "hits",
    "latency_s_p50": "p50", "latency_s_p90": "p90", "latency_s_p99": "p99", "latency_s_p99_9": "p99.9",
    "latency_s_max": "max", "spin_rate": "Python left",
}  # fmt: skip


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


def html_report(reports: Mapping[str, Mapping[str, Any]], pictures: Sequence[Picture]) -> str:
    """Return one self-contained page: charts, numbers, parameters and environment of reports, by file name."""
    parts = [_head(reports)]
    for picture in pictures:
        image = base64.b64encode(picture.render("svg")).decode("ascii")
        parts.append(
            f'<figure><img src="data:image/svg+xml;base64,{image}" alt="{html.escape(picture.title)}. '
            f'{html.escape(picture.about)}"><figcaption>{html.escape(picture.about)}</figcaption></figure>'
        )
    for name, report in reports.items():
        parts.append(_section(name if len(reports) > 1 else "", report))
    body = "\n".join(parts)
    title = html.escape(_title(reports))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_CSS}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    print_line(str(path))


def _title(reports: Mapping[str, Mapping[str, Any]]) -> str:
    commands = dict.fromkeys(str(report.get("command", "report")) for report in reports.values())
    return f"kvstore-bench {', '.join(commands)}"


def _head(reports: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"<h1>{html.escape(_title(reports))}</h1>"]
    for report in reports.values():
        place = report.get("environment", {})
        said = [
            place.get("date"), f"kvstore {place.get('kvstore')}", place.get("processor"),
            f"{place.get('cores_usable') or place.get('cores')} cores", place.get("system"),
        ]  # fmt: skip
        said += [_medium(target) for target in place.get("targets", []) if target]
        lines.append(f'<p class="quiet">{html.escape(" · ".join(str(part) for part in said if part))}</p>')
        if not report.get("complete", True):
            lines.append('<p class="bad">Aborted before the end; the figures are incomplete.</p>')
    return "\n".join(lines)


def _medium(target: Mapping[str, Any]) -> str:
    known = {True: "direct I/O", False: "buffered I/O", None: "in memory"}
    how = known[target.get("direct_io")]
    return f"{target.get('filesystem')} on {target.get('device')}, {how}"


def _section(name: str, report: Mapping[str, Any]) -> str:
    lines = [f"<h2>Numbers{': ' + html.escape(name) if name else ''}</h2>", _rows_table(report["rows"])]
    for block in report.get("wrong", []):
        text = f"Wrong: block {block.get('key')}: {block.get('why')}."
        lines.append(f'<p class="bad">{html.escape(text)}</p>')
    lines += [f"<p>{html.escape(note)}</p>" for note in report.get("notes", [])]
    for part in ("parameters", "environment"):
        if report.get(part):
            lines.append(f"<h2>{part.capitalize()}</h2>{_pairs_table(report[part])}")
    return "\n".join(lines)


def _rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "<p>None.</p>"
    every = dict.fromkeys([*_FIRST, *(name for row in rows for name in row)])
    names = [name for name in every if name not in _HIDDEN]
    names = [name for name in names if any(row.get(name) not in (None, {}, "") for row in rows)]
    head = "".join(f"<th{_class(name)}>{html.escape(_TITLES.get(name, name.replace('_', ' ')))}</th>" for name in names)
    lines = [
        "<tr>"
        + "".join(f"<td{_class(name)}>{html.escape(_text(name, row.get(name)))}</td>" for name in names)
        + "</tr>"
        for row in rows
    ]
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _pairs_table(values: Mapping[str, Any]) -> str:
    lines = []
    for name, value in values.items():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f'<tr><td class="text">{html.escape(name)}</td><td class="value">{html.escape(shown)}</td></tr>')
    return f'<div class="wide"><table><tbody>{"".join(lines)}</tbody></table></div>'


def _class(name: str) -> str:
    return ' class="text"' if name in _TEXTS else ""


def _text(name: str, value: Any) -> str:
    """Format a value of a row for a cell."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{count} {cause}" for cause, count in value.items())
    if name in ("block_bytes", "capacity_bytes"):
        return size_text(value)
    if name.startswith("latency_s_"):
        return latency_text(value) or ""
    if name in ("of_device", "hit_rate", "hit_rate_tokens", "spin_rate"):
        return f"{100 * value:.1f}%"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return cell(value)
