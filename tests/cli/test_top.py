"""``kvstore top``: the numbers between two scrapes, failing engines, and the display in 80 columns."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from rich.console import Console, Group

from kvstore.cli.top import Engine, engine_row, frame_of, miss_rows, parse, tier_rows
from tests.cli.in_process import run_here
from tests.project.scripts import load_script
from tests.project.tree import ROOT

SCRAPES = [path.read_text() for path in sorted((ROOT / "tests/cli/scrapes").glob("*.txt"))]
"""Consecutive pages of a real engine; scripts/make_top_picture.py --record makes them."""

ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\([A-Z0-9]|[=>])")


def page(seconds: float, engine: str = "0", **gauges: float) -> str:
    """Return an engine's page after this time at constant rates, with other values of gauges."""
    values = {
        'ready{tier="disk"}': 1, 'blocks{tier="disk"}': 1200, 'used_bytes{tier="disk"}': 3 << 30,
        'capacity_bytes{tier="disk"}': 4 << 30, 'jobs_in_flight{tier="disk"}': 3, 'waiting_blocks{tier="disk"}': 7,
        'lookups_total{result="hit",tier="disk"}': 75 * seconds,
        'lookups_total{result="miss",tier="disk"}': 25 * seconds,
        'loaded_bytes_total{tier="disk"}': seconds * (2 << 20), 'stored_bytes_total{tier="disk"}': seconds * (1 << 20),
        'removed_blocks_total{cause="evicted",tier="disk"}': 2 * seconds,
        'removed_blocks_total{cause="corrupt",tier="disk"}': 50 * seconds,
        'load_blocks_total{outcome="ok",tier="disk"}': 90 * seconds,
        'load_blocks_total{outcome="miss",tier="disk"}': 90 * seconds,
        'load_blocks_total{outcome="timeout",tier="disk"}': 1.5 * seconds,
        'store_blocks_total{outcome="shed",tier="disk"}': 20 * seconds,
        'load_seconds_bucket{le="0.001",tier="disk"}': 0, 'load_seconds_bucket{le="0.01",tier="disk"}': 50 * seconds,
        'load_seconds_bucket{le="0.1",tier="disk"}': 100 * seconds,
        'load_seconds_bucket{le="+Inf",tier="disk"}': 100 * seconds,
        'primary_slots{state="free"}': 25, 'primary_slots{state="ready"}': 70, 'primary_slots{state="writing"}': 5,
        'primary_slots{state="pinned"}': 40, 'primary_slots{state="abandoned"}': 0,
        'primary_bytes{pages="huge"}': 3 << 30, 'primary_bytes{pages="small"}': 1 << 30,
        'manager_lookups_total{result="hit"}': 50 * seconds, 'manager_lookups_total{result="pending"}': 10 * seconds,
        'manager_lookups_total{result="retry"}': 90 * seconds, 'manager_lookups_total{result="miss"}': 40 * seconds,
    }  # fmt: skip
    values |= {f'{name}{{tier="disk"}}': value for name, value in gauges.items()}
    lines = [f'vllm:kvstore_{name[:-1]},engine="{engine}",model_name="m"}} {value}' for name, value in values.items()]
    other = "# HELP python_info Python\n# TYPE python_info gauge\npython_info 1.0\nvllm:num_requests_running 1.0\n"
    return other + "\n".join(lines) + "\n"


def engine_of(*pages: tuple[float, str]) -> Engine:
    """Return an engine with these pages at these times."""
    engine = Engine("here")
    for at, text in pages:
        engine.add(parse(text, at)["0"])
    return engine


def test_causes_of_misses_are_those_of_the_last_minutes() -> None:
    """Each tier and cause has its blocks of five minutes and since the start, the most frequent first."""
    line = 'vllm:kvstore_missed_blocks_total{{tier="{}",cause="{}",engine="0",model_name="m"}} {}\n'

    def causes(gate: int, absent: int) -> str:
        counts = [("disk", "absent", absent), ("disk", "gate", gate), ("all", "unproven", 0)]
        return "".join(line.format(*count) for count in counts)

    engine = engine_of((100.0, causes(0, 900)), (300.0, causes(10, 900)), (500.0, causes(40, 905)))
    assert miss_rows([engine]) == [
        {"tier": "disk", "cause": "gate", "recent": "40", "total": "40"},
        {"tier": "disk", "cause": "absent", "recent": "5", "total": "905"},
    ]
    engine.add(parse(causes(41, 905), 650.0)["0"])
    assert [row["recent"] for row in miss_rows([engine])] == ["31", "5"]
    console = Console(file=io.StringIO(), width=80)
    console.print(Group(*frame_of([engine], {}, 80)))
    assert re.search(r"disk +gate +31 +41", console.file.getvalue())  # type: ignore[attr-defined]
    assert miss_rows([engine_of((100.0, page(10)))]) == []


