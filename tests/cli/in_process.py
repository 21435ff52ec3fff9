"""The command ``kvstore`` run in this process: its output and exit status without starting an interpreter."""

from __future__ import annotations

import contextlib
import io
import subprocess
from unittest import mock

from kvstore.cli.app import run_kvstore


def run_here(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``kvstore`` with these arguments and simulated pipes, 80 columns wide unless ``COLUMNS`` is given."""
    out, err = io.StringIO(), io.StringIO()
    status: object = 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        # Variables that the command sets end with it, too.
        mock.patch.dict("os.environ", {"COLUMNS": "80", "KVSTORE_YES": "1"} | env),
    ):
        try:
            run_kvstore(arguments)
        except SystemExit as ended:
            status = ended.code
    assert isinstance(status, int)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())
