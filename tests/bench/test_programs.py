"""Every program in bench/ and examples/ ends, reports, and cleans up: by itself, after a killed run, and on SIGTERM."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.serving import kill_session, session_pids
from kvstore.testing import eventually
from tests.project.tree import ROOT

pytestmark = pytest.mark.program

WAIT_S = 120
SERVER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]])
print("is up", flush=True)
time.sleep(600)
"""
"""Replaces `vllm serve`: a process with a child that never answers."""

ANSWERING_SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()
        self.wfile.write(b'data: {"choices": [{"text": "w3 "}], "usage": {"prompt_tokens": 1}}\\n\\ndata: [DONE]\\n\\n')

    def log_message(self, *arguments):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
"""Replaces `vllm serve`: every answer is the same word."""

WITH_SERVER = """
import importlib, sys
from examples import serving
from bench import vllm_overhead

serving._serve_command = lambda model: [sys.executable, "-c", {server!r}, model]
vllm_overhead.make_tiny_llama = lambda path, shape: path
module = importlib.import_module(sys.argv.pop(1))
vllm_overhead._REST_S = module._REST_S = module._SETTLE_S = 0.0
sys.exit(module.main())
"""
"""Runs a benchmark of servers, by the name of its module, with another command than `vllm serve`."""

DIRECTORIES = ("density", "disk", "engine_thread", "hedge", "visibility")
"""Benchmarks that store in a directory, which a killed run leaves behind."""

CONVERSATIONS = ROOT / "tests/bench/conversations.json"
"""Five made conversations in tau-bench's format, of three calls each."""

PROGRAMS = {
    "bench/codec.py": "--quick --runs 1 --dtypes bf16",
    "bench/cuda_copy.py": "--quick --runs 1 --no-spin",
    "bench/data_plane.py": "--quick --runs 1 --sizes 2048",
    "bench/density.py": "--quick",
    "bench/disk.py": "--quick --systems kvstore-file --engines 1 4 --runs 1",
    "bench/engine_thread.py": "--quick --runs 1 --systems kvstore-file kvstore-file-thread fio",
    "bench/events.py": "--quick --steps 2",
    "bench/eviction.py": "--quick --kinds shift",
    "bench/fleet.py": "--quick",
    "bench/gate.py": "--quick --requests 2",
    "bench/gate_busy.py": "--requests 20",
    "bench/gpu.py": "--rehearse",
    "bench/hedge.py": "--quick",
    "bench/hints.py": "--requests 20",
    "bench/manager_vs_vllm.py": "--runs 1 --sizes 4096",
    "bench/peer.py": "--runs 1 --sizes 8192 --mib 16",
    "bench/redis.py": "--quick --sizes 128 --mib 1",
    "bench/s3.py": "--quick --only null --sizes 4 --mib 1",
    "bench/tenants.py": "--requests 20",
    "bench/visibility.py": "--quick",
    "bench/trajectories.py": f"{CONVERSATIONS} /dev/null",
    "bench/vllm_e2e.py": f"--quick --runs 1 --trajectories {CONVERSATIONS}",
    "bench/vllm_overhead.py": "--quick --runs 1",
    "bench/vllm_ttft.py": "--quick --runs 1",
    "examples/custom_backend.py": "",
    "examples/library.py": "",
    "examples/tiny_llama.py": "model",
    "examples/vllm_restart.py": "--runs 1 --layers 2 --hidden 192 --prompt-tokens 300",
}
"""Arguments with which each program is as short as possible."""

OUTPUT = {
    "bench/gpu.py": "| model-loses |     ok |",
    "bench/trajectories.py": "15 requests",
    "examples/custom_backend.py": "the same bytes: True",
    "examples/library.py": "8 ranks loaded 40 blocks; every byte is right.",
    "examples/tiny_llama.py": "model",
    "examples/vllm_restart.py": "vLLM fs tier and manager",
}
"""A part of the output of each program without --json; the others print a table."""

MODULES = {
    "bench/clients.py",
    "bench/common.py",
    "bench/kv_tensors.py",
    "bench/linked_memory.py",
    "examples/serving.py",
}
TESTED_ELSEWHERE = {
    "examples/prefill_decode.py": "tests/vllm/test_prefill_decode.py",
    "bench/generators.py": "tests/outside/check_generators.py",
    "bench/hicache.py": "tests/outside/check_peers.py",
    "bench/mooncake_ssd.py": "tests/outside/check_peers.py",
    "bench/peers.py": "tests/outside/check_peers.py",
}
ENGINES = {"bench/events.py", "bench/gpu.py", "bench/manager_vs_vllm.py", "examples/vllm_restart.py"}
"""Programs that start or import vLLM."""
PRELOADED = {"bench/events.py", "examples/vllm_restart.py"}
"""Programs with several engines, which import vLLM once."""
WITHOUT_ENGINES = {"bench/gate.py", "bench/vllm_e2e.py", "bench/vllm_overhead.py", "bench/vllm_ttft.py"}
"""Programs whose servers are replaced."""


