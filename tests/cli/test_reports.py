"""Outputs from reports: plots, one HTML page; and the doctor's lines."""

from __future__ import annotations

import copy
import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from kvstore.cli.bench.histogram import Latencies
from kvstore.cli.bench.plot import html_report, pictures_of
from kvstore.cli.report import Report, median_row, probe_direct
from kvstore.cli.terminal import cell, latency_text, rounded_size
from tests.cli.cli import report_of
from tests.cli.in_process import run_here

ROW: dict[str, Any] = {
    "bench": "kvstore-bench", "system": "kvstore-file", "host": "thread", "op": "load", "block_bytes": 131072,
    "blocks_per_job": 16, "jobs": 4, "mix": "load", "spin": False, "rate": None, "gb_per_s": 2.0, "ops_per_s": 15000.0,
    "cpu_s_per_gb": 0.5, "latency_s_p50": 0.001, "latency_s_p99": 0.004, "verified": True, "errors": {},
}  # fmt: skip


def latencies(seed: int, scale: float = 0.001) -> Latencies:
    """Return a thousand latencies of about a millisecond."""
    found = Latencies()
    numbers = random.Random(seed)
    for _ in range(1000):
        found.add(scale * numbers.lognormvariate(0, 0.5))
    return found


def report_file(path: Path, *rows: dict[str, Any], **parameters: Any) -> Path:
    """Write a report."""
    path.write_text(Report("run", rows=[dict(row) for row in rows], parameters=parameters).as_json())
    return path


def measured_rows() -> list[dict[str, Any]]:
    """Return rows of two systems and two block sizes, and of a replay."""
    rows = [
        ROW | {"system": system, "op": op, "block_bytes": size} | latencies(i).as_row()
        for i, (system, op, size) in enumerate(
            (system, op, size)
            for system in ("kvstore-file", "raw")
            for op in ("store", "load")
            for size in (131072, 2097152)
        )
    ]
    replays = [
        {"bench": "replay", "system": "kvstore+file", "policy": policy, "capacity_bytes": size << 30, "hit_rate": rate}
        for policy in ("lru", "arc")
        for size, rate in ((1, 0.2), (4, 0.5))
    ]
    return rows + replays


def test_other_files_are_refused(tmp_path: Path) -> None:
    """A file that is no report, and a report of an unknown schema, are refused."""
    path = tmp_path / "a.json"
    path.write_text('{"schema": 1}')
    assert "has no rows" in run_here("bench", "plot", str(path)).stderr
    path.write_text('{"schema": 99, "rows": []}')
    assert "schema 99" in run_here("bench", "plot", str(path)).stderr


@pytest.mark.program
def test_plot_writes_pictures_and_a_page(tmp_path: Path) -> None:
    """Every plot exists as PNG and SVG, and the page has all of them without external resources."""
    path = report_file(tmp_path / "a.json", *measured_rows())
    done = run_here("bench", "plot", str(path), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    names = {"throughput", "latency", "hit-rate"}
    written = {found.name for found in (tmp_path / "out").iterdir()}
    assert written == {f"{name}.{kind}" for name in names for kind in ("png", "svg")} | {"report.html"}
    assert sorted(done.stdout.split()) == sorted(str(tmp_path / "out" / name) for name in written)
    for name in names:
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n")
        assert "</svg>" in (tmp_path / "out" / f"{name}.svg").read_text()
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<img ") == 3
    assert all(source.startswith("data:image/svg+xml;base64,") for source in re.findall(r'(?:src|href)="([^"]*)', page))
    assert "<script" not in page and "url(" not in page


@pytest.mark.program
def test_plot_takes_the_name_of_a_file(tmp_path: Path) -> None:
    """An output with the ending of a format is a file; several charts have their names in those of the files."""
    both = report_file(tmp_path / "a.json", *(row for row in measured_rows() if row.get("op") in ("store", "load")))
    replayed = report_file(tmp_path / "b.json", *(row for row in measured_rows() if row.get("bench") == "replay"))
    run_here("bench", "plot", str(both), "--out", str(tmp_path / "x.png"))
    run_here("bench", "plot", str(replayed), "--out", str(tmp_path / "y.svg"))
    run_here("bench", "plot", str(both), "--out", str(tmp_path / "z.html"))
    assert {path.name for path in tmp_path.iterdir()} == {
        "a.json", "b.json", "x-throughput.png", "x-latency.png", "y.svg", "z.html",
    }  # fmt: skip


def test_each_curve_of_latency_is_drawn_once() -> None:
    """A drive measured with several numbers of jobs has one curve: that with the jobs of the title."""
    rows = [
        ROW | {"system": system, "op": "load", "jobs": jobs, "gb_per_s": 1.0, "latency_s_p50": jobs / 1000}
        for system in ("kvstore-file", "raw")
        for jobs in (1, 2)
    ]
    pictures = {picture.name: picture for picture in pictures_of(rows)}
    figure = Figure()
    pictures["latency"].draw(figure)
    (panel,) = figure.axes
    assert [line.get_label() for line in panel.lines] == ["kvstore-file load", "raw load"]
    assert [line.get_ydata()[0] for line in panel.lines] == [0.002, 0.002]
    assert panel.get_title(loc="left").endswith("2 concurrent jobs")


def test_one_job_is_singular() -> None:
    """The title of a panel says "1 concurrent job", and labels say "1 job"."""
    rows = [ROW | {"system": "kvstore-file", "op": "load", "jobs": jobs} for jobs in (1, 2)]
    for shown, expected in ((rows[:1], "1 concurrent job"), (rows, "2 concurrent jobs")):
        figure = Figure()
        {picture.name: picture for picture in pictures_of(shown)}["latency"].draw(figure)
        assert figure.axes[0].get_title(loc="left").endswith(expected)
    figure = Figure()
    {picture.name: picture for picture in pictures_of(rows)}["throughput"].draw(figure)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "kvstore-file, 1 job",
        "kvstore-file, 2 jobs",
    ]


