"""``kvstore-bench plot``: charts of reports, as PNG, SVG or an HTML page. Only this module uses matplotlib."""

from __future__ import annotations

import base64
import html
import importlib
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from kvstore.cli.bench.histogram import Latencies
from kvstore.cli.bench.workload import listed
from kvstore.cli.command_line import Argument, Option
from kvstore.cli.report import read_report
from kvstore.cli.terminal import cell, latency_text, print_line, rounded_size, size_text
from kvstore.errors import ConfigError
from kvstore.secret import shown

_FORMATS: Final = ("png", "svg", "html")

Reports = Annotated[
    list[Path], Argument(metavar="REPORT.json ...", help="Reports of run, sweep, replay, or bench/vllm_e2e.py.")
]
Directory = Annotated[
    Path,
    Option(
        "--out", "-o", metavar="DIR|FILE",
        help="Output directory, created if it is missing; or one file, such as x.png: several charts are x-NAME.png.",
    ),
]  # fmt: skip
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
"""The first columns; all others follow in the order of the report."""

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
    file_kind = out.suffix.removeprefix(".")
    kinds = [file_kind] if file_kind in _FORMATS else listed(formats, str, "--format")
    for kind in kinds:
        if kind not in _FORMATS:
            raise ConfigError(f"--format has {shown(kind)}. Expected names of: {', '.join(_FORMATS)}.")
    found: dict[str, dict[str, Any]] = {}
    for path in reports:
        name = path.stem if path.stem not in found else str(path)
        found[name] = read_report(path)
        for row in found[name]["rows"]:
            row["report"] = name
    pictures = pictures_of([row for report in found.values() for row in report["rows"]])
    if not pictures:
        raise ConfigError("The reports contain nothing to plot. Give reports of run, sweep or replay.")
    try:
        _write_all(out, kinds, found, pictures)
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


def _write_all(
    out: Path, kinds: Sequence[str], reports: Mapping[str, Mapping[str, Any]], pictures: Sequence[Picture]
) -> None:
    """Write the pictures and the page into the directory ``out``, or into the file ``out`` if its name has a format."""
    is_file = out.suffix.removeprefix(".") in _FORMATS
    (out.parent if is_file else out).mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        for kind in ("png", "svg"):
            if kind in kinds:
                one = out if len(pictures) == 1 else out.with_name(f"{out.stem}-{picture.name}{out.suffix}")
                _write(one if is_file else out / f"{picture.name}.{kind}", picture.render(kind))
    if "html" in kinds:
        _write(out if is_file else out / "report.html", html_report(reports, pictures).encode())


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    print_line(str(path))


def _title(reports: Mapping[str, Mapping[str, Any]]) -> str:
    commands = dict.fromkeys(str(report.get("command", "report")) for report in reports.values())
    return f"kvstore-bench {', '.join(commands)}"


def _head(reports: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"<h1>{html.escape(_title(reports))}</h1>"]
    for report in reports.values():
        found = report.get("environment", {})
        facts = [
            found.get("date"), f"kvstore {found.get('kvstore')}", found.get("processor"),
            f"{found.get('cores_usable') or found.get('cores')} cores", found.get("system"),
        ]  # fmt: skip
        facts += [_medium(target) for target in found.get("targets", []) if target]
        lines.append(f'<p class="quiet">{html.escape(" · ".join(str(fact) for fact in facts if fact))}</p>')
        if not report.get("complete", True):
            lines.append('<p class="bad">Aborted before the end; the figures are incomplete.</p>')
    return "\n".join(lines)


def _medium(target: Mapping[str, Any]) -> str:
    method = {True: "direct I/O", False: "buffered I/O", None: "in memory"}[target.get("direct_io")]
    return f"{target.get('filesystem')} on {target.get('device')}, {method}"


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
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f'<tr><td class="text">{html.escape(name)}</td><td class="value">{html.escape(text)}</td></tr>')
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


Rows = Sequence[Mapping[str, Any]]
Format = Literal["png", "svg"]

_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F3C8D", "#4D4D4D")
"""The palette of Okabe and Ito, which suits any kind of colour vision, without its pale colours."""

_FIXED: Final = {"kvstore-file": _COLOURS[0], "vllm-fs": _COLOURS[1]}
"""Colours of common systems, the same in all pictures."""

