"""The example of the library without an engine."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.project.tree import ROOT


def test_example_of_the_library_runs() -> None:
    """Blocks stored by four ranks load on 1, 2, 4 and 8 after a restart, with neither torch nor vLLM loaded."""
    code = (
        "import runpy, sys; sys.argv = ['library.py']\n"
        "runpy.run_path('examples/library.py', run_name='__main__')\n"
        "assert not {'torch', 'vllm'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("every byte is right") == 4
