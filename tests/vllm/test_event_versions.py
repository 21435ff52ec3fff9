"""Payloads of events with the tracker and the connector of each version of vLLM, besides the installed one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.engines import ROOT
from tests.vllm.versions import INSTALLED, VERSIONS, environment, is_there

pytestmark = [pytest.mark.engine, pytest.mark.walk]

TIMEOUT_S = 1200


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("version", [version for version in VERSIONS if version != INSTALLED])
def test_payloads_of_each_version(version: str, tmp_path: Path) -> None:
    """The tests of lineage, which also run with the installed version."""
    if not is_there(version):
        pytest.skip(f"vLLM {version} is not here: scripts/vllm_versions.sh makes it, and needs a package index")
    command = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/vllm/test_lineage.py"]
    run = subprocess.run(
        [sys.executable, *command, f"--basetemp={tmp_path / 'tests'}"],
        cwd=ROOT,
        env=environment(version, tmp_path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-8000:]
    assert "9 passed" in run.stdout
