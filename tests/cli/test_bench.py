"""``kvstore-bench`` in user scenarios, on real files and servers."""

from __future__ import annotations

import csv
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvstore import LookupResult, Namespace, TransferJob, open_tier
from kvstore.cli.bench import run as run_command
from kvstore.cli.bench.histogram import Latencies
from kvstore.cli.bench.target import Target
from kvstore.cli.holdings.medium import Medium
from kvstore.cli.tier_argument import parse_tier
from kvstore.testing import eventually
from tests.cli.cli import report_of, run_program
from tests.cli.in_process import run_here
from tests.disk.placed import placed
from tests.project.tree import ROOT
from tests.redis.servers import cli, plain, running

SMALL = ("-b", "64KiB", "--ops", "30", "--warmup", "0s", "--working-set", "8MiB")
ESCAPE = "\x1b"


def tier(backend: str, path: Path | None = None, **options: Any) -> str:
    """Return the JSON of a tier."""
    where = {} if path is None else {"path": str(path)}
    reserve = {} if backend == "memory" else {"reserve": 0}
    return json.dumps({"type": backend, "capacity": "64MiB", **where, **reserve, **options})


@pytest.mark.program
def test_without_a_command_it_measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``kvstore-bench`` alone runs a mixed test in a temporary directory: a verified table of 80 columns, no files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(run_command, "_RUN", run_command._QUICK)
    done = run_here("bench")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert ESCAPE not in done.stdout
    loads = [line for line in lines if re.match(r"kvstore-file +process +load", line)]
    assert len(loads) == 2 and all(line.endswith("yes") for line in loads)
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("io", ["thread", "process"])
@pytest.mark.parametrize("backend", ["file", "memory"])
def test_run_reports_json(tmp_path: Path, backend: str, io: str) -> None:
    """``--json`` gives one object with the requested values, every block verified, and the target is removed."""
    path = None if backend == "memory" else tmp_path / "kv"
    done = run_here("bench", "run", "-t", tier(backend, path), "--io", io, "--json", "--verify", "all", *SMALL)
    assert done.returncode == 0, done.stderr
    report = report_of(done)
    assert report["schema"] == 1 and report["complete"] and report["command"] == "run"
    assert {"kvstore", "git", "python", "system", "processor", "cores", "targets"} <= set(report["environment"])
    rows = {(row["system"], row["op"]): row for row in report["rows"]}
    own = f"kvstore-{backend}"
    assert {(own, "store"), (own, "load"), (own, "lookup")} <= set(rows)
    assert (("raw", "load") in rows) == (backend != "memory")
    load = rows[own, "load"]
    assert load["verified"] is True and load["verified_blocks"] > 100 and load["host"] == io
    assert load["gb_per_s"] > 0 and load["cpu_s_per_gb"] > 0 and load["errors"] == {}
    assert load["cache"] in ((None,) if backend == "memory" else ("direct", "hot"))
    names = ("p50", "p90", "p99", "p99_9", "max")
    assert sorted(load[f"latency_s_{name}"] for name in names) == [load[f"latency_s_{name}"] for name in names]
    assert Latencies.from_text(load["latency_hdr"]).percentile(99) == load["latency_s_p99"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.program
def test_baselines_stand_beside(tmp_path: Path) -> None:
    """With fio the report has the share of the drive's speed; without fio the run is refused before it starts."""
    done = run_here("bench", "run", "-t", tier("file", tmp_path / "kv"), "--baseline", "fio,raw", "--json", "--quick",
                    "-b", "128KiB", "--ops", "20", "--duration", "500ms")  # fmt: skip
    if shutil.which("fio") is None:
        assert done.returncode == 2 and "needs fio" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        rows = report_of(done)["rows"]
        assert {row["system"] for row in rows} == {"kvstore-file", "raw", "fio"}
        assert max(row["of_device"] for row in rows if row["op"] == "load") >= 1
    assert list(tmp_path.iterdir()) == []


def test_report_names_a_tier_without_completed_operations(tmp_path: Path) -> None:
    """A tier without a row is named, not only omitted."""
    done = run_here("bench", "run", "-t", tier("file", tmp_path / "kv"), "--baseline", "none", "--json", "--quick",
                    "-b", "128KiB", "--warmup", "100ms", "--duration", "1us")  # fmt: skip
    report = report_of(done)
    assert report["rows"] or "kvstore-file: no job ended" in " ".join(report["notes"])


@pytest.mark.engine
def test_vllm_fs_and_fio_beside_a_file_tier(tmp_path: Path) -> None:
    """One JSON object has kvstore's file tier, vLLM's fs tier and fio, and no vLLM log output."""
    baseline = "vllm-fs,fio" if shutil.which("fio") else "vllm-fs,raw"
    done = run_program("bench", "run", "-t", tier("file", tmp_path / "kv"), "--baseline", baseline, "--json", "--quick",
                       "-b", "128KiB", timeout_s=110)  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = report_of(done)["rows"]
    assert {row["system"] for row in rows} == {"kvstore-file", *baseline.split(",")}
    assert all(row["verified"] for row in rows if row["system"] != "fio")


def test_sweep_covers_all_combinations(tmp_path: Path) -> None:
    """A sweep has a row for each block size, number of jobs and operation, which the table distinguishes."""
    done = run_here("bench", "sweep", "-t", tier("file", tmp_path / "kv"), "-b", "64KiB,256KiB", "-j", "1,2", "--ops",
                    "10", "--warmup", "0s", "--working-set", "8MiB", "--baseline", "none", "--out",
                    str(tmp_path / "sweep.json"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    found = {(row["block_bytes"], row["jobs"], row["op"]) for row in rows}
    assert found == {(b, j, op) for b in (65536, 262144) for j in (1, 2) for op in ("store", "load", "lookup")}
    assert "jobs" in done.stdout.splitlines()[1]


def test_tiers_side_by_side(tmp_path: Path) -> None:
    """Each tier has its own rows, even for the same backend; repeats become one row."""
    given = [tier("file", tmp_path / "a"), tier("file", tmp_path / "b"), tier("memory", label="ram")]
    tiers = [word for one in given for word in ("-t", one)]
    done = run_here("bench", "run", *tiers, "--runs", "2", "--baseline", "none", "--json", *SMALL)
    assert done.returncode == 0, done.stderr
    rows = report_of(done)["rows"]
    systems = ["kvstore-file-1", "kvstore-file-2", "kvstore-ram"]
    assert [(row["system"], row["op"]) for row in rows] == [
        (s, op) for s in systems for op in ("store", "load", "lookup")
    ]
    assert all(row["runs"] == 2 and row["verified"] for row in rows)
    jobs = {system: sum(row["latencies"] for row in rows if row["system"] == system and row["op"] != "lookup")
            for system in systems}  # fmt: skip
    assert set(jobs.values()) == {60}  # Sum of both runs.


@pytest.mark.program
def test_open_loop_spin_and_cold(tmp_path: Path) -> None:
    """Rate, busy thread and cold reads are applied, and each row reports them."""
    done = run_here("bench", "run", "-t", tier("file", tmp_path / "kv"), "--rate", "50", "--spin", "--cold", "--mix",
                    "load", "--duration", "1500ms", "-b", "64KiB", "--working-set", "8MiB", "--json", "--warmup", "0s",
                    "--hit-rate", "0.5", "--payload", f"file:{__file__}")  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = report_of(done)["rows"]
    assert all(row["rate"] == 50 and row["spin"] and row["spin_rate"] > 0 for row in rows)
    assert all(row["cache"] in ("direct", "dropped") and row["payload"] == "file" for row in rows)
    # At most 75 jobs are due in 1.5 s, however many are possible.
    assert all(row["latencies"] <= 76 for row in rows)
    assert all(0.2 < row["hit_rate"] < 0.8 for row in rows if row["op"] == "lookup")


def test_cold_without_direct_io_loads_each_block_once(tmp_path: Path) -> None:
    """Without direct I/O the page cache is dropped and each block is loaded once, as the row reports."""
    given = tier("file", tmp_path / "kv", direct="off")
    done = run_here("bench", "run", "-t", given, "-b", "64KiB", "--cold", "--mix", "load", "--working-set", "8MiB",
                    "--baseline", "none", "--json", "--duration", "30s")  # fmt: skip
    report = report_of(done)
    load = next(row for row in report["rows"] if row["op"] == "load")
    assert load["cache"] == "dropped"
    assert load["latencies"] == 8  # Jobs of 1 MiB.
    assert "once (--cold)" in report["notes"][0]


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no file system in memory")
def test_memory_is_not_called_cold(tmp_path: Path) -> None:
    """A file system in memory is neither cold nor uncached, even if the kernel allows direct I/O there."""
    path = Path("/dev/shm") / f"kvstore-test-{os.getpid()}"
    done = run_here("bench", "run", "-t", tier("file", path), "--cold", "--json", *SMALL)
    report = report_of(done)
    assert {row["cache"] for row in report["rows"]} == {None}
    assert any("in memory" in note for note in report["notes"])
    assert not path.exists()


def test_the_working_set_fits_the_tier(tmp_path: Path) -> None:
    """In a small tier fewer blocks are stored in advance, with a message, so that all loaded blocks are present."""
    done = run_here("bench", "run", "-t", tier("file", tmp_path / "kv", capacity="32MiB"), "-b", "64KiB", "--ops", "40",
                    "--baseline", "none", "--json")  # fmt: skip
    report = report_of(done)
    assert "The working set is" in report["notes"][0]
    assert all(row["hit_rate"] == 1 for row in report["rows"] if row["op"] == "lookup")


@pytest.mark.program
def test_a_tier_that_fails_is_reported(tmp_path: Path) -> None:
    """If a server fails, the report has status 1, the cause, and the measurements so far."""
    with running(plain("redis", tmp_path)) as (server,):
        url = f"{server.url}?ttl=60&timeout=10&connect_timeout=10&store_timeout=20&load_timeout=20"
        command = [sys.executable, "-m", "kvstore", "bench", "run", "-t", url, "--reuse", "-b", "64KiB", "-d", "2s",
                   "--working-set", "8MiB", "--json"]  # fmt: skip
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
            try:
                # More blocks than the working set: the measurement is running.
                eventually(lambda: int(cli(server, "DBSIZE")) > 160, timeout_s=60)
                server.kill()
                out, err = program.communicate(timeout=90)
            finally:
                program.kill()
    assert program.returncode == 1, err
    report = json.loads(out)
    errors = {cause for row in report["rows"] for cause in row["errors"]}
    assert errors & {"io_error", "timeout"}
    assert report["rows"][0]["last_error"]
    assert "Errors: " in err


def test_bench_leaves_existing_files_alone(tmp_path: Path) -> None:
    """A non-empty directory is refused; with --reuse it is used, and everything except our blocks stays."""
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "mine.txt").write_text("mine")
    given = tier("file", tmp_path / "kv")
    for command in ("run", "verify"):
        done = run_here("bench", command, "-t", given)
        assert done.returncode == 2
        assert "--reuse" in done.stderr and done.stdout == ""
    assert [path.name for path in (tmp_path / "kv").iterdir()] == ["mine.txt"]
    done = run_here("bench", "run", "-t", given, "--reuse", *SMALL)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kv" / "mine.txt").read_text() == "mine"
    with Medium(parse_tier(given)) as holdings:
        assert [list(holdings.blocks(namespace)) for namespace in holdings.namespaces()] == [[]]
    assert list((tmp_path / "kv").glob(".kvstore-bench*")) == []


@pytest.mark.parametrize("is_there", [True, False])
def test_an_engine_that_starts_meanwhile_keeps_its_files(tmp_path: Path, is_there: bool) -> None:
    """A measurement removes only its own files, even in a directory that it made or found empty."""
    path = tmp_path / "kv"
    if is_there:
        path.mkdir(mode=0o700)
    given = parse_tier(tier("file", path))
    primary = memoryview(bytearray(4096))
    with Target(given) as target:
        assert target.directory is not None and path in target.directory.parents
        with closing(open_tier(given.as_config(), primary=primary, slot_bytes=4096, namespace=Namespace({}))) as engine:
            engine.submit_store(TransferJob(1, keys=[b"key"], slots=[0]))
            assert engine.drain(10)
            target.renew()
    with closing(open_tier(given.as_config(), primary=primary, slot_bytes=4096, namespace=Namespace({}))) as engine:
        assert engine.wait_recovered(10)
        assert engine.lookup(b"key") is LookupResult.HIT
    assert list(path.glob(".kvstore-bench*")) == []


def test_a_server_is_used_only_if_it_may_be(tmp_path: Path) -> None:
    """Redis needs --reuse; our blocks are removed at the end, foreign keys stay, and no output has the password."""
    with running(plain("redis", tmp_path)) as (server,):
        cli(server, "SET", "foreign", "1")
        cli(server, "CONFIG", "SET", "requirepass", "hunter2")
        url = server.url.replace("redis://", "redis://:hunter2@")
        refused = run_here("bench", "run", "-t", url)
        assert refused.returncode == 2 and "--reuse" in refused.stderr
        done = run_here("bench", "run", "-t", url, "--reuse", "--json", *SMALL)
        assert done.returncode == 0, done.stderr
        rows = report_of(done)["rows"]
        assert {row["op"] for row in rows} == {"store", "load", "lookup"}
        assert all(row["verified"] for row in rows)
        assert "hunter2" not in done.stdout + done.stderr + refused.stderr
        doctor = run_here("bench", "doctor", "-t", url)
        assert "answers" in doctor.stdout and "hunter2" not in doctor.stdout
        keys = cli_with_password(server, "KEYS", "*")
        assert keys.split() == ["foreign"]


def cli_with_password(server: Any, *command: str) -> str:
    """Run a command on the server with its new password."""
    return cli(server, "-a", "hunter2", *command)


def test_a_flipped_bit_is_named(tmp_path: Path) -> None:
    """A flipped bit in a stored block gives exit status 3 and the block's name; without it the status is 0."""
    given = tier("file", tmp_path / "kv")
    common = ("-t", given, "-b", "64KiB", "--bytes", "4MiB")
    done = run_here("bench", "verify", *common, "--keep")
    assert done.returncode == 0 and "64 loaded" in done.stdout and "0 wrong" in done.stdout, done.stderr
    _flip_a_bit(tmp_path / "kv")
    done = run_here("bench", "verify", *common, "--reuse", "--keep", "--json")
    assert done.returncode == 3
    wrong = report_of(done)["wrong"]
    assert len(wrong) == 1
    assert f"WRONG: block {wrong[0]['key']}" in done.stderr
    # The damaged block has been set aside and is stored again.
    assert run_here("bench", "verify", *common, "--reuse").returncode == 0


def _flip_a_bit(path: Path) -> None:
    """Flip a bit of the payload in the first slot."""
    with next(path.rglob("000000.seg")).open("r+b") as opened:
        opened.seek(4096 + 5000)
        byte = opened.read(1)
        opened.seek(4096 + 5000)
        opened.write(bytes([byte[0] ^ 1]))


def test_another_seed_is_another_namespace(tmp_path: Path) -> None:
    """Blocks of another seed are neither found nor reported as damaged."""
    given = tier("file", tmp_path / "kv")
    assert run_here("bench", "verify", "-t", given, "--bytes", "4MiB", "--keep").returncode == 0
    done = run_here("bench", "verify", "-t", given, "--bytes", "4MiB", "--reuse", "--seed", "2")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("backend", ["memory", "file"])
def test_verify_leaves_nothing(tmp_path: Path, backend: str) -> None:
    """Without --keep, stored blocks are removed at the end."""
    path = None if backend == "memory" else tmp_path / "kv"
    assert run_here("bench", "verify", "-t", tier(backend, path), "--bytes", "4MiB").returncode == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "-t", '{"type": "fiel"}'], "Did you mean 'file'?"),
        (["run", "-b", "100"], "multiple of 4096"),
        (["run", "-b", "0"], "--block-size"),
        (["run", "-b", "900TiB"], "--block-size"),
        (["run", "--working-set", "900TiB"], "working set"),
        (["run", "--blocks-per-job", "0"], "--blocks-per-job"),
        (["run", "--hit-rate", "nan"], "--hit-rate"),
        (["run", "--rate", "inf"], "--rate"),
        (["sweep", "-b", "128KiB,5"], "--block-size"),
        (["verify", "-b", "0"], "--block-size"),
        (["verify", "--bytes", "900TiB"], "at most"),
        (["verify", "--bytes", "8GiB"], "--bytes"),
        (["replay", "--dry", "--requests", "999999999999"], "--requests"),
        (["replay", "--dry", "--requests", "20", "--speed", "0"], "--speed"),
        (["replay", "--dry", "--requests", "20", "--prefill", "nan"], "--prefill"),
        (["replay", "--dry", "--requests", "20", "--bytes-per-token", "0"], "--bytes-per-token"),
        (["replay", "--requests", "20"], "--cpu"),
        (["run", "-b", "many"], "--block-size: 'many' is not a valid size"),
        (["run", "--working-set", "much"], "--working-set: 'much' is not a valid size"),
        (["run", "--warmup", "soon"], "--warmup: 'soon' is not a valid duration"),
        (["run", "--out", "/no/such/dir/report.json"], "'/no/such/dir' does not exist"),
        (["verify", "--out", "/"], "which is a directory"),
        (["verify", "--bytes", "1X"], "--bytes: '1X' is not a valid size"),
        (["doctor", "--region", "large"], "--region: 'large' is not a valid size"),
        (["replay", "/no/such.jsonl"], "can't be read"),
        (["replay", "--cpu", "lots"], "--cpu: 'lots' is not a valid size"),
        (["replay", "--save-trace", "/no/such/dir/trace.jsonl"], "does not exist"),
        (["run", "-j", "0"], "--jobs is 0"),
        (["run", "-j", "x"], "--jobs has 'x'"),
        (["run", "--mix", "delete"], "--mix is 'delete'"),
        (["run", "--mix", "store=-1,load=2"], "--mix is"),
        (["run", "--hit-rate", "2"], "--hit-rate is 2.0"),
        (["run", "--baseline", "foi"], "Did you mean 'fio'?"),
        (["run", "-t", "memory", "--baseline", "raw"], "not on a local drive"),
        (["run", "--payload", "zeros"], "--payload is 'zeros'"),
        (["run", "--payload", "file:/no/such"], "can't be read"),
        (["run", "--verify", "some"], "--verify is 'some'"),
        (["run", "--io", "fiber"], "--io is 'fiber'"),
        (["run", "--runs", "0"], "--runs is 0"),
        (["run", "--duration", "0s"], "--duration is 0.0"),
        (["run", "-t", "file:///no/such/dir?capacity=1GiB"], "can't be made"),
        (["plot", "/no/such.json"], "can't be read"),
        (["run", "--no-such-option"], "No such option"),
    ],
)
def test_bad_arguments_are_refused_in_words(arguments: list[str], said: str) -> None:
    """Status 2, a line on stderr that names the mistake, and nothing on stdout; nothing large is allocated."""
    done = run_here("bench", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("warmup", ["0s", "60s"])
def test_interrupted_bench_prints_a_partial_report(tmp_path: Path, warmup: str) -> None:
    """Ctrl-C ends a measurement with a partial report, exit status 130 and nothing left behind."""
    command = [sys.executable, "-m", "kvstore", "bench", "run", "--json", "-d", "60s", "-b", "64KiB", "--working-set",
               "4MiB", "--warmup", warmup]  # fmt: skip
    env = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        try:
            # More blocks than the working set: the measurement is running.
            eventually(lambda: len(placed(tmp_path)) > 128, timeout_s=60)
            program.send_signal(signal.SIGINT)
            out, err = program.communicate(timeout=60)
        finally:
            program.kill()
    assert program.returncode == 130, err
    report = json.loads(out)
    assert (report["complete"], report["notes"]) == (False, [])
    if warmup == "0s":
        assert [row["op"] for row in report["rows"]][:1] == ["store"]
        assert report["rows"][0]["gb_per_s"] > 0
    else:
        assert report["rows"] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.program
def test_progress_is_for_terminals_only(tmp_path: Path) -> None:
    """On a terminal stderr shows rate, p99 and hits during the run; stdout has the same table as otherwise."""
    mine, theirs = pty.openpty()
    command = [sys.executable, "-m", "kvstore", "bench", "run", "-t", tier("file", tmp_path / "kv"), "-b", "64KiB",
               "--duration", "2s", "--baseline", "none", "--working-set", "8MiB"]  # fmt: skip
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
    env |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "120"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=theirs, text=True) as program:
        os.close(theirs)
        seen = bytearray()
        try:
            while chunk := os.read(mine, 65536):
                seen += chunk
        except OSError:
            pass  # EIO: the other side has closed.
        out, _ = program.communicate(timeout=60)
    os.close(mine)
    assert program.returncode == 0, seen
    text = seen.decode(errors="replace")
    assert re.search(r"kvstore-file  hits 100%  load \d+\.\d\d GB/s, p99 \d", text), text
    assert ESCAPE not in out
    assert "kvstore-file" in out


