"""Resources that a test module leaves open fail that module."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.tree import ROOT

pytestmark = pytest.mark.repository

LEAKS = """
import socket
class Owner:
    pass
def test_leaking():
    owner = Owner()
    owner.itself, owner.socket = owner, socket.socket()  # Only the garbage collector finds it.
"""


def test_an_open_socket_fails_the_module_that_left_it(tmp_path: Path) -> None:
    """Its last test has an error; the next module passes, even if it collects garbage."""
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (tmp_path / "test_first.py").write_text(LEAKS)
    (tmp_path / "test_second.py").write_text("import gc\ndef test_good():\n    gc.collect()\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # Other plugins are slow to load, and not needed.
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert "2 passed, 1 error" in done.stdout, done.stdout
    assert "ERROR test_first.py::test_leaking" in done.stdout and "unclosed <socket" in done.stdout