def test_engines_have_pictures() -> None:
    """TTFT and throughput of bench/vllm_e2e.py are plotted by workload; each system is in the legend, in one colour."""
    rows = [
        {"bench": "vllm", "op": op, "system": system, "ttft_s": seconds, "tokens_per_s": 1000 / seconds}
        for op in ("restart", "chat")
        for system, seconds in (("none", 3.5), ("kvstore-file", 0.2), ("vllm-fs", 0.3), ("kvstore-redis", 0.25))
    ]
    pictures = {picture.name: picture for picture in pictures_of(rows)}
    assert set(pictures) == {"ttft", "engine-throughput"}
    for picture in pictures.values():
        figure = Figure()
        picture.draw(figure)
        (legend,) = figure.legends
        names = [text.get_text() for text in legend.get_texts()]
        assert names == ["none", "kvstore-file", "vllm-fs", "kvstore-redis"]
        in_legend = [to_hex(patch.get_facecolor()) for patch in legend.get_patches()]
        for panel in figure.axes:
            assert [to_hex(bar.get_facecolor()) for bar in panel.patches] == in_legend
        assert len(set(in_legend)) == 4
        assert b"</svg>" in picture.render("svg")


def test_the_drive_itself_is_in_every_chart() -> None:
    """``raw`` and ``fio`` are in the legends of throughput and latency, in grey, even if one has only loads."""
    fio = ROW | {"system": "fio", "op": "load", "jobs": 32}
    pictures = {picture.name: picture for picture in pictures_of([*measured_rows(), fio])}
    for name, endings in (("throughput", ("",)), ("latency", (" load", " store"))):
        figure = Figure()
        pictures[name].draw(figure)
        names = {text.get_text() for text in figure.legends[0].get_texts()}
        wanted = {f"{system}{ending}" for system in ("raw", "kvstore-file") for ending in endings}
        assert {*wanted, f"fio{endings[0]}"} <= names
    figure = Figure()
    pictures["throughput"].draw(figure)
    handles = zip(figure.legends[0].get_texts(), figure.legends[0].get_patches(), strict=True)
    colours = {text.get_text(): to_hex(patch.get_facecolor()) for text, patch in handles}
    assert all(len({colours[name][i : i + 2] for i in (1, 3, 5)}) == 1 for name in ("raw", "fio"))


def test_the_page_shows_text_as_text() -> None:
    """Report contents can't become markup."""
    row = ROW | {"system": "<script>alert(1)</script>"}
    report = Report("run", rows=[row], notes=["<b>"]).as_dict()
    page = html_report({"<i>": report, "b": copy.deepcopy(report)}, [])
    assert "<script>" not in page and "<b>" not in page and "<i>" not in page


def test_a_directory_without_files_has_no_direct_io(tmp_path: Path) -> None:
    """Where no file can be created, the probe of direct I/O returns False, and its cleanup raises nothing."""
    (tmp_path / "file").touch()
    assert not probe_direct(tmp_path / "file")
    assert not probe_direct(tmp_path / "missing")


@pytest.mark.program
def test_pictures_are_the_same_each_time() -> None:
    """The same rows give the same bytes."""
    for picture in pictures_of(measured_rows()):
        assert picture.render("svg") == picture.render("svg")


def test_percentiles_are_those_of_the_numbers() -> None:
    """A histogram's percentiles are within 0.1 % of the sorted list's, also after serialization and merging."""
    numbers = sorted(random.Random(3).lognormvariate(0, 1) / 1000 for _ in range(5000))
    halves = [Latencies(), Latencies()]
    for i, number in enumerate(numbers):
        halves[i % 2].add(number)
    merged = Latencies.from_text(halves[0].as_text())
    merged.merge(halves[1])
    assert merged.count == 5000
    for percent in (50, 90, 99, 99.9):
        exact = numbers[min(4999, round(percent / 100 * 5000) - 1)]
        assert merged.percentile(percent) == pytest.approx(exact, rel=0.002)
    with pytest.raises(ValueError, match="no HDR histogram"):
        Latencies.from_text("nothing")


