"""Tests that depend on vLLM's internals, with each version of vLLM besides the installed one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.engines import ROOT
from tests.vllm.versions import INSTALLED, VERSIONS, environment, is_there

pytestmark = [pytest.mark.engine, pytest.mark.walk]

TIMEOUT_S = 1200
FILES = {
    "test_lineage.py": 9,
    "test_sessions.py": 4,
    "test_multi_connector.py": 6,
    "test_reported_states.py::test_block_lost_between_promise_and_load": 2,
    "test_reported_states.py::test_ends_after_a_preemption_store_no_block_of_another": 1,
    "test_reported_states.py::test_released_windows_are_not_stored_at_an_end": 1,
}
"""Number of tests in each file."""


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("version", [version for version in VERSIONS if version != INSTALLED])
def test_each_version_passes_the_tests_of_internals(version: str, tmp_path: Path) -> None:
    """They also run with the installed version."""
    if not is_there(version):
        pytest.skip(f"vLLM {version} is not here: scripts/vllm_versions.sh makes it, and needs a package index")
    command = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *(f"tests/vllm/{name}" for name in FILES)]
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
    assert f"{sum(FILES.values())} passed" in run.stdout