def test_every_program_is_run() -> None:
    """Each module in bench/ and examples/ is run here or in the named test, or is no program."""
    found = {str(path.relative_to(ROOT)) for name in ("bench", "examples") for path in (ROOT / name).glob("*.py")}
    assert found == {*PROGRAMS, *MODULES, *TESTED_ELSEWHERE}
    for program, test in TESTED_ELSEWHERE.items():
        assert program in (ROOT / test).read_text()


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a directory that replaces /dev/shm for a program."""
    with tempfile.TemporaryDirectory(prefix="kvstore-test-", dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
def work() -> Iterator[Path]:
    """Return a program's directory, with a path short enough for vLLM's sockets."""
    with tempfile.TemporaryDirectory(prefix="kvstore-test-") as name:
        yield Path(name)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "program", [pytest.param(name, marks=pytest.mark.engine if name in ENGINES else ()) for name in PROGRAMS]
)
def test_a_program_ends(program: str, tmp_path: Path, work: Path, shared: Path) -> None:
    """A program ends with status 0, prints its results, and leaves no process and no file, even one of a killed run."""
    name = Path(program).stem
    report = tmp_path / "report.json"
    if name in DIRECTORIES:
        (work / f"bench-{name}.tmp" / "kvstore-file-engines" / "stale").mkdir(parents=True)
    command = [str(ROOT / program)]
    if program in PRELOADED:
        command = ["-m", "tests.vllm.preloaded", *command]
    elif program in WITHOUT_ENGINES:
        command = ["-c", WITH_SERVER.format(server=ANSWERING_SERVER), f"bench.{name}"]
    arguments = [*PROGRAMS[program].split(), *(["--json", str(report)] if program not in OUTPUT else [])]
    running = _start(work, *command, *arguments, shared=shared)
    try:
        out, errors = running.communicate(timeout=1100)
        assert running.returncode == 0, errors
        if program in OUTPUT:
            assert OUTPUT[program] in out
        else:
            rows = json.loads(report.read_text())["rows"]
            assert rows and out.count("\n|") >= len(rows)
        assert "Traceback" not in errors
        eventually(lambda: not _living(_has_environment(work)), what="the end of all processes")
        assert list(shared.iterdir()) == []
        if program == "examples/tiny_llama.py":
            shutil.rmtree(work / "model")  # Its result.
        # torch makes this directory when it is imported; all its programs share it.
        assert [path.name for path in work.iterdir() if not path.name.startswith("torchinductor_")] == []
    finally:
        _end(_has_environment(work))


def test_servers_of_a_benchmark_of_clients_end(tmp_path: Path) -> None:
    """bench/s3.py ends its server, prints its rows so far, and removes its files."""
    program = _start(tmp_path, str(ROOT / "bench/s3.py"), "--quick", "--only", "null")
    try:
        assert program.stderr is not None
        assert "aioboto3" in program.stderr.readline()
        program.terminate()
        out, _ = program.communicate(timeout=WAIT_S)
        assert "of_fastest_plain" in out
        assert program.returncode == 130
        assert session_pids(program.pid) == []
        assert list(tmp_path.iterdir()) == []
    finally:
        kill_session(program)


def test_engines_of_a_benchmark_end(tmp_path: Path) -> None:
    """bench/vllm_e2e.py ends its starting servers with all their processes, and removes their files."""

    def is_ours(pid: int) -> bool:
        return str(tmp_path) in Path(f"/proc/{pid}/cmdline").read_text()

    code = WITH_SERVER.format(server=SERVER)
    program = _start(tmp_path, "-c", code, "bench.vllm_e2e", "--quick", "--only", "restart", "--dir", str(tmp_path))
    try:
        deadline = time.monotonic() + WAIT_S
        while sum("is up" in log.read_text() for log in tmp_path.rglob("*.log")) < 3:
            assert program.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        # The program itself, three servers and their children.
        assert len(_living(is_ours)) == 7
        program.terminate()
        _, errors = program.communicate(timeout=WAIT_S)
        assert "interrupted" in errors
        assert program.returncode == 130
        assert _living(is_ours) == []
        assert list(tmp_path.iterdir()) == []
    finally:
        _end(is_ours)


def _start(temporary: Path, *arguments: str, shared: Path | None = None) -> subprocess.Popen[str]:
    """Start Python in a directory, which also has its temporary files; ``shared`` replaces /dev/shm, if allowed."""
    prefix = []
    if shared is not None:
        prefix = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--mount"]
        prefix += ["sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"', str(shared)]
        if subprocess.run([*prefix, "true"], stderr=subprocess.DEVNULL, check=False).returncode:
            prefix = []  # Neither root nor user namespaces.
    return subprocess.Popen(
        [*prefix, sys.executable, *arguments], cwd=temporary, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
    )  # fmt: skip


def _living(is_ours: Callable[[int], bool]) -> list[int]:
    """Return our processes, except zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            is_living = entry.name.isdigit() and (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
            if is_living and is_ours(int(entry.name)):
                found.append(int(entry.name))
        except OSError:  # The process has ended meanwhile.
            continue
    return found


def _has_environment(directory: Path) -> Callable[[int], bool]:
    """Return whether a process has the directory in its environment, like all processes of a started program."""
    return lambda pid: bytes(directory) in Path(f"/proc/{pid}/environ").read_bytes()


def _end(is_ours: Callable[[int], bool]) -> None:
    """End the processes left by a failed test."""
    for pid in _living(is_ours):
        os.kill(pid, signal.SIGKILL)


def test_the_demo_compares_with_vllms_own_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM's tier of the demo runs under vLLM's manager, and kvstore's tier under kvstore's."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    demo = importlib.import_module("vllm_restart")
    managers = {system: (demo.offloading_of(system, tmp_path) or {}).get("manager") for system in demo._SYSTEMS}
    assert managers == {"none": None, "kvstore": "kvstore", "vllm_fs": "vllm"}