def test_a_row_is_the_median() -> None:
    """Several runs become the median of each number, with the number of runs."""
    rows = [ROW | {"gb_per_s": rate} for rate in (1.0, 5.0, 2.0)]
    assert median_row(rows) == ROW | {"gb_per_s": 2.0, "runs": 3}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0000021, "2.1 us"), (0.00125, "1.25 ms"), (0.9999, "1 s"), (0.25, "250 ms"), (75.0, "75 s")],
)
def test_latencies_have_units(seconds: float, text: str) -> None:
    """A latency is shown with the unit that suits it."""
    assert latency_text(seconds) == text


def test_backends_lists_the_built_in_backends() -> None:
    """The built-in backends are listed, as a table and as JSON."""
    rows = report_of(run_here("bench", "backends", "--json"))["rows"]
    found = {row["backend"]: row for row in rows}
    assert {"file", "memory", "nvme", "redis"} <= set(found)
    assert "capacity" in found["file"]["options"]
    assert "nvme" in run_here("bench", "backends").stdout


def test_doctor_finds_a_fit_machine(tmp_path: Path) -> None:
    """All subjects are checked, nothing is created, and a usable directory does not fail."""
    tier = f"file://{tmp_path}/kv?capacity=1MiB&reserve=0"
    done = run_here("bench", "doctor", "-t", tier, "--json")
    rows = {row["check"]: row for row in report_of(done)["rows"]}
    subjects = {"file system", "direct I/O", "space", "io_uring", "nofile", "memlock", "checksum", "codec", "vLLM"}
    assert subjects | {"/dev/shm", "huge pages"} <= set(rows)
    assert all(row["advice"] for row in rows.values() if row["status"] != "ok")
    assert rows["space"]["status"] == "ok"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "check", "said"),
    [
        (["-t", "redis://:hunter2@127.0.0.1:1/0"], "redis tier", "Connection refused"),
        (["-t", "file:///no/such/place?capacity=1GiB"], "path", "does not exist"),
        (["-t", "file:///tmp?capacity=1GiB"], "path", "a directory below it, such as /tmp/kv"),
        (["--region", "1PiB"], "/dev/shm", "does not fit"),
    ],
)
def test_doctor_reports_problems_with_advice(arguments: list[str], check: str, said: str) -> None:
    """Problems that would stop an engine fail here, with advice, and without the password."""
    done = run_here("bench", "doctor", *arguments, "--json")
    assert done.returncode == 1
    failed = [row for row in json.loads(done.stdout)["rows"] if row["status"] == "fail"]
    assert [row["check"] for row in failed] == [check]
    assert said in f"{failed[0]['found']} {failed[0]['advice']}"
    assert failed[0]["advice"]
    assert "hunter2" not in done.stdout + done.stderr


def test_doctor_warns_of_a_capacity_that_does_not_fit(tmp_path: Path) -> None:
    """A capacity larger than the free space is a warning with advice."""
    done = run_here("bench", "doctor", "-t", f"file://{tmp_path}/kv?capacity=1PiB")
    assert re.search(r"warn +space", done.stdout), done.stdout


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.66e-05, "0.0000266"), (1404.0, "1,404"), (99.96, "100"), (0.5, "0.5"), (0.0, "0"), (1e-9, "0.000000001")],
)
def test_numbers_have_no_exponents(value: float, text: str) -> None:
    """Tables and charts show small and large numbers in full."""
    assert cell(value) == text


def test_sizes_have_no_exponents() -> None:
    """A size just below a thousand units is shown in the next one."""
    assert (rounded_size(999), rounded_size(1023 * 1024 - 1), rounded_size(999_900 * 1024)) == (
        "999 B", "0.999 MiB", "976 MiB"
    )  # fmt: skip


@pytest.mark.program
def test_labels_of_pictures_do_not_overlap() -> None:
    """Numbers at bars and labels of axes stay legible with many systems, and with capacities close together."""
    systems = ("none", "none-again", "vllm-cpu", "vllm-fs", "kvstore-file", "kvstore-redis", "other")
    rows: list[dict[str, Any]] = [
        {"bench": "vllm", "system": system, "op": op, "tokens_per_s": 1404.0 + at, "ttft_s": 2.66e-05}
        for op in ("first", "again", "restart", "all")
        for at, system in enumerate(systems)
    ]
    rows += [
        {"bench": "replay", "system": "kvstore+file", "policy": "lru", "capacity_bytes": size << 20, "hit_rate": 0.1}
        for size in (64, 96, 100, 112, 128, 129, 512, 1023, 1024)
    ]
    for picture in pictures_of(rows):
        figure = Figure(figsize=(picture.width, picture.height), layout="constrained")
        canvas = FigureCanvasAgg(figure)
        picture.draw(figure)
        canvas.draw()
        texts = [
            text
            for panel in figure.axes
            for text in (*panel.texts, *panel.get_xticklabels(), *panel.get_yticklabels())
            if text.get_text()
        ]
        assert texts
        places = {text.get_text() + str(at): text.get_window_extent() for at, text in enumerate(texts)}
        overlaps = [(a, b) for a, b in itertools.combinations(places, 2) if places[a].overlaps(places[b])]
        assert not overlaps, (picture.name, overlaps)
        assert not any("e-" in text.get_text() or "e+" in text.get_text() for text in texts)