class Pages:
    """An HTTP server on loopback that serves the pages in turn, and then repeats the last one."""

    def __init__(self, *pages: str, status: int = 200) -> None:
        answers = list(pages)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status if self.path == "/metrics" else 404)
                self.end_headers()
                self.wfile.write((answers.pop(0) if len(answers) > 1 else answers[0]).encode())

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Pages:
        Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_rates_are_those_between_two_samples() -> None:
    """Hits, bytes, latencies, evictions and failures per second; states and queues are the current ones."""
    engine = engine_of((100.0, page(10)), (104.0, page(14)))
    (row,) = tier_rows([engine])
    assert row == {
        "tier": "disk", "state": "ready", "hits": "75 %", "loaded": "2 MiB", "load_p50": "10 ms", "load_p99": "98.2 ms",
        "stored": "1 MiB", "store_p99": None, "breakers": "closed", "jobs": "3", "in_flight": None, "waiting": "7",
        "used": "3 GiB", "full": "75 %", "blocks": "1,200", "evicted": "2", "failed": "22",
    }  # fmt: skip
    assert engine_row(engine) == {
        "engine": "here", "requests": None, "lookups": "100", "found": "60 %", "slots": "100", "full": "75 %",
        "huge": "75 %", "evicted": None,
    }  # fmt: skip


@pytest.mark.parametrize("width", [80, 200])
def test_without_traffic_every_number_has_its_column(width: int) -> None:
    """The hit rate, and every other number that fits, has a column from the first scrape, with a dash as its value."""
    console = Console(width=width, file=io.StringIO())
    console.print(Group(*frame_of([engine_of((100.0, page(10)))], {}, width)))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"tier +state +hits.*\n *disk +ready +- ", shown), shown
    assert width == 80 or all(title in shown for title in ("lookups/s", "found", "load p50", "store p99", "failed/s"))


def test_unreported_contents_of_a_medium_are_dashes() -> None:
    """Zeros of a medium that reports neither its use nor a limit are unknown, those of an empty tier are numbers."""
    unreported = page(10, blocks=0, used_bytes=0, capacity_bytes=0)
    (row,) = tier_rows([engine_of((100.0, unreported))])
    assert (row["used"], row["full"], row["blocks"]) == (None, None, None)
    (row,) = tier_rows([engine_of((100.0, page(10, blocks=0, used_bytes=0)))])
    assert (row["used"], row["full"], row["blocks"]) == ("0 B", "0 %", "0")


def test_two_engines_fit_50_columns() -> None:
    """In a narrow terminal columns are left out, and no cell is broken over lines."""
    engines = []
    for name in ("127.0.0.1:8001", "127.0.0.1:8002"):
        engines.append(engine := Engine(name))
        for at, text in zip((100.0, 110.0), SCRAPES, strict=True):
            engine.add(parse(text, at)["0"])
    console = Console(width=50, file=io.StringIO())
    console.print(Group(*frame_of(engines, {}, 50)))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert sum(line.startswith("127.0.0.1:800") for line in lines) == 10
    assert len([line for line in lines if line.strip()]) == 13


def test_one_sample_has_states_and_no_rates() -> None:
    """No rates are shown before the second sample."""
    (row,) = tier_rows([engine_of((100.0, page(10)))])
    assert (row["state"], row["used"]) == ("ready", "3 GiB")
    assert (row["hits"], row["loaded"], row["load_p99"]) == (None, None, None)


def test_rates_are_those_of_the_last_ten_seconds() -> None:
    """Older samples are dropped; a restarted engine counts from zero."""
    engine = engine_of((0.0, page(0)), (100.0, page(100)), (105.0, page(100)), (110.0, page(100)), (115.0, page(100)))
    (row,) = tier_rows([engine])
    assert (row["loaded"], row["hits"]) == ("0 B", None)
    assert len(engine.samples) == 3
    (row,) = tier_rows([engine_of((0.0, page(100)), (2.0, page(1)))])
    assert row["loaded"] == "1 MiB"


@pytest.mark.parametrize(
    ("gauges", "state", "breakers"),
    [
        ({"ready": 0, "load_breaker_state": 2}, "not ready", "loads open"),
        ({"recovering": 1, "store_breaker_state": 1}, "recovering", "stores half open"),
        ({"ready": 0, "tier_dead": 1}, "dead", "closed"),
    ],
)
def test_states(gauges: dict[str, float], state: str, breakers: str) -> None:
    """A tier shows its worst state."""
    (row,) = tier_rows([engine_of((1.0, page(1, **gauges)))])
    assert (row["state"], row["breakers"]) == (state, breakers)


def test_two_engines_of_one_server_have_two_rows() -> None:
    """A server with two engines has two rows; an unreachable server is one line and does not affect the others."""
    with Pages(page(1)) as gone:
        pass
    with Pages(page(1) + page(1, "1"), page(2) + page(2, "1")) as server:
        done = run_here("top", server.address, gone.address, "--interval", "10ms")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{server.address}#0") == done.stdout.count(f"{server.address}#1") == 3
    assert f"{gone.address}: " in done.stdout and "refused" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("text", "status", "says"),
    [
        ("", 200, "no metrics of kvstore"),
        ("vllm:kvstore_blocks{tier=disk} what\n", 200, ""),
        (page(1, used_bytes=float("nan")), 200, "used_bytes is nan"),
        (page(1).replace('le="0.1"', 'le="x"'), 200, "'x'"),
        (page(1), 503, "503"),
    ],
)
def test_pages_without_an_engine_are_an_error(text: str, status: int, says: str) -> None:
    """A page of something else than an engine is one line and status 1."""
    with Pages(text, status=status) as server:
        done = run_here("top", f"http://{server.address}/metrics", "--interval", "10ms")
    assert done.returncode == 1
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"http://{server.address}/metrics: ") and says in line


