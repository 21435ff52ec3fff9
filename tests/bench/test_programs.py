"""Programs in bench/ clean up when SIGTERM ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.project.tree import ROOT

WAIT_S = 120
SERVER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]])
print("is up", flush=True)
time.sleep(600)
"""
"""Replaces `vllm serve`: a process with a child that never answers."""

E2E = f"""
import sys
from examples import serving
from bench import vllm_e2e, vllm_overhead

serving._serve_command = lambda model: [sys.executable, "-c", {SERVER!r}, model]
vllm_overhead.make_tiny_llama = lambda path, shape: path
sys.exit(vllm_e2e.main())
"""


def test_servers_of_a_benchmark_of_clients_end(tmp_path: Path) -> None:
    """bench/s3.py ends its server, prints its rows so far, and removes its files."""
    program = _start(tmp_path, str(ROOT / "bench/s3.py"), "--quick", "--only", "null")
    try:
        assert program.stderr is not None
        assert "aioboto3" in program.stderr.readline()
        program.terminate()
        out, _ = program.communicate(timeout=WAIT_S)
        assert "of_fastest_plain" in out
        assert _living(lambda pid: os.getsid(pid) == program.pid) == []
        assert list(tmp_path.iterdir()) == []
    finally:
        _end(lambda pid: os.getsid(pid) == program.pid)


def test_engines_of_a_benchmark_end(tmp_path: Path) -> None:
    """bench/vllm_e2e.py ends its starting servers with all their processes, and removes their files."""

    def is_ours(pid: int) -> bool:
        return str(tmp_path) in Path(f"/proc/{pid}/cmdline").read_text()

    program = _start(tmp_path, "-c", E2E, "--quick", "--only", "restart", "--dir", str(tmp_path))
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
        assert _living(is_ours) == []
        assert list(tmp_path.iterdir()) == []
    finally:
        _end(is_ours)


def _start(temporary: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=temporary, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
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


def _end(is_ours: Callable[[int], bool]) -> None:
    """End the processes left by a failed test."""
    for pid in _living(is_ours):
        os.kill(pid, signal.SIGKILL)
