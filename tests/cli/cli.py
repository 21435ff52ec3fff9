"""The command line tools in tests: run in this process, or as a separate program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.project.tree import ROOT


def run_program(*arguments: str, timeout_s: float = 90, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m kvstore`` with these arguments, its output in pipes."""
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    return subprocess.run(
        [sys.executable, "-m", "kvstore", *arguments],
        env=environment | {"PYTHONPATH": str(ROOT), "KVSTORE_YES": "1"} | env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def report_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the one JSON object on the stdout of a program."""
    report = json.loads(done.stdout)
    assert isinstance(report, dict)
    return report
