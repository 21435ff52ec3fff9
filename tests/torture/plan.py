"""Plans for writer processes: see ``tests.torture.writers``."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.project.tree import ROOT


def run_plan(**plan: Any) -> dict[str, Any]:
    """Run writer processes and return their report."""
    command = [sys.executable, "-m", "tests.torture.writers", json.dumps(plan)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    report["stderr"] = done.stderr
    return report