def test_missing_typer_error_names_the_package_to_install(tmp_path: Path) -> None:
    """Without typer the command's error names the package to install, and kvstore can still be imported."""
    code = (
        "import sys; sys.modules['typer'] = None\n"
        "import kvstore, kvstore.cli\n"
        "sys.argv = ['kvstore-bench']; kvstore.cli.bench_main()"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "vllm-kvstore[cli]" in done.stderr


def test_options_come_from_a_file_and_rows_go_into_one(tmp_path: Path) -> None:
    """The command line overrides the file; an unknown option in the file is refused; CSV has one line per row."""
    file, rows = tmp_path / "bench.toml", tmp_path / "rows.csv"
    file.write_text(
        'tier = {type = "memory", capacity = "64MiB"}\nblock-size = ["64KiB", "128KiB"]\nquick = true\nruns = 9\n'
        'baseline = "none"\nops = 20\nworking-set = "4MiB"\n'
    )
    done = run_here("bench", "run", "--config", str(file), "--runs", "1", "--json", "--csv", str(rows))
    report = report_of(done)
    assert sorted({row["block_bytes"] for row in report["rows"]}) == [64 << 10, 128 << 10]
    assert report["parameters"]["runs"] == 1
    with rows.open(newline="") as written:
        found = list(csv.DictReader(written))
    assert [int(row["block_bytes"]) for row in found] == [row["block_bytes"] for row in report["rows"]]
    file.write_text("blocksize = 1\n")
    done = run_here("bench", "run", "--config", str(file))
    assert (done.returncode, "Did you mean 'block-size'" in done.stderr) == (2, True)