_CEILINGS: Final = {"fio": "#9A9A9A", "raw": "#C4C4C4"}
_WITHOUT: Final = {"none": "#9A9A9A", "none-again": "#C4C4C4"}
"""Shades of grey for the drive without a tier, and for engines without offloading."""

_PERCENTILES: Final = {"latency_s_p50": 0.5, "latency_s_p90": 0.9, "latency_s_p99": 0.99, "latency_s_p99_9": 0.999}
_OPS: Final = ("store", "load")
_OF_ENGINES: Final = (
    ("ttft_s", "ttft", "Time to the first token", "Median of all requests; lower is better.", "s"),
    (
        "tokens_per_s",
        "engine-throughput",
        "Throughput of the engine",
        "Prompt and output tokens per second; higher is better.",
        "tokens/s",
    ),
)
"""Field, name, title, description and unit of the pictures of bench/vllm_e2e.py and bench/vllm_overhead.py."""
_PANELS_MAX: Final = 4
_LEVEL_LABELS_MAX: Final = 12
"""Maximum bars in a picture with horizontal numbers; with more bars, the numbers are rotated to fit."""
_TICK_SPACE: Final = 0.12
"""Minimum distance of labels on an axis, as a share of its length."""
_STYLE: Final = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#E3E3E3",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "kvstore",
}


@dataclass(frozen=True, slots=True)
class Picture:
    """One chart of a report."""

    name: str  # File name without extension: ``"throughput"``.
    title: str
    about: str  # Text alternative in one sentence, with the method.
    draw: Callable[[Any], None]  # Draws into a matplotlib figure.
    width: float = 9.0  # Inches.
    height: float = 4.0  # Inches.

    def render(self, kind: Format) -> bytes:
        """Return the picture's bytes; the same report gives the same bytes."""
        check_pictures()
        matplotlib = importlib.import_module("matplotlib")
        figures = importlib.import_module("matplotlib.figure")
        with matplotlib.rc_context(_STYLE):
            figure = figures.Figure(figsize=(self.width, self.height), layout="constrained")
            figure.suptitle(self.title, x=0.01, ha="left", weight="bold")
            self.draw(figure)
            out = io.BytesIO()
            # A date would make renderings of the same report differ.
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            figure.savefig(out, format=kind, dpi=150, metadata=metadata)
        return out.getvalue()


def check_pictures() -> None:
    """Check that charts can be drawn, before a measurement begins."""
    try:
        importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        raise ConfigError(f"Pictures need {error.name!r}. Install it: pip install 'vllm-kvstore[plot]'.") from error


def pictures_of(rows: Rows) -> list[Picture]:
    """Return all pictures that can be drawn from the rows of one or more reports."""
    found = []
    moved = [row for row in rows if row.get("op") in _OPS and row.get("gb_per_s") is not None]
    if moved:
        sizes = sorted({row["block_bytes"] for row in moved})
        found.append(
            Picture(
                "throughput", "Throughput by block size",
                "Payload per second, in 10^9 bytes; grey: the drive without a tier.",
                lambda figure: _throughput(figure, moved, sizes),
                height=4.2,
            )
        )  # fmt: skip
    timed = [row for row in moved if _latencies(row)]
    if timed:
        panels = sorted({row["block_bytes"] for row in timed})[:_PANELS_MAX]
        found.append(
            Picture(
                "latency", "Latency of a job by percentile",
                "Each curve covers all jobs, from the fastest to the slowest; lower is better.",
                lambda figure: _latency(figure, timed, panels),
                width=max(5.5, 4.5 * len(panels)), height=4.4,
            )
        )  # fmt: skip
    served = [row for row in rows if row.get("bench") == "vllm"]
    for field, name, title, about, unit in _OF_ENGINES:
        if measured := [row for row in served if row.get(field) is not None]:
            found.append(Picture(name, title, about, _engines(measured, field, unit)))
    replayed = [row for row in rows if row.get("bench") == "replay" and row.get("capacity_bytes")]
    if replayed:
        found.append(
            Picture(
                "hit-rate", "Hit rate by capacity",
                "Share of the prompts' blocks that need not be computed, by capacity and eviction policy.",
                lambda figure: _hit_rate(figure, replayed),
                width=7.0,
            )
        )  # fmt: skip
    return found