@pytest.mark.parametrize(
    "arguments", [("ftp://x",), ("http://",), ("x:y",), ("--interval", "0s"), ("--interval", "2x")]
)
def test_invalid_arguments_are_refused_before_any_request(arguments: Sequence[str]) -> None:
    """Impossible arguments are refused with one line and status 2, before any request."""
    done = run_here("top", *arguments)
    assert (done.returncode, done.stdout) == (2, "")


def test_names_of_servers_cannot_rewrite_the_terminal() -> None:
    """Control characters in a label are shown as escapes."""
    with Pages(page(1).replace("disk", "di\x1b[2Jsk")) as server:
        done = run_here("top", server.address, "--interval", "10ms")
    assert "\x1b" not in done.stdout and "u001b" in done.stdout


def test_a_terminal_of_80_columns(tmp_path: Path) -> None:
    """Each frame fits; the second has rates; Ctrl-C ends with status 0 and restores the screen."""
    with Pages(*SCRAPES) as server, _terminal(80, 24) as (terminal, inside):
        arguments = [sys.executable, "-m", "kvstore", "top", server.address, "--interval", "100ms"]
        env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
        program = subprocess.Popen(
            arguments, stdin=inside, stdout=inside, stderr=inside, cwd=tmp_path,
            env=env | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}, start_new_session=True,
        )  # fmt: skip
        try:
            shown = b""
            while shown.count(b"kvstore top") < 5:
                assert program.poll() is None, shown
                shown += _output(terminal)
            program.send_signal(signal.SIGINT)
            while program.poll() is None:
                shown += _output(terminal)
            shown += _output(terminal)
        finally:
            program.kill()
            program.wait()
    assert program.returncode == 0
    text = shown.decode()
    assert text.rindex("\x1b[?1049l") > text.index("\x1b[?1049h"), "the screen of before"
    frames = [ESCAPES.sub("", frame).replace("\r", "") for frame in text.split("\x1b[H") if "kvstore top" in frame][:4]
    for frame in frames:
        assert max(map(len, frame.split("\n"))) <= 80
        assert len(frame.split("\n")) <= 24
        for tier in ("disk", "far"):
            assert re.search(rf"^{tier} +ready ", frame, re.MULTILINE), frame
            assert re.search(rf"^{tier} +closed ", frame, re.MULTILINE), frame
    assert re.search(r"^disk +ready +\d+ % +[\d.]+ [KM]iB +[\d.]+ [mu]s ", frames[-1], re.MULTILINE), frames[-1]
    assert "%" not in frames[0].split("state")[1].split("breakers")[0], "rates need two looks"


def test_problems_are_red_and_unreachable_engines_come_first() -> None:
    """A dead tier, an open breaker and failures are highlighted; nothing else is coloured."""
    ill = re.sub(r'(kvstore_(?:tier_dead|load_breaker_state)\{[^}]*tier="far"[^}]*\}) \S+', r"\1 2.0", SCRAPES[1])
    for text, red in ((SCRAPES[1], []), (ill, ["dead", "loads open"])):
        engine = Engine("a:1")
        engine.add(parse(SCRAPES[0], 1.0)["0"])
        engine.add(parse(text, 2.0)["0"])
        console = Console(width=100, force_terminal=True, color_system="standard", file=io.StringIO())
        console.print(Group(*frame_of([engine], {"b:2": "Connection refused"}, 100)))
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert ESCAPES.sub("", shown).startswith("b:2: Connection refused\n")
        assert re.findall(r"\x1b\[1;31m([^\x1b]+?) *\x1b", shown) == red


def test_the_picture_in_the_docs_is_that_of_the_scrapes() -> None:
    """The picture in the docs matches the scrapes; after a change, run scripts/make_top_picture.py."""
    script = load_script("make_top_picture")
    drawn = script.picture()
    assert script.PICTURE_FILE.read_text() == drawn
    assert "http" not in drawn.replace("http://www.w3.org", ""), "nothing is fetched from elsewhere"


def _output(terminal: int) -> bytes:
    """Return the available output of a terminal after at most 100 ms."""
    ready, _, _ = select.select([terminal], [], [], 0.1)
    return os.read(terminal, 65536) if ready else b""


@contextlib.contextmanager
def _terminal(columns: int, lines: int) -> Iterator[tuple[int, int]]:
    """Make a terminal; yields its outer and its inner end."""
    outer, inner = pty.openpty()
    try:
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        yield outer, inner
    finally:
        os.close(inner)
        os.close(outer)
