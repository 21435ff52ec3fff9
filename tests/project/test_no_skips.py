"""In CI a skipped test does not pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.tree import ROOT

pytestmark = pytest.mark.program

IN_TEST = "import pytest\ndef test_it():\n    pytest.skip('no such device')\n"
BY_MARK = "import pytest\n@pytest.mark.skipif(True, reason='no such device')\ndef test_it():\n    pass\n"
BY_MODULE = "import pytest\npytest.importorskip('no_such_module', reason='no such device')\ndef test_it():\n    pass\n"


@pytest.mark.parametrize("code", [IN_TEST, BY_MARK, BY_MODULE], ids=["in_test", "by_mark", "by_module"])
@pytest.mark.parametrize("workers", ["0", "1"])
def test_skips_fail(tmp_path: Path, code: str, workers: str) -> None:
    """A test that skips itself passes by default and fails with ``--no-skips``, with the reason in the output."""
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(code)

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "no:cacheprovider", "-n", workers, *options]
        env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # Other plugins are slow to load, and not needed.
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)

    assert run().returncode in (0, 5)  # 5: no test was collected.
    strict = run("--no-skips")
    assert strict.returncode not in (0, 5), strict.stdout
    assert "--no-skips allows none" in strict.stdout
    assert "no such device" in strict.stdout