def _throughput(figure: Any, rows: Rows, sizes: Sequence[int]) -> None:
    """Draw a panel for stores and one for loads, each with a group of bars for each block size."""
    ops = [op for op in _OPS if any(row["op"] == op for row in rows)]
    panels = figure.subplots(1, len(ops), sharey=False, squeeze=False)[0]
    names = _series(rows)
    width = 0.8 / len(names)
    for panel, op in zip(panels, ops, strict=True):
        for i, (name, colour) in enumerate(names.items()):
            heights = [
                max((row["gb_per_s"] for row in rows if (_name(row, rows), row["op"], row["block_bytes"])
                     == (name, op, size)), default=0.0)
                for size in sizes
            ]  # fmt: skip
            places = [at - 0.4 + width * (i + 0.5) for at in range(len(sizes))]
            panel.bar(places, heights, width * 0.92, color=colour[0], alpha=colour[1], label=name)
        panel.set_title(op, loc="left")
        panel.set_xticks(range(len(sizes)), [size_text(size) for size in sizes])
        panel.set_ylabel("GB/s")
        panel.tick_params(axis="x", length=0)
    _legend(figure, panels)


def _legend(figure: Any, panels: Sequence[Any]) -> None:
    """Draw one legend for all panels, with each label once."""
    found: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=min(4, len(found)))


def _engines(rows: Rows, field: str, unit: str) -> Callable[[Any], None]:
    """Return a function that draws a value of engines, with a panel per workload and a bar per system."""
    ops = list(dict.fromkeys(row["op"] for row in rows))
    systems = list(dict.fromkeys(row["system"] for row in rows))
    systems.sort(key=lambda system: system not in _WITHOUT)
    colours = _colours_of(systems)
    upright = len(systems) * len(ops) > _LEVEL_LABELS_MAX

    def draw(figure: Any) -> None:
        panels = figure.subplots(1, len(ops), squeeze=False)[0]
        for panel, op in zip(panels, ops, strict=True):
            measured = {row["system"]: row[field] for row in rows if row["op"] == op}
            for at, system in enumerate(system for system in systems if system in measured):
                panel.bar(at, measured[system], 0.8, color=colours[system], label=system)
                panel.annotate(
                    latency_text(measured[system]) if unit == "s" else cell(float(measured[system])),
                    (at, measured[system]), xytext=(0, 2), textcoords="offset points", ha="center", va="bottom",
                    fontsize=9, rotation=90 if upright else 0,
                )  # fmt: skip
            panel.set_title(op, loc="left")
            panel.set_xticks([])
            panel.margins(y=0.3 if upright else 0.05)
        panels[0].set_ylabel(unit)
        _legend(figure, panels)

    return draw


def _latency(figure: Any, rows: Rows, sizes: Sequence[int]) -> None:
    """Draw a panel for each block size: curves over percentiles, solid for loads, dashed for stores."""
    panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    most = max((row["jobs"] for row in rows if row["system"] not in _CEILINGS), default=1)
    shown = _curves([row for row in rows if row["jobs"] == most or row["system"] in _CEILINGS], most)
    colours = _series(shown)
    ticks = {0.0: "0", 0.5: "50", 0.9: "90", 0.99: "99", 0.999: "99.9", 0.9999: "99.99"}
    for panel, size in zip(panels, sizes, strict=True):
        last = 0.9
        for row in (row for row in shown if row["block_bytes"] == size):
            points = _latencies(row)
            last = max(last, points[-1][0])
            name = _name(row, shown)
            panel.plot(
                [1 / (1 - share) for share, _ in points], [seconds for _, seconds in points], color=colours[name][0],
                alpha=colours[name][1],
                linestyle="-" if row["op"] == "load" else "--", linewidth=1.8, label=f"{name} {row['op']}",
            )  # fmt: skip
        panel.set_xscale("log")
        panel.set_yscale("log")
        named = {share: text for share, text in ticks.items() if share <= last}
        panel.set_xticks([1 / (1 - share) for share in named], list(named.values()), minor=False)
        panel.set_xticks([], minor=True)
        panel.yaxis.set_major_formatter(lambda value, _: latency_text(value) or "")
        panel.yaxis.set_minor_formatter(lambda value, _: "")
        panel.set_title(f"{size_text(size)} blocks, {most} concurrent job{'s' * (most != 1)}", loc="left")
        panel.set_xlabel("percentile")
    panels[0].set_ylabel("latency")
    _legend(figure, panels)


