"""No deadlock: a request whose blocks do not fit does not stop requests that hold blocks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.engines import ROOT
from tests.vllm.versions import VERSIONS, environment, is_there

pytestmark = [pytest.mark.vllm, pytest.mark.walk]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("version", VERSIONS)
def test_requests_that_hold_blocks_go_on(version: str, policy: str, tmp_path: Path) -> None:
    """The two requests with loaded blocks are answered first, then the one that needs their blocks."""
    if not is_there(version):
        pytest.skip(f"vLLM {version} is not here: scripts/vllm_versions.sh makes it, and needs a package index")
    child = subprocess.run(
        [sys.executable, "-m", "tests.vllm.waiting_order", "--policy", policy, "--directory", str(tmp_path)],
        cwd=ROOT,
        env=environment(version, tmp_path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    answered = json.loads(child.stdout.splitlines()[-1])
    assert sorted(answered[:2]) == ["B", "C"]
    assert answered[2:] == ["A"]