def _hit_rate(figure: Any, rows: Rows) -> None:
    """Draw a line for each policy."""
    panel = figure.subplots()
    names = list(dict.fromkeys(_policy(row, rows) for row in rows))
    for i, name in enumerate(names):
        points = sorted((row["capacity_bytes"], row["hit_rate"]) for row in rows if _policy(row, rows) == name)
        panel.plot(
            [size for size, _ in points], [100 * rate for _, rate in points], marker="o", markersize=5, linewidth=1.8,
            # Different line styles keep overlapping lines visible.
            linestyle=("-", "--", ":", "-.")[i % 4], color=_COLOURS[i % len(_COLOURS)], label=name,
        )  # fmt: skip
    panel.set_xscale("log", base=2)
    capacities = _spaced(sorted({row["capacity_bytes"] for row in rows}))
    panel.set_xticks(capacities, [rounded_size(size) for size in capacities], minor=False)
    panel.set_xticks([], minor=True)
    panel.set_xlabel("capacity")
    panel.set_ylabel("hit rate, % of blocks")
    panel.set_ylim(bottom=0)
    _legend(figure, [panel])


def _spaced(values: Sequence[int]) -> list[int]:
    """Return those of ascending values whose labels don't overlap on a logarithmic axis."""
    spaced = list(values[:1])
    for value in values:
        if math.log(value / spaced[-1]) >= _TICK_SPACE * math.log(values[-1] / values[0]) > 0:
            spaced.append(value)
    return spaced


def _curves(rows: Rows, jobs: int) -> Rows:
    """Return one row for each curve: if a drive has several, the one with this number of jobs, or else the fastest."""
    found: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in sorted(rows, key=lambda row: (row["jobs"] == jobs, row["gb_per_s"])):
        found[_name(row, rows), row["op"], row["block_bytes"]] = row
    return [row for row in rows if row is found[_name(row, rows), row["op"], row["block_bytes"]]]


def _latencies(row: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return shares of jobs with their latencies; for fio, which has no histogram, its percentiles."""
    if row.get("latency_hdr"):
        return Latencies.from_text(row["latency_hdr"]).points()
    return [(share, row[name]) for name, share in _PERCENTILES.items() if row.get(name) is not None]


def _series(rows: Rows) -> dict[str, tuple[str, float]]:
    """Return the compared series, with colour and opacity, in the order of the rows; baselines of the drive come last.

    A system has one colour, and its series differ in opacity.
    """
    systems: dict[str, dict[str, None]] = {}
    for row in sorted(rows, key=lambda row: row["system"] in _CEILINGS):
        systems.setdefault(row["system"], {})[_name(row, rows)] = None
    found: dict[str, tuple[str, float]] = {}
    colours = _colours_of(list(systems))
    for system, names in systems.items():
        found |= {name: (colours[system], 1 - 0.7 * k / len(names)) for k, name in enumerate(names)}
    return found


def _colours_of(systems: Sequence[str]) -> dict[str, str]:
    known = _FIXED | _CEILINGS | _WITHOUT
    free = [colour for colour in _COLOURS if colour not in _FIXED.values()]
    others = [system for system in systems if system not in known]
    return known | {system: free[i % len(free)] for i, system in enumerate(others)}


def _name(row: Mapping[str, Any], rows: Rows) -> str:
    """Return the label of a system in a chart: its name, with further properties only if the name is not unique."""
    parts = [str(row["system"])]
    if row["system"] in _CEILINGS:
        return parts[0]
    others = [other for other in rows if other["system"] == row["system"]]
    for key, text in (("host", "{} I/O"), ("jobs", "{} jobs"), ("mix", "{}"), ("spin", "spin {}"), ("report", "{}")):
        values = {other.get(key) for other in others}
        # Stores and loads of a sweep have different mixes, but are in different panels.
        if len(values) > 1 and not (key == "mix" and values <= {"store", "load"}):
            parts.append("1 job" if (key, row.get(key)) == ("jobs", 1) else text.format(row.get(key)))
    return ", ".join(parts)


def _policy(row: Mapping[str, Any], rows: Rows) -> str:
    """Return the label of a line of hit rates: the policy, with system and trace where they differ."""
    differing = [name for name in ("system", "trace") if len({other.get(name) for other in rows}) > 1]
    return ", ".join(str(row.get(name)) for name in ("policy", *differing))
